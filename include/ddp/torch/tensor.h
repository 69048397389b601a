// SPDX-License-Identifier: Apache-2.0
// LibTorch's tensors, devices and streams as those of libddp.
#ifndef DDP_TORCH_TENSOR_H_
#define DDP_TORCH_TENSOR_H_

#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/types.h>

#include <cstddef>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "ddp/process_group.h"
#include "ddp/types.h"

namespace ddp {

// The Device of a CPU or a CUDA device. Other kinds (MPS, XPU, meta) are InvalidArgument.
inline absl::StatusOr<Device> DeviceOf(const torch::Device& device) {
  if (device.is_cpu()) return Device{};
  // A device without an index is the current one of this thread.
  if (device.is_cuda()) {
    const int index =
        device.has_index() ? device.index() : c10::impl::VirtualGuardImpl(device.type()).getDevice().index();
    return Device{Device::Kind::kCuda, static_cast<int16_t>(index)};
  }
  return absl::InvalidArgumentError(
      absl::StrCat("a tensor is on ", device.str(), ", but libddp works on cpu and cuda"));
}

// The stream on which LibTorch submits this thread's work to the device: what to pass to operations on its tensors as
// `after`, and to Work::BlockStream. On the CPU a stream that nothing looks at.
inline Stream CurrentStream(const torch::Device& device) {
  if (!device.is_cuda()) return Stream{};
  const c10::impl::VirtualGuardImpl guard(device.type());
  const c10::Stream stream = guard.getStream(device);
  return Stream{{Device::Kind::kCuda, static_cast<int16_t>(stream.device_index())},
                guard.getStreamNativeHandle(stream)};
}

namespace internal {

// False if libddp has no such type.
inline bool DTypeOf(torch::ScalarType type, DType* dtype) {
  switch (type) {
    case torch::kFloat64:
      return *dtype = DType::kFloat64, true;
    case torch::kFloat32:
      return *dtype = DType::kFloat32, true;
    case torch::kFloat16:
      return *dtype = DType::kFloat16, true;
    case torch::kBFloat16:
      return *dtype = DType::kBFloat16, true;
    case torch::kInt64:
      return *dtype = DType::kInt64, true;
    case torch::kInt32:
      return *dtype = DType::kInt32, true;
    case torch::kInt8:
      return *dtype = DType::kInt8, true;
    case torch::kUInt8:
      return *dtype = DType::kUInt8, true;
    default:
      return false;
  }
}

// The elements in the order of memory. `as_bytes`: a type that libddp does not have is so many bytes, which can be
// copied but not added.
inline absl::StatusOr<Buffer> BufferOf(const torch::Tensor& tensor, bool as_bytes) {
  if (tensor.layout() != torch::kStrided || !tensor.is_non_overlapping_and_dense()) {
    return absl::InvalidArgumentError("a tensor is sparse, or its elements overlap or leave gaps; pass its clone()");
  }
  const absl::StatusOr<Device> device = DeviceOf(tensor.device());
  if (!device.ok()) return device.status();
  Buffer buffer{tensor.data_ptr(), static_cast<size_t>(tensor.numel()), DType::kUInt8, *device};
  if (DTypeOf(tensor.scalar_type(), &buffer.dtype)) return buffer;
  if (!as_bytes) {
    return absl::InvalidArgumentError(absl::StrCat("a tensor of ", c10::toString(tensor.scalar_type()),
                                                   " has a type that libddp cannot reduce; convert it"));
  }
  buffer.count = tensor.nbytes();
  return buffer;
}

}  // namespace internal

// The memory of a tensor, for operations of a ProcessGroup. It is borrowed: the tensor must stay alive until the
// operation's Work is done (on a GPU, until Work::BlockStream has been called on the stream that the tensor is used
// on). The elements are in the order of memory: ranks must use the same memory format (strides).
//
//   const torch::Tensor x = ...;
//   const absl::StatusOr<ddp::Buffer> buffer = ddp::BufferOf(x);
//   if (!buffer.ok()) return buffer.status();
//   ddp::Work work = group.AllReduce(*buffer, *buffer, ddp::Avg(), ddp::CurrentStream(x.device()));
//   absl::Status status = work.BlockStream(ddp::CurrentStream(x.device()));  // on the CPU: waits
//
// InvalidArgument for types that libddp cannot reduce, tensors with gaps or overlaps (pass their clone()), sparse
// tensors, and devices other than CPU and CUDA.
inline absl::StatusOr<Buffer> BufferOf(const torch::Tensor& tensor) { return internal::BufferOf(tensor, false); }

}  // namespace ddp

#endif  // DDP_TORCH_TENSOR_H_
