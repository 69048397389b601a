// SPDX-License-Identifier: Apache-2.0
#include "libddp/base/descriptors.h"

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace ddp {

absl::Status OutOfDescriptors(absl::string_view call, int error) {
  if (error != EMFILE && error != ENFILE) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat(call, ": ", std::strerror(error), "; raise ulimit -n, or keep fewer groups and allocations"));
}

}  // namespace ddp
