// SPDX-License-Identifier: Apache-2.0
// What the cases of ddp_gpu_cases.h are written with: a model, its gradients, and streams of the program's.
#ifndef TESTS_SUPPORT_DDP_GPU_STEPS_H_
#define TESTS_SUPPORT_DDP_GPU_STEPS_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ddp/distributed_data_parallel.h"
#include "libddp/device/buffer_ops.h"
#include "tests/support/check.h"
#include "tests/support/ddp_gpu_cases.h"
#include "tests/support/numbers.h"

namespace ddp::testing::gpu_cases {

using absl::StatusCode;
using Model = std::unique_ptr<DistributedDataParallel>;

inline const std::vector<size_t> kCounts = {1, 1000, 3, 0, 40'001, 64, 7, 256};

// A stream of the program's, whose current device is another one: the library makes the right one current itself.
class TestStream {
 public:
  explicit TestStream(const GpuRank& rank) {
    const DeviceGuard guard(Devices(), rank.device());
    owned_ = RANK_VALUE(MakeStream(Devices()));
    stream_ = {rank.device(), owned_.get()};
  }
  Stream get() const { return stream_; }
  void Wait() const { RANK_CHECK_OK(Synchronize(stream_)); }

 private:
  OwnedStream owned_;
  Stream stream_;
};

// Memory of a GPU, written and read element by element on the host.
void Write(const Buffer& to, const std::function<double(size_t)>& value, Stream stream);
std::vector<double> Read(const Buffer& from, Stream stream);
inline uint32_t ReadWord(const uint32_t* word, Stream stream) {
  return static_cast<uint32_t>(Read({const_cast<uint32_t*>(word), 1, DType::kInt32, stream.device}, stream)[0]);
}

// Element i of parameter p's gradient in step `step`, and its average over `size` ranks.
double Gradient(DType dtype, int rank, size_t p, size_t i, int step);
double Average(DType dtype, int size, size_t p, size_t i, int step);

inline std::vector<Parameter> MakeParameters(const GpuRank& rank, DType dtype) {
  std::vector<Parameter> parameters;
  for (size_t i = 0; i < kCounts.size(); ++i) {
    parameters.push_back(
        {absl::StrCat("layer", i, ".weight"), {}, Buffer{nullptr, kCounts[i], dtype, rank.device()}, {}});
  }
  return parameters;
}

inline Model Make(const GpuRank& rank, DType dtype, const DdpOptions& options) {
  return RANK_VALUE(DistributedDataParallel::Create(rank.group, MakeParameters(rank, dtype), options));
}

struct Step {
  DType dtype = DType::kFloat32;
  int number = 0;
  double tolerance = 0;
  std::function<bool(size_t p)> used = [](size_t) { return true; };
  std::function<double(size_t p, size_t i)> expected = nullptr;  // null: the average
};

void CheckGradients(const GpuRank& rank, DistributedDataParallel& model, const Step& step, Stream stream);

// Announces all gradients in reverse order, each written on one of `streams`.
void Backward(const GpuRank& rank, DistributedDataParallel& model, const Step& step,
              const std::vector<const TestStream*>& streams);

// Gradients of the program's own, anew in each step.
struct OwnGradients {
  std::vector<std::shared_ptr<void>> memory;
  void Give(const GpuRank& rank, DistributedDataParallel& model, DType dtype) {
    memory.clear();
    for (size_t p = 0; p < model.size(); ++p) {
      memory.push_back(RANK_VALUE(AllocateOn(rank.device(), std::max<size_t>(1, kCounts[p]) * SizeOf(dtype))));
      RANK_CHECK_OK(model.SetGrad(p, {memory.back().get(), kCounts[p], dtype, rank.device()}));
    }
  }
};

}  // namespace ddp::testing::gpu_cases

#endif  // TESTS_SUPPORT_DDP_GPU_STEPS_H_
