// What the layers above do to arrays by themselves: copy, convert, scale, zero, look for what is not finite, measure.
// The one place that asks on which device memory lies.
#ifndef LIBDDP_DEVICE_BUFFER_OPS_H_
#define LIBDDP_DEVICE_BUFFER_OPS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ddp/types.h"

namespace ddp {

// to = scale * from, element by element, converting between float32 and the 16-bit floats with one rounding. Equal
// total counts; `to` may be `from`. A scale of 1 between equal types moves bits. InvalidArgument for types that do not
// convert.
absl::Status CopyScaled(Buffers from, Buffers to, double scale, Stream stream);

void Zero(Buffers buffers, Stream stream);

// Stores 1 in *nonfinite if an element is an infinity or a NaN; otherwise leaves it alone. Floating-point types.
absl::Status CheckFinite(Buffers buffers, uint32_t* nonfinite, Stream stream);

enum class NormKind : uint8_t { kL1, kL2, kMax };

// The norm of all elements together, computed in float64 in an order that depends on the counts alone: equal inputs
// give equal bits on every processor. NaN and infinities come out as such. Floating-point types, host memory.
double Norm(Buffers buffers, NormKind kind);

}  // namespace ddp

#endif  // LIBDDP_DEVICE_BUFFER_OPS_H_
