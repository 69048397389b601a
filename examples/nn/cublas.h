// cuBLASLt, loaded when the first GPU is opened: a program that was built with it starts, and computes on the CPU,
// where it is missing, and no CPU run maps its half a gigabyte.
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

// Throws DeviceError where it cannot be loaded.
const Api& Load();

}  // namespace nn::cublas

#endif  // EXAMPLES_NN_CUBLAS_H_
