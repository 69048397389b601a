// The CPU's layers of convolutional models, over oneDNN.
#ifndef EXAMPLES_NN_CPU_IMAGE_LAYERS_H_
#define EXAMPLES_NN_CPU_IMAGE_LAYERS_H_

#include <memory>

#include "examples/nn/image_layers.h"

namespace nn {

std::unique_ptr<ImageLayers> MakeCpuImageLayers(int max_batch);

}  // namespace nn

#endif  // EXAMPLES_NN_CPU_IMAGE_LAYERS_H_
