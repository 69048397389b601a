// SPDX-License-Identifier: Apache-2.0
// The layers of convolutional models on a GPU: convolutions by cuDNN, the rest by the kernels of the examples.
#ifndef EXAMPLES_NN_CUDA_IMAGE_LAYERS_H_
#define EXAMPLES_NN_CUDA_IMAGE_LAYERS_H_

#include <memory>

#include "examples/nn/cudnn_convolution.h"
#include "examples/nn/image_layers.h"

namespace nn::cuda {

// `context` must outlive the layers. `processors`: on so many of the GPU's, thread blocks that wait for each other run
// at the same time; 0 if that is not known.
std::unique_ptr<ImageLayers> MakeImageLayers(cudnn::Context& context, int processors, int max_batch);

}  // namespace nn::cuda

#endif  // EXAMPLES_NN_CUDA_IMAGE_LAYERS_H_
