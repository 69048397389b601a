// SPDX-License-Identifier: Apache-2.0
// Which process, on which host, a rank is.
#ifndef LIBDDP_BASE_PROCESS_ID_H_
#define LIBDDP_BASE_PROCESS_ID_H_

#include <sys/types.h>

#include <cstdint>
#include <string>

namespace ddp {

// A process id alone does not tell processes apart: containers on one host each begin with process 1. Trivially
// copyable, so that it can be exchanged as bytes.
struct ProcessId {
  uint64_t token = 0;          // random; equal only within one process
  uint64_t pid_namespace = 0;  // inode of the namespace that `pid` belongs to; 0 if unknown
  pid_t pid = 0;

  static ProcessId OfSelf();

  bool SameProcess(const ProcessId& other) const { return token == other.token; }
  // Whether `pid` names this process in the other one's system calls and in its /proc.
  bool VisibleTo(const ProcessId& other) const { return pid_namespace != 0 && pid_namespace == other.pid_namespace; }
};

// Equal on two ranks if they run on one kernel under one host name.
std::string HostId();
std::string HostName();

}  // namespace ddp

#endif  // LIBDDP_BASE_PROCESS_ID_H_
