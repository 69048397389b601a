// SPDX-License-Identifier: Apache-2.0
// Norms of arrays, compiled for every vector target.
#include "libddp/device/cpu_norm.h"

#include <cstddef>
#include <type_traits>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "libddp/device/cpu_norm.cc"
#include "hwy/foreach_target.h"
// foreach_target.h comes first.
#include "hwy/highway.h"
#include "libddp/device/float_storage-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ddp {
namespace HWY_NAMESPACE {

struct Squares {
  template <class D, class V>
  static HWY_INLINE V Add(D, V acc, V x) {
    return hn::Add(acc, hn::Mul(x, x));
  }
};

struct Magnitudes {
  template <class D, class V>
  static HWY_INLINE V Add(D, V acc, V x) {
    return hn::Add(acc, hn::Abs(x));
  }
};

// A NaN stays: it neither is below what comes later nor gives way to it.
struct Largest {
  template <class D, class V>
  static HWY_INLINE V Add(D, V acc, V x) {
    const V size = hn::Abs(x);
    return hn::IfThenElse(hn::Or(hn::Gt(size, acc), hn::IsNaN(size)), size, acc);
  }
};

// Elements as float64: as many as `d` has lanes.
template <class In, class D>
HWY_INLINE hn::Vec<D> LoadAs64(D d, const void* from, size_t i) {
  if constexpr (sizeof(typename In::Acc) == 8) {
    return In::Load(d, from, i);
  } else {
    return hn::PromoteTo(d, In::Load(hn::Rebind<float, D>(), from, i));
  }
}

template <class In, class Op>
HWY_INLINE void AddOne(const void* data, size_t i, double& sum) {
  const hn::CappedTag<double, 1> d;
  sum = hn::GetLane(Op::Add(d, hn::Set(d, sum), LoadAs64<In>(d, data, i)));
}

// Element i belongs to sum i mod 16, those behind the last multiple of 16 to one more, whatever the width of the
// target's vectors: so every processor adds in the same order. Vectors of two have that order everywhere, and eight
// independent ones hide the latency of the additions; at about 8 bytes a cycle memory is slower.
template <class In, class Op>
double Part(const void* data, size_t count) {
  double sums[17] = {};
  size_t i = 0;
#if HWY_TARGET == HWY_SCALAR
  for (; i < count / 16 * 16; ++i) AddOne<In, Op>(data, i, sums[i % 16]);
#else
  const hn::FixedTag<double, 2> d;
  auto a0 = hn::Zero(d), a1 = a0, a2 = a0, a3 = a0, a4 = a0, a5 = a0, a6 = a0, a7 = a0;
  for (; i + 16 <= count; i += 16) {
    a0 = Op::Add(d, a0, LoadAs64<In>(d, data, i));
    a1 = Op::Add(d, a1, LoadAs64<In>(d, data, i + 2));
    a2 = Op::Add(d, a2, LoadAs64<In>(d, data, i + 4));
    a3 = Op::Add(d, a3, LoadAs64<In>(d, data, i + 6));
    a4 = Op::Add(d, a4, LoadAs64<In>(d, data, i + 8));
    a5 = Op::Add(d, a5, LoadAs64<In>(d, data, i + 10));
    a6 = Op::Add(d, a6, LoadAs64<In>(d, data, i + 12));
    a7 = Op::Add(d, a7, LoadAs64<In>(d, data, i + 14));
  }
  hn::StoreU(a0, d, sums);
  hn::StoreU(a1, d, sums + 2);
  hn::StoreU(a2, d, sums + 4);
  hn::StoreU(a3, d, sums + 6);
  hn::StoreU(a4, d, sums + 8);
  hn::StoreU(a5, d, sums + 10);
  hn::StoreU(a6, d, sums + 12);
  hn::StoreU(a7, d, sums + 14);
#endif
  for (; i < count; ++i) AddOne<In, Op>(data, i, sums[16]);
  double total = sums[0];
  for (int k = 1; k < 17; ++k) {
    if constexpr (std::is_same_v<Op, Largest>) {
      if (sums[k] > total || sums[k] != sums[k]) total = sums[k];
    } else {
      total += sums[k];
    }
  }
  return total;
}

template <class In>
double PartOf(const void* data, size_t count, NormKind kind) {
  switch (kind) {
    case NormKind::kL1:
      return Part<In, Magnitudes>(data, count);
    case NormKind::kL2:
      return Part<In, Squares>(data, count);
    case NormKind::kMax:
      return Part<In, Largest>(data, count);
  }
  return 0;
}

double NormPart(const void* data, size_t count, DType dtype, NormKind kind) {
  switch (dtype) {
    case DType::kFloat64:
      return PartOf<Float64>(data, count, kind);
    case DType::kFloat32:
      return PartOf<Float32>(data, count, kind);
    case DType::kFloat16:
      return PartOf<Float16>(data, count, kind);
    case DType::kBFloat16:
      return PartOf<BFloat16>(data, count, kind);
    default:
      return 0;
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace ddp
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ddp {

HWY_EXPORT(NormPart);

double CpuNormPart(const Buffer& buffer, NormKind kind) {
  return HWY_DYNAMIC_DISPATCH(NormPart)(buffer.data, buffer.count, buffer.dtype, kind);
}

}  // namespace ddp
#endif  // HWY_ONCE
