// Matrix products of the GPU's layers, with what cuBLASLt can do in the same pass.
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

// Throws DeviceError unless it is success.
void Check(cudaError_t error, const char* call);
void Check(cublasStatus_t status, const char* call);

// What the products of one GPU share. Not thread-safe.
struct MatmulContext {
  MatmulContext(cudaStream_t stream_, Element element_, bool tf32_);
  ~MatmulContext();
  MatmulContext(const MatmulContext&) = delete;
  MatmulContext& operator=(const MatmulContext&) = delete;

  const cublas::Api& api;
  cublasLtHandle_t handle = nullptr;
  cudaStream_t stream;
  Element element;  // of factors
  bool tf32;
  void* workspace = nullptr;
  static constexpr size_t kWorkspaceBytes = size_t{32} << 20;
};

// A matrix in column-major order: `rows` by `columns`, a column every `rows` elements.
struct Operand {
  int rows, columns;
  bool transposed = false;  // used as its transpose
};

// d = epilogue(a b) (or, with `accumulate`, d + a b), summed in float32, planned once. The factors have the context's
// type; d, with whatever vector belongs to it, has its own. The epilogues are cuBLASLt's:
//   BIAS           a vector is added to every column of d
//   RELU_AUX_BIAS  and then max(0, .) is taken; which elements were above 0 is kept as a mask of bits
//   DRELU          elements of d whose bit in such a mask is 0 become 0
//   BGRADB         the sums of b's columns (as it is in memory, of its rows if transposed) are stored beside
class Matmul {
 public:
  Matmul(MatmulContext& context, const Operand& a, const Operand& b, Element d, cublasLtEpilogue_t epilogue,
         bool accumulate = false);
  ~Matmul();
  Matmul(const Matmul&) = delete;
  Matmul& operator=(const Matmul&) = delete;

  // Whether this GPU's cuBLASLt can do it. If not, Run may not be called.
  bool supported() const { return supported_; }

  // `vector`: the bias, read or written; `mask`: written or read. Null where the epilogue has none.
  void Run(const void* a, const void* b, void* d, const void* vector, const void* mask);

  // Bytes of a mask for a d of so many rows and columns; a row's bits begin at a multiple of 16 bytes.
  static size_t MaskBytes(int rows, int columns);

 private:
  MatmulContext& context_;
  cublasLtMatmulDesc_t desc_ = nullptr;
  cublasLtMatrixLayout_t a_ = nullptr, b_ = nullptr, d_ = nullptr;
  cublasLtMatmulAlgo_t algorithm_ = {};
  bool supported_ = false;
  float beta_;
  const void* vector_ = nullptr;  // as the description has it
  const void* mask_ = nullptr;
};

}  // namespace nn::cuda

#endif  // EXAMPLES_NN_CUDA_MATMUL_H_
