#include "libddp/comm/peer_board.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "libddp/comm/agreement.h"
#include "libddp/comm/operation.h"

namespace ddp {

// Two rounds: who is on my host, and where is the memory that the first of us has made.
absl::StatusOr<std::unique_ptr<PeerBoard>> PeerBoard::Create(ProcessGroup& group) {
  std::string host;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> host;
  absl::StatusOr<std::vector<std::string>> all = ExchangeTexts(group, absl::StrCat(host, " ", getpid()));
  if (!all.ok()) return all.status();

  std::unique_ptr<PeerBoard> board(new PeerBoard);
  board->rank_ = group.rank();
  std::vector<pid_t> pids;
  for (int r = 0; r < group.size(); ++r) {
    const std::vector<std::string> fields = absl::StrSplit((*all)[static_cast<size_t>(r)], ' ');
    int pid = 0;
    if (fields.size() != 2 || !absl::SimpleAtoi(fields[1], &pid)) {
      return absl::InternalError(absl::StrCat("rank ", r, " introduces itself in a way that is not understood"));
    }
    if (fields[0] != host) continue;
    if (r == group.rank()) board->place_ = board->ranks_.size();
    board->ranks_.push_back(r);
    pids.push_back(pid);
  }
  const size_t bytes = Bytes(board->ranks_.size());
  absl::Status status;
  if (board->place_ == 0) {
    absl::StatusOr<std::shared_ptr<SharedSegment>> made = SharedSegment::Create(bytes);
    status = made.ok() ? (*made)->Reserve(0, bytes) : made.status();
    if (status.ok()) board->memory_ = *std::move(made);
  }
  absl::StatusOr<std::vector<std::string>> handles =
      ExchangeTexts(group, board->memory_ != nullptr ? board->memory_->handle() : "");
  if (!handles.ok()) return handles.status();
  const std::string& handle = (*handles)[static_cast<size_t>(board->ranks_[0])];
  if (board->memory_ == nullptr && !handle.empty()) {
    absl::StatusOr<std::shared_ptr<SharedSegment>> opened = SharedSegment::Open(handle);
    status = opened.status();
    if (opened.ok()) board->memory_ = *std::move(opened);
  }
  if (absl::Status s = AgreeOn(group, status); !s.ok()) return s;
  board->memory_->Seal();
  board->watch_ = PeerWatch(pids);
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
std::optional<std::string> PeerBoard::CallsOnHost(uint64_t sequence) const {
  const Line& mine = line(place_);
  const uint64_t calls = mine.host_calls.load(std::memory_order_acquire);
  for (size_t p = 0; p < ranks_.size(); ++p) {
    const Line& theirs = line(p);
    if (theirs.host_calls.load(std::memory_order_acquire) <= calls) continue;
    if (theirs.posted.load(std::memory_order_acquire) > sequence) continue;
    const Slot& slot = mine.ring[sequence % kRing];
    return absl::StrCat("operation ", sequence, ": rank ", rank_, " calls ",
                        OperationKey::Unpack(slot.what).Describe(slot.count), " on GPU memory, rank ", ranks_[p],
                        " calls ", OperationKey::Unpack(theirs.host_what).Describe(theirs.host_count),
                        " on CPU memory; all ranks must make the same calls in the same order, on memory of one kind");
  }
  return std::nullopt;
}

std::optional<std::string> PeerBoard::Disagreement(uint64_t sequence) const {
  const Slot& mine = line(place_).ring[sequence % kRing];
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
    return absl::StrCat("operation ", sequence, ": rank ", rank_, " calls ",
                        OperationKey::Unpack(mine.what).Describe(mine.count), ", rank ", ranks_[p], " calls ",
                        OperationKey::Unpack(what).Describe(count),
                        same_call ? ", with other scales, ranges of other sizes, or memory of another kind" : "",
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

std::optional<std::string> PeerBoard::Gone(uint64_t sequence) {
  const std::vector<int> dead = watch_.Dead();
  for (size_t p = 0; p < ranks_.size(); ++p) {
    if (p == place_) continue;
    const bool left = line(p).departed.load(std::memory_order_acquire) != 0;
    if (left && line(p).posted.load(std::memory_order_acquire) <= sequence) {
      return absl::StrCat("rank ", ranks_[p], " has left the group without taking part in operation ", sequence,
                          "; all ranks must make the same calls in the same order");
    }
    if (!left && std::find(dead.begin(), dead.end(), static_cast<int>(p)) != dead.end()) {
      return absl::StrCat("rank ", ranks_[p], " (process ", watch_.pid(static_cast<int>(p)),
                          ") has died; see its own output for the reason, and start the job again");
    }
  }
  return std::nullopt;
}

}  // namespace ddp
