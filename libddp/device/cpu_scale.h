// SPDX-License-Identifier: Apache-2.0
// Scaling of arrays in host memory in place, with the search for what is not finite in the same pass, and the search
// alone. The vector width is chosen at run time.
#ifndef LIBDDP_DEVICE_CPU_SCALE_H_
#define LIBDDP_DEVICE_CPU_SCALE_H_

#include <cstddef>

#include "ddp/types.h"

namespace ddp {

// For i < count: data[i] = data[i] * factor. Returns whether any product, as it is stored, is an infinity or a NaN.
// float64 is multiplied in float64, the others in float32, then rounded once to nearest even.
// `dtype` is a floating-point type; `data` needs the alignment of an element. The same bits for every vector width,
// except that a NaN may be any NaN. Thread-safe.
bool CpuScale(DType dtype, void* data, size_t count, float factor);

// Whether any data[i] is an infinity or a NaN. Reads only; otherwise as above.
bool CpuHasNonfinite(DType dtype, const void* data, size_t count);

}  // namespace ddp

#endif  // LIBDDP_DEVICE_CPU_SCALE_H_
