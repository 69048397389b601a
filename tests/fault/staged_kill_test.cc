// SPDX-License-Identifier: Apache-2.0
// Ranks of the hierarchical backend on simulated GPUs that are killed at random moments: the kernels of the others
// leave, and the error names who is gone.
#include <random>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/fault/job.h"
#include "tests/support/catch.h"

namespace ddp::testing {
namespace {

TEST_CASE("whenever a rank on GPUs is killed, the others' streams come free and it is named", "[.][staged]") {
  for (unsigned seed = 0; seed < 12; ++seed) {
    std::mt19937 random(seed);
    const int size = 2 + static_cast<int>(random() % 3),
              victim = static_cast<int>(random() % static_cast<unsigned>(size));
    const unsigned delay_us = random() % (seed % 2 == 0 ? 20'000 : 200'000);
    // All-reduces go by kernels, through the host's processors, and by the copy engines.
    const char* const ways[] = {"DDP_STAGED_REDUCE=gpu", "DDP_STAGED_REDUCE=cpu",
                                "DDP_STAGED_LIMITS=copies=0,chunk=16K"};
    const std::string way = ways[seed % 3];
    INFO(way << ", seed " << seed << ": rank " << victim << " of " << size << " after " << delay_us << " us");
    Job job(DDP_STAGED_RANK);
    for (int rank = 0; rank < size; ++rank) {
      job.Start(rank, size, {absl::StrCat("--victim=", victim), absl::StrCat("--delay_us=", delay_us)}, {way});
    }
    const std::vector<Ending> endings = job.Finish(absl::Seconds(60));
    for (int rank = 0; rank < size; ++rank) {
      const Ending& ending = endings[static_cast<size_t>(rank)];
      INFO("rank " << rank << ": " << ending.output);
      CHECK_FALSE(ending.overdue);
      if (rank == victim) continue;
      CHECK(ending.exited);
      CHECK(absl::StartsWith(ending.output, "UNAVAILABLE"));
      CHECK(absl::StrContains(ending.output, absl::StrCat("rank ", victim)));
      CHECK(absl::StrContains(ending.output, "the stream came free"));
    }
    CHECK(job.LeftBehind() == std::vector<std::string>{});
  }
}

}  // namespace
}  // namespace ddp::testing
