// SPDX-License-Identifier: Apache-2.0
#include "tools/doctor/facts.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/statvfs.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "examples/train/environment.h"
#include "examples/train/library.h"
#include "examples/train/nvml.h"
#include "libddp/base/env.h"
#include "libddp/base/text_of_file.h"
#include "libddp/comm/context_settings.h"
#include "libddp/comm/nccl/advice.h"
#include "libddp/comm/nccl/api.h"
#include "libddp/launch/launch_info.h"
#include "libddp/launch/mpi_session.h"

namespace doctor {
namespace {

namespace fs = std::filesystem;
using examples::FindFunction;

std::string ReadLine(const std::string& path) { return std::string(absl::StripAsciiWhitespace(ddp::TextOfFile(path))); }

int ReadInt(const std::string& path, int otherwise) {
  int value = otherwise;
  return absl::SimpleAtoi(ReadLine(path), &value) ? value : otherwise;
}

// Of "16.0 GT/s PCIe".
double ReadSpeed(const std::string& path) {
  double speed = 0;
  const std::string text = ReadLine(path);
  (void)absl::SimpleAtod(text.substr(0, text.find(' ')), &speed);
  return speed;
}

// The value after "name:" in a file of such lines.
std::string ValueOf(const std::string& path, absl::string_view name) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const std::pair<std::string, std::string> parts = absl::StrSplit(line, absl::MaxSplits(':', 1));
    if (absl::StripAsciiWhitespace(parts.first) == name) return std::string(absl::StripAsciiWhitespace(parts.second));
  }
  return "";
}

uint32_t Word(const std::string& bytes, size_t at) {
  const auto byte = [&](size_t i) { return static_cast<uint32_t>(static_cast<unsigned char>(bytes[at + i])); };
  return byte(0) | byte(1) << 8 | byte(2) << 16 | byte(3) << 24;
}

// The bridges between the device and the root, by their names in the path that sysfs' link leads to.
void ReadBridges(const std::string& root, const std::string& device, Facts& facts, Gpu& gpu) {
  std::error_code error;
  const fs::path real = fs::canonical(root + "/sys/bus/pci/devices/" + device, error);
  if (error) return;
  for (fs::path folder = real.parent_path(); folder.has_filename(); folder = folder.parent_path()) {
    if (!fs::exists(folder / "config", error)) break;
    const std::optional<bool> redirects = RedirectsP2p(ddp::TextOfFile((folder / "config").string()));
    if (!redirects.has_value()) facts.acs_readable = false;
    if (redirects.value_or(false)) gpu.redirecting.push_back(folder.filename().string());
  }
}

Gpu ReadGpu(const std::string& root, const std::string& device, Facts& facts) {
  const std::string folder = root + "/sys/bus/pci/devices/" + device + "/";
  const std::string information = root + "/proc/driver/nvidia/gpus/" + device + "/information";
  Gpu gpu;
  gpu.bus_id = device;
  gpu.name = ValueOf(information, "Model");
  gpu.uuid = ValueOf(information, "GPU UUID");
  gpu.link = {ReadInt(folder + "current_link_width", 0), ReadInt(folder + "max_link_width", 0),
              ReadSpeed(folder + "current_link_speed"), ReadSpeed(folder + "max_link_speed")};
  gpu.numa_node = ReadInt(folder + "numa_node", -1);
  gpu.near_processors = ParseList(ReadLine(folder + "local_cpulist"));
  ReadBridges(root, device, facts, gpu);
  return gpu;
}

// What the driver says of the GPUs that this process sees. Nothing is started on them.
void AskDriver(const FactSources& sources, Facts& facts) {
  const char* const cuda = sources.cuda.c_str();
  auto* const init = FindFunction<int(unsigned)>(cuda, "cuInit");
  auto* const count_of = FindFunction<int(int*)>(cuda, "cuDeviceGetCount");
  auto* const version_of = FindFunction<int(int*)>(cuda, "cuDriverGetVersion");
  auto* const bus_id_of = FindFunction<int(char*, int, int)>(cuda, "cuDeviceGetPCIBusId");
  auto* const attribute_of = FindFunction<int(int*, int, int)>(cuda, "cuDeviceGetAttribute");
  auto* const peers = FindFunction<int(int*, int, int)>(cuda, "cuDeviceCanAccessPeer");
  int count = 0;
  if (version_of != nullptr) (void)version_of(&facts.driver_cuda);
  const int started = init == nullptr ? 0 : init(0);
  constexpr int kNoDevice = 100;  // CUDA_ERROR_NO_DEVICE: what hides them is said elsewhere
  if (started != 0 && started != kNoDevice) {
    const char* words = nullptr;
    auto* const words_of = FindFunction<int(int, const char**)>(cuda, "cuGetErrorString");
    if (words_of != nullptr) (void)words_of(started, &words);
    facts.cuda_error =
        absl::StrCat("cuInit: error ", started, words == nullptr ? "" : ", ", words == nullptr ? "" : words);
  }
  if (init == nullptr || count_of == nullptr || bus_id_of == nullptr || started != 0 || count_of(&count) != 0) {
    facts.gpus.clear();  // they are there, and cannot be used
    return;
  }
  std::vector<Gpu> seen;
  for (int device = 0; device < count; ++device) {
    constexpr int kMajor = 75, kMinor = 76;  // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_...
    char bus_id[32] = {};
    if (bus_id_of(bus_id, sizeof bus_id, device) != 0) continue;
    const std::string name = absl::AsciiStrToLower(bus_id);
    const auto known =
        std::find_if(facts.gpus.begin(), facts.gpus.end(), [&](const Gpu& gpu) { return gpu.bus_id == name; });
    Gpu gpu = known == facts.gpus.end() ? Gpu() : *known;
    gpu.bus_id = name;
    if (attribute_of != nullptr) {
      (void)attribute_of(&gpu.compute_major, kMajor, device);
      (void)attribute_of(&gpu.compute_minor, kMinor, device);
    }
    if (const absl::StatusOr<examples::Nvml> nvml = examples::Nvml::Open(sources.nvml, name); nvml.ok()) {
      gpu.slowed_by = examples::SlowdownNames(nvml->State().slowed_by.value_or(0));
    }
    seen.push_back(std::move(gpu));
  }
  facts.gpus = std::move(seen);  // CUDA_VISIBLE_DEVICES may hide some
  for (int a = 0; a < count && peers != nullptr; ++a) {
    for (int b = a + 1; b < count; ++b) {
      int can = 0;
      if (peers(&can, a, b) == 0 && can == 0) facts.without_p2p.emplace_back(a, b);
    }
  }
}

void AskNccl(Facts& facts) {
  const absl::StatusOr<ddp::nccl::Api> api = ddp::nccl::Load();
  facts.nccl_built = api.status().code() != absl::StatusCode::kUnimplemented;
  const absl::StatusOr<ddp::nccl::Features> features = api.ok() ? ddp::nccl::FeaturesOf(*api) : api.status();
  if (features.ok()) {
    facts.nccl_version = features->version;
  } else {
    facts.nccl_error = std::string(features.status().message());
  }
}

bool PortTaken(int port) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return false;
  const int yes = 1;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const bool taken = bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0;
  close(fd);
  return taken;
}

// Those that a program's Context reads, where its options say nothing.
void ReadVariables(Facts& facts) {
  const absl::StatusOr<std::string> backend = ddp::ReadBackend({});
  if (backend.ok()) facts.backend = *backend;
  for (const absl::Status& s : {ddp::CheckEnvChoices(), ddp::ReadTimes({}).status(), backend.status()}) {
    if (!s.ok()) facts.wrong_variable = std::string(s.message());
  }
}

void AskLauncher(Facts& facts) {
  const absl::StatusOr<ddp::LaunchInfo> info = ddp::DetectLaunch({});
  if (!info.ok()) {
    facts.wrong_variable = std::string(info.status().message());
    return;
  }
  facts.launcher = info->launcher;
  facts.rank = info->rank;
  facts.ranks = info->world_size;
  facts.local_rank = info->local_rank;
  facts.local_ranks = info->local_world_size;
  if (info->rendezvous != ddp::RendezvousMethod::kTcpStore || info->rank != 0) return;
  facts.store_port = info->store_port;
  facts.store_port_taken = PortTaken(info->store_port);
}

}  // namespace

std::vector<int> ParseList(const std::string& text) {
  std::vector<int> numbers;
  for (const absl::string_view part : absl::StrSplit(text, ',', absl::SkipWhitespace())) {
    const std::pair<absl::string_view, absl::string_view> ends = absl::StrSplit(part, absl::MaxSplits('-', 1));
    int first = 0, last = 0;
    if (!absl::SimpleAtoi(ends.first, &first)) return {};
    if (!absl::SimpleAtoi(ends.second, &last)) last = first;
    for (int i = first; i <= last && i - first < 65536; ++i) numbers.push_back(i);
  }
  return numbers;
}

std::optional<bool> RedirectsP2p(const std::string& config_space) {
  constexpr size_t kExtended = 0x100;
  constexpr uint32_t kAcs = 0x000d, kRequestRedirect = 1 << 2, kCompletionRedirect = 1 << 3;
  if (config_space.size() < kExtended + 4) return std::nullopt;
  // A list of capabilities: id in the lowest 16 bits, the offset of the next in the highest 12.
  size_t at = kExtended;
  for (int i = 0; i < 1024 && at >= kExtended && at + 8 <= config_space.size(); ++i) {
    const uint32_t header = Word(config_space, at);
    if ((header & 0xffff) == kAcs) {
      const uint32_t control = Word(config_space, at + 4) >> 16;
      return (control & (kRequestRedirect | kCompletionRedirect)) != 0;
    }
    at = header >> 20;
  }
  return false;
}

void ReadPci(const std::string& root, Facts& facts) {
  std::error_code error;
  std::vector<std::string> devices;
  for (const fs::directory_entry& entry : fs::directory_iterator(root + "/sys/bus/pci/devices", error)) {
    const std::string folder = entry.path().string();
    // Display controllers, with or without a screen.
    if (ReadLine(folder + "/vendor") == "0x10de" && absl::StartsWith(ReadLine(folder + "/class"), "0x03")) {
      devices.push_back(entry.path().filename().string());
    }
  }
  std::sort(devices.begin(), devices.end());
  facts.nvidia_devices = static_cast<int>(devices.size());
  for (const std::string& device : devices) facts.gpus.push_back(ReadGpu(root, device, facts));
  // With iommu=pt, too, there are groups: what counts is whether addresses are translated.
  for (const std::string& device : devices) {
    const std::string group = absl::StrCat(root, "/sys/bus/pci/devices/", device, "/iommu_group");
    facts.iommu = facts.iommu || (fs::exists(group, error) && ReadLine(group + "/type") != "identity");
  }
  // "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Fri ..."
  const std::string driver = ValueOf(root + "/proc/driver/nvidia/version", "NVRM version");
  for (const absl::string_view word : absl::StrSplit(driver, ' ', absl::SkipEmpty())) {
    if (!absl::ascii_isdigit(static_cast<unsigned char>(word[0])) || !absl::StrContains(word, '.')) continue;
    facts.driver = std::string(word);
    break;
  }
}

void ReadSystem(const std::string& root, Facts& facts) {
  facts.wsl = absl::StrContains(absl::AsciiStrToLower(ddp::TextOfFile(root + "/proc/version")), "microsoft");
  facts.ptrace_scope = ReadInt(root + "/proc/sys/kernel/yama/ptrace_scope", 0);
  facts.online_processors = static_cast<int>(ParseList(ReadLine(root + "/sys/devices/system/cpu/online")).size());
  struct statvfs shm;
  if (statvfs((root + "/dev/shm").c_str(), &shm) == 0) {
    facts.shared_memory_mib = static_cast<int64_t>(shm.f_blocks * shm.f_frsize >> 20);
    facts.free_shared_memory_mib = static_cast<int64_t>(shm.f_bavail * shm.f_frsize >> 20);
  }
}

Facts GatherFacts(const FactSources& sources) {
  Facts facts;
  utsname system;
  if (uname(&system) == 0) facts.system = absl::StrCat(system.sysname, " ", system.release);
  sources.progress("files of the system, in /proc and /sys");
  ReadSystem(sources.root, facts);
  ReadPci(sources.root, facts);
  sources.progress("the start of the GPUs' driver");
  AskDriver(sources, facts);
  sources.progress("loading NCCL and cuDNN");
  AskNccl(facts);
  facts.cudnn = FindFunction<size_t()>(sources.cudnn.c_str(), "cudnnGetVersion") != nullptr;
  facts.built_cuda = DOCTOR_CUDA;
  facts.doubtful_variables = ddp::nccl::CheckEnvironment();
  ReadVariables(facts);
  rlimit locked;
  if (getrlimit(RLIMIT_MEMLOCK, &locked) == 0 && locked.rlim_cur != RLIM_INFINITY) {
    facts.locked_memory_kib = static_cast<int64_t>(locked.rlim_cur >> 10);
  }
  facts.single_copy_off = ddp::ReadEnv(ddp::Env::kSingleCopy) == "off";
  facts.mpi_built = ddp::MpiSession::Available();
  facts.processors = examples::ThisProcess().processors;
  AskLauncher(facts);
  return facts;
}

}  // namespace doctor
