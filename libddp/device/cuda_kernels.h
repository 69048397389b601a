// SPDX-License-Identifier: Apache-2.0
// The CUDA kernels, launched. Plain CUDA: the device compiler sees neither Abseil nor spdlog.
#ifndef LIBDDP_DEVICE_CUDA_KERNELS_H_
#define LIBDDP_DEVICE_CUDA_KERNELS_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "libddp/device/block_rule.h"
#include "libddp/device/low_rank.h"
#include "libddp/device/norm_rule.h"
#include "libddp/device/scale_rule.h"
#include "libddp/device/staged_blocks.h"
#include "libddp/device/staged_meeting.h"
#include "libddp/device/staged_messages.h"
#include "libddp/device/staged_protocol.h"
#include "libddp/device/staged_turn.h"

namespace ddp::cuda {

// As DType; the numbers are the same.
enum class Type : uint8_t { kFloat64, kFloat32, kFloat16, kBFloat16, kInt64, kInt32, kInt8, kUInt8 };

struct Piece {
  const void* in;
  void* out;
  size_t count;
};

// Pieces that one launch takes; they travel in its arguments.
inline constexpr int kRangesPerLaunch = 128;

// See ddp::Transform. Asynchronous on `stream`, on the current device. cudaErrorInvalidValue if the types do not
// convert.
cudaError_t LaunchTransform(Type in, Type out, double scale, uint32_t* nonfinite, const float* factor,
                            const Piece* pieces, size_t count, cudaStream_t stream);

// See ddp::DeviceRuntime::Commit.
cudaError_t LaunchCommit(const uint32_t* failed, const uint32_t* found_inf, uint32_t* skip_step, uint32_t* count,
                         cudaStream_t stream);

// See ddp::DeviceRuntime::Increment.
cudaError_t LaunchIncrement(uint32_t* counter, cudaStream_t stream);

// See ddp::DeviceRuntime::AwaitCounter.
cudaError_t LaunchAwait(const uint32_t* counter, uint32_t target, const uint32_t* failed, uint64_t* left,
                        cudaStream_t stream);

// See ddp::DeviceRuntime::NormPart. `partials` has room for NormPartials numbers.
size_t NormPartials(const Piece* pieces, size_t count);
cudaError_t LaunchNorm(Type type, NormKind kind, const Piece* pieces, size_t count, double* partials, double* result,
                       cudaStream_t stream);

// See ddp::DeviceRuntime::FinishClip.
cudaError_t LaunchFinishClip(NormKind kind, double max_norm, ClipNumbers* numbers, cudaStream_t stream);

// See ddp::DeviceRuntime::Hash.
cudaError_t LaunchHash(const Piece* pieces, size_t count, uint64_t* results, cudaStream_t stream);

// See ddp::DeviceRuntime::RunLowRank. cudaErrorInvalidValue for other types than float32 and the 16-bit floats.
cudaError_t LaunchLowRank(LowRankPass pass, Type type, const LowRankStep& step, const LowRankMatrix* matrices,
                          size_t count, cudaStream_t stream);

cudaError_t LaunchUpdateScale(const ScaleRule& rule, ScalerNumbers* numbers, cudaStream_t stream);

// See blocks::Pass.
cudaError_t LaunchBlocks(const blocks::Pass& pass, cudaStream_t stream);

// See ddp::DeviceRuntime::RunStaged. cudaErrorInvalidValue if the types do not convert.
cudaError_t LaunchCollective(const staged::Collective& collective, cudaStream_t stream);
cudaError_t LaunchExchange(const staged::Exchange& exchange, cudaStream_t stream);
cudaError_t LaunchTurn(const staged::Turn& turn, cudaStream_t stream);
cudaError_t LaunchMeeting(const staged::Meeting& meeting, cudaStream_t stream);
cudaError_t LaunchBlockReduction(const staged::BlockReduction& reduction, cudaStream_t stream);
// The kernels of that.
inline constexpr int kBlockReductionKernels = 6;
void BlockReductionKernels(const void** kernels);
// How many of their thread blocks the current device can run at once. Loads the kernels.
cudaError_t StagedBlocks(int* blocks);

// Whether the current device can run these kernels: cudaErrorNoKernelImageForDevice if they were built for none like
// it.
cudaError_t CheckKernels();

}  // namespace ddp::cuda

#endif  // LIBDDP_DEVICE_CUDA_KERNELS_H_
