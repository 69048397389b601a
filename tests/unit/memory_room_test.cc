// SPDX-License-Identifier: Apache-2.0
// Whether there is memory for all ranks of a host together, by what /proc and the cgroups say.
#include "libddp/base/memory_room.h"

#include <stdlib.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "tests/support/catch.h"
#include "tests/support/temporary_folder.h"

namespace ddp {
namespace {

constexpr uint64_t kGb = 1'000'000'000;
constexpr uint64_t kNone = std::numeric_limits<uint64_t>::max();

TEST_CASE("ranks that each have room have none together") {
  const std::vector<MemoryRoom> ranks(8, {.host = 16 * kGb});
  CHECK(CheckRoom(ranks, 2 * kGb).ok());
  const absl::Status status = CheckRoom(ranks, 3 * kGb);
  CHECK(absl::IsResourceExhausted(status));
  CHECK(absl::StrContains(status.message(), "8 x 3000000000 bytes"));
  CHECK(absl::StrContains(status.message(), "16000000000 bytes are available"));
}

// A process on a large host, below these limits of cgroups.
MemoryRoom Limited(const std::vector<MemoryRoom::Limit>& limits) {
  MemoryRoom room = {.host = 100 * kGb};
  std::copy(limits.begin(), limits.end(), room.limits.begin());
  return room;
}

TEST_CASE("each cgroup's limit holds for its own ranks") {
  std::vector<MemoryRoom> ranks(8, Limited({{10 * kGb, 1}}));
  CHECK_FALSE(CheckRoom(ranks, 2 * kGb).ok());
  for (size_t r = 4; r < 8; ++r) ranks[r].limits[0].id = 2;
  CHECK(CheckRoom(ranks, 2 * kGb).ok());
  CHECK_FALSE(CheckRoom(ranks, 3 * kGb).ok());
  for (size_t r = 4; r < 8; ++r) ranks[r] = {.host = 100 * kGb};
  ranks[1].limits[0].bytes = 4 * kGb;  // looked a little later
  CHECK(CheckRoom(ranks, 1 * kGb).ok());
  CHECK_FALSE(CheckRoom(ranks, 2 * kGb).ok());
}

TEST_CASE("a limit that cgroups have in common holds, though each has a tighter one") {
  std::vector<MemoryRoom> ranks;
  for (uint64_t r = 0; r < 8; ++r) ranks.push_back(Limited({{5 * kGb, 2 + r}, {16 * kGb, 1}}));
  CHECK(CheckRoom(ranks, 2 * kGb).ok());
  const absl::Status status = CheckRoom(ranks, 3 * kGb);
  CHECK(absl::IsResourceExhausted(status));
  CHECK(absl::StrContains(status.message(), "8 x 3000000000 bytes, of the ranks in one cgroup: 16000000000 bytes"));
  // A rank's own limit.
  ranks[3].limits[0].bytes = 1 * kGb;
  CHECK(absl::StrContains(CheckRoom(ranks, 2 * kGb).message(), "1 x 2000000000 bytes"));
}

// A file system in which a test writes what the kernel would say.
class Root : public ddp::testing::TemporaryFolder {
 public:
  Root() {
    Write("proc/meminfo", "MemTotal:  100 kB\nMemFree:   10 kB\nMemAvailable:   50 kB\nHugePages_Total:   0\n");
  }
  MemoryRoom Read() const { return MemoryRoom::Read(path()); }
};

// The limits that a room has, by identity.
std::map<uint64_t, uint64_t> LimitsOf(const MemoryRoom& room) {
  std::map<uint64_t, uint64_t> limits;
  for (const MemoryRoom::Limit& limit : room.limits) {
    if (limit.id != 0) CHECK(limits.emplace(limit.id, limit.bytes).second);
  }
  return limits;
}

TEST_CASE("without cgroups the host's memory is the limit") {
  const Root root;
  CHECK(root.Read().host == 50 * 1024);
  CHECK(LimitsOf(root.Read()).empty());
  CHECK(root.Read().bytes() == 50 * 1024);
}

TEST_CASE("all limits up the hierarchy count, less what is in use, but not caches") {
  const Root root;
  // Mounted twice in one place.
  root.Write("proc/self/mountinfo",
             "30 25 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw\n"
             "31 25 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw\n");
  root.Write("sys/fs/cgroup/pod/memory.max", "10000\n");
  root.Write("sys/fs/cgroup/pod/memory.current", "4000\n");
  root.Write("sys/fs/cgroup/pod/memory.stat", "anon 1\ninactive_file 1000\nactive_file 500\nfile 2000\n");
  const auto rank = [&](const std::string& name, const std::string& limit, const std::string& used) {
    root.Write("sys/fs/cgroup/pod/" + name + "/memory.max", limit);
    root.Write("sys/fs/cgroup/pod/" + name + "/memory.current", used);
    root.Write("proc/self/cgroup", "0::/pod/" + name + "\n");
    return root.Read();
  };
  constexpr uint64_t kPod = 10000 - 4000 + 1500;
  const std::map<uint64_t, uint64_t> pod = LimitsOf(rank("free", "max\n", "3000\n"));
  REQUIRE(pod.size() == 1);
  CHECK(pod.begin()->second == kPod);
  std::vector<MemoryRoom> rooms;
  for (const char* name : {"a", "b"}) {
    rooms.push_back(rank(name, "9000\n", "4000\n"));
    const std::map<uint64_t, uint64_t> limits = LimitsOf(rooms.back());
    REQUIRE(limits.size() == 2);
    CHECK(limits.count(pod.begin()->first) == 1);  // the same for all of them
    CHECK(rooms.back().bytes() == 5000);
    rooms.back().host = kNone;
  }
  CHECK(CheckRoom({rooms.data(), 1}, 5000).ok());
  CHECK(CheckRoom(rooms, kPod / 2).ok());
  CHECK_FALSE(CheckRoom(rooms, kPod / 2 + 1).ok());
  CHECK(rank("a", "9000\n", "9500\n").bytes() == 0);
}

TEST_CASE("of too many limits the tightest count") {
  const Root root;
  root.Write("proc/self/mountinfo", "30 25 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
  std::string path;
  const int levels = static_cast<int>(MemoryRoom().limits.size()) + 2;
  for (int level = 0; level < levels; ++level) {
    path += "/c";
    // The two in the middle are the loosest.
    const int limit = 1000 + (std::abs(2 * level - levels + 1) <= 1 ? 500 : level);
    root.Write("sys/fs/cgroup" + path + "/memory.max", std::to_string(limit));
    root.Write("sys/fs/cgroup" + path + "/memory.current", "0");
  }
  root.Write("proc/self/cgroup", "0::" + path + "\n");
  const std::map<uint64_t, uint64_t> limits = LimitsOf(root.Read());
  CHECK(limits.size() == static_cast<size_t>(levels) - 2);
  for (const auto& [id, bytes] : limits) CHECK(bytes < 1500);
}

TEST_CASE("a container that sees only its own cgroup, of version 1") {
  const Root root;
  root.Write("proc/self/cgroup", "5:cpu:/elsewhere\n4:memory:/docker/1234\n0::/\n");
  root.Write("proc/self/mountinfo",
             "31 25 0:30 /docker/1234 /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
             "32 25 0:31 / /sys/fs/cgroup/unified ro - cgroup2 cgroup2 rw\n");
  root.Write("sys/fs/cgroup/memory/memory.limit_in_bytes", "8000\n");
  root.Write("sys/fs/cgroup/memory/memory.usage_in_bytes", "5000\n");
  root.Write("sys/fs/cgroup/memory/memory.stat", "inactive_file 7\ntotal_inactive_file 600\ntotal_active_file 400\n");
  const std::map<uint64_t, uint64_t> limits = LimitsOf(root.Read());
  REQUIRE(limits.size() == 1);
  CHECK(limits.begin()->second == 8000 - 5000 + 1000);
}

TEST_CASE("this machine's memory can be read") { CHECK(MemoryRoom::Read().bytes() < kNone); }

}  // namespace
}  // namespace ddp
