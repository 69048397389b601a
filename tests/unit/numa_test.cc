// SPDX-License-Identifier: Apache-2.0
#include "libddp/base/numa.h"

#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <string>

#include "absl/strings/match.h"
#include "libddp/base/page.h"
#include "tests/support/catch.h"
#include "tests/support/temporary_folder.h"

namespace ddp::testing {
namespace {

TEST_CASE("the node of a PCI device is what the system says") {
  const TemporaryFolder root;
  root.Write("sys/bus/pci/devices/0000:5d:00.0/numa_node", "3\n");
  root.Write("sys/bus/pci/devices/0000:5e:00.0/numa_node", "-1\n");
  root.Write("sys/bus/pci/devices/0000:5f:00.0/numa_node", "none\n");
  CHECK(NumaNodeOfPci("0000:5D:00.0", root.path()) == 3);
  CHECK(NumaNodeOfPci("0000:5e:00.0", root.path()) == -1);
  CHECK(NumaNodeOfPci("0000:5f:00.0", root.path()) == -1);
  CHECK(NumaNodeOfPci("0000:60:00.0", root.path()) == -1);
  CHECK(NumaNodeOfPci("fake:0", root.path()) == -1);
}

TEST_CASE("memory prefers the node that it is told, and no node that is not there") {
  const size_t bytes = 4 * PageSize();
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  REQUIRE(memory != MAP_FAILED);
  const absl::Status status = PreferNode(memory, bytes, 0);
  int mode = -1;
  unsigned long nodes[16] = {};
  const long asked = syscall(SYS_get_mempolicy, &mode, nodes, 8 * sizeof nodes, memory, MPOL_F_ADDR);
  if (status.ok() && asked == 0) {
    CHECK(mode == MPOL_PREFERRED);
    CHECK(nodes[0] == 1);
  } else if (!status.ok()) {  // no such call here: a kernel without NUMA, or a container that forbids it
    CHECK(absl::StrContains(status.message(), "mbind to NUMA node 0"));
  }
  CHECK(absl::StrContains(PreferNode(memory, bytes, 1000).message(), "mbind to NUMA node 1000"));
  munmap(memory, bytes);
}

}  // namespace
}  // namespace ddp::testing
