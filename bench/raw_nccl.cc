#include "bench/raw_nccl.h"

#include <utility>

#include "bench/cuda_check.h"

namespace bench {

namespace nccl = ddp::nccl;

absl::StatusOr<std::unique_ptr<RawNccl>> RawNccl::Create(ddp::ProcessGroup& group, size_t bytes, bool windows) {
  std::unique_ptr<RawNccl> raw(new RawNccl);
  absl::StatusOr<nccl::Api> api = nccl::Load();
  if (!api.ok()) return api.status();
  raw->api_ = *api;
  raw->rank_ = group.rank();
  raw->ranks_ = static_cast<size_t>(group.size());
  nccl::UniqueId id = {};
  if (group.rank() == 0) raw->Check(raw->api_.GetUniqueId(&id), "ncclGetUniqueId");
  const ddp::Buffer buffer{id.internal, sizeof id.internal, ddp::DType::kUInt8, {}};
  ddp::Work work = group.Broadcast(buffer, 0);
  if (absl::Status s = work.Wait(); !s.ok()) return s;
  nccl::Config config;
  raw->Check(raw->api_.CommInitRankConfig(&raw->comm_, group.size(), id, group.rank(), &config),
             "ncclCommInitRankConfig");
  BENCH_CUDA(cudaMalloc(reinterpret_cast<void**>(&raw->plain_), bytes));
  BENCH_CUDA(cudaMalloc(reinterpret_cast<void**>(&raw->other_), bytes));
  BENCH_CUDA(cudaMemset(raw->plain_, 0, bytes));
  if (!windows || raw->api_.CommWindowRegister == nullptr) return raw;
  void* memory = nullptr;
  raw->Check(raw->api_.MemAlloc(&memory, bytes), "ncclMemAlloc");
  BENCH_CUDA(cudaMemset(memory, 0, bytes));
  raw->Check(raw->api_.CommWindowRegister(raw->comm_, memory, bytes, &raw->window_, nccl::kWinCollSymmetric),
             "ncclCommWindowRegister");
  raw->windowed_ = static_cast<char*>(memory);
  return raw;
}

RawNccl::~RawNccl() {
  if (window_ != nullptr) api_.CommWindowDeregister(comm_, window_);
  if (comm_ != nullptr) api_.CommDestroy(comm_);
  if (windowed_ != nullptr) api_.MemFree(windowed_);
  cudaFree(plain_);
  cudaFree(other_);
}

void RawNccl::Call(int kind, const std::string& op, size_t bytes, cudaStream_t stream) {
  char* const data = kind == 0 ? plain_ : windowed_;
  const size_t count = bytes / 4, part = count / ranks_;
  char* const own = data + part * 4 * static_cast<size_t>(rank_);
  const nccl::DataType type = nccl::kFloat32;
  if (op == "all_reduce")
    return Check(api_.AllReduce(data, data, count, type, nccl::kSum, comm_, stream), "ncclAllReduce");
  if (op == "all_gather") return Check(api_.AllGather(own, data, part, type, comm_, stream), "ncclAllGather");
  if (op == "reduce_scatter") {
    return Check(api_.ReduceScatter(data, own, part, type, nccl::kSum, comm_, stream), "ncclReduceScatter");
  }
  if (op == "broadcast") return Check(api_.Broadcast(data, data, count, type, 0, comm_, stream), "ncclBroadcast");
  Check(api_.GroupStart(), "ncclGroupStart");
  for (size_t r = 0; r < ranks_; ++r) {
    Check(api_.Send(data + r * part * 4, part, type, static_cast<int>(r), comm_, stream), "ncclSend");
    Check(api_.Recv(other_ + r * part * 4, part, type, static_cast<int>(r), comm_, stream), "ncclRecv");
  }
  Check(api_.GroupEnd(), "ncclGroupEnd");
}

void RawNccl::Check(nccl::Result result, const char* call) const {
  if (result == nccl::kSuccess) return;
  std::fprintf(stderr, "%s: %s: %s\n", call, api_.GetErrorString(result), api_.GetLastError(comm_));
  std::exit(1);
}

}  // namespace bench
