// The probe of NCCL on real GPUs, one a rank: by ddp_probe, and in the process.
#include <memory>
#include <string>

#include "libddp/comm/probe/probe_nccl.h"
#include "tests/support/catch.h"
#include "tests/support/gpu.h"
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
        if (first.verdict != ProbeVerdict::kWorks) return;

        options.helper = "/no/such/program";
        options.fresh = true;
        const ProbeReport here = RANK_VALUE(ProbeNccl(rank.group(), options));
        RANK_CHECK(here.verdict == ProbeVerdict::kWorks, Describe(here));
        RANK_CHECK(!here.note.empty());
      },
      on_cpu);
}

}  // namespace
}  // namespace ddp::testing
