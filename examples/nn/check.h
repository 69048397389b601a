// SPDX-License-Identifier: Apache-2.0
// Checks in the example layers: a mistake of the caller ends the program with a line that names the failed condition
// and its place.
#ifndef EXAMPLES_NN_CHECK_H_
#define EXAMPLES_NN_CHECK_H_

namespace nn::internal {
[[noreturn]] void CheckFailed(const char* condition, const char* file, int line);
}  // namespace nn::internal

#define NN_CHECK(condition) ((condition) ? void() : ::nn::internal::CheckFailed(#condition, __FILE__, __LINE__))

#endif  // EXAMPLES_NN_CHECK_H_
