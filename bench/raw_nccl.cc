// SPDX-License-Identifier: Apache-2.0
#include "bench/raw_nccl.h"

#include <utility>

#include "bench/cuda_check.h"

namespace bench {

namespace nccl = ddp::nccl;

namespace {

nccl::Op NcclOpOf(ddp::ReduceOp op) {
  switch (op) {
    case ddp::ReduceOp::kSum:
      return nccl::kSum;
    case ddp::ReduceOp::kAvg:
      return nccl::kAvg;
    case ddp::ReduceOp::kMin:
      return nccl::kMin;
    case ddp::ReduceOp::kMax:
      return nccl::kMax;
    case ddp::ReduceOp::kProduct:
      return nccl::kProd;
  }
  return nccl::kSum;
}

}  // namespace

absl::StatusOr<std::unique_ptr<RawNccl>> RawNccl::Create(ddp::ProcessGroup& group, size_t bytes, bool windows) {
  std::unique_ptr<RawNccl> raw(new RawNccl);
  absl::StatusOr<nccl::Api> api = nccl::Load();
  if (!api.ok()) return api.status();
  raw->api_ = *api;
  nccl::UniqueId id = {};
  if (group.rank() == 0) raw->Check(raw->api_.GetUniqueId(&id), "ncclGetUniqueId");
  const ddp::Buffer buffer{id.internal, sizeof id.internal, ddp::DType::kUInt8, {}};
  ddp::Work work = group.Broadcast(buffer, 0);
  if (absl::Status s = work.Wait(); !s.ok()) return s;
  nccl::Config config;
  raw->Check(raw->api_.CommInitRankConfig(&raw->comm_, group.size(), id, group.rank(), &config),
             "ncclCommInitRankConfig");
  for (char*& plain : raw->plain_) {
    BENCH_CUDA(cudaMalloc(reinterpret_cast<void**>(&plain), bytes));
    BENCH_CUDA(cudaMemset(plain, 0, bytes));
  }
  if (!windows || raw->api_.CommWindowRegister == nullptr) return raw;
  for (int i = 0; i < 2; ++i) {
    void* memory = nullptr;
    raw->Check(raw->api_.MemAlloc(&memory, bytes), "ncclMemAlloc");
    BENCH_CUDA(cudaMemset(memory, 0, bytes));
    raw->Check(raw->api_.CommWindowRegister(raw->comm_, memory, bytes, &raw->windows_[i], nccl::kWinCollSymmetric),
               "ncclCommWindowRegister");
    raw->windowed_[i] = static_cast<char*>(memory);
  }
  return raw;
}

RawNccl::~RawNccl() {
  for (nccl::Window window : windows_) {
    if (window != nullptr) api_.CommWindowDeregister(comm_, window);
  }
  if (comm_ != nullptr) api_.CommDestroy(comm_);
  for (char* memory : windowed_) {
    if (memory != nullptr) api_.MemFree(memory);
  }
  for (char* memory : plain_) cudaFree(memory);
}

int RawNccl::Kinds(const Case& c) const {
  switch (c.collective) {
    case Collective::kAllReduce:
    case Collective::kAllGather:
    case Collective::kReduceScatter:
    case Collective::kBroadcast:
    case Collective::kReduce:
      return windowed_[0] == nullptr ? 1 : 2;
    case Collective::kAllToAll:
      return c.in_place ? 0 : 1;
    case Collective::kSendRecv:
      return 1;
    default:
      return 0;
  }
}

void RawNccl::Call(int kind, const Case& c, cudaStream_t stream) {
  char* const* const memory = kind == 0 ? plain_ : windowed_;
  const size_t size = ddp::SizeOf(c.dtype);
  char* const in = memory[0] + c.InOffset(c.rank) * size;
  char* const out = memory[c.in_place ? 0 : 1] + c.OutOffset() * size;
  const nccl::DataType type = nccl::ToNccl(c.dtype);
  const size_t count = c.count(), part = c.counts[static_cast<size_t>(c.rank)];
  const auto send = [&](const char* data, size_t n, int to) {
    Check(api_.Send(data, n, type, to, comm_, stream), "ncclSend");
  };
  const auto receive = [&](char* data, size_t n, int from) {
    Check(api_.Recv(data, n, type, from, comm_, stream), "ncclRecv");
  };
  switch (c.collective) {
    case Collective::kAllReduce:
      return Check(api_.AllReduce(in, out, count, type, NcclOpOf(c.op), comm_, stream), "ncclAllReduce");
    case Collective::kAllGather:
      return Check(api_.AllGather(in, out, part, type, comm_, stream), "ncclAllGather");
    case Collective::kReduceScatter:
      return Check(api_.ReduceScatter(in, out, part, type, NcclOpOf(c.op), comm_, stream), "ncclReduceScatter");
    case Collective::kReduce:
      return Check(api_.Reduce(in, out, count, type, NcclOpOf(c.op), c.root, comm_, stream), "ncclReduce");
    case Collective::kBroadcast:
      return Check(api_.Broadcast(in, out, count, type, c.root, comm_, stream), "ncclBroadcast");
    default:
      break;
  }
  Check(api_.GroupStart(), "ncclGroupStart");
  if (c.collective == Collective::kSendRecv) {
    send(in, count, c.next());
    receive(out, count, c.previous());
  } else {
    for (int r = 0; r < c.ranks; ++r) {
      send(in + c.offsets[static_cast<size_t>(r)] * size, part, r);
      receive(out + c.offsets[static_cast<size_t>(r)] * size, part, r);
    }
  }
  Check(api_.GroupEnd(), "ncclGroupEnd");
}

void RawNccl::Check(nccl::Result result, const char* call) const {
  if (result == nccl::kSuccess) return;
  std::fprintf(stderr, "%s: %s: %s\n", call, api_.GetErrorString(result), api_.GetLastError(comm_));
  std::exit(1);
}

}  // namespace bench
