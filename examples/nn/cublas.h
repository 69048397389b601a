// SPDX-License-Identifier: Apache-2.0
// cuBLASLt, loaded when the first GPU is opened. So a program that was built with it also runs on the CPU without it,
// and a run on the CPU does not map its half a gigabyte.
#ifndef EXAMPLES_NN_CUBLAS_H_
#define EXAMPLES_NN_CUBLAS_H_

#include <cublasLt.h>

namespace nn::cublas {

struct Api {
  decltype(&cublasLtCreate) Create;
  decltype(&cublasLtDestroy) Destroy;
  decltype(&cublasLtMatmul) Matmul;
  decltype(&cublasLtMatmulAlgoGetHeuristic) AlgoGetHeuristic;
  decltype(&cublasLtMatmulDescCreate) MatmulDescCreate;
  decltype(&cublasLtMatmulDescDestroy) MatmulDescDestroy;
  decltype(&cublasLtMatmulDescSetAttribute) MatmulDescSetAttribute;
  decltype(&cublasLtMatrixLayoutCreate) MatrixLayoutCreate;
  decltype(&cublasLtMatrixLayoutDestroy) MatrixLayoutDestroy;
  decltype(&cublasLtMatmulPreferenceCreate) MatmulPreferenceCreate;
  decltype(&cublasLtMatmulPreferenceDestroy) MatmulPreferenceDestroy;
  decltype(&cublasLtMatmulPreferenceSetAttribute) MatmulPreferenceSetAttribute;
};

// Throws DeviceError if it cannot be loaded.
const Api& Load();

}  // namespace nn::cublas

#endif  // EXAMPLES_NN_CUBLAS_H_
