// SPDX-License-Identifier: Apache-2.0
// What the layers of convolutional models compute, by plain loops in double precision over plain images, one after the
// other.
#ifndef TESTS_SUPPORT_CNN_REFERENCE_H_
#define TESTS_SUPPORT_CNN_REFERENCE_H_

#include <vector>

#include "examples/nn/image.h"

namespace nn::testing {

using Numbers = std::vector<double>;

Numbers Convolve(const Numbers& x, int rows, const ImageShape& in, const Numbers& weight, const Numbers& bias,
                 int outputs, int kernel, int stride, int padding);
Numbers Rectify(Numbers y);
Numbers Normalize(const Numbers& x, int rows, const ImageShape& s, const Numbers& scale, const Numbers& shift);
// Windows every `stride` pixels; pixels outside of the image do not count.
Numbers PoolMax(const Numbers& x, int rows, const ImageShape& in, int kernel, int stride, int padding);
// Adjacent windows.
Numbers PoolImages(const Numbers& x, int rows, const ImageShape& in, int kernel_height, int kernel_width, bool max);
Numbers ShortcutA(const Numbers& x, int rows, const ImageShape& in, const ImageShape& out, int stride);

}  // namespace nn::testing

#endif  // TESTS_SUPPORT_CNN_REFERENCE_H_
