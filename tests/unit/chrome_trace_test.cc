// SPDX-License-Identifier: Apache-2.0
#include "libddp/observe/timeline.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/catch.h"

namespace ddp {
namespace {

// Exchanges between ranks whose clocks are ahead of rank 0's by `offsets`, with delays of 200 ns and more.
std::vector<ClockRound> Exchange(const std::vector<int64_t>& offsets, int rounds) {
  std::mt19937 random(1);
  std::exponential_distribution<double> jitter(1.0 / 3000);
  std::vector<ClockRound> result;
  for (int i = 0; i < rounds; ++i) {
    const int64_t now = 1'000'000'000 + i * int64_t{50'000};
    ClockRound round;
    int64_t last = 0;
    std::vector<int64_t> sent;
    for (size_t r = 0; r < offsets.size(); ++r) {
      sent.push_back(now + static_cast<int64_t>(jitter(random)));
      last = std::max(last, sent.back());
    }
    for (size_t r = 0; r < offsets.size(); ++r) {
      round.sent.push_back(sent[r] + offsets[r]);
      round.heard.push_back(last + 200 + static_cast<int64_t>(jitter(random)) + offsets[r]);
    }
    result.push_back(std::move(round));
  }
  return result;
}

TEST_CASE("clocks are compared to within the fastest exchange") {
  const std::vector<int64_t> offsets = {0, 5'000'000'123, -77'000'000};
  const std::vector<ClockRound> rounds = Exchange(offsets, 64);
  for (size_t r = 0; r < offsets.size(); ++r) {
    const int64_t estimate = EstimateClockOffset(rounds, r, false);
    INFO("rank " << r << ": " << estimate);
    CHECK(std::abs(estimate - offsets[r]) < 2000);
  }
  // One clock for all: exactly 0; but not where that cannot be, as in another time namespace.
  CHECK(EstimateClockOffset(Exchange({0, 0}, 64), 1, true) == 0);
  CHECK(std::abs(EstimateClockOffset(rounds, 1, true) - offsets[1]) < 2000);
}

TEST_CASE("a clock that drifts is followed between the two comparisons") {
  const RankClock clock{{.at_ns = 1000, .offset_ns = 500}, {.at_ns = 2'001'000, .offset_ns = 2500}};
  CHECK(clock.ToRank0(1500) == 1000);
  CHECK(std::abs(clock.ToRank0(1'001'000 + 1500) - 1'001'000) <= 2);
  CHECK(std::abs(clock.ToRank0(2'001'000 + 2500) - 2'001'000) <= 3);
  const RankClock once{{.at_ns = 7, .offset_ns = -40}, {}};
  CHECK(once.ToRank0(100) == 140);
}

TimelineEvent Operation(uint64_t number, int64_t begin, int64_t end) {
  TimelineEvent e{.type = TimelineEvent::Type::kOperation,
                  .dtype = DType::kFloat32,
                  .bucket = 2,
                  .number = number,
                  .size = 10,
                  .ns = {begin, begin + 1, begin + 2, end}};
  std::copy_n("all_reduce", 11, e.name);
  return e;
}

TEST_CASE("a trace is JSON, on rank 0's clock, with rows that do not overlap") {
  std::vector<RankEvents> events(2);
  TimelineEvent scope{.ns = {1'000'000, 0, 0, 9'000'000}};
  std::copy_n("a \"name\"", 9, scope.name);
  events[0].labels = {"other", "fc.weight, fc.\"bias\""};
  events[0].events = {scope,
                      {.type = TimelineEvent::Type::kBucket,
                       .bucket = 3,
                       .label = 1,
                       .number = 7,
                       .size = 40,
                       .ns = {1'500'000, 2'000'000, 0, 3'000'000}}};
  // Three operations, of which the first two overlap; the clock of rank 1 is a second ahead.
  constexpr int64_t kAhead = 1'000'000'000;
  events[1].events = {Operation(0, kAhead + 2'000'000, kAhead + 5'000'000),
                      Operation(1, kAhead + 3'000'000, kAhead + 4'000'000),
                      Operation(2, kAhead + 5'000'000, kAhead + 6'000'000)};
  const RankClock clocks[] = {{}, {{.at_ns = 0, .offset_ns = kAhead}, {.at_ns = 1, .offset_ns = kAhead}}};
  const nlohmann::json trace = nlohmann::json::parse(ChromeTrace({0, 1}, events, clocks));
  std::map<std::pair<int, int>, std::vector<std::pair<double, double>>> rows;
  std::map<std::string, int> names;
  for (const nlohmann::json& e : trace["traceEvents"]) {
    ++names[e["name"].get<std::string>()];
    if (e["ph"] != "X") continue;
    rows[{e["pid"], e["tid"]}].emplace_back(e["ts"], e["dur"]);
    if (e["name"] == "a \"name\"") {
      CHECK(e["ts"] == 0);
      CHECK(e["dur"] == 8000);
    }
    if (e["name"] == "bucket 3") {
      CHECK(e["args"]["step"] == 7);
      CHECK(e["args"]["parameters"] == "fc.weight, fc.\"bias\"");
    }
    if (e["name"] == "all_reduce" && e["args"]["operation"] == 0) {
      CHECK(e["ts"] == 1000);
      CHECK(e["dur"] == 3000);
      CHECK(e["args"]["bytes"] == 40);
      CHECK(e["args"]["bucket"] == 2);
    }
  }
  CHECK(names["bucket 3"] == 1);
  CHECK(names["ready, waits for its turn"] == 1);
  CHECK(names["all_reduce"] == 3);
  CHECK(names["waits for peers"] == 3);
  CHECK(names["process_name"] == 2);
  CHECK(rows.size() == 4);  // program, bucket 3; two rows of operations
  for (auto& [row, spans] : rows) {
    std::sort(spans.begin(), spans.end());
    for (size_t i = 1; i < spans.size(); ++i) {
      const auto& [begin, duration] = spans[i - 1];
      const bool apart = begin + duration <= spans[i].first;
      const bool nested = spans[i].first + spans[i].second <= begin + duration;
      CHECK((apart || nested));
    }
  }
  CHECK(nlohmann::json::parse(ChromeTrace({0}, std::vector<RankEvents>(1), std::vector<RankClock>(1)))["traceEvents"]
            .size() == 2);
}

}  // namespace
}  // namespace ddp
