// SPDX-License-Identifier: Apache-2.0
// What every program begins and ends with; it works by being linked.
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

// Output that is lost must not look like success. An error that the program has found itself keeps its exit code.
void CheckOutput(int code, void* /*unused*/) {
  const bool failed = std::ferror(stdout) != 0;
  errno = 0;
  if (std::fflush(stdout) == 0 && !failed) return;
  std::fprintf(stderr, "%s: cannot write to standard output%s%s; make room there, or send it elsewhere\n",
               program_invocation_short_name, errno == 0 ? "" : ": ", errno == 0 ? "" : std::strerror(errno));
  _exit(code == 0 ? EXIT_FAILURE : code);
}

// A file that is opened where a standard stream is closed takes its number, and then what is printed lands in it. open
// takes the lowest free number.
[[gnu::constructor]] void Begin() {
  for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; ++fd) {
    if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", O_RDWR) != fd) std::abort();
  }
  on_exit(&CheckOutput, nullptr);
}

}  // namespace
