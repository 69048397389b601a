// SPDX-License-Identifier: Apache-2.0
// The layers of convolutional models on the CPU, based on oneDNN.
#ifndef EXAMPLES_NN_CPU_IMAGE_LAYERS_H_
#define EXAMPLES_NN_CPU_IMAGE_LAYERS_H_

#include <memory>

#include "examples/nn/image_layers.h"

namespace nn {

std::unique_ptr<ImageLayers> MakeCpuImageLayers(int max_batch);

}  // namespace nn

#endif  // EXAMPLES_NN_CPU_IMAGE_LAYERS_H_
