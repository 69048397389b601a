// SPDX-License-Identifier: Apache-2.0
// Launches whose blocks wait for each other in the middle, to add up what all of them have. They are cooperative: all
// blocks run at the same time.
#ifndef EXAMPLES_NN_CUDA_TOGETHER_CUH_
#define EXAMPLES_NN_CUDA_TOGETHER_CUH_

#include <cooperative_groups.h>

#include "examples/nn/cuda_element.cuh"

namespace nn::cuda {

constexpr int kGridThreads = 512;
// A power of two, as most shapes are. A kernel of more than 64 registers has one block on each multiprocessor: it waits
// for NCCL's kernels where these take more than the four that an H100 has left, and they wait for it.
constexpr int kGridBlocks = 128;

inline unsigned GridBlocks(int processors) {
  return static_cast<unsigned>(processors < kGridBlocks ? processors : kGridBlocks);
}

template <class... Parameters, class... Arguments>
void LaunchTogether(void (*kernel)(Parameters...), int processors, cudaStream_t stream, Arguments... arguments) {
  cudaLaunchAttribute cooperative = {};
  cooperative.id = cudaLaunchAttributeCooperative;
  cooperative.val.cooperative = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = GridBlocks(processors);
  config.blockDim = kGridThreads;
  config.stream = stream;
  config.attrs = &cooperative;
  config.numAttrs = 1;
  cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
}

}  // namespace nn::cuda

#endif  // EXAMPLES_NN_CUDA_TOGETHER_CUH_
