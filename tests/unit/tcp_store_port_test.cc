// SPDX-License-Identifier: Apache-2.0
// Who has the port of a TCP store: not the children of its ranks, and not two jobs at once.
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <new>
#include <string>
#include <system_error>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ddp/store.h"
#include "libddp/launch/store_secret.h"
#include "tests/support/catch.h"
#include "tests/unit/store_contract.h"
#include "tests/unit/store_place.h"

namespace ddp {
namespace {

// The sockets of this process, and those of them that a program it starts would have too. From /proc: descriptors that
// other threads open and close are theirs to ask the kernel about.
void CountSockets(int* all, int* inherited) {
  *all = *inherited = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    if (!absl::StartsWith(std::filesystem::read_symlink(entry.path(), gone).string(), "socket:")) continue;
    ++*all;
    std::ifstream about("/proc/self/fdinfo/" + entry.path().filename().string());
    int flags = 0;
    for (std::string word; about >> word;) {
      if (word == "flags:") about >> std::oct >> flags;
    }
    if ((flags & O_CLOEXEC) == 0) ++*inherited;
  }
}

TEST_CASE("no socket of a store is passed on to a program that a rank starts") {
  const Place place;
  int all_before = 0, inherited_before = 0, all = 0, inherited = 0;
  CountSockets(&all_before, &inherited_before);
  TcpStoreOptions options = place.Options(true);
  SECTION("on one host") {}
  SECTION("on several") {
    options.host = "localhost";
    options.secret = "secret";
  }
  const auto server = CreateTcpStore(options);
  options.serve = false;
  const auto rank = CreateTcpStore(options);
  REQUIRE((server.ok() && rank.ok()));
  CHECK((*rank)->Set("key", "value", Soon()).ok());
  CountSockets(&all, &inherited);
  CHECK(all == all_before + 5);  // who listens, two clients, and the server's side of both
  CHECK(inherited == inherited_before);
}

// Such a child has the descriptors although it starts no program.
TEST_CASE("a child that outlives its rank keeps neither the server nor the port") {
  const Place place;
  TcpStoreOptions options = place.Options(true);
  options.shutdown_timeout = absl::Seconds(60);
  auto server = CreateTcpStore(options);
  auto rank = CreateTcpStore(place.Options(false));
  REQUIRE((server.ok() && rank.ok()));
  const pid_t child = fork();
  if (child == 0) {
    sleep(300);
    _exit(0);
  }
  const absl::Time start = absl::Now();
  rank->reset();
  server->reset();
  CHECK(absl::Now() - start < absl::Seconds(45));
  const auto next = CreateTcpStore(options);
  INFO(next.status().ToString());
  CHECK(next.ok());
  kill(child, SIGKILL);
  CHECK(waitpid(child, nullptr, 0) == child);
}

// What two processes have in common that start at once.
struct Start {
  std::atomic<int> ready{0}, done{0}, winners{0};
};

// True if this process has what it takes to serve, or is told that another one does.
bool StartJob(const Place& place, const std::string& run_id, Start* start) {
  TcpStoreOptions options = place.Options(true);
  options.run_id = run_id;
  options.world_size = 2;
  const absl::Time until = Soon();
  ++start->ready;
  while (start->ready < 2 && absl::Now() < until) {
  }
  const auto store = CreateTcpStore(options);
  ++start->done;
  while (start->done < 2 && absl::Now() < until) absl::SleepFor(absl::Microseconds(100));
  if (!store.ok()) {
    return absl::StrContains(store.status().message(), absl::StrCat("port ", place.port, ": Address already in use")) &&
           absl::StrContains(store.status().message(), "DDP_STORE_PORT");
  }
  ++start->winners;
  return SecretFile::Read(place.port).ok() && (*store)->Set("key", run_id, Soon()).ok();
}

TEST_CASE("of two jobs that start at once on one port exactly one has it, and its secret stays") {
  const Place place;
  void* const memory = mmap(nullptr, sizeof(Start), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  REQUIRE(memory != MAP_FAILED);
  for (int round = 0; round < 200; ++round) {
    auto* const start = new (memory) Start;
    const pid_t one = Spawn([&] { return StartJob(place, "one", start); });
    const pid_t two = Spawn([&] { return StartJob(place, "two", start); });
    const bool one_good = Succeeded(one), two_good = Succeeded(two);  // both, as both have to be waited for
    INFO("round " << round);
    REQUIRE(start->winners == 1);
    REQUIRE((one_good && two_good));
    REQUIRE(std::filesystem::is_empty(place.folder.path()));
  }
  munmap(memory, sizeof(Start));
}

}  // namespace
}  // namespace ddp
