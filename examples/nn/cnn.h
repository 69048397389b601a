// SPDX-License-Identifier: Apache-2.0
// The convolutional models of the examples. Parameters have the same names as in the equivalent PyTorch models.
#ifndef EXAMPLES_NN_CNN_H_
#define EXAMPLES_NN_CNN_H_

#include <memory>

#include "examples/nn/image.h"
#include "examples/nn/model.h"

namespace nn {

// nn.Sequential(Conv2d(c, 32, 3), ReLU, Conv2d(32, 64, 3), ReLU, MaxPool2d(2), Flatten, Linear(.., 128), ReLU,
// Linear(128, classes)), a network of LeNet's size. Images must be at least 6 pixels high and wide.
std::unique_ptr<Model> MakeLenet(const ImageShape& images, int classes, int max_batch, Device& device = Cpu());
inline constexpr int kLenetSmallestImage = 6;

// The network with 20 layers for CIFAR-10 from He et al., "Deep Residual Learning for Image Recognition", 2015:
// nn.Sequential(Conv2d(c, 16, 3, padding=1, bias=False), BatchNorm2d(16), ReLU, nine basic blocks of 16, 32 and 64
// channels, AdaptiveAvgPool2d(1), Flatten, Linear(64, classes)). Images of any size.
std::unique_ptr<Model> MakeResnet20(const ImageShape& images, int classes, int max_batch, Device& device = Cpu());

// The network with 50 layers for ImageNet from the same paper, with the stride in the 3x3 convolutions:
// nn.Sequential(Conv2d(c, 64, 7, stride=2, padding=3, bias=False), BatchNorm2d(64), ReLU, MaxPool2d(3, 2, 1), sixteen
// bottlenecks of 64, 128, 256 and 512 channels, AdaptiveAvgPool2d(1), Flatten, Linear(2048, classes)). Images of any
// size.
std::unique_ptr<Model> MakeResnet50(const ImageShape& images, int classes, int max_batch, Device& device = Cpu());

// True if this processor has the instructions for ddp::Autocast with bfloat16.
bool HasBfloat16();

}  // namespace nn

#endif  // EXAMPLES_NN_CNN_H_
