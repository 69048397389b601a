// SPDX-License-Identifier: Apache-2.0
// What the kernels of the staged protocol compute, for each pair of types. The same bits as the CPU's (cpu_reduce.h).
// There is a kernel for each pair, on each kind of GPU: what is unrolled here costs the compiler minutes.
#ifndef LIBDDP_DEVICE_CUDA_STAGED_ELEMENTS_H_
#define LIBDDP_DEVICE_CUDA_STAGED_ELEMENTS_H_

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "libddp/device/cuda_convert.h"
#include "libddp/device/cuda_staged_block.h"

namespace ddp::cuda {
namespace {  // each file's own: nvcc exports what is not

constexpr uint8_t kMin = 2, kMax = 3, kProduct = 4;  // as ReduceOp; what is below is a sum

__device__ float Add(float a, float b) { return __fadd_rn(a, b); }
__device__ float Multiply(float a, float b) { return __fmul_rn(a, b); }
__device__ double Add(double a, double b) { return __dadd_rn(a, b); }
__device__ double Multiply(double a, double b) { return __dmul_rn(a, b); }
// They wrap.
template <typename T>
__device__ T Add(T a, T b) {
  return static_cast<T>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
}
template <typename T>
__device__ T Multiply(T a, T b) {
  return static_cast<T>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
}

// Without branches: this is unrolled many times.
template <typename T>
__device__ T Combine(uint8_t op, T acc, T x) {
  const bool replaces = x != x || (op == kMin ? x < acc : x > acc);
  const T chosen = op == kProduct ? Multiply(acc, x) : replaces ? x : acc;
  return op < kMin ? Add(acc, x) : chosen;
}

__device__ bool AlignedTo(size_t bytes, const void* a, const void* b = nullptr, const void* c = nullptr) {
  return (reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b) | reinterpret_cast<uintptr_t>(c)) % bytes ==
         0;
}

// Element k, of `size` bytes, of a packet that has none there yet; and what it is.
__device__ void SetElement(staged::PacketData* data, int k, int size, uint64_t bits) {
  const int byte = k * size;
  data->word[byte / 4] |= static_cast<uint32_t>(bits) << (8 * (byte % 4));
  if (size == 8) data->word[byte / 4 + 1] = static_cast<uint32_t>(bits >> 32);
}
__device__ uint64_t ElementOf(const staged::PacketData& data, int k, int size) {
  const int byte = k * size;
  const uint64_t bits = data.word[byte / 4] >> (8 * (byte % 4));
  return size == 8 ? bits | static_cast<uint64_t>(data.word[byte / 4 + 1]) << 32 : bits;
}

// One thread's elements.
template <typename In, typename Out>
class Elements {
 public:
  __device__ Elements(const staged::Place& at, const staged::Arithmetic& arithmetic)
      : at_(at), arithmetic_(arithmetic) {}

  // Whether a result is infinite or not a number.
  __device__ bool bad() const { return bad_; }

  __device__ void Reduce(const char* const* from, int n, char* to, char* also, uint64_t count) {
    const char* const ring = from[at_.rank == 0 ? 1 : 0];  // all but its own begin alike
    const bool aligned = AlignedTo(16, from[at_.rank], ring) && AlignedTo(sizeof(Vector<Out, kWidth>), to, also);
    const uint64_t vectors = aligned ? count / kWidth : 0;
    if (arithmetic_.op >= kMin) {
      ReduceVectors<1, 4, false>(from, n, to, also, vectors);
    } else if (n == 2) {
      ReduceVectors<4, 2, true>(from, n, to, also, vectors);
    } else {
      ReduceVectors<2, 4, true>(from, n, to, also, vectors);
    }
    for (uint64_t i = vectors * kWidth + threadIdx.x; i < count; i += kThreads) {
      Accumulator acc = {};
      for (int r = 0; r < n; ++r) Take<false>(r == 0, LoadFresh(reinterpret_cast<const In*>(from[r]) + i), &acc);
      const Out result = Result(acc);
      if (to != nullptr) reinterpret_cast<Out*>(to)[i] = result;
      if (also != nullptr) reinterpret_cast<Out*>(also)[i] = result;
    }
  }

  __device__ staged::PacketData ReducePacket(const staged::PacketData* data, uint64_t n) {
    constexpr int kPacketWidth = staged::kPacketBytes / (sizeof(In) > sizeof(Out) ? sizeof(In) : sizeof(Out));
    Accumulator acc[kPacketWidth] = {};
#pragma unroll
    for (int r = 0; r < staged::kMaxRanks; ++r) {
      if (r >= at_.ranks) break;
#pragma unroll
      for (int k = 0; k < kPacketWidth; ++k) {
        const uint64_t bits = ElementOf(data[r], k, sizeof(In));
        In x;
        memcpy(static_cast<void*>(&x), &bits, sizeof(In));
        Take<false>(r == 0, x, &acc[k]);
      }
    }
    staged::PacketData results = {};
#pragma unroll
    for (int k = 0; k < kPacketWidth; ++k) {
      if (static_cast<uint64_t>(k) >= n) continue;
      const Out result = Result(acc[k]);
      uint64_t bits = 0;
      memcpy(&bits, &result, sizeof(Out));
      SetElement(&results, k, sizeof(Out), bits);
    }
    return results;
  }

 private:
  static constexpr bool kIsInteger = std::is_integral_v<In>;
  static constexpr int kWidth = 16 / sizeof(In);
  using Accumulator = std::conditional_t<kIsInteger, In, Wide<In>>;

  // A thread's loads of so many vectors of so many ranks are under way at once.
  template <int kVectors, int kRanks, bool kSum>
  __device__ void ReduceVectors(const char* const* from, int n, char* to, char* also, uint64_t vectors) {
    using OutVector = Vector<Out, kWidth>;
    for (uint64_t first = threadIdx.x; first < vectors; first += kVectors * kThreads) {
      Accumulator acc[kVectors][kWidth] = {};
      for (int begin = 0; begin < n; begin += kRanks) {
        uint4 raw[kRanks][kVectors] = {};
#pragma unroll
        for (int k = 0; k < kRanks; ++k) {
          if (begin + k >= n) break;
          const uint4* const source = reinterpret_cast<const uint4*>(from[begin + k]) + first;
#pragma unroll
          for (int u = 0; u < kVectors; ++u) {
            if (first + u * kThreads >= vectors) break;
            raw[k][u] = LoadFresh(source + u * kThreads);
          }
        }
#pragma unroll
        for (int k = 0; k < kRanks; ++k) {
          if (begin + k >= n) break;
#pragma unroll
          for (int u = 0; u < kVectors; ++u) {
            const In* const x = reinterpret_cast<const In*>(&raw[k][u]);
#pragma unroll
            for (int i = 0; i < kWidth; ++i) Take<kSum>(begin + k == 0, x[i], &acc[u][i]);
          }
        }
      }
#pragma unroll
      for (int u = 0; u < kVectors; ++u) {
        const uint64_t v = first + u * kThreads;
        if (v >= vectors) break;
        OutVector result;
#pragma unroll
        for (int i = 0; i < kWidth; ++i) result.v[i] = Result(acc[u][i]);
        if (to != nullptr) reinterpret_cast<OutVector*>(to)[v] = result;
        if (also != nullptr) reinterpret_cast<OutVector*>(also)[v] = result;
      }
    }
  }

  template <bool kSum>
  __device__ void Take(bool first, In x, Accumulator* acc) {
    Accumulator value;
    if constexpr (kIsInteger) {
      value = x;
    } else {
      value = Multiply(Widen(x), sizeof(value) == 8 ? static_cast<Accumulator>(arithmetic_.pre64)
                                                    : static_cast<Accumulator>(arithmetic_.pre32));
    }
    *acc = first ? value : kSum ? Add(*acc, value) : Combine(arithmetic_.op, *acc, value);
  }
  // Scaled and rounded.
  __device__ Out Result(Accumulator acc) {
    if constexpr (kIsInteger) {
      return arithmetic_.divisor == 1 ? acc : static_cast<Out>(acc / static_cast<Accumulator>(arithmetic_.divisor));
    } else {
      const Out result = Narrow<Out>(Multiply(acc, sizeof(acc) == 8 ? static_cast<Accumulator>(arithmetic_.post64)
                                                                    : static_cast<Accumulator>(arithmetic_.post32)));
      bad_ |= !isfinite(Widen(result));
      return result;
    }
  }

  const staged::Place& at_;
  const staged::Arithmetic& arithmetic_;
  bool bad_ = false;
};

}  // namespace
}  // namespace ddp::cuda

#endif  // LIBDDP_DEVICE_CUDA_STAGED_ELEMENTS_H_
