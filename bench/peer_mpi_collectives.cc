#include <mpi.h>

#include "bench/mpi_peer.h"

namespace bench {

void StartMpi() { MPI_Init(nullptr, nullptr); }
void StopMpi() { MPI_Finalize(); }

void RunMpi(Collective collective, const float* in, float* out, size_t count, int rank, int ranks) {
  const int all = static_cast<int>(count), part = all / ranks;
  const int next = (rank + 1) % ranks, last = (rank + ranks - 1) % ranks;
  switch (collective) {
    case Collective::kAllGather:
      MPI_Allgather(in, part, MPI_FLOAT, out, part, MPI_FLOAT, MPI_COMM_WORLD);
      return;
    case Collective::kReduceScatter:
      MPI_Reduce_scatter_block(in, out, part, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
      return;
    case Collective::kBroadcast:
      MPI_Bcast(out, all, MPI_FLOAT, 0, MPI_COMM_WORLD);
      return;
    case Collective::kAllToAll:
      MPI_Alltoall(in, part, MPI_FLOAT, out, part, MPI_FLOAT, MPI_COMM_WORLD);
      return;
    case Collective::kSendRecv:
      MPI_Sendrecv(in, all, MPI_FLOAT, next, 0, out, all, MPI_FLOAT, last, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
      return;
    case Collective::kPingPong:
      if (const int other = rank ^ 1; other >= ranks) {
        return;
      } else if (rank < other) {
        MPI_Send(in, all, MPI_FLOAT, other, 0, MPI_COMM_WORLD);
        MPI_Recv(out, all, MPI_FLOAT, other, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
      } else {
        MPI_Recv(out, all, MPI_FLOAT, other, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        MPI_Send(in, all, MPI_FLOAT, other, 0, MPI_COMM_WORLD);
      }
      return;
  }
}

}  // namespace bench
