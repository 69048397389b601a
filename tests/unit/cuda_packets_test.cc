// SPDX-License-Identifier: Apache-2.0
// All-reduces by packets in two phases, by the kernels of the staged protocol on the CPU: their bits, infinities, one
// after the other, and how they are left.
#include "tests/support/staged_kernels.h"  // first: it has cuda_on_cpu.h

#include <atomic>
#include <chrono>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace ddp::testing {
namespace {

// Also where some ranks own no packet.
TEST_CASE("packets in two phases have the CPU's bits over any number of ranks") {
  std::mt19937 random(11);
  for (const int ranks : {3, 4, 5, 8, 9}) {
    for (const int count : {1, ranks - 1, 2 * ranks + 1, 301}) {
      Case c = RandomCase(Move::kAllReducePackets, &random);
      c.ranks = ranks;
      c.root = 0;
      c.count = static_cast<uint64_t>(count);
      c.in_place = c.in == c.out && count % 2 == 1;
      Check(c);
    }
  }
}

TEST_CASE("an infinity in one packet is found by all ranks, whoever owns it") {
  for (const auto& [in, out] :
       {std::pair(DType::kFloat64, DType::kFloat64), std::pair(DType::kFloat32, DType::kFloat32),
        std::pair(DType::kFloat32, DType::kBFloat16), std::pair(DType::kFloat16, DType::kFloat32),
        std::pair(DType::kFloat16, DType::kFloat16), std::pair(DType::kBFloat16, DType::kBFloat16)}) {
    constexpr uint64_t kCount = 13;
    for (uint64_t at = 0; at < kCount; ++at) {
      Ring ring(3);
      const Case c{Move::kAllReducePackets, in, out, ReduceOp::kSum, 3, 0, kCount, 2, 1, false, false, 3, false};
      Operation operation(c, &ring, 0);
      for (int r = 0; r < c.ranks; ++r) {
        Bytes bytes(kCount * SizeOf(in));
        for (uint64_t i = 0; i < kCount; ++i) {
          const double value = i == at && r == 1 ? std::numeric_limits<double>::infinity() : 1;
          SetElement(in, bytes.data(), i, value);
        }
        operation.in[static_cast<size_t>(r)].Set(bytes);
      }
      {
        CpuKernels kernels;
        for (const staged::Collective& each : operation.collectives) {
          kernels.Launch(staged::BlocksOf(each), [&each](int index) { RunAny(each, index); });
        }
      }
      INFO(std::string(Name(in)) << " to " << std::string(Name(out)) << ", element " << at);
      CHECK(ring.nonfinite == std::vector<uint32_t>(3, 1));
    }
  }
}

// Each rank goes on as soon as it has its own results, and some begin late.
TEST_CASE("operations by packets follow each other in any order") {
  std::mt19937 random(5);
  for (const int ranks : {2, 3, 4, 9}) {
    Ring ring(ranks);
    std::vector<std::unique_ptr<Operation>> operations;
    for (int k = 0; k < 16; ++k) {
      Case c = RandomCase(random() % 3 == 0 ? Move::kAllReducePacketsOnce : Move::kAllReducePackets, &random);
      c.ranks = ranks;
      c.root = 0;
      c.count = 1 + random() % (k % 2 == 0 ? 1000 : 9);
      c.in_place = c.in == c.out && k % 3 == 0;
      operations.push_back(std::make_unique<Operation>(c, &ring, k % 4));
    }
    {
      CpuKernels kernels;
      for (int r = 0; r < ranks; ++r) {
        const size_t rank = static_cast<size_t>(r);
        kernels.Launch(staged::kPacketChannels / 8, [&, rank](int index) {
          for (size_t k = 0; k < operations.size(); ++k) {
            const staged::Collective& c = operations[k]->collectives[rank];
            if (k % 5 == rank % 5) std::this_thread::sleep_for(std::chrono::milliseconds(2));
            if (index < staged::BlocksOf(c)) RunAny(c, index);
            __syncthreads();  // as between kernels
          }
        });
      }
    }
    for (const std::unique_ptr<Operation>& each : operations) {
      bool nonfinite = false;
      const Bytes expected = ResultOf(each->c, each->inputs, &nonfinite);
      for (int r = 0; r < ranks; ++r) CHECK(each->Got(r) == expected);
    }
  }
}

// Rank 2 has died after it had put all that others own but for a packet of rank 0's: one of rank 0's threads waits for
// that, and rank 1 for the other ranks' results. They leave one after the other.
TEST_CASE("threads that leave packets neither store nor pass on what has not come") {
  constexpr uint64_t kShare = 15, kMissing = 4;  // packets of each rank
  Ring ring(3);
  const Case c{Move::kAllReducePackets,
               DType::kInt32,
               DType::kInt32,
               ReduceOp::kSum,
               3,
               0,
               9 * kShare,
               1,
               0,
               false,
               false,
               3,
               true};
  Operation operation(c, &ring, 0);
  const auto words = [](const auto& of_packet) {
    Bytes bytes(9 * kShare * 4);
    for (uint64_t i = 0; i < 9 * kShare; ++i) SetElement(DType::kInt32, bytes.data(), i, of_packet(i / 3));
    return bytes;
  };
  for (const Ranges& in : operation.in) in.Set(words([](uint64_t) { return 1; }));
  const auto packet_of = [&](int r, uint64_t i) { return PacketsOf(ring.PlaceOf(r), r, 0, 1) + i; };
  for (uint64_t i = 0; i < 2 * kShare; ++i) {
    if (i != kMissing) *packet_of(2, i) = {{{1, 1, 1}}, 1};
  }
  // How many of a rank's own packets hold this result; 0: nothing.
  const auto passed_on = [&](int r, uint32_t word) {
    uint64_t n = 0;
    for (uint64_t k = 0; k < kShare; ++k) {
      const staged::Packet packet = LoadPacket(packet_of(r, static_cast<uint64_t>(r) * kShare + k));
      if (packet.mark == (word == 0 ? 0 : 1) && packet.data.word[2] == word) ++n;
    }
    return n;
  };
  const auto failed = [&](int r) { return std::atomic_ref<uint32_t>(ring.failed[static_cast<size_t>(r)]).load() != 0; };
  {
    CpuKernels kernels;
    for (size_t r = 0; r < 2; ++r) {
      const staged::Collective& each = operation.collectives[r];
      kernels.Launch(staged::BlocksOf(each), [&each](int index) { RunAny(each, index); });
    }
    while (passed_on(0, 3) < kShare - 1 || passed_on(1, 3) < kShare) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    for (int r = 0; r < 2; ++r) {
      CHECK(!failed(r));
      std::atomic_ref<uint32_t>(*AbortWordOf(ring.PlaceOf(r), r, 0)).store(1);
      while (!failed(r)) std::this_thread::yield();
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  }
  CHECK(passed_on(0, 3) == kShare - 1);
  CHECK(passed_on(0, 0) == 1);
  CHECK(operation.Got(0) == words([](uint64_t p) { return p < kShare && p != kMissing ? 3 : 1; }));
  // After its own, rank 1's threads wait for rank 2's; but the last one, which has no own one, has taken one of rank
  // 0's.
  CHECK(operation.Got(1) == words([](uint64_t p) { return p == 0 || (p >= kShare && p < 2 * kShare) ? 3 : 1; }));
}

}  // namespace
}  // namespace ddp::testing
