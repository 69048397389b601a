// SPDX-License-Identifier: Apache-2.0
// What ranks learn of each other's operations, however far one is ahead.
#include "libddp/comm/health/peer_board.h"

#include <signal.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/time/clock.h"
#include "ddp/context.h"
#include "ddp/store.h"
#include "libddp/base/failed_ranks.h"
#include "libddp/base/process_id.h"
#include "libddp/base/spin.h"
#include "libddp/comm/gpu/device_engine.h"
#include "libddp/comm/gpu/device_peers.h"
#include "libddp/comm/health/peer_watch.h"
#include "libddp/comm/health/report_election.h"
#include "libddp/comm/host/operation.h"
#include "tests/support/catch.h"

namespace ddp {
namespace {

constexpr uint64_t kRing = 256;

BoardEntry AllReduceOf(uint64_t count) {
  return {OperationKey{.kind = OperationKey::Kind::kAllReduce, .in = DType::kFloat32, .out = DType::kFloat32}.Pack(),
          count, 0};
}

// The boards of two ranks, which are threads.
struct Boards {
  std::vector<std::unique_ptr<Context>> contexts{2};
  std::vector<std::shared_ptr<PeerBoard>> boards{2};

  Boards() {
    const std::shared_ptr<Store> store = CreateMemoryStore();
    const auto run = [&](size_t rank) {
      ContextOptions options;
      options.rank = static_cast<int>(rank);
      options.world_size = 2;
      options.store = store;
      contexts[rank] = Context::Create(options).value();
      boards[rank] = PeerBoard::Create(contexts[rank]->world()).value();
    };
    std::thread other(run, 1);
    run(0);
    other.join();
  }
  ~Boards() {
    boards.clear();
    std::thread other([&] { contexts[1].reset(); });
    contexts[0].reset();
    other.join();
  }
};

TEST_CASE("an operation is compared with itself, also when its rank is a whole ring ahead") {
  Boards two;
  PeerBoard &ahead = *two.boards[0], &behind = *two.boards[1];
  for (uint64_t q = 0; q <= kRing; ++q) ahead.Post(q, AllReduceOf(q + 1));
  behind.Post(0, AllReduceOf(1));
  behind.Post(1, AllReduceOf(1000));
  CHECK_FALSE(ahead.Disagreement(0, AllReduceOf(1)).has_value());
  const std::optional<std::string> text = ahead.Disagreement(1, AllReduceOf(2));
  REQUIRE(text.has_value());
  CHECK(absl::StrContains(*text, "operation 1: rank 0 calls "));
  CHECK(absl::StrContains(*text, " 2 elements"));
  CHECK(absl::StrContains(*text, " 1000 elements"));
}

// The next thing would be an abort, whose leavings a rank takes for a sum if it has not heard of the failure.
TEST_CASE("a rank that a busy machine keeps from hearing of a failure is waited for") {
  Boards two;
  std::atomic<bool> heard{false};
  std::thread slow([&] {
    absl::SleepFor(absl::Milliseconds(600));
    heard = true;
    two.boards[1]->PostFailed();
  });
  two.boards[0]->PostFailed();
  two.boards[0]->LetThemKnow();
  CHECK(heard);
  slow.join();
}

// A child that does nothing until it is killed. `id`: as it would introduce itself.
struct IdleChild {
  pid_t pid = fork();
  ProcessId id = ProcessId::OfSelf();

  IdleChild() {
    if (pid == 0) {
      while (true) pause();
    }
    id.token += 1;
    id.pid = pid;
  }
  ~IdleChild() {
    kill(pid, SIGKILL);
    waitpid(pid, nullptr, 0);
  }
};

TEST_CASE("a death is noticed before anybody waits for the process, or the watch cannot be made") {
  IdleChild child;
  REQUIRE(child.pid > 0);
  const int here = static_cast<int>(syscall(SYS_pidfd_open, child.pid, 0));
  if (here < 0) return;  // not in this container
  close(here);
  // With that number as the limit the process gets no more files.
  rlimit before = {};
  REQUIRE(getrlimit(RLIMIT_NOFILE, &before) == 0);
  const rlimit none = {static_cast<rlim_t>(here), before.rlim_max};
  REQUIRE(setrlimit(RLIMIT_NOFILE, &none) == 0);
  const absl::Status status = PeerWatch::Create({child.id}).status();
  REQUIRE(setrlimit(RLIMIT_NOFILE, &before) == 0);
  CHECK(absl::IsResourceExhausted(status));
  CHECK(absl::StrContains(status.message(), "pidfd_open: Too many open files; raise ulimit -n"));

  PeerWatch copy;
  {
    const PeerWatch watch = PeerWatch::Create({ProcessId::OfSelf(), child.id}).value();
    CHECK(watch.InThisProcess(0));
    CHECK(watch.Dead().empty());
    copy = watch;
  }
  kill(child.pid, SIGKILL);
  const absl::Time deadline = absl::Now() + absl::Seconds(60);
  while (copy.Dead().empty() && absl::Now() < deadline) absl::SleepFor(absl::Milliseconds(1));
  CHECK(copy.Dead() == std::vector<int>{1});
}

TEST_CASE("of ranks that wait equally long the lowest tells of a stall, once, and the next one where that is silent") {
  constexpr int64_t kPatience = 1'000'000'000, kLate = 10 * kPatience;
  ReportElection election{};
  CHECK_FALSE(election.ClaimStall(3, 5, 0, kPatience - 1, kPatience));
  CHECK_FALSE(election.ClaimStall(3, 5, 1, kPatience, kPatience));
  CHECK(election.ClaimStall(3, 5, 0, kPatience, kPatience));
  CHECK_FALSE(election.ClaimStall(3, 5, 1, kLate, kPatience));
  CHECK_FALSE(election.ClaimStall(4, 5, 0, kLate, kPatience));  // waited behind it
  CHECK(election.ClaimStall(5, 6, 1, kLate, kPatience));
}

// Over NCCL the connection to a peer breaks before the peer is seen to be gone.
TEST_CASE("a transport's error waits for its cause as long as there may be one") {
  Boards two;
  DeviceEngineOptions options;
  options.board = two.boards[0];
  const DevicePeers peers(options);
  const absl::Status broken = absl::UnavailableError("connection reset");
  const auto cause = [&](const absl::Status& error, int64_t passed_ns) {
    return peers.Cause(error, 0, NowNs() - passed_ns);
  };
  CHECK_FALSE(cause(broken, 0).has_value());
  CHECK_FALSE(cause(broken, kDeathGraceNs / 2).has_value());
  CHECK(cause(broken, kDeathGraceNs) == broken);
  for (const absl::Status& told : {absl::InternalError("a bug"), absl::InvalidArgumentError("a call")}) {
    CHECK(cause(told, 0) == told);
  }
  two.boards[1].reset();
  const absl::Status explained = peers.Explain(broken, 0);
  CHECK(explained.code() == absl::StatusCode::kUnavailable);
  CHECK(absl::StrContains(explained.message(), "rank 1 has left the group"));
  CHECK(absl::StrContains(explained.message(), "(connection reset)"));
  CHECK(FailedRanks(explained) == std::vector<int>{1});
  CHECK(cause(absl::InternalError("a bug"), 0)->message() != "a bug");
}

}  // namespace
}  // namespace ddp
