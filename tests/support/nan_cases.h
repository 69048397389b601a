// SPDX-License-Identifier: Apache-2.0
// NaN in, NaN out: no layer may turn a NaN into a number, or a model with NaN weights trains on and nobody notices.
#ifndef TESTS_SUPPORT_NAN_CASES_H_
#define TESTS_SUPPORT_NAN_CASES_H_

#include "examples/nn/device.h"
#include "examples/nn/element.h"

namespace nn::testing {

// Every layer of `device`, by itself: a NaN in the input, in a parameter, in a buffer, or in the gradient that comes
// from above. `element` is the type of the device's activations.
void CheckLayersKeepNan(Device& device, Element element = Element::kFloat32);

// Every model: a NaN in one parameter makes the loss NaN, in training and in evaluation.
void CheckModelsKeepNan(Device& device);

// The CPU's layers and models within Autocast for bfloat16.
void CheckCpuKeepsNanInBfloat16();

}  // namespace nn::testing

#endif  // TESTS_SUPPORT_NAN_CASES_H_
