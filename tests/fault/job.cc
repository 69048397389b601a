// SPDX-License-Identifier: Apache-2.0
#include "tests/fault/job.h"

#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <stdexcept>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace ddp::testing {
namespace {

std::vector<char*> Pointers(std::vector<std::string>& strings) {
  std::vector<char*> pointers;
  for (std::string& s : strings) pointers.push_back(s.data());
  pointers.push_back(nullptr);
  return pointers;
}

// This process's environment with `changes` in place of variables of the same name.
std::vector<std::string> Environment(const std::vector<std::string>& changes) {
  std::vector<std::string> all = changes;
  for (char** variable = environ; *variable != nullptr; ++variable) {
    const std::string text = *variable;
    const std::string name = text.substr(0, text.find('=') + 1);
    bool changed = false;
    for (const std::string& change : changes) changed = changed || absl::StartsWith(change, name);
    if (!changed) all.push_back(text);
  }
  return all;
}

}  // namespace

Job::Job(std::string program) : program_(std::move(program)) {}

Job::~Job() { Finish(absl::ZeroDuration()); }

void Job::Start(int rank, int size, const std::vector<std::string>& arguments,
                const std::vector<std::string>& environment, const std::vector<std::string>& launcher) {
  std::vector<std::string> words = launcher;
  for (const std::string& word : {program_, absl::StrCat("--rank=", rank), absl::StrCat("--size=", size),
                                  absl::StrCat("--store=", folder_.File("store"))}) {
    words.push_back(word);
  }
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<std::string> variables = Environment(environment);
  const std::vector<char*> argv = Pointers(words);
  const std::vector<char*> envp = Pointers(variables);
  int output[2];
  if (pipe2(output, O_CLOEXEC) != 0) throw std::runtime_error("pipe2");
  const pid_t pid = fork();
  if (pid < 0) throw std::runtime_error("fork");
  if (pid == 0) {
    dup2(output[1], STDOUT_FILENO);
    execvpe(argv[0], argv.data(), envp.data());
    _exit(127);
  }
  close(output[1]);
  processes_.push_back({pid, output[0], false, {}});
}

// Reads what there is to read, and takes note of the end.
void Job::Collect(Process& process, bool block) {
  pollfd readable = {process.output, POLLIN, 0};
  while (!process.ended && poll(&readable, 1, block ? -1 : 0) > 0) {
    char text[4096];
    const ssize_t n = read(process.output, text, sizeof text);
    if (n > 0) {
      process.ending.output.append(text, static_cast<size_t>(n));
      continue;
    }
    int status = 0;
    waitpid(process.pid, &status, 0);
    close(process.output);
    process.ended = true;
    process.ending.exited = WIFEXITED(status);
    process.ending.code = WIFEXITED(status) ? WEXITSTATUS(status) : WTERMSIG(status);
  }
}

void Job::WaitUntil(Process& process, absl::Duration patience, absl::FunctionRef<bool()> done) {
  const absl::Time deadline = absl::Now() + patience;
  while (!done() && !process.ended && absl::Now() < deadline) {
    Collect(process, false);
    absl::SleepFor(absl::Milliseconds(2));
  }
}

bool Job::WaitForLine(int number, absl::Duration patience) {
  Process& process = processes_[static_cast<size_t>(number)];
  const auto has_line = [&] { return absl::StrContains(process.ending.output, "\n"); };
  WaitUntil(process, patience, has_line);
  return has_line();
}

bool Job::WaitForEnd(int number, absl::Duration patience) {
  Process& process = processes_[static_cast<size_t>(number)];
  WaitUntil(process, patience, [] { return false; });
  return process.ended;
}

void Job::Signal(int number, int signal) const {
  const Process& process = processes_[static_cast<size_t>(number)];
  if (!process.ended) kill(process.pid, signal);
}

std::vector<Ending> Job::Finish(absl::Duration patience, int except) {
  const absl::Time deadline = absl::Now() + patience;
  for (bool running = true; running && absl::Now() < deadline;) {
    running = false;
    for (size_t i = 0; i < processes_.size(); ++i) {
      Collect(processes_[i], false);
      running = running || (!processes_[i].ended && static_cast<int>(i) != except);
    }
    if (running) absl::SleepFor(absl::Milliseconds(2));
  }
  std::vector<Ending> endings;
  for (Process& process : processes_) {
    if (!process.ended) {
      process.ending.overdue = true;
      kill(process.pid, SIGKILL);
      Collect(process, true);
    }
    endings.push_back(process.ending);
  }
  return endings;
}

std::vector<std::string> Job::LeftBehind() const {
  std::vector<std::string> left;
  for (const auto& entry : std::filesystem::directory_iterator(folder_.path())) left.push_back(entry.path().string());
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
    for (const Process& process : processes_) {
      if (absl::StrContains(entry.path().filename().string(), absl::StrCat("-", process.pid, "-"))) {
        left.push_back(entry.path().string());
      }
    }
  }
  return left;
}

SmallSharedMemory::SmallSharedMemory(size_t bytes) {
  before_ = open("/proc/self/ns/mnt", O_RDONLY | O_CLOEXEC);
  if (before_ < 0 || unshare(CLONE_NEWNS) != 0) {
    problem_ = absl::StrCat("a mount namespace of one's own is not permitted here: ", std::strerror(errno));
    return;
  }
  if (mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
      mount("tmpfs", "/dev/shm", "tmpfs", 0, absl::StrCat("size=", bytes).c_str()) != 0) {
    problem_ = absl::StrCat("a tmpfs cannot be mounted here: ", std::strerror(errno));
  }
}

SmallSharedMemory::~SmallSharedMemory() {
  if (before_ < 0) return;
  if (setns(before_, CLONE_NEWNS) != 0) abort();  // further tests would run in the wrong place
  close(before_);
}

}  // namespace ddp::testing
