// SPDX-License-Identifier: Apache-2.0
// What a tool that listens to NVTX sees.
#include <dlfcn.h>

#include <cstdlib>
#include <vector>

#include "ddp/observer.h"
#include "libddp/comm/base/internal_group.h"
#include "tests/support/catch.h"
#include "tests/support/memory.h"
#include "tests/support/ranks.h"

namespace ddp::testing {
namespace {

TEST_CASE("a tool sees scopes and operations begin and end") {
  setenv("NVTX_INJECTION64_PATH", DDP_NVTX_TOOL, 1);  // is read at the first call
  constexpr int kRounds = 5;
  RunOnRanks([](Rank& rank) {
    RANK_CHECK(ObserverOf(rank.group()) != nullptr);
    Memory memory(rank, Placement::kOrdinary, DType::kFloat32, 100);
    const Buffer whole = memory.whole();
    for (int i = 0; i < kRounds; ++i) {
      const TraceScope scope(rank.group(), "round");
      RANK_CHECK_OK(rank.group().AllReduce(whole, whole, {.bucket = 7}).Wait());
    }
    rank.Meet();
  });
  void* const tool = dlopen(DDP_NVTX_TOOL, RTLD_NOW | RTLD_NOLOAD);
  REQUIRE(tool != nullptr);
  const auto begun = reinterpret_cast<int (*)(const char*)>(dlsym(tool, "NvtxToolBegun"));
  const auto open = reinterpret_cast<int (*)()>(dlsym(tool, "NvtxToolOpen"));
  REQUIRE(begun != nullptr);
  REQUIRE(open != nullptr);
  const int ranks = RanksAreThreads() ? RankCount() : 1;
  CHECK(begun("round") == ranks * kRounds);
  CHECK(begun("all_reduce, bucket 7") == (RankCount() > 1 ? ranks * kRounds : 0));
  CHECK(open() == 0);
}

}  // namespace
}  // namespace ddp::testing
