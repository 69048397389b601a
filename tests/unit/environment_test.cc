// SPDX-License-Identifier: Apache-2.0
// What DescribeEnvironment finds in a machine made of files, and what it keeps to itself.
#include "examples/train/environment.h"

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "ddp/version.h"
#include "tests/support/catch.h"
#include "tests/support/temporary_folder.h"

namespace examples {
namespace {

using nlohmann::json;

class Machine {
 public:
  Machine() { sources.root = root_.path(); }

  void Write(const std::string& path, const std::string& text) const { root_.Write(path, text); }
  void Processor(int number, int core, int socket) const {
    const std::string folder = absl::StrCat("/sys/devices/system/cpu/cpu", number, "/");
    Write(folder + "topology/core_id", absl::StrCat(core, "\n"));
    Write(folder + "topology/physical_package_id", absl::StrCat(socket, "\n"));
  }
  json Describe() const { return json::parse(DescribeEnvironment("mpirun", /*gpu=*/false, sources)); }

  EnvironmentSources sources;

 private:
  const ddp::testing::TemporaryFolder root_;
};

TEST_CASE("A machine of two sockets: cores, caches, clocks, memory, NUMA nodes") {
  Machine machine;
  machine.sources.libraries = {{"onednn", "3.1"}};
  machine.Write("/proc/cpuinfo", "processor\t: 0\nmodel name\t: Fast CPU\ncpu MHz\t\t: 2600.4\nflags\t\t: fpu vme\n\n");
  machine.Write("/proc/meminfo", "MemTotal:       16777216 kB\nMemFree: 1 kB\n");
  machine.Write("/sys/devices/system/cpu/online", "0-7\n");
  for (int i = 0; i < 8; ++i) machine.Processor(i, i / 2 % 2, i / 4);  // two threads a core
  machine.sources.processors = {0, 1, 2, 3, 4, 5, 6, 7};
  const std::string cache = "/sys/devices/system/cpu/cpu0/cache/index";
  for (const auto& [index, level, type] : {std::tuple(0, "1", "Data"), {1, "1", "Instruction"}, {2, "3", "Unified"}}) {
    machine.Write(absl::StrCat(cache, index, "/level"), level);
    machine.Write(absl::StrCat(cache, index, "/type"), type);
    machine.Write(absl::StrCat(cache, index, "/size"), "48K");
    machine.Write(absl::StrCat(cache, index, "/shared_cpu_list"), "0-1");
  }
  machine.Write("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "performance\n");
  machine.Write("/sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq", "3700000\n");
  for (const char* node : {"node0", "node1"}) machine.Write(absl::StrCat("/sys/devices/system/node/", node, "/x"), "");

  json found = machine.Describe();
  const json cpu = found["cpu"];
  CHECK(cpu["model"] == "Fast CPU");
  CHECK(cpu["sockets"] == 2);
  CHECK(cpu["cores"] == 4);
  CHECK(cpu["hardware_threads"] == 8);
  CHECK(cpu["caches"] == json({"L1 48K (shared by processors 0-1)", "L3 48K (shared by processors 0-1)"}));
  CHECK(cpu["virtual_machine"] == false);
  CHECK(cpu["governor"] == "performance");
  CHECK(cpu["max_mhz"] == 3700);
  CHECK(found["cpu_mhz"] == 2600);
  CHECK(found["numa_nodes"] == 2);
  CHECK(found["memory_mib"] == 16384);
  CHECK(found["launcher"] == "mpirun");
  CHECK(found["gpus"].empty());
  CHECK(found["build"]["version"] == absl::StrCat(DDP_VERSION_MAJOR, ".", DDP_VERSION_MINOR, ".", DDP_VERSION_PATCH));
  CHECK_FALSE(found["build"]["compiler"].get<std::string>().empty());
  CHECK(found["libraries"]["onednn"] == "3.1");

  // A container gets less, and a process bound to one socket.
  machine.Write("/sys/fs/cgroup/cpu.max", "300000 100000\n");
  machine.Write("/sys/fs/cgroup/memory.max", "1073741824\n");
  CHECK(machine.Describe()["cpu"]["cores"] == 3);
  CHECK(machine.Describe()["memory_mib"] == 1024);
  machine.sources.processors = {0, 1};
  CHECK(machine.Describe()["cpu"]["cores"] == 1);
  CHECK(machine.Describe()["cpu"]["sockets"] == 1);
}

TEST_CASE("A machine that tells nothing is described all the same") {
  const Machine machine;
  const json found = machine.Describe();
  CHECK(found["cpu"]["cores"] == 1);
  CHECK(found["cpu"]["caches"].empty());
  CHECK(found["numa_nodes"] == 1);
  CHECK(found["variables"] == json::object());
}

TEST_CASE("Variables that change how a program runs are kept, secrets and names of hosts, users and files are not") {
  Machine machine;
  machine.sources.variables = {"OMP_NUM_THREADS=2",
                               "DDP_BACKEND=auto",
                               "NCCL_ALGO=ring=x",
                               "OMPI_MCA_btl=self,tcp",
                               "OMPI_MCA_btl_tcp_if_include=lo",
                               "DDP_STORE_SECRET=hidden",
                               "NCCL_API_TOKEN=hidden",
                               "UCX_password=hidden",
                               "HOME=/home/hidden",
                               "OMPI_MCA_orte_hnp_uri=1;tcp://hidden",
                               "OMPI_MCA_orte_precondition_transports=hidden",
                               "SLURM_NODELIST=hidden",
                               "DDP_NCCL_LIBRARY=/home/hidden/libnccl.so",
                               "DDP_TRACE=\xff",
                               "NCCL_DEBUG="};
  const std::string text = DescribeEnvironment("none", false, machine.sources);
  CHECK_FALSE(absl::StrContains(text, "hidden"));
  const json variables = json::parse(text)["variables"];
  CHECK(variables["OMP_NUM_THREADS"] == "2");
  CHECK(variables["NCCL_ALGO"] == "ring=x");
  CHECK(variables["OMPI_MCA_btl"] == "self,tcp");
  CHECK(variables["OMPI_MCA_btl_tcp_if_include"] == "lo");
  CHECK(variables["DDP_NCCL_LIBRARY"] == "(a path)");
  CHECK(variables["NCCL_DEBUG"].get<std::string>().empty());
  CHECK(variables.size() == 8);
}

TEST_CASE("This process's environment is valid JSON") {
  const json found = json::parse(DescribeEnvironment("none", false));
  CHECK(found["cpu"]["hardware_threads"].get<int>() >= 1);
  CHECK(found["memory_mib"].get<int64_t>() > 0);
  CHECK(absl::StartsWith(found["system"].get<std::string>(), "Linux "));
}

}  // namespace
}  // namespace examples
