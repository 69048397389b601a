// SPDX-License-Identifier: Apache-2.0
// NCCL is stuck in the middle of a training on real GPUs: all ranks go on through host memory, to the same result.
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ddp/ddp.h"
#include "tests/gpu/on_gpus.h"
#include "tests/support/catch.h"
#include "tests/support/temporary_folder.h"

namespace ddp::testing {
namespace {

constexpr size_t kTensors = 4, kElements = 50'000;
constexpr int64_t kSteps = 12, kBroken = 5;

// The optimizer is the host's, which looks at skip_step before it steps.
class Training {
 public:
  explicit Training(Rank& rank) : rank_(rank), stream_(rank), values_(kTensors, std::vector<float>(kElements)) {
    std::vector<Parameter> parameters;
    for (size_t t = 0; t < kTensors; ++t) {
      const Buffer on_gpu{nullptr, kElements, DType::kFloat32, rank.context().device()};
      parameters.push_back({absl::StrCat("tensor", t), {}, on_gpu, {}});
    }
    DdpOptions options;
    options.bucket_bytes = kElements * sizeof(float);
    options.op = ReduceOp::kSum;
    model_ = RANK_VALUE(DistributedDataParallel::Create(rank.context().world(), parameters, options));
  }

  int64_t committed() const { return committed_; }
  const std::vector<std::vector<float>>& values() const { return values_; }

  // One step, or an error by which the world has failed.
  absl::Status Step() {
    std::vector<float> grad(kElements);
    for (size_t t = kTensors; t-- > 0;) {
      for (size_t i = 0; i < kElements; ++i) {
        grad[i] = static_cast<float>((rank_.rank() + 1) * (committed_ + 1) + static_cast<int64_t>((i + t) % 7));
      }
      GPU(cudaMemcpyAsync(model_->grad(t).data, grad.data(), kElements * sizeof(float), cudaMemcpyHostToDevice,
                          stream_.native()));
      stream_.Wait();
      model_->GradReady(t, stream_.get());
    }
    if (absl::Status s = model_->FinishBackward(stream_.get()); !s.ok()) return s;
    uint32_t skip = 0;
    std::vector<std::vector<float>> sums(kTensors, std::vector<float>(kElements));
    GPU(cudaMemcpyAsync(&skip, model_->skip_step(), sizeof skip, cudaMemcpyDeviceToHost, stream_.native()));
    for (size_t t = 0; t < kTensors; ++t) {
      GPU(cudaMemcpyAsync(sums[t].data(), model_->grad(t).data, kElements * sizeof(float), cudaMemcpyDeviceToHost,
                          stream_.native()));
    }
    stream_.Wait();
    if (skip != 0) return rank_.context().world().status();
    for (size_t t = 0; t < kTensors; ++t) {
      for (size_t i = 0; i < kElements; ++i) values_[t][i] += sums[t][i];
    }
    ++committed_;
    return absl::OkStatus();
  }
  void Recover() {
    RANK_CHECK_OK(rank_.context().Recover());
    stream_.Wait();
    RANK_CHECK_OK(model_->Rebind(rank_.context().world()));
    std::vector<Buffer> state;
    for (std::vector<float>& value : values_) state.push_back({value.data(), kElements, DType::kFloat32, {}});
    committed_ = RANK_VALUE(SyncState(rank_.context().world(), committed_, state));
  }

 private:
  Rank& rank_;
  const CallerStream stream_;
  std::vector<std::vector<float>> values_;
  std::unique_ptr<DistributedDataParallel> model_;
  int64_t committed_ = 0;
};

// The last rank does not come to a step: the others' kernels wait for it until the time-out, or until it gives up.
void Break(Rank& rank, bool aborts) {
  ProcessGroup& world = rank.context().world();
  if (rank.rank() == rank.size() - 1) {
    absl::SleepFor(absl::Milliseconds(500));
    if (aborts) world.Abort(absl::AbortedError("the last rank gives up"));
  }
}

TEST_CASE("NCCL that is stuck in the middle of a training gives way to host memory", "[recover]") {
  const TemporaryFolder cache;
  setenv("DDP_PROBE_CACHE", cache.path().c_str(), 1);
  for (const bool aborts : {false, true}) {
    ContextOptions options = OnGpus();
    if (options.backend == "nccl") options.backend = "auto";
    RunOnGpus(
        [&](Rank& rank) {
          if (rank.size() == 1) return;
          Context& context = rank.context();
          const std::string before = std::string(context.world().backend());
          Training training(rank);
          while (training.committed() < kBroken) RANK_CHECK_OK(training.Step());
          RANK_CHECK_OK(context.world().SetTimeout(absl::Seconds(aborts ? 60 : 3)));
          Break(rank, aborts);
          const bool last = rank.rank() == rank.size() - 1;
          while (last && context.world().status().ok()) absl::SleepFor(absl::Milliseconds(1));
          const absl::Status broken = training.Step();
          RANK_CHECK(absl::StrContains(broken.message(), aborts ? "the last rank gives up" : "timed out"),
                     broken.ToString());
          RANK_CHECK_EQ(training.committed(), kBroken);
          const absl::Time begin = absl::Now();
          training.Recover();
          if (rank.rank() == 0) {
            std::printf("from %s to %s in %.1f ms: %s\n", before.c_str(),
                        std::string(context.world().backend()).c_str(), absl::ToDoubleMilliseconds(absl::Now() - begin),
                        context.backend_choice().text.c_str());
          }
          RANK_CHECK_EQ(context.world().backend(), "hierarchical");
          RANK_CHECK_EQ(context.world().size(), rank.size());
          RANK_CHECK_EQ(training.committed(), kBroken);
          while (training.committed() < kSteps) RANK_CHECK_OK(training.Step());
          const int64_t n = rank.size(), numbers = n * (n + 1) / 2, steps = kSteps * (kSteps + 1) / 2;
          for (size_t t = 0; t < kTensors; ++t) {
            for (size_t i = 0; i < kElements; ++i) {
              const int64_t expected = numbers * steps + n * kSteps * static_cast<int64_t>((i + t) % 7);
              RANK_CHECK_EQ(training.values()[t][i], static_cast<float>(expected));
            }
          }
          RANK_CHECK_OK(context.world().Barrier().Wait());
        },
        options);
  }
  unsetenv("DDP_PROBE_CACHE");
  unsetenv("NCCL_P2P_DISABLE");
}

}  // namespace
}  // namespace ddp::testing
