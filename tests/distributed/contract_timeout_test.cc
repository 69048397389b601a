// SPDX-License-Identifier: Apache-2.0
// The contract of ProcessGroup, part 8: time-outs.
#include <algorithm>
#include <chrono>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "tests/support/catch.h"
#include "tests/support/memory.h"

namespace ddp::testing {
namespace {

using absl::StatusCode;

// Who is named beside `late` may have been slow.
void CheckBlames(const absl::Status& status, int late) {
  const std::vector<int> blamed = FailedRanks(status);
  RANK_CHECK(std::find(blamed.begin(), blamed.end(), late) != blamed.end(), status.ToString());
}

TEST_CASE("a rank that does not come is named after the time-out", "[timeout]") {
  if (RankCount() == 1) return;
  constexpr absl::Duration kTimeout = absl::Seconds(1);
  for (const Placement placement : {Placement::kAllocated, Placement::kOrdinary}) {
    const size_t count = placement == Placement::kAllocated ? 1 : 200'000;
    RunOnRanks([&](Rank& rank) {
      Memory m(rank, placement, DType::kFloat32, count);  // which may take longer than the time-out
      RANK_CHECK_OK(rank.group().SetTimeout(kTimeout));
      rank.Meet();
      const absl::Time begin = absl::Now();  // of whoever is the first
      rank.Meet();
      const int late = rank.size() - 1;
      const auto check = [&](const absl::Status& status) {
        RANK_CHECK_STATUS(status, StatusCode::kDeadlineExceeded, "all_reduce", "did not arrive",
                          absl::StrCat("timed out after ", absl::FormatDuration(kTimeout)));
        CheckBlames(status, late);
      };
      if (rank.rank() != late) {
        absl::SleepFor(20 * rank.rank() *
                       absl::Milliseconds(1));  // who waits longest is on another node, and knows less
        Work work = rank.group().AllReduce(m.whole(), m.whole());
        Work behind = rank.group().Barrier();
        check(work.Wait());
        check(behind.Wait());
        const absl::Duration took = absl::Now() - begin;
        RANK_CHECK(took > absl::Milliseconds(900) && took < absl::Seconds(20), absl::FormatDuration(took));
      }
      rank.Meet();
      // Now it comes, too late.
      check(rank.group().AllReduce(m.whole(), m.whole()).Wait());
    });
  }
}

TEST_CASE("a missing root of a broadcast is to blame, whoever else has not come", "[timeout]") {
  if (RankCount() == 1) return;
  for (const size_t count : {size_t{10}, size_t{200'000}}) {
    RunWithTimeout(absl::Milliseconds(1500), [&](Rank& rank) {
      Memory m(rank, Placement::kOrdinary, DType::kFloat32, count);
      rank.Meet();
      // On another node, a rank may notice that its neighbour is missing before it hears of the root.
      const bool late = rank.rank() == 0 || (rank.size() > 2 && OnOneNode() && rank.rank() == rank.size() - 1);
      const auto check = [&](const absl::Status& status) {
        RANK_CHECK_STATUS(status, StatusCode::kDeadlineExceeded, "broadcast", "did not arrive: rank 0");
        RANK_CHECK(FailedRanks(status) == std::vector<int>{0}, status.ToString());
      };
      if (!late) check(rank.group().Broadcast(m.whole(), 0).Wait());
      rank.Meet();
      if (late) check(rank.group().Broadcast(m.whole(), 0).Wait());
    });
  }
}

// Rank 0 takes longer than the time-out for all of them, but not for one, even if a busy machine stops it for a while.
TEST_CASE("time in which earlier operations made progress does not count", "[timeout]") {
  constexpr int kCount = 10;
  RunWithTimeout(absl::Seconds(4), [](Rank& rank) {
    const bool slow = rank.rank() == 0;
    const int peer = slow ? 1 : 0;
    const bool messages = rank.rank() < 2 && rank.size() > 1;
    Memory sums(rank, Placement::kOrdinary, DType::kInt32, kCount),
        sent(rank, Placement::kOrdinary, DType::kInt32, 10'000),
        received(rank, Placement::kOrdinary, DType::kInt32, kCount * 10'000);
    sums.Fill(1);
    std::vector<Work> works;
    for (size_t i = 0; i < kCount; ++i) {
      if (slow) absl::SleepFor(absl::Milliseconds(450));
      works.push_back(rank.group().AllReduce(sums.Range(i, 1), sums.Range(i, 1)));
      if (!messages) continue;
      works.push_back(rank.group().Send(sent.whole(), peer, 1));
      works.push_back(rank.group().Recv(received.Range(i * 10'000, 10'000), peer, 1));
    }
    for (Work& work : works) RANK_CHECK_OK(work.Wait());
    for (size_t i = 0; i < kCount; ++i) RANK_CHECK_EQ(sums.Get(i), static_cast<double>(rank.size()));
  });
}

TEST_CASE("time in which nothing is pending does not count", "[timeout]") {
  RunWithTimeout(absl::Seconds(4), [](Rank& rank) {
    RANK_CHECK_OK(rank.group().Barrier().Wait());
    rank.Meet();
    std::this_thread::sleep_for(std::chrono::milliseconds(4500));
    rank.Meet();
    RANK_CHECK_OK(rank.group().Barrier().Wait());
    rank.Meet();
  });
}

// --- SetTimeout -----------------------------------------------------------------------------------------------------

constexpr absl::Duration kShort = absl::Milliseconds(500), kLong = absl::Seconds(60), kLate = absl::Milliseconds(1300);

TEST_CASE("a shorter time-out counts for what begins after it", "[timeout]") {
  if (RankCount() == 1) return;
  ContextOptions options;
  options.timeout = kLong;
  for (const size_t count : {size_t{10}, size_t{200'000}}) {
    RunOnRanks(
        [&](Rank& rank) {
          Memory m(rank, Placement::kOrdinary, DType::kInt32, count);
          const int late = rank.size() - 1;
          const auto sum = [&] { return rank.group().AllReduce(m.whole(), m.whole()); };
          if (rank.rank() != late) {
            Work pending = sum();
            RANK_CHECK_OK(rank.group().SetTimeout(kShort));
            RANK_CHECK_STATUS(pending.Wait(absl::Now() + kLate), StatusCode::kDeadlineExceeded, "it goes on");
            rank.Meet();
            RANK_CHECK_OK(pending.Wait());
            rank.Meet();  // the next failure would reach who still waits
            const absl::Status status = sum().Wait();
            RANK_CHECK_STATUS(status, StatusCode::kDeadlineExceeded, "all_reduce");
            CheckBlames(status, late);
            if (OnOneNode()) RANK_CHECK_STATUS(status, StatusCode::kDeadlineExceeded, "timed out after 500ms");
          } else {
            rank.Meet();
            RANK_CHECK_OK(sum().Wait());
            rank.Meet();
          }
          rank.Meet();
          RANK_CHECK_STATUS(sum().Wait(), StatusCode::kDeadlineExceeded, "all_reduce");
        },
        options);
  }
}

TEST_CASE("a longer time-out counts for what begins after it", "[timeout]") {
  if (RankCount() == 1) return;
  ContextOptions options;
  options.timeout = kLong;  // to meet on a busy machine
  RunOnRanks(
      [&](Rank& rank) {
        Memory m(rank, Placement::kOrdinary, DType::kInt32, 10);
        const int late = rank.size() - 1;
        const auto pair = [&](int tag) {  // rank `late` sends to rank 0
          if (rank.rank() == 0) return rank.group().Recv(m.whole(), late, tag);
          return rank.rank() == late ? rank.group().Send(m.whole(), 0, tag) : Work();
        };
        std::unique_ptr<ProcessGroup> before = RANK_VALUE(rank.group().Split(0, rank.rank()));
        RANK_CHECK_OK(before->SetTimeout(kShort));
        RANK_CHECK_OK(rank.group().SetTimeout(kShort));
        RANK_CHECK(rank.group().timeout() == kShort);
        RANK_CHECK_OK(rank.group().SetTimeout(kLong));
        RANK_CHECK(rank.group().timeout() == kLong);
        RANK_CHECK(before->timeout() == kShort);
        std::unique_ptr<ProcessGroup> part = RANK_VALUE(rank.group().Split(0, rank.rank()));
        RANK_CHECK(part->timeout() == kLong);
        rank.Meet();
        if (rank.rank() == late) absl::SleepFor(kLate);
        RANK_CHECK_OK(rank.group().Barrier().Wait());
        if (rank.rank() == late) absl::SleepFor(kLate);
        RANK_CHECK_OK(part->Barrier().Wait());
        if (rank.rank() == late) absl::SleepFor(kLate);
        RANK_CHECK_OK(pair(1).Wait());
        rank.Meet();
        // What began before keeps its time-out.
        if (rank.rank() != late) {
          Work pending = before->Barrier();
          RANK_CHECK_OK(before->SetTimeout(kLong));
          const absl::Status status = pending.Wait();
          RANK_CHECK_STATUS(status, StatusCode::kDeadlineExceeded, "barrier");
          CheckBlames(status, late);
        }
        rank.Meet();
        // Messages, too.
        RANK_CHECK_OK(rank.group().SetTimeout(kShort));
        if (rank.rank() == 0) {
          Work short_one = rank.group().Recv(m.whole(), late, 2);
          RANK_CHECK_OK(rank.group().SetTimeout(kLong));
          RANK_CHECK_STATUS(short_one.Wait(), StatusCode::kDeadlineExceeded, "recv", "tag 2", "timed out after 500ms");
        }
        rank.Meet();
      },
      options);
}

TEST_CASE("a time-out is above 0") {
  RunOnRanks([](Rank& rank) {
    RANK_CHECK(rank.group().timeout() == rank.context().timeout());
    for (const absl::Duration bad : {absl::ZeroDuration(), -absl::Seconds(1)}) {
      RANK_CHECK_STATUS(rank.group().SetTimeout(bad), StatusCode::kInvalidArgument, absl::StrCat("rank ", rank.rank()),
                        "set_timeout", "above 0 s");
    }
    RANK_CHECK(rank.group().timeout() == rank.context().timeout());
    RANK_CHECK_OK(rank.group().SetTimeout(absl::InfiniteDuration()));
    RANK_CHECK_OK(rank.group().Barrier().Wait());
  });
}

}  // namespace
}  // namespace ddp::testing
