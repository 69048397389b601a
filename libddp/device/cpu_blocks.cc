// SPDX-License-Identifier: Apache-2.0
// Block-scaled 8-bit numbers, written once and compiled for every vector target.
#include "libddp/device/cpu_blocks.h"

#include <cstdint>
#include <cstring>

#include "ddp/types.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "libddp/device/cpu_blocks.cc"
#include "hwy/foreach_target.h"
// foreach_target.h comes first.
#include "hwy/highway.h"
#include "libddp/device/float_storage-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ddp {
namespace HWY_NAMESPACE {

using blocks::Format;
using blocks::kBlock;

// So many lanes that a block is whole vectors.
using Lanes = hn::CappedTag<float, 16>;

// Encode and Decode of block_rule.h.
struct Int8 {
  static constexpr Format kFormat = Format::kInt8;
  template <class D>
  static HWY_INLINE hn::Vec<hn::Rebind<uint8_t, D>> Encode(D d, hn::Vec<D> x) {
    const hn::RebindToUnsigned<D> du;
    const auto bits = hn::BitCast(du, hn::Add(x, hn::Set(d, blocks::kRounder)));
    return hn::TruncateTo(hn::Rebind<uint8_t, D>(), bits);
  }
  template <class D>
  static HWY_INLINE hn::Vec<D> Decode(D d, const uint8_t* from) {
    const hn::Rebind<int8_t, D> d8;
    return hn::ConvertTo(d,
                         hn::PromoteTo(hn::RebindToSigned<D>(), hn::LoadU(d8, reinterpret_cast<const int8_t*>(from))));
  }
};

struct Float8 {
  static constexpr Format kFormat = Format::kFloat8E4M3;
  template <class D>
  static HWY_INLINE hn::Vec<hn::Rebind<uint8_t, D>> Encode(D d, hn::Vec<D> x) {
    const hn::RebindToUnsigned<D> du;
    const auto bits = hn::BitCast(du, x);
    const auto magnitude = hn::And(bits, hn::Set(du, blocks::kMagnitude));
    const auto rounder = hn::Set(d, blocks::kRounder8);
    const auto small = hn::Sub(hn::BitCast(du, hn::Add(hn::BitCast(d, magnitude), rounder)), hn::BitCast(du, rounder));
    const auto odd = hn::And(hn::ShiftRight<20>(magnitude), hn::Set(du, 1));
    const auto rounded = hn::Add(magnitude, hn::Add(odd, hn::Set(du, 0x7ffff)));
    const auto normal = hn::Sub(hn::ShiftRight<20>(rounded), hn::Set(du, blocks::kRebias8 << 3));
    const auto is_small = hn::Lt(magnitude, hn::Set(du, blocks::kLeastNormal8));
    const auto sign = hn::And(hn::ShiftRight<24>(bits), hn::Set(du, 0x80));
    return hn::TruncateTo(hn::Rebind<uint8_t, D>(), hn::Or(hn::IfThenElse(is_small, small, normal), sign));
  }
  template <class D>
  static HWY_INLINE hn::Vec<D> Decode(D d, const uint8_t* from) {
    const hn::RebindToUnsigned<D> du;
    const auto value = hn::PromoteTo(du, hn::LoadU(hn::Rebind<uint8_t, D>(), from));
    const auto magnitude = hn::ShiftLeft<20>(hn::And(value, hn::Set(du, 0x7f)));
    const auto sign = hn::ShiftLeft<24>(hn::And(value, hn::Set(du, 0x80)));
    const auto least = hn::Set(du, blocks::kLeastNormal8);
    const auto small = hn::Sub(hn::BitCast(d, hn::Add(magnitude, least)), hn::BitCast(d, least));
    const auto normal = hn::Add(magnitude, hn::Set(du, blocks::kRebias8 << 23));
    const auto is_small = hn::Lt(magnitude, hn::Set(du, 8u << 20));
    return hn::BitCast(d, hn::Or(hn::IfThenElse(is_small, hn::BitCast(du, small), normal), sign));
  }
};

// Where block `b` of an array in groups lies.
struct BlockPlace {
  uint64_t values, scale;  // in bytes
};
BlockPlace PlaceOf(uint64_t b) {
  const uint64_t group = b / blocks::kGroupBlocks * blocks::kGroupBytes, k = b % blocks::kGroupBlocks;
  return {group + k * kBlock, group + blocks::kGroup + k * sizeof(float)};
}

float LoadScale(const uint8_t* from) {
  float scale = 0;
  std::memcpy(&scale, from, sizeof scale);
  return scale;
}

template <class F>
void StoreBlock(const float* x, uint8_t* groups, uint64_t b) {
  const Lanes d;
  const hn::RebindToUnsigned<Lanes> du;
  auto seen = hn::Zero(du);
  for (size_t i = 0; i < kBlock; i += hn::Lanes(d)) {
    seen = hn::Max(seen, hn::And(hn::BitCast(du, hn::LoadU(d, x + i)), hn::Set(du, blocks::kMagnitude)));
  }
  const uint32_t largest = hn::GetLane(hn::MaxOfLanes(du, seen));
  const float scale = blocks::ScaleOf(F::kFormat, largest), inverse = blocks::InverseOf(F::kFormat, largest);
  const BlockPlace place = PlaceOf(b);
  std::memcpy(groups + place.scale, &scale, sizeof scale);
  uint8_t* const values = groups + place.values;
  if (inverse == 0) {
    std::memset(values, 0, kBlock);
    return;
  }
  for (size_t i = 0; i < kBlock; i += hn::Lanes(d)) {
    const auto value = F::Encode(d, hn::Mul(hn::LoadU(d, x + i), hn::Set(d, inverse)));
    hn::StoreU(value, hn::Rebind<uint8_t, Lanes>(), values + i);
  }
}

template <class F, class S>
void Quantize(const blocks::Pass& pass) {
  const Lanes d;
  const hn::CappedTag<float, 1> single;
  auto* const out = static_cast<uint8_t*>(pass.out);
  const uint64_t filled = blocks::GroupsOf(pass.count) * blocks::kGroup;
  for (uint64_t begin = 0; begin < filled; begin += kBlock) {
    float x[kBlock] = {};
    const uint64_t left = begin < pass.count ? pass.count - begin : 0;
    size_t i = 0;
    for (; i < kBlock && i + hn::Lanes(d) <= left; i += hn::Lanes(d)) {
      hn::StoreU(hn::Mul(S::Load(d, pass.in, begin + i), hn::Set(d, pass.scale)), d, x + i);
    }
    for (; i < kBlock && i < left; ++i) {
      hn::StoreU(hn::Mul(S::Load(single, pass.in, begin + i), hn::Set(single, pass.scale)), single, x + i);
    }
    StoreBlock<F>(x, out, begin / kBlock);
  }
}

template <class F>
void Reduce(const blocks::Pass& pass) {
  const Lanes d;
  const auto* const in = static_cast<const uint8_t*>(pass.in);
  const uint64_t count = blocks::GroupsOf(pass.count) * blocks::kGroupBlocks;
  for (uint64_t b = 0; b < count; ++b) {
    float x[kBlock];
    const BlockPlace place = PlaceOf(b);
    for (size_t i = 0; i < kBlock; i += hn::Lanes(d)) {
      auto sum = hn::Zero(d);
      for (int r = 0; r < pass.ins; ++r) {
        const uint8_t* const from = in + static_cast<uint64_t>(r) * pass.stride;
        const auto term = hn::Mul(F::Decode(d, from + place.values + i), hn::Set(d, LoadScale(from + place.scale)));
        sum = r == 0 ? term : hn::Add(sum, term);
      }
      hn::StoreU(hn::Mul(sum, hn::Set(d, pass.scale)), d, x + i);
    }
    StoreBlock<F>(x, static_cast<uint8_t*>(pass.out), b);
  }
}

template <class F, class S>
void Dequantize(const blocks::Pass& pass) {
  const Lanes d;
  const hn::CappedTag<float, 1> single;
  const auto* const in = static_cast<const uint8_t*>(pass.in);
  for (uint64_t begin = 0; begin < pass.count; begin += kBlock) {
    const BlockPlace place = PlaceOf(begin / kBlock);
    const float scale = LoadScale(in + place.scale);
    const uint64_t left = pass.count - begin;
    size_t i = 0;
    for (; i < kBlock && i + hn::Lanes(d) <= left; i += hn::Lanes(d)) {
      const auto x = hn::Mul(F::Decode(d, in + place.values + i), hn::Set(d, scale));
      S::Store(d, S::Narrow(d, x), pass.out, begin + i);
    }
    for (; i < kBlock && i < left; ++i) {
      const auto x = hn::Mul(F::Decode(single, in + place.values + i), hn::Set(single, scale));
      S::Store(single, S::Narrow(single, x), pass.out, begin + i);
    }
  }
}

template <class F, class S>
void RunAs(const blocks::Pass& pass) {
  switch (pass.step) {
    case blocks::Pass::Step::kQuantize:
      return Quantize<F, S>(pass);
    case blocks::Pass::Step::kReduce:
      return Reduce<F>(pass);
    case blocks::Pass::Step::kDequantize:
      return Dequantize<F, S>(pass);
  }
}

template <class F>
void RunIn(const blocks::Pass& pass) {
  switch (static_cast<DType>(pass.dtype)) {
    case DType::kFloat16:
      return RunAs<F, Float16>(pass);
    case DType::kBFloat16:
      return RunAs<F, BFloat16>(pass);
    default:
      return RunAs<F, Float32>(pass);
  }
}

void Run(const blocks::Pass& pass) {
  if (pass.format == Format::kInt8) {
    RunIn<Int8>(pass);
  } else {
    RunIn<Float8>(pass);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace ddp
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ddp {

HWY_EXPORT(Run);

void CpuRunBlocks(const blocks::Pass& pass) { HWY_DYNAMIC_DISPATCH(Run)(pass); }

}  // namespace ddp
#endif  // HWY_ONCE
