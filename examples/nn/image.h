// SPDX-License-Identifier: Apache-2.0
// The memory layout of activations that are images.
#ifndef EXAMPLES_NN_IMAGE_H_
#define EXAMPLES_NN_IMAGE_H_

#include <cstddef>

namespace nn {

// The shape of one sample of an activation.
struct ImageShape {
  int channels = 1;
  int height = 1;
  int width = 1;

  // Not defaulted, because nvcc compiles this as C++17.
  friend bool operator==(const ImageShape& a, const ImageShape& b) {
    return a.channels == b.channels && a.height == b.height && a.width == b.width;
  }
};

inline size_t Pixels(int rows, const ImageShape& shape) {
  return static_cast<size_t>(rows) * static_cast<size_t>(shape.height * shape.width);
}

enum class Layout {
  kPlain,   // channels, rows, columns, like PyTorch's contiguous tensors; float32
  kNative,  // the fastest layout for convolutions. CPU: blocks of channels, padded with zeros to whole blocks. GPU:
            // rows, columns, channels
};

enum class PoolKind { kMax, kAverage };

}  // namespace nn

#endif  // EXAMPLES_NN_IMAGE_H_
