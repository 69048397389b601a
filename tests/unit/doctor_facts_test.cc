// SPDX-License-Identifier: Apache-2.0
// What the doctor reads of a machine made of files, and of a driver that is none.
#include <arpa/inet.h>
#include <dlfcn.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/support/catch.h"
#include "tests/support/temporary_folder.h"
#include "tools/doctor/checks.h"
#include "tools/doctor/copies.h"
#include "tools/doctor/facts.h"

namespace doctor {
namespace {

namespace fs = std::filesystem;

// 4 KiB of configuration space with some extended capability first, and then ACS with this control word.
std::string ConfigWithAcs(unsigned control) {
  std::string bytes(4096, '\0');
  const auto put = [&](size_t at, unsigned word) {
    for (size_t i = 0; i < 4; ++i) bytes[at + i] = static_cast<char>(word >> (8 * i));
  };
  put(0x100, 0x0001 | 1u << 16 | 0x140u << 20);
  put(0x140, 0x000d | 1u << 16);
  put(0x144, control << 16);
  return bytes;
}

// A machine of files.
class Machine {
 public:
  // A GPU below a bridge.
  void Gpu(const std::string& bus_id, const std::string& bridge, const std::string& config) {
    const std::string folder = "sys/devices/pci0000:00/" + bridge + "/" + bus_id + "/";
    for (const auto& [name, text] :
         std::vector<std::pair<std::string, std::string>>{{"vendor", "0x10de\n"},
                                                          {"class", "0x030200\n"},
                                                          {"current_link_width", "8\n"},
                                                          {"max_link_width", "16\n"},
                                                          {"current_link_speed", "2.5 GT/s PCIe\n"},
                                                          {"max_link_speed", "32.0 GT/s PCIe\n"},
                                                          {"numa_node", "1\n"},
                                                          {"local_cpulist", "2-3,6\n"}}) {
      root.Write(folder + name, text);
    }
    root.Write("sys/devices/pci0000:00/" + bridge + "/config", config);
    root.Write("proc/driver/nvidia/gpus/" + bus_id + "/information",
               "Model: \t\t NVIDIA H200\nGPU UUID:\t GPU-" + bus_id + "\n");
    fs::create_directories(root.File("sys/bus/pci/devices"));
    fs::create_symlink("../../../devices/pci0000:00/" + bridge + "/" + bus_id,
                       root.File("sys/bus/pci/devices/" + bus_id));
  }
  ddp::testing::TemporaryFolder root;
};

TEST_CASE("GPUs are read from the PCI bus, with what stands above them") {
  Machine machine;
  machine.Gpu("0000:1c:00.0", "0000:00:02.0", ConfigWithAcs(0x1d));
  machine.Gpu("0000:1b:00.0", "0000:00:01.0", ConfigWithAcs(0x01));
  machine.root.Write("sys/bus/pci/devices/0000:02:00.0/vendor", "0x8086\n");
  machine.root.Write("proc/driver/nvidia/version",
                     "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Fri Jan\nGCC version: gcc 12\n");
  Facts facts;
  ReadPci(machine.root.path(), facts);
  CHECK(facts.nvidia_devices == 2);
  CHECK(facts.driver == "570.86.15");
  CHECK_FALSE(facts.iommu);
  CHECK(facts.acs_readable);
  REQUIRE(facts.gpus.size() == 2);
  const Gpu& gpu = facts.gpus[0];
  CHECK(gpu.bus_id == "0000:1b:00.0");
  CHECK(gpu.name == "NVIDIA H200");
  CHECK(gpu.uuid == "GPU-0000:1b:00.0");
  CHECK(gpu.link.width == 8);
  CHECK(gpu.link.max_width == 16);
  CHECK(gpu.link.speed == 2.5);
  CHECK(gpu.link.max_speed == 32);
  CHECK(gpu.numa_node == 1);
  CHECK(gpu.near_processors == std::vector<int>{2, 3, 6});
  CHECK(gpu.redirecting.empty());
  CHECK(facts.gpus[1].redirecting == std::vector<std::string>{"0000:00:02.0"});

  // The GPU's group; with iommu=pt, which is the remedy, there are groups, too.
  fs::create_symlink("../../../../kernel/iommu_groups/0",
                     machine.root.File("sys/devices/pci0000:00/0000:00:01.0/0000:1b:00.0/iommu_group"));
  for (const bool translates : {false, true}) {
    machine.root.Write("sys/kernel/iommu_groups/0/type", translates ? "DMA-FQ\n" : "identity\n");
    Facts with_iommu;
    ReadPci(machine.root.path(), with_iommu);
    CHECK(with_iommu.iommu == translates);
  }
}

TEST_CASE("ACS that only root may read is told to be unknown") {
  Machine machine;
  machine.Gpu("0000:1b:00.0", "0000:00:01.0", ConfigWithAcs(0x1d).substr(0, 64));
  Facts facts;
  ReadPci(machine.root.path(), facts);
  CHECK_FALSE(facts.acs_readable);
  CHECK(facts.gpus[0].redirecting.empty());
}

TEST_CASE("configuration space: only redirecting counts, and a damaged list ends") {
  CHECK(RedirectsP2p(ConfigWithAcs(0x04)) == true);   // requests
  CHECK(RedirectsP2p(ConfigWithAcs(0x08)) == true);   // completions
  CHECK(RedirectsP2p(ConfigWithAcs(0x13)) == false);  // validation, blocking, upstream forwarding
  CHECK(RedirectsP2p(std::string(4096, '\0')) == false);
  CHECK_FALSE(RedirectsP2p("").has_value());
  std::string loop(4096, '\0');
  loop[0x100] = 1;
  loop[0x102] = '\x01';
  loop[0x103] = '\x10';  // next: 0x100 again
  CHECK(RedirectsP2p(loop) == false);
  CHECK(RedirectsP2p(std::string(4096, '\xff')) == false);  // a device that is off
}

TEST_CASE("limits of the system are read from files") {
  ddp::testing::TemporaryFolder root;
  Facts none;
  ReadSystem(root.path(), none);
  CHECK(none.shared_memory_mib == -1);
  CHECK(none.ptrace_scope == 0);
  CHECK_FALSE(none.wsl);
  root.Write("proc/version", "Linux version 5.15.153.1-microsoft-standard-WSL2");
  root.Write("proc/sys/kernel/yama/ptrace_scope", "2\n");
  root.Write("sys/devices/system/cpu/online", "0-7\n");
  fs::create_directories(root.File("dev/shm"));
  Facts facts;
  ReadSystem(root.path(), facts);
  CHECK(facts.wsl);
  CHECK(facts.ptrace_scope == 2);
  CHECK(facts.online_processors == 8);
  CHECK(facts.shared_memory_mib > 0);
  CHECK(facts.free_shared_memory_mib >= 0);
  CHECK(facts.free_shared_memory_mib <= facts.shared_memory_mib);
}

TEST_CASE("lists of processors") {
  CHECK(ParseList("0-2,5\n") == std::vector<int>{0, 1, 2, 5});
  CHECK(ParseList("").empty());
  CHECK(ParseList("x").empty());
}

TEST_CASE("the driver is asked about the GPUs that this process sees") {
  Machine machine;
  machine.Gpu("0000:1b:00.0", "0000:00:01.0", ConfigWithAcs(0));
  machine.Gpu("0000:1c:00.0", "0000:00:02.0", ConfigWithAcs(0));
  machine.Gpu("0000:1d:00.0", "0000:00:03.0", ConfigWithAcs(0));
  struct NvmlState {
    unsigned long long energy_mj, slowed_by;
  };
  void* const nvml = dlopen(FAKE_NVML, RTLD_LAZY);
  REQUIRE(nvml != nullptr);
  auto* const state = reinterpret_cast<NvmlState* (*)()>(dlsym(nvml, "fake_nvml_state"))();
  state->slowed_by = 0x24;
  const FactSources sources = {.root = machine.root.path(), .cuda = FAKE_CUDA, .nvml = FAKE_NVML, .cudnn = "none"};
  const Facts facts = GatherFacts(sources);
  CHECK(facts.nvidia_devices == 3);
  CHECK(facts.driver_cuda == 12040);
  REQUIRE(facts.gpus.size() == 2);
  CHECK(facts.gpus[0].name == "NVIDIA H200");
  CHECK(facts.gpus[0].compute_major == 12);
  CHECK(facts.gpus[0].slowed_by == std::vector<std::string>{"power limit", "temperature"});
  CHECK(facts.gpus[1].slowed_by.empty());
  CHECK(facts.without_p2p == std::vector<std::pair<int, int>>{{0, 1}});
  CHECK_FALSE(facts.cudnn);
  CHECK_FALSE(facts.processors.empty());

  setenv("FAKE_CUDA_INIT", "803", 1);
  const Facts broken = GatherFacts(sources);
  CHECK(broken.gpus.empty());
  CHECK(broken.cuda_error == "cuInit: error 803, it is broken");
  setenv("FAKE_CUDA_INIT", "100", 1);  // as where CUDA_VISIBLE_DEVICES hides all
  CHECK(GatherFacts(sources).cuda_error.empty());
  unsetenv("FAKE_CUDA_INIT");

  setenv("FAKE_CUDA_GPUS", "0", 1);
  CHECK(GatherFacts(sources).gpus.empty());
  const Facts no_driver = GatherFacts({.root = machine.root.path(), .cuda = "none", .nvml = "none", .cudnn = "none"});
  CHECK(no_driver.nvidia_devices == 3);
  CHECK(no_driver.gpus.empty());
  unsetenv("FAKE_CUDA_GPUS");
}

TEST_CASE("copies between GPUs are compared, and a fault has its cause and a remedy") {
  setenv("FAKE_CUDA_GPUS", "3", 1);
  setenv("FAKE_CUDA_P2P", "1", 1);
  const CopyReport healthy = TryCopies(FAKE_CUDA, absl::Minutes(1));
  CHECK(healthy.gpus == 3);
  CHECK(healthy.pairs == 6);
  CHECK(healthy.direct_pairs == 6);
  REQUIRE(CheckCopies(healthy).size() == 1);
  CHECK(CheckCopies(healthy)[0].severity == Severity::kOk);
  CHECK(absl::StrContains(CheckCopies(healthy)[0].text, "between 3 GPUs arrive right: 6 of 6 directions by P2P"));

  struct Case {
    const char *fault, *text, *remedy;
    bool p2p = true;
  };
  const Case cases[] = {
      {"wrong:2:1", "from GPU 2 to GPU 1, by P2P, arrives wrong: element 524288 of 1048576 is ", "NCCL_P2P_DISABLE=1"},
      {"error:0:2", "from GPU 0 to GPU 2, by P2P, failed: cuMemcpyPeer: CUDA error 719", "NCCL_P2P_DISABLE=1"},
      {"wrong:0:1", "from GPU 0 to GPU 1, through host memory, arrives wrong", "dmesg", false},
      {"wrong:1:1", "between the host and GPU 1 arrives wrong", "dmesg"},
      {"hang:1:0", "from GPU 1 to GPU 0, by P2P, did not end in 3s", "ddp_doctor --limit"},
  };
  for (const Case& c : cases) {
    CAPTURE(c.fault);
    if (!c.p2p) unsetenv("FAKE_CUDA_P2P");
    setenv("FAKE_CUDA_COPY", c.fault, 1);
    const bool hangs = absl::StartsWith(c.fault, "hang");
    const Findings findings = CheckCopies(TryCopies(FAKE_CUDA, hangs ? absl::Seconds(3) : absl::Minutes(1)));
    setenv("FAKE_CUDA_P2P", "1", 1);
    REQUIRE(findings.size() == 1);
    INFO(findings[0].text << " -> " << findings[0].remedy);
    CHECK(findings[0].severity == Severity::kError);
    CHECK(absl::StrContains(findings[0].text, c.text));
    CHECK(absl::StrContains(findings[0].text, "likely cause: "));
    CHECK(absl::StrContains(findings[0].remedy, c.remedy));
  }
  for (const char* variable : {"FAKE_CUDA_GPUS", "FAKE_CUDA_P2P", "FAKE_CUDA_COPY"}) unsetenv(variable);
  CHECK(CheckCopies(TryCopies("none", absl::Minutes(1))).empty());
}

TEST_CASE("variables, the library and the port are looked at") {
  const ddp::testing::TemporaryFolder root;
  const FactSources sources = {.root = root.path(), .cuda = "none", .nvml = "none", .cudnn = "none"};
  setenv("NCCL_NTHREADS", "4", 1);
  setenv("DDP_SHARED_MEMORY", "x", 1);
  setenv("DDP_NCCL_LIBRARY", "/no/such/libnccl.so", 1);
  const Facts wrong = GatherFacts(sources);
  for (const char* variable : {"NCCL_NTHREADS", "DDP_SHARED_MEMORY", "DDP_NCCL_LIBRARY"}) unsetenv(variable);
  REQUIRE(wrong.doubtful_variables.size() == 1);
  CHECK(absl::StrContains(wrong.doubtful_variables[0], "NCCL_NTHREADS=4"));
  CHECK(absl::StrContains(wrong.wrong_variable, "DDP_SHARED_MEMORY"));
  CHECK_FALSE(wrong.nccl_error.empty());
  if (wrong.nccl_built) CHECK(absl::StrContains(wrong.nccl_error, "/no/such/libnccl.so"));

  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  REQUIRE(bind(fd, reinterpret_cast<sockaddr*>(&address), size) == 0);
  REQUIRE(listen(fd, 1) == 0);
  REQUIRE(getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) == 0);
  const int port = ntohs(address.sin_port);
  const std::pair<const char*, std::string> variables[] = {
      {"RANK", "0"},        {"WORLD_SIZE", "2"},
      {"LOCAL_RANK", "0"},  {"LOCAL_WORLD_SIZE", "2"},
      {"MASTER_PORT", "1"}, {"DDP_STORE_PORT", absl::StrCat(port)}};
  for (const auto& [name, value] : variables) setenv(name, value.c_str(), 1);
  const Facts taken = GatherFacts(sources);
  close(fd);
  const Facts open = GatherFacts(sources);
  for (const auto& [name, value] : variables) unsetenv(name);
  CHECK(taken.launcher == "torchrun");
  CHECK(taken.ranks == 2);
  CHECK(taken.store_port == port);
  CHECK(taken.store_port_taken);
  CHECK_FALSE(open.store_port_taken);
}

}  // namespace
}  // namespace doctor
