// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <chrono>
#include <cstring>
#include <new>
#include <vector>

#include "absl/types/span.h"
#include "examples/nn/cpu_image_layers.h"
#include "examples/nn/device.h"
#include "examples/nn/onednn.h"
#include "examples/nn/product_rate.h"
#include "hwy/aligned_allocator.h"

namespace nn {
namespace {

class CpuTimer final : public Timer {
 public:
  void Mark(int64_t n) override { moments_[n % kMarks] = std::chrono::steady_clock::now(); }
  int64_t NsToMark(int64_t n) override {
    return std::chrono::nanoseconds(moments_[n % kMarks] - moments_[(n - 1) % kMarks]).count();
  }

 private:
  std::chrono::steady_clock::time_point moments_[kMarks];
};

class CpuDevice final : public Device {
 public:
  std::string name() const override { return "cpu"; }
  void* stream() const override { return nullptr; }

  std::shared_ptr<float> Allocate(size_t count) override {
    return std::static_pointer_cast<float>(AllocateHost(count * sizeof(float)));
  }
  std::shared_ptr<void> AllocateHost(size_t bytes) override {
    auto memory = hwy::AllocateAligned<char>(bytes);
    if (memory == nullptr) throw std::bad_alloc();
    void* const data = memory.release();
    std::memset(data, 0, bytes);
    return std::shared_ptr<void>(data, [](void* p) { hwy::FreeAlignedBytes(p, nullptr, nullptr); });
  }
  void Upload(const void* from, void* to, size_t bytes) override { std::memcpy(to, from, bytes); }
  void Download(const void* from, void* to, size_t bytes) override { std::memcpy(to, from, bytes); }
  void Wait() override {}
  void UploadTo(int, const void* from, void* to, size_t bytes) override { std::memcpy(to, from, bytes); }
  void Release(int) override {}
  void Await(int) override {}
  std::unique_ptr<Timer> MakeTimer() override { return std::make_unique<CpuTimer>(); }
  std::unique_ptr<Graph> Capture(absl::FunctionRef<bool()>) override {
    throw DeviceError("a CPU has no graphs; give --device=cuda, or leave out --cuda-graph");
  }

  std::unique_ptr<Layer> MakeLinear(int inputs, int outputs, Activation activation, int max_batch, Layer*) override {
    return std::make_unique<Linear>(inputs, outputs, activation, max_batch);
  }
  std::unique_ptr<ImageLayers> MakeImageLayers(int max_batch) override { return MakeCpuImageLayers(max_batch); }
  std::unique_ptr<Optimizer> MakeSgd(size_t count, const SgdOptions& options) override {
    return std::make_unique<Sgd>(count, options);
  }
  std::unique_ptr<Optimizer> MakeAdam(size_t count, const AdamOptions& options) override {
    return std::make_unique<Adam>(count, options);
  }

  void CrossEntropy(const float* logits, const int32_t* labels, int rows, int classes, float* dlogits,
                    const LossOptions& options, const LossRing& loss) override {
    const size_t n = static_cast<size_t>(rows), count = n * static_cast<size_t>(classes);
    loss.Next() = SoftmaxCrossEntropy({logits, count}, {labels, n}, {dlogits, count}, options);
  }
  void CountHits(const float* logits, const int32_t* labels, int rows, int classes, int64_t* hits) override {
    const size_t n = static_cast<size_t>(rows);
    *hits += CountCorrect({logits, n * static_cast<size_t>(classes)}, {labels, n});
  }
  // A small product stays in the caches, a large one has less overhead for each operation.
  double ProductRate(bool bfloat16) override {
    return std::max(ProductRate(/*size=*/384, bfloat16), ProductRate(/*size=*/1024, bfloat16));
  }
  void AddScaled(const float* __restrict x, float* __restrict y, size_t count, float scale, void*) override {
    for (size_t i = 0; i < count; ++i) y[i] = (x[i] + y[i]) * scale;
  }

 private:
  static double ProductRate(int size, bool bfloat16) {
    std::vector<float> a(static_cast<size_t>(size) * static_cast<size_t>(size)), b(a.size()), c(a.size());
    for (size_t i = 0; i < a.size(); ++i) a[i] = b[i] = 1 + static_cast<float>(i * 2654435761u % 1024) / 1024;
    const onednn::Factors factors = bfloat16 ? onednn::Factors::kBFloat16 : onednn::Factors::kFloat32;
    onednn::MatMul product({size, size, size}, onednn::Order::kByRows, onednn::Order::kByRows, {}, factors);
    onednn::Rounded short_a(size, size), short_b(size, size);
    if (bfloat16) {
      short_a.Round(a.data());
      short_b.Round(b.data());
    }
    return BestRate(size, [&] {
      product.Run(bfloat16 ? short_a.data() : a.data(), bfloat16 ? short_b.data() : b.data(), nullptr, c.data());
    });
  }
};

}  // namespace

Device& Cpu() {
  static CpuDevice cpu;
  return cpu;
}

}  // namespace nn
