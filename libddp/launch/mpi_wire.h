// A wire that MPI carries. Includes MPI's header: for the files of the MPI session only.
#ifndef LIBDDP_LAUNCH_MPI_WIRE_H_
#define LIBDDP_LAUNCH_MPI_WIRE_H_

#include <mpi.h>

#include <memory>
#include <mutex>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "libddp/launch/wire.h"

namespace ddp {

// OK, or Unavailable with MPI's own text.
absl::Status CheckMpi(int code, absl::string_view call);

// What the parts of a session have in common.
struct MpiShared {
  MPI_Comm comm = MPI_COMM_NULL;  // a duplicate of MPI_COMM_WORLD, whose errors are returned
  std::mutex mutex;        // held in every call of MPI: below MPI_THREAD_MULTIPLE one thread at a time may be there
  bool owner = false;      // the session initialised MPI, so the program does not call it
  bool abandoned = false;  // something was given up that MPI still works on
  bool wired = false;      // a wire has been opened
};

std::unique_ptr<Wire> CreateMpiWire(std::shared_ptr<MpiShared> shared);

}  // namespace ddp

#endif  // LIBDDP_LAUNCH_MPI_WIRE_H_
