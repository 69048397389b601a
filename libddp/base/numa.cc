// SPDX-License-Identifier: Apache-2.0
#include "libddp/base/numa.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"

namespace ddp {
namespace {

constexpr int kMpolPreferred = 1;  // linux/mempolicy.h

}  // namespace

int NumaNodeOfPci(const std::string& bus_id, const std::string& root) {
  std::ifstream file(absl::StrCat(root, "/sys/bus/pci/devices/", absl::AsciiStrToLower(bus_id), "/numa_node"));
  int node = -1;
  return file >> node ? node : -1;
}

absl::Status PreferNode(void* data, size_t bytes, int node) {
  constexpr size_t kBits = 8 * sizeof(unsigned long);
  const size_t number = static_cast<size_t>(node);
  std::vector<unsigned long> nodes(number / kBits + 1);
  nodes[number / kBits] = 1ul << (number % kBits);
  // The kernel takes one bit less than it is told of.
  if (syscall(SYS_mbind, data, bytes, kMpolPreferred, nodes.data(), nodes.size() * kBits + 1, 0) == 0) {
    return absl::OkStatus();
  }
  return absl::UnavailableError(absl::StrCat("mbind to NUMA node ", node, ": ", std::strerror(errno)));
}

}  // namespace ddp
