// SPDX-License-Identifier: Apache-2.0
// What the kernels of the staged protocol need of a GPU beyond CUDA's C++: how many threads, and loads and stores that
// the host and other GPUs take part in. tests/support/cuda_on_cpu.h stands in for it.
#ifndef LIBDDP_DEVICE_CUDA_STAGED_MACHINE_H_
#define LIBDDP_DEVICE_CUDA_STAGED_MACHINE_H_

#include <cstdint>

#include "libddp/device/staged_protocol.h"

namespace ddp::cuda {
namespace {  // each file's own: nvcc exports what is not

constexpr int kThreads = 256;

__device__ uint64_t LoadAcquire(const uint64_t* from) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return value;
}
__device__ void StoreRelaxed(uint64_t* to, uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}
__device__ void FenceSystem() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

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

}  // namespace
}  // namespace ddp::cuda

#endif  // LIBDDP_DEVICE_CUDA_STAGED_MACHINE_H_
