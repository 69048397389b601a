// SPDX-License-Identifier: Apache-2.0
#include "libddp/observe/timeline.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <functional>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "libddp/base/log.h"
#include "libddp/base/spin.h"

namespace ddp {
namespace {

constexpr size_t kMostEvents = size_t{1} << 19;
constexpr int kClockRounds = 64;

template <typename T>
Buffer Bytes(T* data, size_t count) {
  return {const_cast<void*>(static_cast<const void*>(data)), count * sizeof(T), DType::kUInt8, {}};
}

// Gives up for good: the buffers are on their way out.
absl::Status Finish(ProcessGroup& world, Work work, absl::Time deadline) {
  const absl::Status status = work.Wait(deadline);
  if (!status.ok() && world.status().ok()) world.Abort(status);
  return status;
}

void SetName(TimelineEvent& e, absl::string_view name) {
  std::memcpy(e.name, name.data(), std::min(name.size(), sizeof e.name - 1));
}

// Tells hosts apart: processes of one host share the clock.
uint64_t HostNumber() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  return std::hash<std::string>()(boot);
}

absl::Status WriteFile(const std::string& path, const std::string& text) {
  std::ofstream file(path, std::ios::trunc);
  file << text;
  file.close();
  if (file.fail())
    return absl::UnavailableError(absl::StrCat("cannot write the timeline to ", path, ": ", std::strerror(errno)));
  return absl::OkStatus();
}

}  // namespace

// --- clocks ---------------------------------------------------------------------------------------------------------

int64_t EstimateClockOffset(absl::Span<const ClockRound> rounds, size_t rank, bool same_clock) {
  int64_t low = std::numeric_limits<int64_t>::min(), high = std::numeric_limits<int64_t>::max();
  for (const ClockRound& round : rounds) {
    high = std::min(high, round.heard[rank] - round.sent[0]);
    low = std::max(low, round.sent[rank] - round.heard[0]);
  }
  if (same_clock && low <= 0 && 0 <= high) return 0;
  return low + (high - low) / 2;
}

int64_t RankClock::ToRank0(int64_t ns) const {
  const auto span = static_cast<double>(end.at_ns - begin.at_ns);
  const auto drift = static_cast<double>(end.offset_ns - begin.offset_ns);
  // In the time in which rank 0's clock goes on by `span` this one goes on by span + drift, of which so much has
  // passed.
  const double passed = static_cast<double>(ns - begin.offset_ns - begin.at_ns);
  const double offset = span <= 0 || span + drift <= 0 ? 0 : drift * passed / (span + drift);
  return ns - begin.offset_ns - static_cast<int64_t>(offset);
}

absl::Status Timeline::CompareClocks(ProcessGroup& world, absl::Time deadline, std::vector<ClockReading>* readings) {
  const auto n = static_cast<size_t>(world.size());
  std::vector<ClockRound> rounds;
  int64_t mine[2] = {0, 0};  // when this round is sent, when the one before was heard
  std::vector<int64_t> all(2 * n);
  for (int i = 0; i <= kClockRounds; ++i) {
    mine[0] = options_.now_ns();
    if (absl::Status s = Finish(world, world.AllGather(Bytes(mine, 2), Bytes(all.data(), all.size())), deadline);
        !s.ok()) {
      return s;
    }
    mine[1] = options_.now_ns();
    for (size_t r = 0; i > 0 && r < n; ++r) rounds.back().heard.push_back(all[2 * r + 1]);
    ClockRound& round = rounds.emplace_back();
    for (size_t r = 0; r < n; ++r) round.sent.push_back(all[2 * r]);
  }
  rounds.pop_back();  // nobody has told yet when it was heard
  readings->clear();
  for (size_t r = 0; r < n; ++r) {
    readings->push_back({rounds.back().sent[0], EstimateClockOffset(rounds, r, hosts_[r] == hosts_[0])});
  }
  return absl::OkStatus();
}

// --- collecting -----------------------------------------------------------------------------------------------------

Timeline::Timeline(TimelineOptions options)
    : options_([&options] {
        if (options.now_ns == nullptr) options.now_ns = NowNs;
        return std::move(options);
      }()),
      host_(HostNumber()) {}

void Timeline::Keep(const TimelineEvent& event) {
  events_.push_back(event);
  if (events_.size() <= kMostEvents) return;
  events_.pop_front();
  ++dropped_;
}

void Timeline::OnOperation(const OperationEvent& event) noexcept {
  if (event.state == OperationEvent::State::kCalled) return;
  TimelineEvent e{.type = TimelineEvent::Type::kOperation,
                  .dtype = event.dtype,
                  .failed = event.state == OperationEvent::State::kFailed,
                  .bucket = event.bucket,
                  .group = static_cast<uint32_t>(event.group),
                  .number = event.sequence,
                  .size = event.count};
  const int64_t called = event.called_ns != 0 ? event.called_ns : event.ended_ns;
  const int64_t times[] = {called, event.announced_ns, event.ready_ns, event.ended_ns};
  std::copy(std::begin(times), std::end(times), e.ns);
  SetName(e, event.kind);
  std::lock_guard<std::mutex> lock(mutex_);
  Keep(e);
}

void Timeline::OnBucket(const BucketEvent& event) noexcept {
  constexpr size_t kNamed = 8;
  std::string label = absl::StrJoin(event.parameters.subspan(0, kNamed), ", ");
  if (event.parameters.size() > kNamed) {
    absl::StrAppend(&label, " and ", event.parameters.size() - kNamed, " more");
  }
  std::lock_guard<std::mutex> lock(mutex_);
  // As many as there are buckets, from the newest plan backwards.
  auto found = std::find(labels_.rbegin(), labels_.rend(), label);
  if (found == labels_.rend()) {
    labels_.push_back(std::move(label));
    found = labels_.rbegin();
  }
  Keep({.type = TimelineEvent::Type::kBucket,
        .bucket = event.bucket,
        .label = static_cast<int32_t>(labels_.rend() - found) - 1,
        .number = static_cast<uint64_t>(event.step),
        .size = event.bytes,
        .ns = {event.ready_ns, event.launched_ns, 0, event.done_ns}});
}

void Timeline::OnScope(const ScopeEvent& event) noexcept {
  if (event.begin) return;
  TimelineEvent e{.ns = {event.begin_ns, 0, 0, event.end_ns}};
  SetName(e, event.name);
  std::lock_guard<std::mutex> lock(mutex_);
  const int thread = gettid();
  auto found = std::find(threads_.begin(), threads_.end(), thread);
  if (found == threads_.end()) found = threads_.insert(threads_.end(), thread);
  e.thread = static_cast<int32_t>(found - threads_.begin());
  Keep(e);
}

// --- writing --------------------------------------------------------------------------------------------------------

absl::Status Timeline::Begin(ProcessGroup& world) {
  Peer mine{.host = host_, .count = 0, .label_bytes = 0, .error = 0};
  if (world.rank() == 0 && !std::ofstream(options_.path, std::ios::app).is_open()) mine.error = errno;
  std::vector<Peer> peers(static_cast<size_t>(world.size()));
  const absl::Time forever = absl::InfiniteFuture();  // the group's own time-out applies
  absl::Status s = Finish(world, world.AllGather(Bytes(&mine, 1), Bytes(peers.data(), peers.size())), forever);
  if (!s.ok()) return s;
  if (peers[0].error != 0) {
    return absl::InvalidArgumentError(absl::StrCat("rank 0 cannot write the timeline to ", options_.path, ": ",
                                                   std::strerror(peers[0].error),
                                                   "; give a file in a folder that exists and can be written to"));
  }
  for (const Peer& peer : peers) hosts_.push_back(peer.host);
  return CompareClocks(world, forever, &begin_);
}

absl::Status Timeline::End(ProcessGroup& world, absl::Duration patience) {
  if (begin_.empty()) return absl::OkStatus();  // Begin has failed, and said so
  absl::Status s = world.status();
  if (s.ok() && static_cast<size_t>(world.size()) != hosts_.size()) {
    s = absl::FailedPreconditionError("ranks have died, and the others have gone on without them");
  }
  if (s.ok()) s = Gather(world, absl::Now() + patience);
  if (s.ok()) return s;
  LogWarn("rank ", options_.rank, ": the timeline is not gathered, each rank writes its own part to ", options_.path,
          ".rank", options_.rank, ": ", s.message());
  return WriteOwn();
}

RankEvents Timeline::Own() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (dropped_ > 0) {
    LogWarn("rank ", options_.rank, ": the timeline has the last ", events_.size(), " events; ", dropped_,
            " before them are left out");
  }
  return {{events_.begin(), events_.end()}, labels_};
}

absl::Status Timeline::Gather(ProcessGroup& world, absl::Time deadline) {
  const auto n = static_cast<size_t>(world.size());
  std::vector<ClockReading> end;
  if (absl::Status s = CompareClocks(world, deadline, &end); !s.ok()) return s;
  RankEvents own = Own();
  std::string labels = absl::StrJoin(own.labels, "\n");
  const Peer mine{.host = host_,
                  .count = static_cast<int64_t>(own.events.size()),
                  .label_bytes = static_cast<int64_t>(labels.size()),
                  .error = 0};
  std::vector<Peer> peers(n);
  absl::Status s = Finish(world, world.AllGather(Bytes(&mine, 1), Bytes(peers.data(), n)), deadline);
  if (!s.ok()) return s;
  // All to rank 0, which keeps its own.
  std::vector<RankEvents> gathered(n);
  std::vector<std::string> gathered_labels(n);
  std::vector<Buffer> sent = {Bytes(own.events.data(), 0)}, received = sent;
  std::vector<size_t> sent_bytes(n), received_bytes(n);
  if (options_.rank != 0) {
    sent = {Bytes(own.events.data(), own.events.size()), Bytes(labels.data(), labels.size())};
    sent_bytes[0] = sent[0].count + sent[1].count;
  }
  for (size_t r = 1; options_.rank == 0 && r < n; ++r) {
    gathered[r].events.resize(static_cast<size_t>(peers[r].count));
    gathered_labels[r].resize(static_cast<size_t>(peers[r].label_bytes));
    received.push_back(Bytes(gathered[r].events.data(), gathered[r].events.size()));
    received.push_back(Bytes(gathered_labels[r].data(), gathered_labels[r].size()));
    received_bytes[r] = received[received.size() - 2].count + received.back().count;
  }
  s = Finish(world, world.AllToAll(sent, sent_bytes, received, received_bytes), deadline);
  if (!s.ok() || options_.rank != 0) return s;
  gathered[0] = std::move(own);
  std::vector<int> ranks;
  std::vector<RankClock> clocks;
  for (size_t r = 0; r < n; ++r) {
    if (r > 0) gathered[r].labels = absl::StrSplit(gathered_labels[r], '\n');
    ranks.push_back(static_cast<int>(r));
    clocks.push_back({begin_[r], end[r]});
  }
  return WriteFile(options_.path, ChromeTrace(ranks, gathered, clocks));
}

absl::Status Timeline::WriteOwn() {
  const RankEvents own = Own();
  RankClock clock;
  if (!begin_.empty()) clock.begin = begin_[static_cast<size_t>(options_.rank)];
  std::lock_guard<std::mutex> lock(own_file_mutex_);  // two groups may fail at once
  return WriteFile(absl::StrCat(options_.path, ".rank", options_.rank), ChromeTrace({options_.rank}, {own}, {clock}));
}

}  // namespace ddp
