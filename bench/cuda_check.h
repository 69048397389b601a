// SPDX-License-Identifier: Apache-2.0
// Ends a benchmark with a plain message when a CUDA call fails.
#ifndef BENCH_CUDA_CHECK_H_
#define BENCH_CUDA_CHECK_H_

#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>

namespace bench {

inline void CheckCuda(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s (%s)\n", call, cudaGetErrorString(error), cudaGetErrorName(error));
  std::exit(1);
}

}  // namespace bench

#define BENCH_CUDA(call) ::bench::CheckCuda(call, #call)

#endif  // BENCH_CUDA_CHECK_H_
