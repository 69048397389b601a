// SPDX-License-Identifier: Apache-2.0
#include "examples/train/environment.h"

#include <sched.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <sstream>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "ddp/version.h"
#include "examples/train/library.h"
#include "revision.h"

namespace examples {
namespace {

using Json = nlohmann::ordered_json;

// Empty if there is no such file.
std::string ReadText(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();  // nothing, where that is a folder
  return std::string(absl::StripAsciiWhitespace(text.str()));
}

// The value of the first line "name : value" or "name: value unit".
std::string ValueOf(absl::string_view name, absl::string_view text) {
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    const std::vector<std::string> parts = absl::StrSplit(line, absl::MaxSplits(':', 1));
    if (parts.size() == 2 && absl::StripAsciiWhitespace(parts[0]) == name) {
      return std::string(absl::StripAsciiWhitespace(parts[1]));
    }
  }
  return "";
}

template <class T>
void Put(Json& object, const char* name, const T& value) {
  if (value != T()) object[name] = value;
}

// --- The machine

std::string OfProcessor(const EnvironmentSources& sources, int processor, const std::string& name) {
  return ReadText(absl::StrCat(sources.root, "/sys/devices/system/cpu/cpu", processor, "/", name));
}

// Hardware threads of one core count once; a container's quota limits them.
int CountCores(const EnvironmentSources& sources) {
  std::set<std::pair<std::string, std::string>> cores;
  for (const int processor : sources.processors) {
    const std::string core = OfProcessor(sources, processor, "topology/core_id");
    cores.emplace(OfProcessor(sources, processor, "topology/physical_package_id"),
                  core.empty() ? absl::StrCat("processor ", processor) : core);
  }
  int count = static_cast<int>(cores.size());
  const std::vector<std::string> quota = absl::StrSplit(ReadText(sources.root + "/sys/fs/cgroup/cpu.max"), ' ');
  int64_t allowed = 0, period = 0;
  if (quota.size() == 2 && absl::SimpleAtoi(quota[0], &allowed) && absl::SimpleAtoi(quota[1], &period) && period > 0) {
    count = std::min(count, static_cast<int>(allowed / period));
  }
  return std::max(1, count);
}

// As "L2 1024K (shared by processors 0)".
std::vector<std::string> Caches(const EnvironmentSources& sources) {
  std::vector<std::string> caches;
  const int processor = sources.processors.empty() ? 0 : sources.processors.front();
  for (int index = 0;; ++index) {
    const auto of_cache = [&](const char* name) {
      return OfProcessor(sources, processor, absl::StrCat("cache/index", index, "/", name));
    };
    const std::string level = of_cache("level");
    if (level.empty()) return caches;
    if (of_cache("type") == "Instruction") continue;
    caches.push_back(
        absl::StrCat("L", level, " ", of_cache("size"), " (shared by processors ", of_cache("shared_cpu_list"), ")"));
  }
}

Json DescribeCpu(const EnvironmentSources& sources) {
  const std::string info = ReadText(sources.root + "/proc/cpuinfo");
  std::set<std::string> sockets;
  for (const int processor : sources.processors) {
    sockets.insert(OfProcessor(sources, processor, "topology/physical_package_id"));
  }
  Json cpu;
  Put(cpu, "model", ValueOf("model name", info));
  cpu["sockets"] = sockets.size();
  cpu["cores"] = CountCores(sources);
  cpu["hardware_threads"] = sources.processors.size();
  Put(cpu, "of_hardware_threads", ReadText(sources.root + "/sys/devices/system/cpu/online"));
  cpu["caches"] = Caches(sources);
  cpu["virtual_machine"] = absl::StrContains(absl::StrCat(ValueOf("flags", info), " "), " hypervisor ");
  const int first = sources.processors.empty() ? 0 : sources.processors.front();
  Put(cpu, "governor", OfProcessor(sources, first, "cpufreq/scaling_governor"));
  int64_t khz = 0;
  if (absl::SimpleAtoi(OfProcessor(sources, first, "cpufreq/cpuinfo_max_freq"), &khz)) cpu["max_mhz"] = khz / 1000;
  return cpu;
}

int CountNumaNodes(const EnvironmentSources& sources) {
  int nodes = 0;
  while (std::filesystem::exists(absl::StrCat(sources.root, "/sys/devices/system/node/node", nodes))) ++nodes;
  return std::max(1, nodes);
}

int64_t MemoryMib(const EnvironmentSources& sources) {
  const std::string total = ValueOf("MemTotal", ReadText(sources.root + "/proc/meminfo"));
  int64_t kb = 0, limit = 0;
  if (!absl::SimpleAtoi(absl::StripSuffix(total, " kB"), &kb)) return 0;
  const bool limited = absl::SimpleAtoi(ReadText(sources.root + "/sys/fs/cgroup/memory.max"), &limit);
  return limited ? std::min(kb / 1024, limit >> 20) : kb / 1024;
}

// --- Libraries

std::string MpiVersion() {
  auto* const version = FindFunction<int(char*, int*)>(nullptr, "MPI_Get_library_version");
  if (version == nullptr) return "";
  char text[8192] = {};  // MPICH's MPI_MAX_LIBRARY_VERSION_STRING
  int length = 0;
  version(text, &length);
  // "Open MPI v4.1.4, package: ...", or lines such as "MPICH Version: 4.0.2"; the rest is about its build.
  const std::vector<std::string> parts = absl::StrSplit(text, absl::ByAnyChar(",\n"));
  return parts.front();
}

constexpr char kCuda[] = "libcuda.so.1";

Json DescribeGpus() {
  Json gpus = Json::array();
  auto* const init = FindFunction<int(unsigned)>(kCuda, "cuInit");
  auto* const count_of = FindFunction<int(int*)>(kCuda, "cuDeviceGetCount");
  auto* const name_of = FindFunction<int(char*, int, int)>(kCuda, "cuDeviceGetName");
  auto* const memory_of = FindFunction<int(size_t*, int)>(kCuda, "cuDeviceTotalMem_v2");
  auto* const attribute_of = FindFunction<int(int*, int, int)>(kCuda, "cuDeviceGetAttribute");
  int count = 0;
  if (init == nullptr || count_of == nullptr || init(0) != 0 || count_of(&count) != 0) return gpus;
  for (int device = 0; device < count; ++device) {
    Json gpu;
    char name[256] = {};
    size_t bytes = 0;
    int khz = 0;
    constexpr int kClockRate = 13;  // CU_DEVICE_ATTRIBUTE_CLOCK_RATE
    if (name_of != nullptr && name_of(name, sizeof(name), device) == 0) gpu["name"] = name;
    if (memory_of != nullptr && memory_of(&bytes, device) == 0) gpu["memory_mib"] = bytes >> 20;
    if (attribute_of != nullptr && attribute_of(&khz, kClockRate, device) == 0) gpu["clock_mhz"] = khz / 1000;
    gpus.push_back(std::move(gpu));
  }
  return gpus;
}

// Versions as the libraries number them: NCCL 2.21.5 is 22105, cuDNN 9.8.0 is 90800.
Json DescribeLibraries(bool gpu, const EnvironmentSources& sources) {
  Json libraries;
  for (const auto& [name, version] : sources.libraries) libraries[name] = version;
  Put(libraries, "mpi", MpiVersion());
  if (!gpu) return libraries;
  // "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Fri ..."
  const std::string driver = ValueOf("NVRM version", ReadText(sources.root + "/proc/driver/nvidia/version"));
  for (const absl::string_view word : absl::StrSplit(driver, ' ', absl::SkipEmpty())) {
    if (!absl::ascii_isdigit(static_cast<unsigned char>(word[0])) || !absl::StrContains(word, '.')) continue;
    libraries["nvidia_driver"] = std::string(word);
    break;
  }
  const auto ask = [&](const char* name, int (*function)(int*)) {
    int version = 0;
    if (function != nullptr && function(&version) == 0) libraries[name] = version;
  };
  ask("cuda_driver", FindFunction<int(int*)>(kCuda, "cuDriverGetVersion"));
  ask("nccl", FindFunction<int(int*)>("libnccl.so.2", "ncclGetVersion"));
  if (auto* const cudnn = FindFunction<size_t()>("libcudnn.so.9", "cudnnGetVersion"); cudnn != nullptr) {
    libraries["cudnn"] = cudnn();
  }
  return libraries;
}

// --- The program and its variables

Json DescribeBuild() {
  Json build;
  build["version"] = absl::StrCat(DDP_VERSION_MAJOR, ".", DDP_VERSION_MINOR, ".", DDP_VERSION_PATCH);
  Put(build, "revision", std::string(DDP_REVISION));
  Put(build, "build_type", std::string(DDP_BUILD_TYPE));
  Put(build, "compiler", std::string(DDP_COMPILER));
  std::vector<std::string> flags = absl::StrSplit(DDP_COMPILER_FLAGS, ' ', absl::SkipEmpty());
  flags.erase(std::remove_if(flags.begin(), flags.end(), [](const auto& flag) { return absl::StrContains(flag, '/'); }),
              flags.end());
  Put(build, "flags", absl::StrJoin(flags, " "));
  Put(build, "sanitizers", std::string(DDP_SANITIZERS));
  Put(build, "cuda_toolkit", std::string(DDP_CUDA_TOOLKIT));
  return build;
}

// Launchers set many more, with names of hosts and addresses; these are what people tune.
constexpr absl::string_view kPrefixes[] = {
    "DDP_",         "OMP_",         "GOMP_",        "KMP_",          "DNNL_",         "ONEDNN_",         "NCCL_",
    "CUDA_",        "CUDNN_",       "CUBLAS_",      "NVIDIA_TF32",   "UCX_",          "HYDRA_",          "MALLOC_",
    "OMPI_MCA_btl", "OMPI_MCA_pml", "OMPI_MCA_mtl", "OMPI_MCA_coll", "OMPI_MCA_mpi_", "OMPI_MCA_hwloc_", "SLURM_CPU"};
constexpr absl::string_view kPrivateWords[] = {"SECRET", "TOKEN", "PASS", "KEY", "CREDENTIAL"};

bool IsShown(absl::string_view name) {
  return std::any_of(std::begin(kPrefixes), std::end(kPrefixes),
                     [&](absl::string_view prefix) { return absl::StartsWith(name, prefix); }) &&
         std::none_of(std::begin(kPrivateWords), std::end(kPrivateWords),
                      [&](absl::string_view word) { return absl::StrContains(absl::AsciiStrToUpper(name), word); });
}

Json DescribeVariables(const EnvironmentSources& sources) {
  std::vector<std::string> sorted = sources.variables;
  std::sort(sorted.begin(), sorted.end());
  Json variables = Json::object();
  for (const std::string& variable : sorted) {
    const std::pair<std::string, std::string> parts = absl::StrSplit(variable, absl::MaxSplits('=', 1));
    if (!IsShown(parts.first)) continue;
    variables[parts.first] = absl::StrContains(parts.second, '/') ? "(a path)" : parts.second;
  }
  return variables;
}

}  // namespace

EnvironmentSources ThisProcess() {
  EnvironmentSources sources;
  for (char** variable = environ; *variable != nullptr; ++variable) sources.variables.emplace_back(*variable);
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return sources;
  for (int processor = 0; processor < CPU_SETSIZE; ++processor) {
    if (CPU_ISSET(processor, &set)) sources.processors.push_back(processor);
  }
  return sources;
}

std::string DescribeEnvironment(const std::string& launcher, bool gpu, const EnvironmentSources& sources) {
  Json environment;
  environment["date"] = absl::FormatTime("%Y-%m-%d %H:%M:%S %z", absl::Now(), absl::LocalTimeZone());
  utsname system;
  if (uname(&system) == 0) environment["system"] = absl::StrCat(system.sysname, " ", system.release);
  environment["cpu"] = DescribeCpu(sources);
  double mhz = 0;
  if (absl::SimpleAtod(ValueOf("cpu MHz", ReadText(sources.root + "/proc/cpuinfo")), &mhz)) {
    environment["cpu_mhz"] = std::lround(mhz);  // at this moment
  }
  environment["numa_nodes"] = CountNumaNodes(sources);
  environment["memory_mib"] = MemoryMib(sources);
  environment["gpus"] = gpu ? DescribeGpus() : Json::array();
  environment["libraries"] = DescribeLibraries(gpu, sources);
  environment["build"] = DescribeBuild();
  environment["launcher"] = launcher;
  environment["variables"] = DescribeVariables(sources);
  // A variable may hold any bytes.
  return environment.dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace examples
