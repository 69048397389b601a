// How a group of several nodes notices failures and tells of them.
#include <sched.h>

#include <algorithm>
#include <cstddef>
#include <set>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "libddp/base/failed_ranks.h"
#include "libddp/base/log.h"
#include "libddp/comm/nodes/node_pipeline.h"

namespace ddp {
namespace {

// How long a rank that leaves a group waits until the others have been told.
constexpr int64_t kLeaveNs = 1'000'000'000;

}  // namespace

void NodePipeline::Fail(const absl::Status& why, bool background) {
  if (!owner_.IsHere()) return;
  const Lock lock = LockToCall();
  FailLocked(why);
  Drive(background, /*steal=*/false);
}

absl::Status NodePipeline::status() const {
  std::lock_guard<std::mutex> lock(launch_mutex_);
  return failure_;
}

// A failure that is found here.
void NodePipeline::FailAndTell(const absl::Status& why, bool tell_nodes) {
  if (!failure_.ok()) return;
  TellFailure(why);
  FailLocked(why, tell_nodes);
}

// The first cause on this node is that of all its ranks; over the wire it travels to the others.
void NodePipeline::FailLocked(const absl::Status& why, bool tell) {
  if (!failure_.ok()) return;
  reducing_.Fail(why);
  const absl::Status first = reducing_.status();
  spreading_.Fail(first);
  std::lock_guard<std::mutex> lock(launch_mutex_);
  failure_ = first;
  told_ = !tell;
}

// What the wire may still write to is no longer what the user sees. Returns the failure, with more where this fails.
absl::Status NodePipeline::KeepLateWritersOut(const NodeOperation& operation) {
  absl::Status status;
  const auto part = [&](char* data, size_t bytes) {
    status.Update(options_.allocations->MakePrivate(data, bytes));
    return true;
  };
  if (operation.exposed) operation.out.ForEach(part);
  if (status.ok()) return failure_;
  return WithFailedRanks(absl::Status(failure_.code(), absl::StrCat(failure_.message(), "; and ", status.message())),
                         FailedRanks(failure_));
}

// Ends every operation that the engines have let go of. What the wire works on stays.
void NodePipeline::EndPending() {
  TakeLaunched();
  for (Step* step : flight_) {
    if (!step->reducing.Done() || !step->spreading.Done()) return;
  }
  flight_.clear();
  for (const NodeOperation* operation : queue_) {
    if (!operation->Done()) notes_.Entered(*operation, FlightState::kFailed);
  }
  if (options_.observer != nullptr && !std::exchange(written_, true)) options_.observer->OnGroupFailed();
  for (NodeOperation* operation : queue_) {
    if (!operation->Done()) operation->Finish(KeepLateWritersOut(*operation));
    ended_.push_back(operation);
  }
  queue_.clear();
  begun_ = 0;
  messages_->End(failure_);
  NotePending();
}

void NodePipeline::CheckHealth(Lock&, bool background) {
  if (pending_.load(std::memory_order_relaxed) == 0) return;
  const int64_t now = NowNs();
  if (!failure_.ok() || now < next_look_ns_) return;
  next_look_ns_ = now + kLookEveryNs;
  absl::Status s = reducing_.CheckHealth();
  if (s.ok()) s = spreading_.CheckHealth();
  const auto found = std::find_if(queue_.begin(), queue_.end(), [](const NodeOperation* o) { return !o->Done(); });
  NodeOperation* const oldest = found == queue_.end() ? nullptr : *found;
  if (oldest != nullptr && oldest->noticed_ns == 0) oldest->noticed_ns = now;
  for (int r = 0; s.ok() && oldest != nullptr && r < options_.layout.size(); ++r) {
    if (finished_by_gone_[static_cast<size_t>(r)] > oldest->sequence) continue;  // also if it is here
    s = WithFailedRanks(
        absl::UnavailableError(absl::StrCat("rank ", r, " has left the group without taking part in operation ",
                                            oldest->sequence, ", ", oldest->Describe(), kLeftRemedy)),
        {r});
  }
  if (s.ok()) s = messages_->Look(now, absl::ToInt64Nanoseconds(options_.timeout), gone_);
  if (s.ok() && oldest != nullptr) {
    // Where nothing is missing from other nodes, the engines should know more.
    const int64_t timeout_ns = absl::ToInt64Nanoseconds(options_.timeout), waited = now - oldest->noticed_ns;
    if (waited > timeout_ns && (waited / 11 * 10 > timeout_ns || !Missing(*oldest).empty())) s = TimedOut(*oldest);
    if (s.ok()) TellStall(*oldest, waited);
  }
  if (s.ok()) return;
  FailAndTell(s);
  Tell(background);
  EndPending();
}

// Whose messages are missing, or have not been taken?
std::set<int> NodePipeline::Missing(const NodeOperation& operation) const {
  std::set<int> missing;
  const auto add = [&](const std::deque<Transfer>& transfers) {
    for (const Transfer& t : transfers) {
      if (t.done) continue;
      const auto& ranks = options_.wire_ranks;
      missing.insert(static_cast<int>(std::find(ranks.begin(), ranks.end(), t.peer) - ranks.begin()));
    }
  };
  add(operation.headers_in);
  for (const Step* step : flight_) {
    if (!missing.empty() || step->operation != &operation) continue;
    add(step->partials);
    add(step->results);
    add(step->sends);
  }
  if (missing.empty()) add(operation.headers_out);
  return missing;
}

absl::Status NodePipeline::TimedOut(const NodeOperation& operation) const {
  const std::set<int> missing = Missing(operation);
  const bool arrived =
      std::all_of(operation.headers_in.begin(), operation.headers_in.end(), [](const Transfer& t) { return t.done; });
  return WithFailedRanks(
      absl::DeadlineExceededError(absl::StrCat(
          "rank ", options_.rank, ": ", operation.Describe(), ", timed out after ",
          absl::FormatDuration(options_.timeout), ": ",
          arrived ? "did not finish their part: " : "did not arrive: ", NodesOf(missing),
          "; the node or the link to it is down, or the ranks are stopped, stuck, slow (DDP_TIMEOUT sets the limit in "
          "seconds), or made another call")),
      std::vector<int>(missing.begin(), missing.end()));
}

// "rank 2 on node 1 (host b, ranks 2, 3)"
std::string NodePipeline::NodesOf(const std::set<int>& ranks) const {
  const NodeLayout& layout = options_.layout;
  std::vector<std::string> texts;
  for (int n = 0; n < layout.nodes(); ++n) {
    std::vector<int> here;
    for (const int r : ranks) {
      if (layout.node_of(r) == n) here.push_back(r);
    }
    if (here.empty()) continue;
    const std::vector<int>& all = layout.ranks[static_cast<size_t>(n)];
    texts.push_back(absl::StrCat("rank ", absl::StrJoin(here, ", "), " on node ", n, " (host ",
                                 options_.host_names[static_cast<size_t>(all[0])], ", rank ", absl::StrJoin(all, ", "),
                                 ")"));
  }
  return texts.empty() ? absl::StrCat("ranks of node ", node(), " itself") : absl::StrJoin(texts, ", ");
}

// --- news -----------------------------------------------------------------------------------------------------------

void NodePipeline::ListenForNews() {
  Transfer& t = mail_->listening;
  if (t.data != nullptr) return;
  mail_->in = News();
  t = Transfer{.peer = Transfer::kAnyPeer, .tag = kNews, .data = &mail_->in, .bytes = sizeof(News)};
  if (absl::Status s = wire_.Receive(&t); !s.ok()) FailLocked(s, false);
}

void NodePipeline::HearNews() {
  const News& news = mail_->in;
  mail_->listening = Transfer();
  if (const absl::Status failure = news.failure.Unpack(); failure.ok()) {
    finished_by_gone_[static_cast<size_t>(news.rank)] = news.finished;
    gone_[static_cast<size_t>(news.rank)] = {true, news.messages};
  } else {
    FailAndTell(failure, /*tell_nodes=*/false);
  }
  if (failure_.ok()) ListenForNews();
}

size_t NodePipeline::NewsBytes() const { return offsetof(News, failure) + PackedError::Bytes(options_.layout.size()); }

// Sends, once, this rank's failure to all ranks of other nodes, or that it leaves in good order to all ranks.
void NodePipeline::Tell(bool background) {
  if (told_ || !wire_.Usable(background)) return;
  told_ = true;
  for (int r = 0; r < options_.layout.size(); ++r) {
    if (r == options_.rank || (!failure_.ok() && !IsElsewhere(r))) continue;
    News& news = mail_->out.emplace_back();
    news.rank = options_.rank;
    news.finished = finished_;
    news.messages = messages_->envelopes_to(r);
    news.failure.Pack(failure_);
    Transmit(&mail_->telling, /*send=*/true, r, kNews, &news, NewsBytes());
  }
}

void NodePipeline::Leave() {
  if (failure_.ok() && (!queue_.empty() || messages_->Pending())) {
    FailLocked(absl::AbortedError(
        absl::StrCat("rank ", options_.rank, ": the process group was destroyed with operations pending")));
    do EndPending();
    while (!queue_.empty());
  } else if (failure_.ok()) {
    told_ = false;
  }
  Tell(/*background=*/false);
  if (wire_.Usable(/*background=*/false)) {
    const auto on_its_way = [](const Transfer& t) { return t.done; };
    const int64_t until = NowNs() + kLeaveNs;
    while (!(std::all_of(mail_->telling.begin(), mail_->telling.end(), on_its_way) && messages_->AllLeft()) &&
           NowNs() < until) {
      if (!wire_.Poll().ok()) break;
      sched_yield();
    }
    const bool heard = mail_->listening.data != nullptr && (mail_->listening.done || !wire_.Cancel(&mail_->listening));
    // What the others will say when they leave, too, would stay in MPI's memory.
    const auto to_come = std::count(finished_by_gone_.begin(), finished_by_gone_.end(), kHere) - 1 - (heard ? 1 : 0);
    if (failure_.ok()) wire_.Drain(kNews, NewsBytes(), static_cast<int>(to_come));
    messages_->StopListening();
    // Once more: of what has been told nothing shall be left to MPI alone, which moves only when it is called.
    wire_.Poll().IgnoreError();
  }
  if (wire_.Abandon()) {
    for (NodeOperation* operation : ended_) operation->Unref();
    return;
  }
  // Not freed, ever.
  (void)steps_.release();
  (void)mail_.release();
  (void)messages_.release();
  new std::shared_ptr<SharedSegment>(options_.segment);
}

}  // namespace ddp
