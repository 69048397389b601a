// SPDX-License-Identifier: Apache-2.0
// A wire that MPI carries. Includes MPI's header: for the files of the MPI session only.
#ifndef LIBDDP_LAUNCH_MPI_WIRE_H_
#define LIBDDP_LAUNCH_MPI_WIRE_H_

#include <mpi.h>

#include <cstddef>
#include <list>
#include <memory>
#include <mutex>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "libddp/launch/wire.h"

namespace ddp {

// OK, or Unavailable with MPI's own text.
absl::Status CheckMpi(int code, absl::string_view call);

// Held in every call of MPI: below MPI_THREAD_MULTIPLE one thread at a time may be there, of whatever session, as a
// process has one MPI.
std::mutex& MpiMutex();

// Receives messages that nobody waits for any more. Under MpiMutex.
class MpiDrain {
 public:
  // Receives `count` more messages of at most `bytes` bytes from any rank, one after the other.
  void Add(MPI_Comm comm, int tag, size_t bytes, int count);
  // Takes what has come.
  void Poll();
  // Receives nothing more.
  void Cancel();

 private:
  struct Expected {
    MPI_Comm comm;
    int tag, left;
    std::vector<char> buffer;
    MPI_Request request = MPI_REQUEST_NULL;
  };
  static void Receive(Expected* expected);
  std::list<Expected> expected_;
  unsigned polls_ = 0;
};

// What groups have given up that MPI still works on. Under MpiMutex.
class MpiLeftovers {
 public:
  void Add(const std::vector<MPI_Request>& requests);
  bool empty() const { return requests_.empty(); }
  // To be called again and again, on all ranks of the communicator, when no group uses it any more: receives and drops
  // what comes. Whether nothing is left here for now.
  bool Settle(MPI_Comm comm);

 private:
  std::vector<MPI_Request> requests_;
  std::vector<char> dropped_;
  MPI_Request dropping_ = MPI_REQUEST_NULL;
};

// What the parts of a session have in common.
struct MpiShared {
  MPI_Comm comm = MPI_COMM_NULL;  // a duplicate of the session's communicator, whose errors are returned
  MpiDrain drain;
  MpiLeftovers leftovers;
  bool owner = false;  // the session initialised MPI, so the program does not call it
  bool wired = false;  // a wire has been opened
};

std::unique_ptr<Wire> CreateMpiWire(std::shared_ptr<MpiShared> shared);

}  // namespace ddp

#endif  // LIBDDP_LAUNCH_MPI_WIRE_H_
