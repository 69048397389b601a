// SPDX-License-Identifier: Apache-2.0
#include "libddp/launch/mpi_session.h"

#include <mpi.h>

#include <algorithm>
#include <climits>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "libddp/base/log.h"
#include "libddp/base/owner_process.h"
#include "libddp/launch/mpi_wire.h"

namespace ddp {
namespace {

// How long a session of a failed world waits for the peers before it leaves without MPI_Finalize.
constexpr absl::Duration kLeaveTimeout = absl::Seconds(5);

// What the sessions of a process have in common if one of them initialised MPI, which then ends with the last one.
// Under MpiMutex.
struct MpiUse {
  bool ours = false;       // one of them did
  int open = 0;            // those that nobody destroys yet
  int alive = 0;           // and those that are being destroyed
  bool failed = false;     // the world of one has failed: a peer may be stuck
  bool abandoned = false;  // one left something that MPI still works on, so that MPI cannot end
  bool ending = false;     // the last one finalizes MPI, or has done so
  std::condition_variable left;
};
MpiUse& Use() {
  static auto* const use = new MpiUse;
  return *use;
}

// Below MPI_THREAD_SERIALIZED only the thread that initialised MPI may use it.
absl::Status CheckThread() {
  int level = MPI_THREAD_SINGLE;
  int is_main = 0;
  if (absl::Status s = CheckMpi(MPI_Query_thread(&level), "MPI_Query_thread"); !s.ok()) return s;
  if (level >= MPI_THREAD_SERIALIZED) return absl::OkStatus();
  if (absl::Status s = CheckMpi(MPI_Is_thread_main(&is_main), "MPI_Is_thread_main"); !s.ok()) return s;
  if (is_main) return absl::OkStatus();
  return absl::FailedPreconditionError(
      "MPI was initialised for use by one thread, and this is another one; initialise it with MPI_Init_thread and "
      "MPI_THREAD_SERIALIZED, or create and destroy the Context in the thread that did");
}

// All that MPI may still read or write after a time-out.
struct Pending {
  MPI_Comm comm = MPI_COMM_NULL;
  MPI_Request request = MPI_REQUEST_NULL;
  int64_t my_size = 0;
  std::vector<int64_t> sizes;
  std::string mine;
  std::vector<int> counts, offsets;
  std::string all;
  int left = 0, any_left = 0;
};

class MpiRendezvous final : public Rendezvous {
 public:
  MpiRendezvous(int rank, int size, MPI_Comm parent, std::shared_ptr<MpiShared> shared)
      : rank_(rank), size_(size), parent_(parent), shared_(std::move(shared)), pending_(std::make_unique<Pending>()) {}

  // Pending buffers are given up, not freed, if MPI may still use them.
  ~MpiRendezvous() override {
    if (!status_.ok()) (void)pending_.release();
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  const absl::Status& status() const { return status_; }
  MPI_Comm& comm() { return pending_->comm; }

  absl::StatusOr<std::vector<std::string>> AllGather(absl::string_view mine, absl::string_view what,
                                                     absl::Time deadline) override {
    if (!status_.ok()) return status_;
    if (absl::Status s = CheckThread(); !s.ok()) return Describe(s, what);
    absl::Status s = Duplicate(deadline);
    if (s.ok()) s = GatherSizes(mine.size(), deadline);
    if (s.ok() && !LaysOut()) {
      // The same on all ranks, and nothing is under way: the session stays good.
      return Describe(absl::InvalidArgumentError("the strings of all ranks have more than 2 GiB; send less"), what);
    }
    if (s.ok()) s = GatherStrings(mine, deadline);
    if (!s.ok()) return status_ = Describe(s, what);
    std::vector<std::string> result(size_);
    for (int i = 0; i < size_; ++i) result[i] = pending_->all.substr(pending_->offsets[i], pending_->counts[i]);
    return result;
  }

  absl::StatusOr<std::unique_ptr<Wire>> OpenWire() override {
    shared_->wired = true;
    return CreateMpiWire(shared_);
  }

  // Whether all ranks of the job come to this point in time: which of a rank's sessions is the last one, and whether it
  // is of a part of them, differs. Where groups have left something behind, that comes to its end, too.
  absl::Status MeetWorld(absl::Time deadline) {
    pending_->left = shared_->leftovers.empty() ? 0 : 1;
    absl::Status s = Call(
        [&] {
          return MPI_Iallreduce(&pending_->left, &pending_->any_left, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD,
                                &pending_->request);
        },
        "MPI_Iallreduce");
    if (s.ok()) s = Finish(deadline);
    if (s.ok() && pending_->any_left != 0) s = Settle(absl::Now() + kLeaveTimeout);
    return status_ = s;
  }

 private:
  absl::Status Describe(const absl::Status& s, absl::string_view what) const {
    return absl::Status(s.code(), absl::StrCat("rank ", rank_, ": ", what, ": ", s.message()));
  }

  template <typename Function>
  static absl::Status Call(Function function, absl::string_view name) {
    std::lock_guard<std::mutex> lock(MpiMutex());
    return CheckMpi(function(), name);
  }

  // Here and not where the session begins, because it waits for the peers and only AllGather has a deadline.
  absl::Status Duplicate(absl::Time deadline) {
    if (pending_->comm != MPI_COMM_NULL) return absl::OkStatus();
    absl::Status s = Call([&] { return MPI_Comm_idup(parent_, &pending_->comm, &pending_->request); }, "MPI_Comm_idup");
    if (s.ok()) s = Finish(deadline);
    if (s.ok()) {
      s = Call([&] { return MPI_Comm_set_errhandler(pending_->comm, MPI_ERRORS_RETURN); }, "MPI_Comm_set_errhandler");
    }
    if (s.ok()) shared_->comm = pending_->comm;
    return s;
  }

  absl::Status GatherSizes(size_t mine, absl::Time deadline) {
    pending_->my_size = static_cast<int64_t>(mine);
    pending_->sizes.resize(size_);
    absl::Status s = Call(
        [&] {
          return MPI_Iallgather(&pending_->my_size, 1, MPI_INT64_T, pending_->sizes.data(), 1, MPI_INT64_T,
                                pending_->comm, &pending_->request);
        },
        "MPI_Iallgather");
    return s.ok() ? Finish(deadline) : s;
  }

  // False if MPI's int offsets cannot tell where each rank's string goes.
  bool LaysOut() {
    pending_->counts.resize(size_);
    pending_->offsets.resize(size_);
    int64_t offset = 0;
    for (int i = 0; i < size_; ++i) {
      if (pending_->sizes[i] > INT_MAX - offset) return false;
      pending_->offsets[i] = static_cast<int>(offset);
      pending_->counts[i] = static_cast<int>(pending_->sizes[i]);
      offset += pending_->sizes[i];
    }
    pending_->all.resize(static_cast<size_t>(offset));
    return true;
  }

  absl::Status GatherStrings(absl::string_view mine, absl::Time deadline) {
    pending_->mine = std::string(mine);
    absl::Status s = Call(
        [&] {
          return MPI_Iallgatherv(pending_->mine.data(), static_cast<int>(pending_->mine.size()), MPI_CHAR,
                                 pending_->all.data(), pending_->counts.data(), pending_->offsets.data(), MPI_CHAR,
                                 pending_->comm, &pending_->request);
        },
        "MPI_Iallgatherv");
    return s.ok() ? Finish(deadline) : s;
  }

  absl::Status Finish(absl::Time deadline) {
    return Poll(deadline, [this](int* done) { return MPI_Test(&pending_->request, done, MPI_STATUS_IGNORE); });
  }

  // A message that was given up ends when its receiver takes it: until nothing is left on any rank each drops what
  // comes.
  absl::Status Settle(absl::Time deadline) {
    bool settled = false;
    return Poll(deadline, [this, &settled](int* done) {
      const bool quiet = shared_->comm == MPI_COMM_NULL || shared_->leftovers.Settle(shared_->comm);
      if (settled) return MPI_Test(&pending_->request, done, MPI_STATUS_IGNORE);
      settled = quiet;
      return quiet ? MPI_Ibarrier(MPI_COMM_WORLD, &pending_->request) : MPI_SUCCESS;
    });
  }

  // For MPI_Wait knows no deadline. First with no pause, as peers that are here answer in microseconds; then ever more
  // rarely, as ranks may outnumber cores.
  absl::Status Poll(absl::Time deadline, absl::FunctionRef<int(int* done)> test) {
    const absl::Time start = absl::Now();
    for (absl::Duration pause = absl::Microseconds(10);; pause = std::min(2 * pause, absl::Milliseconds(2))) {
      int done = 0;
      if (absl::Status s = Call([&] { return test(&done); }, "MPI_Test"); !s.ok()) return s;
      if (done) return absl::OkStatus();
      const absl::Time now = absl::Now();
      if (now >= deadline) {
        const absl::Duration allowed = absl::Floor(deadline - start + absl::Microseconds(500), absl::Milliseconds(1));
        return absl::DeadlineExceededError(
            absl::StrCat("not all of the ", size_, " ranks came within ", absl::FormatDuration(allowed),
                         "; does every rank run the same program, and is none stuck before this point?"));
      }
      absl::SleepFor(std::min(pause, deadline - now));
    }
  }

  const int rank_;
  const int size_;
  const MPI_Comm parent_;
  const std::shared_ptr<MpiShared> shared_;
  std::unique_ptr<Pending> pending_;
  absl::Status status_;
};

class MpiSessionImpl final : public MpiSession {
 public:
  // Under MpiMutex. `owner`: the program does not call MPI.
  MpiSessionImpl(int rank, int size, MPI_Comm comm, bool owner)
      : shared_(std::make_shared<MpiShared>()),
        rendezvous_(rank, size, comm, shared_),
        owner_(owner),
        counted_(Use().ours) {
    shared_->owner = owner;
    if (counted_) {
      ++Use().open;
      ++Use().alive;
    }
  }

  ~MpiSessionImpl() override {
    if (!process_.IsHere()) return;
    int finalized = 0;
    if (MPI_Finalized(&finalized) != MPI_SUCCESS || finalized) return;
    absl::Status s = rendezvous_.status();
    if (s.ok()) s = CheckThread();
    const bool finalizes = counted_ && BeginLeaving(s);
    if (s.ok() && finalizes) s = MeetWorld();
    if (s.ok() && !shared_->leftovers.empty()) s = absl::AbortedError("MPI still works on messages that were given up");
    if (!s.ok()) {
      if (finalizes || (counted_ && Used())) {
        LogWarn("leaving without MPI_Finalize: ", s.message());
      }
      KeepForever(shared_);  // MPI may still write to what is to be dropped
    }
    std::lock_guard<std::mutex> lock(MpiMutex());
    if (s.ok()) {
      shared_->drain.Cancel();
      // A last word of a wire may still be on its way here. It must not find the next communicator under this one's
      // number.
      if (rendezvous_.comm() != MPI_COMM_NULL && !shared_->wired) MPI_Comm_free(&rendezvous_.comm());
      if (finalizes) MPI_Finalize();
    }
    if (counted_) EndLeaving(s, finalizes);
  }

  Rendezvous& rendezvous() override { return rendezvous_; }
  void MarkFailed() override { failed_ = true; }

  void Progress() override {
    if (owner_ || rendezvous_.comm() == MPI_COMM_NULL) return;  // whoever initialised MPI is who uses it
    int level = MPI_THREAD_SINGLE, finalized = 1, is_main = 0;
    if (MPI_Finalized(&finalized) != MPI_SUCCESS || finalized) return;
    if (MPI_Query_thread(&level) != MPI_SUCCESS || MPI_Is_thread_main(&is_main) != MPI_SUCCESS) return;
    // With MPI_THREAD_SERIALIZED another thread of the program may be inside MPI now.
    if (level != MPI_THREAD_MULTIPLE && (level == MPI_THREAD_SERIALIZED || !is_main)) return;
    const std::unique_lock<std::mutex> lock(MpiMutex(), std::try_to_lock);
    if (!lock.owns_lock()) return;  // then somebody else is making progress
    // Nobody sends messages to itself here: this looks in vain, for which MPI has to work.
    int found = 0;
    MPI_Iprobe(rendezvous_.rank(), 0, rendezvous_.comm(), &found, MPI_STATUS_IGNORE);
  }

 private:
  bool Used() { return rendezvous_.comm() != MPI_COMM_NULL || !rendezvous_.status().ok(); }

  // Whether this is the session that is to finalize MPI. It waits for those that other threads are destroying.
  bool BeginLeaving(const absl::Status& s) {
    MpiUse& use = Use();
    std::unique_lock<std::mutex> lock(MpiMutex());
    use.failed |= failed_;
    const bool last = --use.open == 0;
    // What is left of failed groups ends where all ranks are well and leave together.
    const bool stays = !shared_->leftovers.empty() && (use.failed || !last);
    use.abandoned |= Used() && (!s.ok() || stays);
    if (!last) return false;
    use.ending = true;
    use.left.wait(lock, [&] { return use.alive == 1; });
    return use.ending = !use.abandoned;
  }

  // Under MpiMutex.
  void EndLeaving(const absl::Status& s, bool finalizes) {
    MpiUse& use = Use();
    if (finalizes && !s.ok()) {
      use.abandoned = true;
      use.ending = false;
    }
    --use.alive;
    use.left.notify_all();
  }

  // MPI_Finalize waits for all ranks, without a time limit. So all meet here first: a rank that leaves early finds the
  // others later, as it would in MPI_Finalize, and those whose world has failed see at once that it has come.
  absl::Status MeetWorld() {
    const bool failed = Use().failed;  // no other session is left to change it
    if (!failed && rendezvous_.comm() == MPI_COMM_NULL) return absl::OkStatus();
    return rendezvous_.MeetWorld(failed ? absl::Now() + kLeaveTimeout : absl::InfiniteFuture());
  }

  const std::shared_ptr<MpiShared> shared_;
  MpiRendezvous rendezvous_;
  const OwnerProcess process_;
  const bool owner_;
  const bool counted_;  // a session initialised MPI, so the last one finalizes it
  bool failed_ = false;
};

absl::Status RankAndSize(MPI_Comm comm, int* rank, int* size) {
  absl::Status s = CheckMpi(MPI_Comm_rank(comm, rank), "MPI_Comm_rank");
  s.Update(CheckMpi(MPI_Comm_size(comm, size), "MPI_Comm_size"));
  return s;
}

absl::Status CheckWorld(const LaunchInfo& info) {
  int rank = -1;
  int size = -1;
  if (absl::Status s = RankAndSize(MPI_COMM_WORLD, &rank, &size); !s.ok()) return s;
  if (rank == info.rank && size == info.world_size) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "MPI says rank ", rank, " of ", size, " but ", info.launcher, " says rank ", info.rank, " of ", info.world_size,
      "; start the program with the mpirun of the MPI that libddp was built with (with srun: the --mpi= that it "
      "understands), and leave MPI_COMM_WORLD whole"));
}

// FailedPrecondition if MPI has ended. Under MpiMutex.
absl::StatusOr<bool> IsInitialized() {
  if (Use().ending) {
    return absl::FailedPreconditionError(
        "MPI has ended with the last Context of this process, and starts only once in it; initialise MPI yourself with "
        "MPI_Init_thread, before the first Context, or keep one Context until you need no other");
  }
  int finalized = 0;
  int initialized = 0;
  absl::Status s = CheckMpi(MPI_Finalized(&finalized), "MPI_Finalized");
  s.Update(CheckMpi(MPI_Initialized(&initialized), "MPI_Initialized"));
  if (!s.ok()) return s;
  if (finalized) {
    return absl::FailedPreconditionError(
        "MPI is already finalized, and starts only once in a process; create the Context before MPI_Finalize");
  }
  return initialized != 0;
}

}  // namespace

bool MpiSession::Available() { return true; }

absl::StatusOr<std::unique_ptr<MpiSession>> MpiSession::Open(const LaunchInfo& info) {
  std::unique_lock<std::mutex> lock(MpiMutex());
  const absl::StatusOr<bool> initialized = IsInitialized();
  absl::Status s = initialized.status();
  if (!s.ok()) return absl::Status(s.code(), absl::StrCat("rank ", info.rank, ": ", s.message()));
  if (!*initialized) {
    int provided = MPI_THREAD_SINGLE;
    s = CheckMpi(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &provided), "MPI_Init_thread");
    if (!s.ok()) return s;
    // The program does not use MPI itself: errors shall come to us, not end the process.
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    Use().ours = true;
  }
  auto session = std::make_unique<MpiSessionImpl>(info.rank, info.world_size, MPI_COMM_WORLD, Use().ours);
  lock.unlock();
  if (s = CheckThread(); s.ok()) s = CheckWorld(info);
  if (!s.ok()) return absl::Status(s.code(), absl::StrCat("rank ", info.rank, ": ", s.message()));
  return session;
}

absl::StatusOr<std::unique_ptr<MpiSession>> MpiSession::Adopt(const void* handle) {
  const std::lock_guard<std::mutex> lock(MpiMutex());
  const absl::StatusOr<bool> initialized = IsInitialized();
  if (!initialized.ok()) return initialized.status();
  if (!*initialized) {
    return absl::FailedPreconditionError(
        "ContextOptions::mpi_comm is set, but MPI is not initialised; call MPI_Init_thread before Create");
  }
  if (absl::Status s = CheckThread(); !s.ok()) return s;
  const MPI_Comm comm = *static_cast<const MPI_Comm*>(handle);
  if (comm == MPI_COMM_NULL) {
    return absl::InvalidArgumentError(
        "ContextOptions::mpi_comm is MPI_COMM_NULL; only the ranks of a communicator create a Context of it");
  }
  int inter = 0, rank = 0, size = 1;
  if (absl::Status s = CheckMpi(MPI_Comm_test_inter(comm, &inter), "MPI_Comm_test_inter"); !s.ok()) return s;
  if (inter) {
    return absl::InvalidArgumentError(
        "ContextOptions::mpi_comm is an inter-communicator; merge it first (MPI_Intercomm_merge)");
  }
  if (absl::Status s = RankAndSize(comm, &rank, &size); !s.ok()) return s;
  return std::make_unique<MpiSessionImpl>(rank, size, comm, /*owner=*/false);
}

}  // namespace ddp
