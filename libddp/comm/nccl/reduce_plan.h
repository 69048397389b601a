// SPDX-License-Identifier: Apache-2.0
// How a reduction with scales, conversions and a check is done by a transport that only adds: what goes before it, what
// it does itself, and what comes after. A pure function.
#ifndef LIBDDP_COMM_NCCL_REDUCE_PLAN_H_
#define LIBDDP_COMM_NCCL_REDUCE_PLAN_H_

#include "ddp/process_group.h"
#include "ddp/types.h"

namespace ddp {

struct ReducePlan {
  // Before: work = convert(before_scale * in), if `convert_in`; else the input itself is reduced.
  bool convert_in = false;
  double before_scale = 1;
  // The reduction, in this type. With kPremultiplied every contribution is multiplied by `factor` first.
  enum class Op { kSum, kAvg, kMin, kMax, kProduct, kPremultiplied };
  Op op = Op::kSum;
  double factor = 1;
  DType type = DType::kFloat32;
  // After: out = convert(after_scale * work), if `convert_out` or the scale is not 1, with the check if asked for.
  bool convert_out = false;
  double after_scale = 1;

  friend bool operator==(const ReducePlan&, const ReducePlan&) = default;
};

// What the transport does best with the memory at hand.
enum class ReducePath {
  kPlain,         // ordinary memory: averages are free
  kSymmetric,     // registered memory, and its kernels are faster here: a sum uses them, a premultiplied sum does not
  kNotSymmetric,  // registered memory, but the plain kernels are faster here: must be a premultiplied sum
};

struct ReduceTransport {
  int ranks = 1;
  ReducePath path = ReducePath::kPlain;
  bool avg_keeps_symmetric = false;  // an average, too, may be asked of the kernels for registered memory
};

// `in` and `out` convert (see Transform), and integers are neither scaled nor checked: checked by the caller.
//
// 16-bit floats are premultiplied by the caller's prescale only: what is divided before it is added could vanish. Wide
// floats take all factors at once. A prescale that float16 cannot hold is multiplied in before.
ReducePlan PlanReduce(DType in, DType out, const ReduceOptions& options, const ReduceTransport& transport);

}  // namespace ddp

#endif  // LIBDDP_COMM_NCCL_REDUCE_PLAN_H_
