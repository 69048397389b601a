// SPDX-License-Identifier: Apache-2.0
// Calls of the program's code, which may throw.
#ifndef LIBDDP_REDUCER_WITHOUT_EXCEPTIONS_H_
#define LIBDDP_REDUCER_WITHOUT_EXCEPTIONS_H_

#include <exception>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace ddp {

// What fn() returns, or what it threw as an error. where(): whose code it is.
template <typename Where, typename Fn>
auto WithoutExceptions(const Where& where, Fn&& fn) -> decltype(fn()) {
  try {
    return fn();
  } catch (const std::exception& e) {
    return absl::UnknownError(absl::StrCat(where(), " threw: ", e.what()));
  } catch (...) {
    return absl::UnknownError(absl::StrCat(where(), " threw something that is no std::exception"));
  }
}

}  // namespace ddp

#endif  // LIBDDP_REDUCER_WITHOUT_EXCEPTIONS_H_
