// SPDX-License-Identifier: Apache-2.0
// Reduction of floating-point types, written once and compiled for every vector target.
#include <cstddef>

#include "libddp/device/cpu_reduce_kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "libddp/device/cpu_reduce_float.cc"
#include "hwy/foreach_target.h"
// foreach_target.h comes first.
#include "hwy/highway.h"
#include "libddp/device/float_storage-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ddp {
namespace HWY_NAMESPACE {

struct Sum {
  template <class D, class V>
  static HWY_INLINE V Apply(D, V acc, V x) {
    return hn::Add(acc, x);
  }
};

struct Product {
  template <class D, class V>
  static HWY_INLINE V Apply(D, V acc, V x) {
    return hn::Mul(acc, x);
  }
};

// Min and max are comparisons, not Highway's Min and Max, whose answer for NaN and for zeros of different sign depends
// on the target: here a NaN on either side gives NaN, and the lower rank's of two equal values stays.
struct Min {
  template <class D, class V>
  static HWY_INLINE V Apply(D, V acc, V x) {
    return hn::IfThenElse(hn::Or(hn::Lt(x, acc), hn::IsNaN(x)), x, acc);
  }
};

struct Max {
  template <class D, class V>
  static HWY_INLINE V Apply(D, V acc, V x) {
    return hn::IfThenElse(hn::Or(hn::Gt(x, acc), hn::IsNaN(x)), x, acc);
  }
};

template <class In, bool kPre, class D, class V>
HWY_INLINE V Load(D d, const void* from, size_t i, V pre) {
  const auto x = In::Load(d, from, i);
  return kPre ? hn::Mul(x, pre) : x;
}

// One vector's worth of everything: the definition that the unrolled loop in Reduce repeats. Returns what it stored.
template <class Op, class In, class Out, bool kPre, class D, typename T = hn::TFromD<D>>
HWY_INLINE auto ReduceOne(D d, T pre_scale, T post_scale, const void* const* in, int ins, void* const* out, int outs,
                          size_t i) {
  const auto pre = hn::Set(d, pre_scale);
  auto acc = Load<In, kPre>(d, in[0], i, pre);
  for (int r = 1; r < ins; ++r) acc = Op::Apply(d, acc, Load<In, kPre>(d, in[r], i, pre));
  acc = hn::Mul(acc, hn::Set(d, post_scale));
  const auto result = Out::Narrow(d, acc);
  for (int k = 0; k < outs; ++k) Out::Store(d, result, out[k], i);
  return result;
}

// Two vectors go through all ranks together, so that a rank's pointer is fetched once for both; more would make longer
// runs of stores to one array, which the first-level cache takes more slowly. What is left goes by single vectors, then
// by single elements. All three do the same operations per element, so where a range is cut does not change bits. All
// loads of a step come before its stores, so an output may be an input.
//
// Scales of 1 are multiplied too: exact, and free beside the loads and stores.
//
// The check is always made: its two operations per vector are free, too. It looks at what is stored, since a sum that
// is finite in float32 may be infinite in 16 bits.
//
// kRanks > 0 is for as many inputs and outputs, and no prescale: the compiler unrolls the loops over ranks and keeps
// the pointers, copied to where no store can change them, in registers. In cache this is a fifth to a third faster than
// kRanks = 0, which takes any number.
template <class Op, class In, class Out, int kRanks = 0>
bool Reduce(const CpuReduce& self, const void* const* all_in, int all_ins, void* const* all_out, int all_outs,
            size_t count) {
  constexpr bool kPre = kRanks == 0;
  const void* own_in[kRanks + 1];
  void* own_out[kRanks + 1];
  for (int r = 0; r < kRanks; ++r) own_in[r] = all_in[r];
  for (int k = 0; k < kRanks; ++k) own_out[k] = all_out[k];
  const void* const* in = kRanks > 0 ? own_in : all_in;
  void* const* out = kRanks > 0 ? own_out : all_out;
  const int ins = kRanks > 0 ? kRanks : all_ins;
  const int outs = kRanks > 0 ? kRanks : all_outs;
  using T = typename In::Acc;
  const hn::ScalableTag<T> d;
  const size_t lanes = hn::Lanes(d);
  const T pre_scale = sizeof(T) == 8 ? static_cast<T>(self.scales().pre64) : static_cast<T>(self.scales().pre32);
  const T post_scale = sizeof(T) == 8 ? static_cast<T>(self.scales().post64) : static_cast<T>(self.scales().post32);
  const auto pre = hn::Set(d, pre_scale);
  const auto post = hn::Set(d, post_scale);
  auto seen0 = Out::NothingSeen(d), seen1 = seen0;
  size_t i = 0;
  for (; i + 2 * lanes <= count; i += 2 * lanes) {
    const size_t i1 = i + lanes;
    auto a0 = Load<In, kPre>(d, in[0], i, pre);
    auto a1 = Load<In, kPre>(d, in[0], i1, pre);
    for (int r = 1; r < ins; ++r) {
      const void* p = in[r];
      a0 = Op::Apply(d, a0, Load<In, kPre>(d, p, i, pre));
      a1 = Op::Apply(d, a1, Load<In, kPre>(d, p, i1, pre));
    }
    const auto n0 = Out::Narrow(d, hn::Mul(a0, post));
    const auto n1 = Out::Narrow(d, hn::Mul(a1, post));
    seen0 = Out::See(d, seen0, n0);
    seen1 = Out::See(d, seen1, n1);
    for (int k = 0; k < outs; ++k) {
      void* q = out[k];
      Out::Store(d, n0, q, i);
      Out::Store(d, n1, q, i1);
    }
  }
  for (; i + lanes <= count; i += lanes) {
    const auto n = ReduceOne<Op, In, Out, kPre>(d, pre_scale, post_scale, in, ins, out, outs, i);
    seen0 = Out::See(d, seen0, n);
  }
  const hn::CappedTag<T, 1> single;
  auto seen_single = Out::NothingSeen(single);
  for (; i < count; ++i) {
    const auto n = ReduceOne<Op, In, Out, kPre>(single, pre_scale, post_scale, in, ins, out, outs, i);
    seen_single = Out::See(single, seen_single, n);
  }
  if (!self.scales().check) return false;
  return Out::AnyNonfinite(d, seen0) || Out::AnyNonfinite(d, seen1) || Out::AnyNonfinite(single, seen_single);
}

// The sum that training asks for, at the usual numbers of ranks on one node.
bool ReduceFloat32Sum(const CpuReduce& self, const void* const* in, int ins, void* const* out, int outs, size_t count) {
  CpuReduce::Kernel kernel = Reduce<Sum, Float32, Float32>;
  if (ins == outs && !self.scales().pre) {
    if (ins == 2) kernel = Reduce<Sum, Float32, Float32, 2>;
    if (ins == 3) kernel = Reduce<Sum, Float32, Float32, 3>;
    if (ins == 4) kernel = Reduce<Sum, Float32, Float32, 4>;
  }
  return kernel(self, in, ins, out, outs, count);
}

template <class In, class Out>
CpuReduce::Kernel ForOp(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAvg:
      return Reduce<Sum, In, Out>;
    case ReduceOp::kMin:
      return Reduce<Min, In, Out>;
    case ReduceOp::kMax:
      return Reduce<Max, In, Out>;
    case ReduceOp::kProduct:
      return Reduce<Product, In, Out>;
  }
  return nullptr;
}

template <class In>
CpuReduce::Kernel ForOut(DType out, ReduceOp op) {
  if (out == DType::kFloat32) return ForOp<In, Float32>(op);
  if (out == DType::kFloat16) return ForOp<In, Float16>(op);
  if (out == DType::kBFloat16) return ForOp<In, BFloat16>(op);
  return nullptr;
}

CpuReduce::Kernel FloatKernel(DType in, DType out, ReduceOp op) {
  const bool sum = op == ReduceOp::kSum || op == ReduceOp::kAvg;
  if (in == DType::kFloat32 && out == DType::kFloat32 && sum) return ReduceFloat32Sum;
  if (in == DType::kFloat64 && out == DType::kFloat64) return ForOp<Float64, Float64>(op);
  if (in == DType::kFloat32) return ForOut<Float32>(out, op);
  if (in == DType::kFloat16) return ForOut<Float16>(out, op);
  if (in == DType::kBFloat16) return ForOut<BFloat16>(out, op);
  return nullptr;
}

}  // namespace HWY_NAMESPACE
}  // namespace ddp
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ddp {

HWY_EXPORT(FloatKernel);

CpuReduce::Kernel ChooseFloatKernel(DType in, DType out, ReduceOp op) {
  return HWY_DYNAMIC_DISPATCH(FloatKernel)(in, out, op);
}

}  // namespace ddp
#endif  // HWY_ONCE
