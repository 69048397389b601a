// SPDX-License-Identifier: Apache-2.0
// The state of one GPU, from NVML, which is loaded at run time.
#ifndef EXAMPLES_TRAIN_NVML_H_
#define EXAMPLES_TRAIN_NVML_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace examples {

// Without what this GPU or this version of NVML cannot tell.
struct GpuState {
  std::optional<double> watts;
  std::optional<int> utilization;  // percent of the last moments in which a kernel ran
  std::optional<int64_t> memory_mib, memory_total_mib;
  std::optional<int> sm_mhz, memory_mhz;
  std::optional<uint64_t> slowed_by;  // bits, see SlowdownNames
};

class Nvml {
 public:
  // Opens the GPU with this PCI address. NotFound, with the reason, if there is no NVML or no such GPU.
  static absl::StatusOr<Nvml> Open(const std::string& library, const std::string& bus_id);

  // The energy that the board has used since the driver was loaded, in mJ.
  std::optional<uint64_t> EnergyMj() const;
  GpuState State() const;

 private:
  struct Device;  // nvmlDevice_st
  struct Utilization {
    unsigned gpu, memory;
  };
  struct Memory {
    unsigned long long total, free, used;
  };
  template <typename... Arguments>
  using Getter = int (*)(Device*, Arguments...);

  Device* device_ = nullptr;
  Getter<unsigned long long*> energy_ = nullptr, slowdown_ = nullptr;
  Getter<unsigned*> power_ = nullptr;
  Getter<Utilization*> utilization_ = nullptr;
  Getter<Memory*> memory_ = nullptr;
  Getter<int, unsigned*> clock_ = nullptr;
};

// Why a GPU's clock is lower than it could be, such as "power limit". Not that it is idle or was set so.
std::vector<std::string> SlowdownNames(uint64_t reasons);

// The PCI address of GPU `index` of those that this process sees; empty if it is not known.
std::string GpuBusId(int index);

}  // namespace examples

#endif  // EXAMPLES_TRAIN_NVML_H_
