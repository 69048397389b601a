// Contracts of the example layers: a caller's mistake ends the program with a line that says which condition failed and
// where.
#ifndef EXAMPLES_NN_CHECK_H_
#define EXAMPLES_NN_CHECK_H_

namespace nn::internal {
[[noreturn]] void CheckFailed(const char* condition, const char* file, int line);
}  // namespace nn::internal

#define NN_CHECK(condition) ((condition) ? void() : ::nn::internal::CheckFailed(#condition, __FILE__, __LINE__))

#endif  // EXAMPLES_NN_CHECK_H_
