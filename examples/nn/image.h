// How activations that are images lie in memory.
#ifndef EXAMPLES_NN_IMAGE_H_
#define EXAMPLES_NN_IMAGE_H_

namespace nn {

// One sample of an activation.
struct ImageShape {
  int channels = 1;
  int height = 1;
  int width = 1;

  friend bool operator==(const ImageShape&, const ImageShape&) = default;
};

enum class Layout {
  kPlain,   // channels, rows, columns: as PyTorch's contiguous tensors
  kNative,  // as this processor convolves fastest: in blocks of channels, padded with zeros to whole blocks
};

}  // namespace nn

#endif  // EXAMPLES_NN_IMAGE_H_
