// SPDX-License-Identifier: Apache-2.0
#include <mpi.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <mutex>
#include <thread>

#include "libddp/launch/mpi_wire.h"
#include "tests/support/launch.h"

namespace ddp::testing {
namespace {

bool Usable() {
  int initialized = 0;
  int finalized = 0;
  MPI_Initialized(&initialized);
  MPI_Finalized(&finalized);
  return initialized != 0 && finalized == 0;
}

int Number(const char* variable, int otherwise) {
  const char* text = std::getenv(variable);
  return text == nullptr ? otherwise : std::atoi(text);
}

bool started = false;

}  // namespace

bool UnderMpi() { return std::getenv("OMPI_COMM_WORLD_SIZE") != nullptr; }

int MpiRank() { return Number("OMPI_COMM_WORLD_RANK", 0); }

int MpiSize() { return Number("OMPI_COMM_WORLD_SIZE", 1); }

void StartMpi() {
  if (Usable()) return;
  // The tests call MPI too, while a thread of the library may be there.
  int provided = 0;
  MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided);
  started = true;
}

void FinishMpi() {
  if (started && Usable()) MPI_Finalize();
}

// As the library does, in MPI by one thread at a time: with two of them Open MPI 4.1 seems to lose a message now and
// then.
void MpiBarrier() {
  MPI_Request request = MPI_REQUEST_NULL;
  {
    const std::lock_guard<std::mutex> lock(MpiMutex());
    MPI_Ibarrier(MPI_COMM_WORLD, &request);
  }
  for (int done = 0; done == 0; std::this_thread::sleep_for(std::chrono::microseconds(100))) {
    const std::lock_guard<std::mutex> lock(MpiMutex());
    if (MPI_Test(&request, &done, MPI_STATUS_IGNORE) != MPI_SUCCESS) EndJob();
  }
}

void EndJob() {
  if (Usable()) MPI_Abort(MPI_COMM_WORLD, 1);
  _exit(1);  // mpirun ends the other ranks when one fails before MPI_Init
}

}  // namespace ddp::testing
