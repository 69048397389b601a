// SPDX-License-Identifier: Apache-2.0
// Who has the port of a TCP store: not the children of its ranks.
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>

#include "absl/time/clock.h"
#include "ddp/store.h"
#include "tests/support/catch.h"
#include "tests/unit/store_contract.h"
#include "tests/unit/store_place.h"

namespace ddp {
namespace {

// The sockets of this process, and those of them that a program it starts would have too.
void CountSockets(int* all, int* inherited) {
  *all = *inherited = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    const int fd = std::atoi(entry.path().filename().c_str());
    struct stat about;
    if (fstat(fd, &about) != 0 || !S_ISSOCK(about.st_mode)) continue;
    ++*all;
    if ((fcntl(fd, F_GETFD) & FD_CLOEXEC) == 0) ++*inherited;
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

}  // namespace
}  // namespace ddp
