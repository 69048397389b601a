// SPDX-License-Identifier: Apache-2.0
// How a norm is put together, and what gradients are scaled by to clip them. Plain arithmetic on plain memory, so that
// a kernel can do the same where the numbers are.
#ifndef LIBDDP_DEVICE_NORM_RULE_H_
#define LIBDDP_DEVICE_NORM_RULE_H_

#include <cmath>
#include <cstdint>

#include "libddp/device/scale_rule.h"

namespace ddp {

enum class NormKind : uint8_t { kL1, kL2, kMax };

// A part of a norm is the sum of magnitudes (kL1) or of squares (kL2), or the largest magnitude (kMax), of some
// elements. Returns that of the elements of two parts. A NaN stays.
DDP_HOST_DEVICE inline double JoinParts(NormKind kind, double a, double b) {
  if (kind != NormKind::kMax) return a + b;
  return a > b || std::isnan(a) ? a : b;
}

// The norm of all elements, which this part is of.
DDP_HOST_DEVICE inline double NormOfPart(NormKind kind, double part) {
  return kind == NormKind::kL2 ? std::sqrt(part) : part;
}

// The factor that gets gradients of this norm to max_norm, as torch.nn.utils.clip_grad_norm_ has it, the small number
// in the divisor included. 1 if they stay as they are: their norm is small enough, or not finite.
DDP_HOST_DEVICE inline double ClipFactor(double max_norm, double norm) {
  const double factor = max_norm / (norm + 1e-6);
  return std::isfinite(norm) && factor < 1 ? factor : 1;
}

// Gradients may have any of the floating-point types.
inline constexpr int kNormParts = 4;

// What clipping keeps on its device.
struct ClipNumbers {
  double parts[kNormParts];
  double norm;   // of what these are parts of
  float factor;  // ClipFactor
};

DDP_HOST_DEVICE inline void FinishClip(NormKind kind, double max_norm, ClipNumbers& numbers) {
  double part = 0;
  for (const double one : numbers.parts) part = JoinParts(kind, part, one);
  numbers.norm = NormOfPart(kind, part);
  numbers.factor = static_cast<float>(ClipFactor(max_norm, numbers.norm));
}

}  // namespace ddp

#endif  // LIBDDP_DEVICE_NORM_RULE_H_
