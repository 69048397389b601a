// SPDX-License-Identifier: Apache-2.0
#include "examples/nn/cuda_kernels.h"

#include <algorithm>

#include "examples/nn/cuda_element.cuh"

namespace nn::cuda {
namespace {

__device__ float WarpMax(float x) {
  for (int lane = kWarp / 2; lane > 0; lane /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, lane));
  return x;
}
template <class T>
__device__ T WarpSum(T x) {
  for (int lane = kWarp / 2; lane > 0; lane /= 2) x += __shfl_xor_sync(~0u, x, lane);
  return x;
}

// In float the difference of two finite logits may be infinite.
template <class T>
__device__ double Below(T logit, float largest) {
  return static_cast<double>(ToFloat(logit)) - static_cast<double>(largest);
}

// A warp for a row, all rows in one block: so the loss is summed in one order, without a second launch.
template <class T>
__global__ void __launch_bounds__(1024)
    CrossEntropyKernel(const T* logits, const int32_t* labels, int rows, int classes, LossOptions options, T* dlogits,
                       LossRing loss) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  const float smoothing = options.label_smoothing, spread = smoothing / static_cast<float>(classes);
  const float loss_scale = options.loss_scale == nullptr ? 1 : *options.loss_scale;
  const float per_row = options.grad_scale * loss_scale / static_cast<float>(rows);
  double total = 0;
  for (int row = warp; row < rows; row += warps) {
    const T* const in = logits + static_cast<size_t>(row) * classes;
    T* const out = dlogits + static_cast<size_t>(row) * classes;
    const int label = labels[row];
    float largest = -INFINITY;
    for (int j = lane; j < classes; j += kWarp) largest = fmaxf(largest, ToFloat(in[j]));
    largest = WarpMax(largest);
    float sum = 0;
    double plain = 0;  // of the logits below the largest, for the smoothed part of the target
    for (int j = lane; j < classes; j += kWarp) {
      sum += expf(ToFloat(in[j]) - largest);
      if (smoothing > 0) plain += Below(in[j], largest);  // else 0 times -infinity would be a NaN
    }
    sum = WarpSum(sum);
    plain = WarpSum(plain);
    const float scale = 1 / sum;
    for (int j = lane; j < classes; j += kWarp) {
      const float target = spread + (j == label ? 1 - smoothing : 0.0f);
      out[j] = FromFloat<T>((expf(ToFloat(in[j]) - largest) * scale - target) * per_row);
    }
    total += static_cast<double>(logf(sum)) - static_cast<double>(1 - smoothing) * Below(in[label], largest) -
             static_cast<double>(spread) * plain;
  }
  __shared__ double totals[1024 / kWarp];
  if (lane == 0) totals[warp] = total;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int w = 1; w < warps; ++w) total += totals[w];
  loss.Next() = total / rows;
}

template <class T>
__global__ void __launch_bounds__(1024)
    CountHitsKernel(const T* logits, const int32_t* labels, int rows, int classes, int64_t* hits) {
  int mine = 0;
  for (int row = threadIdx.x; row < rows; row += blockDim.x) {
    const T* const in = logits + static_cast<size_t>(row) * classes;
    int best = 0;
    for (int j = 1; j < classes; ++j) best = ToFloat(in[j]) > ToFloat(in[best]) ? j : best;
    mine += best == labels[row];
  }
  __shared__ int all;
  if (threadIdx.x == 0) all = 0;
  __syncthreads();
  atomicAdd(&all, mine);
  __syncthreads();
  if (threadIdx.x == 0) *hits += all;
}

// A block for 32 columns, eight rows at a time.
template <class T>
__global__ void __launch_bounds__(kThreads)
    SumRowsKernel(const T* dy, int rows, int width, bool accumulate, float* sums) {
  constexpr int kRows = kThreads / kWarp;
  const int column = blockIdx.x * kWarp + threadIdx.x % kWarp, first = threadIdx.x / kWarp;
  float sum = 0;
  if (column < width) {
    for (int row = first; row < rows; row += kRows) sum += ToFloat(dy[static_cast<size_t>(row) * width + column]);
  }
  __shared__ float parts[kRows][kWarp];
  parts[first][threadIdx.x % kWarp] = sum;
  __syncthreads();
  if (first != 0 || column >= width) return;
  for (int r = 1; r < kRows; ++r) sum += parts[r][threadIdx.x];
  sums[column] = accumulate ? sums[column] + sum : sum;
}

template <class T>
__global__ void __launch_bounds__(kThreads) MaskKernel(const T* y, T* dy, size_t count) {
  const size_t i = ThreadIndex();
  if (i < count && ToFloat(y[i]) <= 0) dy[i] = FromFloat<T>(0);
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    CastKernel(const float* x, T* y, size_t count, const float* x2, T* y2, size_t count2) {
  const size_t i = ThreadIndex();
  if (i < count) {
    y[i] = FromFloat<T>(x[i]);
  } else if (i - count < count2) {
    y2[i - count] = FromFloat<T>(x2[i - count]);
  }
}

__global__ void __launch_bounds__(kThreads) AddScaledKernel(const float* x, float* y, size_t count, float scale) {
  const size_t i = ThreadIndex();
  if (i < count) y[i] = (x[i] + y[i]) * scale;
}

__device__ bool Skipped(const StepWords& words) {
  return (words.found_inf != nullptr && *words.found_inf != 0) || (words.skip_step != nullptr && *words.skip_step != 0);
}

__device__ float GradScale(float scale, const StepWords& words) {
  if (words.inv_scale != nullptr) scale *= *words.inv_scale;
  return words.clip == nullptr ? scale : scale * *words.clip;
}

// Of all threads of a block of kThreads, for each of them.
__device__ double BlockSum(double x) {
  __shared__ double parts[kThreads / kWarp];
  for (int lane = kWarp / 2; lane > 0; lane /= 2) x += __shfl_xor_sync(~0u, x, lane);
  __syncthreads();  // those of an earlier call have been read
  if (threadIdx.x % kWarp == 0) parts[threadIdx.x / kWarp] = x;
  __syncthreads();
  double sum = 0;
  for (const double part : parts) sum += part;
  return sum;
}

// Each block adds up its part, and the last of them all parts: in an order that depends on nothing but the count.
__global__ void __launch_bounds__(kThreads) ClipKernel(double clip_norm, float grad_scale, size_t count,
                                                       const float* grad, OptimizerState* state, StepWords words) {
  double squares = 0;
#pragma unroll 4
  for (size_t i = ThreadIndex(); i < count; i += static_cast<size_t>(gridDim.x) * kThreads) {
    const double g = grad[i];
    squares += g * g;
  }
  squares = BlockSum(squares);
  __shared__ bool last;
  if (threadIdx.x == 0) {
    state->squares[blockIdx.x] = squares;
    __threadfence();
    last = atomicAdd(&state->clip_blocks_done, 1) + 1 == gridDim.x;
  }
  __syncthreads();
  if (!last) return;
  __threadfence();
  static_assert(OptimizerState::kClipBlocks <= kThreads);
  const double all = BlockSum(threadIdx.x < gridDim.x ? __ldcg(&state->squares[threadIdx.x]) : 0);
  if (threadIdx.x != 0) return;
  state->clip_blocks_done = 0;
  state->clip =
      static_cast<float>(ClipFactor(clip_norm, sqrt(all) * static_cast<double>(GradScale(grad_scale, words))));
}

template <bool kMomentum>
__device__ void SgdOne(const SgdCoefficients& c, float grad, float& value, float& m) {
  const float g = fmaf(c.weight_decay, value, grad * c.grad_scale);
  const float next = kMomentum ? fmaf(c.momentum, m, g) : g;
  if (kMomentum) m = next;
  value = fmaf(-c.lr, next, value);
}

template <bool kMomentum>
__global__ void __launch_bounds__(kThreads) SgdKernel(SgdCoefficients c, size_t count, const float* grad, float* value,
                                                      float* m, OptimizerState* state, StepWords words) {
  if (Skipped(words)) return;
  c.lr = state->rates.sgd_lr;
  c.grad_scale = GradScale(c.grad_scale, words);
  const size_t i = ThreadIndex();
  if (i == 0) ++state->steps;
  if (i * 4 + 4 <= count) {
    const float4 g = reinterpret_cast<const float4*>(grad)[i];
    float4 v = reinterpret_cast<float4*>(value)[i];
    float4 moment = kMomentum ? reinterpret_cast<float4*>(m)[i] : float4{};
    SgdOne<kMomentum>(c, g.x, v.x, moment.x);
    SgdOne<kMomentum>(c, g.y, v.y, moment.y);
    SgdOne<kMomentum>(c, g.z, v.z, moment.z);
    SgdOne<kMomentum>(c, g.w, v.w, moment.w);
    if (kMomentum) reinterpret_cast<float4*>(m)[i] = moment;
    reinterpret_cast<float4*>(value)[i] = v;
    return;
  }
  float none = 0;
  for (size_t k = i * 4; k < count; ++k) SgdOne<kMomentum>(c, grad[k], value[k], kMomentum ? m[k] : none);
}

__global__ void SetRatesKernel(OptimizerRates rates, OptimizerState* state) { state->rates = rates; }

__global__ void AdamStepKernel(AdamBetas betas, OptimizerState* state, StepWords words) {
  if (Skipped(words)) return;
  const double t = ++state->steps;
  state->step_size = static_cast<float>(state->rates.lr / (1 - pow(betas.beta1, t)));
  state->rsqrt_correction = static_cast<float>(1 / sqrt(1 - pow(betas.beta2, t)));
}

__global__ void __launch_bounds__(kThreads)
    AdamKernel(AdamCoefficients c, size_t count, const float* grad, float* value, float* m, float* v,
               const OptimizerState* state, StepWords words) {
  if (Skipped(words)) return;
  c.keep = state->rates.keep;
  c.grad_scale = GradScale(c.grad_scale, words);
  const size_t i = ThreadIndex();
  if (i >= count) return;
  const float x = value[i];
  const float g = fmaf(c.weight_decay, x, grad[i] * c.grad_scale);
  const float mean = fmaf(c.beta1, m[i], c.one_minus_beta1 * g);
  const float square = fmaf(c.beta2, v[i], c.one_minus_beta2 * (g * g));
  const float scale = fmaf(sqrtf(square), state->rsqrt_correction, c.eps);
  m[i] = mean;
  v[i] = square;
  value[i] = fmaf(-state->step_size, mean / scale, x * c.keep);
}

}  // namespace

cudaError_t CrossEntropy(Element element, const void* logits, const int32_t* labels, int rows, int classes,
                         const LossOptions& options, void* dlogits, const LossRing& loss, cudaStream_t stream) {
  return Dispatch(element, [&](auto type) {
    using T = decltype(type);
    CrossEntropyKernel<T><<<1, 1024, 0, stream>>>(static_cast<const T*>(logits), labels, rows, classes, options,
                                                  static_cast<T*>(dlogits), loss);
  });
}

cudaError_t CountHits(Element element, const void* logits, const int32_t* labels, int rows, int classes, int64_t* hits,
                      cudaStream_t stream) {
  return Dispatch(element, [&](auto type) {
    using T = decltype(type);
    CountHitsKernel<T><<<1, 1024, 0, stream>>>(static_cast<const T*>(logits), labels, rows, classes, hits);
  });
}

cudaError_t SumRows(Element element, const void* dy, int rows, int width, bool accumulate, float* sums,
                    cudaStream_t stream) {
  return Dispatch(element, [&](auto type) {
    using T = decltype(type);
    SumRowsKernel<T><<<Blocks(static_cast<size_t>(width), kWarp), kThreads, 0, stream>>>(static_cast<const T*>(dy),
                                                                                         rows, width, accumulate, sums);
  });
}

cudaError_t Mask(Element element, const void* y, void* dy, size_t count, cudaStream_t stream) {
  return Dispatch(element, [&](auto type) {
    using T = decltype(type);
    MaskKernel<T>
        <<<Blocks(count, kThreads), kThreads, 0, stream>>>(static_cast<const T*>(y), static_cast<T*>(dy), count);
  });
}

cudaError_t Cast(Element element, const CastRange& first, const CastRange& second, cudaStream_t stream) {
  return Dispatch(element, [&](auto type) {
    using T = decltype(type);
    CastKernel<T><<<Blocks(first.count + second.count, kThreads), kThreads, 0, stream>>>(
        first.x, static_cast<T*>(first.y), first.count, second.x, static_cast<T*>(second.y), second.count);
  });
}

cudaError_t AddScaled(const float* x, float* y, size_t count, float scale, cudaStream_t stream) {
  AddScaledKernel<<<Blocks(count, kThreads), kThreads, 0, stream>>>(x, y, count, scale);
  return cudaGetLastError();
}

cudaError_t Clip(double clip_norm, float grad_scale, size_t count, const float* grad, OptimizerState* state,
                 const StepWords& words, cudaStream_t stream) {
  const unsigned blocks = std::min(Blocks(count, kThreads), OptimizerState::kClipBlocks);
  ClipKernel<<<blocks, kThreads, 0, stream>>>(clip_norm, grad_scale, count, grad, state, words);
  return cudaGetLastError();
}

cudaError_t Sgd(const SgdCoefficients& coefficients, size_t count, const float* grad, float* value, float* m,
                OptimizerState* state, const StepWords& words, cudaStream_t stream) {
  const unsigned blocks = Blocks(count, kThreads * 4);
  if (m != nullptr) {
    SgdKernel<true><<<blocks, kThreads, 0, stream>>>(coefficients, count, grad, value, m, state, words);
  } else {
    SgdKernel<false><<<blocks, kThreads, 0, stream>>>(coefficients, count, grad, value, m, state, words);
  }
  return cudaGetLastError();
}

cudaError_t SetRates(const OptimizerRates& rates, OptimizerState* state, cudaStream_t stream) {
  SetRatesKernel<<<1, 1, 0, stream>>>(rates, state);
  return cudaGetLastError();
}

cudaError_t Adam(const AdamBetas& betas, const AdamCoefficients& coefficients, size_t count, const float* grad,
                 float* value, float* m, float* v, OptimizerState* state, const StepWords& words, cudaStream_t stream) {
  AdamStepKernel<<<1, 1, 0, stream>>>(betas, state, words);
  AdamKernel<<<Blocks(count, kThreads), kThreads, 0, stream>>>(coefficients, count, grad, value, m, v, state, words);
  return cudaGetLastError();
}

}  // namespace nn::cuda
