// SPDX-License-Identifier: Apache-2.0
// Compiles kernels of the staged protocol for the CPU: to be included before them. It takes the place of
// cuda_staged_machine.h, whose guard it sets, and of what CUDA's compiler knows. A GPU's thread is a thread of the
// host, and a thread block has 16 of them.
#ifndef TESTS_SUPPORT_CUDA_ON_CPU_H_
#define TESTS_SUPPORT_CUDA_ON_CPU_H_
#define LIBDDP_DEVICE_CUDA_STAGED_MACHINE_H_

#include <cuda_runtime_api.h>

#include <atomic>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "libddp/device/staged_protocol.h"
#include "tests/support/whole_packet.h"

struct KernelIndex {
  unsigned x;
};
inline thread_local KernelIndex threadIdx, blockIdx;

namespace ddp::testing {

// What the threads of a thread block have in common.
struct CpuThreadBlock {
  explicit CpuThreadBlock(int threads) : barrier(threads) {}
  std::barrier<> barrier;
  std::atomic<bool> any{false};
};
inline thread_local CpuThreadBlock* thread_block;

}  // namespace ddp::testing

inline void __syncthreads() { ddp::testing::thread_block->barrier.arrive_and_wait(); }
inline int __syncthreads_or(int predicate) {
  std::atomic<bool>& any = ddp::testing::thread_block->any;
  if (predicate != 0) any = true;
  __syncthreads();
  const bool result = any;
  __syncthreads();
  any = false;
  __syncthreads();
  return result ? 1 : 0;
}
inline int __syncthreads_and(int predicate) { return 1 - __syncthreads_or(predicate != 0 ? 0 : 1); }
inline void __threadfence_system() { std::atomic_thread_fence(std::memory_order_seq_cst); }

template <typename T>
T __ldcv(const T* from) {
  return *from;
}
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
using std::isfinite;

namespace ddp::cuda {
namespace {

constexpr int kThreads = 16;

// Whoever waits lets others run.
uint64_t LoadAcquire(const uint64_t* from) {
  std::this_thread::yield();
  return std::atomic_ref<uint64_t>(*const_cast<uint64_t*>(from)).load(std::memory_order_acquire);
}
void StoreRelaxed(uint64_t* to, uint64_t value) {
  std::atomic_ref<uint64_t>(*to).store(value, std::memory_order_relaxed);
}
void FenceSystem() { std::atomic_thread_fence(std::memory_order_seq_cst); }
staged::Packet LoadPacket(const staged::Packet* from) {
  std::this_thread::yield();
  return testing::LoadPacket(from);
}
void StorePacket(staged::Packet* to, const staged::Packet& packet) { testing::StorePacket(to, packet); }

}  // namespace
}  // namespace ddp::cuda

namespace ddp::testing {

// Runs kernels at once, as GPUs do.
class CpuKernels {
 public:
  ~CpuKernels() {
    for (std::thread& thread : threads_) thread.join();
  }
  // `kernel` is called by every thread of `blocks` thread blocks, with the number of its own.
  void Launch(int blocks, const std::function<void(int block)>& kernel) {
    for (int b = 0; b < blocks; ++b) {
      const auto together = std::make_shared<CpuThreadBlock>(cuda::kThreads);
      for (unsigned t = 0; t < cuda::kThreads; ++t) {
        threads_.emplace_back([together, kernel, b, t] {
          thread_block = together.get();
          threadIdx.x = t;
          blockIdx.x = static_cast<unsigned>(b);
          kernel(b);
          together->barrier.arrive_and_drop();  // as on a GPU, nobody waits for a thread that has ended
        });
      }
    }
  }

 private:
  std::vector<std::thread> threads_;
};

}  // namespace ddp::testing

#endif  // TESTS_SUPPORT_CUDA_ON_CPU_H_
