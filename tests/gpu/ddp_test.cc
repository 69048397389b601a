// SPDX-License-Identifier: Apache-2.0
// DistributedDataParallel on real GPUs, one a rank; ranks are threads or processes.
#include <functional>

#include "ddp/context.h"
#include "tests/support/catch.h"
#include "tests/support/ddp_gpu_cases.h"
#include "tests/support/gpu.h"
#include "tests/support/ranks.h"

namespace ddp::testing {
namespace {

void RunCase(const std::function<void(GpuRank&)>& body) {
  ContextOptions options;
  options.backend = RankCount() > 1 ? GpuBackend() : "local";
  options.device = {Device::Kind::kCuda, -1};
  RunOnRanks(
      [&](Rank& rank) {
        GpuRank gpu{rank.group()};
        body(gpu);
      },
      options);
}

TEST_CASE("gradients on GPUs are averaged in the order of their streams") { RunCase(gpu_cases::Averages); }
TEST_CASE("what a model does by itself is ordered behind the program's work on GPUs") { RunCase(gpu_cases::Order); }
TEST_CASE("a reduced step on GPUs comes behind the streams of the passes before") {
  RunCase(gpu_cases::OrderWithoutReduction);
}
TEST_CASE("calls between steps that are given no stream are ordered on GPUs") { RunCase(gpu_cases::OrderBetweenSteps); }
TEST_CASE("every option works on GPUs") { RunCase(gpu_cases::Options); }
TEST_CASE("gradients in 8-bit blocks on GPUs have the CPU's bits") { RunCase(gpu_cases::Blocks); }
TEST_CASE("PowerSGD on GPUs gives what it gives on the CPU") { RunCase(gpu_cases::PowerSgd); }
TEST_CASE("gradients inside an allocation on GPUs are reduced where they lie") { RunCase(gpu_cases::InPlace); }
TEST_CASE("values on GPUs that differ between ranks are found") { RunCase(gpu_cases::Replicas); }
TEST_CASE("a hook runs kernels of its own on a stream of its own") { RunCase(gpu_cases::OwnKernels); }
TEST_CASE("a NaN on a GPU is reported with its rank and parameter") { RunCase(gpu_cases::Nan); }
TEST_CASE("norms, clipping and what is not finite on GPUs") { RunCase(gpu_cases::NormAndClipping); }
TEST_CASE("gradients of every type are clipped in a GPU's order") { RunCase(gpu_cases::ClippingAsync); }
TEST_CASE("accumulation, uneven steps, buffers and frozen parameters on GPUs") { RunCase(gpu_cases::Accumulation); }
TEST_CASE("a model on GPUs goes on in another group") { RunCase(gpu_cases::GoesOn); }
TEST_CASE("models that do not lie where the group works are refused") { RunCase(gpu_cases::Misuse); }
TEST_CASE("GradScaler works on GPUs") { RunCase(gpu_cases::Scaler); }
TEST_CASE("a GPU's steps are measured without waiting") { RunCase(gpu_cases::Statistics); }
// Up to NCCL 2.29.1 only with NCCL_WIN_ENABLE=0: the kernels for registered memory cannot be aborted there.
TEST_CASE("no step consumes what a reduction left that failed later", "[.][fails]") {
  RunCase(gpu_cases::FailsAfterReturn);
}

}  // namespace
}  // namespace ddp::testing
