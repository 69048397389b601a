// SPDX-License-Identifier: Apache-2.0
// The contract of ProcessGroup, part 6: messages between two ranks.
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <deque>
#include <limits>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "tests/support/catch.h"
#include "tests/support/memory.h"

namespace ddp::testing {
namespace {

using absl::StatusCode;

double Value(DType dtype, int rank, size_t i) { return WholeNumber(dtype, ReduceOp::kSum, rank, i); }

// Runs the body twice: with and without the right to read a peer's memory.
void RunOnRanksBothWays(const std::function<void(Rank&)>& body) {
  for (const char* const single_copy : {"auto", "off"}) {
    ::setenv("DDP_SINGLE_COPY", single_copy, 1);
    RunOnRanks(body);
  }
  ::unsetenv("DDP_SINGLE_COPY");
}

// One message round the ring: to the next rank, from the one before.
void PassOn(Rank& rank, DType dtype, Placement placement, size_t count, int pieces, bool blocking) {
  const int next = (rank.rank() + 1) % rank.size(), last = (rank.rank() + rank.size() - 1) % rank.size();
  Memory out(rank, placement, dtype, count), in(rank, placement, dtype, count);
  for (size_t i = 0; i < count; ++i) out.Set(i, Value(dtype, rank.rank(), i));
  in.Fill(99);
  const auto outs = out.Cut(pieces, static_cast<unsigned>(rank.rank()));
  const auto ins = in.Cut(pieces, static_cast<unsigned>(rank.rank()) + 7);
  Work send = rank.group().Send(outs, next, 5);
  if (blocking) RANK_CHECK_OK(send.Wait());
  Work recv = rank.group().Recv(ins, last, 5);
  RANK_CHECK_OK(recv.Wait());
  RANK_CHECK_OK(send.Wait());
  for (size_t i = 0; i < count; ++i) RANK_CHECK_EQ(in.Get(i), Value(dtype, last, i));
}

TEST_CASE("messages of every dtype, placement, size and split") {
  if (RankCount() == 1) return;
  RunOnRanksBothWays([](Rank& rank) {
    for (const Placement placement : kAllPlacements) {
      for (const DType dtype : kCallDTypes) {
        for (const size_t count : {size_t{0}, size_t{1}, size_t{1001}, size_t{6001}, size_t{20'001}}) {
          PassOn(rank, dtype, placement, count, 1, false);
          PassOn(rank, dtype, placement, count, 5, false);
        }
      }
      PassOn(rank, DType::kFloat32, placement, 700'001, 3, false);
    }
  });
}

// Up to 3000 ranges are more than can be listed; how many fit into an envelope depends on the number of ranks.
TEST_CASE("messages of many ranges that do not touch") {
  if (RankCount() == 1) return;
  RunOnRanksBothWays([](Rank& rank) {
    const int next = (rank.rank() + 1) % rank.size(), last = (rank.rank() + rank.size() - 1) % rank.size();
    for (const Placement placement : kAllPlacements) {
      for (const auto& [ranges, each] :
           {std::pair<size_t, size_t>{3, 1}, {3, 5000}, {50, 20}, {50, 300}, {500, 30}, {3000, 4}}) {
        const size_t count = ranges * each;
        Memory out(rank, placement, DType::kFloat32, 2 * count), in(rank, placement, DType::kFloat32, 2 * count);
        in.Fill(-1);
        std::vector<Buffer> outs, ins;
        for (size_t k = 0; k < ranges; ++k) {
          for (size_t i = 0; i < each; ++i) out.Set(2 * k * each + i, static_cast<double>(k * each + i));
          outs.push_back(out.Range(2 * k * each, each));
          ins.push_back(in.Range((2 * k + 1) * each, each));
        }
        Work send = rank.group().Send(outs, next, 0);
        RANK_CHECK_OK(rank.group().Recv(ins, last, 0).Wait());
        RANK_CHECK_OK(send.Wait());
        for (size_t i = 0; i < 2 * count; ++i) {
          const size_t k = i / each / 2, within = i % each;
          RANK_CHECK_EQ(in.Get(i), i / each % 2 == 0 ? -1.0 : static_cast<double>(k * each + within));
        }
      }
    }
  });
}

TEST_CASE("messages of all small sizes one behind the other, up to a dozen of them unread") {
  if (RankCount() == 1) return;
  RunOnRanks([](Rank& rank) {
    constexpr size_t kMost = 8192, kMessages = 600;  // of 16 KiB: more than the ring holds, several times
    const int next = (rank.rank() + 1) % rank.size(), last = (rank.rank() + rank.size() - 1) % rank.size();
    std::minstd_rand sizes(1), ahead(static_cast<unsigned>(rank.rank() + 2));
    std::deque<Memory> unread;
    std::deque<Work> sends;
    Memory in(rank, Placement::kOrdinary, DType::kFloat16, kMost);
    const auto receive = [&] {
      const size_t count = unread.front().count();
      RANK_CHECK_OK(rank.group().Recv(in.Range(0, count), last, 0).Wait());
      for (size_t i = 0; i < count; ++i) RANK_CHECK_EQ(in.Get(i), unread.front().Get(i));
      RANK_CHECK_OK(sends.front().Wait());
      unread.pop_front();
      sends.pop_front();
    };
    for (size_t k = 0; k < kMessages; ++k) {
      Memory& out = unread.emplace_back(rank, Placement::kOrdinary, DType::kFloat16, 1 + sizes() % kMost);
      for (size_t i = 0; i < out.count(); ++i) out.Set(i, static_cast<double>((i + k) % 2048));
      sends.push_back(rank.group().Send(out.whole(), next, 0));
      while (unread.size() > ahead() % 12) receive();
    }
    while (!unread.empty()) receive();
  });
}

TEST_CASE("ranks that all send before they receive do not hold each other up for ever") {
  if (RankCount() == 1) return;
  RunOnRanksBothWays([](Rank& rank) {
    for (const Placement placement : kAllPlacements) {
      PassOn(rank, DType::kFloat32, placement, 100, 1, true);
      PassOn(rank, DType::kFloat32, placement, 300'000, 2, true);
    }
  });
}

TEST_CASE("messages are told apart by tag, and in order within one") {
  if (RankCount() == 1) return;
  RunOnRanksBothWays([](Rank& rank) {
    constexpr int kTags = 12, kEach = 4;
    for (const size_t count : {size_t{3}, size_t{5000}, size_t{10'000}}) {
      for (const Placement placement : {Placement::kAllocated, Placement::kOrdinary}) {
        Memory out(rank, placement, DType::kInt32, kTags * kEach * count);
        Memory in(rank, placement, DType::kInt32, kTags * kEach * count);
        for (size_t i = 0; i < out.count(); ++i) out.Set(i, static_cast<double>(i) + 1e6 * rank.rank());
        std::vector<Work> works;
        const int next = (rank.rank() + 1) % rank.size(), last = (rank.rank() + rank.size() - 1) % rank.size();
        // All are sent, tag by tag, before the first is received, in another order.
        for (size_t k = 0; k < kTags * kEach; ++k) {
          works.push_back(rank.group().Send(out.Range(k * count, count), next, static_cast<int>(k % kTags)));
        }
        std::vector<int> tags(kTags);
        for (int t = 0; t < kTags; ++t) tags[static_cast<size_t>(t)] = t;
        std::shuffle(tags.begin(), tags.end(), std::mt19937(static_cast<unsigned>(rank.rank())));
        for (const int tag : tags) {
          for (size_t e = 0; e < kEach; ++e) {
            const size_t k = e * kTags + static_cast<size_t>(tag);
            works.push_back(rank.group().Recv(in.Range(k * count, count), last, tag));
          }
        }
        std::shuffle(works.begin(), works.end(), std::mt19937(1));
        for (Work& work : works) RANK_CHECK_OK(work.Wait());
        for (size_t i = 0; i < in.count(); ++i) RANK_CHECK_EQ(in.Get(i), static_cast<double>(i) + 1e6 * last);
      }
    }
  });
}

TEST_CASE("every rank to every other at once, among collective operations, waited for by several threads") {
  if (RankCount() == 1) return;
  RunOnRanksBothWays([](Rank& rank) {
    for (const size_t count : {size_t{10}, size_t{40'000}}) {
      for (const Placement placement : kAllPlacements) {
        const size_t size = static_cast<size_t>(rank.size());
        Memory out(rank, placement, DType::kFloat32, count), in(rank, placement, DType::kFloat32, count * size);
        Memory sum(rank, placement, DType::kFloat32, count);
        for (int round = 0; round < 3; ++round) {
          out.Fill(rank.rank() + 10 * round);
          sum.Fill(1);
          std::vector<Work> works;
          works.push_back(rank.group().AllReduce(sum.whole(), sum.whole()));
          for (int k = 1; k < rank.size(); ++k) {
            const int from = (rank.rank() + k) % rank.size();
            works.push_back(rank.group().Recv(in.Range(static_cast<size_t>(from) * count, count), from, round));
          }
          for (int k = 1; k < rank.size(); ++k) {
            works.push_back(rank.group().Send(out.whole(), (rank.rank() + k) % rank.size(), round));
          }
          works.push_back(rank.group().Barrier());
          std::vector<absl::Status> outcomes(2);
          std::vector<std::thread> threads;
          for (size_t t = 0; t < outcomes.size(); ++t) {
            threads.emplace_back([&, t, mine = works]() mutable {
              std::shuffle(mine.begin(), mine.end(), std::mt19937(static_cast<unsigned>(t)));
              for (Work& work : mine) outcomes[t].Update(work.Wait());
            });
          }
          for (std::thread& thread : threads) thread.join();
          for (const absl::Status& outcome : outcomes) RANK_CHECK_OK(outcome);
          for (int from = 0; from < rank.size(); ++from) {
            if (from == rank.rank()) continue;
            for (size_t i = 0; i < count; ++i) {
              RANK_CHECK_EQ(in.Get(static_cast<size_t>(from) * count + i), from + 10.0 * round);
            }
          }
          RANK_CHECK_EQ(sum.Get(count - 1), static_cast<double>(rank.size()));
        }
      }
    }
  });
}

TEST_CASE("a message to a rank that waits for something else goes through") {
  if (RankCount() == 1) return;
  RunOnRanksBothWays([](Rank& rank) {
    Memory m(rank, Placement::kOrdinary, DType::kFloat32, 200'000);
    m.Fill(rank.rank());
    if (rank.rank() == 0) {
      for (int k = 0; k < 20; ++k) RANK_CHECK_OK(rank.group().Send(m.Range(0, 100), 1, 1).Wait());
      RANK_CHECK_OK(rank.group().Send(m.whole(), 1, 2).Wait());
    }
    RANK_CHECK_OK(rank.group().Barrier().Wait());
    if (rank.rank() == 1) {
      RANK_CHECK_OK(rank.group().Recv(m.whole(), 0, 2).Wait());
      for (int k = 0; k < 20; ++k) RANK_CHECK_OK(rank.group().Recv(m.Range(100, 100), 0, 1).Wait());
      for (size_t i = 0; i < m.count(); ++i) RANK_CHECK_EQ(m.Get(i), 0.0);
    }
  });
}

TEST_CASE("messages go on when nobody waits, and handles may be dropped") {
  if (RankCount() == 1) return;
  RunOnRanksBothWays([](Rank& rank) {
    Memory out(rank, Placement::kMixed, DType::kFloat32, 200'000),
        in(rank, Placement::kMixed, DType::kFloat32, 200'000);
    out.Fill(rank.rank());
    const int next = (rank.rank() + 1) % rank.size(), last = (rank.rank() + rank.size() - 1) % rank.size();
    RANK_CHECK_OK(rank.group().Send(out.whole(), next, 0));
    const Work work = rank.group().Recv(in.whole(), last, 0);
    const absl::Time deadline = absl::Now() + absl::Seconds(30);
    while (!work.Done()) {
      RANK_CHECK(absl::Now() < deadline);
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
    RANK_CHECK_EQ(in.Get(199'999), static_cast<double>(last));
    RANK_CHECK_OK(rank.group().Barrier().Wait());
    rank.Meet();
  });
}

TEST_CASE("a sender hears of all that was received, though the receiver has turned to something else") {
  if (RankCount() == 1) return;
  RunOnRanksBothWays([](Rank& rank) {
    constexpr size_t kMessages = 60, kCount = 10'000;
    Memory m(rank, Placement::kOrdinary, DType::kInt32, kMessages * kCount);
    m.Fill(rank.rank());
    for (int round = 0; round < 10; ++round) {
      std::vector<Work> works;
      for (size_t k = 0; k < kMessages && rank.rank() < 2; ++k) {
        const Buffer data = m.Range(k * kCount, kCount);
        // Slowly enough that some have been received before the next are sent, and too fast for the sender's library to
        // look what the receiver says of them.
        const absl::Time next = absl::Now() + absl::Microseconds(20);
        while (rank.rank() == 0 && absl::Now() < next) continue;
        works.push_back(rank.rank() == 0 ? rank.group().Send(data, 1, 3) : rank.group().Recv(data, 0, 3));
      }
      for (Work& work : works) RANK_CHECK_OK(work.Wait());
      rank.Meet();  // without the library
    }
    for (size_t i = 0; i < m.count(); ++i) RANK_CHECK_EQ(m.Get(i), rank.rank() < 2 ? 0 : rank.rank());
  });
}

TEST_CASE("messages of a group and of its parts do not mix") {
  if (RankCount() == 1) return;
  RunOnRanks([](Rank& rank) {
    const auto part = RANK_VALUE(rank.group().Split(0, -rank.rank()));
    double mine[2] = {1.0 * rank.rank(), 100.0 + rank.rank()}, theirs[2] = {};
    const int next = (rank.rank() + 1) % rank.size(), last = (rank.rank() + rank.size() - 1) % rank.size();
    const auto buffer = [](double* value) { return Buffer{value, 1, DType::kFloat64, {}}; };
    std::vector<Work> works;
    works.push_back(rank.group().Send(buffer(&mine[0]), next, 0));
    works.push_back(part->Send(buffer(&mine[1]), rank.size() - 1 - next, 0));
    works.push_back(part->Recv(buffer(&theirs[1]), rank.size() - 1 - last, 0));
    works.push_back(rank.group().Recv(buffer(&theirs[0]), last, 0));
    for (Work& work : works) RANK_CHECK_OK(work.Wait());
    RANK_CHECK_EQ(theirs[0], 1.0 * last);
    RANK_CHECK_EQ(theirs[1], 100.0 + last);
    RANK_CHECK_OK(part->Barrier().Wait());
  });
}

// --- errors ---------------------------------------------------------------------------------------------------------

TEST_CASE("mistakes in messages are InvalidArgument and do no harm") {
  RunOnRanks([](Rank& rank) {
    Memory m(rank, Placement::kOrdinary, DType::kFloat32, 10);
    const std::string me = absl::StrCat("rank ", rank.rank());
    const int other = rank.rank() == 0 ? 1 : 0;
    RANK_CHECK_STATUS(rank.group().Send(m.whole(), rank.rank(), 0), StatusCode::kInvalidArgument, me, "send", "itself");
    RANK_CHECK_STATUS(rank.group().Recv(m.whole(), rank.rank(), 0), StatusCode::kInvalidArgument, me, "recv", "itself");
    RANK_CHECK_STATUS(rank.group().Send(m.whole(), rank.size(), 0), StatusCode::kInvalidArgument, me, "send", "group");
    RANK_CHECK_STATUS(rank.group().Recv(m.whole(), -1, 0), StatusCode::kInvalidArgument, me, "recv", "group");
    if (rank.size() > 1) {
      RANK_CHECK_STATUS(rank.group().Send(m.whole(), other, -1), StatusCode::kInvalidArgument, me, "send", "tag -1");
      for (const int tag : {1 << 30, std::numeric_limits<int>::max()}) {  // those that gather and its like use, too
        const std::string named = absl::StrCat("tag ", tag, " is above 1073741823");
        RANK_CHECK_STATUS(rank.group().Send(m.whole(), other, tag), StatusCode::kInvalidArgument, me, "send", named);
        RANK_CHECK_STATUS(rank.group().Recv(m.whole(), other, tag), StatusCode::kInvalidArgument, me, "recv", named);
        RANK_CHECK_STATUS(rank.group().SendRecv(m.Range(0, 5), other, m.Range(5, 5), other, tag),
                          StatusCode::kInvalidArgument, me, "send_recv", named);
      }
    }
    RANK_CHECK_STATUS(rank.group().Send({}, other, 0), StatusCode::kInvalidArgument, me, "send");
    RANK_CHECK_STATUS(rank.group().Recv(Buffer{nullptr, 3, DType::kFloat32, {}}, other, 0),
                      StatusCode::kInvalidArgument, me, "recv", "null");
    RANK_CHECK_OK(rank.group().status());
  });
}

TEST_CASE("counts and dtypes that do not match fail both ends, with both named") {
  if (RankCount() == 1) return;
  for (const size_t count : {size_t{100}, size_t{100'000}}) {
    for (const bool by_type : {true, false}) {
      RunOnRanks([&](Rank& rank) {
        Memory m(rank, Placement::kMixed, DType::kFloat32, count);
        const Buffer ints = {m.data(), count, DType::kInt32, {}};
        rank.Meet();
        absl::Status status;
        if (rank.rank() == 0) status = (rank.group().Send(by_type ? ints : m.whole(), 1, 42)).Wait();
        if (rank.rank() == 1) {
          status = (rank.group().Recv(by_type ? m.whole() : m.Range(0, count - 1), 0, 42)).Wait();
          RANK_CHECK(!status.ok());
        }
        // A small message has left before the receiver finds out.
        if (status.ok()) status = rank.group().Barrier().Wait();
        RANK_CHECK_STATUS(status, StatusCode::kFailedPrecondition, "rank 0 sends to rank 1 with tag 42",
                          absl::StrCat(by_type ? "int32, " : "float32, ", count, " elements, ", 4 * count, " bytes"),
                          absl::StrCat("rank 1 receives (float32, ", by_type ? count : count - 1, " elements"));
      });
    }
  }
}

TEST_CASE("a tag that does not come times out, with what has come instead", "[timeout]") {
  if (RankCount() == 1) return;
  RunWithTimeout(absl::Milliseconds(1500), [](Rank& rank) {
    Memory m(rank, Placement::kOrdinary, DType::kFloat32, 10);
    absl::Status status;
    if (rank.rank() == 0) RANK_CHECK_OK(rank.group().Send(m.whole(), 1, 3).Wait());
    rank.Meet();
    if (rank.rank() == 1) {
      status = rank.group().Recv(m.whole(), 0, 4).Wait();
      RANK_CHECK(FailedRanks(status) == std::vector<int>{0});
    }
    rank.Meet();
    if (rank.rank() != 1) status = rank.group().Barrier().Wait();
    RANK_CHECK_STATUS(status, StatusCode::kDeadlineExceeded, "rank 1: recv(from rank 0, tag 4, float32, 10 elements",
                      "40 bytes", "tag 3 (40 bytes)");
  });
}

TEST_CASE("a message that nobody receives while its receiver is busy elsewhere times out", "[timeout]") {
  if (RankCount() == 1) return;
  RunWithTimeout(absl::Milliseconds(1500), [](Rank& rank) {
    Memory m(rank, Placement::kOrdinary, DType::kFloat32, 1000);
    absl::Status status;
    if (rank.rank() == 1) status = rank.group().Recv(m.whole(), 0, 0).Wait();
    rank.Meet();
    if (rank.rank() != 1) status = rank.group().Send(m.whole(), (rank.rank() + 1) % 2, 9).Wait();
    RANK_CHECK_STATUS(status, StatusCode::kDeadlineExceeded, "rank 1", "rank 0", "tag 0", "4000 bytes");
  });
}

TEST_CASE("a rank that leaves without its part in a message is named") {
  if (RankCount() == 1) return;
  for (const bool send : {true, false}) {
    RunOnRanks([send](Rank& rank) {
      Memory m(rank, Placement::kOrdinary, DType::kFloat32, 100'000);
      const int gone = rank.size() - 1;
      if (rank.rank() == gone) return;  // ends its world at once
      const absl::Status status =
          (send ? rank.group().Send(m.whole(), gone, 0) : rank.group().Recv(m.whole(), gone, 0)).Wait();
      // What is sent may be taken over just before the rank leaves.
      if (!send || !status.ok()) RANK_CHECK_STATUS(status, StatusCode::kUnavailable, absl::StrCat("rank ", gone));
      RANK_CHECK_STATUS(rank.group().Barrier().Wait(), StatusCode::kUnavailable, absl::StrCat("rank ", gone));
    });
  }
}

// The receiver comes when the memory is in other use already. Unless the library has fetched the message by then.
TEST_CASE("a rank that leaves with a message under way fails the group, or the message arrives") {
  if (RankCount() == 1) return;
  RunOnRanksBothWays([](Rank& rank) {
    for (const bool allocated : {true, false}) {
      std::unique_ptr<ProcessGroup> group = RANK_VALUE(rank.group().Split(0, rank.rank()));
      const Allocation memory = RANK_VALUE(group->Allocate(100'000 * sizeof(float), Device{}));
      std::vector<float> ordinary(100'000);
      const Buffer data{allocated ? memory.data() : ordinary.data(), 100'000, DType::kFloat32, {}};
      std::fill_n(static_cast<float*>(data.data), data.count, rank.rank() == 0 ? 7.0f : 0.0f);
      rank.Meet();  // nobody is still in Allocate
      if (rank.rank() == 0) {
        const Work send = group->Send(data, 1, 0);
        group.reset();
        RANK_CHECK(send.Done());
        std::fill_n(static_cast<float*>(data.data), data.count, 1000.0f);
      }
      rank.Meet();
      if (rank.rank() == 1) {
        const absl::Status status = group->Recv(data, 0, 0).Wait();
        if (!status.ok())
          RANK_CHECK_STATUS(status, StatusCode::kAborted, "rank 0", "destroyed with operations pending");
        if (status.ok()) RANK_CHECK_EQ(static_cast<float*>(data.data)[99'999], 7.0f);
      }
      rank.Meet();
    }
  });
}

TEST_CASE("what a rank sent before it left arrives") {
  if (RankCount() == 1) return;
  RunOnRanks([](Rank& rank) {
    double value = 7;
    const Buffer buffer{&value, 1, DType::kFloat64, {}};
    if (rank.rank() == 0) {
      RANK_CHECK_OK(rank.group().Send(buffer, 1, 0).Wait());
    } else if (rank.rank() == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      value = 0;
      RANK_CHECK_OK(rank.group().Recv(buffer, 0, 0).Wait());
      RANK_CHECK_EQ(value, 7.0);
    }
  });
}

TEST_CASE("Abort ends messages, with its cause") {
  if (RankCount() == 1) return;
  RunOnRanksBothWays([](Rank& rank) {
    Memory m(rank, Placement::kMixed, DType::kFloat32, 100'000);
    std::vector<Work> works;
    if (rank.rank() == 0) {
      for (int k = 0; k < 20; ++k) works.push_back(rank.group().Send(m.whole(), 1, k));
      works.push_back(rank.group().Recv(m.whole(), 1, 0));
    } else {
      works.push_back(rank.group().Recv(m.Range(0, 10), 0, 100));
    }
    rank.Meet();
    if (rank.rank() == rank.size() - 1) rank.group().Abort(absl::DataLossError("the disk is full"));
    absl::Status last;
    for (Work& work : works) {
      last = work.Wait();
      if (!last.ok()) RANK_CHECK_STATUS(last, StatusCode::kAborted, "the disk is full");
    }
    RANK_CHECK(!last.ok());
    rank.Meet();
    RANK_CHECK_STATUS(rank.group().Send(m.whole(), rank.rank() == 0 ? 1 : 0, 0), StatusCode::kAborted, "the disk");
    RANK_CHECK_STATUS(rank.group().Recv(m.whole(), rank.rank() == 0 ? 1 : 0, 0), StatusCode::kAborted, "the disk");
  });
}

TEST_CASE("an expired Wait leaves the message under way") {
  if (RankCount() == 1) return;
  RunOnRanks([](Rank& rank) {
    Memory m(rank, Placement::kMixed, DType::kFloat32, 50'000);
    m.Fill(rank.rank());
    if (rank.rank() == 1) {
      Work recv = rank.group().Recv(m.whole(), 0, 0);
      RANK_CHECK_STATUS(recv.Wait(absl::Now() + absl::Milliseconds(20)), StatusCode::kDeadlineExceeded, "recv");
      rank.Meet();
      RANK_CHECK_OK(recv.Wait());
      RANK_CHECK_EQ(m.Get(49'999), 0.0);
    } else {
      rank.Meet();
      if (rank.rank() == 0) RANK_CHECK_OK(rank.group().Send(m.whole(), 1, 0).Wait());
    }
  });
}

}  // namespace
}  // namespace ddp::testing
