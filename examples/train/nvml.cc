// SPDX-License-Identifier: Apache-2.0
#include "examples/train/nvml.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "examples/train/library.h"

namespace examples {
namespace {

constexpr int kSmClock = 1, kMemoryClock = 2;  // nvmlClockType_t

// The value that `get` stores, or nothing if it is missing or fails.
template <typename Value, typename Get>
std::optional<Value> Ask(bool exists, const Get& get) {
  Value value = {};
  if (!exists || get(&value) != 0) return std::nullopt;
  return value;
}

}  // namespace

absl::StatusOr<Nvml> Nvml::Open(const std::string& library, const std::string& bus_id) {
  const char* const file = library.c_str();
  auto* const init = FindFunction<int()>(file, "nvmlInit_v2");
  auto* const open = FindFunction<int(const char*, Device**)>(file, "nvmlDeviceGetHandleByPciBusId_v2");
  if (init == nullptr || open == nullptr) return absl::NotFoundError(absl::StrCat("no NVML (", library, ")"));
  Nvml nvml;
  if (const int error = init(); error != 0) {
    return absl::NotFoundError(absl::StrCat("NVML does not start (error ", error, ")"));
  }
  if (const int error = open(bus_id.c_str(), &nvml.device_); error != 0) {
    return absl::NotFoundError(absl::StrCat("NVML does not know GPU ", bus_id, " (error ", error, ")"));
  }
  nvml.energy_ = FindFunction<int(Device*, unsigned long long*)>(file, "nvmlDeviceGetTotalEnergyConsumption");
  nvml.slowdown_ = FindFunction<int(Device*, unsigned long long*)>(file, "nvmlDeviceGetCurrentClocksThrottleReasons");
  nvml.power_ = FindFunction<int(Device*, unsigned*)>(file, "nvmlDeviceGetPowerUsage");
  nvml.utilization_ = FindFunction<int(Device*, Utilization*)>(file, "nvmlDeviceGetUtilizationRates");
  nvml.memory_ = FindFunction<int(Device*, Memory*)>(file, "nvmlDeviceGetMemoryInfo");
  nvml.clock_ = FindFunction<int(Device*, int, unsigned*)>(file, "nvmlDeviceGetClockInfo");
  return nvml;
}

std::optional<uint64_t> Nvml::EnergyMj() const {
  return Ask<unsigned long long>(energy_ != nullptr, [this](auto* value) { return energy_(device_, value); });
}

GpuState Nvml::State() const {
  GpuState state;
  if (const auto milliwatts = Ask<unsigned>(power_ != nullptr, [this](auto* v) { return power_(device_, v); })) {
    state.watts = *milliwatts / 1e3;
  }
  if (const auto rates =
          Ask<Utilization>(utilization_ != nullptr, [this](auto* v) { return utilization_(device_, v); })) {
    state.utilization = static_cast<int>(rates->gpu);
  }
  if (const auto memory = Ask<Memory>(memory_ != nullptr, [this](auto* v) { return memory_(device_, v); })) {
    state.memory_mib = static_cast<int64_t>(memory->used >> 20);
    state.memory_total_mib = static_cast<int64_t>(memory->total >> 20);
  }
  for (const auto& [type, mhz] : {std::pair(kSmClock, &state.sm_mhz), std::pair(kMemoryClock, &state.memory_mhz)}) {
    *mhz = Ask<unsigned>(clock_ != nullptr, [this, type = type](auto* v) { return clock_(device_, type, v); });
  }
  state.slowed_by =
      Ask<unsigned long long>(slowdown_ != nullptr, [this](auto* value) { return slowdown_(device_, value); });
  return state;
}

std::vector<std::string> SlowdownNames(uint64_t reasons) {
  constexpr std::pair<uint64_t, const char*> kReasons[] = {
      {0x4, "power limit"},      {0x8, "hardware slowdown"},         {0x10, "synchronised with another GPU"},
      {0x20, "temperature"},     {0x40, "temperature, by hardware"}, {0x80, "power brake"},
      {0x100, "display clocks"},
  };
  std::vector<std::string> names;
  for (const auto& [bit, name] : kReasons) {
    if ((reasons & bit) != 0) names.emplace_back(name);
  }
  return names;
}

std::string GpuBusId(int index) {
  constexpr char kCudaDriver[] = "libcuda.so.1";
  auto* const init = FindFunction<int(unsigned)>(kCudaDriver, "cuInit");
  auto* const bus_id = FindFunction<int(char*, int, int)>(kCudaDriver, "cuDeviceGetPCIBusId");
  char text[32] = {};
  if (init == nullptr || bus_id == nullptr || init(0) != 0 || bus_id(text, sizeof(text), index) != 0) return "";
  return text;
}

}  // namespace examples
