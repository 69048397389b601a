// SPDX-License-Identifier: Apache-2.0
#include "examples/train/energy.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

namespace examples {
namespace {

using Json = nlohmann::ordered_json;
using Seconds = std::chrono::duration<double>;

template <typename Value>
std::optional<Value> ReadFile(const std::filesystem::path& path) {
  std::ifstream file(path);
  Value value;
  if (!(file >> value)) return std::nullopt;
  return value;
}

}  // namespace

EnergyMeter::EnergyMeter(const EnergySources& sources) : bus_id_(sources.bus_id) {
  host_ = ReadFile<std::string>(sources.root + "/proc/sys/kernel/random/boot_id").value_or("unknown");
  if (sources.gpu) {
    absl::StatusOr<Nvml> nvml = Nvml::Open(sources.nvml, bus_id_);
    if (nvml.ok()) {
      nvml_ = *nvml;
      counters_.push_back({"gpu", [device = *nvml] { return device.EnergyMj(); }, 1e-3, 0, true});
      if (!nvml->EnergyMj().has_value()) reasons_.emplace_back("NVML has no energy counter of this GPU");
    } else {
      reasons_.emplace_back(nvml.status().message());
    }
  }
  AddRapl(sources.root);
  for (Counter& counter : counters_) {
    const std::optional<uint64_t> value = counter.read();
    counter.last = value.value_or(0);
    counter.broken = !value.has_value();
  }
  read_ = ticked_ = shown_ = Clock::now();
}

// Packages, and memory where it has a counter of its own. Other domains are parts of these, or contain them (psys).
void EnergyMeter::AddRapl(const std::string& root) {
  const std::filesystem::path folder = root + "/sys/class/powercap";
  std::error_code error;
  std::set<std::filesystem::path> domains;  // in order
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) domains.insert(entry.path());
  bool found = false, readable = false;
  for (const std::filesystem::path& domain : domains) {
    if (!absl::StartsWith(domain.filename().string(), "intel-rapl:")) continue;
    const std::string name = ReadFile<std::string>(domain / "name").value_or("");
    if (!absl::StartsWith(name, "package") && name != "dram") continue;
    found = true;
    const auto read = [file = domain / "energy_uj"] { return ReadFile<uint64_t>(file); };
    const std::optional<uint64_t> range = ReadFile<uint64_t>(domain / "max_energy_range_uj");
    if (!read().has_value() || range.value_or(0) == 0) continue;
    readable = true;
    counters_.push_back({absl::StrCat(domain.filename().string().substr(11), " ", name), read, 1e-6, *range, false});
  }
  if (readable) return;
  reasons_.emplace_back(found ? "the energy counters of the processors cannot be read (/sys/class/powercap, RAPL)"
                              : "the processors have no energy counters here (/sys/class/powercap, RAPL)");
}

void EnergyMeter::Read() {
  read_ = Clock::now();
  for (Counter& counter : counters_) {
    const std::optional<uint64_t> now = counter.read();
    if (!now.has_value()) counter.broken = true;
    if (counter.broken) continue;
    uint64_t units = *now - counter.last;  // also across the end of 64 bits
    if (*now < counter.last && counter.range > 0) units = counter.range - counter.last + *now;
    counter.last = *now;
    if (units > UINT64_MAX / 2) {  // the driver was loaded anew
      counter.broken = true;
      continue;
    }
    const double joules = static_cast<double>(units) * counter.joules_per_unit;
    counter.recent_joules += joules;
    if (counting_) counter.joules += joules;
  }
}

void EnergyMeter::Begin() {
  Read();
  begun_ = read_;
  counting_ = true;
}

void EnergyMeter::End() {
  Read();
  counting_ = false;
  seconds_ += Seconds(read_ - begun_).count();
  if (nvml_.has_value()) slowed_by_ |= nvml_->State().slowed_by.value_or(0);
}

void EnergyMeter::Clear() {
  Read();
  begun_ = read_;
  seconds_ = 0;
  for (Counter& counter : counters_) counter.joules = 0;
}

bool EnergyMeter::Tick(Clock::time_point now, Clock::duration period) {
  if (now - ticked_ < period || (counters_.empty() && !nvml_.has_value())) return false;
  ticked_ = now;
  Read();
  if (nvml_.has_value()) slowed_by_ |= nvml_->State().slowed_by.value_or(0);
  return true;
}

std::string EnergyMeter::Line() {
  const Clock::time_point now = Clock::now();
  const double seconds = Seconds(now - std::exchange(shown_, now)).count();
  double processors = 0;
  for (Counter& counter : counters_) {
    const double joules = std::exchange(counter.recent_joules, 0);
    if (!counter.gpu && !counter.broken) processors += joules;
  }
  std::vector<std::string> parts;
  if (nvml_.has_value()) {
    const GpuState gpu = nvml_->State();
    std::vector<std::string> words;
    if (gpu.watts.has_value()) words.push_back(absl::StrFormat("%.0f W", *gpu.watts));
    if (gpu.utilization.has_value()) words.push_back(absl::StrCat(*gpu.utilization, " % busy"));
    if (gpu.sm_mhz.has_value()) words.push_back(absl::StrCat(*gpu.sm_mhz, " MHz"));
    if (gpu.memory_mib.has_value()) words.push_back(absl::StrCat(*gpu.memory_mib, " MiB"));
    for (const std::string& name : SlowdownNames(gpu.slowed_by.value_or(0))) words.push_back("slowed by " + name);
    if (!words.empty()) parts.push_back("GPU " + absl::StrJoin(words, ", "));
  }
  if (processors > 0) parts.push_back(absl::StrFormat("processors %.0f W", processors / seconds));
  return absl::StrJoin(parts, "; ");
}

std::string EnergyMeter::WhyNot() const {
  return counters_.empty() && !nvml_.has_value() ? absl::StrJoin(reasons_, "; ") : "";
}

std::string EnergyMeter::Record() const {
  Json record = {{"host", host_}, {"seconds", seconds_}, {"why_not", reasons_}, {"counters", Json::array()}};
  for (const Counter& counter : counters_) {
    if (counter.broken) continue;
    if (counter.joules <= 0) {
      record["why_not"].push_back(absl::StrCat("the energy counter of ", counter.gpu ? "the GPU" : counter.name,
                                               " did not move while steps were measured: measure more of them"));
      continue;
    }
    record["counters"].push_back({{"gpu", counter.gpu}, {"name", counter.name}, {"joules", counter.joules}});
  }
  if (bus_id_.empty() && !nvml_.has_value()) return record.dump();
  Json& gpu = record["gpu"] = {{"bus_id", bus_id_}};
  if (!nvml_.has_value()) return record.dump();
  const GpuState state = nvml_->State();
  const auto put = [&gpu](const char* name, const auto& value) {
    if (value.has_value()) gpu[name] = *value;
  };
  put("watts", state.watts);
  put("utilization_percent", state.utilization);
  put("memory_mib", state.memory_mib);
  put("memory_total_mib", state.memory_total_mib);
  put("sm_mhz", state.sm_mhz);
  put("memory_mhz", state.memory_mhz);
  if (state.slowed_by.has_value()) gpu["slowed_by"] = SlowdownNames(slowed_by_ | *state.slowed_by);
  return record.dump();
}

std::optional<double> EnergySum::joules() const {
  if (!gpu_joules.has_value() && !cpu_joules.has_value()) return std::nullopt;
  return gpu_joules.value_or(0) + cpu_joules.value_or(0);
}

EnergySum SumEnergy(absl::Span<const std::string> records) {
  EnergySum sum;
  std::set<std::string> gpus, hosts, reasons;
  size_t measured_gpus = 0, measured_hosts = 0;
  double gpu_joules = 0, cpu_joules = 0;
  Json detail = {{"gpus", Json::array()}, {"processors", Json::array()}};
  for (size_t rank = 0; rank < records.size(); ++rank) {
    const Json record = Json::parse(records[rank]);
    const std::string host = record["host"];
    sum.seconds = std::max(sum.seconds, record["seconds"].get<double>());
    for (const Json& reason : record["why_not"]) reasons.insert(reason.get<std::string>());
    const bool new_host = hosts.insert(host).second;
    const bool new_gpu = record.contains("gpu") &&
                         gpus.insert(absl::StrCat(host, " ", record["gpu"]["bus_id"].get<std::string>())).second;
    Json gpu = new_gpu ? record["gpu"] : Json();
    bool host_measured = false;
    for (const Json& counter : record["counters"]) {
      const double joules = counter["joules"];
      if (counter["gpu"].get<bool>() && new_gpu) {
        gpu["joules"] = joules;
        gpu_joules += joules;
        ++measured_gpus;
      } else if (!counter["gpu"].get<bool>() && new_host) {
        cpu_joules += joules;
        host_measured = true;
        detail["processors"].push_back({{"rank", rank}, {"domain", counter["name"]}, {"joules", joules}});
      }
    }
    measured_hosts += host_measured ? 1 : 0;
    if (!new_gpu) continue;
    gpu.erase("bus_id");
    gpu["rank"] = rank;
    detail["gpus"].push_back(std::move(gpu));
  }
  if (measured_gpus > 0 && measured_gpus == gpus.size()) sum.gpu_joules = gpu_joules;
  if (measured_hosts > 0 && measured_hosts == hosts.size()) sum.cpu_joules = cpu_joules;
  sum.detail = detail.dump();
  std::vector<absl::string_view> counts;
  if (sum.gpu_joules.has_value()) counts.emplace_back("GPU boards");
  if (sum.cpu_joules.has_value()) counts.emplace_back("processors");
  sum.counts = absl::StrJoin(counts, " and ");
  if (counts.empty()) {
    if (reasons.empty()) reasons.insert("no energy counter moved on every host");
    sum.why_not = absl::StrJoin(reasons, "; ");
  }
  return sum;
}

}  // namespace examples
