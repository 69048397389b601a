// SPDX-License-Identifier: Apache-2.0
#include "examples/nn/cudnn.h"

#include "absl/strings/str_cat.h"
#include "examples/nn/shared_library.h"

namespace nn::cudnn {

const Api& Load() {
  static const Api api = [] {
    const SharedLibrary library(absl::StrCat("libcudnn.so.", CUDNN_MAJOR), "cuDNN",
                                absl::StrCat("install the cudnn", CUDNN_MAJOR, " package for this CUDA"));
    Api found;
    library.Find(found.Create, "cudnnCreate");
    library.Find(found.Destroy, "cudnnDestroy");
    library.Find(found.SetStream, "cudnnSetStream");
    library.Find(found.GetErrorString, "cudnnGetErrorString");
    library.Find(found.GetVersion, "cudnnGetVersion");
    library.Find(found.CreateDescriptor, "cudnnBackendCreateDescriptor");
    library.Find(found.DestroyDescriptor, "cudnnBackendDestroyDescriptor");
    library.Find(found.SetAttribute, "cudnnBackendSetAttribute");
    library.Find(found.GetAttribute, "cudnnBackendGetAttribute");
    library.Find(found.Finalize, "cudnnBackendFinalize");
    library.Find(found.Execute, "cudnnBackendExecute");
    return found;
  }();
  return api;
}

}  // namespace nn::cudnn
