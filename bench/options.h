// SPDX-License-Identifier: Apache-2.0
// The command line of ddp_perf: nccl-tests' flags, and some of its own.
#ifndef BENCH_OPTIONS_H_
#define BENCH_OPTIONS_H_

#include <cstddef>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "bench/collective.h"
#include "bench/measure.h"
#include "ddp/types.h"

namespace bench {

struct Options : MeasureOptions {
  std::vector<Collective> collectives = {Collective::kAllReduce};
  std::vector<size_t> sizes;  // bytes of the larger of one rank's buffers
  std::vector<ddp::DType> dtypes = {ddp::DType::kFloat32};
  std::vector<ddp::ReduceOp> ops = {ddp::ReduceOp::kSum};
  int root = 0;
  int aggregate = 0;  // calls before the last one is waited for; 0: 1 on CPUs, all of a sample on GPUs
  int checks = 1;     // before the timing; and one after it, unless 0
  int graphs = -1;    // launches of a CUDA graph in a sample; -1: one, for small sizes
  bool out_of_place = true, in_place = true;
  bool cuda = false;
  std::string backend;    // empty: the library decides
  bool peer = false;      // MPI or raw NCCL beside it
  bool ordinary = false;  // memory of the process instead of ProcessGroup::Allocate's
  std::string json;       // a file to write, or empty
  bool help = false;
};

// InvalidArgument, in one line, names the flag and what it may be.
absl::StatusOr<Options> ParseOptions(int argc, char** argv);

extern const char* const kUsage;

}  // namespace bench

#endif  // BENCH_OPTIONS_H_
