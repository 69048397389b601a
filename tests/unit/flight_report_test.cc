// SPDX-License-Identifier: Apache-2.0
#include "libddp/observe/flight_report.h"

#include <atomic>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "libddp/comm/host/operation.h"
#include "tests/support/catch.h"

namespace ddp {
namespace {

constexpr int64_t kSecond = 1'000'000'000;

uint64_t AllReduceOf(DType dtype) {
  return OperationKey{.kind = OperationKey::Kind::kAllReduce, .in = dtype, .out = dtype}.Pack();
}

// An operation that came so far, one second after the one before it.
FlightRecord Record(uint64_t sequence, FlightState state, int bucket = -1, uint64_t count = 100,
                    DType dtype = DType::kFloat32) {
  FlightRecord r{.sequence = sequence, .state = state, .what = AllReduceOf(dtype), .count = count, .bucket = bucket};
  const int reached = state == FlightState::kFailed ? 1 : static_cast<int>(state);
  for (int i = 0; i <= reached; ++i) r.ns[i] = static_cast<int64_t>(sequence + 1) * kSecond;
  return r;
}

std::vector<FlightRecord> Done(uint64_t begin, uint64_t end) {
  std::vector<FlightRecord> records;
  for (uint64_t s = begin; s < end; ++s) records.push_back(Record(s, FlightState::kDone));
  return records;
}

FlightLog Log(std::vector<std::vector<FlightRecord>> ranks) { return {std::move(ranks), {}, 60 * kSecond}; }

void CheckHas(const std::string& text, const std::string& part) {
  INFO(text);
  INFO("expected: " << part);
  CHECK(absl::StrContains(text, part));
}

TEST_CASE("a ring gives back what was put in, and keeps the newest") {
  const auto memory = std::make_unique<FlightRing>();
  FlightRing& ring = *memory;
  CHECK(ring.Read().empty());
  ring.Queue(0, 7, 11, 3, 1000);
  ring.Enter(0, FlightState::kAnnounced, 2000);
  std::vector<FlightRecord> records = ring.Read();
  REQUIRE(records.size() == 1);
  CHECK(records[0].sequence == 0);
  CHECK(records[0].state == FlightState::kAnnounced);
  CHECK(records[0].what == 7);
  CHECK(records[0].count == 11);
  CHECK(records[0].bucket == 3);
  CHECK(records[0].ns[0] == 1000);
  CHECK(records[0].ns[1] == 2000);
  CHECK(records[0].ns[2] == 0);
  CHECK(ring.TimeOf(0, FlightState::kAnnounced) == 2000);

  const uint64_t end = 3 * kFlightEntries + 5;
  for (uint64_t s = 1; s < end; ++s) ring.Queue(s, 7, s, -1, static_cast<int64_t>(s));
  ring.Enter(0, FlightState::kDone, 9);  // its place has been taken: changes nothing
  CHECK(ring.TimeOf(0, FlightState::kQueued) == 0);
  records = ring.Read();
  REQUIRE(records.size() == kFlightEntries);
  for (uint64_t i = 0; i < kFlightEntries; ++i) {
    CHECK(records[i].sequence == end - kFlightEntries + i);
    CHECK(records[i].count == records[i].sequence);
    CHECK(records[i].state == FlightState::kQueued);
  }
}

TEST_CASE("a ring is read whole or not at all while its rank writes") {
  const auto ring = std::make_unique<FlightRing>();
  std::atomic<bool> stop{false};
  std::thread writer([&] {
    for (uint64_t s = 0; !stop.load(std::memory_order_relaxed); ++s) {
      ring->Queue(s, s * 3, s * 5, static_cast<int>(s % 1000), static_cast<int64_t>(s * 7));
      ring->Enter(s, FlightState::kDone, static_cast<int64_t>(s * 7 + 1));
    }
  });
  size_t seen = 0;
  bool whole = true;
  for (int i = 0; i < 3000 || seen < 1000; ++i) {
    for (const FlightRecord& r : ring->Read()) {
      ++seen;
      const auto s = static_cast<int64_t>(r.sequence);
      whole = whole && r.what == r.sequence * 3 && r.count == r.sequence * 5 && r.bucket == s % 1000 &&
              r.ns[0] == s * 7 && (r.state == FlightState::kQueued || r.ns[3] == s * 7 + 1);
    }
  }
  stop = true;
  writer.join();
  CHECK(whole);
}

TEST_CASE("a rank that has not come is named, with what the others wait in") {
  std::vector<FlightRecord> waits = Done(0, 5);
  waits.push_back(Record(5, FlightState::kAnnounced, 3));
  const FlightLog log = Log({waits, Done(0, 5), waits});
  CHECK(PartingOperation(log) == 5);
  const std::string text = FlightText(log);
  CheckHas(text,
           "the ranks part at operation 5: all_reduce(sum, float32, 100 elements), bucket 3 by ranks 0, 2; not called "
           "by rank 1");
  CheckHas(text,
           "ranks 0, 2: operation 5, all_reduce(sum, float32, 100 elements), bucket 3: waits for rank 1 (54.0 s)");
  CheckHas(text, "rank 1: no operation called since operation 4, all_reduce(sum, float32, 100 elements), was done (55");
  CheckHas(text, "last of rank 1: 1 all_reduce(sum, float32, 100 elements) done 58.0 s ago;");
}

TEST_CASE("different calls are told side by side") {
  std::vector<FlightRecord> one = Done(0, 2), other = Done(0, 2);
  one.push_back(Record(2, FlightState::kFailed, -1, 100));
  other.push_back(Record(2, FlightState::kFailed, -1, 101, DType::kFloat64));
  const FlightLog log = Log({one, other, one});
  CHECK(PartingOperation(log) == 2);
  CheckHas(FlightText(log),
           "all_reduce(sum, float32, 100 elements) by ranks 0, 2; all_reduce(sum, float64, 101 elements) by rank 1");
}

TEST_CASE("where all agree nothing parts, whatever the rings still hold") {
  const FlightLog log = Log({Done(10, 20), Done(0, 20), Done(17, 20)});
  CHECK_FALSE(PartingOperation(log).has_value());
  CheckHas(FlightText(log), "all ranks have called the same operations");
  CHECK(PartingOperation(Log({Done(0, 3), {}})) == 0);
  CheckHas(FlightText(Log({Done(0, 3), {}})), "rank 1: no operation called yet");
}

TEST_CASE("a dead rank, one that is held back and one at work are told as such") {
  std::vector<FlightRecord> held = Done(0, 1), working = Done(0, 1);
  held.push_back(Record(1, FlightState::kQueued));
  working.push_back(Record(1, FlightState::kReady));
  FlightLog log = Log({held, working, Done(0, 1)});
  log.dead = {2};
  const std::string text = FlightText(log);
  CheckHas(text, "rank 0: operation 1, all_reduce(sum, float32, 100 elements): held back");
  CheckHas(text, "rank 1: operation 1, all_reduce(sum, float32, 100 elements): all ranks have come");
  CheckHas(text, "rank 2: dead; no operation called since");
}

TEST_CASE("the dump is JSON with everything in it") {
  std::vector<FlightRecord> waits = Done(0, 2);
  waits.push_back(Record(2, FlightState::kAnnounced, 1));
  FlightLog log = Log({waits, Done(0, 2)});
  log.dead = {1};
  FlightIncident incident;
  incident.what = "rank 0: \"quoted\"\n\ttext";
  incident.failure = true;
  const nlohmann::json json = nlohmann::json::parse(FlightJson(incident, log));
  CHECK(json["incident"] == "failure");
  CHECK(json["message"] == "rank 0: \"quoted\"\n\ttext");
  CHECK(json["parting"] == 2);
  CHECK(json["ranks"].size() == 2);
  CHECK(json["ranks"][1]["dead"] == true);
  const nlohmann::json& last = json["ranks"][0]["operations"][2];
  CHECK(last["sequence"] == 2);
  CHECK(last["bucket"] == 1);
  CHECK(last["state"] == "announced");
  CHECK(last["queued"] == 57.0);
  CHECK(last["ended"].is_null());
}

}  // namespace
}  // namespace ddp
