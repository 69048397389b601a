// SPDX-License-Identifier: Apache-2.0
// Block-scaled 8-bit numbers on GPUs. Compiled without fused multiply-add, which would change the bits.
#include "libddp/device/block_rule.h"
#include "libddp/device/cuda_convert.h"
#include "libddp/device/cuda_kernels.h"
#include "libddp/device/cuda_staged_block.h"
#include "libddp/device/staged_blocks.h"

namespace ddp::cuda {
namespace {

using blocks::Format;
using Step = blocks::Pass::Step;

// A warp works on a group at a time, each of its lanes on 16 elements: eight lanes have a block.
constexpr int kLanes = 32;
constexpr int kLane = static_cast<int>(blocks::kGroup) / kLanes;
constexpr int kBlockLanes = kLanes / static_cast<int>(blocks::kGroupBlocks);
constexpr int kWarps = kThreads / kLanes;
constexpr int kTogether = 2;  // groups that a warp loads before it uses the first

__device__ int LaneOf() { return static_cast<int>(threadIdx.x) % kLanes; }
__device__ int WarpOf() { return static_cast<int>(threadIdx.x) / kLanes; }

// How many of `count` elements are this lane's of a group, or come after them.
__device__ uint64_t LeftOf(uint64_t group, uint64_t count) {
  const uint64_t first = group * blocks::kGroup + static_cast<uint64_t>(LaneOf() * kLane);
  return first < count ? count - first : 0;
}

// A lane's part of a group.
template <typename T>
__device__ void LoadLane(const char* array, uint64_t group, uint64_t count, float scale, float* x) {
  constexpr int kWidth = 16 / sizeof(T);
  using Wide = Vector<T, kWidth>;
  const uint64_t left = LeftOf(group, count);
  const T* const from = reinterpret_cast<const T*>(array) + group * blocks::kGroup + LaneOf() * kLane;
  if (left >= kLane && reinterpret_cast<uintptr_t>(from) % sizeof(Wide) == 0) {
#pragma unroll
    for (int v = 0; v < kLane / kWidth; ++v) {
      const Wide loaded = reinterpret_cast<const Wide*>(from)[v];
#pragma unroll
      for (int i = 0; i < kWidth; ++i) x[v * kWidth + i] = Widen(loaded.v[i]) * scale;
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kLane; ++i) x[i] = i < left ? Widen(from[i]) * scale : 0;
}
template <typename T>
__device__ void StoreLane(const float* x, char* array, uint64_t group, uint64_t count) {
  constexpr int kWidth = 16 / sizeof(T);
  using Wide = Vector<T, kWidth>;
  const uint64_t left = LeftOf(group, count);
  T* const to = reinterpret_cast<T*>(array) + group * blocks::kGroup + LaneOf() * kLane;
  if (left >= kLane && reinterpret_cast<uintptr_t>(to) % sizeof(Wide) == 0) {
#pragma unroll
    for (int v = 0; v < kLane / kWidth; ++v) {
      Wide narrow;
#pragma unroll
      for (int i = 0; i < kWidth; ++i) narrow.v[i] = Narrow<T>(x[v * kWidth + i]);
      reinterpret_cast<Wide*>(to)[v] = narrow;
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kLane; ++i) {
    if (i < left) to[i] = Narrow<T>(x[i]);
  }
}

// The same in 8 bits.
struct Packed {
  uint4 values;
  float scale;
};

template <Format kFormat>
__device__ Packed Pack(const float* x) {
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kLane; ++i) largest = max(largest, blocks::BitsOf(x[i]) & blocks::kMagnitude);
#pragma unroll
  for (int distance = kBlockLanes / 2; distance > 0; distance /= 2) {
    largest = max(largest, __shfl_xor_sync(UINT32_MAX, largest, distance));
  }
  const float inverse = blocks::InverseOf(kFormat, largest);
  uint32_t words[4] = {};
#pragma unroll
  for (int i = 0; i < kLane; ++i) {
    const uint32_t value = inverse == 0 ? 0 : blocks::Encode(kFormat, x[i] * inverse);
    words[i / 4] |= value << (8 * (i % 4));
  }
  return {make_uint4(words[0], words[1], words[2], words[3]), blocks::ScaleOf(kFormat, largest)};
}
// element(i, x) for each of the lane's elements
template <Format kFormat, typename Fn>
__device__ void Unpack(const Packed& packed, const Fn& element) {
  const uint32_t words[4] = {packed.values.x, packed.values.y, packed.values.z, packed.values.w};
#pragma unroll
  for (int i = 0; i < kLane; ++i) {
    element(i, blocks::Decode(kFormat, static_cast<uint8_t>(words[i / 4] >> (8 * (i % 4)))) * packed.scale);
  }
}

__device__ const float* ScaleIn(const char* group) {
  return reinterpret_cast<const float*>(group + blocks::kGroup) + LaneOf() / kBlockLanes;
}
// Fresh also where this GPU has written it: then it is only slower.
__device__ Packed LoadPacked(const char* groups, uint64_t group) {
  const char* const from = groups + group * blocks::kGroupBytes;
  return {LoadFresh(reinterpret_cast<const uint4*>(from) + LaneOf()), LoadFresh(ScaleIn(from))};
}
__device__ void StorePacked(const Packed& packed, char* groups, uint64_t group) {
  char* const to = groups + group * blocks::kGroupBytes;
  reinterpret_cast<uint4*>(to)[LaneOf()] = packed.values;
  if (LaneOf() % kBlockLanes == 0) *const_cast<float*>(ScaleIn(to)) = packed.scale;
}

// The next rank's contribution.
template <Format kFormat>
__device__ void Add(bool first, const Packed& packed, float* sum) {
  Unpack<kFormat>(packed, [&](int i, float x) { sum[i] = first ? x : sum[i] + x; });
}

// --- one array ------------------------------------------------------------------------------------------------------

template <Format kFormat, typename T, Step kStep>
__global__ void __launch_bounds__(kThreads) PassKernel(const __grid_constant__ blocks::Pass pass) {
  const char* const in = static_cast<const char*>(pass.in);
  char* const out = static_cast<char*>(pass.out);
  const uint64_t groups = blocks::GroupsOf(pass.count), step = uint64_t{gridDim.x} * kWarps;
  for (uint64_t g = uint64_t{blockIdx.x} * kWarps + static_cast<uint64_t>(WarpOf()); g < groups; g += step) {
    float x[kLane];
    if constexpr (kStep == Step::kQuantize) {
      LoadLane<T>(in, g, pass.count, pass.scale, x);
    } else if constexpr (kStep == Step::kReduce) {
      for (int r = 0; r < pass.ins; ++r) {
        Add<kFormat>(r == 0, LoadPacked(in + static_cast<uint64_t>(r) * pass.stride, g), x);
      }
#pragma unroll
      for (float& one : x) one *= pass.scale;
    } else {
      Add<kFormat>(true, LoadPacked(in, g), x);
    }
    if constexpr (kStep == Step::kDequantize) {
      StoreLane<T>(x, out, g, pass.count);
    } else {
      StorePacked(Pack<kFormat>(x), out, g);
    }
  }
}

template <Format kFormat, typename T>
cudaError_t LaunchPass(const blocks::Pass& pass, cudaStream_t stream) {
  constexpr uint64_t kMostBlocks = 4096;
  const uint64_t needed = (blocks::GroupsOf(pass.count) + kWarps - 1) / kWarps;
  if (needed == 0) return cudaSuccess;
  const unsigned grid = static_cast<unsigned>(needed < kMostBlocks ? needed : kMostBlocks);
  switch (pass.step) {
    case Step::kQuantize:
      PassKernel<kFormat, T, Step::kQuantize><<<grid, kThreads, 0, stream>>>(pass);
      break;
    case Step::kReduce:
      PassKernel<kFormat, float, Step::kReduce><<<grid, kThreads, 0, stream>>>(pass);
      break;
    case Step::kDequantize:
      PassKernel<kFormat, T, Step::kDequantize><<<grid, kThreads, 0, stream>>>(pass);
      break;
  }
  return cudaGetLastError();
}

// --- an all-reduce through host memory ------------------------------------------------------------------------------

// See staged_blocks.h.
template <Format kFormat, typename T>
class BlockReducer : public WaitingBlock {
 public:
  __device__ explicit BlockReducer(const staged::BlockReduction& c) : WaitingBlock(c.at), c_(c) {}

  __device__ void Quantize(const char* from, uint64_t count, char* groups) {
    for (uint64_t g = static_cast<uint64_t>(WarpOf()); g < blocks::GroupsOf(count); g += kWarps) {
      float x[kLane];
      LoadLane<T>(from, g, count, c_.prescale, x);
      StorePacked(Pack<kFormat>(x), groups, g);
    }
  }

  __device__ void Reduce(const char* own, uint64_t count, const char* in, uint64_t stride, char* publish, char* to) {
    const uint64_t groups = blocks::GroupsOf(count);
    for (uint64_t first = static_cast<uint64_t>(WarpOf()); first < groups; first += kTogether * kWarps) {
      float sum[kTogether][kLane];
      for (int r = 0; r < at_.ranks; ++r) {
        Packed packed[kTogether];
#pragma unroll
        for (int k = 0; k < kTogether; ++k) {
          const uint64_t g = first + static_cast<uint64_t>(k * kWarps);
          if (g < groups) packed[k] = r == at_.rank ? Own(own, g, count) : LoadPacked(in + r * stride, g);
        }
#pragma unroll
        for (int k = 0; k < kTogether; ++k) Add<kFormat>(r == 0, packed[k], sum[k]);
      }
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
        const uint64_t g = first + static_cast<uint64_t>(k * kWarps);
        if (g >= groups) continue;
#pragma unroll
        for (float& one : sum[k]) one *= c_.postscale;
        const Packed result = Pack<kFormat>(sum[k]);
        StorePacked(result, publish, g);
        Add<kFormat>(true, result, sum[k]);
        StoreLane<T>(sum[k], to, g, count);
      }
    }
  }

  __device__ void Dequantize(const char* in, uint64_t count, char* to) {
    const uint64_t groups = blocks::GroupsOf(count);
    for (uint64_t first = static_cast<uint64_t>(WarpOf()); first < groups; first += kTogether * kWarps) {
      Packed packed[kTogether];
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
        const uint64_t g = first + static_cast<uint64_t>(k * kWarps);
        if (g < groups) packed[k] = LoadPacked(in, g);
      }
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
        const uint64_t g = first + static_cast<uint64_t>(k * kWarps);
        if (g >= groups) continue;
        float x[kLane];
        Add<kFormat>(true, packed[k], x);
        StoreLane<T>(x, to, g, count);
      }
    }
  }

 private:
  __device__ Packed Own(const char* from, uint64_t group, uint64_t count) {
    float x[kLane];
    LoadLane<T>(from, group, count, c_.prescale, x);
    return Pack<kFormat>(x);
  }

  const staged::BlockReduction& c_;
};

template <Format kFormat, typename T>
__global__ void __launch_bounds__(kThreads, 2) ReductionKernel(const __grid_constant__ staged::BlockReduction c) {
  BlockReducer<kFormat, T> block(c);
  staged::RunBlockReduction(block, c, static_cast<int>(blockIdx.x));
}

// --- which types ----------------------------------------------------------------------------------------------------

template <Format kOne, typename One>
struct Choice {
  static constexpr Format kFormat = kOne;
  using T = One;
};

// launch(Choice<format, type>()) of what is known when it runs.
template <Format kFormat, typename Launch>
cudaError_t ChooseType(uint8_t dtype, const Launch& launch) {
  switch (static_cast<Type>(dtype)) {
    case Type::kFloat32:
      return launch(Choice<kFormat, float>());
    case Type::kFloat16:
      return launch(Choice<kFormat, __half>());
    case Type::kBFloat16:
      return launch(Choice<kFormat, __nv_bfloat16>());
    default:
      return cudaErrorInvalidValue;
  }
}
template <typename Launch>
cudaError_t Choose(Format format, uint8_t dtype, const Launch& launch) {
  return format == Format::kInt8 ? ChooseType<Format::kInt8>(dtype, launch)
                                 : ChooseType<Format::kFloat8E4M3>(dtype, launch);
}

}  // namespace

cudaError_t LaunchBlocks(const blocks::Pass& pass, cudaStream_t stream) {
  return Choose(pass.format, pass.dtype, [&](auto choice) {
    using Chosen = decltype(choice);
    return LaunchPass<Chosen::kFormat, typename Chosen::T>(pass, stream);
  });
}

cudaError_t LaunchBlockReduction(const staged::BlockReduction& c, cudaStream_t stream) {
  return Choose(c.format, c.dtype, [&](auto choice) {
    using Chosen = decltype(choice);
    const unsigned grid = static_cast<unsigned>(staged::BlocksOf(c));
    ReductionKernel<Chosen::kFormat, typename Chosen::T><<<grid, kThreads, 0, stream>>>(c);
    return cudaGetLastError();
  });
}

void BlockReductionKernels(const void** kernels) {
  for (const Format format : {Format::kInt8, Format::kFloat8E4M3}) {
    for (const Type type : {Type::kFloat32, Type::kFloat16, Type::kBFloat16}) {
      Choose(format, static_cast<uint8_t>(type), [&](auto choice) {
        using Chosen = decltype(choice);
        *kernels++ = reinterpret_cast<const void*>(ReductionKernel<Chosen::kFormat, typename Chosen::T>);
        return cudaSuccess;
      });
    }
  }
}

}  // namespace ddp::cuda
