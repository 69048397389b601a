// The plain values that every other header speaks of: element types, devices, streams and borrowed buffers.
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

// How elements of different ranks are combined.
//   kAvg     the sum divided by the number of ranks; for integers the quotient is truncated toward zero
//   kMin, kMax  a NaN in any contribution gives NaN
// Integer sums and products wrap around, as unsigned arithmetic does.
enum class ReduceOp : uint8_t { kSum, kAvg, kMin, kMax, kProduct };

struct Device {
  enum class Kind : uint8_t { kCpu, kCuda } kind = Kind::kCpu;
  int16_t index = 0;

  friend bool operator==(const Device&, const Device&) = default;
};

// An execution stream of `device`, borrowed. On CPU it has no meaning and may be left at its default.
struct Stream {
  Device device;
  void* native = nullptr;
};

// `count` elements of `dtype` at `data`, borrowed: the memory belongs to the caller and must stay valid, and for inputs
// unchanged, until the Work of the operation is done. `data` may be null only if `count` is 0.
struct Buffer {
  void* data = nullptr;
  size_t count = 0;
  DType dtype = DType::kFloat32;
  Device device;
};

// Several ranges that an operation treats as one, end to end. All have the same dtype and device.
using Buffers = absl::Span<const Buffer>;

// Bytes of one element.
constexpr size_t SizeOf(DType dtype) {
  constexpr uint8_t kSizes[] = {8, 4, 2, 2, 8, 4, 1, 1};
  return kSizes[static_cast<uint8_t>(dtype)];
}

// "float32", "bfloat16", "int8", ...
DDP_EXPORT absl::string_view Name(DType dtype);

// "sum", "avg", "min", "max", "prod".
DDP_EXPORT absl::string_view Name(ReduceOp op);

inline bool IsFloatingPoint(DType dtype) { return dtype <= DType::kBFloat16; }

}  // namespace ddp

#endif  // DDP_TYPES_H_
