// SPDX-License-Identifier: Apache-2.0
// PyTorch's rendezvous store as libddp's.
#ifndef DDP_PYTHON_SRC_C10D_STORE_H_
#define DDP_PYTHON_SRC_C10D_STORE_H_

#include <cstdint>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "ddp/store.h"

namespace ddp_torch {

// Uses a connection of its own if the store can be cloned, so that a waiting rank does not lock the program's out.
class C10dStore : public ddp::Store {
 public:
  explicit C10dStore(const c10::intrusive_ptr<c10d::Store>& store);

  absl::Status Set(absl::string_view key, absl::string_view value, absl::Time deadline) override;
  absl::StatusOr<std::string> Get(absl::string_view key, absl::Time deadline) override;
  absl::StatusOr<int64_t> Add(absl::string_view key, int64_t delta, absl::Time deadline) override;

 private:
  c10::intrusive_ptr<c10d::Store> store_;
};

}  // namespace ddp_torch

#endif  // DDP_PYTHON_SRC_C10D_STORE_H_
