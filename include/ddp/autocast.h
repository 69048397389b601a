// Which operations run in 16-bit floats, and which do not.
#ifndef DDP_AUTOCAST_H_
#define DDP_AUTOCAST_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "ddp/process_group.h"
#include "ddp/types.h"

namespace ddp {

// What a layer is about to compute.
enum class AutocastOp : uint8_t {
  // In the lower precision: sums of products, which tensor cores accumulate in float32.
  kConvolution,
  kLinear,
  kMatmul,
  // In float32: what needs the range or the digits.
  kSoftmax,
  kLogSoftmax,
  kCrossEntropy,
  kNll,
  kLoss,  // any other
  kLayerNormStatistics,
  kGroupNormStatistics,
  kExp,
  kLog,
  kPow,
  kSum,
  kNorm,
  // In the widest type among the inputs.
  kAdd,
  kConcat,
  kDot,
  // In the type of the first input.
  kBatchNorm,  // its statistics in float32
  kRelu,
  kPool,
  kOther,
};

// While one lives, layers that ask run in mixed precision on devices of that kind, on this thread. Scopes nest; the
// innermost counts. The rules are those of torch.autocast.
//
//   {
//     ddp::Autocast autocast(ddp::Device::Kind::kCpu);         // bfloat16
//     ... forward ...
//   }
//   ... backward: each layer in the type that its forward ran in, which it keeps ...
//
// and in a layer's forward:
//
//   const ddp::DType dtype = ddp::Autocast::TypeFor(ddp::AutocastOp::kLinear, x.device.kind, {x.dtype, weight.dtype});
//   auto w = ddp::Autocast::CastWeight(weight, dtype);         // kept until this layer's backward is done
//
// float16 needs a GradScaler, bfloat16, which has float32's range, does not.
//
// Thread-safety: each thread has a policy and a cache of its own.
class DDP_EXPORT Autocast {
 public:
  // float16 on CUDA, bfloat16 on the CPU.
  static DType DefaultType(Device::Kind kind);

  explicit Autocast(Device::Kind kind) : Autocast(kind, DefaultType(kind)) {}
  // kFloat16 or kBFloat16; any other type turns mixed precision off in this scope (and is warned of, unless it is
  // kFloat32).
  Autocast(Device::Kind kind, DType dtype);
  ~Autocast();
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

  // Whether a scope of this thread has turned it on, and for which type.
  static bool enabled(Device::Kind kind);
  static DType dtype(Device::Kind kind);  // DefaultType where it is off

  // The type to run `op` in, on inputs of these types (at least one). float64 is never made narrower, and types that
  // are not floating-point do not take part: with none but those it is the first input's. Where mixed precision is off
  // it is the widest input's for the operations that promote, and the first input's for all others.
  static DType TypeFor(AutocastOp op, Device::Kind kind, absl::Span<const DType> inputs);

  // `weight` in another floating-point type. Within a scope it is converted once, and the same copy handed out until
  // the outermost scope ends: a weight that changes within it is not converted again. The memory lives as long as a
  // copy of the result does, which stays on this thread. A weight that has the type already is not copied, and must
  // outlive the result. InvalidArgument: types that do not convert. Unimplemented: a device that this build has no
  // kernels for.
  static absl::StatusOr<Allocation> CastWeight(const Buffer& weight, DType dtype, Stream stream = {});

 private:
  Device::Kind kind_;
  DType former_dtype_;
  bool former_enabled_;
};

}  // namespace ddp

#endif  // DDP_AUTOCAST_H_
