// SPDX-License-Identifier: Apache-2.0
// The kernels of the staged protocol.
#include "libddp/device/cuda_convert.h"
#include "libddp/device/cuda_kernels.h"
#include "libddp/device/cuda_staged_block.h"
#include "libddp/device/staged_messages.h"
#include "libddp/device/staged_protocol.h"

namespace ddp::cuda {
namespace {

constexpr int kUnroll = 8;  // vectors that a thread loads before it uses the first

// Each half of it is whole; see staged::Packet.
__device__ staged::Packet LoadPacket(const staged::Packet* from) {
  staged::Packet packet;
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(packet.half[0]), "=l"(packet.half[1])
               : "l"(from)
               : "memory");
  return packet;
}
__device__ void StorePacket(staged::Packet* to, const staged::Packet& packet) {
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(packet.half[0]), "l"(packet.half[1])
               : "memory");
}

// The type that elements are reduced in, with the CPU's rules (cpu_reduce.h). No multiplication joins an addition.
template <typename T>
constexpr bool kIsInteger = std::is_integral_v<T>;
template <typename T>
using Accumulate = std::conditional_t<kIsInteger<T>, T, Wide<T>>;

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

template <typename T>
__device__ T Combine(uint8_t op, T acc, T x) {
  switch (op) {
    case 2:  // ReduceOp::kMin
      return x < acc || x != x ? x : acc;
    case 3:  // ReduceOp::kMax
      return x > acc || x != x ? x : acc;
    case 4:  // ReduceOp::kProduct
      return Multiply(acc, x);
    default:
      return Add(acc, x);
  }
}

template <typename In>
__device__ Accumulate<In> ToAccumulate(In x) {
  if constexpr (kIsInteger<In>) {
    return x;
  } else {
    return Widen(x);
  }
}

template <typename Acc>
__device__ Acc Prescale(const staged::Arithmetic& a, Acc x) {
  if constexpr (kIsInteger<Acc>) {
    return x;
  } else {
    return a.pre ? Multiply(x, sizeof(Acc) == 8 ? static_cast<Acc>(a.pre64) : static_cast<Acc>(a.pre32)) : x;
  }
}

// Scaled and rounded.
template <typename Out, typename Acc>
__device__ Out Finish(const staged::Arithmetic& a, Acc x) {
  if constexpr (kIsInteger<Acc>) {
    return a.divisor == 1 ? x : static_cast<Acc>(x / static_cast<Acc>(a.divisor));
  } else {
    if (a.post) x = Multiply(x, sizeof(Acc) == 8 ? static_cast<Acc>(a.post64) : static_cast<Acc>(a.post32));
    return Narrow<Out>(x);
  }
}

template <typename Out>
__device__ bool NotFinite(Out x) {
  if constexpr (kIsInteger<Out>) {
    return false;
  } else {
    return !isfinite(Widen(x));
  }
}

__device__ bool AlignedTo(size_t bytes, const void* a, const void* b = nullptr, const void* c = nullptr) {
  return (reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b) | reinterpret_cast<uintptr_t>(c)) % bytes ==
         0;
}

// What the protocol asks of a thread block; see staged_protocol.h. Reduces In to Out.
template <typename In, typename Out>
class Block : public WaitingBlock {
 public:
  __device__ Block(const staged::Place& at, const staged::Arithmetic* arithmetic)
      : WaitingBlock(at), arithmetic_(arithmetic) {}

  __device__ void Copy(const staged::Piece* pieces, int n, bool from_ring) {
    if (from_ring) {
      Move<true, false>(pieces, n);
    } else {
      Move<false, false>(pieces, n);
    }
  }
  __device__ void CopyChecked(const staged::Piece* pieces, int n) {
    if (!kIsInteger<Out> && arithmetic_->nonfinite != nullptr) {
      Move<true, true>(pieces, n);
    } else {
      Move<true, false>(pieces, n);
    }
  }

  __device__ void Reduce(const char* const* from, int n, char* to, char* also, uint64_t count) {
    constexpr int kWidth = 16 / sizeof(In);
    const char* const ring = from[at_.rank == 0 ? 1 : 0];  // all but its own begin alike
    const bool aligned = AlignedTo(16, from[at_.rank], ring) && AlignedTo(sizeof(Vector<Out, kWidth>), to, also);
    const uint64_t vectors = aligned ? count / kWidth : 0;
    if (n == 2) {
      ReduceVectors<4, 2>(from, n, to, also, vectors);
    } else {
      ReduceVectors<2, 4>(from, n, to, also, vectors);
    }
    for (uint64_t i = vectors * kWidth + threadIdx.x; i < count; i += kThreads) {
      Accumulate<In> acc;
      for (int r = 0; r < n; ++r) Take(r == 0, LoadFresh(reinterpret_cast<const In*>(from[r]) + i), &acc);
      const Out result = Result(acc);
      if (to != nullptr) reinterpret_cast<Out*>(to)[i] = result;
      if (also != nullptr) reinterpret_cast<Out*>(also)[i] = result;
    }
  }

  __device__ int thread() const { return static_cast<int>(threadIdx.x); }
  __device__ int threads() const { return kThreads; }

  __device__ uint64_t Gather(const staged::RangeTable& in, uint64_t first, uint64_t n) {
    alignas(staged::kPacketBytes) In x[kPacketWidth] = {};
#pragma unroll
    for (int k = 0; k < kPacketWidth; ++k) {
      uint64_t bytes = sizeof(In);
      if (k < n) x[k] = *reinterpret_cast<const In*>(Locate(in, (first + k) * sizeof(In), &bytes));
    }
    return *reinterpret_cast<const uint64_t*>(x);
  }

  __device__ void Put(staged::Packet* to, uint64_t data, uint32_t mark) {
    const uint64_t above = static_cast<uint64_t>(mark) << 32;
    StorePacket(to, {{above | (data & UINT32_MAX), above | (data >> 32)}});
  }

  __device__ bool Receive(staged::Packet* from, uint64_t stride, uint32_t mark, uint64_t own, uint64_t* data) {
    bool received = true;
#pragma unroll
    for (int first = 0; first < staged::kMaxRanks; first += kTogether) {
      if (first < at_.ranks) received = received && ReceiveSome(first, from, stride, mark, own, data);
    }
    return received;
  }

  __device__ void ReducePacket(const uint64_t* data, const staged::RangeTable& out, uint64_t first, uint64_t n) {
    Accumulate<In> acc[kPacketWidth] = {};
#pragma unroll
    for (int r = 0; r < staged::kMaxRanks; ++r) {
      if (r >= at_.ranks) break;
      const In* const x = reinterpret_cast<const In*>(&data[r]);
#pragma unroll
      for (int k = 0; k < kPacketWidth; ++k) {
        if (k < n) Take(r == 0, x[k], &acc[k]);
      }
    }
#pragma unroll
    for (int k = 0; k < kPacketWidth; ++k) {
      uint64_t bytes = sizeof(Out);
      if (k < n) *reinterpret_cast<Out*>(Locate(out, (first + k) * sizeof(Out), &bytes)) = Result(acc[k]);
    }
  }

  // At the kernel's end.
  __device__ void Report() {
    if (arithmetic_ == nullptr || arithmetic_->nonfinite == nullptr) return;
    if (__syncthreads_or(bad_) != 0 && threadIdx.x == 0) *arithmetic_->nonfinite = 1;
  }

 private:
  static constexpr int kPacketWidth = staged::kPacketBytes / sizeof(In);
  static constexpr int kTogether = 8;

  // From kTogether ranks on: the loads of their packets are under way at once.
  __device__ bool ReceiveSome(int first, const staged::Packet* from, uint64_t stride, uint32_t mark, uint64_t own,
                              uint64_t* data) {
    uint32_t missing = 0;
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      if (first + k == at_.rank) data[first + k] = own;
      if (first + k != at_.rank && first + k < at_.ranks) missing |= 1u << k;
    }
    for (int polls = 1; missing != 0; ++polls) {
      staged::Packet packet[kTogether];
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
        if ((missing >> k & 1) != 0) packet[k] = LoadPacket(from + static_cast<uint64_t>(first + k) * stride);
      }
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
        if ((missing >> k & 1) == 0 || packet[k].half[0] >> 32 != mark || packet[k].half[1] >> 32 != mark) continue;
        data[first + k] = (packet[k].half[0] & UINT32_MAX) | packet[k].half[1] << 32;
        missing &= ~(1u << k);
      }
      if (polls % kPollsALook == 0 && missing != 0 && MustLeave()) return false;
    }
    return true;
  }

  // A thread's loads of so many vectors of so many ranks are under way at once.
  template <int kVectors, int kRanks>
  __device__ void ReduceVectors(const char* const* from, int n, char* to, char* also, uint64_t vectors) {
    constexpr int kWidth = 16 / sizeof(In);
    using OutVector = Vector<Out, kWidth>;
    for (uint64_t first = threadIdx.x; first < vectors; first += kVectors * kThreads) {
      Accumulate<In> acc[kVectors][kWidth];
      for (int begin = 0; begin < n; begin += kRanks) {
        uint4 raw[kRanks][kVectors] = {};
#pragma unroll
        for (int k = 0; k < kRanks; ++k) {
          if (begin + k >= n) break;
          const uint4* const source = reinterpret_cast<const uint4*>(from[begin + k]) + first;
#pragma unroll
          for (int u = 0; u < kVectors; ++u) {
            if (first + u * kThreads >= vectors) break;
            raw[k][u] = begin + k == at_.rank ? source[u * kThreads] : LoadFresh(source + u * kThreads);
          }
        }
#pragma unroll
        for (int k = 0; k < kRanks; ++k) {
          if (begin + k >= n) break;
#pragma unroll
          for (int u = 0; u < kVectors; ++u) {
            const In* const x = reinterpret_cast<const In*>(&raw[k][u]);
#pragma unroll
            for (int i = 0; i < kWidth; ++i) Take(begin + k == 0, x[i], &acc[u][i]);
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

  template <typename Acc>
  __device__ void Take(bool first, In x, Acc* acc) {
    const Acc value = Prescale(*arithmetic_, ToAccumulate(x));
    *acc = first ? value : Combine(arithmetic_->op, *acc, value);
  }
  template <typename Acc>
  __device__ Out Result(Acc acc) {
    const Out result = Finish<Out>(*arithmetic_, acc);
    bad_ |= NotFinite(result);
    return result;
  }

  template <bool kFromRing, bool kCheck>
  __device__ void Move(const staged::Piece* pieces, int n) {
    uint64_t units = 0;
    bool whole = n > 1;
    for (int p = 0; p < n; ++p) {
      whole = whole && AlignedTo(16, pieces[p].to, pieces[p].from) && pieces[p].bytes % 16 == 0;
      units += pieces[p].bytes / 16;
    }
    if (whole) return MoveTogether<kFromRing, kCheck>(pieces, units);
    for (int p = 0; p < n; ++p) MovePiece<kFromRing, kCheck>(pieces[p].to, pieces[p].from, pieces[p].bytes);
  }
  // The loads of several pieces are under way at once.
  template <bool kFromRing, bool kCheck>
  __device__ void MoveTogether(const staged::Piece* pieces, uint64_t units) {
    for (uint64_t first = threadIdx.x; first < units; first += kUnroll * kThreads) {
      uint4 loaded[kUnroll];
      uint4* to[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        uint64_t at = first + u * kThreads;
        if (at >= units) break;
        const staged::Piece* piece = pieces;
        for (; at >= piece->bytes / 16; ++piece) at -= piece->bytes / 16;
        loaded[u] = LoadUnit<kFromRing>(reinterpret_cast<const uint4*>(piece->from) + at);
        to[u] = reinterpret_cast<uint4*>(piece->to) + at;
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (first + u * kThreads >= units) break;
        if constexpr (kCheck) Check(loaded[u]);
        *to[u] = loaded[u];
      }
    }
  }
  template <bool kFromRing, bool kCheck>
  __device__ void MovePiece(char* to, const char* from, uint64_t bytes) {
    uint64_t done = 0;
    if (AlignedTo(16, to, from)) done = MoveUnits<uint4, kFromRing, kCheck>(to, from, 0, bytes);
    if (AlignedTo(sizeof(Out), to, from)) done = MoveUnits<Out, kFromRing, kCheck>(to, from, done, bytes);
    MoveUnits<uint8_t, kFromRing, false>(to, from, done, bytes);
  }
  // Moves what is left in units of this type; returns where the last one ends.
  template <typename Unit, bool kFromRing, bool kCheck>
  __device__ uint64_t MoveUnits(char* to_bytes, const char* from_bytes, uint64_t done, uint64_t bytes) {
    const uint64_t units = (bytes - done) / sizeof(Unit);
    Unit* const to = reinterpret_cast<Unit*>(to_bytes + done);
    const Unit* const from = reinterpret_cast<const Unit*>(from_bytes + done);
    for (uint64_t first = threadIdx.x; first < units; first += kUnroll * kThreads) {
      Unit loaded[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (first + u * kThreads < units) loaded[u] = LoadUnit<kFromRing>(from + first + u * kThreads);
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (first + u * kThreads >= units) continue;
        if constexpr (kCheck) Check(loaded[u]);
        to[first + u * kThreads] = loaded[u];
      }
    }
    return done + units * sizeof(Unit);
  }
  template <typename Unit>
  __device__ void Check(const Unit& unit) {
    const Out* const elements = reinterpret_cast<const Out*>(&unit);
#pragma unroll
    for (size_t i = 0; i < sizeof(Unit) / sizeof(Out); ++i) bad_ |= NotFinite(elements[i]);
  }
  template <bool kFromRing, typename Unit>
  __device__ Unit LoadUnit(const Unit* from) {
    return kFromRing ? LoadFresh(from) : *from;
  }

  const staged::Arithmetic* const arithmetic_;
  bool bad_ = false;
};

template <typename In, typename Out>
__global__ void __launch_bounds__(kThreads, 2) CollectiveKernel(const __grid_constant__ staged::Collective c) {
  Block<In, Out> block(c.at, &c.arithmetic);
  staged::RunCollective(block, c, static_cast<int>(blockIdx.x));
  block.Report();
}

__global__ void __launch_bounds__(kThreads, 2) ExchangeKernel(const __grid_constant__ staged::Exchange e) {
  Block<uint8_t, uint8_t> block(e.at, nullptr);
  staged::RunExchange(block, e, static_cast<int>(blockIdx.x));
}

__global__ void __launch_bounds__(kThreads, 2) TurnKernel(const __grid_constant__ staged::Turn t) {
  Block<uint8_t, uint8_t> block(t.at, nullptr);
  staged::RunTurn(block, t);
}

template <typename In, typename Out>
cudaError_t Launch(const staged::Collective& c, cudaStream_t stream) {
  CollectiveKernel<In, Out><<<static_cast<unsigned>(staged::BlocksOf(c)), kThreads, 0, stream>>>(c);
  return cudaGetLastError();
}

template <typename In>
cudaError_t LaunchTo(const staged::Collective& c, cudaStream_t stream) {
  switch (static_cast<Type>(c.arithmetic.out_type)) {
    case Type::kFloat32:
      return Launch<In, float>(c, stream);
    case Type::kFloat16:
      return Launch<In, __half>(c, stream);
    case Type::kBFloat16:
      return Launch<In, __nv_bfloat16>(c, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

template <typename Kernel>
const void* Address(Kernel* kernel) {
  return reinterpret_cast<const void*>(kernel);
}

}  // namespace

cudaError_t LaunchCollective(const staged::Collective& c, cudaStream_t stream) {
  switch (static_cast<Type>(c.arithmetic.in_type)) {
    case Type::kFloat64:
      return Launch<double, double>(c, stream);
    case Type::kFloat32:
      return LaunchTo<float>(c, stream);
    case Type::kFloat16:
      return LaunchTo<__half>(c, stream);
    case Type::kBFloat16:
      return LaunchTo<__nv_bfloat16>(c, stream);
    case Type::kInt64:
      return Launch<int64_t, int64_t>(c, stream);
    case Type::kInt32:
      return Launch<int32_t, int32_t>(c, stream);
    case Type::kInt8:
      return Launch<int8_t, int8_t>(c, stream);
    case Type::kUInt8:
      return Launch<uint8_t, uint8_t>(c, stream);
  }
  return cudaErrorInvalidValue;
}

cudaError_t LaunchExchange(const staged::Exchange& e, cudaStream_t stream) {
  ExchangeKernel<<<static_cast<unsigned>(staged::BlocksOf(e)), kThreads, 0, stream>>>(e);
  return cudaGetLastError();
}

cudaError_t LaunchTurn(const staged::Turn& t, cudaStream_t stream) {
  TurnKernel<<<1, 32, 0, stream>>>(t);
  return cudaGetLastError();
}

cudaError_t StagedBlocks(int* blocks) {
  // To ask about a kernel also loads it: one that is loaded while another waits for a peer may have to wait for that.
  const void* const kernels[] = {
      Address(ExchangeKernel),
      Address(TurnKernel),
      Address(CollectiveKernel<double, double>),
      Address(CollectiveKernel<float, float>),
      Address(CollectiveKernel<float, __half>),
      Address(CollectiveKernel<float, __nv_bfloat16>),
      Address(CollectiveKernel<__half, float>),
      Address(CollectiveKernel<__half, __half>),
      Address(CollectiveKernel<__half, __nv_bfloat16>),
      Address(CollectiveKernel<__nv_bfloat16, float>),
      Address(CollectiveKernel<__nv_bfloat16, __half>),
      Address(CollectiveKernel<__nv_bfloat16, __nv_bfloat16>),
      Address(CollectiveKernel<int64_t, int64_t>),
      Address(CollectiveKernel<int32_t, int32_t>),
      Address(CollectiveKernel<int8_t, int8_t>),
      Address(CollectiveKernel<uint8_t, uint8_t>),
  };
  const void* block_kernels[kBlockReductionKernels] = {};
  BlockReductionKernels(block_kernels);
  int device = 0, processors = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  cudaError_t error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  *blocks = INT32_MAX;
  const auto ask = [&](const void* kernel) {
    int each = 0;
    if (error == cudaSuccess) error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel, kThreads, 0);
    if (each * processors < *blocks) *blocks = each * processors;
  };
  for (const void* kernel : kernels) ask(kernel);
  for (const void* kernel : block_kernels) ask(kernel);
  return error;
}

}  // namespace ddp::cuda
