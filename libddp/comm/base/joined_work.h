// SPDX-License-Identifier: Apache-2.0
// Several operations as one.
#ifndef LIBDDP_COMM_BASE_JOINED_WORK_H_
#define LIBDDP_COMM_BASE_JOINED_WORK_H_

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "ddp/process_group.h"

namespace ddp {

// Memory of operations that are not done, although their callers have dropped the Works. A group has one, and keeps it
// until its operations have ended.
class OrphanedMemory {
 public:
  // Also frees what is no longer needed.
  void Keep(std::vector<Work> works, std::shared_ptr<const void> memory);

 private:
  std::mutex mutex_;
  std::vector<std::pair<std::vector<Work>, std::shared_ptr<const void>>> kept_;
};

// Done when all are; its outcome is the first error, in their order. `memory` lives until then, with `orphans` to keep
// it if the result is dropped.
Work JoinWorks(std::vector<Work> works, std::shared_ptr<const void> memory = nullptr,
               std::shared_ptr<OrphanedMemory> orphans = nullptr);

}  // namespace ddp

#endif  // LIBDDP_COMM_BASE_JOINED_WORK_H_
