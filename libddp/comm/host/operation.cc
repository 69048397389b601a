// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/host/operation.h"

#include "absl/strings/str_cat.h"
#include "libddp/comm/host/engine.h"
#include "libddp/comm/host/run.h"

namespace ddp {

Operation::Operation(Engine* engine, const OperationKey& key) : engine_(engine), key_(key) {}
Operation::~Operation() = default;

absl::Status Operation::Wait(absl::Time deadline) {
  if (Done()) return status();
  return engine_->Wait(
      *this, [this] { return called.key.Describe(called.count); }, deadline);
}

std::string Operation::Describe() const {
  return absl::StrCat("operation ", number(), ", ", called.key.Describe(called.count),
                      bucket < 0 ? "" : absl::StrCat(", bucket ", bucket));
}

}  // namespace ddp
