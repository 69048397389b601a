// SPDX-License-Identifier: Apache-2.0
// A Context as comm has it.
#ifndef LIBDDP_COMM_CONTEXT_IMPL_H_
#define LIBDDP_COMM_CONTEXT_IMPL_H_

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "ddp/context.h"
#include "ddp/process_group.h"
#include "ddp/store.h"
#include "libddp/base/owner_process.h"
#include "libddp/comm/base/progress_thread.h"
#include "libddp/comm/health/context_observer.h"
#include "libddp/comm/hierarchical_group.h"
#include "libddp/comm/nccl/nccl_group.h"
#include "libddp/launch/launch_info.h"
#include "libddp/launch/mpi_session.h"
#include "libddp/launch/rendezvous.h"

namespace ddp {

class ContextImpl final : public Context {
 public:
  ~ContextImpl() override;

  int rank() const override { return info_.rank; }
  int world_size() const override { return info_.world_size; }
  int local_rank() const override { return info_.local_rank; }
  int local_world_size() const override { return info_.local_world_size; }
  absl::string_view launcher() const override { return info_.launcher; }
  absl::Duration timeout() const override { return timeout_; }
  Device device() const override { return device_; }
  const BackendChoice& backend_choice() const override { return choice_; }
  ProcessGroup& world() override { return *world_; }
  absl::Status Recover(std::optional<absl::Duration> patience) override;
  absl::StatusOr<std::unique_ptr<ProcessGroup>> NewGroup(absl::Span<const int> ranks, absl::Time deadline) override;

  absl::Status Start(const ContextOptions& options);

 private:
  absl::Status Identify(const ContextOptions& options);
  absl::Status ReadSettings(const ContextOptions& options);
  absl::Status ChooseBackend(const ContextOptions& options);
  absl::StatusOr<Rendezvous*> Meet(const ContextOptions& options, const absl::Status& settings);
  absl::StatusOr<Rendezvous*> OpenRendezvous(const ContextOptions& options, absl::Duration patience);
  absl::StatusOr<std::unique_ptr<ProcessGroup>> OverCpu(Rendezvous* rendezvous);
  absl::StatusOr<std::unique_ptr<ProcessGroup>> OnDevice(std::unique_ptr<ProcessGroup> over_cpu);
  NcclGroupOptions OnGpuBy() const;
  absl::StatusOr<std::unique_ptr<ProcessGroup>> ChooseOnGpus(std::unique_ptr<ProcessGroup> over_cpu);
  absl::StatusOr<std::unique_ptr<ProcessGroup>> MeetInStore(absl::Span<const int> ranks, GroupOptions options);
  std::string KeyOf(absl::string_view what, absl::Span<const int> ranks) const;
  absl::Status ClaimSuccession(const std::vector<int>& members, absl::Duration patience);
  std::vector<int> DeadRanks() const;
  absl::StatusOr<std::unique_ptr<ProcessGroup>> MakeWorld();
  absl::StatusOr<std::unique_ptr<ProcessGroup>> GoOnWithAll(const absl::Status& free, absl::Duration patience);
  absl::StatusOr<std::unique_ptr<ProcessGroup>> GoOnWithout(absl::Status lost, absl::Duration patience);
  absl::Status NoStoreToGoOn(const std::vector<int>& gone, const absl::Status& lost) const;
  void TellRecovery(const absl::Status& cause);
  absl::Status CheckMembers(absl::Span<const int> ranks) const;
  template <typename... Parts>
  absl::Status Invalid(const Parts&... what) const {
    return absl::InvalidArgumentError(absl::StrCat("rank ", info_.rank, ": ", what...));
  }
  GroupOptions GroupBy(absl::Time deadline) {
    return {.timeout = timeout_,
            .deadline = deadline,
            .stall_warning = stall_warning_,
            .progress = progress_.get(),
            .observer = observer_.get()};
  }

  const OwnerProcess process_;
  // Destroyed in reverse order: the group first, MPI last.
  LaunchInfo info_;
  absl::Duration timeout_ = absl::InfiniteDuration(), stall_warning_;
  std::string backend_;  // "auto" until it is known what works on the GPUs
  BackendChoice choice_;
  bool chosen_ = false;  // by the library
  PeerLimits peer_copies_;
  bool fresh_probe_ = false;
  Device device_;
  nccl::Comm* nccl_comm_ = nullptr;  // the program's, for the world, until that is made
  std::unique_ptr<MpiSession> mpi_;
  std::shared_ptr<Store> store_;
  std::string key_prefix_;               // of this world's keys in it
  std::map<std::string, int> attempts_;  // at a NewGroup of these ranks
  std::unique_ptr<Rendezvous> over_store_;
  std::unique_ptr<ContextObserver> observer_;
  std::unique_ptr<ProgressThread> progress_ = std::make_unique<ProgressThread>([this] {
    if (mpi_ != nullptr) mpi_->Progress();
  });
  // In which the ranks meet when the world has failed; on CPU memory, null for one rank. The world is split off from
  // it.
  std::unique_ptr<ProcessGroup> spare_;
  std::vector<std::unique_ptr<ProcessGroup>> failed_worlds_;  // models may still be bound to them
  std::unique_ptr<ProcessGroup> world_;
  std::vector<int> members_;                   // the ranks that have not been left out
  std::function<void()> forget_nccl_ = [] {};  // what was remembered of it, should it fail
};

}  // namespace ddp

#endif  // LIBDDP_COMM_CONTEXT_IMPL_H_
