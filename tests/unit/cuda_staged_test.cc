// SPDX-License-Identifier: Apache-2.0
// The kernels of the staged protocol, compiled for the CPU: several GPUs over one ring. What they write has the bits of
// CpuReduce, wherever arrays lie and however they are cut, and an infinity is found.
#include "tests/support/staged_kernels.h"  // first: it has cuda_on_cpu.h

#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "libddp/device/staged_messages.h"

namespace ddp::testing {
namespace {

TEST_CASE("the kernels of collective operations have the CPU's bits") {
  constexpr int kCases = 15;
  for (const Move move : {Move::kAllReduce, Move::kAllReduceOnce, Move::kAllReducePackets, Move::kAllReducePacketsOnce,
                          Move::kReduceScatter, Move::kReduce, Move::kAllGather, Move::kBroadcast}) {
    std::mt19937 random(static_cast<unsigned>(move) + 1);
    for (int k = 0; k < kCases; ++k) Check(RandomCase(move, &random));
  }
}

// What copies have fetched of the other ranks: each rank reduces alone.
TEST_CASE("the kernel that reduces what copies have fetched has the CPU's bits") {
  std::mt19937 random(7);
  for (int k = 0; k < 20; ++k) {
    const Case c = RandomCase(Move::kAllReduceFetched, &random);
    Ring ring(c.ranks);
    std::vector<Bytes> inputs;
    for (int r = 0; r < c.ranks; ++r) inputs.push_back(InputOf(c, r, 1));
    bool nonfinite = false;
    const Bytes expected = ResultOf(c, inputs, &nonfinite);
    const uint64_t stride = (c.count * SizeOf(c.in) + 15) / 16 * 16;
    for (int r = 0; r < c.ranks; ++r) {
      std::vector<staged::Packet> fetched(stride / 16 * static_cast<uint64_t>(c.ranks - 1));
      char* at = reinterpret_cast<char*>(fetched.data());
      for (int other = 0; other < c.ranks; ++other) {
        if (other == r) continue;
        const Bytes& theirs = inputs[static_cast<size_t>(other)];
        std::memcpy(std::exchange(at, at + stride), theirs.data(), theirs.size());
      }
      const Ranges in(c.count, c.in, c.ranges, c.shift), out(c.count, c.out, c.ranges, c.shift);
      in.Set(inputs[static_cast<size_t>(r)]);
      staged::Collective each = CollectiveOf(c, &ring, r);
      each.in = in.table;
      each.out = out.table;
      each.chunk = {0, c.count, reinterpret_cast<const char*>(fetched.data()), stride, nullptr, /*looked=*/false};
      each.part_elements = 1024;
      each.tiles = (c.count + 1023) / 1024;
      each.channels = static_cast<int>(each.tiles);
      {
        CpuKernels kernels;
        kernels.Launch(staged::BlocksOf(each), [&each](int index) { RunAny(each, index); });
      }
      INFO(std::string(Name(c.in)) << " to " << std::string(Name(c.out)) << ", " << c.count << " elements, rank " << r);
      CHECK(out.Get() == expected);
      CHECK((ring.nonfinite[static_cast<size_t>(r)] != 0) == nonfinite);
    }
  }
}

// To each rank another number of bytes, which go round the rings.
TEST_CASE("the kernel of messages moves every byte") {
  constexpr int kRanks = 3;
  const auto bytes_of = [](int from, int to) {
    return from == to ? 0 : static_cast<uint64_t>(1 + from * 100'003 + to * 40'961);
  };
  Ring ring(kRanks);
  for (int round = 0; round < 2; ++round) {
    std::vector<Ranges> in, out;
    std::vector<staged::Exchange> all;
    std::vector<Bytes> expected(kRanks);
    for (int r = 0; r < kRanks; ++r) {
      staged::Exchange e = {};
      e.at = ring.PlaceOf(r);
      uint64_t sent = 0, received = 0;
      for (int peer = 0; peer < kRanks; ++peer) {
        e.send_begin[peer] = sent;
        sent += e.send_bytes[peer] = bytes_of(r, peer);
        e.receive_begin[peer] = received;
        received += e.receive_bytes[peer] = bytes_of(peer, r);
      }
      Bytes data(sent);
      for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<char>(i * 7 + static_cast<size_t>(r + round) * 31);
      for (int peer = 0; peer < kRanks; ++peer) {
        const auto begin = data.begin() + static_cast<ptrdiff_t>(e.send_begin[peer]);
        Bytes& theirs = expected[static_cast<size_t>(peer)];
        theirs.insert(theirs.end(), begin, begin + static_cast<ptrdiff_t>(e.send_bytes[peer]));
      }
      in.emplace_back(sent, DType::kUInt8, 3, 5).Set(data);
      out.emplace_back(received, DType::kUInt8, 2, 0);
      e.in = in.back().table;
      e.out = out.back().table;
      all.push_back(e);
    }
    {
      CpuKernels kernels;
      for (const staged::Exchange& e : all) {
        kernels.Launch(staged::BlocksOf(e), [&e](int index) {
          cuda::Block block(e.at);
          staged::RunExchange(block, e, index);
        });
      }
    }
    for (size_t r = 0; r < kRanks; ++r) CHECK(out[r].Get() == expected[r]);
  }
}

// Another thread block sets LeftOf while the threads of this one load it: some see it, some do not.
class SeenByHalf : public cuda::ReducingBlock<int32_t, int32_t> {
 public:
  using ReducingBlock::ReducingBlock;
  uint64_t Load(const uint64_t* from) { return from == LeftOf(at_) ? threadIdx.x % 2 : ReducingBlock::Load(from); }
};

TEST_CASE("a thread block of which some threads see that the rank has left gives peers nothing") {
  for (const Move move :
       {Move::kAllReduce, Move::kAllReduceOnce, Move::kAllReducePackets, Move::kAllReducePacketsOnce}) {
    Ring ring(2);
    const Case c{move, DType::kInt32, DType::kInt32, ReduceOp::kSum, 2, 0, 500, 1, 0, false, false, 3, false};
    const Operation operation(c, &ring, 0);
    const staged::Collective& each = operation.collectives[0];
    for (int i = 0; i < staged::kAbortWords; ++i) *AbortWordOf(each.at, 0, i) = 1;
    {
      CpuKernels kernels;
      kernels.Launch(staged::BlocksOf(each), [&each](int index) {
        SeenByHalf block(each);
        staged::RunCollective(block, each, index);
      });
    }
    INFO("move " << static_cast<int>(move));
    const char* const begin = reinterpret_cast<const char*>(CounterOf(each.at, staged::kWritten, 0, 0));
    const char* const end = each.at.ring + staged::RingBytes(2);
    CHECK(std::all_of(begin, end, [](char byte) { return byte == 0; }));
  }
}

}  // namespace
}  // namespace ddp::testing
