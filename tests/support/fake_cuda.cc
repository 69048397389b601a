// A CUDA driver with two GPUs of the Blackwell kind that cannot reach each other, or as FAKE_CUDA_GPUS many.
#include <cstdio>
#include <cstdlib>

#define CUDA extern "C" __attribute__((visibility("default")))

// FAKE_CUDA_INIT: the error with which it does not start.
CUDA int cuInit(unsigned) {
  const char* const told = std::getenv("FAKE_CUDA_INIT");
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
  *can = 0;
  return 0;
}
