// A libnccl.so that is none: its functions are those that a test has put into fake_nccl_api.
#include "libddp/comm/nccl/api.h"

namespace ddp::nccl {

extern "C" {

__attribute__((visibility("default"))) Api fake_nccl_api;

#define FORWARD(type, name, parameters, arguments) \
  __attribute__((visibility("default"))) type nccl##name parameters { return fake_nccl_api.name arguments; }

FORWARD(Result, GetVersion, (int* version), (version))
FORWARD(Result, GetUniqueId, (UniqueId * id), (id))
FORWARD(Result, CommInitRankConfig, (Comm * comm, int ranks, UniqueId id, int rank, Config* config),
        (comm, ranks, id, rank, config))
FORWARD(Result, CommCount, (Comm comm, int* ranks), (comm, ranks))
FORWARD(Result, CommUserRank, (Comm comm, int* rank), (comm, rank))
FORWARD(Result, CommCuDevice, (Comm comm, int* device), (comm, device))
FORWARD(Result, CommDestroy, (Comm comm), (comm))
FORWARD(Result, CommAbort, (Comm comm), (comm))
FORWARD(Result, CommGetAsyncError, (Comm comm, Result* error), (comm, error))
FORWARD(const char*, GetErrorString, (Result result), (result))
FORWARD(const char*, GetLastError, (Comm comm), (comm))
FORWARD(Result, AllReduce,
        (const void* in, void* out, size_t count, DataType type, int op, Comm comm, CudaStream stream),
        (in, out, count, type, op, comm, stream))
FORWARD(Result, Reduce,
        (const void* in, void* out, size_t count, DataType type, int op, int root, Comm comm, CudaStream stream),
        (in, out, count, type, op, root, comm, stream))
FORWARD(Result, Broadcast,
        (const void* in, void* out, size_t count, DataType type, int root, Comm comm, CudaStream stream),
        (in, out, count, type, root, comm, stream))
FORWARD(Result, AllGather, (const void* in, void* out, size_t count, DataType type, Comm comm, CudaStream stream),
        (in, out, count, type, comm, stream))
FORWARD(Result, ReduceScatter,
        (const void* in, void* out, size_t count, DataType type, int op, Comm comm, CudaStream stream),
        (in, out, count, type, op, comm, stream))
FORWARD(Result, Send, (const void* in, size_t count, DataType type, int peer, Comm comm, CudaStream stream),
        (in, count, type, peer, comm, stream))
FORWARD(Result, Recv, (void* out, size_t count, DataType type, int peer, Comm comm, CudaStream stream),
        (out, count, type, peer, comm, stream))
FORWARD(Result, GroupStart, (), ())
FORWARD(Result, GroupEnd, (), ())
FORWARD(Result, RedOpCreatePreMulSum, (int* op, void* scalar, DataType type, ScalarResidence residence, Comm comm),
        (op, scalar, type, residence, comm))
FORWARD(Result, RedOpDestroy, (int op, Comm comm), (op, comm))

}  // extern "C"

}  // namespace ddp::nccl
