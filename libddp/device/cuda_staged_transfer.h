// SPDX-License-Identifier: Apache-2.0
// What a thread block of the staged protocol does with data: it copies, sends and receives packets, and reduces.
#ifndef LIBDDP_DEVICE_CUDA_STAGED_TRANSFER_H_
#define LIBDDP_DEVICE_CUDA_STAGED_TRANSFER_H_

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "libddp/device/cuda_kernels.h"
#include "libddp/device/cuda_staged_block.h"
#include "libddp/device/cuda_staged_elements.h"
#include "libddp/device/staged_protocol.h"

namespace ddp::cuda {
namespace {  // each file's own: nvcc exports what is not

constexpr int kUnroll = 8;  // vectors that a thread loads before it uses the first

// A word of 4 bytes has an element that is infinite or not a number where all bits of an exponent are set.
struct Exponents {
  uint32_t low, high;  // the bits of a word's first and last element; the same where a word has one
  bool each;           // else only each second word has an exponent
};

__device__ Exponents ExponentsOf(uint8_t type) {
  switch (static_cast<Type>(type)) {
    case Type::kFloat16:
      return {0x7c00, 0x7c000000, true};
    case Type::kBFloat16:
      return {0x7f80, 0x7f800000, true};
    case Type::kFloat64:
      return {0x7ff00000, 0x7ff00000, false};
    default:
      return {0x7f800000, 0x7f800000, true};
  }
}

// What the protocol asks of a thread block, but for reductions; see staged_protocol.h.
class Block : public WaitingBlock {
 public:
  __device__ explicit Block(const staged::Place& at, const Exponents& exponents = {})
      : WaitingBlock(at), exponents_(exponents) {}

  __device__ void Copy(const staged::Piece* pieces, int n, bool from_ring) {
    uint64_t units = 0;
    bool whole = n > 1;
    for (int p = 0; p < n; ++p) {
      whole = whole && AlignedTo(16, pieces[p].to, pieces[p].from) && pieces[p].bytes % 16 == 0;
      units += pieces[p].bytes / 16;
    }
    if (whole) return MoveTogether(pieces, units, from_ring);
    for (int p = 0; p < n; ++p) MovePiece(pieces[p].to, pieces[p].from, pieces[p].bytes, from_ring);
  }

  __device__ int thread() const { return static_cast<int>(threadIdx.x); }
  __device__ int threads() const { return kThreads; }

  __device__ staged::PacketData Gather(const staged::RangeTable& in, uint64_t first, uint64_t n, uint64_t size) {
    uint64_t together = n * size;
    const char* const from = Locate(in, first * size, &together);
    staged::PacketData data = {};
    if (together == staged::kPacketBytes && AlignedTo(sizeof(uint32_t), from)) {
#pragma unroll
      for (int w = 0; w < kWords; ++w) data.word[w] = reinterpret_cast<const uint32_t*>(from)[w];
      return data;
    }
    for (uint64_t k = 0; k < n; ++k) {
      uint64_t bytes = size;
      SetElement(&data, static_cast<int>(k), static_cast<int>(size),
                 LoadElement(Locate(in, (first + k) * size, &bytes), size));
    }
    return data;
  }

  __device__ void Scatter(const staged::RangeTable& out, uint64_t first, uint64_t n, uint64_t size,
                          const staged::PacketData& data) {
    uint64_t together = n * size;
    char* const to = Locate(out, first * size, &together);
    if (together == staged::kPacketBytes && AlignedTo(sizeof(uint32_t), to)) {
#pragma unroll
      for (int w = 0; w < kWords; ++w) reinterpret_cast<uint32_t*>(to)[w] = data.word[w];
      return;
    }
    for (uint64_t k = 0; k < n; ++k) {
      uint64_t bytes = size;
      StoreElement(Locate(out, (first + k) * size, &bytes), size,
                   ElementOf(data, static_cast<int>(k), static_cast<int>(size)));
    }
  }

  __device__ void Put(staged::Packet* to, const staged::PacketData& data, uint32_t mark) {
    StorePacket(to, {data, mark});
  }

  __device__ bool Receive(const staged::Packet* from, uint64_t stride, uint32_t mark, int ranks, int me,
                          const staged::PacketData& own, staged::PacketData* data) {
    bool received = true;
#pragma unroll
    for (int first = 0; first < staged::kMaxRanks; first += kTogether) {
      if (first < ranks) {
        received = received && ReceiveSome(from + static_cast<uint64_t>(first) * stride, stride, mark, ranks - first,
                                           me - first, own, data + first);
      }
    }
    return received;
  }
  // Where no element is, there is a 0.
  __device__ void CheckPacket(const staged::PacketData& data, uint64_t) {
    Check(data.word[0] | static_cast<uint64_t>(data.word[1]) << 32);
    Check(static_cast<uint64_t>(data.word[2]));
  }

 protected:
  bool bad_ = false;  // this thread has seen a result that is infinite or not a number

 private:
  static constexpr int kTogether = 8, kWords = staged::kPacketBytes / 4;

  __device__ uint64_t LoadElement(const char* from, uint64_t size) {
    switch (size) {
      case 1:
        return *reinterpret_cast<const uint8_t*>(from);
      case 2:
        return *reinterpret_cast<const uint16_t*>(from);
      case 4:
        return *reinterpret_cast<const uint32_t*>(from);
      default:
        return *reinterpret_cast<const uint64_t*>(from);
    }
  }

  __device__ void StoreElement(char* to, uint64_t size, uint64_t data) {
    switch (size) {
      case 1:
        *reinterpret_cast<uint8_t*>(to) = static_cast<uint8_t>(data);
        return;
      case 2:
        *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(data);
        return;
      case 4:
        *reinterpret_cast<uint32_t*>(to) = static_cast<uint32_t>(data);
        return;
      default:
        *reinterpret_cast<uint64_t*>(to) = data;
    }
  }

  // Of the first kTogether of these ranks: the loads of their packets are under way at once.
  __device__ bool ReceiveSome(const staged::Packet* from, uint64_t stride, uint32_t mark, int ranks, int me,
                              const staged::PacketData& own, staged::PacketData* data) {
    uint32_t missing = 0;
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      if (k == me) data[k] = own;
      if (k != me && k < ranks) missing |= 1u << k;
    }
    for (int polls = 1; missing != 0; ++polls) {
      staged::Packet packet[kTogether];
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
        if ((missing >> k & 1) != 0) packet[k] = LoadPacket(from + static_cast<uint64_t>(k) * stride);
      }
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
        if ((missing >> k & 1) == 0 || packet[k].mark != mark) continue;
        data[k] = packet[k].data;
        missing &= ~(1u << k);
      }
      if (polls % kPollsALook == 0 && missing != 0 && MustLeave()) return false;
    }
    return true;
  }

  // The loads of several pieces are under way at once. All are fresh: own memory is read once, too.
  __device__ void MoveTogether(const staged::Piece* pieces, uint64_t units, bool check) {
    for (uint64_t first = threadIdx.x; first < units; first += kUnroll * kThreads) {
      uint4 loaded[kUnroll];
      uint4* to[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        uint64_t at = first + u * kThreads;
        if (at >= units) break;
        const staged::Piece* piece = pieces;
        for (; at >= piece->bytes / 16; ++piece) at -= piece->bytes / 16;
        loaded[u] = LoadFresh(reinterpret_cast<const uint4*>(piece->from) + at);
        to[u] = reinterpret_cast<uint4*>(piece->to) + at;
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (first + u * kThreads >= units) break;
        if (check) Check(loaded[u]);
        *to[u] = loaded[u];
      }
    }
  }
  __device__ void MovePiece(char* to, const char* from, uint64_t bytes, bool check) {
    uint64_t done = 0;
    MoveUnits<uint4>(to, from, bytes, &done, check);
    MoveUnits<uint64_t>(to, from, bytes, &done, check);
    MoveUnits<uint32_t>(to, from, bytes, &done, check);
    MoveUnits<uint16_t>(to, from, bytes, &done, check);
    MoveUnits<uint8_t>(to, from, bytes, &done, check);
  }
  // Moves what is left and fills units of this type, if both sides are aligned to it.
  template <typename Unit>
  __device__ void MoveUnits(char* to_bytes, const char* from_bytes, uint64_t bytes, uint64_t* done, bool check) {
    if (!AlignedTo(sizeof(Unit), to_bytes, from_bytes)) return;
    const uint64_t units = (bytes - *done) / sizeof(Unit);
    Unit* const to = reinterpret_cast<Unit*>(to_bytes + *done);
    const Unit* const from = reinterpret_cast<const Unit*>(from_bytes + *done);
    for (uint64_t first = threadIdx.x; first < units; first += kUnroll * kThreads) {
      Unit loaded[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (first + u * kThreads < units) loaded[u] = LoadFresh(from + first + u * kThreads);
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (first + u * kThreads >= units) continue;
        if (check) Check(loaded[u]);
        to[first + u * kThreads] = loaded[u];
      }
    }
    *done += units * sizeof(Unit);
  }
  __device__ void Check(uint32_t word) {
    bad_ |= (word & exponents_.low) == exponents_.low || (word & exponents_.high) == exponents_.high;
  }
  __device__ void Check(uint8_t) {}  // no element is that small
  __device__ void Check(uint16_t element) { Check(uint32_t{element}); }
  __device__ void Check(uint64_t unit) {
    if (exponents_.each) Check(static_cast<uint32_t>(unit));
    Check(static_cast<uint32_t>(unit >> 32));
  }
  __device__ void Check(const uint4& unit) {
    Check(unit.x | static_cast<uint64_t>(unit.y) << 32);
    Check(unit.z | static_cast<uint64_t>(unit.w) << 32);
  }
  const Exponents exponents_;
};

// Reduces In to Out.
template <typename In, typename Out>
class ReducingBlock : public Block {
 public:
  __device__ explicit ReducingBlock(const staged::Collective& c)
      : Block(c.at, ExponentsOf(c.arithmetic.out_type)), arithmetic_(c.arithmetic) {}

  __device__ void Reduce(const char* const* from, int n, char* to, char* also, uint64_t count) {
    Elements<In, Out> elements(at_, arithmetic_);
    elements.Reduce(from, n, to, also, count);
    bad_ |= elements.bad();
  }
  __device__ staged::PacketData ReducePacket(const staged::PacketData* data, uint64_t n) {
    Elements<In, Out> elements(at_, arithmetic_);
    const staged::PacketData result = elements.ReducePacket(data, n);
    bad_ |= elements.bad();
    return result;
  }

  // At the kernel's end. Integers have no exponents.
  __device__ void Report() {
    if (std::is_integral_v<Out> || arithmetic_.nonfinite == nullptr) return;
    if (__syncthreads_or(bad_) != 0 && threadIdx.x == 0) *arithmetic_.nonfinite = 1;
  }

 private:
  const staged::Arithmetic& arithmetic_;
};

}  // namespace
}  // namespace ddp::cuda

#endif  // LIBDDP_DEVICE_CUDA_STAGED_TRANSFER_H_
