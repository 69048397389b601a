// SPDX-License-Identifier: Apache-2.0
// What the operations do to tensors before and after a call of libddp.
#ifndef DDP_PYTHON_SRC_TENSORS_H_
#define DDP_PYTHON_SRC_TENSORS_H_

#include <ATen/ATen.h>

#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

#include "ddp/process_group.h"
#include "ddp/torch/tensor.h"
#include "ddp/types.h"

namespace ddp_torch {

// Throws ValueError.
void Require(bool condition, const std::string& message);
void RequireDense(const std::vector<at::Tensor>& tensors, const char* title);

// `tensor` if its elements follow one another, else an empty one of the same size, or, with `copy`, its copy.
at::Tensor Contiguous(const at::Tensor& tensor, bool copy);

// The memory of contiguous tensors. `moves`: a type that libddp does not know counts as bytes, and so do tensors of
// different types.
std::vector<ddp::Buffer> BuffersOf(const std::vector<at::Tensor>& tensors, bool moves);

// How a type that libddp does not add is added: as the elements of another type.
struct Arithmetic {
  ddp::ReduceOptions options = {};
  bool bitwise = false;
  std::optional<at::ScalarType> through = {};  // convert to this type and back
  bool flip = false;                           // and flip the top bit there, so that unsigned numbers keep their order
};
Arithmetic ArithmeticOf(const c10d::ReduceOp& op, at::ScalarType type, const char* title);

// A view that libddp can reduce: of a complex tensor its real and imaginary parts, of a bool tensor its bytes.
at::Tensor AsNumbers(const at::Tensor& tensor);

}  // namespace ddp_torch

#endif  // DDP_PYTHON_SRC_TENSORS_H_
