// What groups offer one another beyond what programs see.
#ifndef LIBDDP_COMM_BASE_INTERNAL_GROUP_H_
#define LIBDDP_COMM_BASE_INTERNAL_GROUP_H_

#include "absl/status/status.h"
#include "ddp/process_group.h"

namespace ddp {

class InternalGroup : public ProcessGroup {
 public:
  // As Abort, except that `why` itself becomes the cause of failure. Any thread.
  virtual void Fail(const absl::Status& why) = 0;
};

}  // namespace ddp

#endif  // LIBDDP_COMM_BASE_INTERNAL_GROUP_H_
