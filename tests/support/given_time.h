// SPDX-License-Identifier: Apache-2.0
// What has a limit of time, on a machine that may be busy.
#ifndef TESTS_SUPPORT_GIVEN_TIME_H_
#define TESTS_SUPPORT_GIVEN_TIME_H_

#include <type_traits>
#include <utility>

#include "absl/time/time.h"

namespace ddp::testing {

// What `run` makes of a limit in which it comes to a certain point; or of longer ones where it does not, as what it
// gives is not `good`: a busy machine may stop it for seconds.
template <typename Run, typename Good>
std::invoke_result_t<Run, absl::Duration> GivenTime(absl::Duration limit, const Run& run, const Good& good) {
  auto result = run(limit);
  return good(result) || limit > absl::Seconds(4) ? std::move(result) : GivenTime(4 * limit, run, good);
}

}  // namespace ddp::testing

#endif  // TESTS_SUPPORT_GIVEN_TIME_H_
