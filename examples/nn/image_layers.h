// SPDX-License-Identifier: Apache-2.0
// Creates the layers of convolutional models on any device.
#ifndef EXAMPLES_NN_IMAGE_LAYERS_H_
#define EXAMPLES_NN_IMAGE_LAYERS_H_

#include <cstdint>
#include <memory>
#include <stdexcept>

#include "examples/nn/image.h"
#include "examples/nn/layer.h"
#include "examples/nn/linear.h"

namespace nn {

struct Conv2dOptions {
  ImageShape in;
  int outputs = 1;
  int kernel = 3;
  int stride = 1;
  int padding = 0;  // zeros on each side
  bool bias = true;
  Activation activation = Activation::kNone;
  Layout in_layout = Layout::kNative;  // plain for a model's input; the output is always native

  ImageShape out() const {
    return {outputs, (in.height + 2 * padding - kernel) / stride + 1, (in.width + 2 * padding - kernel) / stride + 1};
  }
};

struct Pool2dOptions {
  PoolKind kind = PoolKind::kMax;
  ImageShape in;
  int height = 2, width = 2;  // size of a window
  Activation activation = Activation::kNone;
  // For maximum pooling: distance between windows (0: they are adjacent), and pixels outside of the image on each side,
  // at most half a window. They never are the maximum.
  int stride = 0;
  int padding = 0;

  ImageShape out() const {
    const auto count = [this](int size, int window) {
      return (size + 2 * padding - window) / (stride == 0 ? window : stride) + 1;
    };
    return {in.channels, count(in.height, height), count(in.width, width)};
  }
};

// Constants of batch normalisation, as in PyTorch: added to the variance; share by which running statistics move.
constexpr float kBatchNormEpsilon = 1e-5f;
constexpr float kBatchNormMomentum = 0.1f;

// Throws std::invalid_argument if a batch of `rows` images has one value per channel: it has no variance.
inline void CheckBatchNormCanTrain(int rows, const ImageShape& shape) {
  if (Pixels(rows, shape) > 1) return;
  throw std::invalid_argument(
      "batch normalisation cannot train on one value per channel, a batch of one image of 1 x 1 pixels: give a larger "
      "batch or larger images");
}

struct BasicBlockOptions {
  ImageShape in;
  int outputs = 1;
  int stride = 1;

  ImageShape out() const { return {outputs, (in.height - 1) / stride + 1, (in.width - 1) / stride + 1}; }
};

struct BottleneckOptions {
  ImageShape in;
  int width = 1;  // channels of the inner convolutions; the output has four times as many
  int stride = 1;

  ImageShape out() const { return {4 * width, (in.height - 1) / stride + 1, (in.width - 1) / stride + 1}; }
  // Whether the shortcut is a convolution, because x does not have the shape of y.
  bool projected() const { return !(in == out()); }
};

// Creates the layers of one model for batches of one size. The comments of the CPU classes with the same names say what
// each layer computes. Between layers, images have the device's native layout. The object may be destroyed when the
// model has been created.
class ImageLayers {
 public:
  virtual ~ImageLayers() = default;

  virtual std::unique_ptr<Layer> MakeConv2d(const Conv2dOptions& options) = 0;
  virtual std::unique_ptr<Layer> MakeBatchNorm2d(const ImageShape& shape, Activation activation) = 0;
  virtual std::unique_ptr<Layer> MakeBasicBlock(const BasicBlockOptions& options) = 0;
  virtual std::unique_ptr<Layer> MakeBottleneck(const BottleneckOptions& options) = 0;
  virtual std::unique_ptr<Layer> MakePool2d(const Pool2dOptions& options) = 0;
  virtual std::unique_ptr<Layer> MakeFlatten(const ImageShape& shape) = 0;
  // `size`: elements per sample.
  virtual std::unique_ptr<Layer> MakeDropout(int size, double p, uint64_t seed) = 0;
};

}  // namespace nn

#endif  // EXAMPLES_NN_IMAGE_LAYERS_H_
