// SPDX-License-Identifier: Apache-2.0
// How the ranks of a Context go on in other groups.
#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "libddp/base/failed_ranks.h"
#include "libddp/base/log.h"
#include "libddp/comm/base/exchange.h"
#include "libddp/comm/base/internal_group.h"
#include "libddp/comm/context_impl.h"
#include "libddp/comm/gpu/device_group.h"
#include "libddp/comm/local_group.h"
#include "libddp/comm/nccl/advice.h"

namespace ddp {
namespace {

bool Has(const std::vector<int>& ranks, int rank) { return std::find(ranks.begin(), ranks.end(), rank) != ranks.end(); }

// An error of a group, which numbers its own ranks.
absl::Status InWorldRanks(absl::Status error, const WorldRanks& of_group) {
  std::vector<int> ranks;
  for (const int r : FailedRanks(error)) ranks.push_back(of_group.of(r));
  return ranks.empty() ? error : WithFailedRanks(std::move(error), ranks);
}

// Of the end of a world in the middle of the work.
nccl::CauseAndRemedy WhyItFailed(const absl::Status& error, absl::string_view backend, const std::vector<int>& lost) {
  if (!lost.empty()) {
    return {"a rank has ended or is stuck", absl::StrCat("look at the output of rank ", absl::StrJoin(lost, ", "))};
  }
  if (absl::IsAborted(error) || absl::IsCancelled(error)) return {};  // the program's own doing
  nccl::CauseAndRemedy known;
  if (backend == "nccl") known = nccl::Recognise(error.message(), nccl::kInternalError, 0);
  if (!known.cause.empty()) return known;
  if (absl::IsDeadlineExceeded(error)) {
    return {
        "a rank or its GPU is stuck, or slow",
        "look at the ranks that are named, and for Xid errors in dmesg; raise DDP_TIMEOUT if a step takes that long"};
  }
  if (backend != "nccl") return {};
  return {"a fault of a GPU, its link, its driver or NCCL that shows now and then, since NCCL had worked until then",
          "look for Xid errors in dmesg; NCCL_DEBUG=WARN in the environment says more"};
}

}  // namespace

absl::Status ContextImpl::CheckMembers(absl::Span<const int> ranks) const {
  const auto error = [&](auto&&... what) {
    return Invalid("NewGroup of ranks ", absl::StrJoin(ranks, ", "), ": ", what...);
  };
  std::set<int> seen;
  for (const int r : ranks) {
    if (r < 0 || r >= info_.world_size) return error("the world has no rank ", r);
    if (!seen.insert(r).second) return error("rank ", r, " is listed twice");
  }
  return seen.count(info_.rank) != 0 ? absl::OkStatus() : error("this rank is not among them");
}

absl::StatusOr<std::unique_ptr<ProcessGroup>> ContextImpl::NewGroup(absl::Span<const int> ranks, absl::Time deadline) {
  if (absl::Status s = CheckMembers(ranks); !s.ok()) return s;
  if (ranks.size() == 1) {
    return OnDevice(CreateLocalGroup(observer_->listener(), timeout_, WorldRanks({ranks.begin(), ranks.end()})));
  }
  if (store_ == nullptr) {
    return absl::FailedPreconditionError(absl::StrCat(
        "rank ", info_.rank, ": NewGroup needs a store, and a world started by ", info_.launcher,
        " has none; start the ranks by torchrun, or by a launcher of your own with ContextOptions::store"));
  }
  absl::StatusOr<std::unique_ptr<ProcessGroup>> group = MeetInStore(ranks, GroupBy(deadline));
  if (group.ok()) group = OnDevice(*std::move(group));
  if (group.ok()) return group;
  return WithPackedFailedRanks(
      absl::Status(group.status().code(),
                   absl::StrCat(group.status().message(), " (NewGroup of ranks ", absl::StrJoin(ranks, ","), ")")),
      PackFailedRanks(group.status()));
}

// Keys are of bounded length, lists of ranks are not.
std::string ContextImpl::KeyOf(absl::string_view what, absl::Span<const int> ranks) const {
  uint64_t hash = 14695981039346656037u;
  for (const char c : absl::StrJoin(ranks, ",")) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211u;
  return absl::StrCat(key_prefix_, what, "/", absl::Hex(hash));
}

// A group on CPU memory, of two ranks or more. Their n-th attempt at a group of this list uses keys of its own. One
// that has failed for another rank would fail here at once: it is passed over, so that a rank that comes late joins the
// attempt that the others are at. But where a rank has died no attempt can succeed, and a rank that cannot see that
// from its container learns it from the first one.
absl::StatusOr<std::unique_ptr<ProcessGroup>> ContextImpl::MeetInStore(absl::Span<const int> ranks,
                                                                       GroupOptions options) {
  std::string name;
  absl::Status failure;
  do {
    name = absl::StrCat(KeyOf("group", ranks), "/", ++attempts_[absl::StrJoin(ranks, ",")]);
    failure = StoreRendezvousFailure(*store_, name);
  } while (!failure.ok() && !absl::IsUnavailable(failure));
  const int rank = static_cast<int>(std::find(ranks.begin(), ranks.end(), info_.rank) - ranks.begin());
  const std::unique_ptr<Rendezvous> rendezvous = CreateStoreRendezvous(
      store_, rank, static_cast<int>(ranks.size()), name, {ranks.begin(), ranks.end()}, [this] { return DeadRanks(); });
  options.world_ranks = WorldRanks({ranks.begin(), ranks.end()});
  return CreateHierarchicalGroup(*rendezvous, options);
}

// Of the world, by the group in which they met last.
std::vector<int> ContextImpl::DeadRanks() const {
  const auto* const watch = dynamic_cast<const InternalGroup*>(spare_.get());
  std::vector<int> dead;
  if (watch == nullptr) return dead;
  const WorldRanks ranks = watch->world_ranks();
  for (const int r : watch->Dead()) dead.push_back(ranks.of(r));
  return dead;
}

// --- recovery -------------------------------------------------------------------------------------------------------

absl::Status ContextImpl::Recover(std::optional<absl::Duration> patience) {
  const absl::Status cause = InWorldRanks(world_->status(), WorldRanksOf(*world_));
  if (cause.ok()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "rank ", info_.rank, ": Recover, but the world has not failed; call it when an operation of the world has"));
  }
  const absl::Duration limit = patience.value_or(timeout_);
  const absl::Status free = AwaitFree(*world_);
  absl::StatusOr<std::unique_ptr<ProcessGroup>> next = GoOnWithAll(free, limit);
  if (!next.ok() && free.ok()) next = GoOnWithout(next.status(), limit);
  if (!next.ok()) return next.status();
  failed_worlds_.push_back(std::exchange(world_, *std::move(next)));
  TellRecovery(cause);
  return absl::OkStatus();
}

// All who were in the world, if they come and the GPUs of all are `free`.
absl::StatusOr<std::unique_ptr<ProcessGroup>> ContextImpl::GoOnWithAll(const absl::Status& free,
                                                                       absl::Duration patience) {
  if (spare_ == nullptr) {
    if (!free.ok()) return free;
  } else {
    absl::Status met = spare_->SetTimeout(patience);
    if (met.ok()) met = Agree(*spare_, free);
    if (met.ok()) met = spare_->SetTimeout(timeout_);
    if (!met.ok()) return InWorldRanks(met, WorldRanksOf(*spare_));
  }
  if (choice_.backend == "nccl") forget_nccl_();
  if (device_.kind == Device::Kind::kCuda) backend_ = "hierarchical";  // others may fail before this: see OnDevice
  return MakeWorld();
}

// The ranks that are left without those that `lost` names; and without those that do not come either.
absl::StatusOr<std::unique_ptr<ProcessGroup>> ContextImpl::GoOnWithout(absl::Status lost, absl::Duration patience) {
  for (std::vector<int> members = members_;;) {
    const std::vector<int> gone = FailedRanks(lost);
    const auto end = std::remove_if(members.begin(), members.end(), [&](int r) { return Has(gone, r); });
    if (end == members.end()) return lost;  // no rank's fault
    members.erase(end, members.end());
    if (!Has(members, info_.rank)) return lost;
    std::unique_ptr<ProcessGroup> spare;
    if (members.size() > 1) {
      if (store_ == nullptr) return NoStoreToGoOn(gone, lost);
      GroupOptions options = GroupBy(absl::Now() + patience);
      options.observer = nullptr;
      absl::StatusOr<std::unique_ptr<ProcessGroup>> met = MeetInStore(members, options);
      lost = met.status();
      if (!met.ok()) continue;
      spare = *std::move(met);
    }
    if (absl::Status s = ClaimSuccession(members, patience); !s.ok()) return s;
    spare_ = std::move(spare);
    members_ = members;
    absl::StatusOr<std::unique_ptr<ProcessGroup>> world = MakeWorld();
    if (world.ok()) return world;
    lost = world.status();
  }
}

// The first ranks that go on after the present members have the world; a rank that comes when they have gone does not
// make another one.
absl::Status ContextImpl::ClaimSuccession(const std::vector<int>& members, absl::Duration patience) {
  if (store_ == nullptr) return absl::OkStatus();
  const std::string name = KeyOf("after", members_);
  const absl::Time deadline = absl::Now() + patience;
  const std::string by = absl::StrCat(name, "/by");
  const absl::StatusOr<int64_t> claims = store_->Add(absl::StrCat(name, "/claims"), 1, deadline);
  absl::Status status = claims.status();
  if (status.ok() && *claims == 1) status = store_->Set(by, absl::StrJoin(members, ","), deadline);
  const absl::StatusOr<std::string> owners = status.ok() ? store_->Get(by, deadline) : status;
  if (absl::IsDeadlineExceeded(owners.status())) {
    return absl::DeadlineExceededError(
        absl::StrCat("rank ", info_.rank, ": Recover cannot learn whether others went on: ", owners.status().message(),
                     "; end this process"));
  }
  if (!owners.ok()) return members.size() == 1 ? absl::OkStatus() : owners.status();  // who served the store is gone
  const std::vector<absl::string_view> ranks = absl::StrSplit(*owners, ',');
  if (std::find(ranks.begin(), ranks.end(), absl::StrCat(info_.rank)) != ranks.end()) return absl::OkStatus();
  return WithFailedRanks(absl::DeadlineExceededError(absl::StrCat("rank ", info_.rank, ": Recover came too late: rank ",
                                                                  *owners, " went on without it; end this process")),
                         {info_.rank});
}

absl::Status ContextImpl::NoStoreToGoOn(const std::vector<int>& gone, const absl::Status& lost) const {
  return absl::FailedPreconditionError(absl::StrCat(
      "rank ", info_.rank, ": Recover cannot go on without rank ", absl::StrJoin(gone, ", "),
      ": there is no store in which the others could meet, since ", info_.launcher,
      " has started them, which also ends all ranks when one dies. Start again from a checkpoint; to go on without a "
      "rank, use a launcher that lets the others live, and ContextOptions::store (",
      lost.message(), ")"));
}

// Of the present members.
absl::StatusOr<std::unique_ptr<ProcessGroup>> ContextImpl::MakeWorld() {
  const WorldRanks ranks(members_);
  absl::StatusOr<std::unique_ptr<ProcessGroup>> world = spare_ == nullptr
                                                            ? CreateLocalGroup(observer_->listener(), timeout_, ranks)
                                                            : CreateGroupOfSameRanks(*spare_, observer_.get());
  if (world.ok()) world = OnDevice(*std::move(world));
  if (!world.ok()) return InWorldRanks(world.status(), ranks);
  return world;
}

void ContextImpl::TellRecovery(const absl::Status& cause) {
  const ProcessGroup& world = *world_;
  std::vector<int> lost;
  for (int r = 0; r < info_.world_size; ++r) {
    if (!Has(members_, r)) lost.push_back(r);
  }
  const nccl::CauseAndRemedy why = WhyItFailed(cause, choice_.backend, lost);
  const bool without_p2p = choice_.without_p2p && world.backend() == "nccl";
  choice_ = {.backend = std::string(world.backend()), .without_p2p = without_p2p};
  if (const std::vector<int> failed = FailedRanks(cause); failed.size() == 1) choice_.failed_rank = failed[0];
  choice_.failed_step = "an operation of the world before";
  choice_.failure = absl::StrCat("failed (", cause.message(), ")");
  choice_.cause = why.cause;
  choice_.remedy = why.remedy;
  choice_.text =
      absl::StrCat("backend ", choice_.backend, " with ", lost.empty() ? "all " : "", world.size(),
                   world.size() == 1 ? " rank" : " ranks",
                   lost.empty() ? "" : absl::StrCat(", without rank ", absl::StrJoin(lost, ", ")), ", since ",
                   choice_.failed_step, " ", choice_.failure, why.cause.empty() ? "" : "; likely cause: ", why.cause,
                   why.remedy.empty() ? "" : "; remedy: ", why.remedy);
  if (world.rank() == 0) LogWarn("rank ", info_.rank, ": goes on: ", choice_.text);
}

}  // namespace ddp
