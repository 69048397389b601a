// SPDX-License-Identifier: Apache-2.0
// Reduction of integer types: plain loops, which the compiler vectorises for every target of Highway.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "libddp/device/cpu_reduce_kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "libddp/device/cpu_reduce_int.cc"
#include "hwy/foreach_target.h"
// foreach_target.h comes first.
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace ddp {
namespace HWY_NAMESPACE {

// Unsigned arithmetic that is at least as wide as int, so that neither the promotion of small types nor a product
// overflows; converting back takes the low bits.
template <typename T>
using Wrapping = std::make_unsigned_t<std::common_type_t<T, int>>;

template <ReduceOp kOp, typename T>
HWY_INLINE T Combine(T acc, T x) {
  if constexpr (kOp == ReduceOp::kMin) return std::min(acc, x);
  if constexpr (kOp == ReduceOp::kMax) return std::max(acc, x);
  const auto a = static_cast<Wrapping<T>>(acc);
  const auto b = static_cast<Wrapping<T>>(x);
  return static_cast<T>(kOp == ReduceOp::kProduct ? a * b : a + b);
}

// acc[j] = op over r of in[r][first + j]
template <ReduceOp kOp, typename T>
HWY_INLINE void CombineBlock(T* HWY_RESTRICT acc, const void* const* in, int ins, size_t first, size_t count) {
  std::memcpy(acc, static_cast<const T*>(in[0]) + first, count * sizeof(T));
  for (int r = 1; r < ins; ++r) {
    const T* HWY_RESTRICT x = static_cast<const T*>(in[r]) + first;
    for (size_t j = 0; j < count; ++j) acc[j] = Combine<kOp>(acc[j], x[j]);
  }
}

// By blocks that stay in L1: a block of all ranks is combined in a local array, which aliases nothing, so that the
// compiler may vectorise the loops, then copied to the outputs.
template <ReduceOp kOp, typename T>
bool Reduce(const CpuReduce& self, const void* const* in, int ins, void* const* out, int outs, size_t count) {
  constexpr size_t kBlock = 2048 / sizeof(T);
  alignas(64) T acc[kBlock];
  for (size_t first = 0; first < count; first += kBlock) {
    const size_t n = std::min(kBlock, count - first);
    CombineBlock<kOp>(acc, in, ins, first, n);
    if constexpr (kOp == ReduceOp::kAvg) {
      const int divisor = self.scales().divisor;
      for (size_t j = 0; j < n; ++j) acc[j] = static_cast<T>(acc[j] / divisor);
    }
    for (int k = 0; k < outs; ++k) std::memcpy(static_cast<T*>(out[k]) + first, acc, n * sizeof(T));
  }
  return false;
}

template <typename T>
CpuReduce::Kernel ForOp(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return Reduce<ReduceOp::kSum, T>;
    case ReduceOp::kAvg:
      return Reduce<ReduceOp::kAvg, T>;
    case ReduceOp::kMin:
      return Reduce<ReduceOp::kMin, T>;
    case ReduceOp::kMax:
      return Reduce<ReduceOp::kMax, T>;
    case ReduceOp::kProduct:
      return Reduce<ReduceOp::kProduct, T>;
  }
  return nullptr;
}

CpuReduce::Kernel IntKernel(DType dtype, ReduceOp op) {
  if (dtype == DType::kInt64) return ForOp<int64_t>(op);
  if (dtype == DType::kInt32) return ForOp<int32_t>(op);
  if (dtype == DType::kInt8) return ForOp<int8_t>(op);
  if (dtype == DType::kUInt8) return ForOp<uint8_t>(op);
  return nullptr;
}

}  // namespace HWY_NAMESPACE
}  // namespace ddp
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ddp {

HWY_EXPORT(IntKernel);

CpuReduce::Kernel ChooseIntKernel(DType dtype, ReduceOp op) { return HWY_DYNAMIC_DISPATCH(IntKernel)(dtype, op); }

}  // namespace ddp
#endif  // HWY_ONCE
