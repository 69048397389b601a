// SPDX-License-Identifier: Apache-2.0
// Mixed precision on GPUs that are simulated.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>
#include <vector>

#include "ddp/autocast.h"
#include "ddp/distributed_data_parallel.h"
#include "ddp/grad_scaler.h"
#include "libddp/device/buffer_ops.h"
#include "tests/support/nccl_job.h"

namespace ddp::testing::simulated {
namespace {

// Decides in its stream's order, as a kernel does.
class StreamOptimizer final : public Optimizer {
 public:
  explicit StreamOptimizer(const Buffer& grads) : grads_(grads) {}
  Buffers grads() const override { return {&grads_, 1}; }
  bool fused() const override { return true; }
  absl::Status Step(const StepOptions& options) override {
    FakeDevices::Enqueue(options.stream.native, [this, options] {
      if (*options.found_inf == 0) inv_scales.push_back(*options.inv_scale);
    });
    return absl::OkStatus();
  }

  std::vector<float> inv_scales;  // of the steps made

 private:
  const Buffer grads_;
};

TEST_CASE("a fused step under a GradScaler does not wait for the GPU, nor does Unscale") {
  Job job(1);
  const ScopedDevices devices(job.gpus);
  job.Run([&](Rank& rank, ProcessGroup&) {
    const auto scaler =
        RANK_VALUE(GradScaler::Create({.initial_scale = 8, .growth_interval = 2, .device = rank.device()}));
    const std::shared_ptr<void> memory = RANK_VALUE(rank.gpus.Allocate(rank.device(), 3 * sizeof(float)));
    auto* const grads = static_cast<float*>(memory.get());
    const Buffer whole = {grads, 3, DType::kFloat32, rank.device()};
    StreamOptimizer optimizer(whole);
    const OwnedStream owned = rank.MakeStream();
    const Stream stream{rank.device(), owned.get()};
    std::atomic<bool> open{false};
    HoldUntil(open, stream.native);
    for (const float grad : {1.0f, 1.0f, HUGE_VALF, 1.0f}) {
      FakeDevices::Enqueue(stream.native, [=] { std::fill_n(grads, 3, grad); });
      RANK_CHECK_OK(scaler->Scale({&whole, 1}, stream));
      RANK_CHECK_OK(scaler->Step(optimizer, {.stream = stream}));
      RANK_CHECK_OK(scaler->Update(stream));
    }
    RANK_CHECK_OK(scaler->Unscale(optimizer, stream));
    RANK_CHECK(optimizer.inv_scales.empty());
    open = true;
    FakeDevices::Synchronize(stream.native);
    RANK_CHECK(optimizer.inv_scales == std::vector<float>(3, 1.0f / 8));  // all but the third step's
    RANK_CHECK_EQ(grads[2], 8.0f / 8);
    RANK_CHECK_EQ(RANK_VALUE(scaler->scale()), 8.0f);
  });
}

TEST_CASE("a GradScaler that is given no stream goes on behind the last one") {
  Job job(1);
  const ScopedDevices devices(job.gpus);
  job.Run([&](Rank& rank, ProcessGroup&) {
    const auto scaler = RANK_VALUE(GradScaler::Create({.initial_scale = 8, .device = rank.device()}));
    const std::shared_ptr<void> memory = RANK_VALUE(rank.gpus.Allocate(rank.device(), sizeof(float)));
    const Buffer grad = {memory.get(), 1, DType::kFloat32, rank.device()};
    StreamOptimizer optimizer(grad);
    const OwnedStream owned = rank.MakeStream();
    const Stream stream{rank.device(), owned.get()};
    FakeDevices::Enqueue(stream.native, [&] { *static_cast<float*>(memory.get()) = HUGE_VALF; });
    RANK_CHECK_OK(scaler->Scale({&grad, 1}, stream));
    RANK_CHECK_OK(scaler->Step(optimizer, {.stream = stream}));
    RANK_CHECK_OK(scaler->Update(kNoStream));
    RANK_CHECK_EQ(RANK_VALUE(scaler->scale()), 4.0f);
    RANK_CHECK(optimizer.inv_scales.empty());
  });
}

TEST_CASE("a copy of a weight that another stream still reads is left alone by the next scope") {
  Job job(1);  // its streams run when they are waited for
  const ScopedDevices devices(job.gpus);
  job.Run([&](Rank& rank, ProcessGroup&) {
    const OwnedStream a = rank.MakeStream(), b = rank.MakeStream();
    const Stream first = {rank.device(), a.get()}, second = {rank.device(), b.get()};
    const std::shared_ptr<void> memory = RANK_VALUE(rank.gpus.Allocate(rank.device(), sizeof(float))),
                                read = RANK_VALUE(rank.gpus.Allocate(rank.device(), sizeof(float)));
    const Buffer weight = {memory.get(), 1, DType::kFloat32, rank.device()};
    const Buffer result = {read.get(), 1, DType::kFloat32, rank.device()};
    const auto cast = [&](float value, Stream stream) {
      *static_cast<float*>(memory.get()) = value;
      Allocation copy = RANK_VALUE(Autocast::CastWeight(weight, DType::kFloat16, stream));
      RANK_CHECK_OK(Synchronize(stream));
      return copy;
    };
    {
      const Autocast scope(Device::Kind::kCuda);
      const Buffer copy = cast(1, first).View(DType::kFloat16, 0, 1);
      RANK_CHECK_OK(CopyScaled({&copy, 1}, {&result, 1}, 1, first));
    }
    {
      const Autocast scope(Device::Kind::kCuda);
      cast(2, second);
    }
    RANK_CHECK_OK(Synchronize(first));
    RANK_CHECK_EQ(*static_cast<float*>(read.get()), 1.0f);
  });
}

TEST_CASE("a copy of a weight is complete where no stream is given, and needs one otherwise") {
  Job job(1);
  const ScopedDevices devices(job.gpus);
  job.Run([&](Rank& rank, ProcessGroup&) {
    const std::shared_ptr<void> memory = RANK_VALUE(rank.gpus.Allocate(rank.device(), sizeof(float)));
    *static_cast<float*>(memory.get()) = 2.5f;
    const Buffer weight = {memory.get(), 1, DType::kFloat32, rank.device()};
    const Allocation copy = RANK_VALUE(Autocast::CastWeight(weight, DType::kFloat16, kNoStream));
    RANK_CHECK_EQ(GetElement(DType::kFloat16, copy.data(), 0), 2.5);
    RANK_CHECK_STATUS(Autocast::CastWeight(weight, DType::kFloat16), absl::StatusCode::kInvalidArgument, "CastWeight",
                      "no stream given");
  });
}

}  // namespace
}  // namespace ddp::testing::simulated
