// SPDX-License-Identifier: Apache-2.0
// The kernels of the staged protocol.
#include "libddp/device/cuda_kernels.h"
#include "libddp/device/cuda_staged_transfer.h"
#include "libddp/device/staged_meeting.h"
#include "libddp/device/staged_messages.h"
#include "libddp/device/staged_protocol.h"

namespace ddp::cuda {
namespace {

template <typename In, typename Out>
__global__ void __launch_bounds__(kThreads, 2) CollectiveKernel(const __grid_constant__ staged::Collective c) {
  ReducingBlock<In, Out> block(c);
  staged::RunThroughRing(block, c, static_cast<int>(blockIdx.x));
  block.Report();
}

// A kernel of its own, so that it needs fewer registers: it has to find room beside those of the backward pass.
template <typename In, typename Out>
__global__ void __launch_bounds__(kThreads, 4) FetchedKernel(const __grid_constant__ staged::Collective c) {
  ReducingBlock<In, Out> block(c);
  staged::RunFetched(block, c, static_cast<int>(blockIdx.x));
  block.Report();
}

__global__ void __launch_bounds__(kThreads, 2) ExchangeKernel(const __grid_constant__ staged::Exchange e) {
  Block block(e.at);
  staged::RunExchange(block, e, static_cast<int>(blockIdx.x));
}

__global__ void __launch_bounds__(kThreads, 2) TurnKernel(const __grid_constant__ staged::Turn t) {
  Block block(t.at);
  staged::RunTurn(block, t);
}

__global__ void __launch_bounds__(kThreads, 2) MeetingKernel(const __grid_constant__ staged::Meeting m) {
  Block block(m.at);
  staged::RunMeeting(block, m);
}

template <typename In, typename Out>
cudaError_t Launch(const staged::Collective& c, cudaStream_t stream) {
  const auto kernel = c.move == staged::Move::kAllReduceFetched ? FetchedKernel<In, Out> : CollectiveKernel<In, Out>;
  kernel<<<static_cast<unsigned>(staged::BlocksOf(c)), kThreads, 0, stream>>>(c);
  return cudaGetLastError();
}

template <typename In>
cudaError_t LaunchTo(const staged::Collective& c, cudaStream_t stream) {
  switch (static_cast<Type>(c.arithmetic.out_type)) {
    case Type::kFloat32:
      return Launch<In, float>(c, stream);
    case Type::kFloat16:
      return Launch<In, __half>(c, stream);
    case Type::kBFloat16:
      return Launch<In, __nv_bfloat16>(c, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

template <typename Kernel>
const void* Address(Kernel* kernel) {
  return reinterpret_cast<const void*>(kernel);
}

}  // namespace

cudaError_t LaunchCollective(const staged::Collective& c, cudaStream_t stream) {
  switch (static_cast<Type>(c.arithmetic.in_type)) {
    case Type::kFloat64:
      return Launch<double, double>(c, stream);
    case Type::kFloat32:
      return LaunchTo<float>(c, stream);
    case Type::kFloat16:
      return LaunchTo<__half>(c, stream);
    case Type::kBFloat16:
      return LaunchTo<__nv_bfloat16>(c, stream);
    case Type::kInt64:
      return Launch<int64_t, int64_t>(c, stream);
    case Type::kInt32:
      return Launch<int32_t, int32_t>(c, stream);
    case Type::kInt8:
      return Launch<int8_t, int8_t>(c, stream);
    case Type::kUInt8:
      return Launch<uint8_t, uint8_t>(c, stream);
  }
  return cudaErrorInvalidValue;
}

cudaError_t LaunchExchange(const staged::Exchange& e, cudaStream_t stream) {
  ExchangeKernel<<<static_cast<unsigned>(staged::BlocksOf(e)), kThreads, 0, stream>>>(e);
  return cudaGetLastError();
}

cudaError_t LaunchTurn(const staged::Turn& t, cudaStream_t stream) {
  TurnKernel<<<1, 32, 0, stream>>>(t);
  return cudaGetLastError();
}

cudaError_t LaunchMeeting(const staged::Meeting& m, cudaStream_t stream) {
  MeetingKernel<<<1, 32, 0, stream>>>(m);
  return cudaGetLastError();
}

cudaError_t StagedBlocks(int* blocks) {
  // To ask about a kernel also loads it: one that is loaded while another waits for a peer may have to wait for that.
  const void* const kernels[] = {
      Address(ExchangeKernel),
      Address(TurnKernel),
      Address(MeetingKernel),
      Address(CollectiveKernel<double, double>),
      Address(CollectiveKernel<float, float>),
      Address(CollectiveKernel<float, __half>),
      Address(CollectiveKernel<float, __nv_bfloat16>),
      Address(CollectiveKernel<__half, float>),
      Address(CollectiveKernel<__half, __half>),
      Address(CollectiveKernel<__half, __nv_bfloat16>),
      Address(CollectiveKernel<__nv_bfloat16, float>),
      Address(CollectiveKernel<__nv_bfloat16, __half>),
      Address(CollectiveKernel<__nv_bfloat16, __nv_bfloat16>),
      Address(CollectiveKernel<int64_t, int64_t>),
      Address(CollectiveKernel<int32_t, int32_t>),
      Address(CollectiveKernel<int8_t, int8_t>),
      Address(CollectiveKernel<uint8_t, uint8_t>),
      Address(FetchedKernel<double, double>),
      Address(FetchedKernel<float, float>),
      Address(FetchedKernel<float, __half>),
      Address(FetchedKernel<float, __nv_bfloat16>),
      Address(FetchedKernel<__half, float>),
      Address(FetchedKernel<__half, __half>),
      Address(FetchedKernel<__half, __nv_bfloat16>),
      Address(FetchedKernel<__nv_bfloat16, float>),
      Address(FetchedKernel<__nv_bfloat16, __half>),
      Address(FetchedKernel<__nv_bfloat16, __nv_bfloat16>),
      Address(FetchedKernel<int64_t, int64_t>),
      Address(FetchedKernel<int32_t, int32_t>),
      Address(FetchedKernel<int8_t, int8_t>),
      Address(FetchedKernel<uint8_t, uint8_t>),
  };
  const void* block_kernels[kBlockReductionKernels] = {};
  BlockReductionKernels(block_kernels);
  int device = 0, processors = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  cudaError_t error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  *blocks = INT32_MAX;
  const auto ask = [&](const void* kernel) {
    int each = 0;
    if (error == cudaSuccess) error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel, kThreads, 0);
    if (each * processors < *blocks) *blocks = each * processors;
  };
  for (const void* kernel : kernels) ask(kernel);
  for (const void* kernel : block_kernels) ask(kernel);
  return error;
}

}  // namespace ddp::cuda
