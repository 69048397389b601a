// SPDX-License-Identifier: Apache-2.0
// The optimizers on a GPU.
#ifndef EXAMPLES_NN_CUDA_OPTIMIZER_H_
#define EXAMPLES_NN_CUDA_OPTIMIZER_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>

#include "examples/nn/optimizer.h"

namespace nn::cuda {

std::unique_ptr<Optimizer> MakeSgd(size_t count, const SgdOptions& options, cudaStream_t stream);
std::unique_ptr<Optimizer> MakeAdam(size_t count, const AdamOptions& options, cudaStream_t stream);

}  // namespace nn::cuda

#endif  // EXAMPLES_NN_CUDA_OPTIMIZER_H_
