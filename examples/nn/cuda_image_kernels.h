// The passes of the GPU's convolutional layers that cuDNN is not asked for, launched. All are asynchronous on `stream`.
//
// Images are "native": rows, columns, channels, without gaps; `element` is the type of their numbers. Their channels
// are a multiple of 16 bytes. `pixels` counts those of all images of a batch.
#ifndef EXAMPLES_NN_CUDA_IMAGE_KERNELS_H_
#define EXAMPLES_NN_CUDA_IMAGE_KERNELS_H_

#include <cuda_runtime_api.h>

#include <cstddef>

#include "examples/nn/dropout_hash.h"
#include "examples/nn/element.h"
#include "examples/nn/image.h"

namespace nn::cuda {

// A model's input: plain float32 images to native ones of `channels`, of which those that x lacks are 0.
cudaError_t PackImages(Element element, const float* x, int rows, const ImageShape& shape, int channels, void* y,
                       cudaStream_t stream);
// A convolution's weight [outputs, channels, area] in float32 to [outputs, area, padded], and its gradient back.
struct WeightShape {
  int outputs, channels, area, padded;

  size_t count() const { return static_cast<size_t>(outputs) * static_cast<size_t>(area * channels); }
  size_t packed_count() const { return static_cast<size_t>(outputs) * static_cast<size_t>(area * padded); }
};
cudaError_t PackWeight(Element element, const float* weight, const WeightShape& shape, void* packed,
                       cudaStream_t stream);
cudaError_t UnpackGrad(Element element, const void* packed, const WeightShape& shape, bool accumulate, float* grad,
                       cudaStream_t stream);

// y = max(0, y + bias), or without the max(0, .).
cudaError_t AddBias(Element element, void* y, size_t pixels, int channels, const float* bias, bool relu,
                    cudaStream_t stream);

// Images to plain rows, and back.
cudaError_t Flatten(Element element, const void* x, int rows, const ImageShape& shape, void* y, cudaStream_t stream);
cudaError_t Unflatten(Element element, const void* x, int rows, const ImageShape& shape, void* y, cudaStream_t stream);

// Windows side by side; see nn::Pool2d.
struct PoolShape {
  ImageShape in, out;
  int height, width;  // of a window
  PoolKind kind;
  bool relu;
};
cudaError_t Pool(Element element, const void* x, int rows, const PoolShape& shape, void* y, cudaStream_t stream);
cudaError_t PoolBackward(Element element, const void* x, const void* y, const void* dy, int rows,
                         const PoolShape& shape, void* dx, cudaStream_t stream);

// Every stride-th pixel of an image of the shape `in`, followed by zeros for the channels that it lacks: the shortcut
// of nn::BasicBlock.
struct Shortcut {
  const void* x;
  ImageShape in, out;
  int stride;
};
// dx += (y > 0 ? dy : 0), where the shortcut has come from.
cudaError_t AddToShortcut(Element element, const void* y, const void* dy, int rows, const Shortcut& shortcut, void* dx,
                          cudaStream_t stream);

// See nn::Dropout.
cudaError_t Dropout(Element element, const void* x, size_t count, const DropoutChoice& choice, void* y,
                    cudaStream_t stream);

// Sums over all pixels, one a channel, in an order that depends on the shapes alone.
//
// What the blocks of one launch add up, and the words by which the last of them knows that it is; zeroed at first.
// Launches that share it come one after the other.
struct ColumnScratch {
  float* sums;
  unsigned* tickets;
};
size_t ColumnScratchFloats(int channels);
constexpr size_t kColumnTickets = 256;

// grad = (or, with `accumulate`, +=) sums of dy, after dy = y > 0 ? dy : 0 in place, unless y is null.
cudaError_t BiasGrad(Element element, const void* y, void* dy, size_t pixels, int channels, bool accumulate,
                     float* grad, const ColumnScratch& scratch, cudaStream_t stream);

// Of one batch: a channel's mean and 1 / sqrt(variance + eps).
struct BatchMoments {
  float* mean;
  float* rstd;
};
// Also moves the running statistics towards the batch's by `momentum`.
cudaError_t BatchNormMoments(Element element, const void* x, size_t pixels, int channels, float eps, float momentum,
                             const BatchMoments& moments, float* running_mean, float* running_var,
                             const ColumnScratch& scratch, cudaStream_t stream);

struct BatchNormApply {
  const float* mean;
  const float* rstd;  // or, with eps > 0, the variance
  float eps;
  const float* weight;
  const float* bias;
  bool relu;
};
// y = max(0, (x - mean) * rstd * weight + bias + shortcut), or without the shortcut (null), or the max(0, .).
cudaError_t BatchNormForward(Element element, const void* x, size_t pixels, int channels, const BatchNormApply& apply,
                             const Shortcut* shortcut, void* y, cudaStream_t stream);

// With dy = y > 0 ? dy : 0 first, unless y is null: writes (with `accumulate`, adds) the gradients of weight and bias,
// and `sums`, [2, channels], which the second pass needs for dx. dx may be dy.
cudaError_t BatchNormGrads(Element element, const void* x, const void* y, const void* dy, size_t pixels, int channels,
                           const BatchMoments& moments, bool accumulate, float* weight_grad, float* bias_grad,
                           float* sums, const ColumnScratch& scratch, cudaStream_t stream);
cudaError_t BatchNormBackward(Element element, const void* x, const void* y, const void* dy, size_t pixels,
                              int channels, const BatchMoments& moments, const float* weight, const float* sums,
                              void* dx, cudaStream_t stream);

}  // namespace nn::cuda

#endif  // EXAMPLES_NN_CUDA_IMAGE_KERNELS_H_
