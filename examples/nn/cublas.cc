// SPDX-License-Identifier: Apache-2.0
#include "examples/nn/cublas.h"

#include <cuda_runtime_api.h>

#include "absl/strings/str_cat.h"
#include "examples/nn/shared_library.h"

namespace nn::cublas {

const Api& Load() {
  static const Api api = [] {
    constexpr int kVersion = CUDART_VERSION / 1000;
    const SharedLibrary library(absl::StrCat("libcublasLt.so.", kVersion), "cuBLAS",
                                absl::StrCat("install the libcublas package of CUDA ", kVersion));
    Api found;
    library.Find(found.Create, "cublasLtCreate");
    library.Find(found.Destroy, "cublasLtDestroy");
    library.Find(found.Matmul, "cublasLtMatmul");
    library.Find(found.AlgoGetHeuristic, "cublasLtMatmulAlgoGetHeuristic");
    library.Find(found.MatmulDescCreate, "cublasLtMatmulDescCreate");
    library.Find(found.MatmulDescDestroy, "cublasLtMatmulDescDestroy");
    library.Find(found.MatmulDescSetAttribute, "cublasLtMatmulDescSetAttribute");
    library.Find(found.MatrixLayoutCreate, "cublasLtMatrixLayoutCreate");
    library.Find(found.MatrixLayoutDestroy, "cublasLtMatrixLayoutDestroy");
    library.Find(found.MatmulPreferenceCreate, "cublasLtMatmulPreferenceCreate");
    library.Find(found.MatmulPreferenceDestroy, "cublasLtMatmulPreferenceDestroy");
    library.Find(found.MatmulPreferenceSetAttribute, "cublasLtMatmulPreferenceSetAttribute");
    return found;
  }();
  return api;
}

}  // namespace nn::cublas
