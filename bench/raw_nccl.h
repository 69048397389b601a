// SPDX-License-Identifier: Apache-2.0
// NCCL without the library: the floor under whatever wraps it.
#ifndef BENCH_RAW_NCCL_H_
#define BENCH_RAW_NCCL_H_

#include <cuda_runtime_api.h>

#include <memory>

#include "absl/status/statusor.h"
#include "bench/collective.h"
#include "ddp/process_group.h"
#include "libddp/comm/nccl/api.h"

namespace bench {

// A communicator of its own over the ranks of `group`, which only carries its id.
class RawNccl {
 public:
  // Collective. `bytes`: of the largest call. `windows`: on window-registered memory as well.
  static absl::StatusOr<std::unique_ptr<RawNccl>> Create(ddp::ProcessGroup& group, size_t bytes, bool windows);
  ~RawNccl();

  // How many kinds of memory the case can use: 0 is cudaMalloc's; 1 is ncclMemAlloc's, registered in a symmetric
  // window, where both buffers have to be. 0 kinds: NCCL has no such operation.
  int Kinds(const Case& c) const;

  // One call. Ends the program where NCCL fails.
  void Call(int kind, const Case& c, cudaStream_t stream);

 private:
  RawNccl() = default;
  void Check(ddp::nccl::Result result, const char* call) const;

  ddp::nccl::Api api_;
  ddp::nccl::Comm comm_ = nullptr;
  ddp::nccl::Window windows_[2] = {};
  char *plain_[2] = {}, *windowed_[2] = {};  // input and output
};

}  // namespace bench

#endif  // BENCH_RAW_NCCL_H_
