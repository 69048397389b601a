// SPDX-License-Identifier: Apache-2.0
// What every store takes.
#ifndef LIBDDP_LAUNCH_STORE_LIMITS_H_
#define LIBDDP_LAUNCH_STORE_LIMITS_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace ddp {

inline constexpr size_t kMaxStoreKey = size_t{1} << 10;  // also of the run id
inline constexpr size_t kMaxStoreValue = size_t{16} << 20;

// Of a call with this key and value. `store`: its name, for the error.
inline absl::Status CheckStoreLimits(absl::string_view store, absl::string_view key, size_t value_size) {
  if (key.size() <= kMaxStoreKey && value_size <= kMaxStoreValue) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(std::string(store), ": a key of ", key.size(),
                                                 " bytes with a value of ", value_size, " bytes; at most ",
                                                 kMaxStoreKey, " and ", kMaxStoreValue, " are possible"));
}

// What the counter at `key`, now `total`, is after an Add. OutOfRange if that is no int64_t.
inline absl::StatusOr<int64_t> CounterAfterAdd(absl::string_view store, absl::string_view key, int64_t total,
                                               int64_t delta) {
  int64_t sum = 0;
  if (!__builtin_add_overflow(total, delta, &sum)) return sum;
  return absl::OutOfRangeError(absl::StrCat(std::string(store), ": the counter at key '", key, "' is ", total,
                                            " and stays so, as an int64_t cannot hold it plus ", delta,
                                            "; add less, or count at another key"));
}

}  // namespace ddp

#endif  // LIBDDP_LAUNCH_STORE_LIMITS_H_
