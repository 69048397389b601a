// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/base/counted_work.h"

#include <utility>

namespace ddp {
namespace {

// A call that was refused. Only the Work owns it.
class RefusedWork final : public CountedWork {
 public:
  explicit RefusedWork(absl::Status error) {
    Finish(std::move(error));
    Unref();
  }

  absl::Status Wait(absl::Time) override { return status(); }
  absl::Status CallStatus() const override { return status(); }
};

}  // namespace

Work::Work(absl::Status error) : state_(error.ok() ? nullptr : new RefusedWork(std::move(error))) {}

}  // namespace ddp
