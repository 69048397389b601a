// SPDX-License-Identifier: Apache-2.0
// Times operations between GPUs, one per rank.
#ifndef BENCH_GPU_PERF_H_
#define BENCH_GPU_PERF_H_

#include <memory>

#include "absl/status/statusor.h"
#include "bench/options.h"
#include "bench/report.h"
#include "ddp/context.h"

namespace bench {

// Collective. `options` and `context` outlive it.
absl::StatusOr<std::unique_ptr<Bench>> MakeGpuBench(ddp::Context& context, const Options& options);

}  // namespace bench

#endif  // BENCH_GPU_PERF_H_
