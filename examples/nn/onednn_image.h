// SPDX-License-Identifier: Apache-2.0
// Convolution, normalisation and pooling on the CPU. Together with onednn.h this is the only interface to oneDNN.
#ifndef EXAMPLES_NN_ONEDNN_IMAGE_H_
#define EXAMPLES_NN_ONEDNN_IMAGE_H_

#include <cstddef>
#include <memory>

#include "examples/nn/image.h"

namespace nn::onednn {

// The state that the operations of one model share: the engine, the native layout, and temporary memory. Because they
// share it, they run one after the other. Thread-safety: one thread at a time.
class Session {
 public:
  Session();
  ~Session();

  // Block: the number of adjacent channels, including padding, in the native layout of an image with `channels`
  // channels. Floats: the number of floats of such an image.
  int Block(int channels) const;
  size_t Floats(const ImageShape& shape, Layout layout) const;

  // Returns memory for at least `floats` floats. The contents stay until the next call with the same `which`, 0 or 1.
  float* Temporary(int which, size_t floats);

  struct Impl;
  Impl& impl() { return *impl_; }

 private:
  std::unique_ptr<Impl> impl_;
};

using SessionPtr = std::shared_ptr<Session>;

struct ConvolutionShape {
  ImageShape in;
  int outputs = 1;
  int kernel = 1;
  int stride = 1;
  int padding = 0;
  Layout in_layout = Layout::kNative;  // the output is always native

  ImageShape out() const;
};

// True if this processor can multiply bfloat16 (AVX-512 or newer).
bool HasBfloat16();

struct ConvolutionOptions {
  bool bias = false;
  // Rounds the factors of products to bfloat16 and adds the products in float32, as autocast requires.
  bool bfloat16 = false;
};

// Computes y = x * weight + bias for a fixed number of images. `weight` is plain: [outputs, channels, kernel, kernel].
class Convolution {
 public:
  Convolution(SessionPtr session, const ConvolutionShape& shape, int rows, const ConvolutionOptions& options);
  ~Convolution();

  // `bias` is null if there is none.
  void Forward(const float* x, const float* weight, const float* bias, float* y);

  // Gradients of the last Forward; dy is the gradient before the ReLU. Call BackwardWeight first, then optionally
  // BackwardInput. With `accumulate` the results are added to the old contents.
  void BackwardWeight(const float* x, const float* dy, float* dweight, float* dbias, bool accumulate);
  void BackwardInput(const float* dy, const float* weight, float* dx);

 private:
  struct Plan;
  std::unique_ptr<Plan> plan_;
};

// Batch normalisation of native images for a fixed number of images. With `relu`, training applies max(0, .), forward
// and backward, by oneDNN's fused ReLU, which turns NaN into 0. Evaluation applies no ReLU.
class BatchNormalization {
 public:
  BatchNormalization(SessionPtr session, const ImageShape& shape, int rows, float eps, bool relu);
  ~BatchNormalization();

  // Also writes the batch's mean and (biased) variance, one number per channel.
  void ForwardTraining(const float* x, const float* scale, const float* shift, float* mean, float* variance, float* y);
  void ForwardEvaluation(const float* x, const float* scale, const float* shift, const float* mean,
                         const float* variance, float* y);
  // Gradients of the last ForwardTraining, with its mean and variance. dx may be dy.
  void Backward(const float* x, const float* dy, const float* scale, const float* shift, const float* mean,
                const float* variance, float* dscale, float* dshift, float* dx);

 private:
  struct Plan;
  std::unique_ptr<Plan> plan_;
};

// The mean of adjacent windows of kernel_height x kernel_width pixels of native images. Pixels at the right and the
// bottom that do not fill a window are ignored. For the maximum see MaxPool in kernels.h: oneDNN's ignores NaN.
class AveragePooling {
 public:
  AveragePooling(SessionPtr session, const ImageShape& shape, int kernel_height, int kernel_width, int rows);
  ~AveragePooling();

  void Forward(const float* x, float* y);
  void Backward(const float* dy, float* dx);

 private:
  struct Plan;
  std::unique_ptr<Plan> plan_;
};

// Copies images from one layout to another.
class Relayout {
 public:
  Relayout(SessionPtr session, const ImageShape& shape, int rows, Layout from, Layout to);
  ~Relayout();

  void Run(const float* x, float* y);

 private:
  struct Plan;
  std::unique_ptr<Plan> plan_;
};

}  // namespace nn::onednn

#endif  // EXAMPLES_NN_ONEDNN_IMAGE_H_
