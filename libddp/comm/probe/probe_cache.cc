// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/probe/probe_cache.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <map>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "libddp/base/env.h"
#include "libddp/base/text_of_file.h"

namespace ddp {
namespace {

constexpr char kFirstLine[] = "ddp probe cache 1";
constexpr size_t kLargestEntry = 1 << 20;

std::string FirstLineOf(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// The GPU's UUID where the driver tells it, which another GPU in the same slot does not have.
std::string GpuUuid(const std::string& root, const std::string& bus_id) {
  std::ifstream file(absl::StrCat(root, "/proc/driver/nvidia/gpus/", absl::AsciiStrToLower(bus_id), "/information"));
  for (std::string line; std::getline(file, line);) {
    if (absl::StartsWith(line, "GPU UUID:")) return std::string(absl::StripAsciiWhitespace(line.substr(9)));
  }
  return "";
}

// Where NCCL finds variables that are not set.
std::vector<std::string> ConfigurationsOfNccl(absl::Span<const std::string> variables, const std::string& root) {
  std::string home, named;
  for (absl::string_view variable : variables) {
    if (absl::ConsumePrefix(&variable, "HOME=")) home = absl::StrCat(root, variable, "/.nccl.conf");
    if (absl::ConsumePrefix(&variable, "NCCL_CONF_FILE=")) named = std::string(variable);
  }
  return {named.empty() ? home : named, root + "/etc/nccl.conf"};
}

using Micros = decltype(ProbeReport::micros);

std::string ToText(const std::string& value) { return absl::CEscape(value); }
std::string ToText(int value) { return absl::StrCat(value); }
std::string ToText(ProbeVerdict value) { return absl::StrCat(static_cast<int>(value)); }
std::string ToText(const Micros& value) { return absl::StrJoin(value, ","); }

bool FromText(absl::string_view text, std::string* value) { return absl::CUnescape(text, value); }
bool FromText(absl::string_view text, int* value) { return absl::SimpleAtoi(text, value); }
bool FromText(absl::string_view text, ProbeVerdict* value) {
  int number = 0;
  if (!absl::SimpleAtoi(text, &number) || number < 0 || number > static_cast<int>(ProbeVerdict::kBroken)) return false;
  *value = static_cast<ProbeVerdict>(number);
  return true;
}
bool FromText(absl::string_view text, Micros* value) {
  const std::vector<absl::string_view> parts = absl::StrSplit(text, ',');
  if (parts.size() != value->size()) return false;
  for (size_t i = 0; i < parts.size(); ++i) {
    if (!absl::SimpleAtof(parts[i], &(*value)[i])) return false;
  }
  return true;
}

template <typename Report, typename Function>
void ForEachField(Report& report, Function f) {
  f("verdict", report.verdict);
  f("failed_rank", report.failed_rank);
  f("failed_step", report.failed_step);
  f("how", report.how);
  f("cause", report.cause);
  f("remedy", report.remedy);
  f("warning", report.warning);
  f("micros", report.micros);
  f("micros_without_p2p", report.micros_without_p2p);
  f("micros_hierarchical", report.micros_hierarchical);
  f("note", report.note);
}

std::string WriteEntry(absl::string_view key, const ProbeReport& report) {
  std::string text = absl::StrCat(kFirstLine, "\nkey ", absl::CEscape(key), "\n");
  ForEachField(report,
               [&](const char* name, const auto& value) { absl::StrAppend(&text, name, " ", ToText(value), "\n"); });
  return text;
}

std::optional<ProbeReport> ReadEntry(absl::string_view key, const std::string& text) {
  std::map<std::string, std::string> values;
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    values.insert(absl::StrSplit(line, absl::MaxSplits(' ', 1)));
  }
  ProbeReport report;
  bool good = absl::StartsWith(text, absl::StrCat(kFirstLine, "\n")) && values["key"] == absl::CEscape(key);
  ForEachField(report, [&](const char* name, auto& value) { good = good && FromText(values[name], &value); });
  report.from_cache = true;
  return good ? std::optional<ProbeReport>(report) : std::nullopt;
}

// Reads a regular file of this user's that nobody else may write; empty if it is none.
std::string ReadOwn(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  if (fd < 0) return "";
  struct stat about;
  std::string text;
  if (fstat(fd, &about) == 0 && S_ISREG(about.st_mode) && about.st_uid == geteuid() && (about.st_mode & 022) == 0) {
    char bytes[4096];
    for (ssize_t n; text.size() < kLargestEntry && (n = read(fd, bytes, sizeof bytes)) != 0;) {
      if (n < 0 && errno != EINTR) break;
      if (n > 0) text.append(bytes, static_cast<size_t>(n));
    }
  }
  close(fd);
  return text;
}

absl::Status FileError(absl::string_view call, const std::string& path) {
  return absl::PermissionDeniedError(
      absl::StrCat(call, " ", path, ": ", std::strerror(errno), "; DDP_PROBE_CACHE names another folder, or is off"));
}

// With the folders above it.
absl::Status MakeFolder(const std::string& folder) {
  for (size_t end = folder.find('/', 1);; end = folder.find('/', end + 1)) {
    const std::string part = folder.substr(0, end);
    if (mkdir(part.c_str(), 0700) != 0 && errno != EEXIST) return FileError("mkdir", part);
    if (end == std::string::npos) return absl::OkStatus();
  }
}

}  // namespace

std::string ProbeKey(DeviceRuntime& runtime, Device device, int nccl_version, absl::Span<const std::string> variables,
                     const std::string& root) {
  const absl::StatusOr<std::string> bus_id = runtime.Identity(device);
  if (!bus_id.ok()) return "";
  const std::string uuid = GpuUuid(root, *bus_id);
  std::vector<std::string> parts = {FirstLineOf(root + "/proc/driver/nvidia/version"),
                                    absl::StrCat("NCCL ", nccl_version), uuid.empty() ? *bus_id : uuid,
                                    FirstLineOf(root + "/proc/sys/kernel/random/boot_id")};
  std::vector<std::string> sorted;
  for (const std::string& variable : variables) {
    // How much NCCL says changes nothing.
    const bool matters = absl::StartsWith(variable, "NCCL_") && !absl::StartsWith(variable, "NCCL_DEBUG");
    if (matters || absl::StartsWith(variable, "DDP_NCCL_LIBRARY=")) sorted.push_back(variable);
  }
  std::sort(sorted.begin(), sorted.end());
  parts.insert(parts.end(), sorted.begin(), sorted.end());
  for (const std::string& file : ConfigurationsOfNccl(variables, root)) parts.push_back(TextOfFile(file));
  return absl::StrJoin(parts, "\n");
}

std::string ProbeCacheFolder() {
  if (const std::optional<std::string> folder = ReadEnv(Env::kProbeCache); folder.has_value()) {
    return *folder == "off" ? "" : *folder;
  }
  if (const std::optional<std::string> cache = ReadEnv(Env::kXdgCacheHome); cache.has_value()) return *cache + "/ddp";
  const std::optional<std::string> home = ReadEnv(Env::kHome);
  return home.has_value() ? *home + "/.cache/ddp" : "";
}

std::string ProbeCache::PathFor(absl::string_view key) const {
  uint64_t hash = 14695981039346656037u;
  for (const char c : key) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211u;
  return absl::StrCat(folder_, "/probe-", absl::Hex(hash, absl::kZeroPad16));
}

std::optional<ProbeReport> ProbeCache::Load(absl::string_view key) const {
  if (folder_.empty() || key.empty()) return std::nullopt;
  const std::string text = ReadOwn(PathFor(key));
  return text.empty() ? std::nullopt : ReadEntry(key, text);
}

absl::Status ProbeCache::Store(absl::string_view key, const ProbeReport& report) const {
  if (folder_.empty() || key.empty()) return absl::OkStatus();
  if (absl::Status s = MakeFolder(folder_); !s.ok()) return s;
  // The ranks of a host write the same; each to a name of its own first.
  std::string temporary = absl::StrCat(PathFor(key), ".XXXXXX");
  const int fd = mkostemp(temporary.data(), O_CLOEXEC);  // mode 0600
  if (fd < 0) return FileError("open", temporary);
  const std::string text = WriteEntry(key, report);
  const bool written = write(fd, text.data(), text.size()) == static_cast<ssize_t>(text.size());
  close(fd);
  if (written && rename(temporary.c_str(), PathFor(key).c_str()) == 0) return absl::OkStatus();
  const absl::Status error = FileError("write", temporary);
  unlink(temporary.c_str());
  return error;
}

void ProbeCache::Forget(absl::string_view key) const {
  if (!folder_.empty() && !key.empty()) unlink(PathFor(key).c_str());
}

}  // namespace ddp
