// SPDX-License-Identifier: Apache-2.0
// PowerSGD on GPUs, beside the same hook on CPU memory.
#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ddp/collectives.h"
#include "ddp/comm_hook.h"
#include "tests/support/ddp_gpu_steps.h"

// g++ takes members of class type that are left out of designated initializers for forgotten.
#pragma GCC diagnostic ignored "-Wmissing-field-initializers"

namespace ddp::testing::gpu_cases {
namespace {

// Square, tall and flat matrices, a convolution's weight, one that is too small to be compressed, and a bias.
const std::vector<std::vector<int64_t>> kShapes = {{40, 30}, {700, 6}, {6, 700}, {32, 16, 3, 3}, {3, 2}, {24}};

size_t Count(const std::vector<int64_t>& shape) {
  size_t count = 1;
  for (const int64_t n : shape) count *= static_cast<size_t>(n);
  return count;
}

double Wave(size_t a, size_t b) { return std::sin(static_cast<double>(a * 37 + b * 101 + 1)); }

// Four directions, each half as strong as the one before, and a little of everything. Ranks and steps differ.
double Entry(int rank, int step, size_t p, size_t i) {
  const size_t columns = Count(kShapes[p]) / static_cast<size_t>(kShapes[p][0]);
  const size_t row = i / columns, column = i % columns;
  double sum = 0.01 * Wave(i, static_cast<size_t>(rank + 7 * step));
  for (size_t k = 0; k < 4; ++k) {
    sum += std::ldexp(Wave(row, k) * Wave(column, k + 10), -static_cast<int>(k)) * (1 + 0.1 * (rank + step));
  }
  return sum;
}

// The hook on CPU memory, driven as a model with one bucket drives it.
class Reference {
 public:
  Reference(ProcessGroup& group, std::shared_ptr<CommHook> hook, DType dtype) : group_(group), hook_(std::move(hook)) {
    for (size_t p = kShapes.size(); p-- > 0;) {
      const size_t count = Count(kShapes[p]);
      bucket_.gradients.push_back({p, absl::StrCat("p", p), kShapes[p], total_, count});
      total_ += count;
    }
    memory_.resize(total_ * SizeOf(dtype));
    bucket_.is_last = true;
    bucket_.buffer = {memory_.data(), total_, dtype, {}};
    bucket_.reduce = Avg();
    RANK_CHECK_OK(hook_->Prepare(group_, {&bucket_, 1}));
  }

  // The results, parameter by parameter.
  std::vector<std::vector<double>> Step(const std::vector<std::vector<double>>& gradients) {
    const DType dtype = bucket_.buffer.dtype;
    for (const GradBucket::Gradient& g : bucket_.gradients) {
      for (size_t i = 0; i < g.count; ++i) SetElement(dtype, memory_.data(), g.offset + i, gradients[g.parameter][i]);
    }
    for (int round = 0; round < hook_->rounds(); ++round) {
      RANK_CHECK_OK(hook_->Start(group_, bucket_, round).Wait());
    }
    RANK_CHECK_OK(hook_->Finish(bucket_));
    ++bucket_.step;
    std::vector<std::vector<double>> results(gradients.size());
    for (const GradBucket::Gradient& g : bucket_.gradients) {
      for (size_t i = 0; i < g.count; ++i) {
        results[g.parameter].push_back(GetElement(dtype, memory_.data(), g.offset + i));
      }
    }
    return results;
  }

 private:
  ProcessGroup& group_;
  const std::shared_ptr<CommHook> hook_;
  GradBucket bucket_;
  size_t total_ = 0;
  std::vector<char> memory_;
};

void Compare(GpuRank& rank, const PowerSgdOptions& options, DType dtype, Stream stream) {
  std::vector<Parameter> parameters;
  for (size_t p = 0; p < kShapes.size(); ++p) {
    parameters.push_back({absl::StrCat("p", p), kShapes[p], {nullptr, Count(kShapes[p]), dtype, rank.device()}, {}});
  }
  const Model model =
      RANK_VALUE(DistributedDataParallel::Create(rank.group, parameters, {.hook = CreatePowerSgdHook(options)}));
  Reference reference(rank.group, CreatePowerSgdHook(options), dtype);
  for (int step = 0; step < 4; ++step) {
    // What is not finite leaves no trace in the steps that follow.
    const bool spoilt = step == 2;
    std::vector<std::vector<double>> gradients(kShapes.size());
    for (size_t p = kShapes.size(); p-- > 0;) {
      for (size_t i = 0; i < Count(kShapes[p]); ++i) gradients[p].push_back(Entry(rank.rank(), step, p, i));
      if (spoilt && p == 1 && rank.rank() == rank.size() - 1) gradients[p][5] = HUGE_VAL;
      Write(
          model->grad(p), [&](size_t i) { return gradients[p][i]; }, stream);
      model->GradReady(p, stream);
    }
    RANK_CHECK_OK(model->FinishBackward(stream));
    const std::vector<std::vector<double>> expected = reference.Step(gradients);
    std::string bits;
    for (size_t p = 0; p < kShapes.size(); ++p) {
      const std::vector<double> got = Read(model->grad(p), stream);
      bits.append(reinterpret_cast<const char*>(got.data()), got.size() * sizeof(double));
      double apart = 0, size = 0;
      for (size_t i = 0; i < got.size(); ++i) {
        apart += std::pow(got[i] - expected[p][i], 2);
        size += std::pow(expected[p][i], 2);
      }
      if (spoilt && p == 1) {
        RANK_CHECK(!std::isfinite(apart), "the infinity is lost");
      } else {
        const double tolerance = dtype == DType::kFloat32 ? 1e-4 : 0.05;
        RANK_CHECK(std::sqrt(apart) <= tolerance * std::sqrt(size), "rank ", options.rank, ", step ", step,
                   ", parameter ", p, ": apart by ", std::sqrt(apart / size), " of the result");
      }
    }
    const std::vector<std::string> all = RANK_VALUE(GatherStrings(rank.group, bits));
    for (const std::string& other : all) RANK_CHECK(other == bits, "step ", step, ": ranks have other bits");
  }
}

}  // namespace

void PowerSgd(GpuRank& rank) {
  const TestStream stream(rank);
  for (const int power_rank : {1, 4}) {
    Compare(rank, {.rank = power_rank, .start_step = 1}, DType::kFloat32, stream.get());
  }
  Compare(rank, {.rank = 2, .start_step = 0, .warm_start = false}, DType::kFloat32, stream.get());
  Compare(rank, {.rank = 2, .start_step = 0, .error_feedback = false}, DType::kFloat32, stream.get());
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    Compare(rank, {.rank = 1, .start_step = 0}, dtype, stream.get());
  }
}

}  // namespace ddp::testing::gpu_cases
