// SPDX-License-Identifier: Apache-2.0
// Times operations between processes of one host.
#ifndef BENCH_CPU_PERF_H_
#define BENCH_CPU_PERF_H_

#include <memory>

#include "absl/status/statusor.h"
#include "bench/options.h"
#include "bench/report.h"
#include "ddp/process_group.h"

namespace bench {

// Collective. `options` and `group` outlive it.
absl::StatusOr<std::unique_ptr<Bench>> MakeCpuBench(ddp::ProcessGroup& group, const Options& options);

}  // namespace bench

#endif  // BENCH_CPU_PERF_H_
