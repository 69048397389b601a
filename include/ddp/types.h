// SPDX-License-Identifier: Apache-2.0
// Basic types that all other headers use: element types, devices, streams and borrowed buffers.
#ifndef DDP_TYPES_H_
#define DDP_TYPES_H_

#include <cstddef>
#include <cstdint>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

#if defined(__GNUC__)
#define DDP_EXPORT __attribute__((visibility("default")))
#else
#define DDP_EXPORT
#endif

namespace ddp {

// The type of one element. 16-bit floats are IEEE half (kFloat16) and bfloat16.
enum class DType : uint8_t { kFloat64, kFloat32, kFloat16, kBFloat16, kInt64, kInt32, kInt8, kUInt8 };

// How the elements of different ranks are combined.
//   - kAvg: the sum divided by the number of ranks; an integer quotient is truncated toward zero
//   - kMin, kMax: the result is NaN if any contribution is NaN (NCCL may drop it)
//
// Integer sums and products wrap around, like unsigned arithmetic.
enum class ReduceOp : uint8_t { kSum, kAvg, kMin, kMax, kProduct };

// A processor with its memory: the CPU, or one NVIDIA GPU.
struct Device {
  // What kind of processor it is.
  enum class Kind : uint8_t { kCpu, kCuda };

  Kind kind = Kind::kCpu;  // the CPU by default
  int16_t index = 0;       // which GPU, as CUDA numbers those that this process sees; 0 for the CPU

  friend bool operator==(const Device&, const Device&) = default;
};

// An execution stream of `device`, such as a cudaStream_t. It is borrowed: the caller owns it. Calls on CPU memory
// ignore it; leave it at its default there. Calls on GPU memory need a stream, or kNoStream.
struct Stream {
  Device device = {};      // whose stream it is
  void* native = nullptr;  // the cudaStream_t; null: CUDA's default stream

  friend constexpr bool operator==(const Stream&, const Stream&) = default;
};

// For calls on GPU memory that need no ordering with work on the GPU, because the host has waited for that work.
inline constexpr Stream kNoStream{{Device::Kind::kCpu, -1}};

// `count` elements of `dtype` at `data`. The memory is borrowed: the caller owns it, keeps it valid until the
// operation's Work is done, and does not change inputs until then. `data` may be null only if `count` is 0.
struct Buffer {
  void* data = nullptr;           // the first element
  size_t count = 0;               // elements
  DType dtype = DType::kFloat32;  // their type
  Device device = {};             // whose memory it is
};

// Several ranges that an operation treats as one concatenated array. All have the same dtype and device. Like a Span it
// refers to the caller's Buffers, so use it for arguments only; the library keeps none after a call.
class Buffers : public absl::Span<const Buffer> {
 public:
  using Span::Span;
  // Several ranges.
  Buffers(absl::Span<const Buffer> buffers) : Span(buffers) {}  // NOLINT(google-explicit-constructor)
  // One range.
  Buffers(const Buffer& buffer) : Span(&buffer, 1) {}  // NOLINT(google-explicit-constructor)
};

// The size of one element in bytes.
constexpr size_t SizeOf(DType dtype) {
  constexpr uint8_t kSizes[] = {8, 4, 2, 2, 8, 4, 1, 1};
  return kSizes[static_cast<uint8_t>(dtype)];
}

// The type's name: "float32", "bfloat16", "int8", ...
DDP_EXPORT absl::string_view Name(DType dtype);

// The operator's name: "sum", "avg", "min", "max", "prod".
DDP_EXPORT absl::string_view Name(ReduceOp op);

// True for float64, float32 and the 16-bit floats.
inline bool IsFloatingPoint(DType dtype) { return dtype <= DType::kBFloat16; }

}  // namespace ddp

#endif  // DDP_TYPES_H_
