// SPDX-License-Identifier: Apache-2.0
// How a thread block of the staged protocol waits for other GPUs, and they for it.
#ifndef LIBDDP_DEVICE_CUDA_STAGED_BLOCK_H_
#define LIBDDP_DEVICE_CUDA_STAGED_BLOCK_H_

#include <cstdint>
#include <type_traits>

#include "libddp/device/cuda_staged_machine.h"
#include "libddp/device/staged_protocol.h"

namespace ddp::cuda {
namespace {  // each file's own: nvcc exports what is not

constexpr int kPollsALook = 64;  // at a counter, before a look at whether somebody has failed

// Not from a cache: another GPU has written it.
template <typename T>
__device__ T LoadFresh(const T* from) {
  using Bits = std::conditional_t<
      sizeof(T) == 16, uint4,
      std::conditional_t<sizeof(T) == 1, unsigned char,
                         std::conditional_t<sizeof(T) == 2, unsigned short,
                                            std::conditional_t<sizeof(T) == 4, unsigned, unsigned long long>>>>;
  const Bits bits = __ldcv(reinterpret_cast<const Bits*>(from));
  return *reinterpret_cast<const T*>(&bits);
}

// What every thread block does; see staged_protocol.h. All its threads call everything.
class WaitingBlock {
 public:
  __device__ explicit WaitingBlock(const staged::Place& at) : at_(at) {}

  __device__ bool Begin() {
    return __syncthreads_or(threadIdx.x == 0 && (Load(staged::LeftOf(at_)) != 0 || MustLeave())) == 0;
  }

  template <typename Fn>
  __device__ bool Wait(int n, Fn level) {
    bool reached = true;
    if (static_cast<int>(threadIdx.x) < n) {
      const staged::Level mine = level(static_cast<int>(threadIdx.x));
      if (mine.counter != nullptr) reached = Spin(&mine.counter->value, mine.value);
    } else if (threadIdx.x == kThreads - 1) {  // of another warp, which does not wait for the first
      reached = !MustLeave();
    }
    return __syncthreads_and(reached) != 0;
  }

  __device__ void Signal(staged::Level first, staged::Level second = {}) {
    __syncthreads();
    if (threadIdx.x != 0) return;
    FenceSystem();  // once for both: it takes as long as a look at host memory
    if (first.counter != nullptr) StoreRelaxed(&first.counter->value, first.value);
    if (second.counter != nullptr) StoreRelaxed(&second.counter->value, second.value);
  }

  template <typename Fn>
  __device__ void Tell(int n, Fn level) {
    __syncthreads();
    if (static_cast<int>(threadIdx.x) >= n) return;
    const staged::Level theirs = level(static_cast<int>(threadIdx.x));
    if (theirs.counter == nullptr) return;
    FenceSystem();
    StoreRelaxed(&theirs.counter->value, theirs.value);
  }

  __device__ void Fail() {
    if (threadIdx.x == 0) SetWords(0, at_.ranks);
  }

  __device__ bool All(bool going_on) { return __syncthreads_and(going_on) != 0; }
  __device__ uint64_t Load(const uint64_t* from) { return *from; }
  __device__ void Store(uint64_t* to, uint64_t value) {
    __syncthreads();  // all have loaded it
    if (threadIdx.x == 0) *to = value;
  }

 protected:
  // If so, what follows on the stream knows of it, and gives others nothing: packets do not wait before they are put.
  __device__ bool MustLeave() {
    const int index = static_cast<int>(blockIdx.x);
    if (*const_cast<const volatile uint32_t*>(AbortWordOf(at_, at_.rank, index)) == 0) return false;
    *staged::LeftOf(at_) = 1;
    SetWords(at_.rank, at_.rank + 1);
    return true;
  }

  const staged::Place& at_;

 private:
  __device__ void SetWords(int first_rank, int end_rank) {
    *const_cast<volatile uint32_t*>(at_.failed) = 1;
    for (int r = first_rank; r < end_rank; ++r) {
      for (int i = 0; i < staged::kAbortWords; ++i) *const_cast<volatile uint32_t*>(AbortWordOf(at_, r, i)) = 1;
    }
    __threadfence_system();
  }
  __device__ bool Spin(const uint64_t* counter, uint64_t target) {
    for (int polls = 1;; ++polls) {
      if (static_cast<int64_t>(LoadAcquire(counter) - target) >= 0) return true;
      if (polls % kPollsALook == 0 && MustLeave()) return false;
    }
  }
};

}  // namespace
}  // namespace ddp::cuda

#endif  // LIBDDP_DEVICE_CUDA_STAGED_BLOCK_H_
