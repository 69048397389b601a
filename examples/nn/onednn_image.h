// Convolution, normalisation and pooling on the CPU. Beside onednn.h the only file of the project (with its .cc) that
// knows oneDNN.
#ifndef EXAMPLES_NN_ONEDNN_IMAGE_H_
#define EXAMPLES_NN_ONEDNN_IMAGE_H_

#include <cstddef>
#include <memory>

#include "examples/nn/image.h"

namespace nn::onednn {

// What the operations of one model have in common, which is why they run one after the other: the engine, the native
// layout, and memory that none of them needs between two calls. Thread-safety: one thread at a time.
class Session {
 public:
  Session();
  ~Session();

  // How many channels lie side by side in the native layout of an image with so many, padding included; and how many
  // floats such an image takes.
  int Block(int channels) const;
  size_t Floats(const ImageShape& shape, Layout layout) const;

  // Memory for at least so many floats that keeps its contents until the next call with the same number, 0 or 1.
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

// Whether this processor multiplies bfloat16 (from AVX-512 on).
bool HasBfloat16();

struct ConvolutionOptions {
  bool bias = false;
  bool relu = false;
  // The factors of every product are rounded to bfloat16, and the products summed in float32: as autocast has it.
  bool bfloat16 = false;
};

// y = x * weight + bias for one number of images; weight is plain, [outputs, channels, kernel, kernel].
class Convolution {
 public:
  Convolution(SessionPtr session, const ConvolutionShape& shape, int rows, const ConvolutionOptions& options);
  ~Convolution();

  // max(0, .) with relu. `bias` is null without one.
  void Forward(const float* x, const float* weight, const float* bias, float* y);

  // From the gradient dy before the ReLU, of the last Forward; first by the weight, then by the input, or not. With
  // `accumulate` the results are added to what is there.
  void BackwardWeight(const float* x, const float* dy, float* dweight, float* dbias, bool accumulate);
  void BackwardInput(const float* dy, const float* weight, float* dx);

 private:
  struct Plan;
  std::unique_ptr<Plan> plan_;
};

// Batch normalisation of native images, perhaps with max(0, .) behind it, for one number of images.
class BatchNormalization {
 public:
  BatchNormalization(SessionPtr session, const ImageShape& shape, int rows, float eps, bool relu);
  ~BatchNormalization();

  // Also writes the batch's mean and (biased) variance, one number a channel.
  void ForwardTraining(const float* x, const float* scale, const float* shift, float* mean, float* variance, float* y);
  void ForwardEvaluation(const float* x, const float* scale, const float* shift, const float* mean,
                         const float* variance, float* y);
  // Of the last ForwardTraining, whose mean and variance these are. dx may be dy.
  void Backward(const float* x, const float* dy, const float* scale, const float* shift, const float* mean,
                const float* variance, float* dscale, float* dshift, float* dx);

 private:
  struct Plan;
  std::unique_ptr<Plan> plan_;
};

// The largest, or the mean, of each kernel x kernel pixels, `kernel` apart, of native images. What does not fill a
// window at the right and below is left out.
class Pooling {
 public:
  Pooling(SessionPtr session, PoolKind kind, const ImageShape& shape, int kernel_height, int kernel_width, int rows);
  ~Pooling();

  void Forward(const float* x, float* y);
  void Backward(const float* dy, float* dx);  // of the last Forward

 private:
  struct Plan;
  std::unique_ptr<Plan> plan_;
};

// Copies images from one layout to the other.
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
