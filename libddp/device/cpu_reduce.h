// SPDX-License-Identifier: Apache-2.0
// Reduction, scaling, conversion and non-finite check of arrays in host memory, in one pass, with the vector width
// chosen at run time.
#ifndef LIBDDP_DEVICE_CPU_REDUCE_H_
#define LIBDDP_DEVICE_CPU_REDUCE_H_

#include <cstddef>

#include "absl/status/statusor.h"
#include "ddp/types.h"

namespace ddp {

struct CpuReduceSpec {
  DType in = DType::kFloat32;
  DType out = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  double prescale = 1;   // floating-point types only
  double postscale = 1;  // floating-point types only; for kAvg without the division
  int average_over = 1;  // kAvg: the divisor; it joins postscale for floats, and is a truncating division for integers
  bool check_nonfinite = false;
};

// One reduction, prepared: choosing the kernel is done once, calling it is cheap. A value type; thread-safe.
class CpuReduce {
 public:
  CpuReduce() = default;

  // InvalidArgument where the types do not convert (float32, float16 and bfloat16 do to each other, every other type
  // only to itself), where scaling or the check is asked for on integers, or where average_over is below 1.
  static absl::StatusOr<CpuReduce> Create(const CpuReduceSpec& spec);

  // For each i < count and each k < outs:
  //   out[k][i] = post(op over r = 0 .. ins - 1, in this order, of pre(in[r][i]))
  // An output may be exactly an input, but not overlap one otherwise. float32 and 16-bit types accumulate in float32
  // and are scaled in it, then rounded once to nearest even; float64 accumulates in float64, integers in their own
  // type, wrapping. Pointers need the alignment of their element only. `ins` is at least 1. Returns true if
  // check_nonfinite is set and a result, as it is stored, is an infinity or a NaN. The same bits for every vector width
  // and every split of the range, except that a NaN may be any NaN.
  bool operator()(const void* const* in, int ins, void* const* out, int outs, size_t count) const {
    return kernel_(*this, in, ins, out, outs, count);
  }

  // What the kernels read.
  struct Scales {
    double pre64 = 1, post64 = 1;
    float pre32 = 1, post32 = 1;
    int divisor = 1;
    bool pre = false, post = false, check = false;
  };
  const Scales& scales() const { return scales_; }
  ReduceOp op() const { return op_; }

  using Kernel = bool (*)(const CpuReduce&, const void* const* in, int ins, void* const* out, int outs, size_t count);

 private:
  Kernel kernel_ = nullptr;
  Scales scales_;
  ReduceOp op_ = ReduceOp::kSum;
};

// The name of the instruction set that the kernels use here ("AVX3", "AVX2", ...), for logs.
const char* CpuReduceTarget();

}  // namespace ddp

#endif  // LIBDDP_DEVICE_CPU_REDUCE_H_
