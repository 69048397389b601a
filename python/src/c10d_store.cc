// SPDX-License-Identifier: Apache-2.0
#include "c10d_store.h"

#include <algorithm>
#include <cstdint>
#include <exception>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace ddp_torch {
namespace {

// Between two looks at a key. Looks that come to nothing become rarer.
constexpr absl::Duration kLeastPause = absl::Milliseconds(1), kMostPause = absl::Milliseconds(50);
constexpr int kPausesBefore = 8;  // as many as have passed

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

// By looks: the store's own wait prints two warnings where it ends in vain, and ends up to a millisecond early.
absl::StatusOr<std::string> C10dStore::Get(absl::string_view key, absl::Time deadline) try {
  const std::string name(key);
  const absl::Time begin = absl::Now();
  while (!store_->check({name})) {
    const absl::Time now = absl::Now();
    if (now >= deadline) {
      return absl::DeadlineExceededError(absl::StrCat("no rank has set the key ", key, " in PyTorch's store in time"));
    }
    absl::SleepFor(std::min(std::clamp((now - begin) / kPausesBefore, kLeastPause, kMostPause), deadline - now));
  }
  const std::vector<uint8_t> value = store_->get(name);
  return std::string(value.begin(), value.end());
} catch (const std::exception& e) {
  return absl::UnavailableError(absl::StrCat("PyTorch's store cannot be asked for the key ", key, ": ", e.what()));
}

absl::StatusOr<int64_t> C10dStore::Add(absl::string_view key, int64_t delta, absl::Time /*deadline*/) try {
  return store_->add(std::string(key), delta);
} catch (const std::exception& e) {
  return absl::UnavailableError(absl::StrCat("PyTorch's store did not add to the key ", key, ": ", e.what()));
}

}  // namespace ddp_torch
