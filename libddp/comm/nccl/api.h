// SPDX-License-Identifier: Apache-2.0
// NCCL, as far as the library uses it: declarations of our own and one table of functions, filled at run time. So a
// program built with the NCCL backend starts where NCCL is not installed, and a test can put any function in the table.
// A test compares the declarations with nccl.h.
#ifndef LIBDDP_COMM_NCCL_API_H_
#define LIBDDP_COMM_NCCL_API_H_

#include <climits>
#include <cstddef>
#include <string>

#include "absl/status/statusor.h"
#include "ddp/types.h"

namespace ddp::nccl {

using Comm = struct CommOpaque*;      // ncclComm_t
using Window = struct WindowOpaque*;  // ncclWindow_t
using CudaStream = void*;             // cudaStream_t, which is a pointer

enum Result : int {
  kSuccess = 0,
  kUnhandledCudaError = 1,
  kSystemError = 2,
  kInternalError = 3,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
  kInProgress = 7,
};

struct UniqueId {
  char internal[128];
};

enum DataType : int {
  kInt8 = 0,
  kUint8 = 1,
  kInt32 = 2,
  kInt64 = 4,
  kFloat16 = 6,
  kFloat32 = 7,
  kFloat64 = 8,
  kBfloat16 = 9,
};

enum Op : int { kSum = 0, kProd = 1, kMax = 2, kMin = 3, kAvg = 4 };
enum ScalarResidence : int { kScalarDevice = 0, kScalarHostImmediate = 1 };
inline constexpr int kWinCollSymmetric = 1;

// ncclConfig_t as NCCL 2.18 has it. Later versions know from `size` that the rest is missing, and take its defaults.
struct Config {
  size_t size = sizeof(Config);
  unsigned magic = 0xcafebeef;
  unsigned version = 21801;
  int blocking = INT_MIN;  // INT_MIN: undefined, NCCL's default
  int cga_cluster_size = INT_MIN;
  int min_ctas = INT_MIN;
  int max_ctas = INT_MIN;
  const char* net_name = nullptr;
  int split_share = INT_MIN;
};

// Null: not in this version.
struct Api {
  Result (*GetVersion)(int* version) = nullptr;
  Result (*GetUniqueId)(UniqueId* id) = nullptr;
  Result (*CommInitRankConfig)(Comm* comm, int ranks, UniqueId id, int rank, Config* config) = nullptr;
  Result (*CommCount)(Comm comm, int* ranks) = nullptr;
  Result (*CommUserRank)(Comm comm, int* rank) = nullptr;
  Result (*CommCuDevice)(Comm comm, int* device) = nullptr;
  Result (*CommDestroy)(Comm comm) = nullptr;
  Result (*CommAbort)(Comm comm) = nullptr;
  Result (*CommGetAsyncError)(Comm comm, Result* error) = nullptr;
  const char* (*GetErrorString)(Result result) = nullptr;
  const char* (*GetLastError)(Comm comm) = nullptr;
  Result (*AllReduce)(const void* in, void* out, size_t count, DataType type, int op, Comm comm,
                      CudaStream stream) = nullptr;
  Result (*Reduce)(const void* in, void* out, size_t count, DataType type, int op, int root, Comm comm,
                   CudaStream stream) = nullptr;
  Result (*Broadcast)(const void* in, void* out, size_t count, DataType type, int root, Comm comm,
                      CudaStream stream) = nullptr;
  Result (*AllGather)(const void* in, void* out, size_t count, DataType type, Comm comm, CudaStream stream) = nullptr;
  Result (*ReduceScatter)(const void* in, void* out, size_t out_count, DataType type, int op, Comm comm,
                          CudaStream stream) = nullptr;
  Result (*Send)(const void* in, size_t count, DataType type, int peer, Comm comm, CudaStream stream) = nullptr;
  Result (*Recv)(void* out, size_t count, DataType type, int peer, Comm comm, CudaStream stream) = nullptr;
  Result (*GroupStart)() = nullptr;
  Result (*GroupEnd)() = nullptr;
  Result (*RedOpCreatePreMulSum)(int* op, void* scalar, DataType type, ScalarResidence residence, Comm comm) = nullptr;
  Result (*RedOpDestroy)(int op, Comm comm) = nullptr;
  // From 2.19 on.
  Result (*MemAlloc)(void** data, size_t bytes) = nullptr;
  Result (*MemFree)(void* data) = nullptr;
  // From 2.27 on.
  Result (*CommWindowRegister)(Comm comm, void* data, size_t bytes, Window* window, int flags) = nullptr;
  Result (*CommWindowDeregister)(Comm comm, Window window) = nullptr;
};

// What a version can do, by ncclGetVersion's number (22809 is 2.28.9).
struct Features {
  int version = 0;
  bool windows = false;              // memory can be registered for the symmetric kernels
  bool avg_keeps_symmetric = false;  // Avg, too, uses them in a reduce-scatter (PreMulSum never does)
  bool groups_of_sums = true;        // several sums in one group call are right also with symmetric kernels
  bool symmetric_abort = false;      // the symmetric kernels end when they are aborted

  std::string version_text() const;  // "2.28.9"
};

// Whether this process has started NCCL, which then keeps the variables as they were.
bool Started();
void MarkStarted();

// InvalidArgument below 2.18.
absl::StatusOr<Features> FeaturesOf(const Api& api);

// Loads libnccl.so.2, or what DDP_NCCL_LIBRARY names. NotFound or InvalidArgument: names the file, the loader's words
// and the remedy.
absl::StatusOr<Api> Load();

DataType ToNccl(DType dtype);

}  // namespace ddp::nccl

#endif  // LIBDDP_COMM_NCCL_API_H_
