// The command line of allreduce_bench: nccl-tests' flags where they mean something on a CPU.
#ifndef BENCH_OPTIONS_H_
#define BENCH_OPTIONS_H_

#include <cstddef>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "ddp/types.h"

namespace bench {

struct Options {
  std::vector<size_t> sizes;  // bytes of one rank's buffer
  std::vector<ddp::DType> dtypes = {ddp::DType::kFloat32};
  std::vector<ddp::ReduceOp> ops = {ddp::ReduceOp::kSum};
  int iters = 0;         // timed calls for each size; 0: what fits into budget_s
  int warmup_iters = 0;  // 0: as many as fit into 20 ms, at least 2
  double budget_s = 0.2;
  bool check = true;
  bool out_of_place = false;  // as well
  bool ordinary = false;
  bool fresh = false;
  double near_ns = 0;  // 0: take every state of the machine
  double near_wait_s = 4;
  std::string json;  // a file to write, or empty
  bool help = false;
};

// InvalidArgument, in one line, names the flag and what it may be.
absl::StatusOr<Options> ParseOptions(int argc, char** argv);

extern const char* const kUsage;

}  // namespace bench

#endif  // BENCH_OPTIONS_H_
