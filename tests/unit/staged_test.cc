// SPDX-License-Identifier: Apache-2.0
// The hierarchical backend on GPUs, beyond what every backend of GPUs has to do (nccl_group_test.cc and its neighbours,
// with DDP_TEST_BACKEND): its plan, its bits and its rings; staged_failure_test.cc has how its kernels leave.
#include <atomic>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "libddp/base/failed_ranks.h"
#include "libddp/comm/base/block_reducer.h"
#include "libddp/comm/ring/staged_plan.h"
#include "tests/support/block_reference.h"
#include "tests/support/gpu_results.h"
#include "tests/support/nccl_job.h"
#include "tests/support/whole_packet.h"

namespace ddp::testing::simulated {
namespace {

using staged::Move;

// --- the plan -------------------------------------------------------------------------------------------------------

// Marks what the ranks' parts of all tiles cover.
std::vector<int> Covered(const staged::Collective& c) {
  std::vector<int> times(c.count);
  for (uint64_t tile = 0; tile < c.tiles; ++tile) {
    for (int p = 0; p < (HasParts(c.move) ? c.at.ranks : 1); ++p) {
      const staged::Part part = PartOf(c, tile, p);
      for (uint64_t i = 0; i < part.count; ++i) ++times[part.begin + i];
    }
  }
  return times;
}

TEST_CASE("tiles cover every element once, and fit their slots") {
  for (const Move move : {Move::kAllReduce, Move::kAllReduceOnce, Move::kAllReducePackets, Move::kAllReducePacketsOnce,
                          Move::kReduceScatter, Move::kReduce, Move::kAllGather, Move::kBroadcast}) {
    for (const int ranks : {2, 3, 8, 16}) {
      for (const int size : {1, 2, 4, 8}) {
        for (const uint64_t each : {1, 5, 1000, 40'000}) {
          for (const int blocks : {1, 32, 1000}) {
            staged::Collective c = {};
            c.at.ranks = ranks;
            c.move = move;
            c.count = each * static_cast<uint64_t>(ranks);
            c.in_size = size;
            c.out_size = size == 2 ? 4 : size;
            for (int r = 0; r <= ranks; ++r) c.part_begin[r] = each * static_cast<uint64_t>(r);
            const uint64_t in_size = static_cast<uint64_t>(size), out_size = static_cast<uint64_t>(c.out_size);
            if (ByPackets(move) &&
                !ByPackets(AllReduceMove(StagedLimits::For(ranks), ranks, blocks, c.count, in_size, out_size)))
              continue;
            PlanTiles(blocks, &c);
            INFO("move " << static_cast<int>(move) << ", " << ranks << " ranks, " << size << " bytes, " << each
                         << " each, " << blocks << " blocks");
            CHECK(Covered(c) == std::vector<int>(c.count, 1));
            const uint64_t parts = HasParts(move) ? static_cast<uint64_t>(ranks) : 1;
            if (ByPackets(move)) {
              CHECK(c.tiles == static_cast<uint64_t>(c.channels));
              CHECK(c.part_elements * out_size <= staged::kPackets * staged::kPacketBytes);
              CHECK(c.part_elements % PacketElements(c) == 0);
              CHECK(BlocksOf(c) <= blocks);
              continue;
            }
            if (UsesInputs(move)) {
              CHECK(parts * c.part_elements * static_cast<uint64_t>(c.in_size) <= staged::kSlotBytes);
            }
            if (UsesResults(move)) {
              CHECK(c.part_elements * static_cast<uint64_t>(c.out_size) <= staged::kSlotBytes);
            }
            CHECK(c.part_elements * static_cast<uint64_t>(size) % 16 == 0);
            CHECK(c.channels >= 1);
            CHECK(BlocksOf(c) <= std::max(blocks, 3));
          }
        }
      }
    }
  }
}

TEST_CASE("tiles of 8-bit blocks cover every element once, and fit their slots") {
  for (const int ranks : {2, 3, 8, 16}) {
    for (const uint64_t count : {1, 512, 513, 100'000, 3'000'000}) {
      for (const int thread_blocks : {1, 32, 1000}) {
        staged::BlockReduction c = {};
        c.at.ranks = ranks;
        c.count = count;
        PlanBlocks(thread_blocks, &c);
        INFO(ranks << " ranks, " << count << " elements, " << thread_blocks << " thread blocks");
        uint64_t next = 0;
        for (uint64_t tile = 0; tile < c.tiles; ++tile) {
          for (int p = 0; p < ranks; ++p) {
            const staged::BlockPart part = PartOf(c, tile, p);
            if (part.count == 0) continue;
            CHECK(part.begin == next);
            CHECK(part.begin % blocks::kGroup == 0);
            next += part.count;
          }
        }
        CHECK(next == count);
        CHECK(c.part_groups * blocks::kGroupBytes * static_cast<uint64_t>(ranks) <= staged::kSlotBytes);
        CHECK(BlocksOf(c) <= std::max(thread_blocks, 3));
      }
    }
  }
}

TEST_CASE("the parts of the ring do not overlap") {
  for (const int ranks : {1, 2, 5, 16}) {
    char* const base = reinterpret_cast<char*>(staged::kLine);  // anywhere
    const staged::Place at{0, ranks, base, nullptr, nullptr};
    std::vector<std::pair<size_t, size_t>> parts;  // where they begin and end
    const auto take = [&](const void* begin, size_t bytes) {
      const size_t offset = static_cast<size_t>(static_cast<const char*>(begin) - base);
      parts.emplace_back(offset, offset + bytes);
    };
    for (int r = 0; r < ranks; ++r) {
      for (int i = 0; i < staged::kAbortWords; ++i) take(AbortWordOf(at, r, i), staged::kLine);
      for (int c = 0; c < staged::kMaxChannels; ++c) {
        for (int s = 0; s < staged::kStages; ++s) {
          take(CounterOf(at, static_cast<staged::Stage>(s), r, c), sizeof(staged::Counter));
        }
        for (int ring = 0; ring < 2; ++ring) {
          for (uint64_t n = 0; n < staged::kDepth; ++n) take(SlotOf(at, ring, r, c, n), staged::kSlotBytes);
        }
      }
      for (int c = 0; c < staged::kPacketChannels; ++c) {
        for (uint64_t n = 0; n < 2; ++n) take(PacketsOf(at, r, c, n), staged::kPackets * sizeof(staged::Packet));
      }
      for (int to = 0; to < ranks; ++to) {
        for (int c = 0; c < staged::kPairChannels; ++c) {
          take(PairCounterOf(at, staged::kSent, r, to, c), sizeof(staged::Counter));
          take(PairCounterOf(at, staged::kReceived, r, to, c), sizeof(staged::Counter));
          for (uint64_t n = 0; n < staged::kDepth; ++n) take(PairSlotOf(at, r, to, c, n), staged::kPairSlotBytes);
        }
      }
    }
    std::sort(parts.begin(), parts.end());
    size_t end = 0;
    for (const auto& part : parts) {
      REQUIRE(part.first == end);
      end = part.second;
    }
    CHECK(end == staged::RingBytes(ranks));
  }
}

// --- results --------------------------------------------------------------------------------------------------------

// The same call on GPU memory and on the CPU's.
template <typename Call>
void CheckBits(Rank& rank, ProcessGroup& group, DType in, DType out, size_t count, size_t pieces, const Call& call) {
  Array a(rank, group, in, count, false), b(rank, group, out, count, false);
  std::vector<char> host_in(count * SizeOf(in)), host_out(count * SizeOf(out));
  for (size_t i = 0; i < count; ++i) {
    a.Set(i, Awkward(rank.rank, i));
    SetElement(in, host_in.data(), i, Awkward(rank.rank, i));
  }
  RANK_CHECK_OK(call(a.Cut(pieces), b.Cut(pieces + 2), kNoStream).Wait());
  const Buffer from{host_in.data(), count, in, Device{}}, to{host_out.data(), count, out, Device{}};
  RANK_CHECK_OK(call({from}, {to}, Stream{}).Wait());
  RANK_CHECK(std::memcmp(b.whole().data, host_out.data(), host_out.size()) == 0, std::string(Name(in)), " to ",
             std::string(Name(out)), ", ", count, " elements in ", pieces, " pieces");
}

// Everything by the copy engines, in chunks so small that each lane's slots are used again and again.
constexpr char kCopies[] = "copies=0,chunk=4K";
// Everything that packets can hold by packets in two phases.
constexpr char kTwoPhases[] = "packets=1M,packets_once=0";

TEST_CASE("staged sums have the CPU's bits, however arrays are cut") {
  for (const auto& [size, limits] :
       {std::pair(2, "fixed"), std::pair(3, "fixed"), std::pair(4, "fixed"), std::pair(2, kCopies),
        std::pair(3, kCopies), std::pair(3, kTwoPhases), std::pair(4, kTwoPhases)}) {
    StagedJob job(size, limits);
    job.Run([](Rank& rank, ProcessGroup& group) {
      for (const DType in : {DType::kFloat64, DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
        for (const DType out : {DType::kFloat64, DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
          if ((in == DType::kFloat64) != (out == DType::kFloat64)) continue;
          for (const size_t count : {size_t{777}, size_t{60'001}}) {
            for (const size_t pieces : {size_t{1}, size_t{5}, size_t{100}}) {  // more than a launch takes
              const ReduceOptions options{.op = ReduceOp::kAvg, .prescale = 1.1, .postscale = 0.7};
              CheckBits(rank, group, in, out, count, pieces,
                        [&](const std::vector<Buffer>& from, const std::vector<Buffer>& to, Stream stream) {
                          return group.AllReduce(from, to, options, stream);
                        });
            }
          }
        }
      }
    });
  }
}

// All-reduces of ones on simulated GPUs, each rank well after the one before; on a ring of the test's own.
class Gpus {
 public:
  Gpus(int ranks, uint64_t operations_before)
      : ranks_(ranks),
        gpus_(KeptDevices(ranks)),
        ring_(staged::RingBytes(ranks) / sizeof(staged::Packet)),
        sides_(static_cast<size_t>(ranks)) {
    const DeviceGuard first(gpus_, DeviceOf(0));
    registered_ = gpus_.RegisterHost(ring_.data(), staged::RingBytes(ranks_)).value();
    for (int r = 0; r < ranks_; ++r) {
      Side& side = SideOf(r);
      const DeviceGuard guard(gpus_, DeviceOf(r));
      side.counts = gpus_.Allocate(DeviceOf(r), staged::kCounts * sizeof(uint64_t)).value();
      side.failed = gpus_.Allocate(DeviceOf(r), sizeof(uint32_t)).value();
      *static_cast<uint32_t*>(side.failed.get()) = 0;
      side.words = gpus_.Allocate(DeviceOf(r), kMost * sizeof(int32_t)).value();
      side.stream = MakeStream(gpus_).value();
      FakeDevices::RunEarly(side.stream.get());
      for (int c = 0; c < staged::kPacketChannels; ++c) *PacketCountOf(PlaceOf(r), c) = operations_before;
    }
  }
  ~Gpus() {
    for (const std::string& complaint : gpus_.complaints()) CHECK(complaint == "");
  }

  // As if operation `number` of long ago had left its packets.
  void LeavePackets(uint64_t number) {
    for (int r = 0; r < ranks_; ++r) {
      for (int c = 0; c < staged::kPacketChannels; ++c) {
        const staged::Packet old{{{77, 77, 77}}, static_cast<uint32_t>(number)};
        std::fill_n(PacketsOf(PlaceOf(0), r, c, number), staged::kPackets, old);
      }
    }
  }

  // All ranks' results, end to end.
  std::vector<int32_t> AllReduce(Move move, size_t count) {
    for (int r = 0; r < ranks_; ++r) {
      if (r > 0) std::this_thread::sleep_for(std::chrono::milliseconds(10));
      Launch(r, move, count);
    }
    std::vector<int32_t> results;
    for (int r = 0; r < ranks_; ++r) {
      FakeDevices::Synchronize(SideOf(r).stream.get());
      results.insert(results.end(), WordsOf(r), WordsOf(r) + count);
    }
    return results;
  }

  // Each of three ranks owns a packet. Rank 2 has died after it had put rank 1's: so rank 1 has passed on its result,
  // and waits for the others', and rank 0 waits for the one that is missing. They leave one after the other.
  void LeaveOneAfterTheOther() {
    const auto packets_of = [&](int r) { return PacketsOf(PlaceOf(0), r, 0, 1); };
    const auto mark_of = [&](int r, int i) { return LoadPacket(&packets_of(r)[i]).mark; };
    const auto words_of = [&](int r) { return std::vector<int32_t>(WordsOf(r), WordsOf(r) + 9); };
    packets_of(2)[1] = {{{1, 1, 1}}, 1};
    for (int r = 0; r < 2; ++r) Launch(r, Move::kAllReducePackets, 9);
    while (mark_of(1, 1) != 1) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    for (int r = 0; r < 2; ++r) {
      std::atomic_ref<uint32_t>(*AbortWordOf(PlaceOf(0), r, 0)).store(1);
      FakeDevices::Synchronize(SideOf(r).stream.get());
      CHECK(*static_cast<uint32_t*>(SideOf(r).failed.get()) == 1);
      CHECK(mark_of(0, 0) == 0);
    }
    CHECK(words_of(0) == std::vector<int32_t>(9, 1));
    CHECK(words_of(1) == std::vector<int32_t>{1, 1, 1, 3, 3, 3, 1, 1, 1});
  }

  // One of rank 0's thread blocks has to leave an operation; whether all of rank 0's know of it then, and no peer's.
  bool AllHearOfFailure() {
    *AbortWordOf(PlaceOf(0), 0, 1) = 1;
    Launch(0, Move::kAllReduceOnce, kMost);
    FakeDevices::Synchronize(SideOf(0).stream.get());
    bool all = *static_cast<uint32_t*>(SideOf(0).failed.get()) == 1;
    for (int i = 0; i < staged::kAbortWords; ++i) {
      all = all && *AbortWordOf(PlaceOf(0), 0, i) == 1 && *AbortWordOf(PlaceOf(0), 1, i) == 0;
    }
    return all;
  }
  // How many slots and packets rank 0 fills in a group that has failed.
  uint64_t WrittenAfterFailure() {
    *CounterOf(PlaceOf(0), staged::kWritten, 0, 0) = {};
    for (const Move move : {Move::kAllReduceOnce, Move::kAllReducePackets, Move::kAllReducePacketsOnce})
      Launch(0, move, kMost);
    FakeDevices::Synchronize(SideOf(0).stream.get());
    uint64_t written = CounterOf(PlaceOf(0), staged::kWritten, 0, 0)->value;
    for (const uint64_t operation : {0, 1}) {
      const staged::Packet* const packets = PacketsOf(PlaceOf(0), 0, 0, operation);
      written += static_cast<uint64_t>(
          std::count_if(packets, packets + staged::kPackets, [](const staged::Packet& p) { return p.mark != 0; }));
    }
    return written;
  }

  // Whether peers get nothing of rank 0's all-reduces behind a wait that its stream has left.
  bool GivesNothingAfterLeaving() {
    *LeftOf(PlaceOf(0)) = 1;
    for (const Move move :
         {Move::kAllReducePackets, Move::kAllReducePacketsOnce, Move::kAllReduceOnce, Move::kAllReduce})
      Launch(0, move, kMost);
    FakeDevices::Synchronize(SideOf(0).stream.get());
    const char* const begin = reinterpret_cast<const char*>(ring_.data());
    return std::all_of(begin, begin + staged::RingBytes(ranks_), [](char byte) { return byte == 0; });
  }

  static constexpr size_t kMost = 8192;  // elements

 private:
  struct Side {
    std::shared_ptr<void> counts, failed, words;
    OwnedStream stream;
  };

  void Launch(int r, Move move, size_t count) {
    staged::Collective c = {};
    c.at = PlaceOf(r);
    c.move = move;
    c.count = count;
    c.in_size = c.out_size = sizeof(int32_t);
    c.arithmetic.in_type = c.arithmetic.out_type = static_cast<uint8_t>(DType::kInt32);
    PlanTiles(32, &c);
    c.in = c.out = {{static_cast<char*>(SideOf(r).words.get())}, {count * sizeof(int32_t)}, 1};
    std::fill_n(WordsOf(r), count, 1);
    const DeviceGuard guard(gpus_, DeviceOf(r));
    CHECK(gpus_.RunStaged(c, SideOf(r).stream.get()).ok());
  }
  static Device DeviceOf(int rank) { return {Device::Kind::kCuda, static_cast<int16_t>(rank)}; }
  Side& SideOf(int rank) { return sides_[static_cast<size_t>(rank)]; }
  int32_t* WordsOf(int rank) { return static_cast<int32_t*>(SideOf(rank).words.get()); }
  staged::Place PlaceOf(int rank) {
    return {rank, ranks_, reinterpret_cast<char*>(ring_.data()), static_cast<uint64_t*>(SideOf(rank).counts.get()),
            static_cast<uint32_t*>(SideOf(rank).failed.get())};
  }

  const int ranks_;
  FakeDevices& gpus_;
  std::vector<staged::Packet> ring_;
  std::shared_ptr<void> registered_;
  std::vector<Side> sides_;
};

TEST_CASE("packets of operations long ago are not taken for those of this one") {
  // Each rank has one of the first operations' packets; or one rank two, and the last none.
  for (const auto& [ranks, move, few] :
       {std::tuple(2, Move::kAllReducePacketsOnce, 3), std::tuple(2, Move::kAllReducePackets, 3),
        std::tuple(3, Move::kAllReducePackets, 5), std::tuple(4, Move::kAllReducePackets, 3)}) {
    for (const uint64_t before : {uint64_t{1} << 24, uint64_t{1} << 32}) {
      Gpus gpus(ranks, before - 2);
      gpus.LeavePackets(before + 2);
      gpus.LeavePackets(before + 3);
      for (uint64_t number = before - 1; number < before + 8; ++number) {
        INFO(ranks << " ranks, operation " << number);
        const size_t count = number < before + 2 ? static_cast<size_t>(few) : Gpus::kMost;
        CHECK(gpus.AllReduce(move, count) == std::vector<int32_t>(static_cast<size_t>(ranks) * count, ranks));
      }
    }
  }
}

TEST_CASE("an infinity in packets is found on all, in one phase and in two") {
  for (const char* const limits : {"packets=1M,packets_once=1M", kTwoPhases}) {
    StagedJob job(3, limits);
    job.Run(CheckInfinityIsFound);
  }
}

TEST_CASE("who leaves packets neither stores nor passes on what has not come") {
  Gpus gpus(3, 0);
  gpus.LeaveOneAfterTheOther();
}

// A peer that is still in the operation that failed would take it for that one's.
TEST_CASE("what is enqueued behind an operation that failed writes nothing") {
  Gpus gpus(2, 0);
  CHECK(gpus.AllHearOfFailure());
  CHECK(gpus.WrittenAfterFailure() == 0);
}

TEST_CASE("what is enqueued behind a wait that was left gives peers nothing") {
  Gpus gpus(2, 0);
  CHECK(gpus.GivesNothingAfterLeaving());
}

// So large that every ring goes round several times.
TEST_CASE("large arrays go round the rings, in every operation") {
  for (const auto& [size, limits] :
       {std::pair(2, "fixed"), std::pair(3, "fixed"), std::pair(2, "copies=1M,chunk=64K"),
        std::pair(3, "copies=1M,chunk=256K"), std::pair(2, "tile=4K"), std::pair(3, "tile=12K")}) {
    StagedJob job(size, limits);
    job.gpus.staged_blocks = [](int) { return 16; };
    job.Run([](Rank& rank, ProcessGroup& group) {
      const size_t n = static_cast<size_t>(rank.size), part = 700'001, me = static_cast<size_t>(rank.rank);
      const auto value = [](size_t r, size_t i) { return static_cast<double>((r * 31 + i * 7) % 1000); };
      Array whole(rank, group, DType::kFloat32, n * part, false), one(rank, group, DType::kFloat32, part, false);
      const auto fill = [&] {
        for (size_t i = 0; i < n * part; ++i) whole.Set(i, value(me, i));
        for (size_t i = 0; i < part; ++i) one.Set(i, value(me, i));
      };
      const auto sum = [&](size_t i) {
        double total = 0;
        for (size_t r = 0; r < n; ++r) total += value(r, i);
        return total;
      };
      const auto expect = [&](const Array& array, size_t count, const auto& expected, const char* what) {
        for (size_t i = 0; i < count; ++i) {
          RANK_CHECK(array.Get(i) == expected(i), what, " element ", i, " is ", array.Get(i), ", not ", expected(i));
        }
      };
      fill();
      RANK_CHECK_OK(group.AllReduce(whole.whole(), whole.whole(), {}, kNoStream).Wait());
      expect(whole, n * part, sum, "all_reduce");
      fill();
      RANK_CHECK_OK(group.ReduceScatter(whole.whole(), one.whole(), {}, kNoStream).Wait());
      expect(
          one, part, [&](size_t i) { return sum(me * part + i); }, "reduce_scatter");
      fill();
      RANK_CHECK_OK(group.AllGather(one.whole(), whole.whole(), kNoStream).Wait());
      expect(
          whole, n * part, [&](size_t i) { return value(i / part, i % part); }, "all_gather");
      fill();
      RANK_CHECK_OK(group.Broadcast(one.whole(), rank.size - 1, kNoStream).Wait());
      expect(
          one, part, [&](size_t i) { return value(n - 1, i); }, "broadcast");
      fill();
      RANK_CHECK_OK(
          group.Reduce(one.whole(), rank.rank == 1 ? Buffers(one.whole()) : Buffers(), 1, {}, kNoStream).Wait());
      if (rank.rank == 1) expect(one, part, sum, "reduce");
      fill();
      RANK_CHECK_OK(group.AllToAll(whole.whole(), whole.whole(), kNoStream).Wait());
      expect(
          whole, n * part, [&](size_t i) { return value(i / part, me * part + i % part); }, "all_to_all");
    });
  }
}

// Between two other operations, with which it shares the rings.
TEST_CASE("large arrays in 8-bit blocks go round the rings, and have the CPU's bits") {
  for (const int size : {2, 3, 4}) {
    StagedJob job(size);
    job.gpus.staged_blocks = [](int) { return 16; };
    job.Run([](Rank& rank, ProcessGroup& group) {
      constexpr size_t kCount = 1'500'001;
      Array array(rank, group, DType::kFloat32, kCount, false), other(rank, group, DType::kInt32, 50'000, false);
      for (size_t i = 0; i < kCount; ++i) array.Set(i, Awkward(rank.rank, i));
      for (size_t i = 0; i < 50'000; ++i) other.Set(i, 1);
      const auto add = [&] { RANK_CHECK_OK(group.AllReduce(other.whole(), other.whole(), {}, kNoStream).Wait()); };
      add();
      BlockReducer* const reducer = BlockReducerOf(group);
      RANK_CHECK(reducer != nullptr);
      const BlockReduce reduce{.buffer = array.whole(), .prescale = 0.5F, .postscale = 0.3F, .after = kNoStream};
      RANK_CHECK_OK(reducer->AllReduceBlocks(reduce).Wait());
      add();
      RANK_CHECK_EQ(other.Get(49'999), static_cast<double>(rank.size * rank.size));
      const BlockSum sum{.count = kCount, .prescale = 0.5F, .postscale = 0.3F};
      const std::vector<char> expected = ReduceInBlocks(sum, rank.size, Awkward);
      RANK_CHECK(std::memcmp(array.whole().data, expected.data(), expected.size()) == 0);
    });
  }
}

}  // namespace
}  // namespace ddp::testing::simulated
