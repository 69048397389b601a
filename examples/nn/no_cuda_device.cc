// SPDX-License-Identifier: Apache-2.0
#include "examples/nn/device.h"

namespace nn {

std::unique_ptr<Device> OpenCuda(int, const CudaOptions&) {
  throw DeviceError(
      "--device=cuda: this program was built without CUDA; install CUDA 12.8 or newer with cuBLAS and cuDNN 9, and "
      "configure with "
      "-DDDP_WITH_CUDA=ON, or leave out --device");
}

}  // namespace nn
