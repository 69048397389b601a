// SPDX-License-Identifier: Apache-2.0
// Decides which operations run in 16-bit floats (automatic mixed precision).
#ifndef DDP_AUTOCAST_H_
#define DDP_AUTOCAST_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "ddp/process_group.h"
#include "ddp/types.h"

namespace ddp {

// The operation that a layer is about to compute.
enum class AutocastOp : uint8_t {
  // Run in the 16-bit type: sums of products, which tensor cores accumulate in float32.
  kConvolution,
  kLinear,
  kMatmul,
  // Run in float32, because they need its range or precision.
  kCrossEntropy,
  kNll,
  kLoss,  // any other loss
  // The same on CUDA; on the CPU they run in the type of the first input.
  kSoftmax,
  kLogSoftmax,
  kLayerNormStatistics,
  kGroupNormStatistics,
  kExp,
  kLog,
  kPow,
  kSum,
  kNorm,
  // Run in the widest type of the inputs.
  kAdd,
  kConcat,
  kDot,  // on the CPU in the type of the first input
  // Run in the type of the first input.
  kBatchNorm,  // statistics are computed in float32
  kRelu,
  kPool,
  kOther,
};

// A scope of mixed precision. While the object lives, layers of this thread that call TypeFor use mixed precision on
// devices of the given kind. Scopes nest, and the innermost one applies. The rules are those of torch.autocast for that
// kind of device.
//
//   {
//     ddp::Autocast autocast(ddp::Device::Kind::kCpu);         // bfloat16
//     ... forward ...
//   }
//   ... backward: each layer stores the type that its forward ran in, and uses it here ...
//
// In a layer's forward:
//
//   const ddp::DType dtype = ddp::Autocast::TypeFor(ddp::AutocastOp::kLinear, x.device.kind, {x.dtype, weight.dtype});
//   auto w = ddp::Autocast::CastWeight(weight, dtype, stream);  // keep until this layer's backward is done
//
// float16 needs a GradScaler. bfloat16 does not, because it has float32's range.
//
// Thread-safety: each thread has its own policy and cache.
class DDP_EXPORT Autocast {
 public:
  // float16 on CUDA, bfloat16 on the CPU.
  static DType DefaultType(Device::Kind kind);

  // With the default type.
  explicit Autocast(Device::Kind kind) : Autocast(kind, DefaultType(kind)) {}
  // `dtype` is kFloat16 or kBFloat16. Any other type turns mixed precision off in this scope; any other than kFloat32
  // also logs a warning.
  Autocast(Device::Kind kind, DType dtype);
  ~Autocast();
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

  // True if mixed precision is on for this kind of device on this thread.
  static bool enabled(Device::Kind kind);
  static DType dtype(Device::Kind kind);  // its 16-bit type; DefaultType(kind) if it is off

  // Returns the type in which to run `op` on inputs of these types. Requires at least one input.
  //   - float64 is never converted to a narrower type.
  //   - Types that are not floating-point are ignored. If no input is floating-point: the type of the first input.
  //   - If mixed precision is off: the widest type for kAdd, kConcat and (on CUDA) kDot, the type of the first input
  //     otherwise.
  static DType TypeFor(AutocastOp op, Device::Kind kind, absl::Span<const DType> inputs);

  // Returns `weight` converted to another floating-point type. Within a scope it is converted once: until the outermost
  // scope ends, all calls return the same copy, even if the weight has changed meanwhile. The memory lives until the
  // last copy of the returned Allocation is destroyed; keep them on this thread. A weight that already has the type is
  // not copied and must outlive the result.
  //
  // A weight on a GPU is converted on `stream`, one of this GPU; use the copy on that stream, or after it. With
  // kNoStream the copy is complete when the call returns.
  //
  // Errors: InvalidArgument for types that cannot be converted, and for a weight on a GPU without a stream;
  // Unimplemented for a device that this build has no kernels for.
  static absl::StatusOr<Allocation> CastWeight(const Buffer& weight, DType dtype, Stream stream = {});

 private:
  Device::Kind kind_;
  DType former_dtype_;
  bool former_enabled_;
};

}  // namespace ddp

#endif  // DDP_AUTOCAST_H_
