// SPDX-License-Identifier: Apache-2.0
// What the tests of all stores have in common: the contract, and helpers.
#ifndef TESTS_UNIT_STORE_CONTRACT_H_
#define TESTS_UNIT_STORE_CONTRACT_H_

#include <sys/types.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "ddp/store.h"
#include "tests/support/temporary_folder.h"

namespace ddp {

inline absl::Time Soon() { return absl::Now() + absl::Seconds(60); }

class Folder : public testing::TemporaryFolder {
 public:
  std::string File(const std::string& name = "store") const { return TemporaryFolder::File(name); }
};

// Runs `body` in a child process; it may not use Catch2.
pid_t Spawn(const std::function<bool()>& body);
bool Succeeded(pid_t child);

void CheckStatus(const absl::Status& status, absl::StatusCode code, const std::vector<std::string>& parts);

// The contract, for every kind. `open` gives what one rank uses.
void CheckContract(const std::function<std::shared_ptr<Store>()>& open);

// Threads add at once, some through the same object: every total appears exactly once.
void CheckThreads(const std::function<std::shared_ptr<Store>()>& open);

}  // namespace ddp

#endif  // TESTS_UNIT_STORE_CONTRACT_H_
