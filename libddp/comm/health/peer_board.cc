// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/health/peer_board.h"

#include <time.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "libddp/base/failed_ranks.h"
#include "libddp/base/log.h"
#include "libddp/base/spin.h"
#include "libddp/comm/base/exchange.h"
#include "libddp/comm/base/operation_key.h"
#include "libddp/comm/memory/share_segment.h"

namespace ddp {
namespace {

// How long ranks are given to hear of a failure: those of this host until a busy machine must have let them look, those
// of other hosts, which do not say that they have heard, until they usually have. A progress thread that has had
// nothing to do looks ten times a second.
constexpr int64_t kKnownNs = 4'000'000'000, kKnownElsewhereNs = 150'000'000;

bool Among(const std::vector<int>& places, size_t place) {
  return std::find(places.begin(), places.end(), static_cast<int>(place)) != places.end();
}

}  // namespace

// Ranks of one host that cannot share memory (in containers) each get a board of their own: NCCL works without it.
absl::StatusOr<std::unique_ptr<PeerBoard>> PeerBoard::Create(ProcessGroup& group, const std::string& host) {
  struct Member {
    ProcessId process;
    char host[320] = {};
  };
  Member self{.process = ProcessId::OfSelf()};
  host.copy(self.host, sizeof self.host - 1);
  absl::StatusOr<std::vector<Member>> all = Exchange(group, self);
  if (!all.ok()) return all.status();
  std::vector<int> ranks;
  std::vector<ProcessId> processes;
  for (int r = 0; r < group.size(); ++r) {
    const Member& member = (*all)[static_cast<size_t>(r)];
    if (member.host != host) continue;
    ranks.push_back(r);
    processes.push_back(member.process);
  }
  const ExchangeNotes exchange = ExchangeOver(group);
  absl::StatusOr<PeerWatch> watch = PeerWatch::Create(processes);
  SegmentShare share = ControlShare(group.rank(), ranks, Bytes(ranks.size()));
  share.ready = watch.status();
  absl::StatusOr<std::shared_ptr<SharedSegment>> memory = ShareSegment(share, exchange);
  if (absl::IsUnavailable(memory.status()) && group.status().ok()) {
    if (group.rank() == 0) {
      LogWarn("NCCL ranks on one host do not learn at once of each other's deaths and failures: ",
              memory.status().message());
    }
    ranks = {group.rank()};
    watch = PeerWatch::Create({self.process});
    memory = ShareSegment(ControlShare(group.rank(), ranks, Bytes(1)), exchange);
  }
  if (!memory.ok()) return memory.status();

  std::unique_ptr<PeerBoard> board(new PeerBoard);
  board->rank_ = group.rank();
  board->memory_ = *std::move(memory);
  board->place_ = static_cast<size_t>(std::find(ranks.begin(), ranks.end(), group.rank()) - ranks.begin());
  board->other_hosts_ = static_cast<int>(ranks.size()) < group.size();
  board->ranks_ = std::move(ranks);
  board->watch_ = *std::move(watch);
  board->watch_.UseMarks(board->memory_);
  return board;
}

PeerBoard::~PeerBoard() {
  if (memory_ != nullptr && owner_.IsHere()) line(place_).departed.store(1, std::memory_order_release);
}

void PeerBoard::Post(uint64_t sequence, const BoardEntry& entry) {
  Line& mine = line(place_);
  Slot& slot = mine.ring[sequence % kRing];
  slot.number.store(0, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  slot.what.store(entry.what, std::memory_order_relaxed);
  slot.count.store(entry.count, std::memory_order_relaxed);
  slot.shape.store(entry.shape, std::memory_order_relaxed);
  slot.number.store(sequence + 1, std::memory_order_release);
  mine.posted.store(sequence + 1, std::memory_order_release);
}

void PeerBoard::PostHostCall(const OperationKey& key, uint64_t count) {
  Line& mine = line(place_);
  mine.host_what.store(key.Pack(), std::memory_order_relaxed);
  mine.host_count.store(count, std::memory_order_relaxed);
  mine.host_calls.fetch_add(1, std::memory_order_release);
}

// All ranks make the same calls in the same order. A peer that has made a call on CPU memory which this rank has not,
// but not yet this operation, is at another call. Its operations are read last: it may be moving on.
std::optional<std::string> PeerBoard::CallsOnHost(uint64_t sequence, const BoardEntry& entry) const {
  const uint64_t calls = line(place_).host_calls.load(std::memory_order_acquire);
  for (size_t p = 0; p < ranks_.size(); ++p) {
    const Line& theirs = line(p);
    if (theirs.host_calls.load(std::memory_order_acquire) <= calls) continue;
    if (theirs.posted.load(std::memory_order_acquire) > sequence) continue;
    return absl::StrCat("operation ", sequence, ": rank ", rank_, " calls ",
                        OperationKey::Unpack(entry.what).Describe(entry.count), " on GPU memory, rank ", ranks_[p],
                        " calls ", OperationKey::Unpack(theirs.host_what).Describe(theirs.host_count),
                        " on CPU memory; all ranks must make the same calls in the same order, on memory of one kind");
  }
  return std::nullopt;
}

std::optional<std::string> PeerBoard::Disagreement(uint64_t sequence, const BoardEntry& mine) const {
  for (size_t p = 0; p < ranks_.size(); ++p) {
    if (p == place_) continue;
    const Slot& theirs = line(p).ring[sequence % kRing];
    if (theirs.number.load(std::memory_order_acquire) != sequence + 1) continue;  // not there yet, or far ahead
    const uint64_t what = theirs.what.load(std::memory_order_relaxed),
                   count = theirs.count.load(std::memory_order_relaxed),
                   shape = theirs.shape.load(std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_acquire);
    if (theirs.number.load(std::memory_order_relaxed) != sequence + 1) continue;
    const bool same_call = what == mine.what && count == mine.count;
    if (same_call && shape == mine.shape) continue;
    return absl::StrCat(
        "operation ", sequence, ": rank ", rank_, " calls ", OperationKey::Unpack(mine.what).Describe(mine.count),
        ", rank ", ranks_[p], " calls ", OperationKey::Unpack(what).Describe(count),
        same_call ? ", with other counts or scales, ranges of other sizes, or memory of another kind" : "",
        "; all ranks must make the same calls in the same order");
  }
  return std::nullopt;
}

std::vector<int> PeerBoard::Missing(uint64_t sequence) const {
  std::vector<int> missing;
  for (size_t p = 0; p < ranks_.size(); ++p) {
    if (line(p).posted.load(std::memory_order_acquire) <= sequence) missing.push_back(ranks_[p]);
  }
  return missing;
}

void PeerBoard::LetThemKnow() {
  const int64_t begin = NowNs(), until = begin + kKnownNs, elsewhere = other_hosts_ ? begin + kKnownElsewhereNs : begin;
  for (int64_t now = begin; now < until && (now < elsewhere || !OthersFailed()); now = NowNs()) {
    const timespec nap{0, 100'000};
    nanosleep(&nap, nullptr);
  }
}

bool PeerBoard::OthersFailed() {
  const std::vector<int> dead = Dead();
  for (size_t p = 0; p < ranks_.size(); ++p) {
    const Line& theirs = line(p);
    const bool knows = theirs.failed.load(std::memory_order_acquire) != 0 || theirs.departed.load() != 0;
    if (p != place_ && !knows && !Among(dead, p)) return false;
  }
  return true;
}

std::vector<int> PeerBoard::MissingGraphs(uint32_t begun) const {
  std::vector<int> missing;
  for (size_t p = 0; p < ranks_.size(); ++p) {
    const uint32_t theirs = line(p).graphs.load(std::memory_order_relaxed);
    if (static_cast<int32_t>(begun - theirs) > 0) missing.push_back(ranks_[p]);
  }
  return missing;
}

bool PeerBoard::ShouldTellStall(uint64_t sequence, int64_t waited_ns, int64_t patience_ns) const {
  int before = 0;
  for (size_t p = 0; p < place_; ++p) before += line(p).posted.load(std::memory_order_acquire) > sequence;
  const uint64_t end = line(place_).posted.load(std::memory_order_relaxed);
  return election().ClaimStall(sequence, end, before, waited_ns, patience_ns);
}

// Before anybody is let go: a launcher may kill the whole job as soon as one rank has ended. What the program aborts is
// not reported.
void PeerBoard::TellFailure(const absl::Status& why, ContextObserver& observer) {
  if (absl::IsAborted(why)) return;
  election().ReportFailure([&] { observer.OnIncident(Incident(true, why.message())); });
}

FlightIncident PeerBoard::Incident(bool failure, absl::string_view what) {
  FlightIncident incident{
      .what = what, .failure = failure, .rank = rank_, .rings = {}, .dead = Dead(), .names = ranks_};
  for (size_t p = 0; p < ranks_.size(); ++p) incident.rings.push_back(&line(p).flight);
  return incident;
}

std::vector<int> PeerBoard::Dead() {
  const std::lock_guard<std::mutex> lock(watch_mutex_);
  return watch_.Dead();
}

// All that are gone are to blame; the text is of one.
absl::Status PeerBoard::Gone(uint64_t sequence) {
  const std::vector<int> dead = Dead();
  std::string text;
  std::vector<int> gone;
  for (size_t p = 0; p < ranks_.size(); ++p) {
    if (p == place_) continue;
    const bool left = line(p).departed.load(std::memory_order_acquire) != 0;
    const bool died = !left && Among(dead, p);
    if (!died && !(left && line(p).posted.load(std::memory_order_acquire) <= sequence)) continue;
    gone.push_back(ranks_[p]);
    if (!text.empty()) continue;
    text = died ? DiedText(ranks_[p], watch_.pid(static_cast<int>(p)))
                : LeftText(ranks_[p], absl::StrCat("taking part in operation ", sequence, kLeftRemedy));
  }
  return gone.empty() ? absl::OkStatus() : WithFailedRanks(absl::UnavailableError(text), gone);
}

}  // namespace ddp
