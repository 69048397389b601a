// SPDX-License-Identifier: Apache-2.0
// Captures a step of its own into a CUDA graph, and replays it. Each rank pulls its weights towards its rank number, so
// that averaged gradients bring them to the mean of all:
//
//   mpirun -n 2 capture_step    # prints 0.500 on both ranks
#include <cuda_runtime_api.h>

#include <cstdio>

#include "ddp/ddp.h"
#include "examples/capture_step_kernels.h"

#define TRY(call) \
  if (const absl::Status status = (call); !status.ok()) return status

absl::Status Cuda(cudaError_t error) {
  return error == cudaSuccess ? absl::OkStatus() : absl::InternalError(cudaGetErrorString(error));
}

absl::Status Train() {
  constexpr int kCount = 1'000'000, kSteps = 200;
  const auto context = ddp::Context::Create({.device = {ddp::Device::Kind::kCuda, -1}});  // a GPU for each rank
  TRY(context.status());
  ddp::ProcessGroup& group = (*context)->world();
  const ddp::Device gpu = (*context)->device();
  cudaStream_t stream = nullptr;
  float* rate = nullptr;  // on the GPU, because it changes from replay to replay
  TRY(Cuda(cudaSetDevice(gpu.index)));
  TRY(Cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)));
  TRY(Cuda(cudaMalloc(reinterpret_cast<void**>(&rate), sizeof *rate)));

  const ddp::Parameter parameter{.name = "weight", .value = {nullptr, kCount, ddp::DType::kFloat32, gpu}};
  const auto model = ddp::DistributedDataParallel::Create(group, {parameter});
  TRY(model.status());
  auto* const weight = static_cast<float*>((*model)->value(0).data);
  auto* const grad = static_cast<float*>((*model)->grad(0).data);
  const auto step = [&]() -> absl::Status {
    SubmitGradient(weight, static_cast<float>(group.rank()), grad, kCount, stream);
    (*model)->GradReady(0, {gpu, stream});
    TRY((*model)->FinishBackward({gpu, stream}));
    SubmitDescent(grad, rate, (*model)->skip_step(), weight, kCount, stream);
    return absl::OkStatus();
  };

  cudaGraph_t graph = nullptr;
  cudaGraphExec_t replay = nullptr;
  for (int i = 0; i < kSteps; ++i) {
    const float now = 0.1f * (1 - static_cast<float>(i) / kSteps);
    TRY(Cuda(cudaMemcpyAsync(rate, &now, sizeof now, cudaMemcpyDefault, stream)));
    if (i < 3) {  // connects the ranks, and settles the buckets
      TRY(step());
      continue;
    }
    if (replay == nullptr) {
      TRY((*model)->CanCapture());
      TRY(Cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal)));
      TRY(step());  // submits it to the graph; nothing of it runs
      TRY(Cuda(cudaStreamEndCapture(stream, &graph)));
      TRY(Cuda(cudaGraphInstantiate(&replay, graph, cudaGraphInstantiateFlagUseNodePriority)));
    }
    TRY(Cuda(cudaGraphLaunch(replay, stream)));
    TRY(group.status());  // a rank has gone, or time is out
  }
  float result = 0;
  TRY(Cuda(cudaMemcpyAsync(&result, weight, sizeof result, cudaMemcpyDefault, stream)));
  TRY(Cuda(cudaStreamSynchronize(stream)));
  const auto steps = static_cast<int>((*model)->statistics().steps);
  std::printf("rank %d: %.3f after %d steps\n", group.rank(), static_cast<double>(result), steps);
  cudaGraphExecDestroy(replay);
  return group.status();
}

int main() {
  const absl::Status status = Train();
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
