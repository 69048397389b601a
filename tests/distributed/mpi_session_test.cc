// SPDX-License-Identifier: Apache-2.0
// The cases tagged [owner], [several], [poisoned], [leaver], [single], [stuck] and [waiting] need a process of their
// own each, for MPI starts only once in it.
#include "libddp/launch/mpi_session.h"

#include <mpi.h>
#include <unistd.h>

#include <cstdio>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ddp/context.h"
#include "libddp/launch/wire.h"
#include "tests/support/catch.h"
#include "tests/support/launch.h"

namespace ddp {
namespace {

absl::Time Soon() { return absl::Now() + absl::Seconds(30); }

LaunchInfo Launch() {
  const absl::StatusOr<LaunchInfo> info = DetectLaunch({});
  REQUIRE(info.ok());
  return *info;
}

std::unique_ptr<MpiSession> Open() {
  absl::StatusOr<std::unique_ptr<MpiSession>> session = MpiSession::Open(Launch());
  INFO(session.status().ToString());
  REQUIRE(session.ok());
  return *std::move(session);
}

bool IsFinalized() {
  int finalized = 0;
  MPI_Finalized(&finalized);
  return finalized != 0;
}

// As long as the rank and the round say, so that lengths differ and some are empty.
std::string Said(int rank, int round) {
  return std::string(static_cast<size_t>(rank * round * 1000), static_cast<char>('a' + (rank + round) % 26));
}

void CheckGather(Rendezvous& rendezvous, int round) {
  const auto all = rendezvous.AllGather(Said(rendezvous.rank(), round), absl::StrCat("round ", round), Soon());
  INFO(all.status().ToString());
  REQUIRE(all.ok());
  REQUIRE(static_cast<int>(all->size()) == rendezvous.size());
  for (int i = 0; i < rendezvous.size(); ++i) CHECK((*all)[i] == Said(i, round));
}

TEST_CASE("ranks gather strings of any length over MPI, in several sessions one after the other") {
  testing::StartMpi();
  for (int i = 0; i < 3; ++i) {
    const auto session = Open();
    CHECK(session->rendezvous().rank() == testing::MpiRank());
    CHECK(session->rendezvous().size() == testing::MpiSize());
    for (int round = 0; round < 20; ++round) CheckGather(session->rendezvous(), round);
  }
  CHECK_FALSE(IsFinalized());
}

TEST_CASE("a world that is not MPI's is refused with both") {
  testing::StartMpi();
  LaunchInfo info = Launch();
  info.world_size += 1;
  const absl::Status s = MpiSession::Open(info).status();
  INFO(s.ToString());
  CHECK(s.code() == absl::StatusCode::kFailedPrecondition);
  CHECK(absl::StrContains(s.message(), absl::StrCat("MPI says rank ", info.rank, " of ", testing::MpiSize())));
  CHECK(absl::StrContains(s.message(), absl::StrCat("mpirun says rank ", info.rank, " of ", info.world_size)));
}

TEST_CASE("a rank whose peers do not come times out, and the session stays failed") {
  testing::StartMpi();
  const auto session = Open();
  CheckGather(session->rendezvous(), 0);
  if (testing::MpiRank() == 0 && testing::MpiSize() > 1) {
    const absl::Time start = absl::Now();
    const auto late = session->rendezvous().AllGather("x", "exchange of memory", start + absl::Milliseconds(200));
    INFO(late.status().ToString());
    CHECK(late.status().code() == absl::StatusCode::kDeadlineExceeded);
    CHECK(absl::StrContains(late.status().message(), "rank 0: exchange of memory: "));
    CHECK(absl::StrContains(late.status().message(), absl::StrCat("the ", testing::MpiSize(), " ranks")));
    // What was left of the 200 ms when the call began.
    CHECK(absl::StrContains(late.status().message(), "ranks came within "));
    CHECK(absl::Now() - start >= absl::Milliseconds(200));
    CHECK(session->rendezvous().AllGather("x", "another step", Soon()).status() == late.status());
  }
  testing::MpiBarrier();
}

TEST_CASE("a session that started MPI ends it", "[.][owner]") {
  int initialized = 1;
  MPI_Initialized(&initialized);
  REQUIRE(initialized == 0);
  {
    const auto session = Open();
    CheckGather(session->rendezvous(), 1);
    session->MarkFailed();  // all ranks leave in time: MPI ends in order
  }
  CHECK(IsFinalized());
  const absl::Status s = MpiSession::Open(Launch()).status();
  CHECK(s.code() == absl::StatusCode::kFailedPrecondition);
  CHECK(absl::StrContains(s.message(), "MPI has ended with the last Context"));
  CHECK(absl::StrContains(s.message(), "MPI_Init_thread"));
}

// Each rank but 0 has one more session than rank 0, of a communicator of its own: the world waits for that, too.
TEST_CASE("the last of several sessions ends the MPI that the first one started", "[.][several]") {
  auto first = Open();
  CheckGather(first->rendezvous(), 1);
  auto second = Open();
  CheckGather(second->rendezvous(), 2);
  first.reset();
  CHECK_FALSE(IsFinalized());
  CheckGather(second->rendezvous(), 3);
  first = Open();
  CheckGather(first->rendezvous(), 4);
  MPI_Comm part = MPI_COMM_NULL;
  MPI_Comm_split(MPI_COMM_WORLD, testing::MpiRank() == 0 ? MPI_UNDEFINED : 0, testing::MpiRank(), &part);
  std::unique_ptr<MpiSession> adopted;
  if (part != MPI_COMM_NULL) adopted = MpiSession::Adopt(&part).value();
  // Threads may destroy them at the same time.
  std::thread other([&] { second.reset(); });
  first.reset();
  other.join();
  CHECK(IsFinalized() == (adopted == nullptr));
  if (adopted != nullptr) {
    CheckGather(adopted->rendezvous(), 5);
    adopted.reset();
  }
  CHECK(IsFinalized());
}

// Ends the job without MPI_Finalize, which mpirun reports as failed: what it prints tells that it went well.
TEST_CASE("a session that left something behind keeps the others from ending MPI", "[.][poisoned]") {
  auto healthy = Open();
  CheckGather(healthy->rendezvous(), 1);
  auto failing = Open();
  CheckGather(failing->rendezvous(), 2);
  if (testing::MpiRank() == 0) {
    REQUIRE_FALSE(failing->rendezvous().AllGather("x", "start", absl::Now() + absl::Milliseconds(100)).ok());
  }
  testing::MpiBarrier();
  failing.reset();
  CheckGather(healthy->rendezvous(), 3);
  const absl::Time start = absl::Now();
  if (testing::MpiRank() == 0) {
    healthy.reset();
    REQUIRE_FALSE(IsFinalized());
    REQUIRE(absl::Now() - start < absl::Seconds(30));
    const auto next = Open();
    std::puts("left without an end of MPI");
    std::fflush(stdout);
  }
  testing::MpiBarrier();
  _exit(1);
}

// One rank ends a healthy session; the others' world fails because of that, later.
TEST_CASE("a rank that leaves early is found by those whose world has failed", "[.][leaver]") {
  auto session = Open();
  CheckGather(session->rendezvous(), 1);
  if (testing::MpiRank() != 0) {
    absl::SleepFor(absl::Milliseconds(200));
    session->MarkFailed();
  }
  session.reset();
  CHECK(IsFinalized());
}

// Rank 0's messages of the operation that fails are large, so that MPI keeps them until they are taken, and nobody
// takes them.
TEST_CASE("MPI ends after a recovery of several nodes", "[.][recovered]") {
  ContextOptions options;
  options.timeout = absl::Seconds(60);
  auto context = Context::Create(options);
  INFO(context.status().ToString());
  REQUIRE(context.ok());
  {
    auto memory = (*context)->world().Allocate(16 << 20, Device{});
    REQUIRE(memory.ok());
    const Buffer all = memory->View(DType::kFloat32, 0, memory->bytes() / sizeof(float));
    REQUIRE((*context)->world().SetTimeout(absl::Seconds(1)).ok());
    const auto reduce = [&] { return (*context)->world().AllReduce(all, all).Wait().code(); };
    if ((*context)->rank() == 0) CHECK(reduce() == absl::StatusCode::kDeadlineExceeded);
    testing::MpiBarrier();
    if ((*context)->rank() != 0) CHECK(reduce() == absl::StatusCode::kDeadlineExceeded);
    const absl::Status recovered = (*context)->Recover(absl::Seconds(30));
    INFO(recovered.ToString());
    REQUIRE(recovered.ok());
    CHECK((*context)->world().Barrier().Wait().ok());
  }
  // Who comes late is waited for.
  if ((*context)->rank() != 0) absl::SleepFor(absl::Seconds(1));
  context->reset();
  CHECK(IsFinalized());
}

TEST_CASE("every channel of a wire has tags that MPI knows") {
  testing::StartMpi();
  const auto session = Open();
  CheckGather(session->rendezvous(), 0);
  const auto wire = session->rendezvous().OpenWire();
  REQUIRE(wire.ok());
  REQUIRE((*wire)->channels() > 1000);
  const auto last = (*wire)->Channel((*wire)->channels() - 1);
  const int peer = (testing::MpiRank() + 1) % testing::MpiSize();
  int sent = testing::MpiRank(), received = -1;
  Transfer in{.peer = Transfer::kAnyPeer, .tag = Wire::kTags - 1, .data = &received, .bytes = sizeof received};
  Transfer out{.peer = peer, .tag = Wire::kTags - 1, .data = &sent, .bytes = sizeof sent};
  REQUIRE(last->Receive(&in).ok());
  REQUIRE(last->Send(&out).ok());
  for (const absl::Time until = Soon(); !(in.done && out.done) && absl::Now() < until;) REQUIRE(last->Poll().ok());
  CHECK(received == in.peer);
  CHECK(received == (testing::MpiRank() + testing::MpiSize() - 1) % testing::MpiSize());
  REQUIRE(last->Abandon());
}

// Ends the job, which mpirun reports as failed: what it prints tells that it went well.
TEST_CASE("a session of a failed world leaves although a peer is stuck", "[.][stuck]") {
  auto session = Open();
  CheckGather(session->rendezvous(), 1);
  if (testing::MpiRank() != 0) absl::SleepFor(absl::Minutes(10));
  session->MarkFailed();
  const absl::Time start = absl::Now();
  session.reset();
  CHECK(absl::Now() - start < absl::Seconds(30));
  CHECK_FALSE(IsFinalized());
  std::puts("left the stuck peer");
  std::fflush(stdout);
  _exit(1);
}

TEST_CASE("MPI started for one thread is used by that thread only", "[.][single]") {
  MPI_Init(nullptr, nullptr);
  int level = MPI_THREAD_MULTIPLE;
  MPI_Query_thread(&level);
  REQUIRE(level < MPI_THREAD_SERIALIZED);
  absl::Status opened, gathered;
  {
    const auto session = Open();
    CheckGather(session->rendezvous(), 1);
    std::thread other([&] {
      opened = MpiSession::Open(Launch()).status();
      gathered = session->rendezvous().AllGather("x", "start", Soon()).status();
    });
    other.join();
    CheckGather(session->rendezvous(), 2);
  }
  for (const absl::Status& s : {opened, gathered}) {
    INFO(s.ToString());
    CHECK(s.code() == absl::StatusCode::kFailedPrecondition);
    CHECK(absl::StrContains(s.message(), "MPI_THREAD_SERIALIZED"));
  }
  CHECK_FALSE(IsFinalized());
  MPI_Finalize();
}

// So large that Open MPI sends it piece by piece, each in a call of MPI on the sender's side.
TEST_CASE("a rank that waits in the library does not hold up a peer that waits for its message", "[.][waiting]") {
  MPI_Init(nullptr, nullptr);
  {
    ContextOptions options;
    options.timeout = absl::Seconds(60);
    const auto context = Context::Create(options);
    INFO(context.status().ToString());
    REQUIRE(context.ok());
    std::vector<char> message(64 << 20, static_cast<char>((*context)->rank()));
    MPI_Request request = MPI_REQUEST_NULL;
    if ((*context)->rank() == 0) {
      MPI_Isend(message.data(), static_cast<int>(message.size()), MPI_CHAR, 1, 7, MPI_COMM_WORLD, &request);
    } else {
      MPI_Recv(message.data(), static_cast<int>(message.size()), MPI_CHAR, 0, 7, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
      CHECK(message.back() == 0);
    }
    auto met = (*context)->world().Barrier();
    const absl::Status status = met.Wait();
    INFO(status.ToString());
    CHECK(status.ok());
    MPI_Wait(&request, MPI_STATUS_IGNORE);
  }
  MPI_Finalize();
}

}  // namespace
}  // namespace ddp
