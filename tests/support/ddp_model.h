// SPDX-License-Identifier: Apache-2.0
// Models and gradients of whole numbers for tests of DistributedDataParallel.
#ifndef TESTS_SUPPORT_DDP_MODEL_H_
#define TESTS_SUPPORT_DDP_MODEL_H_

#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "ddp/distributed_data_parallel.h"
#include "tests/support/numbers.h"
#include "tests/support/ranks.h"

namespace ddp::testing {

using Model = std::unique_ptr<DistributedDataParallel>;

// Counts of an uneven model: tiny, odd, empty and large tensors.
inline const std::vector<size_t> kCounts = {1, 1000, 3, 0, 40'001, 64, 7, 120'000, 256, 33};

inline std::vector<Parameter> MakeParameters(const std::vector<size_t>& counts, DType dtype = DType::kFloat32) {
  std::vector<Parameter> parameters;
  for (size_t i = 0; i < counts.size(); ++i) {
    parameters.push_back({absl::StrCat("layer", i, ".weight"), {}, Buffer{nullptr, counts[i], dtype, {}}, {}});
  }
  return parameters;
}

inline Model Make(Rank& rank, std::vector<Parameter> parameters, const DdpOptions& options = {}) {
  return RANK_VALUE(DistributedDataParallel::Create(rank.group(), std::move(parameters), options));
}

// `base` as it is, and with each of the options that change how a gradient goes.
inline std::vector<DdpOptions> Variants(const DdpOptions& base) {
  std::vector<DdpOptions> variants(7, base);
  variants[1].hook = CreateCompressionHook(DType::kBFloat16);
  variants[2].unused = UnusedParameters::kDetect;
  variants[3].static_graph = true;
  variants[4].weighted = true;
  variants[5].piece_bytes = 4096;
  variants[6].op = ReduceOp::kSum;
  return variants;
}

// Rank's gradient of element i of parameter p in a step. Whole numbers, divisible by 12: averages over up to 4 ranks
// are exact.
inline double Gradient(int rank, size_t p, size_t i, int step) {
  return WholeNumber(DType::kFloat32, ReduceOp::kAvg, rank + step, i + 3 * p);
}

inline double Average(int size, size_t p, size_t i, int step) {
  double sum = 0;
  for (int r = 0; r < size; ++r) sum += Gradient(r, p, i, step);
  return sum / size;
}

inline void Fill(const Buffer& buffer, double value) {
  for (size_t i = 0; i < buffer.count; ++i) SetElement(buffer.dtype, buffer.data, i, value);
}

inline void WriteGradient(Rank& rank, DistributedDataParallel& model, size_t p, int step, bool add = false) {
  const Buffer g = model.grad(p);
  for (size_t i = 0; i < g.count; ++i) {
    const double before = add ? GetElement(g.dtype, g.data, i) : 0;
    SetElement(g.dtype, g.data, i, before + Gradient(rank.rank(), p, i, step));
  }
}

using Expected = std::function<double(size_t p, size_t i)>;

inline void CheckGradient(Rank& rank, const DistributedDataParallel& model, size_t p, const Expected& expected) {
  const Buffer g = model.grad(p);
  for (size_t i = 0; i < g.count; ++i) {
    const double got = GetElement(g.dtype, g.data, i);
    RANK_CHECK(got == expected(p, i), "rank ", rank.rank(), " parameter ", p, " at ", i, ": ", got, " not ",
               expected(p, i));
  }
}

inline void CheckGradients(Rank& rank, const DistributedDataParallel& model, const Expected& expected) {
  for (size_t p = 0; p < model.size(); ++p) CheckGradient(rank, model, p, expected);
}

inline void Announce(Rank& rank, DistributedDataParallel& model, const std::vector<size_t>& order, int step) {
  for (const size_t p : order) {
    WriteGradient(rank, model, p, step);
    model.GradReady(p);
  }
}

// One reduced step in the order given.
inline void CheckStep(Rank& rank, DistributedDataParallel& model, const std::vector<size_t>& order, int step) {
  Announce(rank, model, order, step);
  RANK_CHECK_OK(model.FinishBackward());
  CheckGradients(rank, model, [&](size_t p, size_t i) { return Average(rank.size(), p, i, step); });
}

inline std::vector<size_t> Backwards(size_t n) {
  std::vector<size_t> order(n);
  std::iota(order.rbegin(), order.rend(), size_t{0});
  return order;
}

}  // namespace ddp::testing

#endif  // TESTS_SUPPORT_DDP_MODEL_H_
