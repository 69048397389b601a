// SPDX-License-Identifier: Apache-2.0
// ddp::SyncBatchNorm on several ranks beside LibTorch's batch norm of the whole batch, on CPUs and GPUs.
#ifndef TESTS_SUPPORT_TORCH_NORM_CASES_H_
#define TESTS_SUPPORT_TORCH_NORM_CASES_H_

#include <torch/types.h>

#include <cstdint>
#include <vector>

#include "ddp/torch/sync_batch_norm.h"
#include "ddp/torch/tensor.h"
#include "tests/support/ranks.h"

namespace ddp::testing {

constexpr int64_t kChannels = 3;

// `from`: of the numbers that both were computed from.
inline bool Near(const torch::Tensor& a, const torch::Tensor& b, torch::ScalarType from) {
  const bool narrow = from == torch::kFloat16 || from == torch::kBFloat16;
  const double tolerance = narrow ? 1e-2 : 1e-4;
  return a.sizes() == b.sizes() && torch::allclose(a.to(torch::kFloat64), b.to(torch::kFloat64), tolerance, tolerance);
}

// The same on all ranks: batches of another size for each rank, the last one empty if there are several.
struct Batches {
  Batches(int ranks, std::vector<int64_t> shape, const torch::TensorOptions& options) {
    for (int r = 0; r < ranks; ++r) sizes.push_back(r > 0 && r == ranks - 1 ? 0 : r + 2);
    int64_t all = 0;
    for (const int64_t n : sizes) all += n;
    shape.insert(shape.begin(), all);
    torch::Tensor numbers = torch::arange(c10::multiply_integers(shape), torch::kFloat64);
    x = (numbers.sin() * 3 + 5).view(shape).to(options);
    target = (numbers.cos()).view(shape).to(options);
  }
  torch::Tensor Mine(const torch::Tensor& whole, int rank) const {
    int64_t begin = 0;
    for (int r = 0; r < rank; ++r) begin += sizes[static_cast<size_t>(r)];
    return whole.narrow(0, begin, sizes[static_cast<size_t>(rank)]).clone();
  }
  std::vector<int64_t> sizes;
  torch::Tensor x, target;
};

struct Pass {
  torch::Tensor y, dx;
};

template <typename Norm>
Pass Train(Norm& norm, const torch::Tensor& input, const torch::Tensor& target) {
  const torch::Tensor x = input.clone().requires_grad_();
  const torch::Tensor y = norm->forward(x);
  (y * target).sum().backward();
  return {y.detach(), x.grad()};
}

template <typename Norm>
void CompareNorms(Rank& rank, const std::vector<int64_t>& shape, const torch::TensorOptions& tensors,
                  const torch::nn::BatchNormOptions& options) {
  const Batches batches(rank.size(), shape, tensors);
  Norm whole(options);
  SyncBatchNorm mine(options, rank.group());
  const torch::ScalarType type = tensors.dtype().toScalarType();
  // 16-bit inputs go with statistics and weights in float32.
  const bool wide = type == torch::kFloat64;
  for (torch::nn::Module* module :
       {static_cast<torch::nn::Module*>(whole.get()), static_cast<torch::nn::Module*>(mine.get())}) {
    module->to(tensors.device());
    if (wide) module->to(torch::kFloat64);
  }
  for (int step = 0; step < 2; ++step) {
    const Pass expected = Train(whole, batches.x, batches.target);
    const Pass pass = Train(mine, batches.Mine(batches.x, rank.rank()), batches.Mine(batches.target, rank.rank()));
    RANK_CHECK(Near(pass.y, batches.Mine(expected.y, rank.rank()), type));
    RANK_CHECK(Near(pass.dx, batches.Mine(expected.dx, rank.rank()), type));
    RANK_CHECK(pass.y.dtype() == tensors.dtype() && pass.dx.dtype() == tensors.dtype());
  }
  for (const auto& named : whole->named_buffers()) {
    if (named.value().defined()) RANK_CHECK(Near(mine->named_buffers()[named.key()], named.value(), type), named.key());
  }
  for (const auto& named : whole->named_parameters()) {
    torch::Tensor sum = mine->named_parameters()[named.key()].grad().clone();
    const Buffer buffer = RANK_VALUE(BufferOf(sum));
    const Stream stream = CurrentStream(sum.device());
    RANK_CHECK_OK(rank.group().AllReduce(buffer, buffer, {}, stream).BlockStream(stream));
    const torch::Tensor want = named.value().grad();
    RANK_CHECK(Near(sum, want, type), named.key(), " of ", c10::toString(type), ", off by ",
               (sum - want).abs().max().item<double>(), " of ", want.abs().max().item<double>());
  }
  whole->eval();
  mine->eval();
  RANK_CHECK(Near(mine->forward(batches.x), whole->forward(batches.x), type));
}

}  // namespace ddp::testing

#endif  // TESTS_SUPPORT_TORCH_NORM_CASES_H_
