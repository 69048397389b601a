// SPDX-License-Identifier: Apache-2.0
// How floating-point elements lie in memory and what they are computed in, for one vector target. Included once per
// target by Highway's foreach_target.h, hence the guard that toggles.
//
// The conversions of 16-bit floats are ours where Highway's differ between targets: up to version 1.0.3 its bfloat16
// conversion truncates, and without F16C its float16 conversions know neither infinities nor NaN.

#if defined(LIBDDP_DEVICE_FLOAT_STORAGE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LIBDDP_DEVICE_FLOAT_STORAGE_INL_H_
#undef LIBDDP_DEVICE_FLOAT_STORAGE_INL_H_
#else
#define LIBDDP_DEVICE_FLOAT_STORAGE_INL_H_
#endif

#include <cstddef>
#include <cstdint>

#include "hwy/highway.h"

// Whether the processor converts float16 itself. Its results are then those of the integer code below, NaN included.
#undef DDP_HAVE_F16C
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX2 && !defined(HWY_DISABLE_F16C)
#define DDP_HAVE_F16C 1
#else
#define DDP_HAVE_F16C 0
#endif

HWY_BEFORE_NAMESPACE();
namespace ddp {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// A storage type S has: Acc, the type to compute in; Load, Lanes(d) elements as Acc; Narrow, those rounded to S; Store,
// which takes what Narrow gave. Rounding and storing are apart since one result goes to many outputs.
//
// It also searches what Narrow gave for infinities and NaN, in two operations a vector: start with NothingSeen, call
// See for each vector, and ask AnyNonfinite at the end.
template <typename T>
struct Native {
  using Acc = T;

  // x - x is +0 if x is finite and NaN otherwise, so the OR of these is a NaN exactly if one x is not finite.
  template <class D>
  static HWY_INLINE hn::Vec<D> NothingSeen(D d) {
    return hn::Zero(d);
  }
  template <class D>
  static HWY_INLINE hn::Vec<D> See(D, hn::Vec<D> seen, hn::Vec<D> v) {
    return hn::Or(seen, hn::Sub(v, v));
  }
  template <class D>
  static HWY_INLINE bool AnyNonfinite(D d, hn::Vec<D> seen) {
    return !hn::AllFalse(d, hn::IsNaN(seen));
  }

  template <class D>
  static HWY_INLINE hn::Vec<D> Load(D d, const void* from, size_t i) {
    return hn::LoadU(d, static_cast<const T*>(from) + i);
  }
  template <class D>
  static HWY_INLINE hn::Vec<D> Narrow(D, hn::Vec<D> v) {
    return v;
  }
  template <class D>
  static HWY_INLINE void Store(D d, hn::Vec<D> v, void* to, size_t i) {
    hn::StoreU(v, d, static_cast<T*>(to) + i);
  }
};

using Float64 = Native<double>;
using Float32 = Native<float>;

// The lower half of each 32-bit lane.
template <class D, class V>
HWY_INLINE hn::Vec<hn::Rebind<uint16_t, D>> LowerHalves(D, V bits) {
  return hn::TruncateTo(hn::Rebind<uint16_t, D>(), bits);
}

// The search in 16-bit floats, of which kInfinity is the pattern of infinity: doubled, a pattern loses its sign, and
// every one that is not finite is at least twice kInfinity.
template <uint16_t kInfinity>
struct Search16 {
  template <class D>
  using Seen = hn::Vec<hn::Rebind<uint16_t, D>>;

  template <class D>
  static HWY_INLINE Seen<D> NothingSeen(D) {
    return hn::Zero(hn::Rebind<uint16_t, D>());
  }
  template <class D, class V>
  static HWY_INLINE Seen<D> See(D, Seen<D> seen, V narrowed) {
    const auto bits = hn::BitCast(hn::Rebind<uint16_t, D>(), narrowed);
    return hn::Max(seen, hn::Add(bits, bits));
  }
  template <class D>
  static HWY_INLINE bool AnyNonfinite(D, Seen<D> seen) {
    const hn::Rebind<uint16_t, D> d16;
    return !hn::AllFalse(d16, hn::Gt(seen, hn::Set(d16, 2 * kInfinity - 1)));
  }
};

struct BFloat16 : Search16<0x7f80> {
  using Acc = float;

  template <class D>
  static HWY_INLINE hn::Vec<D> Load(D d, const void* from, size_t i) {
    const hn::Rebind<uint16_t, D> d16;
    const auto bits = hn::PromoteTo(hn::RebindToUnsigned<D>(), hn::LoadU(d16, static_cast<const uint16_t*>(from) + i));
    return hn::BitCast(d, hn::ShiftLeft<16>(bits));
  }

  // To nearest, ties to even: adding 0x7fff, and one more if the last bit kept is odd, carries into that bit exactly
  // where the value must go up; from the largest finite values the carry makes infinity. A NaN could carry too, so it
  // is made quiet instead.
  template <class D>
  static HWY_INLINE hn::Vec<hn::Rebind<uint16_t, D>> Narrow(D d, hn::Vec<D> v) {
    const hn::RebindToUnsigned<D> du;
    const auto bits = hn::BitCast(du, v);
    const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1));
    const auto rounded = hn::Add(bits, hn::Add(odd, hn::Set(du, 0x7fff)));
    const auto quiet = hn::Or(bits, hn::Set(du, 0x400000));
    const auto nan = hn::RebindMask(du, hn::IsNaN(v));
    return LowerHalves(d, hn::ShiftRight<16>(hn::IfThenElse(nan, quiet, rounded)));
  }

  template <class D>
  static HWY_INLINE void Store(D, hn::Vec<hn::Rebind<uint16_t, D>> v, void* to, size_t i) {
    hn::StoreU(v, hn::Rebind<uint16_t, D>(), static_cast<uint16_t*>(to) + i);
  }
};

#if DDP_HAVE_F16C

struct Float16 : Search16<0x7c00> {
  using Acc = float;

  template <class D>
  static HWY_INLINE hn::Vec<D> Load(D d, const void* from, size_t i) {
    return hn::PromoteTo(d, hn::LoadU(hn::Rebind<hwy::float16_t, D>(), static_cast<const hwy::float16_t*>(from) + i));
  }
  template <class D>
  static HWY_INLINE hn::Vec<hn::Rebind<hwy::float16_t, D>> Narrow(D, hn::Vec<D> v) {
    return hn::DemoteTo(hn::Rebind<hwy::float16_t, D>(), v);
  }
  template <class D>
  static HWY_INLINE void Store(D, hn::Vec<hn::Rebind<hwy::float16_t, D>> v, void* to, size_t i) {
    hn::StoreU(v, hn::Rebind<hwy::float16_t, D>(), static_cast<hwy::float16_t*>(to) + i);
  }
};

#else

// After Fabian Giesen, "half_to_float" and "float_to_half_fast3_rtne" (public domain).
struct Float16 : Search16<0x7c00> {
  using Acc = float;

  // The exponent's bias is 112 larger in float32. A subnormal has no leading one: given the smallest normal exponent,
  // it gains one, which subtracting that power of two takes off again. Infinity and NaN need the largest exponent.
  template <class D>
  static HWY_INLINE hn::Vec<D> Load(D d, const void* from, size_t i) {
    const hn::RebindToUnsigned<D> du;
    const hn::Rebind<uint16_t, D> d16;
    const auto half = hn::PromoteTo(du, hn::LoadU(d16, static_cast<const uint16_t*>(from) + i));
    const auto magnitude = hn::And(half, hn::Set(du, 0x7fff));
    const auto shifted = hn::ShiftLeft<13>(magnitude);
    const auto normal = hn::Add(shifted, hn::Set(du, 112u << 23));
    const auto least = hn::Set(du, 113u << 23);
    const auto subnormal = hn::BitCast(du, hn::Sub(hn::BitCast(d, hn::Add(shifted, least)), hn::BitCast(d, least)));
    const auto infinite = hn::Or(shifted, hn::Set(du, 0x7f800000));
    const auto quiet = hn::Or(infinite, hn::Set(du, 0x400000));
    auto bits = hn::IfThenElse(hn::Lt(magnitude, hn::Set(du, 0x400)), subnormal, normal);
    bits = hn::IfThenElse(hn::Gt(magnitude, hn::Set(du, 0x7bff)), infinite, bits);
    bits = hn::IfThenElse(hn::Gt(magnitude, hn::Set(du, 0x7c00)), quiet, bits);
    const auto sign = hn::ShiftLeft<16>(hn::And(half, hn::Set(du, 0x8000)));
    return hn::BitCast(d, hn::Or(bits, sign));
  }

  // To nearest, ties to even, as for BFloat16. A result below the normal range is rounded by an addition: in 0.5 + x
  // the last bit of float32 is worth what the last bit of a float16 subnormal is.
  template <class D>
  static HWY_INLINE hn::Vec<hn::Rebind<uint16_t, D>> Narrow(D d, hn::Vec<D> v) {
    const hn::RebindToUnsigned<D> du;
    const auto bits = hn::BitCast(du, v);
    const auto magnitude = hn::And(bits, hn::Set(du, 0x7fffffff));
    const auto odd = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(du, 1));
    const auto rebiased = hn::Sub(magnitude, hn::Set(du, (112u << 23) - 0xfff));
    const auto normal = hn::ShiftRight<13>(hn::Add(rebiased, odd));
    const auto half_one = hn::Set(d, 0.5f);
    const auto subnormal =
        hn::Sub(hn::BitCast(du, hn::Add(hn::BitCast(d, magnitude), half_one)), hn::BitCast(du, half_one));
    const auto quiet = hn::Or(hn::And(hn::ShiftRight<13>(magnitude), hn::Set(du, 0x3ff)), hn::Set(du, 0x7e00));
    auto half = hn::IfThenElse(hn::Lt(magnitude, hn::Set(du, 113u << 23)), subnormal, normal);
    half = hn::IfThenElse(hn::Gt(magnitude, hn::Set(du, 0x477fffff)), hn::Set(du, 0x7c00), half);
    half = hn::IfThenElse(hn::Gt(magnitude, hn::Set(du, 0x7f800000)), quiet, half);
    const auto sign = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 0x8000));
    return LowerHalves(d, hn::Or(half, sign));
  }

  template <class D>
  static HWY_INLINE void Store(D d, hn::Vec<hn::Rebind<uint16_t, D>> v, void* to, size_t i) {
    BFloat16::Store(d, v, to, i);
  }
};

#endif  // DDP_HAVE_F16C

}  // namespace HWY_NAMESPACE
}  // namespace ddp
HWY_AFTER_NAMESPACE();

#endif  // LIBDDP_DEVICE_FLOAT_STORAGE_INL_H_
