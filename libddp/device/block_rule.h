// SPDX-License-Identifier: Apache-2.0
// Block-scaled 8-bit numbers, in which gradients travel in a quarter of their bytes. Plain arithmetic, so that kernels
// get the CPU's bits, if nothing joins a multiplication and an addition.
//
// An array is cut into blocks of 128 elements. An element is its block's scale, a float32, times a value of 8 bits. The
// scale is the block's largest magnitude over the format's largest number, and values are rounded to nearest even. In
// memory four blocks stand together as a group: 512 values, and then the four scales. Zeros fill up the last one.
//
// A block with an infinity or a NaN has a scale that is NaN, so all of it becomes NaN. One whose largest magnitude is
// below 2^-100 becomes zeros: next to the smallest numbers a scale would have no bits left, and processors differ
// there.
#ifndef LIBDDP_DEVICE_BLOCK_RULE_H_
#define LIBDDP_DEVICE_BLOCK_RULE_H_

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "libddp/device/scale_rule.h"

namespace ddp::blocks {

inline constexpr size_t kBlock = 128;      // elements
inline constexpr size_t kGroupBlocks = 4;  // blocks
inline constexpr size_t kGroup = kGroupBlocks * kBlock;
inline constexpr size_t kGroupBytes = kGroup + kGroupBlocks * sizeof(float);

enum class Format : uint8_t { kInt8, kFloat8E4M3 };  // as BlockFormat; the numbers are the same

DDP_HOST_DEVICE inline uint64_t GroupsOf(uint64_t elements) { return (elements + kGroup - 1) / kGroup; }

// What one kernel does to an array.
struct Pass {
  enum class Step : uint8_t {
    kQuantize,    // out = in * scale, in groups; `in` is of `dtype`
    kReduce,      // out = scale * the sum of `ins` arrays in this order, in groups as they are
    kDequantize,  // out = in, of `dtype`; `in` is in groups. No scale
  };
  Step step = Step::kQuantize;
  Format format = Format::kInt8;
  uint8_t dtype = 1;  // as DType: float32, float16 or bfloat16
  const void* in = nullptr;
  void* out = nullptr;
  uint64_t count = 0;   // elements
  int ins = 1;          // kReduce
  uint64_t stride = 0;  // bytes from one input to the next
  float scale = 1;
};

DDP_HOST_DEVICE inline uint32_t BitsOf(float x) {
  uint32_t bits = 0;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}
DDP_HOST_DEVICE inline float FloatOf(uint32_t bits) {
  float x = 0;
  memcpy(&x, &bits, sizeof x);
  return x;
}

inline constexpr uint32_t kMagnitude = 0x7fffffff;  // all bits but the sign: as integers, magnitudes have their order
inline constexpr uint32_t kInfinity = 0x7f800000;
inline constexpr uint32_t kNan = 0x7fc00000;
inline constexpr uint32_t kLeast = (127 - 100) << 23;  // 2^-100

DDP_HOST_DEVICE constexpr float LargestOf(Format format) { return format == Format::kInt8 ? 127.0f : 448.0f; }

// `largest`: the bits of a block's largest magnitude.
DDP_HOST_DEVICE inline float ScaleOf(Format format, uint32_t largest) {
  if (largest >= kInfinity) return FloatOf(kNan);
  return largest < kLeast ? 0 : FloatOf(largest) / LargestOf(format);
}
// What elements are multiplied by before they are rounded. 0: all values of the block are 0.
DDP_HOST_DEVICE inline float InverseOf(Format format, uint32_t largest) {
  return largest >= kInfinity || largest < kLeast ? 0 : LargestOf(format) / FloatOf(largest);
}

// To int8, adding 1.5 * 2^23 rounds: the sum's last bit is worth 1.
inline constexpr float kRounder = 12582912.0f;
// e4m3 has 4 bits of exponent, of which 7 is 2^0, and 3 below; the exponent 0 stands for multiples of 2^-9, to which
// adding 2^14 rounds.
inline constexpr float kRounder8 = 16384.0f;
inline constexpr uint32_t kLeastNormal8 = (127 - 6) << 23;
inline constexpr uint32_t kRebias8 = 127 - 7;

// x, which is not beyond the format's largest number by more than rounding.
DDP_HOST_DEVICE inline uint8_t Encode(Format format, float x) {
  if (format == Format::kInt8) return static_cast<uint8_t>(BitsOf(x + kRounder));
  const uint32_t magnitude = BitsOf(x) & kMagnitude;
  const uint32_t small = BitsOf(FloatOf(magnitude) + kRounder8) - BitsOf(kRounder8);
  const uint32_t normal = ((magnitude + 0x7ffff + (magnitude >> 20 & 1)) >> 20) - (kRebias8 << 3);
  return static_cast<uint8_t>((magnitude < kLeastNormal8 ? small : normal) | (BitsOf(x) >> 24 & 0x80));
}
DDP_HOST_DEVICE inline float Decode(Format format, uint8_t value) {
  if (format == Format::kInt8) return static_cast<float>(static_cast<int8_t>(value));
  const uint32_t magnitude = static_cast<uint32_t>(value & 0x7f) << 20;
  const uint32_t sign = static_cast<uint32_t>(value & 0x80) << 24;
  // Given the smallest normal exponent, a number without a leading one gains it, and loses it again.
  const float small = FloatOf(magnitude + kLeastNormal8) - FloatOf(kLeastNormal8);
  const float normal = FloatOf(magnitude + (kRebias8 << 23));
  return FloatOf(BitsOf(magnitude < 8u << 20 ? small : normal) | sign);
}

}  // namespace ddp::blocks

#endif  // LIBDDP_DEVICE_BLOCK_RULE_H_
