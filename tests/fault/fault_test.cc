// SPDX-License-Identifier: Apache-2.0
// What survivors hear when a rank dies, stops or never comes, and that nothing is left behind.
#include <signal.h>

#include <barrier>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "ddp/context.h"
#include "ddp/store.h"
#include "tests/fault/job.h"
#include "tests/support/catch.h"
#include "tests/support/variable.h"

namespace ddp::testing {
namespace {

using Words = std::vector<std::string>;

// Long enough for a loaded machine with sanitizers. A case that works ends in a fraction of a second.
constexpr absl::Duration kPatience = absl::Seconds(60);
// A time-out that is never reached where a death is noticed as such. A crash is to be one, without AddressSanitizer's
// report.
const Words kLongTimeout = {"DDP_TIMEOUT=50", "ASAN_OPTIONS=handle_segv=0"};

void CheckNothingLeft(const Job& job) {
  INFO(absl::StrJoin(job.LeftBehind(), " "));
  CHECK(job.LeftBehind().empty());
}

// The process ended by itself, with an error that begins with `code`, contains `parts` and fits one line.
void CheckError(const Ending& ending, const std::string& code, const Words& parts) {
  INFO("output: " << ending.output);
  CHECK_FALSE(ending.overdue);
  CHECK(ending.exited);
  CHECK(ending.code == 1);
  CHECK(absl::StartsWith(ending.output, code + ": "));
  for (const std::string& part : parts) {
    INFO("expected: " << part);
    CHECK(absl::StrContains(absl::AsciiStrToLower(ending.output), absl::AsciiStrToLower(part)));
  }
  CHECK(ending.output.find('\n') == ending.output.size() - 1);
}

struct Death {
  std::string how, when, buffers;
  int count;
  int size;
  int victim;
};

void CheckDeath(const Death& death) {
  INFO(death.how << " " << death.when << " " << death.buffers << " count " << death.count << ": rank " << death.victim
                 << " of " << death.size);
  Job job;
  const Words arguments = {"--how=" + death.how, "--when=" + death.when, "--buffers=" + death.buffers,
                           absl::StrCat("--count=", death.count), absl::StrCat("--victim=", death.victim)};
  const absl::Time begin = absl::Now();
  for (int rank = 0; rank < death.size; ++rank) job.Start(rank, death.size, arguments, kLongTimeout);
  const std::vector<Ending> endings = job.Finish(kPatience);
  CHECK(absl::Now() - begin < absl::Seconds(40));  // noticed, not timed out
  for (int rank = 0; rank < death.size; ++rank) {
    const Ending& ending = endings[static_cast<size_t>(rank)];
    if (rank == death.victim) {
      CHECK_FALSE(ending.overdue);
      CHECK(ending.output == "");
    } else {
      CheckError(ending, "UNAVAILABLE", {absl::StrCat("rank ", death.victim)});
    }
  }
  CheckNothingLeft(job);
}

TEST_CASE("a killed rank is named by the survivors") {
  for (const char* when : {"before", "pending", "while", "after"}) {
    CheckDeath({"kill", when, "allocated", 1, 2, 1});
    CheckDeath({"kill", when, "allocated", 3'000'000, 2, 0});
    CheckDeath({"kill", when, "ordinary", 100'000, 3, 1});
    CheckDeath({"kill", when, "ordinary", 1'000'000, 3, 1});
  }
  CheckDeath({"kill", "allocate", "allocated", 1000, 3, 2});
  CheckDeath({"kill", "allocate", "allocated", 1000, 2, 0});
}

TEST_CASE("a crash and a silent exit are deaths like any other") {
  for (const char* how : {"segv", "exit"}) {
    CheckDeath({how, "before", "allocated", 100'000, 2, 0});
    CheckDeath({how, "while", "allocated", 100'000, 3, 1});
    CheckDeath({how, "after", "ordinary", 100'000, 2, 1});
  }
}

TEST_CASE("a rank that dies in its backward pass ends the others' step") {
  CheckDeath({"kill", "backward", "allocated", 1, 3, 1});
  CheckDeath({"exit", "backward", "allocated", 1, 2, 0});
}

TEST_CASE("a rank that is stopped is named after the time-out", "[timeout]") {
  for (const auto& [buffers, count] : {std::pair("allocated", 1), std::pair("ordinary", 500'000)}) {
    INFO(buffers << " count " << count);
    Job job;
    for (int rank = 0; rank < 3; ++rank) {
      job.Start(rank, 3,
                {"--how=stop", "--when=before", std::string("--buffers=") + buffers, absl::StrCat("--count=", count),
                 "--victim=1", "--timeout=4"},
                kLongTimeout);
    }
    const std::vector<Ending> endings = job.Finish(kPatience, /*except=*/1);
    CHECK(endings[1].overdue);
    for (const size_t rank : {size_t{0}, size_t{2}}) {
      CheckError(endings[rank], "DEADLINE_EXCEEDED", {"rank 1", "all_reduce", "DDP_TIMEOUT"});
    }
    CheckNothingLeft(job);
  }
}

TEST_CASE("ranks that do not come are named", "[timeout]") {
  Job job;
  for (const int rank : {0, 2})
    job.Start(rank, 4, {"--when=never", "--openers=2"}, {"DDP_TIMEOUT=7"});  // to start, too
  for (const Ending& ending : job.Finish(kPatience)) CheckError(ending, "DEADLINE_EXCEEDED", {"ranks 1, 3"});
  CheckNothingLeft(job);
}

TEST_CASE("ranks that disagree about the size of the world all say so") {
  Job job;
  for (const int rank : {0, 1, 2})
    job.Start(rank, rank == 1 ? 4 : 3, {"--when=never", "--openers=3"}, {"DDP_TIMEOUT=20"});
  for (const Ending& ending : job.Finish(kPatience))
    CheckError(ending, "FAILED_PRECONDITION", {"world size 3", "world size 4"});
  CheckNothingLeft(job);
}

TEST_CASE("a child by fork that ends changes nothing for its parent's job") {
  Job job;
  for (int rank = 0; rank < 3; ++rank) job.Start(rank, 3, {"--when=fork", "--victim=1"}, kLongTimeout);
  for (const Ending& ending : job.Finish(kPatience)) {
    INFO("output: " << ending.output);
    CHECK(ending.exited);
    CHECK(ending.code == 0);
    CHECK(ending.output == "done\n");
  }
  CheckNothingLeft(job);
}

TEST_CASE("two processes of one rank are told") {
  Job job;
  for (const int rank : {0, 1, 1}) job.Start(rank, 3, {"--when=never"}, {"DDP_TIMEOUT=20"});
  for (const Ending& ending : job.Finish(kPatience)) CheckError(ending, "FAILED_PRECONDITION", {"rank 1"});
  CheckNothingLeft(job);
}

TEST_CASE("a run that ends well, also without destroying anything, leaves nothing behind") {
  for (const char* leave : {"destroyed", "undestroyed"}) {
    for (const char* memory : {"DDP_SHARED_MEMORY=auto", "DDP_SHARED_MEMORY=posix"}) {
      Job job;
      for (int rank = 0; rank < 3; ++rank) {
        job.Start(rank, 3, {"--when=never", "--count=100000", std::string("--leave=") + leave},
                  {"DDP_TIMEOUT=50", memory, "ASAN_OPTIONS=detect_leaks=0"});
      }
      for (const Ending& ending : job.Finish(kPatience)) {
        INFO(leave << " " << memory << ": " << ending.output);
        CHECK(ending.exited);
        CHECK(ending.code == 0);
        CHECK(ending.output == "done\n");
      }
      CheckNothingLeft(job);
    }
  }
}

TEST_CASE("a rank killed with memory in /dev/shm leaves nothing behind") {
  Job job;
  for (int rank = 0; rank < 2; ++rank) {
    job.Start(rank, 2, {"--how=kill", "--when=while", "--count=100000", "--victim=0"},
              {"DDP_TIMEOUT=50", "DDP_SHARED_MEMORY=posix"});
  }
  CheckError(job.Finish(kPatience)[1], "UNAVAILABLE", {"rank 0"});
  CheckNothingLeft(job);
}

TEST_CASE("a rank killed while it waits for the others leaves no memory behind") {
  Job job;
  job.Start(0, 2, {"--when=never", "--openers=2"}, {"DDP_TIMEOUT=50", "DDP_SHARED_MEMORY=posix"});
  const absl::Time until = absl::Now() + kPatience;
  while (job.LeftBehind().empty() && absl::Now() < until) absl::SleepFor(absl::Milliseconds(2));
  CHECK_FALSE(job.LeftBehind().empty());  // it has come to the store
  CHECK_FALSE(job.WaitForEnd(0, absl::Milliseconds(300)));
  job.Signal(0, SIGKILL);
  job.Finish(kPatience);
  for (const std::string& path : job.LeftBehind()) CHECK_FALSE(absl::StartsWith(path, "/dev/shm"));
}

// Two ranks that find too little in /dev/shm, for the group itself or for what they allocate in it.
void CheckSharedMemoryShort(size_t bytes, const char* count) {
  const SmallSharedMemory small(bytes);
  if (!small.problem().empty()) {
    WARN("not tested: " << small.problem());
    return;
  }
  Job job;
  for (int rank = 0; rank < 2; ++rank) {
    job.Start(rank, 2, {"--when=never", std::string("--count=") + count},
              {"DDP_TIMEOUT=20", "DDP_SHARED_MEMORY=posix"});
  }
  for (const Ending& ending : job.Finish(kPatience)) CheckError(ending, "RESOURCE_EXHAUSTED", {"shared memory"});
  CheckNothingLeft(job);
}

TEST_CASE("no shared memory for the group is told on every rank") { CheckSharedMemoryShort(size_t{64} << 10, "1"); }

TEST_CASE("no shared memory for an allocation is told on every rank") {
  CheckSharedMemoryShort(size_t{64} << 20, "100000000");
}

// A group of several nodes reserves the memory for its exchanges when an operation needs it.
TEST_CASE("no shared memory for an exchange between nodes ends the operation that needs it, on every rank") {
  const SmallSharedMemory small(size_t{64} << 20);
  if (!small.problem().empty()) {
    WARN("not tested: " << small.problem());
    return;
  }
  constexpr size_t kRanks = 4;
  const Variable nodes("DDP_NODE_SIZE", "2"), memory("DDP_SHARED_MEMORY", "posix");
  const std::shared_ptr<Store> store = CreateMemoryStore();
  std::vector<absl::Status> made(kRanks), little(kRanks), much(kRanks);
  std::barrier<> reduced_little(kRanks);
  std::vector<std::thread> threads;  // which see the small memory, as they begin now
  for (size_t r = 0; r < kRanks; ++r) {
    threads.emplace_back([&, r] {
      ContextOptions options;
      options.store = store;
      options.rank = static_cast<int>(r);
      options.world_size = static_cast<int>(kRanks);
      const absl::StatusOr<std::unique_ptr<Context>> context = Context::Create(options);
      if (made[r] = context.status(); !made[r].ok()) return reduced_little.arrive_and_drop();
      std::vector<float> data(10'000'000, 1);
      const auto reduce = [&](size_t count) {
        const Buffer buffer{data.data(), count, DType::kFloat32, {}};
        return (*context)->world().AllReduce(buffer, buffer).Wait();
      };
      little[r] = reduce(1000);
      reduced_little.arrive_and_wait();  // a failure would reach who still waits
      much[r] = reduce(data.size());
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (size_t r = 0; r < kRanks; ++r) {
    INFO("rank " << r << ": " << much[r]);
    CHECK(made[r] == absl::OkStatus());
    CHECK(little[r] == absl::OkStatus());
    CHECK(absl::IsResourceExhausted(much[r]));
    CHECK(absl::StrContains(much[r].message(), "all_reduce(sum, float32, 10000000 elements)"));
    CHECK(absl::StrContains(much[r].message(), "the exchange between nodes: "));
    CHECK(absl::StrContains(much[r].message(), "shared memory"));
  }
}

}  // namespace
}  // namespace ddp::testing
