// SPDX-License-Identifier: Apache-2.0
// The timeline of several ranks, in one file and on one clock.
#include "libddp/observe/timeline.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ddp/distributed_data_parallel.h"
#include "ddp/observer.h"
#include "libddp/base/spin.h"
#include "tests/support/catch.h"
#include "tests/support/ranks.h"

namespace ddp::testing {
namespace {

// The same for all ranks.
std::string Path() {
  return absl::StrCat(std::filesystem::temp_directory_path().string(), "/ddp-timeline-",
                      RanksAreThreads() ? getpid() : getppid(), ".json");
}

nlohmann::json Read(const std::string& path) {
  std::ifstream file(path);
  RANK_CHECK(file.is_open(), path);
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  return nlohmann::json::parse(text);
}

// How many events of each name the rank has; operations on buckets apart from others.
std::map<std::string, int> Count(const nlohmann::json& trace, int rank) {
  std::map<std::string, int> names;
  for (const nlohmann::json& e : trace["traceEvents"]) {
    if (e["ph"] != "X" || e["pid"] != rank) continue;
    ++names[e["name"].get<std::string>() + (e.contains("args") && e["args"].contains("bucket") ? " of a bucket" : "")];
  }
  return names;
}

constexpr int kParameters = 3, kSteps = 5;

void Train(Rank& rank) {
  std::vector<Parameter> list;
  for (int i = 0; i < kParameters; ++i) {
    list.push_back({absl::StrCat("p", i), {}, Buffer{nullptr, 1000, DType::kFloat32, {}}, {}});
  }
  DdpOptions options;
  options.bucket_bytes = 4000;
  auto model = RANK_VALUE(DistributedDataParallel::Create(rank.group(), list, options));
  for (int step = 0; step < kSteps; ++step) {
    {
      const TraceScope scope(rank.group(), "backward");
      for (size_t i = list.size(); i-- > 0;) model->GradReady(i);
    }
    RANK_CHECK_OK(model->FinishBackward());
  }
}

TEST_CASE("rank 0 writes the events of all ranks") {
  ContextOptions options;
  options.trace = Path();
  RunOnRanks(Train, options);
  // The ranks' Contexts are gone: what they had to write is written, on rank 0 at least.
  if (!RanksAreThreads() && std::getenv("OMPI_COMM_WORLD_RANK") != std::string("0")) return;
  const nlohmann::json trace = Read(Path());
  for (int r = 0; r < RankCount(); ++r) {
    std::map<std::string, int> names = Count(trace, r);
    CHECK(names["backward"] == kSteps);
    CHECK(names["FinishBackward"] == kSteps);
    for (int b = 0; b < kParameters; ++b) CHECK(names[absl::StrCat("bucket ", b)] == kSteps);
    if (RankCount() > 1) CHECK(names["all_reduce of a bucket"] == kParameters * kSteps);
  }
  CHECK(Count(trace, RankCount()).empty());
  // Steps count from 1, and each bucket names its parameters: the last one first.
  std::map<int, int> steps;
  for (const nlohmann::json& e : trace["traceEvents"]) {
    const std::string name = e["name"].get<std::string>();
    if (e["ph"] != "X" || name.substr(0, 6) != "bucket") continue;
    ++steps[e["args"]["step"].get<int>()];
    CHECK(e["args"]["parameters"] == absl::StrCat("p", kParameters - 1 - (name.back() - '0')));
  }
  CHECK(steps.begin()->first == 1);
  CHECK(steps.rbegin()->first == kSteps);
  std::filesystem::remove(Path());
}

TEST_CASE("what there is is written when the group fails") {
  ContextOptions options;
  options.trace = Path();
  RunOnRanks(
      [](Rank& rank) {
        Train(rank);
        rank.Meet();
        rank.group().Abort(absl::CancelledError("enough"));
        rank.Meet();
      },
      options);
  for (int r = 0; r < RankCount(); ++r) {
    if (!RanksAreThreads() && std::getenv("OMPI_COMM_WORLD_RANK") != std::to_string(r)) continue;
    const std::string path = absl::StrCat(Path(), ".rank", r);
    const nlohmann::json trace = Read(path);
    CHECK(Count(trace, r)["backward"] == kSteps);
    CHECK(Count(trace, r)["bucket 0"] == kSteps);
    std::filesystem::remove(path);
  }
  std::filesystem::remove(Path());
}

TEST_CASE("a file that cannot be written is told before anything is trained, on every rank") {
  RunOnRanks([&](Rank& rank) {
    Timeline timeline({.rank = rank.rank(), .path = "/nowhere/trace.json", .now_ns = nullptr});
    RANK_CHECK_STATUS(timeline.Begin(rank.group()), absl::StatusCode::kInvalidArgument, "/nowhere/trace.json");
    // A Context that could not begin ends its timeline nevertheless.
    RANK_CHECK_OK(timeline.End(rank.group(), absl::Seconds(30)));
  });
}

TEST_CASE("clocks that differ are brought together") {
  RunOnRanks([](Rank& rank) {
    // Rank r's clock is r hours ahead, and gains a half.
    const int64_t start = NowNs();
    const auto clock = [ahead = rank.rank() * int64_t{3'600'000'000'000}, start, fast = rank.rank() > 0] {
      const int64_t now = NowNs();
      return now + ahead + (fast ? (now - start) / 2 : 0);
    };
    Timeline timeline({.rank = rank.rank(), .path = Path(), .now_ns = clock});
    // Clocks are compared somewhere between these two times, as nobody comes out of Meet before all have come to it.
    const auto lasts = [&](auto compare) {
      const int64_t begin = NowNs();
      rank.Meet();
      RANK_CHECK_OK(compare());
      rank.Meet();
      return NowNs() - begin;
    };
    const int64_t first = lasts([&] { return timeline.Begin(rank.group()); });
    // After a barrier nobody ends the scope before all have begun it.
    constexpr size_t kScopes = 20;
    for (size_t i = 0; i < kScopes; ++i) {
      absl::SleepFor(std::min(absl::Nanoseconds(5 * first), absl::Milliseconds(20)));
      const int64_t begin = clock();
      RANK_CHECK_OK(rank.group().Barrier().Wait());
      timeline.OnScope({.name = "together", .begin = false, .begin_ns = begin, .end_ns = clock()});
    }
    const int64_t last = lasts([&] { return timeline.End(rank.group(), absl::Seconds(30)); });
    if (rank.rank() != 0) return;
    const nlohmann::json trace = Read(Path());
    std::vector<std::vector<std::pair<double, double>>> spans(static_cast<size_t>(rank.size()));
    for (const nlohmann::json& e : trace["traceEvents"]) {
      if (e["ph"] == "X")
        spans[e["pid"].get<size_t>()].emplace_back(e["ts"], e["ts"].get<double>() + e["dur"].get<double>());
    }
    // A comparison cannot be wrong by more than all of the time that it took, by the faster clock, and two ranks are
    // compared by what rank 0 knows of each. Without the correction of the drift the last scopes would lie apart by
    // half of the 20 pauses.
    const double slack_us = 2 * 1.5 * static_cast<double>(std::max(first, last)) / 1e3;
    for (size_t i = 0; i < kScopes; ++i) {
      double latest_begin = 0, earliest_end = 1e300;
      for (const auto& of_rank : spans) {
        RANK_CHECK_EQ(of_rank.size(), kScopes);
        latest_begin = std::max(latest_begin, of_rank[i].first);
        earliest_end = std::min(earliest_end, of_rank[i].second);
      }
      RANK_CHECK(latest_begin <= earliest_end + slack_us, "begin ", latest_begin, " end ", earliest_end, " slack ",
                 slack_us);
    }
    std::filesystem::remove(Path());
  });
}

}  // namespace
}  // namespace ddp::testing
