// SPDX-License-Identifier: Apache-2.0
// In place of ddp_probe: does what FAKE_PROBE tells it to, and what FAKE_PROBE_NO_P2P does where P2P is off. A list of
// "rank=what" or "what" for all others: "1=hang,pass". It checks what it was given, and passes only if that is right.
#include <fcntl.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "libddp/base/env.h"
#include "libddp/comm/probe/helper_process.h"

namespace ddp::testing {
namespace {

std::string Variable(const std::string& name) {
  const char* const value = std::getenv(name.c_str());
  return value == nullptr ? "" : value;
}

std::string Flag(int argc, char** argv, const std::string& name) {
  for (int i = 1; i < argc; ++i) {
    const std::pair<std::string, std::string> flag = absl::StrSplit(argv[i], absl::MaxSplits('=', 1));
    if (flag.first == name) return flag.second;
  }
  return "";
}

void Say(const std::string& line) { (void)!write(kHelperSocket, (line + "\n").data(), line.size() + 1); }

std::string Hear() {
  std::string line;
  for (char c; read(kHelperSocket, &c, 1) == 1 && c != '\n';) line += c;
  return line;
}

// What is wrong with the descriptors, signals and variables that it was given; empty if nothing is.
std::string Complaint() {
  for (int fd = kHelperSocket + 1; fd < 256; ++fd) {
    if (fcntl(fd, F_GETFD) >= 0) return absl::StrCat("descriptor ", fd, " is open");
  }
  sigset_t blocked;
  sigprocmask(SIG_SETMASK, nullptr, &blocked);
  struct sigaction action;
  sigaction(SIGUSR1, nullptr, &action);
  if (sigismember(&blocked, SIGUSR1) != 0 || action.sa_handler != SIG_DFL) return "signals are not as usual";
  for (const std::string& variable : AllVariables()) {
    for (const char* const prefix : {"OMPI_", "PMIX_", "PMI_", "SLURM_"}) {
      if (absl::StartsWith(variable, prefix)) return absl::StrCat(variable, " is set");
    }
  }
  return "";
}

// Notes that this one has started; whether this rank's helper with P2P is still there.
bool Log(const std::string& rank, bool no_p2p) {
  const std::string name = Variable("FAKE_PROBE_LOG");
  if (name.empty()) return false;
  bool beside = false;
  std::ifstream lines(name);
  for (std::string line; no_p2p && std::getline(lines, line);) {
    const std::vector<std::string> words = absl::StrSplit(line, ' ');
    beside = beside || (words[0] == rank && words.size() == 2 && kill(std::stoi(words[1]), 0) == 0);
  }
  std::ofstream(name, std::ios::app) << absl::StrCat(rank, " ", getpid(), no_p2p ? " without P2P" : "",
                                                     beside ? " beside the first\n" : "\n");
  return beside;
}

ProbeResult Passed() {
  ProbeResult result;
  result.state = ProbeState::kPassed;
  result.step = kProbeStepCount - 1;
  result.micros.fill(10);
  return result;
}

void Do(const std::string& what) {
  ProbeResult result;
  result.step = 3;
  Say(EncodeProbeResult(result));
  if (what == "hang") pause();
  if (what == "crash") {
    signal(SIGSEGV, SIG_DFL);  // a sanitizer would turn it into an exit
    raise(SIGSEGV);
  }
  if (what == "killed") raise(SIGKILL);
  if (what == "exit") _exit(3);
  if (what == "end") _exit(0);
  if (what == "garbage") Say("All is well.");
  if (what == "backwards") Say(EncodeProbeResult({}));
  while (what == "flood") Say(EncodeProbeResult(result));
  if (what == "endless") {
    while (write(kHelperSocket, "x", 1) == 1) {
    }
  }
  if (what == "lie") {
    result = Passed();
    result.micros = {};
    Say(EncodeProbeResult(result));
  }
  if (what == "hung" || what == "error" || what == "wrong") {
    result.step = 5;
    result.Fail(what == "hung"    ? ProbeState::kHang
                : what == "wrong" ? ProbeState::kWrongData
                                  : ProbeState::kError,
                what == "error" ? "unhandled cuda error" : "");
    Say(EncodeProbeResult(result));
  }
  const std::string complaint = Complaint();
  result = Passed();
  if (what == "slow") result.micros.fill(1e5f);
  if (!complaint.empty()) result.Fail(ProbeState::kError, complaint);
  if (what == "late") usleep(2'200'000);
  if (what == "pass" || what == "slow" || what == "late") Say(EncodeProbeResult(result));
  if (what == "stubborn") {  // does not end when it is told to
    Say(EncodeProbeResult(result));
    signal(SIGTERM, SIG_IGN);
    while (true) pause();
  }
}

int Main(int argc, char** argv) {
  DieWithParent(std::stoi(Flag(argc, argv, "--parent")));
  const std::string rank = Flag(argc, argv, "--rank");
  const bool no_p2p = Variable("NCCL_P2P_DISABLE") == "1";
  const bool beside_the_first = Log(rank, no_p2p);
  std::string what = "pass";
  for (const absl::string_view part : absl::StrSplit(Variable(no_p2p ? "FAKE_PROBE_NO_P2P" : "FAKE_PROBE"), ',')) {
    const std::vector<std::string> words = absl::StrSplit(part, '=');
    if (words.size() == 1 && !words[0].empty()) what = words[0];
    if (words.size() == 2 && words[0] == rank) {
      what = words[1];
      break;
    }
  }
  if (what == "alone") what = beside_the_first ? "device" : "pass";
  if (what == "device") {  // before NCCL
    ProbeResult result;
    result.step = FirstStepOf(ProbeStep::Kind::kDevice);
    result.Fail(ProbeState::kError, "busy or unavailable");
    Say(EncodeProbeResult(result));
    Hear();
    return 0;
  }
  nccl::UniqueId id = {};
  if (rank == "0") {
    id.internal[5] = 42;
    Say(EncodeId(id));
  } else if (const std::optional<nccl::UniqueId> heard = DecodeId(Hear());
             !heard.has_value() || heard->internal[5] != 42) {
    return 4;
  }
  Do(what);
  Hear();
  return 0;
}

}  // namespace
}  // namespace ddp::testing

int main(int argc, char** argv) { return ddp::testing::Main(argc, argv); }
