// SPDX-License-Identifier: Apache-2.0
// The probe of NCCL on real GPUs, one a rank: by ddp_probe, and in the process; and what auto makes of it.
#include <cstdlib>
#include <memory>
#include <string>

#include "libddp/comm/probe/probe_nccl.h"
#include "tests/gpu/on_gpus.h"
#include "tests/support/catch.h"
#include "tests/support/ranks.h"
#include "tests/support/temporary_folder.h"

namespace ddp::testing {
namespace {

// The ranks' group is on the CPU. No rank may have used NCCL before.
TEST_CASE("NCCL is found to work between these GPUs, and that is remembered") {
  const TemporaryFolder cache;
  ContextOptions on_cpu;
  on_cpu.backend = RankCount() == 1 ? "local" : "hierarchical";
  RunOnRanks(
      [&](Rank& rank) {
        ProbeNcclOptions options;
        options.device = {Device::Kind::kCuda, static_cast<int16_t>(rank.rank() % CudaDevices()->Count())};
        options.cache = cache.path();
        const ProbeReport first = RANK_VALUE(ProbeNccl(rank.group(), options));
        RANK_CHECK(first.verdict == ProbeVerdict::kWorks || first.verdict == ProbeVerdict::kWorksWithoutP2p,
                   Describe(first));
        RANK_CHECK(first.note.empty(), Describe(first));  // the helper was found, and did its work
        RANK_CHECK(!first.from_cache);
        RANK_CHECK(RANK_VALUE(ProbeNccl(rank.group(), options)).from_cache);
        // A GPU may admit one process only: it has to be the helper, first. Ranks that are threads come here together.
        for (int i = 0; i < CudaDevices()->Count(); ++i) RANK_CHECK(!CudaDevices()->InUse(i));
        if (first.verdict != ProbeVerdict::kWorks) return;

        options.helper = "/no/such/program";
        options.fresh = true;
        const ProbeReport here = RANK_VALUE(ProbeNccl(rank.group(), options));
        RANK_CHECK(here.verdict == ProbeVerdict::kWorks, Describe(here));
        RANK_CHECK(!here.note.empty());
      },
      on_cpu);
}

TEST_CASE("auto uses what works between these GPUs, and remembers it") {
  const TemporaryFolder cache;
  setenv("DDP_PROBE_CACHE", cache.path().c_str(), 1);
  ContextOptions options = OnGpus();
  options.backend = "auto";
  for (const bool first : {true, false}) {
    RunOnGpus(
        [&](Rank& rank) {
          const BackendChoice& choice = rank.context().backend_choice();
          RANK_CHECK_EQ(choice.backend, rank.group().backend());
          RANK_CHECK_EQ(choice.text.empty(), rank.size() == 1);
          if (choice.backend == "nccl" && !choice.without_p2p) RANK_CHECK_EQ(choice.from_cache, !first);
          Array x(rank, DType::kFloat32, 100'000, false);
          x.Fill([&](size_t i) { return static_cast<double>(i % 7 + static_cast<size_t>(rank.rank())); });
          RANK_CHECK_OK(rank.group().AllReduce(x.Cut(1), x.Cut(1), Sum(), kNoStream).Wait());
          const int n = rank.size();
          x.Expect([&](size_t i) { return static_cast<double>(n) * static_cast<double>(i % 7) + n * (n - 1) / 2.0; });
        },
        options);
  }
  unsetenv("DDP_PROBE_CACHE");
  unsetenv("NCCL_P2P_DISABLE");
}

}  // namespace
}  // namespace ddp::testing
