// SPDX-License-Identifier: Apache-2.0
// The contract of ProcessGroup, part 3: operations in flight.
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <deque>
#include <memory>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "libddp/base/spin.h"
#include "libddp/comm/base/exchange.h"
#include "tests/support/catch.h"
#include "tests/support/memory.h"

namespace ddp::testing {
namespace {

constexpr size_t kOperations = 1000;
constexpr size_t kCount = 96;  // elements of each

// Many operations of different kinds on one array, issued but not waited for; Check says whether all have done what
// they should.
class Flight {
 public:
  Flight(Rank& rank, Placement placement)
      : rank_(rank), memory_(rank, placement, DType::kFloat32, kOperations * kCount) {
    for (size_t i = 0; i < memory_.count(); ++i) memory_.Set(i, Before(rank.rank(), i));
  }

  void Issue() {
    for (size_t k = 0; k < kOperations; ++k) works_.push_back(Start(k));
  }
  Work Start(size_t k) {
    const Buffer range = memory_.Range(k * kCount, kCount);
    if (k % 7 == 3) return rank_.group().Barrier();
    if (k % 5 == 2) return rank_.group().Broadcast(range, Root(k));
    return rank_.group().AllReduce(range, range);
  }
  std::vector<Work>& works() { return works_; }

  void Check() const {
    for (size_t i = 0; i < memory_.count(); ++i) RANK_CHECK(memory_.Get(i) == After(i), "at ", i);
  }

 private:
  static double Before(int rank, size_t i) { return WholeNumber(DType::kFloat32, ReduceOp::kSum, rank, i); }
  int Root(size_t k) const { return static_cast<int>(k) % rank_.size(); }
  double After(size_t i) const {
    const size_t k = i / kCount;
    if (k % 7 == 3) return Before(rank_.rank(), i);
    if (k % 5 == 2) return Before(Root(k), i);
    double sum = 0;
    for (int r = 0; r < rank_.size(); ++r) sum += Before(r, i);
    return sum;
  }

  Rank& rank_;
  Memory memory_;
  std::vector<Work> works_;
};

TEST_CASE("a thousand operations in flight, waited for in any order") {
  RunOnRanks([](Rank& rank) {
    for (const Placement placement : kAllPlacements) {
      for (const bool reversed : {true, false}) {
        Flight flight(rank, placement);
        flight.Issue();
        std::vector<size_t> order(kOperations);
        std::iota(order.begin(), order.end(), size_t{0});
        if (reversed) {
          std::reverse(order.begin(), order.end());
        } else {
          std::shuffle(order.begin(), order.end(), std::mt19937(static_cast<unsigned>(rank.rank())));
        }
        for (const size_t k : order) {
          RANK_CHECK_OK(flight.works()[k].Wait());
          RANK_CHECK(flight.works()[k].Done());
        }
        flight.Check();
      }
    }
  });
}

TEST_CASE("a dropped handle neither cancels nor waits") {
  RunOnRanks([](Rank& rank) {
    Flight flight(rank, Placement::kMixed);
    for (size_t k = 0; k < kOperations; ++k) RANK_CHECK_OK(flight.Start(k));
    RANK_CHECK_OK(rank.group().Barrier().Wait());  // after all that was issued before it
    flight.Check();
  });
}

TEST_CASE("operations go on when nobody waits") {
  RunOnRanks([](Rank& rank) {
    Flight flight(rank, Placement::kMixed);
    flight.Issue();
    const absl::Time deadline = absl::Now() + absl::Seconds(30);
    for (const Work& work : flight.works()) {
      while (!work.Done()) {
        RANK_CHECK(absl::Now() < deadline);
        std::this_thread::sleep_for(std::chrono::microseconds(200));
      }
    }
    flight.Check();
  });
}

TEST_CASE("Progress does this rank's part, so that a waiting peer is served") {
  RunOnRanks([](Rank& rank) {
    Flight flight(rank, Placement::kAllocated);
    flight.Issue();
    if (rank.rank() == 0) {
      for (Work& work : flight.works()) RANK_CHECK_OK(work.Wait());
    } else {
      const absl::Time deadline = absl::Now() + absl::Seconds(30);
      while (!flight.works().back().Done()) {
        RANK_CHECK(absl::Now() < deadline);
        rank.group().Progress();
      }
    }
    RANK_CHECK_OK(rank.group().Barrier().Wait());
    flight.Check();
  });
}

TEST_CASE("a bucket's reduction ended when its last part was done, whoever did it and whenever a rank looks",
          "[host]") {
  if (RankCount() == 1 || std::getenv("DDP_NODE_SIZE") != nullptr) return;  // nodes wait for each other's messages
  RunOnRanks([](Rank& rank) {
    for (const size_t count : {size_t{100}, size_t{1} << 20}) {
      const Allocation memory = RANK_VALUE(rank.group().Allocate(count * sizeof(float), {}));
      const Buffer view = memory.View(DType::kFloat32, 0, count);
      Work work = rank.group().AllReduce(view, view, {.bucket = 0});
      // Rank 0 stays away while the others do its part, too.
      if (rank.rank() != 0) RANK_CHECK_OK(work.Wait());
      const int64_t others_saw = NowNs();
      rank.Meet();
      RANK_CHECK_OK(work.Wait());
      const std::vector<int64_t> saw = RANK_VALUE(Exchange(rank.group(), others_saw));
      const std::vector<int64_t> ended = RANK_VALUE(Exchange(rank.group(), work.ended_ns()));
      RANK_CHECK(ended[0] > 0 && ended[0] <= *std::max_element(saw.begin() + 1, saw.end()));
      for (const int64_t e : ended) RANK_CHECK_EQ(e, ended[0]);
      Work unmeasured = rank.group().AllReduce(view, view);
      RANK_CHECK_OK(unmeasured.Wait());
      RANK_CHECK_EQ(unmeasured.ended_ns(), int64_t{0});
    }
  });
}

TEST_CASE("broadcasts of every size arrive in order, however late a rank comes") {
  RunOnRanks([](Rank& rank) {
    Memory small(rank, Placement::kOrdinary, DType::kInt32, 2000),
        medium(rank, Placement::kOrdinary, DType::kInt32, 4000),
        most(rank, Placement::kAllocated, DType::kInt32, 16'000), large(rank, Placement::kMixed, DType::kInt32, 50'000);
    std::minstd_rand random(static_cast<unsigned>(rank.rank()));
    for (int round = 0; round < 1000; ++round) {
      const int root = round / 60 % rank.size();
      Memory& m = round % 50 == 17 ? large : round % 40 < 10 ? medium : round % 40 < 20 ? most : small;
      m.Fill(rank.rank() == root ? round : -1);
      RANK_CHECK_OK(rank.group().Broadcast(m.whole(), root).Wait());
      for (const size_t i : {size_t{0}, m.count() / 2, m.count() - 1}) RANK_CHECK_EQ(m.Get(i), round);
      if (round % 90 == 41) {
        large.Fill(1);
        RANK_CHECK_OK(rank.group().AllReduce(large.whole(), large.whole()).Wait());
        RANK_CHECK_EQ(large.Get(49'999), static_cast<double>(rank.size()));
      }
      if (random() % 50 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(random() % 3));
    }
  });
}

TEST_CASE("more arrays are on their way than travel with their announcement at once") {
  RunOnRanks([](Rank& rank) {
    constexpr size_t kEach = 1500;
    const size_t ranks = static_cast<size_t>(rank.size());
    std::deque<Memory> inputs, outputs;
    for (int i = 0; i < 40; ++i) {
      inputs.emplace_back(rank, Placement::kOrdinary, DType::kInt32, kEach * ranks).Fill(rank.rank() + i);
      outputs.emplace_back(rank, Placement::kOrdinary, DType::kInt32, kEach).Fill(-1);
    }
    for (int round = 0; round < 20; ++round) {
      std::vector<Work> works;
      for (size_t i = 0; i < inputs.size(); ++i) {
        works.push_back(rank.group().ReduceScatter(inputs[i].whole(), outputs[i].whole()));
        if ((round + rank.rank()) % 3 == 0) rank.group().Progress();
      }
      for (Work& work : works) RANK_CHECK_OK(work.Wait());
      for (size_t i = 0; i < outputs.size(); ++i) {
        const double sum = static_cast<double>(ranks * i + ranks * (ranks - 1) / 2);
        for (const size_t at : {size_t{0}, kEach - 1}) RANK_CHECK_EQ(outputs[i].Get(at), sum);
        outputs[i].Fill(-1);
      }
    }
  });
}

TEST_CASE("an expired Wait leaves the operation running") {
  if (RankCount() == 1) return;  // nobody to wait for
  RunOnRanks([](Rank& rank) {
    for (const Placement placement : kAllPlacements) {
      Memory m(rank, placement, DType::kFloat32, 5000);
      m.Fill(rank.rank() + 1);
      Work work;
      const auto start = [&] { work = rank.group().AllReduce(m.whole(), m.whole()); };
      const int late = rank.size() - 1;
      if (rank.rank() != late) {
        start();
        RANK_CHECK_STATUS(work.Wait(absl::Now() + absl::Milliseconds(20)), absl::StatusCode::kDeadlineExceeded);
        RANK_CHECK_STATUS(work.Wait(absl::InfinitePast()), absl::StatusCode::kDeadlineExceeded);
        RANK_CHECK(!work.Done());
        RANK_CHECK_OK(rank.group().status());
      }
      rank.Meet();
      if (rank.rank() == late) start();
      RANK_CHECK_OK(work.Wait(absl::Now() + absl::Seconds(30)));
      RANK_CHECK_OK(work.Wait(absl::InfinitePast()));  // done is done
      RANK_CHECK_EQ(m.Get(4999), rank.size() * (rank.size() + 1) / 2.0);
    }
  });
}

TEST_CASE("copies of a handle speak of the same operation, from any thread") {
  RunOnRanks([](Rank& rank) {
    for (int round = 0; round < 20; ++round) {
      Memory m(rank, Placement::kAllocated, DType::kInt64, 30'000);
      m.Fill(1);
      Work work = rank.group().AllReduce(m.whole(), m.whole());
      std::vector<absl::Status> outcomes(3, absl::UnknownError("not set"));
      std::vector<std::thread> threads;
      for (absl::Status& outcome : outcomes) {
        threads.emplace_back([&outcome, copy = work]() mutable { outcome = copy.Wait(); });
      }
      work = Work();
      RANK_CHECK_OK(work.Wait());
      for (std::thread& thread : threads) thread.join();
      for (const absl::Status& outcome : outcomes) RANK_CHECK_OK(outcome);
      RANK_CHECK_EQ(m.Get(29'999), static_cast<double>(rank.size()));
    }
  });
}

TEST_CASE("the order of operations is the order of their effects") {
  RunOnRanks([](Rank& rank) {
    // Each reduction works on the result of the one before.
    Memory m(rank, Placement::kMixed, DType::kFloat64, 40'000);
    m.Fill(rank.rank() == 0 ? 1 : 0);
    ReduceOptions sum;
    ReduceOptions average;
    average.op = ReduceOp::kAvg;
    Work last;
    for (int k = 0; k < 20; ++k) {
      last = rank.group().AllReduce(m.whole(), m.whole(), sum);
      last = rank.group().AllReduce(m.whole(), m.whole(), average);
    }
    RANK_CHECK_OK(last.Wait());
    double expected = 1;
    for (int k = 1; k < 20; ++k) expected *= rank.size();
    for (size_t i = 0; i < m.count(); ++i) RANK_CHECK_EQ(m.Get(i), expected);
  });
}

TEST_CASE("operations of every size and on every kind of memory in flight together, waited for by several threads") {
  RunOnRanks([](Rank& rank) {
    constexpr size_t kMost = 12'000, kHere = 100;
    for (unsigned round = 0; round < 2; ++round) {
      std::mt19937 random(round);  // the same on all ranks
      std::vector<std::unique_ptr<Memory>> memories;
      for (const Placement placement : kAllPlacements) {
        memories.push_back(std::make_unique<Memory>(rank, placement, DType::kFloat32, kMost * kHere / 4));
        memories.back()->Fill(rank.rank() + 1);
      }
      std::vector<size_t> used(memories.size());
      std::vector<Work> works;
      for (size_t k = 0; k < kHere; ++k) {
        const size_t m = random() % memories.size();
        const size_t count =
            std::min(random() % 3 == 0 ? random() % 100 : random() % kMost, kMost * kHere / 4 - used[m]);
        const Buffer range = memories[m]->Range(used[m], count);
        works.push_back(rank.group().AllReduce(range, range));
        used[m] += count;
      }
      std::vector<absl::Status> outcomes(3);
      std::vector<std::thread> threads;
      for (size_t t = 0; t < outcomes.size(); ++t) {
        threads.emplace_back([&, t, mine = works]() mutable {
          std::shuffle(mine.begin(), mine.end(),
                       std::mt19937(static_cast<unsigned>(10 * t) + static_cast<unsigned>(rank.rank())));
          for (Work& work : mine) outcomes[t].Update(work.Wait());
        });
      }
      for (std::thread& thread : threads) thread.join();
      for (const absl::Status& outcome : outcomes) RANK_CHECK_OK(outcome);
      for (size_t m = 0; m < memories.size(); ++m) {
        for (size_t i = 0; i < memories[m]->count(); ++i) {
          const double expected = i < used[m] ? rank.size() * (rank.size() + 1) / 2.0 : rank.rank() + 1;
          RANK_CHECK(memories[m]->Get(i) == expected, "memory ", m, " at ", i, ": ", memories[m]->Get(i));
        }
      }
    }
  });
}

TEST_CASE("a rank may end its world while others still look at their results") {
  RunOnRanks([](Rank& rank) {
    Memory m(rank, Placement::kAllocated, DType::kFloat32, 50'000);
    m.Fill(1);
    RANK_CHECK_OK(rank.group().AllReduce(m.whole(), m.whole()).Wait());
    if (rank.rank() % 2 == 1) std::this_thread::sleep_for(std::chrono::milliseconds(50));
    RANK_CHECK_OK(rank.group().status());
    for (size_t i = 0; i < m.count(); ++i) RANK_CHECK_EQ(m.Get(i), static_cast<double>(rank.size()));
  });
}

}  // namespace
}  // namespace ddp::testing
