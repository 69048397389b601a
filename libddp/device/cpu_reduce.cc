// SPDX-License-Identifier: Apache-2.0
// The checks, and which instruction set is used. The kernels are in cpu_reduce_float.cc and cpu_reduce_int.cc.
#include "libddp/device/cpu_reduce.h"

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "libddp/device/cpu_reduce_kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "libddp/device/cpu_reduce.cc"
#include "hwy/foreach_target.h"
// foreach_target.h comes first.
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace ddp {
namespace HWY_NAMESPACE {

const char* ThisTarget() { return hwy::TargetName(HWY_TARGET); }

}  // namespace HWY_NAMESPACE
}  // namespace ddp
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ddp {

HWY_EXPORT(ThisTarget);

const char* CpuReduceTarget() { return HWY_DYNAMIC_DISPATCH(ThisTarget)(); }

absl::StatusOr<CpuReduce> CpuReduce::Create(const CpuReduceSpec& spec) {
  const bool average = spec.op == ReduceOp::kAvg;
  if (average && spec.average_over < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("CpuReduce: average_over is ", spec.average_over, "; pass the number of ranks, 1 or more"));
  }
  CpuReduce reduce;
  reduce.op_ = spec.op;
  Scales& scales = reduce.scales_;
  if (IsFloatingPoint(spec.in)) {
    reduce.kernel_ = ChooseFloatKernel(spec.in, spec.out, spec.op);
    scales.pre64 = spec.prescale;
    scales.post64 = average ? spec.postscale / spec.average_over : spec.postscale;
    scales.pre32 = static_cast<float>(scales.pre64);
    scales.post32 = static_cast<float>(scales.post64);
    scales.pre = scales.pre64 != 1;
    scales.post = scales.post64 != 1;
    scales.check = spec.check_nonfinite;
  } else {
    if (spec.prescale != 1 || spec.postscale != 1 || spec.check_nonfinite) {
      return absl::InvalidArgumentError(absl::StrCat(
          "CpuReduce: ", Name(spec.in), " can be neither scaled nor checked for inf and nan; leave prescale and ",
          "postscale at 1 and nonfinite unset, or reduce a floating-point type"));
    }
    if (spec.in == spec.out) reduce.kernel_ = ChooseIntKernel(spec.in, spec.op);
    if (average) scales.divisor = spec.average_over;
  }
  if (reduce.kernel_ == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("CpuReduce: ", Name(spec.op), " of ", Name(spec.in), " into ", Name(spec.out),
                     " is not supported; float32, float16 and bfloat16 convert to each other, every other type only ",
                     "to itself, so give both buffers the same type"));
  }
  return reduce;
}

}  // namespace ddp
#endif  // HWY_ONCE
