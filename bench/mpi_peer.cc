// SPDX-License-Identifier: Apache-2.0
#include "bench/mpi_peer.h"

#include <mpi.h>

namespace bench {
namespace {

MPI_Datatype TypeOf(ddp::DType dtype) {
  switch (dtype) {
    case ddp::DType::kFloat64:
      return MPI_DOUBLE;
    case ddp::DType::kFloat32:
      return MPI_FLOAT;
    case ddp::DType::kInt64:
      return MPI_INT64_T;
    case ddp::DType::kInt32:
      return MPI_INT32_T;
    case ddp::DType::kInt8:
      return MPI_INT8_T;
    case ddp::DType::kUInt8:
      return MPI_UINT8_T;
    default:
      return MPI_DATATYPE_NULL;
  }
}

MPI_Op MpiOpOf(ddp::ReduceOp op) {
  switch (op) {
    case ddp::ReduceOp::kSum:
      return MPI_SUM;
    case ddp::ReduceOp::kMin:
      return MPI_MIN;
    case ddp::ReduceOp::kMax:
      return MPI_MAX;
    case ddp::ReduceOp::kProduct:
      return MPI_PROD;
    default:
      return MPI_OP_NULL;
  }
}

void RunPingPong(const Case& c, const void* in, void* out, int count, MPI_Datatype type) {
  const int other = c.partner();
  if (other < 0) return;
  if (c.rank < other) MPI_Send(in, count, type, other, 0, MPI_COMM_WORLD);
  MPI_Recv(out, count, type, other, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
  if (c.rank > other) MPI_Send(in, count, type, other, 0, MPI_COMM_WORLD);
}

}  // namespace

bool HaveMpi() { return true; }
void StartMpi() { MPI_Init(nullptr, nullptr); }
void StopMpi() { MPI_Finalize(); }

bool MpiRuns(const Case& c) {
  if (TypeOf(c.dtype) == MPI_DATATYPE_NULL || c.count() > INT32_MAX) return false;
  if (c.info().reduces && MpiOpOf(c.op) == MPI_OP_NULL) return false;
  return !c.in_place || !c.info().out_of_place || c.collective == Collective::kAllReduce ||
         c.collective == Collective::kAllGather;
}

void RunMpi(const Case& c, const void* in, void* out) {
  const MPI_Datatype type = TypeOf(c.dtype);
  const MPI_Op op = MpiOpOf(c.op);
  if (c.in_place) in = MPI_IN_PLACE;
  const int all = static_cast<int>(c.count()), part = static_cast<int>(c.counts[static_cast<size_t>(c.rank)]);
  switch (c.collective) {
    case Collective::kAllReduce:
      MPI_Allreduce(in, out, all, type, op, MPI_COMM_WORLD);
      return;
    case Collective::kAllGather:
      MPI_Allgather(in, part, type, out, part, type, MPI_COMM_WORLD);
      return;
    case Collective::kAllGatherV: {
      const std::vector<int> counts(c.counts.begin(), c.counts.end());
      const std::vector<int> offsets(c.offsets.begin(), c.offsets.end());
      MPI_Allgatherv(in, part, type, out, counts.data(), offsets.data(), type, MPI_COMM_WORLD);
      return;
    }
    case Collective::kReduceScatter:
      MPI_Reduce_scatter_block(in, out, part, type, op, MPI_COMM_WORLD);
      return;
    case Collective::kBroadcast:
      MPI_Bcast(out, all, type, c.root, MPI_COMM_WORLD);
      return;
    case Collective::kReduce:
      MPI_Reduce(in, out, all, type, op, c.root, MPI_COMM_WORLD);
      return;
    case Collective::kGather:
      MPI_Gather(in, part, type, out, part, type, c.root, MPI_COMM_WORLD);
      return;
    case Collective::kScatter:
      MPI_Scatter(in, part, type, out, part, type, c.root, MPI_COMM_WORLD);
      return;
    case Collective::kAllToAll:
      MPI_Alltoall(in, part, type, out, part, type, MPI_COMM_WORLD);
      return;
    case Collective::kSendRecv:
      MPI_Sendrecv(in, all, type, c.next(), 0, out, all, type, c.previous(), 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
      return;
    case Collective::kPingPong:
      return RunPingPong(c, in, out, all, type);
    case Collective::kBarrier:
      MPI_Barrier(MPI_COMM_WORLD);
      return;
  }
}

}  // namespace bench
