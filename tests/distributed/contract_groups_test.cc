// SPDX-License-Identifier: Apache-2.0
// The contract of ProcessGroup, part 7: several groups of the same ranks, at the same time and one after the other.
#include <malloc.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/catch.h"
#include "tests/support/memory.h"

namespace ddp::testing {
namespace {

// Runs each on a thread of its own; throws what the first of them throws.
void RunTogether(const std::vector<std::function<void()>>& bodies) {
  std::vector<std::exception_ptr> failures(bodies.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < bodies.size(); ++i) {
    threads.emplace_back([&, i] {
      try {
        bodies[i]();
      } catch (...) {
        failures[i] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& failure : failures) {
    if (failure != nullptr) std::rethrow_exception(failure);
  }
}

// Leaves this process so many more files, as long as it lives.
class FewFiles {
 public:
  explicit FewFiles(int left) {
    std::vector<int> taken;
    for (int i = 0; i <= left; ++i) taken.push_back(dup(STDERR_FILENO));
    for (const int fd : taken) close(fd);
    getrlimit(RLIMIT_NOFILE, &before_);
    const rlimit few = {static_cast<rlim_t>(taken.back()), before_.rlim_max};
    setrlimit(RLIMIT_NOFILE, &few);
  }
  ~FewFiles() { setrlimit(RLIMIT_NOFILE, &before_); }
  FewFiles(const FewFiles&) = delete;
  FewFiles& operator=(const FewFiles&) = delete;

 private:
  rlimit before_ = {};
};

TEST_CASE("no group is made whose ranks could not all watch each other", "[host]") {
  RunOnRanks([](Rank& rank) {
    if (RanksAreThreads() || rank.size() == 1) return;
    const bool last = rank.rank() == rank.size() - 1;
    const int self = static_cast<int>(syscall(SYS_pidfd_open, getpid(), 0));
    if (self >= 0) close(self);
    // One file for each peer of the node, and one for the memory.
    const int needed = self < 0 ? 1 : rank.size();
    int failures = 0;
    bool made = false;
    for (; !made && failures <= needed; failures += made ? 0 : 1) {
      absl::StatusOr<std::unique_ptr<ProcessGroup>> part = absl::UnknownError("");
      {
        std::unique_ptr<FewFiles> few;
        if (last) few = std::make_unique<FewFiles>(failures);
        part = rank.group().Split(0, rank.rank());
      }
      made = part.ok();
      if (made) RANK_CHECK_OK((*part)->Barrier().Wait());
      if (!made) RANK_CHECK_STATUS(part.status(), absl::StatusCode::kResourceExhausted, "rank", "ulimit -n");
      RANK_CHECK_OK(rank.group().Barrier().Wait());
    }
    RANK_CHECK(made);
    if (OnOneNode()) RANK_CHECK_EQ(failures, needed);
  });
}

TEST_CASE("a world and its parts work at once, each from a thread of its own") {
  RunOnRanks([](Rank& rank) {
    struct Part {
      ProcessGroup* group;
      std::unique_ptr<ProcessGroup> owner;
      std::unique_ptr<Allocation> memory;
    };
    std::vector<Part> parts(4);
    parts[0].group = &rank.group();
    for (int p = 1; p < 4; ++p) {
      const int color = p == 1 ? 0 : p == 2 ? rank.rank() % 2 : rank.rank() / 2;
      parts[static_cast<size_t>(p)].owner = RANK_VALUE(rank.group().Split(color, rank.rank()));
      parts[static_cast<size_t>(p)].group = parts[static_cast<size_t>(p)].owner.get();
    }
    constexpr size_t kMost = 40'000;
    for (Part& part : parts) {
      part.memory = std::make_unique<Allocation>(RANK_VALUE(part.group->Allocate(kMost * sizeof(int64_t), Device{})));
    }
    const auto work = [&](const Part& part, unsigned seed) {
      ProcessGroup& group = *part.group;
      std::vector<int64_t> ordinary(kMost), all(kMost * static_cast<size_t>(group.size()));
      std::mt19937 random(seed);
      for (int round = 0; round < 40; ++round) {
        const size_t count = size_t{1} << random() % 16;
        auto* const data = round % 2 == 0 ? ordinary.data() : static_cast<int64_t*>(part.memory->data());
        for (size_t i = 0; i < count; ++i) data[i] = group.rank() + static_cast<int64_t>(seed + i);
        const Buffer b{data, count, DType::kInt64, {}},
            gathered{all.data(), count * static_cast<size_t>(group.size()), DType::kInt64, {}};
        RANK_CHECK_OK(group.AllReduce(b, b).Wait());
        const int64_t n = group.size();
        for (size_t i = 0; i < count; ++i) {
          RANK_CHECK_EQ(data[i], n * (n - 1) / 2 + n * static_cast<int64_t>(seed + i));
        }
        data[0] = group.rank();
        RANK_CHECK_OK(group.AllGather(b, gathered).Wait());
        for (int64_t r = 0; r < n; ++r) RANK_CHECK_EQ(all[static_cast<size_t>(r) * count], r);
        data[0] = group.rank() == round % n ? 1000 + round : -1;
        RANK_CHECK_OK(group.Broadcast(b, static_cast<int>(round % n)).Wait());
        RANK_CHECK_EQ(data[0], 1000 + round);
      }
    };
    std::vector<std::function<void()>> bodies;
    for (size_t p = 0; p < parts.size(); ++p) {
      bodies.emplace_back([&, p] { work(parts[p], 100 * static_cast<unsigned>(p)); });
    }
    RunTogether(bodies);
    for (const Part& part : parts) RANK_CHECK_OK(part.group->status());
  });
}

// Operations of a part, too, of which it takes several to do one of the program's.
TEST_CASE("an error gives the number of the program's operation") {
  if (RankCount() == 1) return;
  RunOnRanks([](Rank& rank) {
    const std::unique_ptr<ProcessGroup> group = RANK_VALUE(rank.group().Split(0, rank.rank()));
    Memory m(rank, Placement::kOrdinary, DType::kFloat32, 1'000'000);
    for (int i = 0; i < 3; ++i) RANK_CHECK_OK(group->AllReduce(m.whole(), m.whole()).Wait());
    rank.Meet();  // nobody is still in those when the group fails
    const Buffer some = m.Range(0, rank.rank() == 1 ? 9 : 10);
    RANK_CHECK_STATUS(group->AllReduce(some, some).Wait(), absl::StatusCode::kFailedPrecondition, "operation 3");
    rank.Meet();
  });
}

TEST_CASE("groups of several nodes that have been made and destroyed leave nothing") {
  if (OnOneNode()) return;  // contract_exchange_test.cc does the same there, and looks at the mappings, too
  RunOnRanks([](Rank& rank) {
    const auto make = [&](int groups) {
      for (int i = 0; i < groups; ++i) {
        const std::unique_ptr<ProcessGroup> group = RANK_VALUE(rank.group().Split(0, rank.rank()));
        RANK_CHECK_OK(group->Barrier().Wait());
        if (i % 10 == 0) RANK_VALUE(group->Allocate(5000, Device{}));
      }
      RANK_CHECK_OK(rank.group().Barrier().Wait());
      rank.Meet();
    };
    // Bytes need many groups to stand out against what MPI keeps. One file or thread is one too many.
    const int groups = RanksAreThreads() ? 20 : 50;
    make(RanksAreThreads() ? 5 : 20);  // what is made once, and kept
    // Ranks that are threads see one process: one of them looks, and the others do nothing meanwhile.
    const bool asked = !RanksAreThreads() || rank.rank() == 0;
    // Among threads it would count what the C library keeps of freed memory for each thread, and a sanitizer's malloc
    // leaves the C library's without the state that several threads need to ask at once.
    const size_t before = RanksAreThreads() ? 0 : mallinfo2().uordblks;
    const size_t files = asked ? EntriesOf("/proc/self/fd") : 0, threads = asked ? EntriesOf("/proc/self/task") : 0;
    rank.Meet();
    make(groups);
    const size_t after = RanksAreThreads() ? 0 : mallinfo2().uordblks;
    if (asked) {
      RANK_CHECK(after < before + 85'000, before, " bytes, then ", after);
      RANK_CHECK_EQ(EntriesOf("/proc/self/fd"), files);
      RANK_CHECK(ThreadsLeft(threads) <= threads, ThreadsLeft(threads), " threads, ", threads, " before");
    }
    rank.Meet();
  });
}

}  // namespace
}  // namespace ddp::testing
