// SPDX-License-Identifier: Apache-2.0
// Energy from a simulated NVML and from planted RAPL folders, whose counters are known.
#include "examples/train/energy.h"

#include <dlfcn.h>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/strings/match.h"
#include "tests/support/catch.h"
#include "tests/support/temporary_folder.h"

namespace examples {
namespace {

// As in fake_nvml.cc.
struct FakeNvml {
  unsigned long long energy_mj = 0, slowed_by = 0;
  unsigned milliwatts = 0, utilization = 0, sm_mhz = 0, memory_mhz = 0;
  int init_error = 0, energy_error = 0;
};

FakeNvml& Fake() {
  static void* const library = dlopen(FAKE_NVML, RTLD_NOW | RTLD_LOCAL);
  REQUIRE(library != nullptr);
  return *reinterpret_cast<FakeNvml* (*)()>(dlsym(library, "fake_nvml_state"))();
}

// A machine's /sys and /proc.
class Machine {
 public:
  explicit Machine(const std::string& boot_id = "host-a") { Write("proc/sys/kernel/random/boot_id", boot_id); }

  void AddDomain(const std::string& folder, const std::string& name, uint64_t range) {
    Write("sys/class/powercap/" + folder + "/name", name);
    Write("sys/class/powercap/" + folder + "/max_energy_range_uj", std::to_string(range));
    Set(folder, 0);
  }
  void Set(const std::string& folder, uint64_t microjoules) {
    Write("sys/class/powercap/" + folder + "/energy_uj", std::to_string(microjoules));
  }
  void Remove(const std::string& path) const { std::filesystem::remove_all(root_.File(path)); }

  EnergySources Sources() const { return {.root = root_.path(), .nvml = FAKE_NVML}; }
  EnergySources WithGpu(const std::string& nvml = FAKE_NVML) const {
    return {.root = root_.path(), .gpu = true, .bus_id = "0000:1b:00.0", .nvml = nvml};
  }

 private:
  void Write(const std::string& path, const std::string& text) const { root_.Write(path, text + "\n"); }
  const ddp::testing::TemporaryFolder root_;
};

constexpr uint64_t kRange = 262143328850;  // microjoules

TEST_CASE("only what processors use between begin and end counts") {
  Machine machine;
  machine.AddDomain("intel-rapl:0", "package-0", kRange);
  machine.AddDomain("intel-rapl:0:0", "core", kRange);  // a part of the package
  machine.AddDomain("intel-rapl:0:1", "dram", kRange);
  machine.AddDomain("intel-rapl:1", "package-1", kRange);
  machine.AddDomain("intel-rapl:2", "psys", kRange);            // contains the packages
  machine.AddDomain("intel-rapl-mmio:0", "package-0", kRange);  // the same counter another way
  EnergyMeter meter(machine.Sources());
  machine.Set("intel-rapl:0", 5'000'000);  // before
  meter.Begin();
  for (const char* domain : {"intel-rapl:0:0", "intel-rapl:2", "intel-rapl-mmio:0"}) machine.Set(domain, 900'000'000);
  machine.Set("intel-rapl:0", 15'000'000);
  machine.Set("intel-rapl:0:1", 2'500'000);
  meter.End();
  machine.Set("intel-rapl:0", 99'000'000);  // between two epochs
  meter.Begin();
  machine.Set("intel-rapl:1", 7'000'000);
  meter.End();
  const EnergySum sum = SumEnergy({meter.Record()});
  REQUIRE(sum.cpu_joules.has_value());
  CHECK(*sum.cpu_joules == 10 + 2.5 + 7);
  CHECK_FALSE(sum.gpu_joules.has_value());
  CHECK(sum.counts == "processors");
  CHECK(sum.why_not.empty());
}

TEST_CASE("a counter of processors wraps around at its range") {
  Machine machine;
  machine.AddDomain("intel-rapl:0", "package-0", 1'000'000);
  machine.Set("intel-rapl:0", 900'000);
  EnergyMeter meter(machine.Sources());
  meter.Begin();
  machine.Set("intel-rapl:0", 400'000);
  CHECK(meter.Tick(EnergyMeter::Clock::now() + std::chrono::seconds(60), std::chrono::seconds(60)));
  CHECK_FALSE(meter.Tick(EnergyMeter::Clock::now(), std::chrono::seconds(60)));
  machine.Set("intel-rapl:0", 300'000);
  meter.End();
  CHECK(*SumEnergy({meter.Record()}).cpu_joules == (0.1 + 0.4) + (0.6 + 0.3));
}

TEST_CASE("short epochs do not put off what is shown every second") {
  Machine machine;
  machine.AddDomain("intel-rapl:0", "package-0", kRange);
  EnergyMeter meter(machine.Sources());
  const EnergyMeter::Clock::time_point start = EnergyMeter::Clock::now();
  meter.Begin();
  meter.End();
  CHECK(meter.Tick(start + std::chrono::seconds(1), std::chrono::seconds(1)));
  meter.Begin();
  CHECK_FALSE(meter.Tick(start + std::chrono::milliseconds(1999), std::chrono::seconds(1)));
  CHECK(meter.Tick(start + std::chrono::seconds(2), std::chrono::seconds(1)));
}

TEST_CASE("warm-up steps are forgotten") {
  Machine machine;
  machine.AddDomain("intel-rapl:0", "package-0", kRange);
  EnergyMeter meter(machine.Sources());
  meter.Begin();
  machine.Set("intel-rapl:0", 50'000'000);
  meter.Clear();
  machine.Set("intel-rapl:0", 53'000'000);
  meter.End();
  CHECK(*SumEnergy({meter.Record()}).cpu_joules == 3);
}

TEST_CASE("the board's energy, power, load and clocks") {
  Machine machine;
  Fake() = {.energy_mj = 1000,
            .slowed_by = 0x4,
            .milliwatts = 305'400,
            .utilization = 97,
            .sm_mhz = 1980,
            .memory_mhz = 3201};
  EnergyMeter meter(machine.WithGpu());
  meter.Begin();
  Fake().energy_mj = 43'500;
  meter.End();
  CHECK(meter.Line() == "GPU 305 W, 97 % busy, 1980 MHz, 1024 MiB, slowed by power limit");
  Fake().slowed_by = 0x1;  // idle
  CHECK(meter.Line() == "GPU 305 W, 97 % busy, 1980 MHz, 1024 MiB");
  const EnergySum sum = SumEnergy({meter.Record()});
  CHECK(*sum.gpu_joules == 42.5);
  CHECK(*sum.joules() == 42.5);
  CHECK(sum.counts == "GPU boards");
  const nlohmann::json gpu = nlohmann::json::parse(sum.detail)["gpus"].at(0);
  CHECK(gpu["joules"] == 42.5);
  CHECK(gpu["watts"] == 305.4);
  CHECK(gpu["utilization_percent"] == 97);
  CHECK(gpu["memory_mib"] == 1024);
  CHECK(gpu["memory_total_mib"] == 81920);
  CHECK(gpu["sm_mhz"] == 1980);
  CHECK(gpu["memory_mhz"] == 3201);
  CHECK(gpu["slowed_by"] == nlohmann::json{"power limit"});  // at the end of the steps
  CHECK_FALSE(gpu.contains("bus_id"));
}

TEST_CASE("the board's counter goes on past the end of its bits, but not backwards") {
  Machine machine;
  Fake() = {.energy_mj = UINT64_MAX - 499};
  EnergyMeter meter(machine.WithGpu());
  meter.Begin();
  Fake().energy_mj = 500;
  meter.End();
  CHECK(*SumEnergy({meter.Record()}).gpu_joules == 1);
  meter.Begin();
  Fake().energy_mj = 400;  // the driver was loaded anew
  meter.End();
  CHECK_FALSE(SumEnergy({meter.Record()}).gpu_joules.has_value());
}

TEST_CASE("nothing is made up where NVML is missing, old, or fails") {
  Machine machine;
  Fake() = {.energy_mj = 1000, .milliwatts = 200'000};
  std::string library, why;
  SECTION("no library") {
    library = "/nowhere/libnvidia-ml.so.1";
    why = "no NVML (/nowhere/libnvidia-ml.so.1)";
  }
  SECTION("a library without functions") {
    library = "libz.so.1";
    why = "no NVML (libz.so.1)";
  }
  SECTION("an old version") {
    library = FAKE_NVML_OLD;
    why = "NVML has no energy counter of this GPU";
  }
  SECTION("it does not start") {
    library = FAKE_NVML;
    Fake().init_error = 9;
    why = "NVML does not start (error 9)";
  }
  SECTION("the counter fails") {
    library = FAKE_NVML;
    Fake().energy_error = 3;
    why = "NVML has no energy counter of this GPU";
  }
  SECTION("the counter stands still") {
    library = FAKE_NVML;
    why = "the energy counter of the GPU did not move while steps were measured";
  }
  EnergyMeter meter(machine.WithGpu(library));
  meter.Begin();
  meter.End();
  const EnergySum sum = SumEnergy({meter.Record()});
  CHECK_FALSE(sum.joules().has_value());
  INFO(sum.why_not);
  CHECK(absl::StrContains(sum.why_not, why));
  CHECK_FALSE(absl::StrContains(sum.detail, "joules"));
  // What it can tell is told.
  CHECK(absl::StrContains(sum.detail, "sm_mhz") == (library == FAKE_NVML && Fake().init_error == 0));
  CHECK(absl::StrContains(sum.detail, "memory_mib") == (absl::StrContains(library, "fake") && Fake().init_error == 0));
  Fake() = {};
}

TEST_CASE("another GPU than NVML's") {
  Machine machine;
  EnergySources sources = machine.WithGpu();
  sources.bus_id = "0000:99:00.0";
  EnergyMeter meter(sources);
  CHECK(meter.Line().empty());
  CHECK(absl::StartsWith(meter.WhyNot(), "NVML does not know GPU 0000:99:00.0 (error 6); the processors have no"));
}

TEST_CASE("counters that cannot be read, or stop") {
  Machine machine;
  machine.AddDomain("intel-rapl:0", "package-0", kRange);
  SECTION("from the start") {
    machine.Remove("sys/class/powercap/intel-rapl:0/energy_uj");
    EnergyMeter meter(machine.Sources());
    CHECK(absl::StrContains(meter.WhyNot(), "cannot be read"));
    meter.Begin();
    meter.End();
    CHECK(absl::StrContains(SumEnergy({meter.Record()}).why_not, "cannot be read"));
  }
  SECTION("later") {
    EnergyMeter meter(machine.Sources());
    meter.Begin();
    machine.Set("intel-rapl:0", 5'000'000);
    meter.End();
    machine.Remove("sys/class/powercap/intel-rapl:0/energy_uj");
    meter.Begin();
    meter.End();
    CHECK_FALSE(SumEnergy({meter.Record()}).joules().has_value());
    CHECK(meter.Line().empty());
  }
  SECTION("damaged") {
    machine.Remove("sys/class/powercap/intel-rapl:0/max_energy_range_uj");
    CHECK_FALSE(EnergyMeter(machine.Sources()).WhyNot().empty());
  }
}

TEST_CASE("a host and a GPU count once, and all have to be measured") {
  Machine a("host-a"), b("host-b");
  Fake() = {};
  const auto measure = [](Machine& machine, const EnergySources& sources, uint64_t joules) {
    machine.AddDomain("intel-rapl:0", "package-0", kRange);
    EnergyMeter meter(sources);
    meter.Begin();
    machine.Set("intel-rapl:0", joules * 1'000'000);
    Fake().energy_mj += 2000;
    meter.End();
    return meter.Record();
  };
  EnergySources second = a.WithGpu("/nowhere/libnvidia-ml.so.1");
  second.bus_id = "0000:2c:00.0";
  const std::string a0 = measure(a, a.WithGpu(), 10), a0_again = measure(a, a.WithGpu(), 20),
                    a1_unmeasured = measure(a, second, 30), b0 = measure(b, b.WithGpu(), 100),
                    b_none = EnergyMeter(Machine("host-b").Sources()).Record();
  CHECK(*SumEnergy({a0, a0_again}).cpu_joules == 10);
  CHECK(*SumEnergy({a0, a0_again}).gpu_joules == 2);
  CHECK(*SumEnergy({a0, b0}).cpu_joules == 110);
  CHECK(*SumEnergy({a0, b0}).gpu_joules == 4);
  CHECK(*SumEnergy({a0, b0}).joules() == 114);
  CHECK(SumEnergy({a0, b0}).counts == "GPU boards and processors");
  CHECK_FALSE(SumEnergy({a0, a1_unmeasured}).gpu_joules.has_value());
  CHECK(*SumEnergy({a0, a1_unmeasured}).cpu_joules == 10);
  CHECK_FALSE(SumEnergy({a0, b_none}).cpu_joules.has_value());
}

}  // namespace
}  // namespace examples
