// SPDX-License-Identifier: Apache-2.0
// Matrix products of the GPU's layers, with the further operations that cuBLASLt can do in the same pass.
#ifndef EXAMPLES_NN_CUDA_MATMUL_H_
#define EXAMPLES_NN_CUDA_MATMUL_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "examples/nn/cublas.h"
#include "examples/nn/element.h"

namespace nn::cuda {

// Throws DeviceError if the call has failed.
void Check(cudaError_t error, const char* call);
void Check(cublasStatus_t status, const char* call);

// The state that all products of one GPU share. Not thread-safe.
struct MatmulContext {
  MatmulContext(cudaStream_t stream_, Element element_, bool tf32_);
  ~MatmulContext();
  MatmulContext(const MatmulContext&) = delete;
  MatmulContext& operator=(const MatmulContext&) = delete;

  const cublas::Api& api;
  cublasLtHandle_t handle = nullptr;
  cudaStream_t stream;
  Element element;  // type of factors
  bool tf32;
  void* workspace = nullptr;
  static constexpr size_t kWorkspaceBytes = size_t{32} << 20;
};

// A matrix in column-major order: `rows` by `columns`; a column starts every `rows` elements.
struct Operand {
  int rows, columns;
  bool transposed = false;  // the product uses its transpose
};

// Computes d = epilogue(a b), or d + a b with `accumulate`. Sums are float32. Planned once. The factors have the
// context's type; d and its vector have the type of d. The epilogues are those of cuBLASLt:
//   BIAS           adds a vector to every column of d
//   RELU_AUX_BIAS  adds the vector and applies max(0, .); stores a bit mask of the elements above 0
//   DRELU          sets elements of d to 0 if their bit in such a mask is 0
//   BGRADB         also stores the sums of the columns of b as it is in memory (of its rows if transposed)
class Matmul {
 public:
  Matmul(MatmulContext& context, const Operand& a, const Operand& b, Element d, cublasLtEpilogue_t epilogue,
         bool accumulate = false);
  ~Matmul();
  Matmul(const Matmul&) = delete;
  Matmul& operator=(const Matmul&) = delete;

  // True if cuBLASLt supports it on this GPU. If false, do not call Run.
  bool supported() const { return supported_; }

  // `vector`: the bias, which is read or written. `mask`: written or read. Null if the epilogue has none.
  void Run(const void* a, const void* b, void* d, const void* vector, const void* mask);

  // Returns the bytes of a mask for a d of this size. The bits of a row start at a multiple of 16 bytes.
  static size_t MaskBytes(int rows, int columns);

 private:
  MatmulContext& context_;
  cublasLtMatmulDesc_t desc_ = nullptr;
  cublasLtMatrixLayout_t a_ = nullptr, b_ = nullptr, d_ = nullptr;
  cublasLtMatmulAlgo_t algorithm_ = {};
  bool supported_ = false;
  float beta_;
  const void* vector_ = nullptr;  // the one that is set in the description
  const void* mask_ = nullptr;
};

}  // namespace nn::cuda

#endif  // EXAMPLES_NN_CUDA_MATMUL_H_
