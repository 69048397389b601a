// SPDX-License-Identifier: Apache-2.0
// The energy that a training uses: GPU boards by NVML, processors by RAPL (/sys/class/powercap).
#ifndef EXAMPLES_TRAIN_ENERGY_H_
#define EXAMPLES_TRAIN_ENERGY_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "examples/train/nvml.h"

namespace examples {

struct EnergySources {
  std::string root = {};    // "/sys" and "/proc" are looked for in this folder
  bool gpu = false;         // this rank has a GPU
  std::string bus_id = {};  // its PCI address
  std::string nvml = "libnvidia-ml.so.1";
};

// Counts the energy of this rank's GPU and of its host's processors between Begin and End. A counter that cannot be
// read, or that never moves, counts as not measured. Thread-safety: one thread at a time.
class EnergyMeter {
 public:
  using Clock = std::chrono::steady_clock;

  explicit EnergyMeter(const EnergySources& sources);

  void Begin();
  void End();
  void Clear();  // forgets what was counted; between Begin and End, too

  // Reads the counters again `period` after the call that did so before, so that none wraps around unnoticed (some do
  // after minutes). Cheap otherwise. True if it has read them.
  bool Tick(Clock::time_point now, Clock::duration period);

  // The power since the call before, and the state of the GPU: "GPU 305 W, 97 % busy, ...; processors 81 W". Empty if
  // nothing can be read.
  std::string Line();

  // One sentence, if there is nothing to read.
  std::string WhyNot() const;

  // What was counted and why not more, as JSON for SumEnergy.
  std::string Record() const;

 private:
  struct Counter {
    std::string name;
    std::function<std::optional<uint64_t>()> read;
    double joules_per_unit;
    uint64_t range;     // the value after which it begins at 0 again; 0: that of 64 bits
    bool gpu;           // or of processors
    uint64_t last = 0;  // its value when it was last read
    double joules = 0, recent_joules = 0;
    bool broken = false;
  };
  void AddRapl(const std::string& root);
  void Read();

  std::string host_, bus_id_;
  std::vector<std::string> reasons_;  // why something is not measured
  std::optional<Nvml> nvml_;
  std::vector<Counter> counters_;
  bool counting_ = false;
  Clock::time_point begun_, read_, ticked_, shown_;
  double seconds_ = 0;
  uint64_t slowed_by_ = 0;
};

// The energy of all ranks.
struct EnergySum {
  std::optional<double> gpu_joules, cpu_joules;  // only if all GPUs, or the processors of all hosts, were measured
  double seconds = 0;
  std::string why_not;      // nothing was measured: one sentence
  std::string counts;       // what the joules contain: "GPU boards", "processors"
  std::string detail = {};  // per GPU and processor, as JSON

  std::optional<double> joules() const;
};

// `records` are the Records of all ranks. A GPU or a host that several ranks have measured counts once.
EnergySum SumEnergy(absl::Span<const std::string> records);

}  // namespace examples

#endif  // EXAMPLES_TRAIN_ENERGY_H_
