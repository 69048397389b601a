// SPDX-License-Identifier: Apache-2.0
// Who this process (or a thread that acts as a rank) is, and the group of all ranks.
#ifndef DDP_CONTEXT_H_
#define DDP_CONTEXT_H_

#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "ddp/observer.h"
#include "ddp/process_group.h"
#include "ddp/store.h"
#include "ddp/types.h"

namespace ddp {

// What Context::Create may be told. By default the launcher and the environment say everything.
struct ContextOptions {
  // The identity of this rank. Set all of rank, world_size and store, or none of them. local_rank and local_world_size
  // default to rank and world_size.
  //
  // If unset, the launcher's variables decide. The first launcher that has set its variables counts, in this order:
  // Open MPI's mpirun, MPICH's mpirun, torchrun, Slurm's srun. Without a launcher it is a world of one rank.
  // Contradicting launchers are an error, except that the others may run inside srun.
  std::optional<int> rank = {};
  std::optional<int> world_size = {};        // the number of ranks
  std::optional<int> local_rank = {};        // its number among the ranks of this host
  std::optional<int> local_world_size = {};  // the number of ranks of this host

  // Where the ranks meet, for one Context. Another one, also a later one or one after a Create that failed, needs
  // another store: with this one, Create returns FailedPrecondition on all ranks, and the first Context goes on.
  std::shared_ptr<Store> store = {};

  // The MPI_Comm of a program that uses MPI itself (the address of the handle): the ranks of this communicator are the
  // world, and all of them call Create. Several communicators make several worlds in one job. Read in Create only,
  // which duplicates the communicator: the program may free it, and its messages and the library's cannot meet. MPI is
  // initialised before Create, and finalized after the Context is destroyed. The launcher's variables do not count.
  // FailedPrecondition if MPI is not initialised, InvalidArgument for MPI_COMM_NULL, for an inter-communicator, and
  // together with an identity from above.
  const void* mpi_comm = nullptr;

  // "auto", "nccl" (needs a GPU as `device`), "hierarchical" (on CPUs and GPUs) or "local" (only in a world of one).
  // Unset: DDP_BACKEND, else "auto".
  std::optional<std::string> backend = {};

  // Whether "auto" tries NCCL out at this start, whatever an earlier start has found. Unset: DDP_FRESH_PROBE, else
  // false.
  std::optional<bool> fresh_probe = {};

  // The device of this rank's parameters and gradients; the same kind on all ranks. Default: the CPU. With a GPU, the
  // world's operations take buffers of that GPU and CPU buffers. Index -1: the GPU with the number of the local rank,
  // or the only one that this process sees, which is right for one process per GPU; Context::device returns the actual
  // one. The library uses no GPU before Create, and no other GPU than this one.
  Device device = {};

  // The ncclComm_t of a program that uses NCCL itself (the address of the handle): the world's operations on GPU memory
  // use it instead of a communicator of the library's. All ranks give one, with the world's ranks and `device` as its
  // own, blocking, and of the NCCL that the library loads (libnccl.so.2, or DDP_NCCL_LIBRARY). The backend is nccl
  // then, which is not tried out first. Groups by Split and NewGroup have their own.
  //
  // Borrowed, with the handle, until the Context is destroyed or Create fails. Meanwhile the program may use it between
  // operations of the library: on all ranks at the same place, when no Work is pending. Afterwards it is the program's
  // again, unless the handle is null: then the library had to abort it, which frees it, because the world had failed,
  // its start had, or the Context was destroyed while a Work was pending.
  void* nccl_comm = nullptr;

  // The time-out of an operation, and of the start of the world. After it the group is aborted. Unset: DDP_TIMEOUT
  // (seconds), else 10 minutes.
  std::optional<absl::Duration> timeout = {};

  // How long an operation may wait for its peers before the log warns and names them. Zero: no warning. Unset:
  // DDP_STALL_WARNING (seconds), else 30 seconds.
  std::optional<absl::Duration> stall_warning = {};

  // A file for a timeline of all ranks, in Chrome's trace format, which Perfetto opens. Rank 0 writes it when the
  // Context is destroyed. If the group has failed, each rank writes its own timeline to the name with ".rankN"
  // appended. Set it on all ranks or on none. Empty: no timeline. Unset: DDP_TRACE, else none.
  std::optional<std::string> trace = {};

  // Receives operations, buckets and scopes. Borrowed: it must outlive the Context.
  Observer* observer = nullptr;
};

// Which backend a Context uses, and why. With GPUs, "auto" tries NCCL out, on all ranks, before it relies on it. The
// first of these that works is used:
//   - nccl as it is configured
//   - nccl without P2P, for which Create sets NCCL_P2P_DISABLE=1; but hierarchical if that is faster
//   - hierarchical, which needs nothing of NCCL
// The same on all ranks. After Context::Recover it is that of the new world, and says why the one before has failed.
struct BackendChoice {
  std::string backend = {};  // "nccl", "hierarchical" or "local"
  bool without_p2p = false;  // Create has set NCCL_P2P_DISABLE=1
  bool from_cache = false;   // an earlier start has found it out
  // What did not work, empty if nothing was tried or everything worked: the rank (-1: no single one), what it did
  // ("all-reduce of 512 KiB"), how it failed ("hung", "moved wrong data (...)"), the likely cause, and what to do about
  // it. Cause and remedy are empty if they are not known.
  int failed_rank = -1;
  std::string failed_step = {};  // what the rank did
  std::string failure = {};      // how it failed
  std::string cause = {};        // the likely cause
  std::string remedy = {};       // what to do about it
  // All of it in one line, as the log has it. Empty if there was nothing to choose.
  std::string text = {};
};

// The entry point of the library. A process has one Context, or several if its threads act as ranks.
//
//   absl::StatusOr<std::unique_ptr<ddp::Context>> context = ddp::Context::Create();
//   if (!context.ok()) { std::cerr << context.status().message() << "\n"; return 1; }
//   ddp::ProcessGroup& world = (*context)->world();
//
// Create is collective. It returns when all ranks have arrived, or fails on each of them within the time-out; the error
// names the missing ranks or the contradiction. A rank whose options or variables are wrong waits for the others for up
// to 10 s, so that they hear of it; but it does not initialise MPI for that, where mpirun ends the job with the rank.
// Destroy everything that was made from a Context before the Context.
//
// Under mpirun, and under srun with PMI (--mpi=pmix, --mpi=pmi2), ranks meet through MPI. If MPI is not initialised
// before Create, the Context initialises it, and the last Context finalizes it. Under torchrun and plain srun, ranks
// meet in a TCP store, which rank 0 serves on the loopback interface until all ranks have left. Its port is
// DDP_STORE_PORT; if unset, the one after MASTER_PORT under torchrun, and one derived from the job under srun. CPU
// ranks on several hosts need MPI.
//
// A process may have several Contexts, one after the other or at the same time, if all ranks create and destroy them in
// the same order; each one that has a ContextOptions::store has its own. If a Context initialised MPI, it ends
// with the last of those that exist, and no other can be created afterwards, for MPI starts once in a process. To
// create more, initialise MPI before (MPI_Init_thread), or keep one.
//
// After fork, the child may destroy its copies of the library's objects, or simply exit: its peers do not notice. It
// cannot use them.
class DDP_EXPORT Context {
 public:
  // Finds this rank, and returns when all ranks have arrived. Collective; see above.
  static absl::StatusOr<std::unique_ptr<Context>> Create(const ContextOptions& options = {});

  virtual ~Context() = default;

  virtual int rank() const = 0;                             // this rank, 0 to world_size() - 1
  virtual int world_size() const = 0;                       // the number of ranks
  virtual int local_rank() const = 0;                       // its number among the ranks of this host
  virtual int local_world_size() const = 0;                 // the number of ranks of this host
  virtual absl::string_view launcher() const = 0;           // "mpirun", "srun", "torchrun", "mpi", "none", "options"
  virtual absl::Duration timeout() const = 0;               // of an operation, where a group has no other
  virtual Device device() const = 0;                        // that of ContextOptions, with its actual index
  virtual const BackendChoice& backend_choice() const = 0;  // of the world

  // The group of all ranks. After Recover the one that it has made.
  virtual ProcessGroup& world() = 0;

  // Makes a new world after this one has failed: world() returns it from then on. Each rank calls it once an operation
  // of the world has returned an error.
  //   - All ranks are alive: the new world has all of them, and the hierarchical backend, also on GPUs. They meet in a
  //     spare group that Create has made, so this works under every launcher. NCCL is not used again.
  //   - Ranks have died, or do not come within `patience`: the new world has the others, in their order, and the
  //     backend as before. They meet in the store, as in NewGroup; a rank that is left alone needs none, but one that
  //     is too slow to say whether others went on ends Recover with DeadlineExceeded.
  // backend_choice().text says which of these it was, and why the old world has failed. rank() and world_size() stay as
  // they are; world().rank() and world().size() are those of the new world.
  //
  //   absl::Status status = model->FinishBackward(stream);
  //   if (!status.ok()) {
  //     if (absl::Status s = context->Recover(); !s.ok()) return s;  // print it, and end
  //     if (absl::Status s = model->Rebind(context->world()); !s.ok()) return s;
  //     if (absl::Status s = ddp::SyncState(context->world(), committed_steps, state).status(); !s.ok()) return s;
  //   }
  //
  // The failed world lives as long as the Context. What was made from it (groups by Split, memory by Allocate) stays as
  // it is; see ProcessGroup::Register.
  //
  // Collective over the ranks that are left, as often as worlds fail. `patience`: how long it waits for the others,
  // once for all ranks and once more for each that lives and does not come; unset: the time-out. Call it from one
  // thread at a time, when no other uses the world.
  //
  // Errors: FailedPrecondition if the world works, or if ranks have died and there is no store for the others, as under
  // mpirun, which ends all ranks when one dies anyway. Internal, on all ranks, if a GPU has not come free: then only
  // the end of its process frees it. Otherwise those of NewGroup. An error about this rank itself (FailedRanks) says
  // that the others go on without it. The world stays the failed one.
  virtual absl::Status Recover(std::optional<absl::Duration> patience = {}) = 0;

  // Creates a group of some ranks of the world, including this one. The remaining ranks use it to continue after the
  // world, or an earlier group, has failed. ranks[i], a rank of the world, becomes rank i of the new group.
  //
  // Collective over the listed ranks: all pass the same list; the other ranks need not take part. The ranks meet in the
  // store (ContextOptions::store, or that of torchrun or srun); a single rank needs none. Call it from one thread at a
  // time.
  //
  // Errors: FailedPrecondition if there is no store, as under mpirun, which ends all ranks when one dies anyway.
  // DeadlineExceeded, on all ranks that have arrived, names the listed ranks that have not arrived before `deadline`;
  // FailedRanks returns them as ranks of the world. Unavailable, at once, names in the same way those whose processes
  // have died, if they were in the world. After an error you may call it again, with the same list or a shorter one.
  //
  //   auto smaller = context->NewGroup({0, 2, 3}, absl::Now() + absl::Minutes(1));  // rank 1 has died
  //
  // docs/guide/failures.md, "When a rank dies", shows the other steps.
  virtual absl::StatusOr<std::unique_ptr<ProcessGroup>> NewGroup(absl::Span<const int> ranks, absl::Time deadline) = 0;
};

}  // namespace ddp

#endif  // DDP_CONTEXT_H_
