// SPDX-License-Identifier: Apache-2.0
// The contract of ProcessGroup, part 4: the caller's mistakes, ranks that disagree, and Abort.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "tests/support/catch.h"
#include "tests/support/memory.h"

namespace ddp::testing {
namespace {

using absl::StatusCode;

TEST_CASE("the caller's mistakes are InvalidArgument and do no harm", "[host]") {
  RunOnRanks([](Rank& rank) {
    ProcessGroup& group = rank.group();
    const size_t size = static_cast<size_t>(rank.size());
    Memory floats(rank, Placement::kAllocated, DType::kFloat32, 64 * size);
    Memory ints(rank, Placement::kOrdinary, DType::kInt32, 64 * size);
    const Buffer ten = floats.Range(0, 10);
    const Buffer int_ten = ints.Range(0, 10);
    const Buffer null_ten = {nullptr, 10, DType::kFloat32, {}};
    const Buffer half_ten = {ten.data, 10, DType::kFloat16, {}};
    Buffer cuda_ten = ten;
    cuda_ten.device.kind = Device::Kind::kCuda;
    const auto wrong = [&](const Work& work, const char* call) {
      RANK_CHECK_STATUS(work, StatusCode::kInvalidArgument, absl::StrCat("rank ", rank.rank()), call);
    };

    // Counts
    wrong(group.AllReduce({ten}, {floats.Range(0, 11)}), "all_reduce");
    wrong(group.AllGather({ten}, {floats.Range(0, 10 * size + 1)}), "all_gather");
    wrong(group.ReduceScatter({floats.Range(0, 10 * size + 1)}, {ten}), "reduce_scatter");
    // Types
    wrong(group.AllReduce({ten}, {int_ten}), "all_reduce");
    wrong(group.AllReduce({ten, int_ten}, {floats.Range(20, 20)}), "all_reduce");
    wrong(group.AllGather({int_ten}, {floats.Range(0, 10 * size)}), "all_gather");
    wrong(group.Broadcast({ten, int_ten}, 0), "broadcast");
    // Memory
    wrong(group.AllReduce({null_ten}, {ten}), "all_reduce");
    wrong(group.AllReduce({ten}, {null_ten}), "all_reduce");
    wrong(group.AllReduce({ten}, {floats.Range(5, 10)}), "all_reduce");
    wrong(group.AllReduce({half_ten}, {ten}), "all_reduce");
    wrong(group.AllReduce({ten}, {half_ten}), "all_reduce");
    wrong(group.Broadcast({null_ten}, 0), "broadcast");
    wrong(group.AllReduce({cuda_ten}, {cuda_ten}), "all_reduce");
    wrong(group.Broadcast({cuda_ten}, 0), "broadcast");
    // Roots
    wrong(group.Broadcast({ten}, -1), "broadcast");
    wrong(group.Broadcast({ten}, rank.size()), "broadcast");
    // Scaling and the check are for floats
    uint32_t flag = 0;
    ReduceOptions scaled, checked;
    scaled.postscale = 0.5;
    checked.nonfinite = &flag;
    wrong(group.AllReduce({int_ten}, {int_ten}, scaled), "all_reduce");
    wrong(group.AllReduce({int_ten}, {int_ten}, checked), "all_reduce");
    wrong(group.ReduceScatter({ints.Range(0, 10 * size)}, {ints.Range(10 * static_cast<size_t>(rank.rank()), 10)},
                              scaled),
          "reduce_scatter");
    RANK_CHECK_STATUS(group.Allocate(0, Device{}), StatusCode::kInvalidArgument, "allocate");
    RANK_CHECK_STATUS(group.Allocate(100, cuda_ten.device), StatusCode::kInvalidArgument, "allocate");

    RANK_CHECK_OK(group.status());
    floats.Fill(2);
    RANK_CHECK_OK(group.AllReduce({ten}, {ten}).Wait());
    RANK_CHECK_EQ(floats.Get(9), 2.0 * rank.size());
    RANK_CHECK_EQ(floats.Get(10), 2.0);
  });
}

TEST_CASE("memory of in and out that overlaps is refused, but for equal elements at their own place") {
  RunOnRanks([](Rank& rank) {
    ProcessGroup& group = rank.group();
    const size_t size = static_cast<size_t>(rank.size()), me = static_cast<size_t>(rank.rank());
    Memory m(rank, Placement::kAllocated, DType::kFloat32, 40 * size);
    const auto as = [](Buffer b, DType dtype) {
      b.count = b.count * SizeOf(b.dtype) / SizeOf(dtype);
      b.dtype = dtype;
      return b;
    };
    const auto narrow = [&](size_t first, size_t count) {  // so many bfloat16 from element `first` of m on
      Buffer b = as(m.Range(first, count), DType::kBFloat16);
      b.count = count;
      return b;
    };
    const auto wrong = [&](const Work& work, const char* call) {
      RANK_CHECK_STATUS(work, StatusCode::kInvalidArgument, absl::StrCat("rank ", rank.rank()), call, "overlap");
    };
    wrong(group.Broadcast({m.Range(0, 10), m.Range(9, 10)}, 0), "broadcast");
    if (size > 1) wrong(group.Recv({m.Range(9, 10), m.Range(0, 10)}, me == 0 ? 1 : 0, 3), "recv");
    // Elements of different sizes, over one range or several
    wrong(group.AllReduce({narrow(0, 10)}, {m.Range(0, 10)}), "all_reduce");
    wrong(group.AllReduce({narrow(0, 10), narrow(20, 10)}, {m.Range(0, 10), m.Range(20, 10)}), "all_reduce");
    wrong(group.AllReduce({m.Range(0, 10), m.Range(20, 10)}, {narrow(0, 10), narrow(20, 10)}), "all_reduce");
    wrong(group.ReduceScatter({narrow(0, 10 * size)}, {m.Range(0, 10)}), "reduce_scatter");
    wrong(group.ReduceScatter({m.Range(0, 10 * size)}, {narrow(10 * me, 10)}), "reduce_scatter");
    // Another place
    wrong(group.AllReduce({m.Range(0, 10), m.Range(20, 10)}, {m.Range(20, 10), m.Range(0, 10)}), "all_reduce");
    wrong(group.AllReduce({m.Range(0, 5), m.Range(5, 5)}, {m.Range(1, 10)}), "all_reduce");
    wrong(group.AllReduce({m.Range(0, 10), m.Range(20, 10)}, {m.Range(10, 4), m.Range(15, 7), m.Range(30, 9)}),
          "all_reduce");
    wrong(group.ReduceScatter({m.Range(0, 10 * size)}, {m.Range(10 * me + 1, 10)}), "reduce_scatter");
    wrong(group.AllGather({m.Range(10 * me + 1, 10)}, {m.Range(0, 10 * size), m.Range(0, 0)}), "all_gather");
    wrong(group.AllGather({m.Range(10 * me + 1, 10)}, {m.Range(0, 10 * size)}, std::vector<size_t>(size, 10)),
          "all_gather_v");
    wrong(group.AllToAll({m.Range(0, size), m.Range(20 * size, size)}, {m.Range(20 * size, size), m.Range(0, size)}),
          "all_to_all");
    // Two results in one place
    wrong(group.AllReduce({m.Range(0, 10), m.Range(10, 10)}, {m.Range(20, 10), m.Range(25, 10)}), "all_reduce");
    RANK_CHECK_OK(group.status());

    // In place, in ranges however cut and in whatever order
    m.Fill(1);
    RANK_CHECK_OK(
        group.AllReduce({m.Range(30, 5), m.Range(0, 10), m.Range(10, 10)}, {m.Range(30, 5), m.Range(0, 20)}).Wait());
    RANK_CHECK_OK(
        group.AllReduce({as(m.Range(20, 10), DType::kBFloat16)}, {as(m.Range(20, 10), DType::kFloat16)}).Wait());
    m.Fill(1);
    RANK_CHECK_OK(group.ReduceScatter({m.Range(0, 10 * size)}, {m.Range(10 * me, 4), m.Range(10 * me + 4, 6)}).Wait());
    RANK_CHECK_EQ(m.Get(10 * me + 9), static_cast<double>(size));
    RANK_CHECK_OK(group.AllGather({m.Range(10 * me, 10)}, {m.Range(0, 5), m.Range(5, 10 * size - 5)}).Wait());
    RANK_CHECK_OK(group.AllToAll({m.Range(0, size), m.Range(size, size)}, {m.Range(0, 2 * size)}).Wait());

    // Nothing, in the middle of something
    std::vector<size_t> counts(size, 0);
    counts[0] = 8;
    RANK_CHECK_OK(group.AllGather({me == 0 ? m.Range(0, 8) : m.Range(3, 0)}, {m.Range(0, 8)}, counts).Wait());
    RANK_CHECK_OK(group.AllReduce({m.Range(3, 0), m.Range(0, 8)}, {m.Range(0, 5), m.Range(5, 3)}).Wait());
  });
}

// A call that the last rank makes differently from the others.
struct Disagreement {
  std::function<Work(ProcessGroup&, Memory&, bool differently)> call;
  const char* usual;
  const char* different;
};

ReduceOptions With(ReduceOp op) {
  ReduceOptions options;
  options.op = op;
  return options;
}

TEST_CASE("ranks that disagree all learn of it, with both sides named", "[host]") {
  if (RankCount() == 1) return;  // nobody to disagree with
  const auto retyped = [](Memory& m, size_t count, DType dtype) { return Buffer{m.data(), count, dtype, {}}; };
  const std::vector<Disagreement> disagreements = {
      {[](ProcessGroup& g, Memory& m, bool d) {
         return g.AllReduce({m.Range(0, d ? 1001u : 1000u)}, {m.Range(0, d ? 1001u : 1000u)});
       },
       "1000", "1001"},
      {[](ProcessGroup& g, Memory& m, bool d) {
         return g.AllReduce({m.Range(0, d ? 400'000u : 1u)}, {m.Range(0, d ? 400'000u : 1u)});
       },
       "1 element", "400000"},
      {[](ProcessGroup& g, Memory& m, bool d) {
         return g.AllReduce({m.Range(0, d ? 100'000u : 40'000u)}, {m.Range(0, d ? 100'000u : 40'000u)});
       },
       "40000", "100000"},
      {[&](ProcessGroup& g, Memory& m, bool d) {
         const Buffer b = retyped(m, 1000, d ? DType::kInt32 : DType::kFloat32);
         return g.AllReduce({b}, {b});
       },
       "float32", "int32"},
      {[](ProcessGroup& g, Memory& m, bool d) {
         Buffer out = m.Range(1000, 1000);
         if (d) out.dtype = DType::kBFloat16;
         return g.AllReduce({m.Range(0, 1000)}, {out});
       },
       "float32", "bfloat16"},
      {[](ProcessGroup& g, Memory& m, bool d) {
         return g.AllReduce({m.Range(0, 1000)}, {m.Range(0, 1000)}, With(d ? ReduceOp::kMax : ReduceOp::kSum));
       },
       "sum", "max"},
      {[](ProcessGroup& g, Memory& m, bool d) {
         ReduceOptions options;
         options.postscale = d ? 0.5 : 1;
         return g.AllReduce({m.Range(0, 1000)}, {m.Range(0, 1000)}, options);
       },
       "all_reduce", "scale"},
      {[](ProcessGroup& g, Memory& m, bool d) {
         return d ? g.Broadcast({m.Range(0, 1000)}, 0) : g.AllReduce({m.Range(0, 1000)}, {m.Range(0, 1000)});
       },
       "all_reduce", "broadcast"},
      {[](ProcessGroup& g, Memory& m, bool d) { return g.Broadcast({m.Range(0, 1000)}, d ? 1 : 0); }, "from rank 0",
       "from rank 1"},
      {[](ProcessGroup& g, Memory& m, bool d) { return g.Reduce(m.Range(0, 1000), m.Range(1000, 1000), d ? 1 : 0); },
       "reduce(sum, to rank 0", "reduce(sum, to rank 1"},
      {[](ProcessGroup& g, Memory& m, bool d) { return d ? g.Barrier() : g.Broadcast({m.Range(0, 1000)}, 0); },
       "broadcast", "barrier"},
      {[](ProcessGroup& g, Memory& m, bool d) { return g.Broadcast({m.Range(0, d ? 1001u : 1000u)}, 0); }, "1000",
       "1001"},
      {[](ProcessGroup& g, Memory& m, bool d) { return g.Broadcast({m.Range(0, d ? 400'000u : 1u)}, 0); }, "1 element",
       "400000"},
      {[](ProcessGroup& g, Memory& m, bool d) { return g.Broadcast({m.Range(0, d ? 1u : 400'000u)}, d ? 1 : 0); },
       "400000", "1 element"},
      {[](ProcessGroup& g, Memory& m, bool d) {
         const size_t size = static_cast<size_t>(g.size());
         return d ? g.ReduceScatter({m.Range(0, 8 * size)}, {m.Range(8 * static_cast<size_t>(g.rank()), 8)})
                  : g.AllGather({m.Range(8 * static_cast<size_t>(g.rank()), 8)}, {m.Range(0, 8 * size)});
       },
       "all_gather", "reduce_scatter"},
  };
  for (const Placement placement : {Placement::kAllocated, Placement::kOrdinary}) {
    for (const Disagreement& disagreement : disagreements) {
      RunOnRanks([&](Rank& rank) {
        Memory m(rank, placement, DType::kFloat32, 400'000);
        rank.Meet();
        const bool differently = rank.rank() == rank.size() - 1;
        const auto check = [&](const absl::Status& status) {
          RANK_CHECK_STATUS(status, StatusCode::kFailedPrecondition, disagreement.usual, disagreement.different,
                            " calls ", absl::StrCat("rank ", rank.size() - 1));
        };
        check(disagreement.call(rank.group(), m, differently).Wait());
        // The group stays failed, with the same cause.
        RANK_CHECK_STATUS(rank.group().status(), StatusCode::kFailedPrecondition, disagreement.different);
        RANK_CHECK_STATUS(rank.group().Barrier().Wait(), StatusCode::kFailedPrecondition, disagreement.different);
        RANK_CHECK(!rank.group().Allocate(100, Device{}).ok());
      });
    }
  }
}

// The second of two operations on the same memory is not announced before the first is done.
TEST_CASE("what was held back when the group failed has failed, and stays so") {
  if (RankCount() == 1) return;
  for (const bool second_alone : {false, true}) {
    RunOnRanks([&](Rank& rank) {
      ProcessGroup& group = rank.group();
      Memory m(rank, Placement::kOrdinary, DType::kInt32, 100);
      const Buffer reduced = m.Range(0, rank.rank() == 0 ? 100 : 99), sent = m.Range(0, 100);
      Work first = group.AllReduce({reduced}, {reduced});
      Work second = group.Broadcast({sent}, 0);
      if (!second_alone) {
        RANK_CHECK_STATUS(first.Wait(), StatusCode::kFailedPrecondition, " calls ");
        absl::SleepFor(absl::Milliseconds(30));  // the library's own thread looks at the group meanwhile
      }
      RANK_CHECK_STATUS(second.Wait(), StatusCode::kFailedPrecondition, " calls ");
      RANK_CHECK_STATUS(first.Wait(), StatusCode::kFailedPrecondition, " calls ");
    });
  }
}

TEST_CASE("ranks that ask for different amounts of memory all learn of it") {
  if (RankCount() == 1) return;
  RunOnRanks([](Rank& rank) {
    RANK_CHECK_STATUS(rank.group().Allocate(rank.rank() == 1 ? 5000 : 4000, Device{}), StatusCode::kFailedPrecondition,
                      "4000", "5000", "rank 0", "rank 1");
  });
}

TEST_CASE("more memory than there is gives ResourceExhausted on every rank, and the group goes on") {
  RunOnRanks([](Rank& rank) {
    for (const size_t bytes : {size_t{1} << 46, SIZE_MAX / 2, SIZE_MAX - 5000, SIZE_MAX}) {
      RANK_CHECK_STATUS(rank.group().Allocate(bytes, Device{}), StatusCode::kResourceExhausted, "memory");
    }
    RANK_CHECK_OK(rank.group().status());
    const Allocation memory = RANK_VALUE(rank.group().Allocate(1000, Device{}));
    const Buffer whole = memory.View(DType::kInt8, 0, 1000);
    RANK_CHECK_OK(rank.group().AllReduce({whole}, {whole}).Wait());
  });
}

TEST_CASE("Abort on one rank ends everything everywhere, with its cause") {
  for (int who = 0; who < RankCount(); ++who) {
    RunOnRanks([who](Rank& rank) {
      Memory m(rank, Placement::kMixed, DType::kFloat32, 100'000);
      rank.Meet();
      std::vector<Work> works;
      if (rank.rank() != who) {
        for (size_t k = 0; k < 50; ++k) {
          const Buffer range = m.Range(2000 * k, 2000);
          works.push_back(rank.group().AllReduce({range}, {range}));
        }
      }
      rank.Meet();  // all calls have been made, and none has been answered
      if (rank.rank() == who) {
        rank.group().Abort(absl::DataLossError("the disk is full"));
        rank.group().Abort(absl::InternalError("a second cause"));
      }
      for (Work& work : works) {
        RANK_CHECK_STATUS(work.Wait(), StatusCode::kAborted, "the disk is full", absl::StrCat("rank ", who));
        RANK_CHECK(work.Done());
      }
      rank.Meet();
      RANK_CHECK_STATUS(rank.group().Barrier().Wait(), StatusCode::kAborted, "the disk is full");
      RANK_CHECK_STATUS(rank.group().Broadcast({m.whole()}, 0).Wait(), StatusCode::kAborted, "the disk is full");
      RANK_CHECK_STATUS(rank.group().Allocate(100, Device{}), StatusCode::kAborted, "the disk is full");
      RANK_CHECK_STATUS(rank.group().status(), StatusCode::kAborted, "the disk is full");
    });
  }
}

TEST_CASE("an error of a part of the world names the ranks of the world, too") {
  if (RankCount() == 1) return;
  RunOnRanks([](Rank& rank) {
    const int last = rank.size() - 1;
    const std::unique_ptr<ProcessGroup> part = RANK_VALUE(rank.group().Split(0, -rank.rank()));
    const std::unique_ptr<ProcessGroup> halves = RANK_VALUE(part->Split(part->rank() == 0 ? 0 : 1, 0));
    RANK_CHECK_EQ(part->rank(), last - rank.rank());
    Memory m(rank, Placement::kOrdinary, DType::kFloat32, 100);
    if (part->rank() == 0) {
      const std::string alone = absl::StrCat("rank 0 (rank ", last, " of the world): broadcast: ");
      RANK_CHECK_STATUS(part->Broadcast({m.whole()}, -1).Wait(), StatusCode::kInvalidArgument, alone);
      RANK_CHECK_STATUS(halves->Broadcast({m.whole()}, -1).Wait(), StatusCode::kInvalidArgument, alone);
      Work pending = part->Barrier();
      RANK_CHECK_STATUS(pending.Wait(absl::Now() + absl::Milliseconds(20)), StatusCode::kDeadlineExceeded,
                        absl::StrCat("rank 0 (rank ", last, " of the world): "), "it goes on");
    }
    rank.Meet();
    if (part->rank() == last) part->Abort(absl::DataLossError("the disk is full"));
    std::vector<int> here, there;
    for (int r = 0; r <= last; ++r) {
      here.push_back(r);
      there.push_back(last - r);
    }
    const std::string note = absl::StrCat("; ranks ", absl::StrJoin(here, ", "), " of this group are ranks ",
                                          absl::StrJoin(there, ", "), " of the world");
    const absl::Status status = part->Barrier().Wait();
    RANK_CHECK_STATUS(status, StatusCode::kAborted, absl::StrCat("rank ", last), "the disk is full", note);
    RANK_CHECK(status.message().find(note) == status.message().rfind(note));
    rank.Meet();
  });
}

TEST_CASE("Abort reaches a rank that has nothing to wait for") {
  RunOnRanks([](Rank& rank) {
    rank.Meet();
    if (rank.rank() == std::min(1, rank.size() - 1)) rank.group().Abort(absl::DataLossError("the disk is full"));
    const absl::Time give_up = absl::Now() + absl::Seconds(20);
    while (rank.group().status().ok() && absl::Now() < give_up) absl::SleepFor(absl::Milliseconds(1));
    RANK_CHECK_STATUS(rank.group().status(), StatusCode::kAborted, "the disk is full");
    rank.Meet();
  });
}

TEST_CASE("Abort from another thread releases a rank that waits") {
  RunOnRanks([](Rank& rank) {
    if (rank.size() == 1) return;
    Work work = rank.rank() == 0 ? Work() : rank.group().Barrier();
    rank.Meet();  // a call that comes after the Abort fails at once
    std::thread aborter;
    if (rank.rank() == rank.size() - 1) {
      aborter = std::thread([&rank] {
        std::this_thread::sleep_for(std::chrono::milliseconds(30));
        rank.group().Abort(absl::CancelledError("the user pressed a key"));
      });
    }
    const absl::Status status = rank.rank() == 0 ? absl::OkStatus() : work.Wait();
    if (aborter.joinable()) aborter.join();
    if (rank.rank() != 0) RANK_CHECK_STATUS(status, StatusCode::kAborted, "the user pressed a key");
    rank.Meet();
    RANK_CHECK_STATUS(rank.group().Barrier().Wait(), StatusCode::kAborted, "the user pressed a key");
  });
}

TEST_CASE("Abort leaves what is done alone") {
  RunOnRanks([](Rank& rank) {
    Memory m(rank, Placement::kAllocated, DType::kFloat32, 100);
    m.Fill(1);
    Work work = rank.group().AllReduce({m.whole()}, {m.whole()});
    RANK_CHECK_OK(work.Wait());
    rank.Meet();
    rank.group().Abort(absl::CancelledError("enough"));
    RANK_CHECK_OK(work.Wait());
    RANK_CHECK_EQ(m.Get(99), static_cast<double>(rank.size()));
  });
}

// Between nodes messages go straight into memory that a group has allocated. The group is given up at every stage of
// such an operation; the messages under way then are moved by what another group does.
TEST_CASE("what comes after an Abort changes nobody's memory") {
  constexpr size_t kCount = 1'300'000;
  RunOnRanks([](Rank& rank) {
    for (int round = 0; round < 12; ++round) {
      std::unique_ptr<ProcessGroup> group = RANK_VALUE(rank.group().Split(0, rank.rank()));
      const Allocation memory = RANK_VALUE(group->Allocate(kCount * sizeof(float), Device{}));
      const Buffer view = memory.View(DType::kFloat32, 0, kCount);
      auto* const data = static_cast<float*>(view.data);
      std::fill_n(data, kCount, 1.0f);
      RANK_CHECK_OK(rank.group().Barrier().Wait());
      // May fail, or be done, if the one who gives up is early or late.
      Work work = group->AllReduce({view}, {view});
      if (rank.rank() == round % rank.size()) {
        for (int i = 0; i < round * round * round && !work.Done(); ++i) group->Progress();
        group->Abort(absl::AbortedError("the test goes on without it"));
        group.reset();  // though a thread of the library's may be at work
        RANK_CHECK(work.Done());
      }
      work.Wait().IgnoreError();
      for (size_t i = 0; i < kCount; ++i) data[i] = static_cast<float>(static_cast<size_t>(rank.rank()) + i % 1000);
      for (int i = 0; i < 10; ++i) RANK_CHECK_OK(rank.group().Barrier().Wait());
      size_t changed = 0;
      for (size_t i = 0; i < kCount; ++i)
        changed += data[i] != static_cast<float>(static_cast<size_t>(rank.rank()) + i % 1000);
      RANK_CHECK_EQ(changed, size_t{0});
      RANK_CHECK_OK(rank.group().Barrier().Wait());
    }
  });
}

TEST_CASE("a rank that leaves while others want it is named") {
  if (RankCount() == 1) return;
  RunOnRanks([](Rank& rank) {
    const int gone = rank.size() - 1;
    if (rank.rank() == gone) return;  // ends its world at once
    RANK_CHECK_STATUS(rank.group().Barrier().Wait(), StatusCode::kUnavailable, absl::StrCat("rank ", gone), "Join");
  });
}

// The others come when its memory is in other use already.
TEST_CASE("a rank that leaves with an operation pending fails the group, and has its memory back") {
  if (RankCount() == 1) return;
  constexpr size_t kCount = 200'000;
  RunOnRanks([](Rank& rank) {
    for (const bool allocated : {true, false}) {
      std::unique_ptr<ProcessGroup> group = RANK_VALUE(rank.group().Split(0, rank.rank()));
      const Allocation memory = RANK_VALUE(group->Allocate(2 * kCount * sizeof(float), Device{}));
      std::vector<float> ordinary(2 * kCount);
      auto* const in = allocated ? static_cast<float*>(memory.data()) : ordinary.data();
      float* const out = in + kCount;
      std::fill_n(in, 2 * kCount, 1.0f);
      const auto reduce = [&] {
        return group->AllReduce(Buffer{in, kCount, DType::kFloat32, {}}, Buffer{out, kCount, DType::kFloat32, {}});
      };
      rank.Meet();  // nobody is still in Allocate
      Work work = rank.rank() == 0 ? reduce() : Work();
      if (rank.rank() == 0) {
        group.reset();
        std::fill_n(in, 2 * kCount, 1000.0f);
      }
      rank.Meet();
      if (rank.rank() != 0) work = reduce();
      const absl::Status status = work.Wait();
      RANK_CHECK_STATUS(status, StatusCode::kAborted, "rank 0", "destroyed with operations pending");
      RANK_CHECK(FailedRanks(status) == std::vector<int>{0}, status.ToString());
      rank.Meet();
      if (rank.rank() == 0) RANK_CHECK_EQ(std::count(out, out + kCount, 1000.0f), ptrdiff_t{kCount});
      rank.Meet();
    }
  });
}

TEST_CASE("a wrong backend or time-out is told at Create") {
  for (const char* backend : {"nccl", "local", ""}) {
    if (RankCount() == 1 && std::string(backend) == "local") continue;
    ContextOptions options;
    options.rank = 0;
    options.world_size = 2;
    options.store = CreateMemoryStore();
    options.backend = backend;
    options.timeout = absl::Milliseconds(100);  // for another rank, which does not come
    const absl::Status status = Context::Create(options).status();
    CHECK(status.code() == StatusCode::kInvalidArgument);
    CHECK(absl::StrContains(status.message(), "rank 0"));
    CHECK(absl::StrContains(status.message(), "backend"));
  }
  ContextOptions options;
  options.timeout = absl::ZeroDuration();
  CHECK(Context::Create(options).status().code() == StatusCode::kInvalidArgument);
}

TEST_CASE("a communicator of NCCL needs a GPU") {
  void* no_communicator = &no_communicator;
  ContextOptions options;
  options.rank = 0;
  options.world_size = 1;
  options.nccl_comm = &no_communicator;
  const absl::Status status = Context::Create(options).status();
  CHECK(status.code() == StatusCode::kInvalidArgument);
  CHECK(absl::StrContains(status.message(), "ContextOptions::nccl_comm is set, so device has to be its GPU"));
}

TEST_CASE("a missing rank is named at Create") {
  ContextOptions options;
  options.rank = 0;
  options.world_size = 3;
  options.store = CreateMemoryStore();
  options.timeout = absl::Milliseconds(200);
  const absl::Status status = Context::Create(options).status();
  CHECK(status.code() == StatusCode::kDeadlineExceeded);
  CHECK(absl::StrContains(status.message(), "ranks 1, 2 of 3 did not come"));
  CHECK(FailedRanks(status) == std::vector<int>{1, 2});
}

}  // namespace
}  // namespace ddp::testing
