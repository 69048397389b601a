// SPDX-License-Identifier: Apache-2.0
// The file format: Chrome's trace events, an object with one event per line.
// https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
#include <algorithm>
#include <limits>
#include <map>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "libddp/observe/json.h"
#include "libddp/observe/timeline.h"

namespace ddp {
namespace {

// Rows of a rank, in the order in which they are shown: the program's threads, buckets, operations.
constexpr int kBucketRow = 1'000;
constexpr int kOperationRow = 1'000'000;

class Trace {
 public:
  explicit Trace(int64_t zero_ns) : zero_ns_(zero_ns) {}

  // A stretch on one row; `args` as JSON, without the braces.
  void Add(int rank, int row, absl::string_view name, int64_t begin_ns, int64_t end_ns, absl::string_view args) {
    absl::StrAppendFormat(&text_, ",\n{\"ph\":\"X\",\"pid\":%d,\"tid\":%d,\"ts\":%.3f,\"dur\":%.3f,\"name\":%s", rank,
                          row, static_cast<double>(begin_ns - zero_ns_) / 1e3,
                          static_cast<double>(std::max<int64_t>(0, end_ns - begin_ns)) / 1e3, JsonQuote(name));
    absl::StrAppend(&text_, args.empty() ? "" : ",\"args\":{", args, args.empty() ? "}" : "}}");
  }
  void NameRank(int rank) {
    absl::StrAppendFormat(
        &text_, ",\n{\"ph\":\"M\",\"pid\":%d,\"name\":\"process_name\",\"args\":{\"name\":\"rank %d\"}}", rank, rank);
    absl::StrAppendFormat(&text_,
                          ",\n{\"ph\":\"M\",\"pid\":%d,\"name\":\"process_sort_index\",\"args\":{\"sort_index\":%d}}",
                          rank, rank);
  }
  void NameRow(int rank, int row, absl::string_view name) {
    absl::StrAppendFormat(&text_,
                          ",\n{\"ph\":\"M\",\"pid\":%d,\"tid\":%d,\"name\":\"thread_name\",\"args\":{\"name\":%s}}",
                          rank, row, JsonQuote(name));
    absl::StrAppendFormat(
        &text_, ",\n{\"ph\":\"M\",\"pid\":%d,\"tid\":%d,\"name\":\"thread_sort_index\",\"args\":{\"sort_index\":%d}}",
        rank, row, row);
  }

  std::string Finish() const {
    return absl::StrCat("{\"displayTimeUnit\":\"ms\",\"traceEvents\":[",
                        absl::string_view(text_).substr(std::min<size_t>(1, text_.size())), "\n]}\n");
  }

 private:
  const int64_t zero_ns_;
  std::string text_;
};

// Operations overlap, and a row holds what does not: each takes the first row that is free.
class Rows {
 public:
  int Take(int64_t begin_ns, int64_t end_ns) {
    auto row = std::find_if(ends_.begin(), ends_.end(), [&](int64_t end) { return end <= begin_ns; });
    if (row == ends_.end()) row = ends_.insert(ends_.end(), 0);
    *row = end_ns;
    return static_cast<int>(row - ends_.begin());
  }
  int count() const { return static_cast<int>(ends_.size()); }

 private:
  std::vector<int64_t> ends_;
};

std::string OperationArgs(const TimelineEvent& e) {
  return absl::StrCat("\"operation\":", e.number, ",\"group\":", e.group, ",\"dtype\":\"", Name(e.dtype),
                      "\",\"elements\":", e.size, ",\"bytes\":", e.size * SizeOf(e.dtype),
                      e.bucket < 0 ? "" : absl::StrCat(",\"bucket\":", e.bucket), e.failed ? ",\"failed\":true" : "");
}

std::string BucketArgs(const TimelineEvent& e, const std::vector<std::string>& labels) {
  const auto label = static_cast<size_t>(e.label);
  return absl::StrCat("\"step\":", e.number, ",\"bytes\":", e.size,
                      label < labels.size() ? absl::StrCat(",\"parameters\":", JsonQuote(labels[label])) : "");
}

void AddRank(Trace& trace, int rank, const RankEvents& told, const RankClock& clock) {
  std::vector<TimelineEvent> events = told.events;
  trace.NameRank(rank);
  for (TimelineEvent& e : events) {
    for (int64_t& t : e.ns) t = t == 0 ? 0 : clock.ToRank0(t);
  }
  std::stable_sort(events.begin(), events.end(), [](const auto& a, const auto& b) { return a.ns[0] < b.ns[0]; });
  std::map<int, std::string> rows;
  Rows operations;
  for (const TimelineEvent& e : events) {
    switch (e.type) {
      case TimelineEvent::Type::kScope:
        rows.emplace(e.thread, e.thread == 0 ? "program" : absl::StrCat("program, thread ", e.thread));
        trace.Add(rank, e.thread, e.name, e.ns[0], e.ns[3], "");
        break;
      case TimelineEvent::Type::kBucket: {
        const int row = kBucketRow + e.bucket;
        const std::string args = BucketArgs(e, told.labels);
        rows.emplace(row, absl::StrCat("bucket ", e.bucket));
        if (e.ns[1] > e.ns[0]) trace.Add(rank, row, "ready, waits for its turn", e.ns[0], e.ns[1], args);
        trace.Add(rank, row, absl::StrCat("bucket ", e.bucket), e.ns[1], e.ns[3], args);
        break;
      }
      case TimelineEvent::Type::kOperation: {
        const int lane = operations.Take(e.ns[0], e.ns[3]);
        const int row = kOperationRow + lane;
        rows.emplace(row, lane == 0 ? "operations" : absl::StrCat("operations, ", lane + 1));
        trace.Add(rank, row, e.name, e.ns[0], e.ns[3], OperationArgs(e));
        if (e.ns[1] != 0 && e.ns[2] != 0) trace.Add(rank, row, "waits for peers", e.ns[1], e.ns[2], "");
        break;
      }
    }
  }
  for (const auto& [row, name] : rows) trace.NameRow(rank, row, name);
}

}  // namespace

std::string ChromeTrace(absl::Span<const int> ranks, absl::Span<const RankEvents> events,
                        absl::Span<const RankClock> clocks) {
  int64_t zero = std::numeric_limits<int64_t>::max();
  for (size_t i = 0; i < ranks.size(); ++i) {
    for (const TimelineEvent& e : events[i].events) zero = std::min(zero, clocks[i].ToRank0(e.ns[0]));
  }
  Trace trace(zero);
  for (size_t i = 0; i < ranks.size(); ++i) AddRank(trace, ranks[i], events[i], clocks[i]);
  return trace.Finish();
}

}  // namespace ddp
