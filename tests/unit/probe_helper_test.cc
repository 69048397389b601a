// SPDX-License-Identifier: Apache-2.0
// The parent's side of ddp_probe, with a helper that misbehaves as it is told to.
#include "libddp/comm/probe/helper_process.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "libddp/base/env.h"
#include "tests/support/catch.h"
#include "tests/support/given_time.h"

namespace ddp {
namespace {

HelperCommand Command(const std::string& what, int rank = 0) {
  setenv("FAKE_PROBE", what.c_str(), 1);
  return {.program = DDP_FAKE_PROBE,
          .environment = HelperEnvironment(AllVariables(), false),
          .rank = rank,
          .size = 2,
          .limit = absl::Seconds(20)};
}

std::unique_ptr<HelperProcess> Start(const HelperCommand& command) {
  absl::StatusOr<std::unique_ptr<HelperProcess>> helper = HelperProcess::Start(command);
  REQUIRE(helper.ok());
  return *std::move(helper);
}

ProbeResult Await(HelperProcess& helper) {
  while (helper.Poll().state == ProbeState::kRunning) absl::SleepFor(absl::Milliseconds(1));
  return helper.Poll();
}

// Whether there is no such process, or one that only waits to be forgotten.
bool Gone(pid_t pid) {
  std::ifstream file(absl::StrCat("/proc/", pid, "/stat"));
  std::string number, name, state;
  return !(file >> number >> name >> state) || state == "Z";
}

TEST_CASE("a helper that passes says so, and waits for its end") {
  auto helper = Start(Command("pass"));
  const ProbeResult result = Await(*helper);
  INFO(result.text());
  CHECK(result.state == ProbeState::kPassed);
  REQUIRE(helper->id().has_value());
  CHECK(helper->id()->internal[5] == 42);
  const pid_t pid = helper->pid();
  CHECK_FALSE(Gone(pid));
  helper.reset();
  CHECK(kill(pid, 0) != 0);  // not a zombie either
}

TEST_CASE("a helper gets no descriptors, signals or launcher's variables of its parent's") {
  const int leaked = dup(STDERR_FILENO);  // without O_CLOEXEC
  const int high = fcntl(STDERR_FILENO, F_DUPFD, 200);
  sigset_t usr1, before;
  sigemptyset(&usr1);
  sigaddset(&usr1, SIGUSR1);
  pthread_sigmask(SIG_BLOCK, &usr1, &before);
  signal(SIGUSR1, SIG_IGN);
  setenv("OMPI_COMM_WORLD_RANK", "0", 1);
  setenv("SLURM_PROCID", "0", 1);
  const ProbeResult result = Await(*Start(Command("pass")));
  unsetenv("OMPI_COMM_WORLD_RANK");
  unsetenv("SLURM_PROCID");
  signal(SIGUSR1, SIG_DFL);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  close(leaked);
  close(high);
  CHECK(result.text().empty());
  CHECK(result.state == ProbeState::kPassed);
}

TEST_CASE("another rank's helper waits for the id") {
  auto helper = Start(Command("pass", 1));
  CHECK(helper->Poll().state == ProbeState::kRunning);
  nccl::UniqueId id = {};
  id.internal[5] = 42;
  helper->SendId(id);
  CHECK(Await(*helper).state == ProbeState::kPassed);
}

TEST_CASE("what goes wrong with a helper is told apart from what goes wrong with NCCL") {
  struct Case {
    const char* what;
    ProbeState state;
    const char* words;
  };
  const Case cases[] = {
      {"crash", ProbeState::kCrash, "signal 11"},
      {"killed", ProbeState::kKilled, "signal 9"},
      {"exit", ProbeState::kGarbled, "exit code 3"},
      {"end", ProbeState::kGarbled, "without a result"},
      {"garbage", ProbeState::kGarbled, "this version"},
      {"backwards", ProbeState::kGarbled, "this version"},
      {"flood", ProbeState::kGarbled, "more than a probe"},
      {"endless", ProbeState::kGarbled, "more than a probe"},
      {"lie", ProbeState::kGarbled, "this version"},
      {"error", ProbeState::kError, "unhandled cuda error"},
      {"wrong", ProbeState::kWrongData, ""},
      {"hung", ProbeState::kHang, ""},
  };
  for (const Case& c : cases) {
    CAPTURE(c.what);
    auto helper = Start(Command(c.what));
    const ProbeResult result = Await(*helper);
    CHECK(result.state == c.state);
    CHECK(result.step >= 3);
    INFO(result.text());
    CHECK(absl::StrContains(result.text(), c.words));
    CHECK(HelperFailed(result.state) != NcclFailed(result.state));
    const pid_t pid = helper->pid();
    helper.reset();
    CHECK(kill(pid, 0) != 0);
  }
}

TEST_CASE("a helper that hangs is ended after its limit, and one that will not end is killed") {
  const auto hang = [](absl::Duration limit) {
    HelperCommand command = Command("hang");
    command.limit = limit;
    ProbeResult result = Await(*Start(command));
    CHECK(result.state == ProbeState::kHang);
    return result;
  };
  const auto begun = [](const ProbeResult& result) { return result.step == 3; };
  CHECK(begun(testing::GivenTime(absl::Milliseconds(100), hang, begun)));

  auto stubborn = Start(Command("stubborn"));
  CHECK(Await(*stubborn).state == ProbeState::kPassed);
  const pid_t pid = stubborn->pid();
  stubborn.reset();
  CHECK(kill(pid, 0) != 0);
}

TEST_CASE("a program that takes its children's ends away, or ignores them, gets a result all the same") {
  signal(SIGCHLD, SIG_IGN);
  CHECK(Await(*Start(Command("pass"))).state == ProbeState::kPassed);
  CHECK(Await(*Start(Command("crash"))).state == ProbeState::kGarbled);
  signal(SIGCHLD, SIG_DFL);
}

TEST_CASE("a helper ends with its parent") {
  int ends[2];
  REQUIRE(pipe(ends) == 0);
  const HelperCommand command = Command("hang");
  const pid_t parent = fork();
  REQUIRE(parent >= 0);
  if (parent == 0) {
    absl::StatusOr<std::unique_ptr<HelperProcess>> helper = HelperProcess::Start(command);
    while (helper.ok() && (*helper)->Poll().step < 3) absl::SleepFor(absl::Milliseconds(1));
    const pid_t pid = helper.ok() ? (*helper)->pid() : -1;
    (void)!write(ends[1], &pid, sizeof pid);
    pause();
  }
  pid_t pid = -1;
  REQUIRE(read(ends[0], &pid, sizeof pid) == sizeof pid);
  close(ends[0]);
  close(ends[1]);
  REQUIRE(pid > 0);
  CHECK_FALSE(Gone(pid));
  kill(parent, SIGKILL);
  waitpid(parent, nullptr, 0);
  for (int i = 0; i < 5000 && !Gone(pid); ++i) absl::SleepFor(absl::Milliseconds(2));
  CHECK(Gone(pid));
  kill(pid, SIGKILL);  // whatever came of it, nothing is left behind
}

TEST_CASE("a program that is not there, or cannot run, is an error at once") {
  HelperCommand command = Command("pass");
  for (const char* program : {"/no/such/program", "/etc/passwd", "/"}) {
    command.program = program;
    const absl::Status status = HelperProcess::Start(command).status();
    CHECK(status.code() == absl::StatusCode::kNotFound);
    CHECK(absl::StrContains(status.message(), program));
  }
}

TEST_CASE("the helper is found by option, variable, and beside the program") {
  CHECK(FindProbeHelper(DDP_FAKE_PROBE).value() == DDP_FAKE_PROBE);
  const absl::Status missing = FindProbeHelper("/no/such/program").status();
  CHECK(missing.code() == absl::StatusCode::kNotFound);
  CHECK(absl::StrContains(missing.message(), "/no/such/program"));
  CHECK(absl::StrContains(missing.message(), "DDP_PROBE"));

  setenv("DDP_PROBE", DDP_FAKE_PROBE, 1);
  CHECK(FindProbeHelper("").value() == DDP_FAKE_PROBE);
  setenv("DDP_PROBE", "/no/such/program", 1);  // what is said counts, and nothing else is taken in its place
  CHECK_FALSE(FindProbeHelper("").ok());
  unsetenv("DDP_PROBE");
  CHECK(FindProbeHelper("").value() == DDP_PROBE_PROGRAM);
}

TEST_CASE("the helper's environment is this one without what launchers set") {
  const std::vector<std::string> all = {"PATH=/bin",          "OMPI_COMM_WORLD_RANK=1", "PMIX_RANK=1",
                                        "PMI_SIZE=2",         "SLURM_PROCID=0",         "MPI_LOCALRANKID=0",
                                        "NCCL_P2P_DISABLE=0", "NCCL_ALGO=ring",         "XOMPI_=1"};
  CHECK(HelperEnvironment(all, false) ==
        std::vector<std::string>{"PATH=/bin", "NCCL_P2P_DISABLE=0", "NCCL_ALGO=ring", "XOMPI_=1"});
  CHECK(HelperEnvironment(all, true) ==
        std::vector<std::string>{"PATH=/bin", "NCCL_ALGO=ring", "XOMPI_=1", "NCCL_P2P_DISABLE=1"});
}

TEST_CASE("NCCL's id survives the way through a line") {
  nccl::UniqueId id;
  for (size_t i = 0; i < sizeof id.internal; ++i) id.internal[i] = static_cast<char>(i * 37);
  const std::optional<nccl::UniqueId> back = DecodeId(EncodeId(id));
  REQUIRE(back.has_value());
  CHECK(std::string(back->internal, sizeof id.internal) == std::string(id.internal, sizeof id.internal));
  for (const std::string& bad :
       {std::string("id "), EncodeId(id) + "0", EncodeId(id).substr(1), std::string(259, 'z')}) {
    CHECK_FALSE(DecodeId(bad).has_value());
  }
  std::string not_hex = EncodeId(id);
  not_hex.back() = 'g';
  CHECK_FALSE(DecodeId(not_hex).has_value());
}

// The program itself, on this machine: without a GPU or NCCL it fails by saying which of them it lacks; with both, a
// world of one passes.
TEST_CASE("ddp_probe gives a result on any machine") {
  HelperCommand command = Command("");
  command.program = DDP_PROBE_PROGRAM;
  command.size = 1;
  auto helper = Start(command);
  const ProbeResult result = Await(*helper);
  INFO(result.text());
  CHECK_FALSE(HelperFailed(result.state));
  if (result.state != ProbeState::kPassed) {
    CHECK(result.state == ProbeState::kError);
    CHECK(result.step <= 1);
    CHECK_FALSE(result.text().empty());
  }
}

}  // namespace
}  // namespace ddp
