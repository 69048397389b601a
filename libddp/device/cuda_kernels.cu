// SPDX-License-Identifier: Apache-2.0
#include "libddp/device/cuda_convert.h"
#include "libddp/device/cuda_kernels.h"

namespace ddp::cuda {
namespace {

// The work is cut into tiles, one for each block. A thread loads kUnroll vectors before it stores the first, so that
// enough bytes are in flight to keep the memory busy; neighbouring threads touch neighbouring vectors, whose wider side
// has 16 bytes.
constexpr int kThreads = 256;
constexpr int kUnroll = 4;

template <typename In, typename Out>
constexpr int kVector = 16 / (sizeof(In) > sizeof(Out) ? sizeof(In) : sizeof(Out));
template <typename In, typename Out>
constexpr size_t kTile = size_t{kThreads} * kUnroll* kVector<In, Out>;

// kCapacity: a launch with few ranges, by far the usual case, has few arguments to send.
template <int kCapacity>
struct Table {
  const void* in[kCapacity];
  void* out[kCapacity];
  size_t count[kCapacity];
  uint32_t end[kCapacity];  // the first tile that is not this range's
  int ranges;
};

// What happens to one element. Integers are only moved, whatever their size: as bytes.
template <typename In, typename Out>
struct Convert {
  Wide<In> scale;
  bool scaled, check;
  const float* factor;

  // Whether elements in place stay as they are, which is known when the kernel runs: gradients that are not clipped.
  __device__ bool Idle() const {
    return std::is_same_v<In, Out> && !scaled && !check && factor != nullptr && __ldg(factor) == 1;
  }

  __device__ Out operator()(In x, bool& bad) const {
    auto wide = Widen(x);
    if (scaled) wide *= scale;
    if (factor != nullptr) wide *= __ldg(factor);
    const Out out = Narrow<Out>(wide);
    if (check) bad |= !isfinite(Widen(out));  // rounded to 16 bits, it may have become infinite
    return out;
  }
};
struct Move {
  __device__ bool Idle() const { return false; }
  __device__ uint8_t operator()(uint8_t x, bool&) const { return x; }
};

template <typename In, typename Out, typename Op, int kCapacity>
__global__ void __launch_bounds__(kThreads)
    TransformKernel(const __grid_constant__ Table<kCapacity> table, Op op, uint32_t* nonfinite) {
  constexpr int kWidth = kVector<In, Out>;
  // Which range does this block's tile belong to? The first whose end lies behind it.
  int low = 0, high = table.ranges - 1;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (blockIdx.x < table.end[middle]) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  const uint32_t first_tile = low == 0 ? 0 : table.end[low - 1];
  const size_t begin = size_t{blockIdx.x - first_tile} * kTile<In, Out>;
  const size_t left = table.count[low] - begin;
  const In* const in = static_cast<const In*>(table.in[low]) + begin;
  Out* const out = table.out[low] == nullptr ? nullptr : static_cast<Out*>(table.out[low]) + begin;
  if (table.in[low] == table.out[low] && op.Idle()) return;
  bool bad = false;

  using InVector = Vector<In, kWidth>;
  using OutVector = Vector<Out, kWidth>;
  const bool aligned = reinterpret_cast<uintptr_t>(in) % sizeof(InVector) == 0 &&
                       reinterpret_cast<uintptr_t>(out) % sizeof(OutVector) == 0;
  if (aligned && left >= kTile<In, Out>) {
    InVector loaded[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) loaded[u] = reinterpret_cast<const InVector*>(in)[u * kThreads + threadIdx.x];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      OutVector result;
#pragma unroll
      for (int i = 0; i < kWidth; ++i) result.v[i] = op(loaded[u].v[i], bad);
      if (out != nullptr) reinterpret_cast<OutVector*>(out)[u * kThreads + threadIdx.x] = result;
    }
  } else {
    const size_t n = left < kTile<In, Out> ? left : kTile<In, Out>;
    size_t done = 0;
    if (aligned) {
      for (size_t v = threadIdx.x; v < n / kWidth; v += kThreads) {
        const InVector loaded = reinterpret_cast<const InVector*>(in)[v];
        OutVector result;
#pragma unroll
        for (int i = 0; i < kWidth; ++i) result.v[i] = op(loaded.v[i], bad);
        if (out != nullptr) reinterpret_cast<OutVector*>(out)[v] = result;
      }
      done = n / kWidth * kWidth;
    }
    for (size_t i = done + threadIdx.x; i < n; i += kThreads) {
      const Out result = op(in[i], bad);
      if (out != nullptr) out[i] = result;
    }
  }
  // One write for a block: where much is not finite, the writes would take longer than the data.
  if (nonfinite != nullptr && __syncthreads_or(bad) != 0 && threadIdx.x == 0) *nonfinite = 1;
}

__global__ void CommitKernel(const volatile uint32_t* failed, const volatile uint32_t* found_inf, uint32_t* skip_step,
                             volatile uint32_t* count) {
  // The host's memory is far away: all that lies there is asked for at once.
  const uint32_t has_failed = failed != nullptr ? *failed : 0;
  const uint32_t before = count != nullptr ? *count : 0;
  const uint32_t has_inf = found_inf != nullptr ? *found_inf : 0;
  *skip_step = has_failed != 0 || has_inf != 0 ? 1 : 0;
  if (count != nullptr) *count = before + 1;
}

__global__ void IncrementKernel(volatile uint32_t* counter) { *counter = *counter + 1; }

// The kernels behind this one read what the host has written before it counted.
__global__ void AwaitKernel(const volatile uint32_t* counter, uint32_t target, const volatile uint32_t* failed,
                            uint64_t* left) {
  bool reached = false;
  while (!(reached = static_cast<int32_t>(*counter - target) >= 0) && *failed == 0) __nanosleep(100);
  if (!reached && left != nullptr) *left = 1;
  __threadfence_system();
}

template <typename In, typename Out, typename Op, int kCapacity>
cudaError_t LaunchOne(const Op& op, size_t element_factor, uint32_t* nonfinite, const Piece* pieces, int count,
                      cudaStream_t stream) {
  Table<kCapacity> table;
  table.ranges = 0;
  size_t tiles = 0;
  for (int i = 0; i < count; ++i) {
    const size_t elements = pieces[i].count * element_factor;
    if (elements == 0) continue;
    tiles += (elements + kTile<In, Out> - 1) / kTile<In, Out>;
    table.in[table.ranges] = pieces[i].in;
    table.out[table.ranges] = pieces[i].out;
    table.count[table.ranges] = elements;
    table.end[table.ranges++] = static_cast<uint32_t>(tiles);
  }
  if (tiles == 0) return cudaSuccess;
  if (tiles > INT32_MAX) return cudaErrorInvalidValue;  // more than any GPU's memory holds
  TransformKernel<In, Out, Op, kCapacity><<<static_cast<uint32_t>(tiles), kThreads, 0, stream>>>(table, op, nonfinite);
  return cudaGetLastError();
}

template <typename In, typename Out, typename Op>
cudaError_t LaunchAll(const Op& op, size_t element_factor, uint32_t* nonfinite, const Piece* pieces, size_t count,
                      cudaStream_t stream) {
  constexpr int kFew = 4;
  for (size_t at = 0; at < count; at += kRangesPerLaunch) {
    const int n = static_cast<int>(count - at < kRangesPerLaunch ? count - at : kRangesPerLaunch);
    const cudaError_t error =
        n <= kFew ? LaunchOne<In, Out, Op, kFew>(op, element_factor, nonfinite, pieces + at, n, stream)
                  : LaunchOne<In, Out, Op, kRangesPerLaunch>(op, element_factor, nonfinite, pieces + at, n, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

template <typename In, typename Out>
cudaError_t LaunchConvert(double scale, uint32_t* nonfinite, const float* factor, const Piece* pieces, size_t count,
                          cudaStream_t stream) {
  using Scale = Wide<In>;
  const Convert<In, Out> op{static_cast<Scale>(scale), scale != 1, nonfinite != nullptr, factor};
  return LaunchAll<In, Out>(op, 1, nonfinite, pieces, count, stream);
}

template <typename In>
cudaError_t LaunchTo(Type out, double scale, uint32_t* nonfinite, const float* factor, const Piece* pieces,
                     size_t count, cudaStream_t stream) {
  switch (out) {
    case Type::kFloat32:
      return LaunchConvert<In, float>(scale, nonfinite, factor, pieces, count, stream);
    case Type::kFloat16:
      return LaunchConvert<In, __half>(scale, nonfinite, factor, pieces, count, stream);
    case Type::kBFloat16:
      return LaunchConvert<In, __nv_bfloat16>(scale, nonfinite, factor, pieces, count, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace

cudaError_t LaunchTransform(Type in, Type out, double scale, uint32_t* nonfinite, const float* factor,
                            const Piece* pieces, size_t count, cudaStream_t stream) {
  switch (in) {
    case Type::kFloat64:
      if (out != in) return cudaErrorInvalidValue;
      return LaunchConvert<double, double>(scale, nonfinite, factor, pieces, count, stream);
    case Type::kFloat32:
      return LaunchTo<float>(out, scale, nonfinite, factor, pieces, count, stream);
    case Type::kFloat16:
      return LaunchTo<__half>(out, scale, nonfinite, factor, pieces, count, stream);
    case Type::kBFloat16:
      return LaunchTo<__nv_bfloat16>(out, scale, nonfinite, factor, pieces, count, stream);
    default: {
      if (out != in || scale != 1 || nonfinite != nullptr || factor != nullptr) return cudaErrorInvalidValue;
      const size_t bytes = in == Type::kInt64 ? 8 : in == Type::kInt32 ? 4 : 1;
      return LaunchAll<uint8_t, uint8_t>(Move{}, bytes, nullptr, pieces, count, stream);
    }
  }
}

cudaError_t LaunchCommit(const uint32_t* failed, const uint32_t* found_inf, uint32_t* skip_step, uint32_t* count,
                         cudaStream_t stream) {
  CommitKernel<<<1, 1, 0, stream>>>(failed, found_inf, skip_step, count);
  return cudaGetLastError();
}

cudaError_t LaunchIncrement(uint32_t* counter, cudaStream_t stream) {
  IncrementKernel<<<1, 1, 0, stream>>>(counter);
  return cudaGetLastError();
}

cudaError_t LaunchAwait(const uint32_t* counter, uint32_t target, const uint32_t* failed, uint64_t* left,
                        cudaStream_t stream) {
  AwaitKernel<<<1, 1, 0, stream>>>(counter, target, failed, left);
  return cudaGetLastError();
}

cudaError_t CheckKernels() {
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, CommitKernel);
  if (error != cudaSuccess) cudaGetLastError();  // it is told here, and shall not be found by somebody else
  return error;
}

}  // namespace ddp::cuda
