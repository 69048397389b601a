// SPDX-License-Identifier: Apache-2.0
// What the snippets of docs/*.md and docs/guide/*.md take from the program around them.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "ddp/ddp.h"

struct Tensor {
  void* data_ptr();
  std::string name;
  std::vector<int64_t> shape;
  size_t offset, count;
};

extern std::unique_ptr<ddp::Context> context;
extern std::unique_ptr<ddp::DistributedDataParallel> model;
extern ddp::ProcessGroup& world;
extern ddp::Optimizer& optimizer;
extern ddp::Buffer loss_gradient;
extern ddp::Device device, gpu;
extern Tensor tensor;
extern std::vector<Tensor> tensors;
extern std::vector<ddp::Buffer> state;
extern std::string run_id;
extern int64_t committed_steps;
extern size_t i, count, total;
extern float* values;
extern double local_loss;
extern int rank, n;

// As in mpi.h, which these programs do without.
using MPI_Comm = struct Communicator*;
inline constexpr int MPI_UNDEFINED = -1;
extern MPI_Comm MPI_COMM_WORLD, MPI_COMM_NULL;
int MPI_Comm_split(MPI_Comm comm, int color, int key, MPI_Comm* part);
extern bool simulates;

// As in cuda_runtime_api.h.
using cudaStream_t = struct CudaStream*;
using cudaGraph_t = struct CudaGraph*;
using cudaGraphExec_t = struct CudaGraphExec*;
inline constexpr int cudaStreamCaptureModeThreadLocal = 1, cudaGraphInstantiateFlagUseNodePriority = 8;
int cudaStreamBeginCapture(cudaStream_t stream, int mode);
int cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph);
int cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned flags);
int cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream);
extern cudaStream_t cuda_stream;

absl::Status Step();
void Forward();
void Backward(int micro = 0);
bool NextBatch();
