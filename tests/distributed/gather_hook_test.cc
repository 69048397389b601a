// SPDX-License-Identifier: Apache-2.0
// The trainers' hook that gathers gradients at rank 0 and broadcasts their sum.
#include "examples/train/gather_hook.h"

#include <cstddef>

#include "ddp/distributed_data_parallel.h"
#include "examples/nn/device.h"
#include "tests/support/catch.h"
#include "tests/support/check.h"
#include "tests/support/ranks.h"

namespace examples {
namespace {

using ddp::testing::Rank;
using ddp::testing::RunOnRanks;

TEST_CASE("the gather hook sums and averages exactly") {
  RunOnRanks([](Rank& rank) {
    constexpr size_t kCount = 1000;
    const ddp::Buffer memory = {nullptr, kCount, ddp::DType::kFloat32, {}};
    for (const bool average : {false, true}) {
      ddp::DdpOptions options;
      options.op = average ? ddp::ReduceOp::kAvg : ddp::ReduceOp::kSum;
      options.bucket_bytes = 1;  // two buckets
      options.hook = CreateGatherHook(nn::Cpu(), rank.size());
      const auto model = ddp::DistributedDataParallel::Create(
          rank.group(), {{.name = "a", .value = memory}, {.name = "b", .value = memory}}, options);
      RANK_CHECK_OK(model);
      const int ranks = rank.size() * (rank.size() + 1) / 2;  // 1 + 2 + ... + size
      const float scale = average ? static_cast<float>(1.0 / rank.size()) : 1;
      for (int step = 1; step <= 3; ++step) {
        const auto number = [&](size_t p, size_t i) { return step + static_cast<int>(p * i); };
        const auto grad = [&](size_t p) { return static_cast<float*>((*model)->grad(p).data); };
        for (size_t p = 0; p < 2; ++p) {
          for (size_t i = 0; i < kCount; ++i) grad(p)[i] = static_cast<float>((rank.rank() + 1) * number(p, i));
          (*model)->GradReady(p);
        }
        RANK_CHECK_OK((*model)->FinishBackward());
        for (size_t p = 0; p < 2; ++p) {
          for (size_t i = 0; i < kCount; ++i) {
            RANK_CHECK_EQ(grad(p)[i], static_cast<float>(ranks * number(p, i)) * scale);
          }
        }
      }
      rank.Meet();
    }
  });
}

}  // namespace
}  // namespace examples
