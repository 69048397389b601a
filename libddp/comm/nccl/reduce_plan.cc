// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/nccl/reduce_plan.h"

#include <cmath>

namespace ddp {
namespace {

using Op = ReducePlan::Op;

// A sum or an average of floating-point numbers of one type: which factors go where?
void PlanSum(ReducePlan* plan, bool avg, double prescale, double postscale, const ReduceTransport& transport) {
  const bool wide = SizeOf(plan->type) >= 4;
  const double share = avg ? 1.0 / transport.ranks : 1.0;
  const double after = postscale * share;
  plan->op = Op::kSum;
  if (prescale == 1 && transport.path == ReducePath::kSymmetric) {
    if (avg && postscale == 1 && transport.avg_keeps_symmetric) {
      plan->op = Op::kAvg;
    } else {
      plan->after_scale = after;
    }
    return;
  }
  const bool plain_avg = avg && prescale == 1 && postscale == 1;
  if (plain_avg && transport.path != ReducePath::kNotSymmetric) {
    plan->op = Op::kAvg;
    return;
  }
  if (wide || plain_avg) {
    plan->factor = prescale * after;
  } else {
    plan->factor = prescale;
    plan->after_scale = after;
  }
  // A bare sum would use the kernels that are slower here.
  if (plan->factor != 1 || transport.path == ReducePath::kNotSymmetric) plan->op = Op::kPremultiplied;
}

// The transport takes a factor in the type, and float16 has neither very small numbers nor large ones.
bool IsFactor(double factor, DType type) {
  return type != DType::kFloat16 || factor == 0 || (std::abs(factor) >= 0x1p-14 && std::abs(factor) <= 65504);
}

}  // namespace

ReducePlan PlanReduce(DType in, DType out, const ReduceOptions& options, const ReduceTransport& transport) {
  ReducePlan plan;
  double prescale = options.prescale;
  // In the wider of the two types; float16 and bfloat16 meet in float32.
  plan.type = in == out ? in : DType::kFloat32;
  if (in != plan.type || !IsFactor(prescale, plan.type)) {
    plan.convert_in = true;
    plan.before_scale = prescale;
    prescale = 1;
  }
  plan.convert_out = out != plan.type;
  if (options.op == ReduceOp::kSum || options.op == ReduceOp::kAvg) {
    if (IsFloatingPoint(plan.type)) {
      PlanSum(&plan, options.op == ReduceOp::kAvg, prescale, options.postscale, transport);
    } else {
      plan.op = options.op == ReduceOp::kAvg ? Op::kAvg : Op::kSum;
    }
    return plan;
  }
  plan.op = options.op == ReduceOp::kMin ? Op::kMin : options.op == ReduceOp::kMax ? Op::kMax : Op::kProduct;
  if (prescale != 1) {
    plan.convert_in = true;
    plan.before_scale = prescale;
  }
  plan.after_scale = options.postscale;
  return plan;
}

}  // namespace ddp
