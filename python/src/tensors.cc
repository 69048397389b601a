// SPDX-License-Identifier: Apache-2.0
#include "tensors.h"

#include <c10/util/Exception.h>

#include <string>

#include "absl/strings/str_cat.h"

namespace ddp_torch {

using c10d::ReduceOp;

void Require(bool condition, const std::string& message) {
  if (!condition) C10_THROW_ERROR(ValueError, message);
}

void RequireDense(const std::vector<at::Tensor>& tensors, const char* title) {
  Require(!tensors.empty(), absl::StrCat(title, ": requires non-empty tensor list"));
  for (const at::Tensor& tensor : tensors) {
    Require(tensor.layout() == at::kStrided, absl::StrCat(title, ": a tensor is sparse; pass to_dense() of it"));
    Require(tensor.device() == tensors[0].device(), absl::StrCat(title, ": tensors are on different devices"));
    Require(tensor.scalar_type() == tensors[0].scalar_type(),
            absl::StrCat(title, ": invalid tensor type: tensors have different types"));
  }
}

at::Tensor Contiguous(const at::Tensor& tensor, bool copy) {
  if (tensor.is_contiguous() && !tensor.is_neg() && !tensor.is_conj()) return tensor;
  return copy ? tensor.clone(at::MemoryFormat::Contiguous) : at::empty(tensor.sizes(), tensor.options());
}

std::vector<ddp::Buffer> BuffersOf(const std::vector<at::Tensor>& tensors, bool moves) {
  std::vector<ddp::Buffer> buffers;
  buffers.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    absl::StatusOr<ddp::Buffer> buffer = ddp::internal::BufferOf(tensor, moves);
    Require(buffer.ok(), std::string(buffer.status().message()));
    buffers.push_back(*buffer);
  }
  for (size_t i = 0; moves && i < buffers.size(); ++i) {
    if (buffers[i].dtype == buffers[0].dtype) continue;
    for (ddp::Buffer& buffer : buffers) {
      buffer.count *= ddp::SizeOf(buffer.dtype);
      buffer.dtype = ddp::DType::kUInt8;
    }
    break;
  }
  return buffers;
}

Arithmetic ArithmeticOf(const ReduceOp& op, at::ScalarType type, const char* title) {
  Arithmetic result;
  const bool integral = at::isIntegralType(type, /*includeBool=*/true);
  ddp::DType known;
  if (type != at::kBool && !at::isComplexType(type) && !ddp::internal::DTypeOf(type, &known)) {
    result.through = integral ? at::kLong : at::kFloat;
  }
  switch (op.op_) {
    case ReduceOp::SUM:  // of bool: whether any is true
      result.options.op = type == at::kBool ? ddp::ReduceOp::kMax : ddp::ReduceOp::kSum;
      return result;
    case ReduceOp::AVG:
      Require(type != at::kBool && type != at::kUInt64,
              absl::StrCat(title, ": tensors of bool and uint64 cannot be averaged; convert the tensor"));
      result.options.op = ddp::ReduceOp::kAvg;
      return result;
    case ReduceOp::PRODUCT:
      result.options.op = type == at::kBool ? ddp::ReduceOp::kMin : ddp::ReduceOp::kProduct;
      break;
    case ReduceOp::MIN:
      result.options.op = ddp::ReduceOp::kMin;
      result.flip = type == at::kUInt64;
      break;
    case ReduceOp::MAX:
      result.options.op = ddp::ReduceOp::kMax;
      result.flip = type == at::kUInt64;
      break;
    case ReduceOp::BAND:
    case ReduceOp::BOR:
    case ReduceOp::BXOR:
      Require(integral,
              absl::StrCat(title, ": cannot use a bitwise ReduceOp with non-integral dtype; convert the tensor"));
      result.bitwise = true;
      return result;
    default:
      Require(false, absl::StrCat(title, ": ReduceOp.PREMUL_SUM is not supported; multiply the tensor before"));
  }
  Require(!at::isComplexType(type), absl::StrCat(title, ": complex tensors can only be added or averaged"));
  return result;
}

at::Tensor AsNumbers(const at::Tensor& tensor) {
  if (tensor.is_complex()) return at::view_as_real(tensor);
  return tensor.scalar_type() == at::kBool ? tensor.view(at::kByte) : tensor;
}

}  // namespace ddp_torch
