// Gradients and values in memory of the program's.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

#include "tests/support/ddp_gpu_cases.h"
#include "tests/support/ddp_gpu_steps.h"

// g++ takes members of class type that are left out of designated initializers for forgotten.
#pragma GCC diagnostic ignored "-Wmissing-field-initializers"

namespace ddp::testing::gpu_cases {

// Slices of odd sizes, some with a gap before them, registered in another order than they lie in.
void InPlace(GpuRank& rank) {
  const TestStream a(rank);
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const size_t gap : {size_t{0}, size_t{3}}) {
      std::vector<Parameter> parameters = MakeParameters(rank, dtype);
      size_t total = gap;
      for (const size_t count : kCounts) total += count + gap;
      const Allocation memory = RANK_VALUE(rank.group.Allocate(total * SizeOf(dtype), rank.device()));
      const Buffer whole = memory.View(dtype, 0, total);
      Write(
          whole, [](size_t) { return 99.0; }, a.get());
      std::vector<bool> used(total);
      size_t at = gap;
      for (const size_t p : {4u, 0u, 7u, 3u, 1u, 6u, 2u, 5u}) {
        parameters[p].grad = memory.View(dtype, at * SizeOf(dtype), kCounts[p]);
        std::fill_n(used.begin() + static_cast<std::ptrdiff_t>(at), kCounts[p], true);
        at += kCounts[p] + gap;
      }
      const Model model = RANK_VALUE(DistributedDataParallel::Create(rank.group, parameters));
      for (int number = 0; number < 2; ++number) {
        const Step step{.dtype = dtype, .number = number, .tolerance = dtype == DType::kFloat32 ? 0 : 0.02};
        Backward(rank, *model, step, {&a});
        RANK_CHECK_OK(model->FinishBackward(a.get()));
        CheckGradients(rank, *model, step, a.get());
        const std::vector<double> now = Read(whole, a.get());
        for (size_t i = 0; i < total; ++i) RANK_CHECK(used[i] || now[i] == 99.0, "element ", i, " is ", now[i]);
      }
      const DdpStatistics statistics = model->statistics();
      if (gap == 0 && !statistics.buckets.empty()) RANK_CHECK_EQ(statistics.buckets[0].ranges, size_t{1});
      model->ZeroGrad(a.get());
      const std::vector<double> zeroed = Read(whole, a.get());
      for (size_t i = 0; i < total; ++i) RANK_CHECK_EQ(zeroed[i], used[i] ? 0.0 : 99.0);
    }
  }
}

}  // namespace ddp::testing::gpu_cases
