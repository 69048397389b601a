// SPDX-License-Identifier: Apache-2.0
// Starts ranks as processes of its own (fork and exec, a file store), so that one can be killed without a launcher
// killing the others.
#ifndef TESTS_FAULT_JOB_H_
#define TESTS_FAULT_JOB_H_

#include <sys/types.h>

#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/time/time.h"
#include "tests/support/temporary_folder.h"

namespace ddp::testing {

// What became of one process.
struct Ending {
  bool exited = false;   // by itself, not by a signal
  int code = 0;          // exit code, or the signal
  bool overdue = false;  // did not end before the deadline and was killed by the test
  std::string output;    // standard output
};

// One run of fault_rank or of another program. The folder that its ranks use is made and removed with the Job.
class Job {
 public:
  explicit Job(std::string program = DDP_FAULT_RANK);
  ~Job();  // ends what still runs
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  // Starts the program as `rank` of `size`, with further arguments and variables ("NAME=value"). `launcher`: a command
  // that runs the command given to it.
  void Start(int rank, int size, const std::vector<std::string>& arguments, const std::vector<std::string>& environment,
             const std::vector<std::string>& launcher = {});

  // Waits until process number `number` has written a whole line, at most until `patience` is over; false if it has
  // not.
  bool WaitForLine(int number, absl::Duration patience);
  // The same for the process's end.
  bool WaitForEnd(int number, absl::Duration patience);

  void Signal(int number, int signal) const;

  // Waits until all processes but number `except` (in order of Start) have ended, at most until `patience` is over;
  // then ends them all. By number.
  std::vector<Ending> Finish(absl::Duration patience, int except = -1);

  // What the job has in its folder and in /dev/shm; after Finish, what it has left there.
  std::vector<std::string> LeftBehind() const;

 private:
  struct Process {
    pid_t pid;
    int output;  // pipe
    bool ended = false;
    Ending ending;
  };
  void Collect(Process& process, bool block);
  // Until `done` or the process has ended, at most until `patience` is over.
  void WaitUntil(Process& process, absl::Duration patience, absl::FunctionRef<bool()> done);

  const std::string program_;
  const TemporaryFolder folder_;
  std::vector<Process> processes_;
};

// While one lives, this process and those it starts see a /dev/shm of their own, of so many bytes. Needs root.
class SmallSharedMemory {
 public:
  explicit SmallSharedMemory(size_t bytes);
  ~SmallSharedMemory();
  SmallSharedMemory(const SmallSharedMemory&) = delete;
  SmallSharedMemory& operator=(const SmallSharedMemory&) = delete;

  // Empty, or why it could not be made.
  const std::string& problem() const { return problem_; }

 private:
  int before_ = -1;  // the mount namespace to go back to
  std::string problem_;
};

}  // namespace ddp::testing

#endif  // TESTS_FAULT_JOB_H_
