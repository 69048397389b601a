// SPDX-License-Identifier: Apache-2.0
// PowerSGD's kernels on a real GPU.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "libddp/device/cpu_low_rank.h"
#include "tests/gpu/device_fixture.h"
#include "tests/support/catch.h"
#include "tests/support/check.h"
#include "tests/support/numbers.h"

namespace ddp::testing {
namespace {

// A matrix of low-rank compression in one piece of memory of floats: on the host, or where a kernel works.
class LowRankMemory {
 public:
  LowRankMemory(size_t rows, size_t columns, size_t rank, DType dtype) : dtype_(dtype) {
    matrix_.rows = rows;
    matrix_.columns = columns;
    matrix_.rank = rank;
    for (size_t* const part : {&gradient_, &error_, &other_}) *part = Take(rows * columns);
    for (size_t* const part : {&p_message_, &p_}) *part = Take(rank * rows);
    for (size_t* const part : {&q_message_, &q_, &next_q_}) *part = Take(rank * columns);
    partials_ = Take(LowRankChunks(rows) * rank * columns);
    words_ = Take(2);
    host.assign(floats_, 0.0f);
    for (size_t i = 0; i < rows * columns; ++i) {
      const size_t row = i / columns, column = i % columns;
      double value = 0.02 * std::sin(static_cast<double>(i));
      for (size_t k = 0; k < 2 * rank; ++k) {
        value += std::ldexp(
            std::sin(static_cast<double>(row * 3 + k * 5 + 1)) * std::cos(static_cast<double>(column * 7 + k * 11)),
            -static_cast<int>(k));
      }
      SetElement(dtype, host.data() + gradient_, i, value);
      host[error_ + i] = static_cast<float>(0.1 * std::cos(static_cast<double>(i)));
    }
  }

  LowRankMatrix At(float* base) const {
    LowRankMatrix a = matrix_;
    a.gradient = base + gradient_;
    a.p_message = base + p_message_;
    a.q_message = base + q_message_;
    a.errors[0] = base + error_;
    a.errors[1] = base + other_;
    a.q[0] = base + q_;
    a.q[1] = base + next_q_;
    a.p = base + p_;
    a.partials = base + partials_;
    a.random = 77;
    return a;
  }
  LowRankStep StepAt(float* base) const {
    auto* const words = reinterpret_cast<uint32_t*>(base + words_);
    return {.share = 0.5f, .kept = words, .nonfinite = words + 1};
  }
  // What a pass has written: everything but the partial sums.
  std::vector<double> Results(const float* base) const {
    std::vector<double> results;
    const auto add = [&](size_t first, size_t count, DType dtype) {
      for (size_t i = 0; i < count; ++i) results.push_back(GetElement(dtype, base + first, i));
    };
    const LowRankMatrix& a = matrix_;
    add(gradient_, a.rows * a.columns, dtype_);
    add(other_, a.rows * a.columns, DType::kFloat32);
    add(p_message_, a.rank * a.rows, dtype_);
    add(q_message_, a.rank * a.columns, dtype_);
    return results;
  }

  std::vector<float> host;

 private:
  size_t Take(size_t count) { return std::exchange(floats_, floats_ + count); }

  const DType dtype_;
  LowRankMatrix matrix_;
  size_t floats_ = 0;
  size_t gradient_, error_, other_, p_message_, p_, q_message_, q_, next_q_, partials_, words_;
};

TEST_CASE("low-rank compression on a GPU is the CPU's, pass by pass") {
  Fixture gpu;
  struct Shape {
    size_t rows, columns, rank;
  };
  const std::vector<Shape> shapes = {{1, 1, 1},    {40, 30, 1},    {3, 5000, 2},    {70'000, 5, 1}, {64, 576, 4},
                                     {513, 33, 5}, {1000, 512, 9}, {2048, 1000, 2}, {33, 257, 17}};
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    std::vector<LowRankMemory> memory;
    std::vector<std::shared_ptr<void>> uploaded;
    std::vector<LowRankMatrix> on_cpu, on_gpu;
    // More than one launch takes.
    for (int round = 0; round < 4; ++round) {
      for (const Shape& shape : shapes) memory.emplace_back(shape.rows, shape.columns, shape.rank, dtype);
    }
    for (LowRankMemory& one : memory) {
      uploaded.push_back(gpu.Upload(one.host.data(), one.host.size() * sizeof(float)));
      on_cpu.push_back(one.At(one.host.data()));
      on_gpu.push_back(one.At(static_cast<float*>(uploaded.back().get())));
    }
    const LowRankStep cpu_step = memory[0].StepAt(memory[0].host.data());
    const LowRankStep gpu_step = memory[0].StepAt(static_cast<float*>(uploaded[0].get()));
    for (const LowRankPass pass : {LowRankPass::kMakeP, LowRankPass::kMakeQ, LowRankPass::kDecompress}) {
      CpuLowRank(pass, dtype, cpu_step, on_cpu);
      RANK_CHECK_OK(gpu.runtime().RunLowRank(pass, dtype, gpu_step, on_gpu, gpu.stream()));
      for (size_t k = 0; k < memory.size(); ++k) {
        const std::vector<char> bytes = gpu.Download(uploaded[k].get(), memory[k].host.size() * sizeof(float));
        const std::vector<double> got = memory[k].Results(reinterpret_cast<const float*>(bytes.data()));
        const std::vector<double> want = memory[k].Results(memory[k].host.data());
        double apart = 0, size = 0;
        for (size_t i = 0; i < want.size(); ++i) {
          apart += std::pow(got[i] - want[i], 2);
          size += want[i] * want[i];
        }
        INFO("pass " << static_cast<int>(pass) << ", matrix " << k << ", type " << static_cast<int>(dtype));
        CHECK(std::sqrt(apart) <= (dtype == DType::kFloat32 ? 1e-4 : 2e-2) * std::sqrt(size));
      }
    }
    // What is found not to be finite is not kept.
    const auto kept = [&] {
      const std::vector<char> bytes = gpu.Download(gpu_step.kept, sizeof(uint32_t));
      uint32_t word = 0;
      std::memcpy(&word, bytes.data(), sizeof word);
      return word;
    };
    for (const uint32_t bad : {0u, 1u, 0u}) {
      const uint32_t before = kept();
      RANK_CHECK_OK(gpu.runtime().Copy(gpu_step.nonfinite, &bad, sizeof bad, gpu.stream()));
      gpu.Synchronize();
      RANK_CHECK_OK(gpu.runtime().RunLowRank(LowRankPass::kKeep, dtype, gpu_step, {}, gpu.stream()));
      CHECK(kept() == before + (bad == 0 ? 1 : 0));
    }
  }
  RANK_CHECK_STATUS(gpu.runtime().RunLowRank(LowRankPass::kMakeP, DType::kFloat64, {}, {LowRankMatrix{}}, gpu.stream()),
                    absl::StatusCode::kInternal, "low-rank");
}

}  // namespace
}  // namespace ddp::testing
