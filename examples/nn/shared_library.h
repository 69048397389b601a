// SPDX-License-Identifier: Apache-2.0
// A library that is loaded at run time, only if it is needed. So a program that was built with it also runs on the CPU
// without it.
#ifndef EXAMPLES_NN_SHARED_LIBRARY_H_
#define EXAMPLES_NN_SHARED_LIBRARY_H_

#include <dlfcn.h>

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "examples/nn/device.h"

namespace nn {

// The library is never unloaded. Throws DeviceError if the library or a function is missing.
class SharedLibrary {
 public:
  // `file`: "libcudnn.so.9"; `name`: "cuDNN"; `remedy`: "install ..."
  SharedLibrary(std::string file, const std::string& name, const std::string& remedy)
      : file_(std::move(file)), library_(dlopen(file_.c_str(), RTLD_NOW | RTLD_LOCAL)) {
    if (library_ != nullptr) return;
    throw DeviceError(
        absl::StrCat(name, " cannot be loaded: ", dlerror(), "; ", remedy, ", or name its folder in LD_LIBRARY_PATH"));
  }

  template <class Function>
  void Find(Function& function, const char* symbol) const {
    function = reinterpret_cast<Function>(dlsym(library_, symbol));
    if (function == nullptr) throw DeviceError(absl::StrCat(file_, " has no ", symbol, "; install another version"));
  }

 private:
  std::string file_;
  void* library_;
};

}  // namespace nn

#endif  // EXAMPLES_NN_SHARED_LIBRARY_H_
