// SPDX-License-Identifier: Apache-2.0
// LibTorch models on several ranks: the header of the CMake target ddp::torch (find_package(ddp COMPONENTS torch)).
//
// Everything is inline, so that it is compiled with the LibTorch and the flags of the program that includes it.
// LibTorch 2.11 or newer; on GPUs its CUDA build.
#ifndef DDP_TORCH_H_
#define DDP_TORCH_H_

#include <torch/torch.h>  // IWYU pragma: export

#include "ddp/torch/ddp_module.h"       // IWYU pragma: export
#include "ddp/torch/sync_batch_norm.h"  // IWYU pragma: export
#include "ddp/torch/tensor.h"           // IWYU pragma: export

#endif  // DDP_TORCH_H_
