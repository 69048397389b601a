// How activations that are images lie in memory.
#ifndef EXAMPLES_NN_IMAGE_H_
#define EXAMPLES_NN_IMAGE_H_

#include <cstddef>

namespace nn {

// One sample of an activation.
struct ImageShape {
  int channels = 1;
  int height = 1;
  int width = 1;

  // Not defaulted: nvcc reads it as C++17.
  friend bool operator==(const ImageShape& a, const ImageShape& b) {
    return a.channels == b.channels && a.height == b.height && a.width == b.width;
  }
};

inline size_t Pixels(int rows, const ImageShape& shape) {
  return static_cast<size_t>(rows) * static_cast<size_t>(shape.height * shape.width);
}

enum class Layout {
  kPlain,   // channels, rows, columns: as PyTorch's contiguous tensors; float32
  kNative,  // as the device convolves fastest. CPU: in blocks of channels, padded with zeros to whole blocks. GPU:
            // rows, columns, channels
};

enum class PoolKind { kMax, kAverage };

}  // namespace nn

#endif  // EXAMPLES_NN_IMAGE_H_
