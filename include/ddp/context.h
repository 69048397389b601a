// What one process (or one thread that plays a rank) has once: who it is, and the group of all ranks.
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

struct ContextOptions {
  // Who we are. Left unset, it is taken from the launcher's variables: Open MPI's mpirun, MPICH's mpirun, torchrun, or
  // Slurm's srun, the first of these that has set its own; without a launcher it is a world of one rank. Launchers that
  // contradict each other are an error, except that others may run inside of srun. Either all of rank, world_size and
  // store are given, or none. local_rank and local_world_size default to rank and world_size.
  std::optional<int> rank;
  std::optional<int> world_size;
  std::optional<int> local_rank;
  std::optional<int> local_world_size;
  std::shared_ptr<Store> store;

  // "auto", "nccl" (needs a GPU as `device`), "hierarchical" or "local" (a world of one only). Unset: DDP_BACKEND, else
  // "auto".
  std::optional<std::string> backend;

  // Where this rank's parameters and gradients are, of the same kind on all ranks. The CPU by default. On a GPU the
  // world's operations take buffers of that GPU, and buffers in CPU memory as well. Index -1: the GPU of the local
  // rank's number, which is right for one process per GPU; Context::device says which that was. Nothing is done on any
  // GPU before Create, nor on any other than this.
  Device device;

  // How long an operation, and the start of the world, may take before the group is aborted. Unset: DDP_TIMEOUT
  // (seconds), else 10 minutes.
  std::optional<absl::Duration> timeout;

  // How long an operation may wait for its peers before a warning in the log says for whom; zero: for ever. Unset:
  // DDP_STALL_WARNING (seconds), else 30 seconds.
  std::optional<absl::Duration> stall_warning;

  // A file that rank 0 writes a timeline of all ranks to when the Context ends, in the format of Chrome's traces, which
  // Perfetto opens; empty: none. Where that cannot be, because the group has failed, each rank writes its own to the
  // name with ".rankN" appended. Set on all ranks or on none. Unset: DDP_TRACE, else none.
  std::optional<std::string> trace;

  // Is told of operations, buckets and scopes. Borrowed: outlives the Context.
  Observer* observer = nullptr;
};

// Entry point of the library. Several may exist in one process only as ranks that are threads.
//
//   absl::StatusOr<std::unique_ptr<ddp::Context>> context = ddp::Context::Create();
//   if (!context.ok()) { std::cerr << context.status().message() << "\n"; return 1; }
//   ddp::ProcessGroup& world = (*context)->world();
//
// Create is collective: it returns when all ranks have come, or fails on each of them within the time-out with an error
// that names who is missing or what contradicts. Everything made from a Context is destroyed before it.
//
// Under mpirun, and under srun with PMI (--mpi=pmix, --mpi=pmi2), ranks meet through MPI: where it was not initialised
// before Create, the Context initialises it and finalizes it at the end. Under torchrun and plain srun they meet in a
// TCP store that rank 0 serves on the loopback interface until all have left: on port DDP_STORE_PORT, or the one after
// MASTER_PORT. Ranks on several hosts need MPI.
class DDP_EXPORT Context {
 public:
  static absl::StatusOr<std::unique_ptr<Context>> Create(const ContextOptions& options = {});

  virtual ~Context() = default;

  virtual int rank() const = 0;
  virtual int world_size() const = 0;
  virtual int local_rank() const = 0;  // among the ranks of this host
  virtual int local_world_size() const = 0;
  virtual absl::string_view launcher() const = 0;  // "mpirun", "srun", "torchrun", "none", "options"
  virtual absl::Duration timeout() const = 0;
  virtual Device device() const = 0;

  // All ranks.
  virtual ProcessGroup& world() = 0;

  // A group of some ranks of the world, this one among them: what survivors go on in when the world, or an earlier
  // group, has failed. ranks[i], a rank of the world, is rank i of the new group. Collective over the listed ranks,
  // which all give the same list; the others need not know. They meet in the store, so there has to be one
  // (ContextOptions::store, or torchrun's): FailedPrecondition where there is none, as under mpirun, which ends all
  // ranks when one dies anyway. DeadlineExceeded, on all that have come, names the listed ranks that have not come
  // until `deadline`; FailedRanks gives them as ranks of the world. After an error call it again, with a list that is
  // shorter, or the same. One thread at a time.
  //
  //   auto smaller = context->NewGroup({0, 2, 3}, absl::Now() + absl::Minutes(1));  // rank 1 has died
  //
  // What else there is to do is shown in docs/guide.md, "When a rank dies".
  virtual absl::StatusOr<std::unique_ptr<ProcessGroup>> NewGroup(absl::Span<const int> ranks, absl::Time deadline) = 0;
};

}  // namespace ddp

#endif  // DDP_CONTEXT_H_
