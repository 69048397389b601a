// SPDX-License-Identifier: Apache-2.0
// Ranks in containers on one host: in namespaces of their own, they have the same process ids as their peers, do not
// see their peers' processes, and may have another /dev/shm.
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "tests/fault/job.h"
#include "tests/support/catch.h"

namespace ddp::testing {
namespace {

using Words = std::vector<std::string>;

constexpr absl::Duration kPatience = absl::Seconds(60);

// Runs a command as process 1 of a container.
const Words kOwnProcesses = {"unshare", "--pid", "--fork", "--mount-proc", "--kill-child"};
const Words kOwnUsers = {"unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", "--kill-child"};
const Words kOwnMemory = {"unshare",      "--pid", "--fork", "--mount-proc",
                          "--kill-child", "sh",    "-c",     "mount -t tmpfs tmpfs /dev/shm && exec \"$@\"",
                          "container"};
const Words kNone = {};

bool Permitted(const Words& container) {
  if (container.empty()) return true;
  if (std::system((absl::StrJoin(kOwnProcesses, " ") + " true 2>/dev/null").c_str()) == 0 &&
      (container != kOwnUsers || std::system((absl::StrJoin(kOwnUsers, " ") + " true 2>/dev/null").c_str()) == 0)) {
    return true;
  }
  // scripts/test.sh shows this, though the cases about processes without namespaces have run.
  std::printf("SKIPPED: ranks in containers, as this machine does not permit new namespaces (unshare)\n");
  std::fflush(stdout);
  return false;
}

// Each rank in the container of its number.
std::vector<Ending> RunIn(const std::vector<Words>& containers, const Words& arguments, const Words& environment) {
  Job job(DDP_CONTAINER_RANK);
  const int size = static_cast<int>(containers.size());
  for (int rank = 0; rank < size; ++rank) {
    job.Start(rank, size, arguments, environment, containers[static_cast<size_t>(rank)]);
  }
  std::vector<Ending> endings = job.Finish(kPatience);
  INFO(absl::StrJoin(job.LeftBehind(), " "));
  CHECK(job.LeftBehind().empty());
  return endings;
}

TEST_CASE("ranks in containers move the same data as others") {
  const std::string memory = GENERATE("auto", "posix");
  for (const std::vector<Words>& containers : std::vector<std::vector<Words>>{{kOwnProcesses, kOwnProcesses},
                                                                              {kOwnProcesses, kNone, kNone},
                                                                              {kNone, kOwnProcesses, kNone},
                                                                              {kOwnUsers, kOwnUsers}}) {
    bool permitted = true;
    for (const Words& container : containers) permitted = permitted && Permitted(container);
    if (!permitted) continue;
    INFO("DDP_SHARED_MEMORY=" << memory);
    for (const Ending& ending : RunIn(containers, {}, {"DDP_TIMEOUT=20", "DDP_SHARED_MEMORY=" + memory})) {
      INFO("containers of " << containers.size() << " ranks: " << ending.output);
      CHECK(ending.output == "done\n");
      CHECK(ending.exited);
      CHECK(ending.code == 0);
    }
  }
}

TEST_CASE("NCCL's ranks in two pods of one machine need no common memory") {
  const std::string board = GENERATE("pods", "memfd");
  if (!Permitted(kOwnProcesses)) return;
  for (const Ending& ending : RunIn({kOwnProcesses, kOwnProcesses}, {"--board=" + board}, {"DDP_TIMEOUT=20"})) {
    INFO(board << ": " << ending.output);
    CHECK(ending.output == "done\n");
  }
}

TEST_CASE("a rank that dies in another container is named") {
  if (!Permitted(kOwnProcesses)) return;
  const absl::Time begin = absl::Now();
  const std::vector<Ending> endings = RunIn({kOwnProcesses, kOwnProcesses, kNone}, {"--victim=1"}, {"DDP_TIMEOUT=50"});
  CHECK(absl::Now() - begin < absl::Seconds(40));  // noticed, not timed out
  for (const size_t rank : {size_t{0}, size_t{2}}) {
    INFO(endings[rank].output);
    CHECK(absl::StrContains(endings[rank].output, "UNAVAILABLE: rank 1 (process "));
    CHECK(absl::StrContains(endings[rank].output, "has died"));
  }
}

TEST_CASE("ranks in containers without common memory are told what to do, at once") {
  const std::string memory = GENERATE("auto", "posix", "memfd");
  if (!Permitted(kOwnMemory)) return;
  for (const Ending& ending : RunIn({kOwnMemory, kOwnMemory}, {}, {"DDP_TIMEOUT=50", "DDP_SHARED_MEMORY=" + memory})) {
    INFO("DDP_SHARED_MEMORY=" << memory << ": " << ending.output);
    CHECK(absl::StrContains(ending.output, "UNAVAILABLE: rank 1: "));
    CHECK(absl::StrContains(ending.output, "--ipc=host"));
  }
}

}  // namespace
}  // namespace ddp::testing
