// SPDX-License-Identifier: Apache-2.0
// Batch normalisation by one launch for each direction: every thread keeps its numbers in registers until the sums of
// all blocks are there, so that memory is read once.
#include "examples/nn/check.h"
#include "examples/nn/cuda_norm.cuh"
#include "examples/nn/cuda_together.cuh"

namespace nn::cuda {
namespace {

constexpr int kMostHeld = 8;  // vectors of one array that a thread keeps
constexpr int kMostChannels = 256;
constexpr int kSums = 2;  // of each channel

// A thread's vectors: they are of the same channels, since the number of threads is a multiple of a pixel's vectors.
struct Share {
  size_t first, step, end;
  int columns;  // vectors of a pixel

  __device__ Share(size_t pixels, int of_pixel)
      : first(static_cast<size_t>(blockIdx.x) * kGridThreads + threadIdx.x),
        step(static_cast<size_t>(gridDim.x) * kGridThreads),
        end(pixels * of_pixel),
        columns(of_pixel) {}
  __device__ int column() const { return static_cast<int>(threadIdx.x % static_cast<unsigned>(columns)); }
  __device__ size_t At(int k) const { return first + k * step; }
};

// Adds up what all threads of the launch have for each channel. totals, in shared memory: [kSums][channels].
template <int V>
__device__ void SumGrid(float (&sums)[kSums][V], int columns, float* scratch, float* totals) {
  constexpr int kWarps = kGridThreads / kWarp;
  __shared__ float parts[kWarps * kSums * kMostChannels];  // [rows][kSums][channels], and below [lanes][results]
  const int channels = columns * V, results = kSums * channels;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  for (int s = 0; s < kSums; ++s) {
    for (int i = 0; i < V; ++i) {
      float sum = sums[s][i];
      for (int apart = columns; apart < kWarp; apart *= 2) sum += __shfl_xor_sync(~0u, sum, apart);
      if (lane < columns) parts[(warp * kSums + s) * channels + lane * V + i] = sum;
    }
  }
  __syncthreads();
  for (int k = threadIdx.x; k < results; k += kGridThreads) {
    float sum = 0;
    for (int w = 0; w < kWarps; ++w) sum += parts[w * results + k];
    scratch[static_cast<size_t>(blockIdx.x) * results + k] = sum;
  }
  cooperative_groups::this_grid().sync();
  const int lanes = results < kGridThreads ? kGridThreads / results : 1;
  for (int k = threadIdx.x; k < results * lanes; k += kGridThreads) {
    const float* const from = scratch + k % results;
    float sum = 0;
#pragma unroll 8
    for (unsigned b = k / results; b < gridDim.x; b += lanes) sum += __ldcg(from + static_cast<size_t>(b) * results);
    parts[k] = sum;
  }
  __syncthreads();
  for (int k = threadIdx.x; k < results; k += kGridThreads) {
    float sum = 0;
    for (int l = 0; l < lanes; ++l) sum += parts[l * results + k];
    totals[k] = sum;
  }
  __syncthreads();
}

template <class T, int kHeld>
__global__ void __launch_bounds__(kGridThreads)
    ForwardOnceKernel(const T* x, size_t pixels, int columns, float eps, Momentum momentum, BatchMoments moments,
                      BatchNormApply apply, bool has_shortcut, Shortcut shortcut, T* y, ReluBits* passed,
                      float* scratch) {
  constexpr int V = kVector<T>;
  __shared__ float totals[kSums * kMostChannels];
  const Share mine(pixels, columns);
  // As in ComputeMoments: differences from the first pixel.
  const Vector<T> origin = Load(x, mine.column());
  Vector<T> held[kHeld];
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    if (mine.At(k) < mine.end) held[k] = Load(x, mine.At(k));
  }
  float sums[kSums][V] = {};
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    if (mine.At(k) >= mine.end) break;
    for (int i = 0; i < V; ++i) {
      const float d = held[k][i] - origin[i];
      sums[0][i] += d;
      sums[1][i] = fmaf(d, d, sums[1][i]);
    }
  }
  SumGrid(sums, columns, scratch, totals);

  const float count = static_cast<float>(pixels);
  Normalised<V> normalised;
  for (int i = 0; i < V; ++i) {
    const int channel = mine.column() * V + i;
    const float shift = totals[channel] / count, mean = origin[i] + shift;
    const float variance = Rectified(totals[columns * V + channel] / count - shift * shift);
    const float rstd = rsqrtf(variance + eps);
    normalised.Set(i, mean, rstd, apply.weight[channel], apply.bias[channel]);
    if (mine.first >= columns) continue;  // one thread for each channel tells
    moments.mean[channel] = mean;
    moments.rstd[channel] = rstd;
    momentum.Move(channel, mean, variance, count);
  }
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    const size_t at = mine.At(k);
    if (at >= mine.end) break;
    const Vector<T> out = OutputOf(normalised, held[k], Beside<T>(has_shortcut, shortcut, at), apply.relu);
    Store(y, at, out);
    if (passed != nullptr) passed[at] = PassedOf(out);
  }
}

// mask: as in BatchNormGrads. dx may be dy.
template <class T, int kHeld>
__global__ void __launch_bounds__(kGridThreads)
    BackwardOnceKernel(const T* x, ReluMask mask, const ReluBits* passed, T* dy, size_t pixels, int columns,
                       BatchNormApply apply, bool accumulate, float* weight_grad, float* bias_grad, T* dx,
                       float* scratch) {
  constexpr int V = kVector<T>;
  __shared__ float totals[kSums * kMostChannels];
  const Share mine(pixels, columns);
  Vector<T> held[kHeld], gradient[kHeld];
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    if (mine.At(k) >= mine.end) break;
    held[k] = Load(x, mine.At(k));
    gradient[k] = Load(dy, mine.At(k));
  }
  const int own = mine.column() * V;
  float mean[V], rstd[V], sums[kSums][V] = {};
  LoadFloats(apply.mean + own, mean);
  LoadFloats(apply.rstd + own, rstd);
  Normalised<V> normalised;
  normalised.Set(apply, own);
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    const size_t at = mine.At(k);
    if (at >= mine.end) break;
    Vector<T>& g = gradient[k];
    if (mask == ReluMask::kStore) {
      const ReluBits bits = passed[at];
      for (int i = 0; i < V; ++i) g.Set(i, (bits >> i & 1) == 0 ? 0 : g[i]);
      Store(dy, at, g);
    } else if (mask == ReluMask::kOwn) {
      for (int i = 0; i < V; ++i) g.Set(i, Masked<T>(g[i], normalised(i, held[k][i])));
    }
    for (int i = 0; i < V; ++i) {
      sums[0][i] += g[i];
      sums[1][i] = fmaf(g[i], (held[k][i] - mean[i]) * rstd[i], sums[1][i]);
    }
  }
  SumGrid(sums, columns, scratch, totals);

  InputGrad<V> grad;
  for (int i = 0; i < V; ++i) {
    const int channel = own + i;
    const float sum = totals[channel], sum_xhat = totals[columns * V + channel];
    grad.Set(i, normalised.scale[i], mean[i], rstd[i], sum, sum_xhat, static_cast<float>(pixels));
    if (mine.first >= columns) continue;
    bias_grad[channel] = sum + (accumulate ? bias_grad[channel] : 0);
    weight_grad[channel] = sum_xhat + (accumulate ? weight_grad[channel] : 0);
  }
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    if (mine.At(k) >= mine.end) break;
    Vector<T> out;
    for (int i = 0; i < V; ++i) out.Set(i, grad(i, normalised.scale[i], gradient[k][i], held[k][i]));
    Store(dx, mine.At(k), out);
  }
}

// fn(std::integral_constant<int, kHeld>) for the least that suffices.
template <class Fn>
void WithHeld(size_t vectors, int processors, const Fn& fn) {
  const size_t threads = size_t{GridBlocks(processors)} * kGridThreads, held = (vectors + threads - 1) / threads;
  if (held <= 2) return fn(std::integral_constant<int, 2>());
  if (held <= 4) return fn(std::integral_constant<int, 4>());
  fn(std::integral_constant<int, kMostHeld>());
}

}  // namespace

bool BatchNormFits(Element element, size_t pixels, int channels, int processors) {
  const int vector = 16 / static_cast<int>(SizeOf(element)), columns = channels / vector;
  return channels % vector == 0 && channels <= kMostChannels && columns <= kWarp && (columns & (columns - 1)) == 0 &&
         pixels * static_cast<size_t>(columns) <= size_t{GridBlocks(processors)} * kGridThreads * kMostHeld;
}

cudaError_t BatchNormForwardOnce(Element element, const void* x, size_t pixels, int channels, float eps, float momentum,
                                 const BatchMoments& moments, const RunningMoments& running,
                                 const BatchNormApply& apply, const Shortcut* shortcut, void* y, ReluBits* passed,
                                 int processors, const ColumnScratch& scratch, cudaStream_t stream) {
  NN_CHECK(BatchNormFits(element, pixels, channels, processors));
  return Dispatch(element, [&](auto type) {
    using T = decltype(type);
    const int columns = channels / kVector<T>;
    WithHeld(pixels * static_cast<size_t>(columns), processors, [&](auto held) {
      LaunchTogether(ForwardOnceKernel<T, held.value>, processors, stream, static_cast<const T*>(x), pixels, columns,
                     eps, Momentum{momentum, running}, moments, apply, shortcut != nullptr,
                     shortcut == nullptr ? Shortcut() : *shortcut, static_cast<T*>(y), passed, scratch.sums);
    });
  });
}

cudaError_t BatchNormBackwardOnce(Element element, const void* x, ReluMask mask, const ReluBits* passed, void* dy,
                                  size_t pixels, int channels, const BatchNormApply& apply, bool accumulate,
                                  float* weight_grad, float* bias_grad, void* dx, int processors,
                                  const ColumnScratch& scratch, cudaStream_t stream) {
  NN_CHECK(BatchNormFits(element, pixels, channels, processors));
  CheckAligned(apply);
  return Dispatch(element, [&](auto type) {
    using T = decltype(type);
    const int columns = channels / kVector<T>;
    WithHeld(pixels * static_cast<size_t>(columns), processors, [&](auto held) {
      LaunchTogether(BackwardOnceKernel<T, held.value>, processors, stream, static_cast<const T*>(x), mask, passed,
                     static_cast<T*>(dy), pixels, columns, apply, accumulate, weight_grad, bias_grad,
                     static_cast<T*>(dx), scratch.sums);
    });
  });
}

}  // namespace nn::cuda
