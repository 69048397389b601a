// SPDX-License-Identifier: Apache-2.0
#include "libddp/base/process_id.h"

#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>

#include "absl/strings/str_cat.h"

namespace ddp {
namespace {

uint64_t PidNamespace() {
  struct stat info = {};
  return stat("/proc/self/ns/pid", &info) == 0 ? static_cast<uint64_t>(info.st_ino) : 0;
}

// The child of a fork inherits this, and may even have its parent's process id, in a namespace of its own.
uint64_t Random() {
  static const uint64_t random = [] {
    uint64_t bits = 0;
    return getrandom(&bits, sizeof bits, 0) == sizeof bits ? bits : uint64_t{0};
  }();
  return random;
}

}  // namespace

ProcessId ProcessId::OfSelf() {
  ProcessId self;
  self.pid = getpid();
  self.pid_namespace = PidNamespace();
  self.token = (Random() ^ self.pid_namespace) + static_cast<uint64_t>(self.pid) * 0x9e3779b97f4a7c15u;
  return self;
}

std::string HostName() {
  char name[256] = {};
  return gethostname(name, sizeof name - 1) == 0 ? name : "";
}

std::string HostId() {
  // Once: a process that may open no more files still knows its host.
  static const std::string boot = [] {
    std::string id;
    std::ifstream("/proc/sys/kernel/random/boot_id") >> id;
    return id;
  }();
  return absl::StrCat(boot, " ", HostName());
}

}  // namespace ddp
