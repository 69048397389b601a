// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/nccl/api.h"

namespace ddp::nccl {

absl::StatusOr<Api> Load() {
  return absl::UnimplementedError(
      "this build of libddp has no NCCL backend: configure with -DDDP_WITH_CUDA=ON -DDDP_WITH_NCCL=ON");
}

}  // namespace ddp::nccl
