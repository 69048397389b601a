// SPDX-License-Identifier: Apache-2.0
// cuDNN's graph API, loaded when the first convolution on a GPU is created (see cublas.h for the reason).
#ifndef EXAMPLES_NN_CUDNN_H_
#define EXAMPLES_NN_CUDNN_H_

#include <cudnn_graph.h>

namespace nn::cudnn {

struct Api {
  decltype(&cudnnCreate) Create;
  decltype(&cudnnDestroy) Destroy;
  decltype(&cudnnSetStream) SetStream;
  decltype(&cudnnGetErrorString) GetErrorString;
  decltype(&cudnnGetVersion) GetVersion;
  decltype(&cudnnBackendCreateDescriptor) CreateDescriptor;
  decltype(&cudnnBackendDestroyDescriptor) DestroyDescriptor;
  decltype(&cudnnBackendSetAttribute) SetAttribute;
  decltype(&cudnnBackendGetAttribute) GetAttribute;
  decltype(&cudnnBackendFinalize) Finalize;
  decltype(&cudnnBackendExecute) Execute;
};

// Throws DeviceError if it cannot be loaded.
const Api& Load();

}  // namespace nn::cudnn

#endif  // EXAMPLES_NN_CUDNN_H_
