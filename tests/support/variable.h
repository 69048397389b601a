// SPDX-License-Identifier: Apache-2.0
// Environment variables for a test's own process.
#ifndef TESTS_SUPPORT_VARIABLE_H_
#define TESTS_SUPPORT_VARIABLE_H_

#include <cstdlib>
#include <string>

namespace ddp::testing {

// Sets a variable while it lives.
class Variable {
 public:
  Variable(const char* name, const std::string& value) : name_(name) { setenv(name, value.c_str(), 1); }
  ~Variable() { unsetenv(name_); }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;

 private:
  const char* const name_;
};

}  // namespace ddp::testing

#endif  // TESTS_SUPPORT_VARIABLE_H_
