// SPDX-License-Identifier: Apache-2.0
// Makes sure that all ranks are about to train the same model in the same way.
#ifndef LIBDDP_REDUCER_VERIFY_H_
#define LIBDDP_REDUCER_VERIFY_H_

#include <vector>

#include "absl/status/status.h"
#include "ddp/distributed_data_parallel.h"
#include "ddp/process_group.h"

namespace ddp {

// Collective. Checks each rank's parameters and options by themselves (InvalidArgument names the rank, the parameter or
// option and the remedy), then that all ranks have the same (FailedPrecondition names the first option or parameter
// that differs, the ranks and both sides). `mine` is an error that this rank has found already. Fails on all ranks if
// on one.
absl::Status VerifyModel(ProcessGroup& group, const std::vector<Parameter>& parameters, const DdpOptions& options,
                         const absl::Status& mine = absl::OkStatus());

}  // namespace ddp

#endif  // LIBDDP_REDUCER_VERIFY_H_
