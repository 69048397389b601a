// SPDX-License-Identifier: Apache-2.0
// Functions of libraries that may be missing.
#ifndef EXAMPLES_TRAIN_LIBRARY_H_
#define EXAMPLES_TRAIN_LIBRARY_H_

#include <dlfcn.h>

namespace examples {

// Function `name` of a library, or null; without a library, of those that this program is linked with. The library is
// never unloaded.
template <class Function>
Function* FindFunction(const char* library, const char* name) {
  void* const handle = library == nullptr ? RTLD_DEFAULT : dlopen(library, RTLD_LAZY | RTLD_LOCAL);
  if (handle == nullptr && library != nullptr) return nullptr;
  return reinterpret_cast<Function*>(dlsym(handle, name));
}

}  // namespace examples

#endif  // EXAMPLES_TRAIN_LIBRARY_H_
