// SPDX-License-Identifier: Apache-2.0
// The process's use of MPI: initialised if nobody did, finalized only by whoever initialised it. Where a session did,
// that is the last one of the process.
#ifndef LIBDDP_LAUNCH_MPI_SESSION_H_
#define LIBDDP_LAUNCH_MPI_SESSION_H_

#include <memory>

#include "absl/status/statusor.h"
#include "libddp/launch/launch_info.h"
#include "libddp/launch/rendezvous.h"

namespace ddp {

class MpiSession {
 public:
  // Whether this build can use MPI.
  static bool Available();

  // Initialises MPI (asking for MPI_THREAD_SERIALIZED) unless the program did. Unimplemented, with the remedy, in a
  // build without MPI. FailedPrecondition if MPI is already finalized, by the program or with the last session, or its
  // world contradicts `info` (names both).
  static absl::StatusOr<std::unique_ptr<MpiSession>> Open(const LaunchInfo& info);

  // The session of the ranks of a program's communicator, by the address of its MPI_Comm; see ContextOptions::mpi_comm.
  static absl::StatusOr<std::unique_ptr<MpiSession>> Adopt(const void* handle);

  // The last one finalizes MPI if Open initialised it and no call of ours has timed out: after that its buffers must
  // live on and MPI_Finalize could hang. Then it first waits for all ranks of the job.
  virtual ~MpiSession() = default;

  // Rendezvous and wires over a duplicate of the communicator, made by the first AllGather; borrowed. Calls poll with a
  // deadline and never block inside MPI. A call that times out poisons the session: later ones return the same error.
  virtual Rendezvous& rendezvous() = 0;

  // Lets MPI go on with messages that the program has begun, for MPI works only inside its calls: a thread that waits
  // in one of ours may hold up a peer that waits in MPI. Does nothing where this thread may not call MPI: unless all
  // threads may at any time, it has to be the one that initialised it. Cheap; never blocks.
  virtual void Progress() = 0;

  // To be called before destruction when the world has failed, as then a peer may be stuck: the destructor waits a few
  // seconds for all ranks to leave too, and without them it leaves MPI unfinalized (mpirun then ends the job).
  virtual void MarkFailed() = 0;
};

}  // namespace ddp

#endif  // LIBDDP_LAUNCH_MPI_SESSION_H_
