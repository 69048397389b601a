// SPDX-License-Identifier: Apache-2.0
// A CUDA driver with two GPUs of the Blackwell kind that cannot reach each other, or as FAKE_CUDA_GPUS many. With
// FAKE_CUDA_P2P they can. Their memory is the host's. FAKE_CUDA_COPY="wrong:0:1" spoils what GPU 0 copies to GPU 1,
// "error:0:1" refuses to, and "hang:0:1" does not end; a GPU's copy to itself is the one from the host.
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#define CUDA extern "C" __attribute__((visibility("default")))

// FAKE_CUDA_INIT: the error with which it does not start, or "hang".
CUDA int cuInit(unsigned) {
  const char* const told = std::getenv("FAKE_CUDA_INIT");
  while (told != nullptr && std::string(told) == "hang") pause();
  return told == nullptr ? 0 : std::atoi(told);
}

CUDA int cuGetErrorString(int, const char** words) {
  *words = "it is broken";
  return 0;
}

CUDA int cuDriverGetVersion(int* version) {
  *version = 12040;
  return 0;
}

CUDA int cuDeviceGetCount(int* count) {
  const char* const told = std::getenv("FAKE_CUDA_GPUS");
  *count = told == nullptr ? 2 : std::atoi(told);
  return 0;
}

CUDA int cuDeviceGetPCIBusId(char* text, int size, int device) {
  std::snprintf(text, static_cast<size_t>(size), "0000:%02X:00.0", 0x1b + device);
  return 0;
}

CUDA int cuDeviceGetAttribute(int* value, int attribute, int) {
  *value = attribute == 75 ? 12 : 0;
  return 0;
}

CUDA int cuDeviceCanAccessPeer(int* can, int, int) {
  *can = std::getenv("FAKE_CUDA_P2P") != nullptr ? 1 : 0;
  return 0;
}

namespace {

// A context is its GPU's number, and one.
using Context = uintptr_t;
thread_local Context current = 0;

// Copies as FAKE_CUDA_COPY says.
int Copy(void* to, const void* from, size_t bytes, Context source, Context target) {
  const char* const told = std::getenv("FAKE_CUDA_COPY");
  const std::string fault = told == nullptr ? "" : told;
  const std::string pair = ":" + std::to_string(source - 1) + ":" + std::to_string(target - 1);
  if (fault == "error" + pair) return 719;
  while (fault == "hang" + pair) pause();
  std::memcpy(to, from, bytes);
  if (fault == "wrong" + pair) static_cast<unsigned char*>(to)[bytes / 2] ^= 1;
  return 0;
}

void* Pointer(uint64_t address) { return reinterpret_cast<void*>(address); }

}  // namespace

CUDA int cuDevicePrimaryCtxRetain(Context* context, int device) {
  *context = static_cast<Context>(device) + 1;
  return 0;
}

CUDA int cuDevicePrimaryCtxRelease_v2(int) { return 0; }

CUDA int cuCtxSetCurrent(Context context) {
  current = context;
  return 0;
}

CUDA int cuCtxSynchronize() { return 0; }

CUDA int cuCtxEnablePeerAccess(Context, unsigned) { return 704; }  // has been before

CUDA int cuMemAlloc_v2(uint64_t* address, size_t bytes) {
  *address = reinterpret_cast<uint64_t>(std::malloc(bytes));
  return *address == 0 ? 2 : 0;
}

CUDA int cuMemFree_v2(uint64_t address) {
  std::free(Pointer(address));
  return 0;
}

CUDA int cuMemcpyHtoD_v2(uint64_t to, const void* from, size_t bytes) {
  return Copy(Pointer(to), from, bytes, current, current);
}

CUDA int cuMemcpyDtoH_v2(void* to, uint64_t from, size_t bytes) {
  std::memcpy(to, Pointer(from), bytes);
  return 0;
}

CUDA int cuMemcpyPeer(uint64_t to, Context target, uint64_t from, Context source, size_t bytes) {
  return Copy(Pointer(to), Pointer(from), bytes, source, target);
}
