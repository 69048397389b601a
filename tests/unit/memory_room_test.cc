// Whether there is memory for all ranks of a host together, by what /proc and the cgroups say.
#include "libddp/base/memory_room.h"

#include <stdlib.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "tests/support/catch.h"

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

TEST_CASE("each cgroup's limit holds for its own ranks") {
  std::vector<MemoryRoom> ranks(8, {.host = 100 * kGb, .limit = 10 * kGb, .limit_id = 1});
  CHECK_FALSE(CheckRoom(ranks, 2 * kGb).ok());
  for (size_t r = 4; r < 8; ++r) ranks[r].limit_id = 2;
  CHECK(CheckRoom(ranks, 2 * kGb).ok());
  CHECK_FALSE(CheckRoom(ranks, 3 * kGb).ok());
  for (size_t r = 4; r < 8; ++r) ranks[r] = {.host = 100 * kGb};
  ranks[1].limit = 4 * kGb;  // looked a little later
  CHECK(CheckRoom(ranks, 1 * kGb).ok());
  CHECK_FALSE(CheckRoom(ranks, 2 * kGb).ok());
}

// A file system in which a test writes what the kernel would say.
class Root {
 public:
  Root() {
    REQUIRE(mkdtemp(path_.data()) != nullptr);
    Write("proc/meminfo", "MemTotal:  100 kB\nMemFree:   10 kB\nMemAvailable:   50 kB\nHugePages_Total:   0\n");
  }
  ~Root() { std::filesystem::remove_all(path_); }
  Root(const Root&) = delete;
  Root& operator=(const Root&) = delete;

  void Write(const std::string& file, const std::string& text) const {
    const std::filesystem::path path = std::filesystem::path(path_) / file;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << text;
  }
  MemoryRoom Read() const { return MemoryRoom::Read(path_); }

 private:
  std::string path_ = (std::filesystem::temp_directory_path() / "ddp-room-XXXXXX").string();
};

TEST_CASE("without cgroups the host's memory is the limit") {
  const Root root;
  CHECK(root.Read().host == 50 * 1024);
  CHECK(root.Read().limit == kNone);
  CHECK(root.Read().bytes() == 50 * 1024);
}

TEST_CASE("the tightest limit up the hierarchy counts, less what is in use, but not caches") {
  const Root root;
  root.Write("proc/self/cgroup", "0::/pod/rank\n");
  root.Write("proc/self/mountinfo", "30 25 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw\n");
  root.Write("sys/fs/cgroup/pod/memory.max", "10000\n");
  root.Write("sys/fs/cgroup/pod/memory.current", "4000\n");
  root.Write("sys/fs/cgroup/pod/memory.stat", "anon 1\ninactive_file 1000\nactive_file 500\nfile 2000\n");
  root.Write("sys/fs/cgroup/pod/rank/memory.max", "max\n");
  root.Write("sys/fs/cgroup/pod/rank/memory.current", "3000\n");
  const MemoryRoom room = root.Read();
  CHECK(room.limit == 10000 - 4000 + 1500);
  CHECK(room.limit_id != 0);
  root.Write("proc/self/cgroup", "0::/pod/other\n");
  root.Write("sys/fs/cgroup/pod/other/memory.max", "9000\n");
  root.Write("sys/fs/cgroup/pod/other/memory.current", "0\n");
  CHECK(root.Read().limit_id == room.limit_id);  // the common one
  root.Write("sys/fs/cgroup/pod/other/memory.current", "9500\n");
  CHECK(root.Read().limit == 0);
  CHECK(root.Read().limit_id != room.limit_id);
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
  CHECK(root.Read().limit == 8000 - 5000 + 1000);
}

TEST_CASE("this machine's memory can be read") { CHECK(MemoryRoom::Read().bytes() < kNone); }

}  // namespace
}  // namespace ddp
