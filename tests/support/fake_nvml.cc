// SPDX-License-Identifier: Apache-2.0
// An NVML with one GPU whose counters a test sets. With FAKE_NVML_OLD: one without functions of later versions.
#include <cstring>

#define NVML extern "C" __attribute__((visibility("default")))

namespace {

struct State {
  unsigned long long energy_mj = 0, slowed_by = 0;
  unsigned milliwatts = 0, utilization = 0, sm_mhz = 0, memory_mhz = 0;
  int init_error = 0, energy_error = 0;
};
State g_state = {};
int g_device = 0;

}  // namespace

NVML State* fake_nvml_state() { return &g_state; }

NVML int nvmlInit_v2() { return g_state.init_error; }

NVML int nvmlDeviceGetHandleByPciBusId_v2(const char* bus_id, void** device) {
  if (std::strcmp(bus_id, "0000:1b:00.0") != 0) return 6;  // not found
  *device = &g_device;
  return 0;
}

NVML int nvmlDeviceGetPowerUsage(void*, unsigned* milliwatts) {
  *milliwatts = g_state.milliwatts;
  return 0;
}

NVML int nvmlDeviceGetMemoryInfo(void*, unsigned long long* memory) {
  memory[0] = 80ull << 30;  // total, free, used
  memory[1] = 79ull << 30;
  memory[2] = 1ull << 30;
  return 0;
}

#ifndef FAKE_NVML_OLD
NVML int nvmlDeviceGetTotalEnergyConsumption(void*, unsigned long long* energy_mj) {
  *energy_mj = g_state.energy_mj;
  return g_state.energy_error;
}

NVML int nvmlDeviceGetUtilizationRates(void*, unsigned* rates) {
  rates[0] = g_state.utilization;
  rates[1] = 0;
  return 0;
}

NVML int nvmlDeviceGetClockInfo(void*, int type, unsigned* mhz) {
  *mhz = type == 1 ? g_state.sm_mhz : g_state.memory_mhz;
  return 0;
}

NVML int nvmlDeviceGetCurrentClocksThrottleReasons(void*, unsigned long long* reasons) {
  *reasons = g_state.slowed_by;
  return 0;
}
#endif
