#include "examples/nn/cublas.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "examples/nn/device.h"

namespace nn::cublas {
namespace {

Api LoadFrom(const std::string& name) {
  void* const library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    throw DeviceError(absl::StrCat("cuBLAS cannot be loaded: ", dlerror(), "; install the libcublas package of CUDA ",
                                   CUDART_VERSION / 1000, ", or name its folder in LD_LIBRARY_PATH"));
  }
  const auto find = [&](auto& function, const char* symbol) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, symbol));
    if (function == nullptr) throw DeviceError(absl::StrCat(name, " has no ", symbol, "; install another version"));
  };
  Api api;
  find(api.Create, "cublasLtCreate");
  find(api.Destroy, "cublasLtDestroy");
  find(api.Matmul, "cublasLtMatmul");
  find(api.AlgoGetHeuristic, "cublasLtMatmulAlgoGetHeuristic");
  find(api.MatmulDescCreate, "cublasLtMatmulDescCreate");
  find(api.MatmulDescDestroy, "cublasLtMatmulDescDestroy");
  find(api.MatmulDescSetAttribute, "cublasLtMatmulDescSetAttribute");
  find(api.MatrixLayoutCreate, "cublasLtMatrixLayoutCreate");
  find(api.MatrixLayoutDestroy, "cublasLtMatrixLayoutDestroy");
  find(api.MatmulPreferenceCreate, "cublasLtMatmulPreferenceCreate");
  find(api.MatmulPreferenceDestroy, "cublasLtMatmulPreferenceDestroy");
  find(api.MatmulPreferenceSetAttribute, "cublasLtMatmulPreferenceSetAttribute");
  return api;
}

}  // namespace

const Api& Load() {
  static const Api api = LoadFrom(absl::StrCat("libcublasLt.so.", CUDART_VERSION / 1000));
  return api;
}

}  // namespace nn::cublas
