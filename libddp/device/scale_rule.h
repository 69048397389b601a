// SPDX-License-Identifier: Apache-2.0
// How the scale changes. Plain arithmetic on plain memory, so that a kernel can do the same where the numbers are.
#ifndef LIBDDP_DEVICE_SCALE_RULE_H_
#define LIBDDP_DEVICE_SCALE_RULE_H_

#include <cmath>
#include <cstddef>
#include <cstdint>

#ifdef __CUDACC__
#define DDP_HOST_DEVICE __host__ __device__
#else
#define DDP_HOST_DEVICE
#endif

namespace ddp {

// Words for findings that one scaler hands out.
inline constexpr int kFoundInfWords = 60;

// What a scaler keeps on its device.
struct ScalerNumbers {
  float scale;
  float inv_scale;  // InverseOf(scale)
  int32_t growth_tracker;
  int32_t hysteresis_tracker;
  uint32_t found_inf[kFoundInfWords];  // not 0: found since the last update
};

// The part that ranks have in common: all but the findings.
inline constexpr size_t kCommonBytes = offsetof(ScalerNumbers, found_inf);

// The inverse of a smaller scale may be infinite.
inline constexpr float kLeastScale = 1.17549435e-38f;

struct ScaleRule {
  double growth_factor;
  double backoff_factor;
  float min_scale;
  int32_t growth_interval;
  int32_t hysteresis;
};

DDP_HOST_DEVICE inline float InverseOf(float scale) { return static_cast<float>(1 / static_cast<double>(scale)); }

// After torch's amp_update_scale_ (aten/src/ATen/native/cuda/AmpKernels.cu), with a least scale, and hysteresis as in
// Megatron-LM's DynamicGradScaler: a tracker counts down with each bad step, and is wound up again when the scale
// grows. A scale that is below the least one, from a state of torch's, shrinks as in torch, as long as it has an
// inverse. The growth tracker grows past an interval that is shorter than what it has counted, as in torch.
DDP_HOST_DEVICE inline void UpdateScale(const ScaleRule& rule, ScalerNumbers& numbers) {
  bool found = false;
  for (uint32_t& word : numbers.found_inf) {
    found |= word != 0;
    word = 0;
  }
  const double scale = static_cast<double>(numbers.scale);
  if (found) {
    numbers.growth_tracker = 0;
    if (numbers.hysteresis_tracker > 1) {
      --numbers.hysteresis_tracker;
      return;
    }
    numbers.hysteresis_tracker = 0;
    const float smaller = static_cast<float>(scale * rule.backoff_factor);
    const float least = numbers.scale < rule.min_scale ? kLeastScale : rule.min_scale;
    numbers.scale = smaller > least ? smaller : least;
  } else if (++numbers.growth_tracker == rule.growth_interval) {
    numbers.growth_tracker = 0;
    numbers.hysteresis_tracker = rule.hysteresis;
    const float larger = static_cast<float>(scale * rule.growth_factor);
    if (std::isfinite(larger)) numbers.scale = larger;
  }
  numbers.inv_scale = InverseOf(numbers.scale);
}

}  // namespace ddp

#endif  // LIBDDP_DEVICE_SCALE_RULE_H_
