// SPDX-License-Identifier: Apache-2.0
#include "c10d_store.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <exception>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

namespace ddp_torch {
namespace {

std::chrono::milliseconds Until(absl::Time deadline) {
  // PyTorch takes 0 for "no time-out".
  const absl::Duration left = std::clamp(deadline - absl::Now(), absl::Milliseconds(1), absl::Hours(24 * 365));
  return std::chrono::milliseconds(absl::ToInt64Milliseconds(left));
}

}  // namespace

C10dStore::C10dStore(const c10::intrusive_ptr<c10d::Store>& store) {
  try {
    store_ = store->clone();
  } catch (const std::exception&) {  // a store that a program has written in Python
    store_ = store;
  }
}

absl::Status C10dStore::Set(absl::string_view key, absl::string_view value, absl::Time /*deadline*/) try {
  store_->set(std::string(key), std::vector<uint8_t>(value.begin(), value.end()));
  return absl::OkStatus();
} catch (const std::exception& e) {
  return absl::UnavailableError(absl::StrCat("PyTorch's store did not take the key ", key, ": ", e.what()));
}

absl::StatusOr<std::string> C10dStore::Get(absl::string_view key, absl::Time deadline) try {
  const std::string name(key);
  try {
    store_->wait({name}, Until(deadline));
  } catch (const std::exception& e) {
    if (absl::Now() < deadline) throw;
    return absl::DeadlineExceededError(absl::StrCat("no rank has set the key ", key, " in PyTorch's store in time"));
  }
  const std::vector<uint8_t> value = store_->get(name);
  return std::string(value.begin(), value.end());
} catch (const std::exception& e) {
  return absl::UnavailableError(absl::StrCat("PyTorch's store has no key ", key, ": ", e.what()));
}

absl::StatusOr<int64_t> C10dStore::Add(absl::string_view key, int64_t delta, absl::Time /*deadline*/) try {
  return store_->add(std::string(key), delta);
} catch (const std::exception& e) {
  return absl::UnavailableError(absl::StrCat("PyTorch's store did not add to the key ", key, ": ", e.what()));
}

}  // namespace ddp_torch
