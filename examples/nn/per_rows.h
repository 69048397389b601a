// SPDX-License-Identifier: Apache-2.0
// Plans for each number of rows, created at the first use: for full batches and a smaller last one.
#ifndef EXAMPLES_NN_PER_ROWS_H_
#define EXAMPLES_NN_PER_ROWS_H_

#include <map>
#include <memory>

#include "absl/functional/function_ref.h"

namespace nn {

template <typename Plan>
class PerRows {
 public:
  Plan& Get(int rows, absl::FunctionRef<std::unique_ptr<Plan>()> make) {
    std::unique_ptr<Plan>& plan = plans_[rows];
    if (plan == nullptr) plan = make();
    return *plan;
  }

 private:
  std::map<int, std::unique_ptr<Plan>> plans_;
};

}  // namespace nn

#endif  // EXAMPLES_NN_PER_ROWS_H_
