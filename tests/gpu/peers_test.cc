// SPDX-License-Identifier: Apache-2.0
// All-reduces by copy engines over memory that GPUs share. Ranks on one GPU may share it, too.
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <thread>

#include "libddp/comm/peers/peer_copies.h"
#include "libddp/comm/ring/staged_call.h"
#include "tests/gpu/on_gpus.h"
#include "tests/support/catch.h"

namespace ddp::testing {
namespace {

// What a group of one node has for its copies.
class OverPeers {
 public:
  OverPeers(Rank& rank, uint64_t chunk) : runtime_(*CudaDevices()), rank_(rank) {
    const int gpu = rank.rank() % runtime_.Count();
    device_ = {Device::Kind::kCuda, static_cast<int16_t>(gpu)};
    GPU(cudaSetDevice(gpu));
    RANK_CHECK(RANK_VALUE(runtime_.StagedBlocks()) > 0);
    copies_ = RANK_VALUE(PeerCopies::Create(rank.group(), runtime_, device_, chunk));
    word_ = RANK_VALUE(runtime_.AllocatePinned(sizeof(uint32_t)));
    stream_ = RANK_VALUE(MakeStream(runtime_));
  }

  std::shared_ptr<void> Allocate(size_t bytes) { return RANK_VALUE(runtime_.Allocate(device_, bytes)); }
  Buffer View(const std::shared_ptr<void>& memory, size_t offset, size_t count, DType dtype) const {
    return {static_cast<char*>(memory.get()) + offset * SizeOf(dtype), count, dtype, device_};
  }
  void Enqueue(const Buffer& array) {
    RANK_CHECK_OK(copies_->AllReduce(SumInPlace(array), static_cast<uint32_t*>(word_.get()), stream()));
  }
  // What it adds up to is a whole number that every type holds.
  void Fill(const Buffer& array, size_t round) {
    host_.resize(array.count * SizeOf(array.dtype));
    for (size_t i = 0; i < array.count; ++i) SetElement(array.dtype, host_.data(), i, Mine(i, round, rank_.rank()));
    GPU(cudaMemcpyAsync(array.data, host_.data(), host_.size(), cudaMemcpyHostToDevice, stream()));
    GPU(cudaStreamSynchronize(stream()));
  }
  void Expect(const Buffer& array, size_t round) {
    GPU(cudaMemcpyAsync(host_.data(), array.data, host_.size(), cudaMemcpyDeviceToHost, stream()));
    GPU(cudaStreamSynchronize(stream()));
    for (size_t i = 0; i < array.count; ++i) {
      double sum = 0;
      for (int r = 0; r < rank_.size(); ++r) sum += Mine(i, round, r);
      RANK_CHECK_EQ(GetElement(array.dtype, host_.data(), i), sum);
    }
    RANK_CHECK_EQ(*static_cast<uint32_t*>(word_.get()), 0U);
  }

  cudaStream_t stream() const { return static_cast<cudaStream_t>(stream_.get()); }
  PeerCopies& copies() { return *copies_; }

 private:
  static double Mine(size_t i, size_t round, int rank) {
    return static_cast<double>((i * 7 + round + static_cast<size_t>(rank)) % 25);
  }

  DeviceRuntime& runtime_;
  Rank& rank_;
  Device device_;
  std::shared_ptr<PeerCopies> copies_;
  std::shared_ptr<void> word_;
  OwnedStream stream_;
  std::vector<char> host_;
};

TEST_CASE("sums of every type and length are right, in one chunk and in several") {
  RunOnRanks([](Rank& rank) {
    OverPeers peers(rank, 4 << 20);
    const auto memory = peers.Allocate(16 << 20);
    size_t round = 0;
    for (const DType dtype : {DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16, DType::kInt32,
                              DType::kInt64, DType::kInt8, DType::kUInt8}) {
      for (const size_t count : {size_t{1}, size_t{63}, size_t{1000}, size_t{1'234'567}}) {
        for (const size_t offset : {size_t{0}, size_t{3}}) {
          const Buffer array = peers.View(memory, offset, count, dtype);
          peers.Fill(array, ++round);
          peers.Enqueue(array);
          peers.Expect(array, round);
        }
      }
    }
  });
}

TEST_CASE("sums one behind the other wait for each other, without the host") {
  RunOnRanks([](Rank& rank) {
    OverPeers peers(rank, 1 << 20);
    const auto memory = peers.Allocate(8 << 20);
    const Buffer array = peers.View(memory, 0, 500'000, DType::kFloat64);
    peers.Fill(array, 1);
    // Each one multiplies by the number of ranks what the first one has made equal.
    constexpr int kSums = 20;
    for (int k = 0; k < kSums; ++k) {
      if (rank.rank() == k % rank.size()) std::this_thread::sleep_for(std::chrono::milliseconds(2));
      peers.Enqueue(array);
    }
    std::vector<double> host(array.count);
    GPU(cudaMemcpyAsync(host.data(), array.data, host.size() * sizeof(double), cudaMemcpyDeviceToHost, peers.stream()));
    GPU(cudaStreamSynchronize(peers.stream()));
    for (size_t i = 0; i < host.size(); ++i) {
      double sum = 0;
      for (int r = 0; r < rank.size(); ++r) sum += static_cast<double>((i * 7 + 1 + static_cast<size_t>(r)) % 25);
      for (int k = 1; k < kSums; ++k) sum *= rank.size();
      RANK_CHECK_EQ(host[i], sum);
    }
  });
}

TEST_CASE("a graph holds sums, and replays them") {
  RunOnRanks([](Rank& rank) {
    OverPeers peers(rank, 1 << 20);
    const auto memory = peers.Allocate(8 << 20);
    const Buffer array = peers.View(memory, 100, 700'001, DType::kFloat32);
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    GPU(cudaStreamBeginCapture(peers.stream(), cudaStreamCaptureModeThreadLocal));
    peers.Enqueue(array);
    GPU(cudaStreamEndCapture(peers.stream(), &graph));
    GPU(cudaGraphInstantiate(&executable, graph, 0));
    for (size_t round = 0; round < 10; ++round) {
      peers.Fill(array, round);
      GPU(cudaGraphLaunch(executable, peers.stream()));
      peers.Expect(array, round);
      peers.Fill(array, round + 100);
      peers.Enqueue(array);  // in turn with others
      peers.Expect(array, round + 100);
    }
    rank.Meet();
    cudaGraphExecDestroy(executable);
    cudaGraphDestroy(graph);
  });
}

TEST_CASE("a rank that does not come leaves no stream waiting when the group is given up") {
  RunOnRanks([](Rank& rank) {
    OverPeers peers(rank, 1 << 20);
    const auto memory = peers.Allocate(8 << 20);
    const Buffer array = peers.View(memory, 0, 2'000'000, DType::kFloat32);
    if (rank.rank() != 0) peers.Enqueue(array);
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    if (rank.rank() != 0)
      RANK_CHECK_EQ(std::string(cudaGetErrorName(cudaStreamQuery(peers.stream()))), "cudaErrorNotReady");
    rank.Meet();
    if (rank.rank() == 0) peers.copies().ring().Abort();
    GPU(cudaStreamSynchronize(peers.stream()));
    rank.Meet();
  });
}

}  // namespace
}  // namespace ddp::testing
