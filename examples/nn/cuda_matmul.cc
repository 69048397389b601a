// SPDX-License-Identifier: Apache-2.0
#include "examples/nn/cuda_matmul.h"

#include "absl/strings/str_cat.h"
#include "examples/nn/device.h"

namespace nn::cuda {
namespace {

cudaDataType TypeOf(Element element) { return NameOf(element, CUDA_R_32F, CUDA_R_16F, CUDA_R_16BF); }

int64_t MaskColumn(int rows) { return (int64_t{rows} + 127) / 128 * 128; }  // bits

}  // namespace

void Check(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  cudaGetLastError();
  throw DeviceError(absl::StrCat(call, ": ", cudaGetErrorString(error), " (", cudaGetErrorName(error), ")",
                                 error == cudaErrorMemoryAllocation
                                     ? "; nvidia-smi shows who uses the GPU's memory: give a smaller model or --batch"
                                     : ""));
}

void Check(cublasStatus_t status, const char* call) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  throw DeviceError(absl::StrCat(call, " failed with status ", static_cast<int>(status),
                                 "; CUBLASLT_LOG_LEVEL=1 makes cuBLAS say why"));
}

MatmulContext::MatmulContext(cudaStream_t stream_, Element element_, bool tf32_)
    : api(cublas::Load()), stream(stream_), element(element_), tf32(tf32_) {
  Check(api.Create(&handle), "cublasLtCreate");
  Check(cudaMalloc(&workspace, kWorkspaceBytes), "cudaMalloc");
}

MatmulContext::~MatmulContext() {
  cudaFree(workspace);
  if (handle != nullptr) api.Destroy(handle);
}

size_t Matmul::MaskBytes(int rows, int columns) {
  return static_cast<size_t>(MaskColumn(rows) / 8) * static_cast<size_t>(columns);
}

Matmul::Matmul(MatmulContext& context, const Operand& a, const Operand& b, Element d, cublasLtEpilogue_t epilogue,
               bool accumulate)
    : context_(context), beta_(accumulate ? 1.0f : 0.0f) {
  const cublas::Api& api = context.api;
  const int rows = a.transposed ? a.columns : a.rows, columns = b.transposed ? b.rows : b.columns;
  const bool tf32 = context.tf32 && context.element == Element::kFloat32;
  Check(api.MatmulDescCreate(&desc_, tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F, CUDA_R_32F),
        "cublasLtMatmulDescCreate");
  const auto set = [&](cublasLtMatmulDescAttributes_t attribute, const auto& value) {
    Check(api.MatmulDescSetAttribute(desc_, attribute, &value, sizeof value), "cublasLtMatmulDescSetAttribute");
  };
  const cublasOperation_t as_is = CUBLAS_OP_N, transpose = CUBLAS_OP_T;
  set(CUBLASLT_MATMUL_DESC_TRANSA, a.transposed ? transpose : as_is);
  set(CUBLASLT_MATMUL_DESC_TRANSB, b.transposed ? transpose : as_is);
  set(CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue);
  if (epilogue == CUBLASLT_EPILOGUE_RELU_AUX_BIAS || epilogue == CUBLASLT_EPILOGUE_DRELU) {
    set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, MaskColumn(rows));
  }
  const auto layout = [&](cublasLtMatrixLayout_t* matrix, Element element, int height, int width) {
    Check(api.MatrixLayoutCreate(matrix, TypeOf(element), static_cast<uint64_t>(height), static_cast<uint64_t>(width),
                                 height),
          "cublasLtMatrixLayoutCreate");
  };
  layout(&a_, context.element, a.rows, a.columns);
  layout(&b_, context.element, b.rows, b.columns);
  layout(&d_, d, rows, columns);

  cublasLtMatmulPreference_t preference = nullptr;
  Check(api.MatmulPreferenceCreate(&preference), "cublasLtMatmulPreferenceCreate");
  const size_t workspace = MatmulContext::kWorkspaceBytes;
  Check(api.MatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace,
                                         sizeof workspace),
        "cublasLtMatmulPreferenceSetAttribute");
  cublasLtMatmulHeuristicResult_t best = {};
  int found = 0;
  const cublasStatus_t status =
      api.AlgoGetHeuristic(context.handle, desc_, a_, b_, d_, d_, preference, 1, &best, &found);
  api.MatmulPreferenceDestroy(preference);
  supported_ = status == CUBLAS_STATUS_SUCCESS && found > 0;
  if (supported_) algorithm_ = best.algo;
}

Matmul::~Matmul() {
  for (const cublasLtMatrixLayout_t layout : {a_, b_, d_}) {
    if (layout != nullptr) context_.api.MatrixLayoutDestroy(layout);
  }
  if (desc_ != nullptr) context_.api.MatmulDescDestroy(desc_);
}

void Matmul::Run(const void* a, const void* b, void* d, const void* vector, const void* mask) {
  const cublas::Api& api = context_.api;
  if (vector != vector_) {
    Check(api.MatmulDescSetAttribute(desc_, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &vector, sizeof vector),
          "cublasLtMatmulDescSetAttribute");
    vector_ = vector;
  }
  if (mask != mask_) {
    Check(api.MatmulDescSetAttribute(desc_, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, &mask, sizeof mask),
          "cublasLtMatmulDescSetAttribute");
    mask_ = mask;
  }
  const float one = 1;
  Check(api.Matmul(context_.handle, desc_, &one, a, a_, b, b_, &beta_, d, d_, d, d_, &algorithm_, context_.workspace,
                   MatmulContext::kWorkspaceBytes, context_.stream),
        "cublasLtMatmul");
}

}  // namespace nn::cuda
