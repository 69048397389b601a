// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/gpu/device_operation.h"

#include "absl/strings/str_cat.h"

namespace ddp {

std::string DeviceOperation::Describe() const {
  if (message == nullptr) {
    return absl::StrCat(key.Describe(entry.count), bucket < 0 ? "" : absl::StrCat(", bucket ", bucket));
  }
  return absl::StrCat(message, "(", std::string(Name(key.in)), ", ", entry.count, " elements, rank ", peer, ", tag ",
                      tag, ")");
}

}  // namespace ddp
