// SPDX-License-Identifier: Apache-2.0
// Kernels and streams of your own: each rank, on a GPU of its own, pulls its weights towards its rank number. The host
// submits all steps without waiting for the GPU.
//
//   mpirun -n 2 03_cuda_streams    # prints 0.500 on both ranks
#include <cuda_runtime.h>

#include <cstdio>

#include "ddp/ddp.h"

#define TRY(call) \
  if (const absl::Status status = (call); !status.ok()) return status

__global__ void Gradient(const float* weight, float target, float* grad, int count) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < count) grad[i] = weight[i] - target;
}

// A step that failed, or has an infinity, changes nothing: the host may hear of it later.
__global__ void Descent(const float* grad, const uint32_t* skip_step, float* weight, int count) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < count && *skip_step == 0) weight[i] -= 0.1f * grad[i];
}

absl::Status Cuda(cudaError_t error) {
  return error == cudaSuccess ? absl::OkStatus() : absl::InternalError(cudaGetErrorString(error));
}

absl::Status Train() {
  constexpr int kCount = 1'000'000, kThreads = 256, kBlocks = (kCount + kThreads - 1) / kThreads;
  ddp::ContextOptions options;
  options.device = {ddp::Device::Kind::kCuda, -1};  // the GPU with the number of the local rank
  const auto context = ddp::Context::Create(options);
  TRY(context.status());
  const ddp::Device gpu = (*context)->device();
  TRY(Cuda(cudaSetDevice(gpu.index)));
  cudaStream_t native = nullptr;
  TRY(Cuda(cudaStreamCreateWithFlags(&native, cudaStreamNonBlocking)));
  const ddp::Stream stream{gpu, native};

  ddp::Parameter parameter;
  parameter.name = "weight";
  parameter.value = {nullptr, kCount, ddp::DType::kFloat32, gpu};  // null: the library's memory, zero at first
  const auto model = ddp::DistributedDataParallel::Create((*context)->world(), {parameter});
  TRY(model.status());
  auto* const weight = static_cast<float*>((*model)->value(0).data);
  auto* const grad = static_cast<float*>((*model)->grad(0).data);

  for (int step = 0; step < 200; ++step) {
    Gradient<<<kBlocks, kThreads, 0, native>>>(weight, static_cast<float>((*context)->rank()), grad, kCount);
    (*model)->GradReady(0, stream);         // the work that writes it has been submitted to this stream
    TRY((*model)->FinishBackward(stream));  // the stream waits for the reduction, the host does not
    Descent<<<kBlocks, kThreads, 0, native>>>(grad, (*model)->skip_step(), weight, kCount);
    TRY(Cuda(cudaGetLastError()));
  }
  float last = 0;
  TRY(Cuda(cudaMemcpyAsync(&last, weight + kCount - 1, sizeof last, cudaMemcpyDefault, native)));
  TRY(Cuda(cudaStreamSynchronize(native)));
  TRY((*context)->world().status());
  std::printf("rank %d of %d: %.3f\n", (*context)->rank(), (*context)->world_size(), last);
  return absl::OkStatus();
}

int main() {
  const absl::Status status = Train();
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
