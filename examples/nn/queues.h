// SPDX-License-Identifier: Apache-2.0
// The queues through which a program's streams reach a GPU.
#ifndef EXAMPLES_NN_QUEUES_H_
#define EXAMPLES_NN_QUEUES_H_

#include <cstdlib>

namespace nn {

// Call it before the program's first call of CUDA, while it has one thread. Asks for 32 queues instead of eight, unless
// CUDA_DEVICE_MAX_CONNECTIONS tells how many: where a stream that waits for another one, as those of reductions do,
// shares a queue with the model's, each of the model's kernels begins a microsecond later.
inline void AskForQueues() { setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", /*overwrite=*/0); }

}  // namespace nn

#endif  // EXAMPLES_NN_QUEUES_H_
