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

// As a whole, also in memory of the host that GPUs have mapped: the CUDA Programming Guide ("Atomicity") says so of 16
// bytes, and that no system is known where it does not hold.
__device__ staged::Packet LoadPacket(const staged::Packet* from) {
  staged::Packet packet;
  asm volatile(
      "{\n"
      " .reg .b64 low, high;\n"
      " .reg .b128 whole;\n"
      " ld.relaxed.sys.global.b128 whole, [%4];\n"
      " mov.b128 {low, high}, whole;\n"
      " mov.b64 {%0, %1}, low;\n"
      " mov.b64 {%2, %3}, high;\n"
      "}"
      : "=r"(packet.data.word[0]), "=r"(packet.data.word[1]), "=r"(packet.data.word[2]), "=r"(packet.mark)
      : "l"(from)
      : "memory");
  return packet;
}
__device__ void StorePacket(staged::Packet* to, const staged::Packet& packet) {
  asm volatile(
      "{\n"
      " .reg .b64 low, high;\n"
      " .reg .b128 whole;\n"
      " mov.b64 low, {%1, %2};\n"
      " mov.b64 high, {%3, %4};\n"
      " mov.b128 whole, {low, high};\n"
      " st.relaxed.sys.global.b128 [%0], whole;\n"
      "}" ::"l"(to),
      "r"(packet.data.word[0]), "r"(packet.data.word[1]), "r"(packet.data.word[2]), "r"(packet.mark)
      : "memory");
}

}  // namespace
}  // namespace ddp::cuda

#endif  // LIBDDP_DEVICE_CUDA_STAGED_MACHINE_H_
