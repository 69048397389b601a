// Makes sure that all ranks are about to train the same model.
#ifndef LIBDDP_REDUCER_VERIFY_H_
#define LIBDDP_REDUCER_VERIFY_H_

#include <vector>

#include "absl/status/status.h"
#include "ddp/distributed_data_parallel.h"
#include "ddp/process_group.h"

namespace ddp {

// Collective. Checks each rank's parameters by themselves (InvalidArgument names the rank, the parameter and the
// remedy), then that all ranks have the same (FailedPrecondition names the first parameter or option that differs, the
// ranks and both sides). Fails on all ranks if on one.
absl::Status VerifyParameters(ProcessGroup& group, const std::vector<Parameter>& parameters, const DdpOptions& options);

}  // namespace ddp

#endif  // LIBDDP_REDUCER_VERIFY_H_
