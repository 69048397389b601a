// SPDX-License-Identifier: Apache-2.0
// Launches the passes of the GPU's convolutional layers that do not use cuDNN. All are asynchronous on `stream`.
//
// Images are "native": rows, columns, channels, without gaps, with numbers of type `element`. The channels of a pixel
// take a multiple of 16 bytes. `pixels` is the number of pixels of all images of a batch.
#ifndef EXAMPLES_NN_CUDA_IMAGE_KERNELS_H_
#define EXAMPLES_NN_CUDA_IMAGE_KERNELS_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "examples/nn/dropout_hash.h"
#include "examples/nn/element.h"
#include "examples/nn/image.h"

namespace nn::cuda {

// How a model's input becomes native. With `fold` above 1, a pixel of the native image is a square of so many of the
// plain one's, of which the first begins `padding` pixels outside; their channels are next to each other. So a
// convolution with this stride and few channels is one with stride 1 and more channels, which GPUs do faster.
struct ImagePacking {
  ImageShape in;
  int fold, padding;
  int height, width, padded;  // of the native image; its channels, of which additional ones are 0

  // Of one native image's numbers.
  size_t count() const { return static_cast<size_t>(height * width) * static_cast<size_t>(padded); }
};
// Converts plain float32 images.
cudaError_t PackImages(Element element, const float* x, int rows, const ImagePacking& packing, void* y,
                       cudaStream_t stream);
// Converts a convolution's weight from float32 [outputs, channels, kernel, kernel] to [outputs, taps, taps, padded],
// for images that are folded like this, and its gradient back.
struct WeightShape {
  int outputs, channels, kernel, fold, padded;

  bool IsOneTap() const { return kernel == 1 && padded == channels; }
  __host__ __device__ int taps() const { return (kernel + fold - 1) / fold; }
  size_t count() const { return static_cast<size_t>(outputs) * static_cast<size_t>(kernel * kernel * channels); }
  size_t packed_count() const { return static_cast<size_t>(outputs) * static_cast<size_t>(taps() * taps() * padded); }
};
cudaError_t PackWeight(Element element, const float* weight, const WeightShape& shape, void* packed,
                       cudaStream_t stream);
cudaError_t UnpackGrad(Element element, const void* packed, const WeightShape& shape, bool accumulate, float* grad,
                       cudaStream_t stream);

// y = max(0, y + bias); without `relu`, y = y + bias.
cudaError_t AddBias(Element element, void* y, size_t pixels, int channels, const float* bias, bool relu,
                    cudaStream_t stream);

// A convolution of images with very few channels, and with a small kernel: a model's first one. It is done without
// cuDNN. Stride 1. `x` is native, its channels padded to one vector. Sums are float32.
struct SmallConvolution {
  ImageShape in, out;
  int kernel, padding;
};
bool IsSmallConvolution(const SmallConvolution& c);
// y = convolution + bias, which may be null; with `relu`, max(0, y). The weight is rounded to `element` first.
cudaError_t SmallConvolutionForward(Element element, const SmallConvolution& c, const void* x, const float* weight,
                                    const float* bias, bool relu, int rows, void* y, cudaStream_t stream);
// grad = the weight's gradient (+= with `accumulate`). Its blocks wait for each other; `scratch`: as many numbers as
// SmallConvolutionFloats.
size_t SmallConvolutionFloats(const SmallConvolution& c);
cudaError_t SmallConvolutionWeightGrad(Element element, const SmallConvolution& c, const void* x, const void* dy,
                                       int rows, bool accumulate, float* grad, int processors, float* scratch,
                                       cudaStream_t stream);

// A convolution with a kernel of 3x3 and few channels, which tensor cores compute in types that these know: with 16
// bits, or float32 rounded to TF32. Sums are float32. `weight` and its gradient: float32 [outputs, channels, 3, 3].
struct NarrowConvolution {
  ImageShape in, out;
  int stride, padding;
};
// y = convolution + bias, which may be null; with `relu`, max(0, y).
bool HasNarrowForward(Element element, const NarrowConvolution& c);
cudaError_t NarrowForward(Element element, const NarrowConvolution& c, const void* x, const float* weight,
                          const float* bias, bool relu, int rows, void* y, cudaStream_t stream);
// dx = the gradient of the input + added, an image of its shape, which may be null.
bool HasNarrowInputGrad(Element element, const NarrowConvolution& c);
cudaError_t NarrowInputGrad(Element element, const NarrowConvolution& c, const void* dy, const float* weight,
                            const void* added, int rows, void* dx, cudaStream_t stream);
// grad = the weight's gradient (+= with `accumulate`), the same bits in each run. `scratch`: as many numbers as
// NarrowWeightGradFloats.
bool HasNarrowWeightGrad(Element element, const NarrowConvolution& c);
size_t NarrowWeightGradFloats(const NarrowConvolution& c);
cudaError_t NarrowWeightGrad(Element element, const NarrowConvolution& c, const void* x, const void* dy, int rows,
                             bool accumulate, float* grad, float* scratch, cudaStream_t stream);

// Converts images to plain rows, and back.
cudaError_t Flatten(Element element, const void* x, int rows, const ImageShape& shape, void* y, cudaStream_t stream);
cudaError_t Unflatten(Element element, const void* x, int rows, const ImageShape& shape, void* y, cudaStream_t stream);

// See nn::Pool2d.
struct PoolShape {
  ImageShape in, out;
  int height, width;            // size of a window
  int step_height, step_width;  // distance between windows
  int padding;
  PoolKind kind;
  bool relu;
};
// `which`: for maximum pooling of windows that are not adjacent, one byte for each number of y, which tells the
// backward pass the pixel of the window that was chosen. Null for adjacent windows.
cudaError_t Pool(Element element, const void* x, int rows, const PoolShape& shape, void* y, uint8_t* which,
                 cudaStream_t stream);
cudaError_t PoolBackward(Element element, const void* x, const void* y, const uint8_t* which, const void* dy, int rows,
                         const PoolShape& shape, void* dx, cudaStream_t stream);

// y += x, for a multiple of 16 bytes.
cudaError_t Add(Element element, const void* x, size_t count, void* y, cudaStream_t stream);

// The shortcut of nn::BasicBlock: every stride-th pixel of an image of the shape `in`, followed by zeros for its
// missing channels.
struct Shortcut {
  const void* x;
  ImageShape in, out;
  int stride;
};
// dx += dy, at the pixels and channels that the shortcut reads.
cudaError_t AddToShortcut(Element element, const void* dy, int rows, const Shortcut& shortcut, void* dx,
                          cudaStream_t stream);

// ++*counter.
cudaError_t Count(uint64_t* counter, cudaStream_t stream);

// See nn::Dropout. *pass, in the GPU's memory, tells the forward passes apart.
cudaError_t Dropout(Element element, const void* x, size_t count, double p, uint64_t seed, const uint64_t* pass,
                    void* y, cudaStream_t stream);

// Sums over all pixels, one per channel. Their order depends only on the shapes.
//
// Memory for the partial sums of a launch's blocks, and for the words by which a block detects that it is the last one.
// Initially zero. Launches that share it must run one after the other.
struct ColumnScratch {
  float* sums;
  unsigned* tickets;
};
size_t ColumnScratchFloats(int channels);
constexpr size_t kColumnTickets = 256;

// Unless y is null, first sets dy = y > 0 ? dy : 0 in place. Then grad = sums of dy (+= with `accumulate`).
cudaError_t BiasGrad(Element element, const void* y, void* dy, size_t pixels, int channels, bool accumulate,
                     float* grad, const ColumnScratch& scratch, cudaStream_t stream);

// The moments of one batch, per channel: mean and 1 / sqrt(variance + eps).
struct BatchMoments {
  float* mean;
  float* rstd;
};
struct RunningMoments {
  float* mean;
  float* variance;
};
// Also moves the running statistics towards those of the batch, by the share `momentum`, unless that is 0.
// `given_sums`: null, or [2, channels], of x and of its square. x is then read only for groups of channels with one
// whose variance is too small beside its mean for them.
cudaError_t BatchNormMoments(Element element, const void* x, const float* given_sums, size_t pixels, int channels,
                             float eps, float momentum, const BatchMoments& moments, const RunningMoments& running,
                             const ColumnScratch& scratch, cudaStream_t stream);

// The same in two parts, for the batches of several ranks. The first writes what this rank tells the others,
// MomentFloats(channels) numbers; the second reads what all ranks have told, and also writes how many values a channel
// has in all batches. See moments.h.
cudaError_t BatchNormTell(Element element, const void* x, size_t pixels, int channels, float* told,
                          const ColumnScratch& scratch, cudaStream_t stream);
cudaError_t BatchNormMerge(const float* told, int ranks, int channels, float eps, float momentum,
                           const BatchMoments& moments, const RunningMoments& running, float* count,
                           cudaStream_t stream);

struct BatchNormApply {
  const float* mean;
  const float* rstd;  // with eps > 0: the variance instead
  float eps;
  const float* weight;
  const float* bias;
  bool relu;
};
// Which numbers of an image have passed a ReLU, being above 0 or NaN: a byte for every 16 bytes of it, whose bit i is
// that of number i.
using ReluBits = uint8_t;

// y = max(0, (x - mean) * rstd * weight + bias + shortcut). The shortcut (null) and the max(0, .) are optional, and so
// is `passed`, of y.
cudaError_t BatchNormForward(Element element, const void* x, size_t pixels, int channels, const BatchNormApply& apply,
                             const Shortcut* shortcut, void* y, ReluBits* passed, cudaStream_t stream);

// The ReLU behind a normalisation, by which dy is masked.
enum class ReluMask {
  kNone,
  kOwn,    // right behind it: whether its result is above 0 is computed again from x, which costs less than to read it
  kStore,  // behind a shortcut: by what has passed. The first pass stores the masked dy, for all that comes after it
};
// With apply.eps = 0. The first pass writes (adds, with `accumulate`) the gradients of weight and bias, and writes
// `sums`, [2, channels]. The second pass needs `sums` for dx; it masks dy for kOwn. dx may be dy. `count`: how many
// values of a channel the sums are of; null: `pixels`.
cudaError_t BatchNormGrads(Element element, const void* x, ReluMask mask, const ReluBits* passed, void* dy,
                           size_t pixels, int channels, const BatchNormApply& apply, bool accumulate,
                           float* weight_grad, float* bias_grad, float* sums, const ColumnScratch& scratch,
                           cudaStream_t stream);
cudaError_t BatchNormBackward(Element element, const void* x, ReluMask mask, const void* dy, size_t pixels,
                              int channels, const BatchNormApply& apply, const float* sums, const float* count,
                              void* dx, cudaStream_t stream);

// Both passes of a direction in one launch, in which all blocks wait for each other: for a step in training, on a GPU
// with so many multiprocessors. Only where x fits into its registers. `apply` as above; forward needs no moments in it.
bool BatchNormFits(Element element, size_t pixels, int channels, int processors);
cudaError_t BatchNormForwardOnce(Element element, const void* x, size_t pixels, int channels, float eps, float momentum,
                                 const BatchMoments& moments, const RunningMoments& running,
                                 const BatchNormApply& apply, const Shortcut* shortcut, void* y, ReluBits* passed,
                                 int processors, const ColumnScratch& scratch, cudaStream_t stream);
cudaError_t BatchNormBackwardOnce(Element element, const void* x, ReluMask mask, const ReluBits* passed, void* dy,
                                  size_t pixels, int channels, const BatchNormApply& apply, bool accumulate,
                                  float* weight_grad, float* bias_grad, void* dx, int processors,
                                  const ColumnScratch& scratch, cudaStream_t stream);

}  // namespace nn::cuda

#endif  // EXAMPLES_NN_CUDA_IMAGE_KERNELS_H_
