// Several operations as one.
#ifndef LIBDDP_COMM_BASE_JOINED_WORK_H_
#define LIBDDP_COMM_BASE_JOINED_WORK_H_

#include <memory>
#include <vector>

#include "ddp/process_group.h"

namespace ddp {

// Done when all are; its outcome is the first error, in their order. `memory` lives as long as the result.
Work JoinWorks(std::vector<Work> works, std::shared_ptr<const void> memory = nullptr);

}  // namespace ddp

#endif  // LIBDDP_COMM_BASE_JOINED_WORK_H_
