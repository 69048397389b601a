// SPDX-License-Identifier: Apache-2.0
#include "libddp/base/memory_room.h"

#include <sys/stat.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <optional>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace ddp {
namespace {

constexpr uint64_t kWorthLooking = uint64_t{4} << 20;

// The number in a file, or nothing if the file is missing or says "max".
std::optional<uint64_t> ReadNumber(const std::string& path) {
  uint64_t number = 0;
  std::ifstream file(path);
  return file >> number ? std::optional(number) : std::nullopt;
}

// The sum of two entries of a file with one key and number per line.
uint64_t SumOf(const std::string& path, absl::string_view first, absl::string_view second) {
  std::ifstream file(path);
  std::string key;
  uint64_t number = 0, sum = 0;
  while (file >> key >> number) {
    if (key == first || key == second) sum += number;
  }
  return sum;
}

uint64_t HostBytes(const std::string& root) {
  std::ifstream file(root + "/proc/meminfo");
  for (std::string line; std::getline(file, line);) {
    const std::vector<absl::string_view> words = absl::StrSplit(line, ' ', absl::SkipEmpty());
    uint64_t kib = 0;
    if (words.size() >= 2 && words[0] == "MemAvailable:" && absl::SimpleAtoi(words[1], &kib)) return kib * 1024;
  }
  return std::numeric_limits<uint64_t>::max();
}

// A mounted cgroup file system with the memory controller.
struct Mount {
  bool unified = false;  // version 2
  std::string part;      // the part of the hierarchy that is mounted
  std::string path;      // where it is mounted
};

std::vector<Mount> MemoryMounts(const std::string& root) {
  std::vector<Mount> mounts;
  std::ifstream file(root + "/proc/self/mountinfo");
  for (std::string line; std::getline(file, line);) {
    // number parent device PART PATH options ... - TYPE source SUPER-OPTIONS
    const std::vector<std::string> sides = absl::StrSplit(line, absl::MaxSplits(" - ", 1));
    if (sides.size() != 2) continue;
    const std::vector<std::string> left = absl::StrSplit(sides[0], ' '), right = absl::StrSplit(sides[1], ' ');
    if (left.size() < 5 || right.size() < 3) continue;
    const std::vector<absl::string_view> options = absl::StrSplit(right[2], ',');
    const bool unified = right[0] == "cgroup2";
    const bool memory = right[0] == "cgroup" && std::find(options.begin(), options.end(), "memory") != options.end();
    if (unified || memory) mounts.push_back({unified, left[3], left[4]});
  }
  return mounts;
}

// The path of this process's cgroup in the hierarchy: "0::/path" in version 2, "4:memory:/path" in version 1.
std::string OwnCgroup(const std::string& root, bool unified) {
  std::ifstream file(root + "/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    const std::vector<std::string> fields = absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (fields.size() != 3) continue;
    const std::vector<absl::string_view> controllers = absl::StrSplit(fields[1], ',');
    const bool memory = std::find(controllers.begin(), controllers.end(), "memory") != controllers.end();
    if (unified ? fields[0] == "0" : memory) return fields[2];
  }
  return "/";
}

// What the limit of one cgroup leaves. The kernel can reclaim pages that only cache files.
std::optional<uint64_t> LeftIn(const std::string& folder, bool unified) {
  const std::optional<uint64_t> limit = ReadNumber(folder + (unified ? "/memory.max" : "/memory.limit_in_bytes"));
  const std::optional<uint64_t> used = ReadNumber(folder + (unified ? "/memory.current" : "/memory.usage_in_bytes"));
  if (!limit.has_value() || !used.has_value()) return std::nullopt;
  const std::string prefix = unified ? "" : "total_";
  const uint64_t cache = SumOf(folder + "/memory.stat", prefix + "inactive_file", prefix + "active_file");
  const uint64_t held = *used - std::min(*used, cache);
  return *limit - std::min(*limit, held);
}

bool IsTighter(const MemoryRoom::Limit& a, const MemoryRoom::Limit& b) { return a.bytes < b.bytes; }

// In place of the loosest one, which is none unless all places are taken. A cgroup may be mounted twice.
void Keep(const MemoryRoom::Limit& limit, MemoryRoom& room) {
  for (const MemoryRoom::Limit& kept : room.limits) {
    if (kept.id == limit.id) return;
  }
  const auto loosest = std::max_element(room.limits.begin(), room.limits.end(), IsTighter);
  if (IsTighter(limit, *loosest)) *loosest = limit;
}

}  // namespace

uint64_t MemoryRoom::bytes() const {
  return std::min(host, std::min_element(limits.begin(), limits.end(), IsTighter)->bytes);
}

MemoryRoom MemoryRoom::Read(const std::string& root) {
  MemoryRoom room;
  room.host = HostBytes(root);
  for (const Mount& mount : MemoryMounts(root)) {
    const std::string top = root + mount.path;
    std::string own = OwnCgroup(root, mount.unified);
    // A container often sees only its own cgroup, mounted at the top.
    if (mount.part != "/" && absl::StartsWith(own, mount.part)) own = own.substr(mount.part.size());
    struct stat info = {};
    if (stat((top + own).c_str(), &info) != 0) own = "";
    // The limits of all cgroups above apply too.
    for (;; own = own.substr(0, own.rfind('/'))) {
      const std::string folder = top + own;
      const std::optional<uint64_t> left = LeftIn(folder, mount.unified);
      if (left.has_value() && stat(folder.c_str(), &info) == 0) Keep({*left, info.st_ino}, room);
      if (own.empty() || own == "/") break;
    }
  }
  return room;
}

MemoryRoom MemoryRoom::For(uint64_t bytes) { return bytes < kWorthLooking ? MemoryRoom() : Read(); }

absl::Status CheckRoom(absl::Span<const MemoryRoom> processes, uint64_t bytes) {
  const auto check = [&](uint64_t count, uint64_t room, absl::string_view whose) {
    if (count == 0 || bytes <= room / count) return absl::OkStatus();
    return absl::ResourceExhaustedError(
        absl::StrCat("no memory left for ", count, " x ", bytes, " bytes, of the ranks ", whose, ": ", room,
                     " bytes are available; free some, start fewer ranks, or give the container more (docker run "
                     "--memory=)"));
  };
  struct Sharers {
    uint64_t count = 0, room = std::numeric_limits<int64_t>::max();  // which is the most that a file can have
  };
  Sharers all;
  std::map<uint64_t, Sharers> by_limit;
  for (const MemoryRoom& process : processes) {
    for (const MemoryRoom::Limit& limit : process.limits) {
      if (limit.id == 0) continue;
      Sharers& sharers = by_limit[limit.id];
      sharers = {sharers.count + 1, std::min(sharers.room, limit.bytes)};
    }
    all = {all.count + 1, std::min(all.room, process.host)};
  }
  if (absl::Status s = check(all.count, all.room, "on this host"); !s.ok()) return s;
  for (const auto& [id, sharers] : by_limit) {
    if (absl::Status s = check(sharers.count, sharers.room, "in one cgroup"); !s.ok()) return s;
  }
  return absl::OkStatus();
}

}  // namespace ddp
