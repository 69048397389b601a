// SPDX-License-Identifier: Apache-2.0
// Whoever survives the death of a rank goes on in a smaller group, from the last step that all have made; and a rank
// that wakes up late harms nobody.
#include <signal.h>

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "tests/fault/job.h"
#include "tests/fault/training.h"
#include "tests/support/catch.h"
#include "tests/support/free_port.h"

namespace ddp::testing {
namespace {

// Nothing that works takes so long, and deaths are noticed as such: their time-out is longer.
constexpr absl::Duration kPatience = absl::Seconds(100);
constexpr int kLongTimeout = 300;
constexpr int kShortTimeout = 4;  // of a rank that is stopped; the machine does not stop another one for so long

// What survivor_rank is told.
struct Fault {
  std::string how, work, wake;
  int size = 3;
  std::vector<int> victims;
  int delay_us = 0;
  unsigned seed = 0;
  int patience = 20;          // for a new group
  bool tcp = false;           // they meet in a TCP store, which rank 0 serves
  bool recover = false;       // by Context::Recover
  std::string together = {};  // see survivor_rank

  bool stops() const { return how == "stop"; }
  bool harmless() const { return how == "slow" || how == "pause"; }
  bool is_victim(int rank) const { return std::find(victims.begin(), victims.end(), rank) != victims.end(); }
  std::string Describe() const {
    return absl::StrCat(how, " in ", work, ": rank ", absl::StrJoin(victims, together.empty() ? ", then " : " and "),
                        " of ", size, " after ", delay_us, " us", wake.empty() ? "" : ", others ",
                        wake == "wait" ? "wait" : wake);
  }
};

std::vector<std::string> Lines(const Ending& ending) { return absl::StrSplit(ending.output, '\n', absl::SkipEmpty()); }

// The number that follows `name` in a line of survivor_rank's.
uint64_t NumberAfter(const std::string& line, const std::string& name) {
  for (const absl::string_view word : absl::StrSplit(line, ' ')) {
    uint64_t number = 0;
    if (absl::StartsWith(word, name) && absl::SimpleAtoi(word.substr(name.size()), &number)) return number;
  }
  FAIL("no " << name << " in " << line);
  return 0;
}

// The state that survivors report is that of a training which the smaller groups took over where they say.
void CheckTraining(const Fault& fault, const std::string& line) {
  std::vector<int> ranks(static_cast<size_t>(fault.size));
  std::iota(ranks.begin(), ranks.end(), 0);
  TrainingState state;
  int64_t step = 0;
  size_t next = 0;
  for (const absl::string_view word : absl::StrSplit(line, ' ')) {
    int64_t until = 0;
    if (!absl::StartsWith(word, "at=") || !absl::SimpleAtoi(word.substr(3), &until)) continue;
    Simulate(ranks, step, until, &state);
    step = until;
    do {
      REQUIRE(next < fault.victims.size());
      ranks.erase(std::find(ranks.begin(), ranks.end(), fault.victims[next++]));
    } while (!fault.together.empty() && next < fault.victims.size());
  }
  CHECK(next == (fault.harmless() ? 0 : fault.victims.size()));
  Simulate(ranks, step, static_cast<int64_t>(NumberAfter(line, "end=")), &state);
  CHECK(NumberAfter(line, "state=") == Hash(state));
}

void CheckSurvivor(const Fault& fault, int rank, const Ending& ending) {
  INFO("rank " << rank << " says: " << ending.output);
  const std::vector<std::string> lines = Lines(ending);
  CHECK_FALSE(ending.overdue);
  CHECK(ending.exited);
  CHECK(ending.code == 0);
  if (fault.together.empty()) {
    REQUIRE(lines.size() == (fault.harmless() ? 1 : fault.victims.size() + 1));
  } else {  // deaths may be heard of together, or one by one
    REQUIRE((lines.size() >= 2 && lines.size() <= fault.victims.size() + 1));
  }
  CHECK(absl::StartsWith(lines.back(), "done"));
  if (fault.work == "training") CheckTraining(fault, lines.back());
  if (fault.harmless()) return;
  CHECK(absl::StartsWith(lines[0], fault.stops() ? "DEADLINE_EXCEEDED: " : "UNAVAILABLE: "));
  const std::string victim = absl::StrCat("rank ", fault.victims[0]);
  if (!fault.together.empty()) {
    CHECK(absl::StrContains(lines[0], " (process"));
  } else if (fault.stops()) {
    CHECK((absl::StrContains(lines[0], victim + ";") || absl::StrContains(lines[0], victim + ", the root;")));
  } else {
    CHECK(absl::StrContains(lines[0], victim + " (process"));
  }
}

void CheckVictim(const Fault& fault, const Ending& ending, const Ending& survivor) {
  INFO("the victim says: " << ending.output);
  CHECK_FALSE(ending.overdue);
  if (!fault.stops()) {
    CHECK_FALSE(ending.exited);
    return;
  }
  // It wakes up to what the others have heard.
  CHECK(ending.exited);
  CHECK(ending.code == 1);
  REQUIRE(Lines(ending).size() == 1);
  CHECK(Lines(ending)[0] == Lines(survivor)[0]);
}

// Runs the job. A rank that is stopped is woken when all others have heard of it, one that is paused again and again
// until it ends: the pause may come when all work is done.
// Returns the error.
std::string Run(const Fault& fault) {
  INFO(fault.Describe());
  Job job(DDP_SURVIVOR_RANK);
  const int port = fault.tcp ? FreePort() : 0;
  for (int rank = 0; rank < fault.size; ++rank) {
    job.Start(
        rank, fault.size,
        {"--how=" + fault.how, "--work=" + fault.work, "--wake=" + fault.wake,
         absl::StrCat("--victims=", absl::StrJoin(fault.victims, ",")), absl::StrCat("--delay_us=", fault.delay_us),
         absl::StrCat("--seed=", fault.seed), absl::StrCat("--patience=", fault.patience),
         absl::StrCat("--port=", port), absl::StrCat("--recover=", fault.recover ? 1 : 0),
         "--together=" + fault.together, absl::StrCat("--timeout=", fault.stops() ? kShortTimeout : 0)},
        {absl::StrCat("DDP_TIMEOUT=", kLongTimeout), "ASAN_OPTIONS=handle_segv=0",
         "DDP_STORE_SECRET=known to the test"});
  }
  const int victim = fault.victims[0], other = victim == 0 ? 1 : 0;
  for (int rank = 0; fault.stops() && rank < fault.size; ++rank) {
    if (rank != victim) CHECK(job.WaitForLine(rank, kPatience));
  }
  if (fault.stops()) job.Signal(victim, SIGCONT);
  const absl::Time until = absl::Now() + kPatience;
  while (fault.how == "pause" && !job.WaitForEnd(victim, absl::Milliseconds(250)) && absl::Now() < until) {
    job.Signal(victim, SIGCONT);
  }
  const std::vector<Ending> endings = job.Finish(kPatience);
  for (int rank = 0; rank < fault.size; ++rank) {
    const Ending& ending = endings[static_cast<size_t>(rank)];
    if (fault.is_victim(rank) && !fault.harmless()) {
      CheckVictim(fault, ending, endings[static_cast<size_t>(other)]);
    } else {
      CheckSurvivor(fault, rank, ending);
    }
  }
  INFO("left behind: " << absl::StrJoin(job.LeftBehind(), " "));
  CHECK(job.LeftBehind().empty());
  return endings[static_cast<size_t>(other)].output;
}

Fault RandomFault(unsigned seed) {
  std::mt19937 random(seed);
  const auto pick = [&](const std::vector<std::string>& from) { return from[random() % from.size()]; };
  Fault fault;
  fault.seed = seed;
  fault.how = std::vector<std::string>{"kill", "segv", "stop", "slow"}[seed % 4];
  if (fault.how == "slow") fault.how = pick({"slow", "pause"});
  fault.work = std::vector<std::string>{"hot", "staged", "inline", "training"}[seed / 4 % 4];
  if (fault.stops()) fault.wake = pick({"wait", "go_on"});
  fault.size = 2 + static_cast<int>(random() % 3);
  fault.victims = {static_cast<int>(random() % static_cast<unsigned>(fault.size))};
  fault.delay_us = static_cast<int>(random() % 60'000);
  return fault;
}

// "17-25"; unset or empty: a few.
std::pair<unsigned, unsigned> Seeds() {
  const char* const text = std::getenv("DDP_FAULT_SEEDS");
  const std::vector<std::string> ends = absl::StrSplit(text == nullptr ? "" : text, '-');
  unsigned first = 0, last = 9;
  if (ends.size() == 2) REQUIRE((absl::SimpleAtoi(ends[0], &first) && absl::SimpleAtoi(ends[1], &last)));
  return {first, last};
}

TEST_CASE("a fault at a random point is told by every survivor, who then goes on", "[random]") {
  const auto [first, last] = Seeds();
  for (unsigned seed = first; seed <= last; ++seed) {
    INFO("again with: DDP_FAULT_SEEDS=" << seed << "-" << seed << " fault_test \"[random]\"");
    Run(RandomFault(seed));
  }
}

TEST_CASE("a rank that is stopped while it writes to others and wakes up late finds other memory", "[timeout]") {
  // Where it has announced its part, and the others wait for it nevertheless, it is in the middle of a chunk.
  int caught = 0;
  for (int run = 0; run < 30 && caught < 2; ++run) {
    const std::string error = Run({.how = "stop",
                                   .work = "bulk",
                                   .wake = "wait",
                                   .size = 2 + run % 2,
                                   .victims = {1},
                                   .delay_us = 50'000 + 1'300 * run});
    caught += absl::StrContains(error, "did not finish their part: rank 1");
  }
  CHECK(caught == 2);
}

TEST_CASE("ranks that die one after the other leave ever smaller groups") {
  for (const char* work : {"training", "hot"}) {
    Run({.how = "kill", .work = work, .wake = "", .size = 4, .victims = {1, 3, 0}, .delay_us = 30'000});
  }
}

TEST_CASE("a rank that dies while messages are under way is told, and the others go on") {
  for (const int delay_us : {500, 9'000, 20'000, 41'000}) {
    for (const int size : {2, 3, 4}) {
      const std::string how = delay_us % 1000 == 0 ? "kill" : "segv";
      Run({.how = how, .work = "messages", .wake = "", .size = size, .victims = {size / 2}, .delay_us = delay_us});
    }
  }
  Run({.how = "kill", .work = "messages", .wake = "", .size = 4, .victims = {0, 3}, .delay_us = 15'000});
}

TEST_CASE("a rank that dies among broadcasts is told, and the others go on") {
  for (const int delay_us : {700, 11'000, 23'000}) {
    for (const int size : {2, 3, 4}) {
      const std::string how = delay_us % 1000 == 0 ? "kill" : "segv";
      Run({.how = how, .work = "broadcasts", .wake = "", .size = size, .victims = {size / 2}, .delay_us = delay_us});
    }
  }
  Run({.how = "kill", .work = "broadcasts", .wake = "", .size = 4, .victims = {0, 3}, .delay_us = 15'000});
  Run({.how = "stop", .work = "broadcasts", .wake = "wait", .size = 3, .victims = {0}, .delay_us = 20'000});
  Run({.how = "pause", .work = "broadcasts", .wake = "", .size = 3, .victims = {1}, .delay_us = 5'000});
}

TEST_CASE("a rank that dies in a group that was split off is told, and the others go on") {
  for (const int delay_us : {4'000, 25'000}) {
    Run({.how = "kill", .work = "split", .wake = "", .size = 3, .victims = {1}, .delay_us = delay_us});
  }
  Run({.how = "segv", .work = "split", .wake = "", .size = 4, .victims = {2, 0}, .delay_us = 15'000});
  Run({.how = "stop", .work = "split", .wake = "wait", .size = 3, .victims = {2}, .delay_us = 30'000});
}

TEST_CASE("Context::Recover goes on without the ranks that have died") {
  for (const int size : {2, 3, 4}) {
    Run({.how = "kill",
         .work = "training",
         .wake = "",
         .size = size,
         .victims = {size - 1},
         .delay_us = 20'000,
         .recover = true});
  }
  Run({.how = "segv", .work = "hot", .wake = "", .size = 3, .victims = {0}, .delay_us = 9'000, .recover = true});
  Run({.how = "kill",
       .work = "training",
       .wake = "",
       .size = 4,
       .victims = {1, 3, 0},
       .delay_us = 30'000,
       .recover = true});
  Run({.how = "kill",
       .work = "hot",
       .wake = "",
       .size = 3,
       .victims = {2},
       .delay_us = 30'000,
       .tcp = true,
       .recover = true});
}

// Whoever waits for a dead rank does so for longer than the test allows.
TEST_CASE("nobody waits for ranks that die together, or while the others meet again") {
  const int patience = 3 * static_cast<int>(absl::ToInt64Seconds(kPatience));
  for (const bool recover : {true, false}) {
    for (const char* together : {"round", "meeting"}) {
      for (const char* work : {"training", "messages"}) {
        Run({.how = "kill",
             .work = work,
             .wake = "",
             .size = 4,
             .victims = {1, 3},
             .patience = patience,
             .tcp = work[0] == 'm',
             .recover = recover,
             .together = together});
      }
    }
  }
  Run({.how = "kill",
       .work = "hot",
       .wake = "",
       .size = 4,
       .victims = {3, 0, 1},
       .patience = patience,
       .recover = true,
       .together = "round"});
}

TEST_CASE("survivors meet again in a TCP store") {
  for (const char* work : {"training", "hot"}) {
    Run({.how = "kill", .work = work, .wake = "", .size = 4, .victims = {1, 3}, .delay_us = 30'000, .tcp = true});
  }
  Run({.how = "stop", .work = "hot", .wake = "wait", .size = 3, .victims = {2}, .delay_us = 30'000, .tcp = true});
}

}  // namespace
}  // namespace ddp::testing
