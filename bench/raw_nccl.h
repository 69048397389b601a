// NCCL without the library: the floor under whatever wraps it.
#ifndef BENCH_RAW_NCCL_H_
#define BENCH_RAW_NCCL_H_

#include <cuda_runtime_api.h>

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "ddp/process_group.h"
#include "libddp/comm/nccl/api.h"

namespace bench {

// A communicator of its own over the ranks of `group`, which only carries its id.
class RawNccl {
 public:
  // Collective. `bytes`: of the largest call. `windows`: on window-registered memory as well.
  static absl::StatusOr<std::unique_ptr<RawNccl>> Create(ddp::ProcessGroup& group, size_t bytes, bool windows);
  ~RawNccl();

  // 0: cudaMalloc's memory; 1: ncclMemAlloc's, registered in a symmetric window. What is sent from registered memory
  // has to be received in such, or NCCL hangs: all_to_all is called on the first kind only.
  int kinds(const std::string& op) const { return windowed_ == nullptr || op == "all_to_all" ? 1 : 2; }

  // One call, in place where the operation has a place. Ends the program where NCCL fails.
  void Call(int kind, const std::string& op, size_t bytes, cudaStream_t stream);

 private:
  RawNccl() = default;
  void Check(ddp::nccl::Result result, const char* call) const;

  ddp::nccl::Api api_;
  ddp::nccl::Comm comm_ = nullptr;
  ddp::nccl::Window window_ = nullptr;
  int rank_ = 0;
  size_t ranks_ = 1;
  char *plain_ = nullptr, *windowed_ = nullptr, *other_ = nullptr;
};

}  // namespace bench

#endif  // BENCH_RAW_NCCL_H_
