// SPDX-License-Identifier: Apache-2.0
// DistributedDataParallel under load: ten thousand steps in which nothing happens at the same time twice.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <random>
#include <thread>
#include <vector>

#include "ddp/distributed_data_parallel.h"
#include "tests/support/catch.h"
#include "tests/support/ddp_model.h"

namespace ddp::testing {
namespace {

// Mostly nothing or next to nothing, sometimes a time slice.
void Delay(std::mt19937& random) {
  const unsigned kind = random() % 64;
  if (kind == 0) {
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 200));
  } else if (kind < 8) {
    std::this_thread::yield();
  } else if (kind < 16) {
    for (volatile unsigned spin = random() % 2000; spin > 0;) spin = spin - 1;
  }
}

TEST_CASE("10,000 steps, with random delays, and another order of gradients on every rank in every step") {
  constexpr int kSteps = 10'000;
  const std::vector<size_t> counts = {40, 3, 0, 100, 1, 64, 20, 130, 5, 17};
  RunOnRanks([&](Rank& rank) {
    DdpOptions options;
    options.bucket_bytes = 400;
    options.unused = UnusedParameters::kDetect;
    const Model model = Make(rank, MakeParameters(counts), options);
    std::mt19937 random(static_cast<unsigned>(rank.rank() + 1));
    std::vector<size_t> order = Backwards(counts.size());
    for (int step = 0; step < kSteps; ++step) {
      std::shuffle(order.begin(), order.end(), random);
      const bool micro_batch = random() % 16 == 0;  // one more on this rank, which adds zeros
      if (micro_batch) {
        const DistributedDataParallel::NoSync local(*model);
        for (const size_t p : order) model->GradReady(p);
        RANK_CHECK_OK(model->FinishBackward());
      }
      const auto announce = [&](size_t p) {
        float* const g = static_cast<float*>(model->grad(p).data);
        for (size_t i = 0; i < counts[p]; ++i)
          g[i] = static_cast<float>(12 * (rank.rank() + step % 50) + static_cast<int>(i));
        model->GradReady(p);
      };
      if (random() % 8 == 0) {  // from two threads
        std::atomic<size_t> next{0};
        const auto take = [&] {
          for (size_t k; (k = next++) < order.size();) announce(order[k]);
        };
        std::thread other(take);
        take();
        other.join();
      } else {
        for (const size_t p : order) {
          Delay(random);
          announce(p);
        }
      }
      RANK_CHECK_OK(model->FinishBackward());
      const double base = 12 * (step % 50) + 6 * (rank.size() - 1);
      for (size_t p = 0; p < counts.size(); ++p) {
        const float* const g = static_cast<const float*>(model->grad(p).data);
        for (size_t i = 0; i < counts[p]; ++i) {
          const double expected = base + static_cast<double>(i);
          RANK_CHECK(std::abs(g[i] - expected) < 1e-3, "step ", step, " parameter ", p, " at ", i, ": ", g[i], " not ",
                     expected);
        }
      }
    }
    RANK_CHECK_EQ(model->statistics().steps, int64_t{kSteps});
  });
}

}  // namespace
}  // namespace ddp::testing
