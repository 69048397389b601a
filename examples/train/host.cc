// SPDX-License-Identifier: Apache-2.0
#include "examples/train/host.h"

#include <fcntl.h>
#include <sched.h>
#include <unistd.h>

#include <csignal>
#include <fstream>
#include <string>

#include "absl/strings/str_cat.h"

namespace examples {
namespace {

// The only thing that a signal handler can write to is a global.
volatile std::sig_atomic_t g_signal = 0;

void Remember(int signal) { g_signal = signal; }

}  // namespace

std::string HostName() {
  char name[256] = {};
  return gethostname(name, sizeof(name) - 1) == 0 ? name : "";
}

std::string BoundCores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return "unknown";
  std::string text;
  for (int first = 0; first < CPU_SETSIZE; ++first) {
    if (!CPU_ISSET(first, &set)) continue;
    int last = first;
    while (last + 1 < CPU_SETSIZE && CPU_ISSET(last + 1, &set)) ++last;
    absl::StrAppend(&text, text.empty() ? "" : ",", first);
    if (last > first) absl::StrAppend(&text, "-", last);
    first = last;
  }
  return text;
}

// Not getrusage's: that begins with the memory of the process that became this program, which may be a launcher's, of
// hundreds of megabytes.
int64_t PeakRssMb() {
  std::ifstream status("/proc/self/status");
  int64_t kb = 0;
  for (std::string word; status >> word && word != "VmHWM:";) {
  }
  status >> kb;
  return kb / 1024;
}

// The handler needs a stack of its own: oneDNN 2.6's matrix product uses the stack pointer for other things, and what
// the kernel then puts "on the stack" lands in the heap.
void CatchStopSignals() {
  static char memory[1 << 16];
  stack_t stack = {};
  stack.ss_sp = memory;
  stack.ss_size = sizeof(memory);
  sigaltstack(&stack, nullptr);
  struct sigaction action = {};
  action.sa_handler = &Remember;
  action.sa_flags = SA_ONSTACK | SA_RESTART | static_cast<int>(SA_RESETHAND);
  for (const int signal : {SIGINT, SIGTERM, SIGUSR1}) sigaction(signal, &action, nullptr);
}

int StopSignal() { return g_signal; }

const char* SignalName(int signal) {
  switch (signal) {
    case SIGINT:
      return "SIGINT";
    case SIGUSR1:
      return "SIGUSR1";
    default:
      return "SIGTERM";
  }
}

bool OutputIsTerminal(bool through_parent) {
  if (isatty(STDOUT_FILENO) == 0) return false;
  if (!through_parent) return true;
  const int fd = open(absl::StrCat("/proc/", getppid(), "/fd/1").c_str(), O_WRONLY | O_NOCTTY | O_NONBLOCK | O_CLOEXEC);
  if (fd < 0) return false;
  const bool terminal = isatty(fd) != 0;
  close(fd);
  return terminal;
}

}  // namespace examples
