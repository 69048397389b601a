// SPDX-License-Identifier: Apache-2.0
// Sums over the pixels of native images, channel by channel, and batch normalisation by them.
#include "examples/nn/check.h"
#include "examples/nn/cuda_element.cuh"
#include "examples/nn/cuda_image_kernels.h"
#include "examples/nn/cuda_norm.cuh"
#include "examples/nn/moments.h"

namespace nn::cuda {
namespace {

constexpr int kSumThreads = 512;
// Of a launch: one for each multiprocessor of an H100. The last one of each group of columns adds up the others' sums,
// which takes longer with more of them than the others gain.
constexpr int kMostBlocks = 132;
constexpr int kMostColumns = 16;  // of a group: 256 bytes

// A block's threads are columns of vectors by rows of pixels; the grid is blocks of pixels by groups of so many
// columns.
struct Columns {
  int all, group;  // vectors
};

template <class T>
Columns ColumnsOf(int channels) {
  const int all = channels / kVector<T>;
  NN_CHECK(channels % kVector<T> == 0 && all > 0);
  // A power of two, so that a warp's lanes of one column are one apart, too.
  int group = 1;
  while (group < kMostColumns && all % (2 * group) == 0) group *= 2;
  return {all, group};
}

dim3 GridFor(const Columns& columns, size_t pixels) {
  const size_t rows = static_cast<size_t>(kSumThreads / columns.group);  // of a block
  const size_t blocks = (pixels + 4 * rows - 1) / (4 * rows);
  const int groups = columns.all / columns.group;
  NN_CHECK(static_cast<size_t>(groups) <= kColumnTickets);
  const size_t most = groups < kMostBlocks ? kMostBlocks / groups : 1;
  return {static_cast<unsigned>(blocks < most ? blocks : most), static_cast<unsigned>(groups), 1};
}

// Calls finish(channel, sums) for each of `channels` channels from `first` on, with what all blocks have written to
// [blocks, kSums, all_channels] at `from`. `shared`: memory for so many numbers.
template <int kSums, class Finish>
__device__ void AddBlocks(const float* from, size_t all_channels, int channels, float* shared, int numbers,
                          size_t first, const Finish& finish) {
  // Four sums for each thread, and several threads for each four of them, as far as there are threads.
  const int results = kSums * channels, fours = results / 4, most = numbers / results;
  const int lanes = kSumThreads / fours < most ? kSumThreads / fours : most;
  __syncthreads();
  for (int k = threadIdx.x; k < fours * lanes; k += kSumThreads) {
    const int result = k % fours * 4;
    const float* const own = from + result / channels * all_channels + result % channels;
    float4 sum = {0, 0, 0, 0};
#pragma unroll 8
    for (unsigned b = k / fours; b < gridDim.x; b += lanes) {
      const float4 part = __ldcg(reinterpret_cast<const float4*>(own + b * kSums * all_channels));
      sum.x += part.x;
      sum.y += part.y;
      sum.z += part.z;
      sum.w += part.w;
    }
    *reinterpret_cast<float4*>(shared + k / fours * results + result) = sum;
  }
  __syncthreads();
  for (int channel = threadIdx.x; channel < channels; channel += kSumThreads) {
    float result[kSums] = {};
    for (int s = 0; s < kSums; ++s) {
      for (int lane = 0; lane < lanes; ++lane) result[s] += shared[lane * results + s * channels + channel];
    }
    finish(static_cast<int>(first) + channel, result);
  }
}

// Calls add(load(i), i, sums) for every vector i of all pixels, of which each adds to kSums numbers a channel. Then, in
// the last block that is done with a group of channels, one thread for each of them calls finish(channel, sums).
// kAhead: so many loads are on their way at once.
template <class T, int kSums, int kAhead, class Fetch, class Add, class Finish>
__device__ void SumColumns(size_t pixels, const Columns& columns, const ColumnScratch& scratch, const Fetch& load,
                           const Add& add, const Finish& finish) {
  constexpr int V = kVector<T>, kWarps = kSumThreads / kWarp;
  const int column = threadIdx.x % columns.group, row = threadIdx.x / columns.group;
  const int rows = kSumThreads / columns.group;
  const int vector = blockIdx.y * columns.group + column;
  float sums[kSums][V] = {};
  const size_t step = static_cast<size_t>(gridDim.x) * rows * columns.all, end = pixels * columns.all;
  size_t i = (static_cast<size_t>(blockIdx.x) * rows + row) * columns.all + vector;
  for (; i + (kAhead - 1) * step < end; i += kAhead * step) {
    decltype(load(i)) loaded[kAhead];
#pragma unroll
    for (int k = 0; k < kAhead; ++k) loaded[k] = load(i + k * step);
#pragma unroll
    for (int k = 0; k < kAhead; ++k) add(loaded[k], i + k * step, sums);
  }
  for (; i < end; i += step) {
    auto loaded = load(i);
    add(loaded, i, sums);
  }

  // Within the warp, then the block.
  __shared__ __align__(16) float parts[kWarps][kSums][kMostColumns * V];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  for (int s = 0; s < kSums; ++s) {
    for (int i = 0; i < V; ++i) {
      float sum = sums[s][i];
      for (int apart = columns.group; apart < kWarp; apart *= 2) sum += __shfl_xor_sync(~0u, sum, apart);
      if (lane < columns.group) parts[warp][s][column * V + i] = sum;
    }
  }
  __syncthreads();
  const int channels = columns.group * V;  // of the group
  const size_t all_channels = static_cast<size_t>(columns.all) * V;
  const size_t first = static_cast<size_t>(blockIdx.y) * channels;
  for (int k = threadIdx.x; k < kSums * channels; k += kSumThreads) {
    const int s = k / channels, channel = k % channels;
    float sum = 0;
    for (int w = 0; w < kWarps; ++w) sum += parts[w][s][channel];
    scratch.sums[(static_cast<size_t>(blockIdx.x) * kSums + s) * all_channels + first + channel] = sum;
  }

  // Across the blocks.
  __threadfence();
  __syncthreads();
  __shared__ bool last;
  if (threadIdx.x == 0) last = atomicAdd(&scratch.tickets[blockIdx.y], 1) + 1 == gridDim.x;
  __syncthreads();
  if (!last) return;
  __threadfence();
  if (threadIdx.x == 0) scratch.tickets[blockIdx.y] = 0;
  AddBlocks<kSums>(scratch.sums + first, all_channels, channels, &parts[0][0][0], sizeof(parts) / sizeof(float), first,
                   finish);
}

template <class T>
__global__ void __launch_bounds__(kSumThreads, 1) BiasGradKernel(const T* y, T* dy, size_t pixels, Columns columns,
                                                                 bool accumulate, float* grad, ColumnScratch scratch) {
  struct Loaded {
    Vector<T> d, out;
  };
  const auto load = [&](size_t at) { return Loaded{Load(dy, at), y == nullptr ? Vector<T>() : Load(y, at)}; };
  const auto add = [&](Loaded& loaded, size_t at, float(&sums)[1][kVector<T>]) {
    Vector<T>& d = loaded.d;
    if (y != nullptr) {
      for (int i = 0; i < kVector<T>; ++i) d.Set(i, loaded.out[i] <= 0 ? 0 : d[i]);
      Store(dy, at, d);
    }
    for (int i = 0; i < kVector<T>; ++i) sums[0][i] += d[i];
  };
  SumColumns<T, 1, 4>(pixels, columns, scratch, load, add, [&](int channel, const float(&sums)[1]) {
    grad[channel] = sums[0] + (accumulate ? grad[channel] : 0);
  });
}

// Calls finish(channel, mean, variance) for each channel of the block's group, of which there are at most as many as
// threads, in one of the group's blocks. Returns false, and calls nothing, if a channel's numbers are so far from 0
// that the sums have lost its variance. `given`: as given_sums of BatchNormMoments.
template <class Finish>
__device__ bool FinishSums(const float* given, size_t pixels, int group_channels, int channels, const Finish& finish) {
  constexpr float kLost = 1 / 64.f;  // variance / mean^2
  const int channel = blockIdx.y * group_channels + threadIdx.x;
  const bool has_channel = threadIdx.x < group_channels;
  float mean = 0, variance = 0;
  if (has_channel) {
    const float count = static_cast<float>(pixels);
    mean = given[channel] / count;
    variance = given[channels + channel] / count - mean * mean;
  }
  const bool lost = !(variance >= kLost * mean * mean);  // or NaN
  if (__syncthreads_or(lost)) return false;
  if (has_channel && blockIdx.x == 0) finish(channel, mean, variance);
  return true;
}

// Calls finish(channel, mean, variance). Sums of differences from the first pixel: the squares of what is far from 0
// would drown its variance.
template <class T, class Finish>
__device__ void ComputeMoments(const T* x, size_t pixels, const Columns& columns, const ColumnScratch& scratch,
                               const Finish& finish) {
  const Vector<T> origin =
      Load(x, blockIdx.y * static_cast<size_t>(columns.group) + threadIdx.x % static_cast<unsigned>(columns.group));
  const auto load = [&](size_t at) { return Load(x, at); };
  const auto add = [&](const Vector<T>& v, size_t, float(&sums)[2][kVector<T>]) {
    for (int i = 0; i < kVector<T>; ++i) {
      const float d = v[i] - origin[i];
      sums[0][i] += d;
      sums[1][i] = fmaf(d, d, sums[1][i]);
    }
  };
  SumColumns<T, 2, 8>(pixels, columns, scratch, load, add, [&](int channel, const float(&sums)[2]) {
    const float count = static_cast<float>(pixels);
    const float shift = sums[0] / count;
    finish(channel, ToFloat(x[channel]) + shift, Rectified(sums[1] / count - shift * shift));
  });
}

template <class T>
__global__ void __launch_bounds__(kSumThreads, 1)
    MomentsKernel(const T* x, const float* given_sums, size_t pixels, Columns columns, float eps, Momentum momentum,
                  BatchMoments moments, ColumnScratch scratch) {
  const auto finish = [&](int channel, float mean, float variance) {
    moments.mean[channel] = mean;
    moments.rstd[channel] = rsqrtf(variance + eps);
    momentum.Move(channel, mean, variance, static_cast<float>(pixels));
  };
  constexpr int V = kVector<T>;
  static_assert(kMostColumns * V <= kSumThreads);
  if (given_sums != nullptr && FinishSums(given_sums, pixels, columns.group * V, columns.all * V, finish)) return;
  ComputeMoments(x, pixels, columns, scratch, finish);
}

template <class T>
__global__ void __launch_bounds__(kSumThreads, 1)
    TellKernel(const T* x, size_t pixels, Columns columns, float* told, ColumnScratch scratch) {
  const int channels = columns.all * kVector<T>;
  ComputeMoments(x, pixels, columns, scratch, [&](int channel, float mean, float variance) {
    told[channel] = mean;
    told[channels + channel] = variance;
    if (channel == 0) told[2 * channels] = static_cast<float>(pixels);
  });
}

__global__ void MergeKernel(const float* told, int ranks, int channels, float eps, Momentum momentum,
                            BatchMoments moments, float* count) {
  const size_t channel = ThreadIndex();
  if (channel >= channels) return;
  const Moments all = MergeMoments(told, ranks, channels, channel);
  const float mean = static_cast<float>(all.mean), variance = static_cast<float>(all.variance);
  moments.mean[channel] = mean;
  moments.rstd[channel] = rsqrtf(variance + eps);
  momentum.Move(static_cast<int>(channel), mean, variance, static_cast<float>(all.count));
  if (channel == 0) *count = static_cast<float>(all.count);
}

template <class T, ReluMask kMask>
__global__ void __launch_bounds__(kSumThreads, 1)
    GradsKernel(const T* x, const ReluBits* passed, T* dy, size_t pixels, Columns columns, BatchNormApply apply,
                bool accumulate, float* weight_grad, float* bias_grad, float* out, ColumnScratch scratch) {
  constexpr int V = kVector<T>;
  const int channel0 = (blockIdx.y * columns.group + threadIdx.x % columns.group) * V;
  float mean[V];
  LoadFloats(apply.mean + channel0, mean);
  Normalised<V> normalised;
  if constexpr (kMask == ReluMask::kOwn) normalised.Set(apply, channel0);
  struct Loaded {
    Vector<T> x, d;
    ReluBits passed;
  };
  const auto load = [&](size_t at) {
    Loaded loaded = {Load(x, at), Load(dy, at), 0};
    if constexpr (kMask == ReluMask::kStore) loaded.passed = passed[at];
    return loaded;
  };
  const auto add = [&](Loaded& loaded, size_t at, float(&sums)[2][V]) {
    for (int i = 0; i < V; ++i) {
      float g = loaded.d[i];
      if constexpr (kMask == ReluMask::kOwn) g = Masked<T>(g, normalised(i, loaded.x[i]));
      if constexpr (kMask == ReluMask::kStore) {
        g = (loaded.passed >> i & 1) == 0 ? 0 : g;
        loaded.d.Set(i, g);
      }
      sums[0][i] += g;
      sums[1][i] = fmaf(g, loaded.x[i] - mean[i], sums[1][i]);
    }
    if constexpr (kMask == ReluMask::kStore) Store(dy, at, loaded.d);
  };
  const int channels = columns.all * V;
  SumColumns<T, 2, 4>(pixels, columns, scratch, load, add, [&](int channel, const float(&sums)[2]) {
    const float of_weight = sums[1] * apply.rstd[channel];
    out[channel] = sums[0];
    out[channels + channel] = of_weight;
    bias_grad[channel] = sums[0] + (accumulate ? bias_grad[channel] : 0);
    weight_grad[channel] = of_weight + (accumulate ? weight_grad[channel] : 0);
  });
}

// A thread keeps to one vector of channels: its stride is a multiple of their number.
template <class T, class Fn>
__device__ void ForEachVector(size_t pixels, int vectors, const Fn& fn) {
  const size_t count = pixels * vectors;
  const size_t stride = static_cast<size_t>(gridDim.x) * kThreads / vectors * vectors;
  size_t i = ThreadIndex();
  if (i >= stride) return;
  for (; i < count; i += stride) fn(i);
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    ForwardKernel(const T* x, size_t pixels, int vectors, BatchNormApply apply, bool has_shortcut, Shortcut shortcut,
                  T* y, ReluBits* passed) {
  constexpr int V = kVector<T>;
  Normalised<V> normalised;
  normalised.Set(apply, ThreadIndex() % vectors * V);
  ForEachVector<T>(pixels, vectors, [&](size_t at) {
    const Vector<T> beside = Beside<T>(has_shortcut, shortcut, at);
    const Vector<T> out = OutputOf(normalised, Load(x, at), beside, apply.relu);
    Store(y, at, out);
    if (passed != nullptr) passed[at] = PassedOf(out);
  });
}

template <class T, bool kMasked>
__global__ void __launch_bounds__(kThreads)
    BackwardKernel(const T* x, const T* dy, size_t pixels, int vectors, BatchNormApply apply, const float* sums,
                   const float* all_count, T* dx) {
  constexpr int V = kVector<T>;
  const size_t own = ThreadIndex() % vectors * V;
  const int channels = vectors * V;
  Normalised<V> normalised;
  normalised.Set(apply, own);
  InputGrad<V> grad;
  float mean[V], rstd[V], sum_dy[V], sum_dy_xhat[V];
  LoadFloats(apply.mean + own, mean);
  LoadFloats(apply.rstd + own, rstd);
  LoadFloats(sums + own, sum_dy);
  LoadFloats(sums + channels + own, sum_dy_xhat);
  const float count = all_count == nullptr ? static_cast<float>(pixels) : *all_count;
  for (int i = 0; i < V; ++i) {
    grad.Set(i, normalised.scale[i], mean[i], rstd[i], sum_dy[i], sum_dy_xhat[i], count);
  }
  ForEachVector<T>(pixels, vectors, [&](size_t at) {
    const Vector<T> in = Load(x, at), d = Load(dy, at);
    Vector<T> out;
    for (int i = 0; i < V; ++i) {
      const float g = kMasked ? Masked<T>(d[i], normalised(i, in[i])) : d[i];
      out.Set(i, grad(i, normalised.scale[i], g, in[i]));
    }
    Store(dx, at, out);
  });
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    AddToShortcutKernel(const T* dy, size_t pixels, int vectors, Shortcut shortcut, T* dx) {
  ForEachVector<T>(pixels, vectors, [&](size_t at) {
    size_t to = 0;
    if (!FromShortcut<T>(shortcut, at, &to)) return;
    const Vector<T> d = Load(dy, at);
    Vector<T> out = Load(dx, to);
    for (int i = 0; i < kVector<T>; ++i) out.Set(i, out[i] + d[i]);
    Store(dx, to, out);
  });
}

// So many blocks for each multiprocessor that all of them run at once, or in two rounds. With more, the numbers of
// their channels with which threads begin cost more than a rest of uneven rounds does.
unsigned GridForVectors(size_t vectors, unsigned of_each) {
  const unsigned blocks = Blocks(vectors, kThreads), most = of_each * kMostBlocks;
  return blocks < most ? blocks : most;
}
constexpr unsigned kForwardBlocks = 5, kBackwardBlocks = 8;  // with 16 bits, 5 and 4 run at once on an H100

}  // namespace

size_t ColumnScratchFloats(int channels) {
  return 2 * static_cast<size_t>(kMostBlocks) * static_cast<size_t>(channels);
}

cudaError_t BiasGrad(Element element, const void* y, void* dy, size_t pixels, int channels, bool accumulate,
                     float* grad, const ColumnScratch& scratch, cudaStream_t stream) {
  return Dispatch(element, [&](auto type) {
    using T = decltype(type);
    const Columns columns = ColumnsOf<T>(channels);
    BiasGradKernel<T><<<GridFor(columns, pixels), kSumThreads, 0, stream>>>(
        static_cast<const T*>(y), static_cast<T*>(dy), pixels, columns, accumulate, grad, scratch);
  });
}

cudaError_t BatchNormMoments(Element element, const void* x, const float* given_sums, size_t pixels, int channels,
                             float eps, float momentum, const BatchMoments& moments, const RunningMoments& running,
                             const ColumnScratch& scratch, cudaStream_t stream) {
  return Dispatch(element, [&](auto type) {
    using T = decltype(type);
    const Columns columns = ColumnsOf<T>(channels);
    MomentsKernel<T><<<GridFor(columns, pixels), kSumThreads, 0, stream>>>(
        static_cast<const T*>(x), given_sums, pixels, columns, eps, Momentum{momentum, running}, moments, scratch);
  });
}

cudaError_t BatchNormTell(Element element, const void* x, size_t pixels, int channels, float* told,
                          const ColumnScratch& scratch, cudaStream_t stream) {
  return Dispatch(element, [&](auto type) {
    using T = decltype(type);
    const Columns columns = ColumnsOf<T>(channels);
    TellKernel<T><<<GridFor(columns, pixels), kSumThreads, 0, stream>>>(static_cast<const T*>(x), pixels, columns, told,
                                                                        scratch);
  });
}

cudaError_t BatchNormMerge(const float* told, int ranks, int channels, float eps, float momentum,
                           const BatchMoments& moments, const RunningMoments& running, float* count,
                           cudaStream_t stream) {
  MergeKernel<<<Blocks(static_cast<size_t>(channels), kThreads), kThreads, 0, stream>>>(
      told, ranks, channels, eps, Momentum{momentum, running}, moments, count);
  return cudaGetLastError();
}

cudaError_t BatchNormGrads(Element element, const void* x, ReluMask mask, const ReluBits* passed, void* dy,
                           size_t pixels, int channels, const BatchNormApply& apply, bool accumulate,
                           float* weight_grad, float* bias_grad, float* sums, const ColumnScratch& scratch,
                           cudaStream_t stream) {
  CheckAligned(apply);
  return Dispatch(element, [&](auto type) {
    using T = decltype(type);
    const Columns columns = ColumnsOf<T>(channels);
    const auto kernel = mask == ReluMask::kOwn     ? GradsKernel<T, ReluMask::kOwn>
                        : mask == ReluMask::kStore ? GradsKernel<T, ReluMask::kStore>
                                                   : GradsKernel<T, ReluMask::kNone>;
    kernel<<<GridFor(columns, pixels), kSumThreads, 0, stream>>>(static_cast<const T*>(x), passed, static_cast<T*>(dy),
                                                                 pixels, columns, apply, accumulate, weight_grad,
                                                                 bias_grad, sums, scratch);
  });
}

cudaError_t BatchNormForward(Element element, const void* x, size_t pixels, int channels, const BatchNormApply& apply,
                             const Shortcut* shortcut, void* y, ReluBits* passed, cudaStream_t stream) {
  CheckAligned(apply);
  return Dispatch(element, [&](auto type) {
    using T = decltype(type);
    const int vectors = channels / kVector<T>;
    ForwardKernel<T><<<GridForVectors(pixels * static_cast<size_t>(vectors), kForwardBlocks), kThreads, 0, stream>>>(
        static_cast<const T*>(x), pixels, vectors, apply, shortcut != nullptr,
        shortcut == nullptr ? Shortcut() : *shortcut, static_cast<T*>(y), passed);
  });
}

cudaError_t BatchNormBackward(Element element, const void* x, ReluMask mask, const void* dy, size_t pixels,
                              int channels, const BatchNormApply& apply, const float* sums, const float* count,
                              void* dx, cudaStream_t stream) {
  CheckAligned(apply);
  return Dispatch(element, [&](auto type) {
    using T = decltype(type);
    const int vectors = channels / kVector<T>;
    const auto kernel = mask == ReluMask::kOwn ? BackwardKernel<T, true> : BackwardKernel<T, false>;
    kernel<<<GridForVectors(pixels * static_cast<size_t>(vectors), kBackwardBlocks), kThreads, 0, stream>>>(
        static_cast<const T*>(x), static_cast<const T*>(dy), pixels, vectors, apply, sums, count, static_cast<T*>(dx));
  });
}

cudaError_t AddToShortcut(Element element, const void* dy, int rows, const Shortcut& shortcut, void* dx,
                          cudaStream_t stream) {
  return Dispatch(element, [&](auto type) {
    using T = decltype(type);
    const int vectors = shortcut.out.channels / kVector<T>;
    const size_t pixels = static_cast<size_t>(rows) * static_cast<size_t>(shortcut.out.height * shortcut.out.width);
    AddToShortcutKernel<T>
        <<<GridForVectors(pixels * static_cast<size_t>(vectors), kBackwardBlocks), kThreads, 0, stream>>>(
            static_cast<const T*>(dy), pixels, vectors, shortcut, static_cast<T*>(dx));
  });
}

}  // namespace nn::cuda
