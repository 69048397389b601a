// SPDX-License-Identifier: Apache-2.0
#include "bench/gpu_perf.h"

namespace bench {

absl::StatusOr<std::unique_ptr<Bench>> MakeGpuBench(ddp::Context& /*context*/, const Options& /*options*/) {
  return absl::UnimplementedError("--device=cuda: this build has no CUDA");
}

}  // namespace bench
