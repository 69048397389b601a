// SPDX-License-Identifier: Apache-2.0
// The kernels of simulated GPUs: the CPU's, in the order of a stream.
#include <atomic>
#include <chrono>
#include <thread>
#include <utility>
#include <vector>

#include "libddp/device/cpu_blocks.h"
#include "libddp/device/cpu_hash.h"
#include "libddp/device/cpu_low_rank.h"
#include "libddp/device/cpu_norm.h"
#include "libddp/device/cpu_reduce.h"
#include "libddp/device/cpu_scale.h"
#include "tests/support/fake_devices.h"

namespace ddp::testing {

absl::Status FakeDevices::Run(const Transform& transform, absl::Span<const TransformPiece> pieces, void* stream) {
  absl::Status status = EnterOn("Run", stream);
  status.Update(ReachPieces("Run", pieces, SizeOf(transform.in), SizeOf(transform.out)));
  status.Update(Reach("Run", transform.nonfinite, sizeof(uint32_t)));
  status.Update(Reach("Run", transform.factor, sizeof(float)));
  if (!status.ok()) return status;
  absl::StatusOr<CpuReduce> reduce = CpuReduce::Create({.in = transform.in,
                                                        .out = transform.out,
                                                        .postscale = transform.scale,
                                                        .check_nonfinite = transform.nonfinite != nullptr});
  if (!reduce.ok()) return reduce.status();
  const std::vector<TransformPiece> copy(pieces.begin(), pieces.end());
  Enqueue(stream, [reduce = *reduce, copy, transform] {
    for (const TransformPiece& piece : copy) {
      std::vector<char> nowhere(piece.out == nullptr ? piece.count * SizeOf(transform.out) : 0);
      void* const out = piece.out == nullptr ? nowhere.data() : piece.out;
      bool bad = piece.count > 0 && reduce(&piece.in, 1, &out, 1, piece.count);
      if (transform.factor != nullptr) bad = CpuScale(transform.out, out, piece.count, *transform.factor);
      if (bad && transform.nonfinite != nullptr) *transform.nonfinite = 1;
    }
  });
  return absl::OkStatus();
}

absl::Status FakeDevices::Commit(const uint32_t* failed, const uint32_t* found_inf, uint32_t* skip_step,
                                 uint32_t* count, void* stream) {
  absl::Status status = EnterOn("Commit", stream);
  for (const uint32_t* word :
       {failed, found_inf, static_cast<const uint32_t*>(skip_step), static_cast<const uint32_t*>(count)}) {
    status.Update(Reach("Commit", word, sizeof(uint32_t)));
  }
  if (!status.ok()) return status;
  Enqueue(stream, [=, this, device = static_cast<int16_t>(Current())] {
    SetCurrent({Device::Kind::kCuda, device}).IgnoreError();
    // A graph may be launched when the memory is gone.
    for (const uint32_t* word : {failed, found_inf}) Reach("Commit", word, sizeof(uint32_t)).IgnoreError();
    const auto set = [](const uint32_t* word) {
      return word != nullptr && std::atomic_ref<uint32_t>(*const_cast<uint32_t*>(word)).load() != 0;
    };
    *skip_step = set(failed) || set(found_inf) ? 1 : 0;
    if (count != nullptr) std::atomic_ref<uint32_t>(*count).fetch_add(1);
  });
  return absl::OkStatus();
}

absl::Status FakeDevices::Increment(uint32_t* counter, void* stream) {
  absl::Status status = EnterOn("Increment", stream);
  status.Update(Reach("Increment", counter, sizeof(uint32_t)));
  if (!status.ok()) return status;
  Enqueue(stream, [counter] { std::atomic_ref<uint32_t>(*counter).fetch_add(1); });
  return absl::OkStatus();
}

absl::Status FakeDevices::AwaitCounter(const uint32_t* counter, uint32_t target, const uint32_t* failed, uint64_t* left,
                                       void* stream) {
  absl::Status status = EnterOn("AwaitCounter", stream);
  status.Update(Reach("AwaitCounter", counter, sizeof(uint32_t)));
  status.Update(Reach("AwaitCounter", failed, sizeof(uint32_t)));
  status.Update(Reach("AwaitCounter", left, sizeof(uint64_t)));
  if (!status.ok()) return status;
  const auto read = [](const uint32_t* word) {
    return std::atomic_ref<uint32_t>(*const_cast<uint32_t*>(word)).load(std::memory_order_acquire);
  };
  Enqueue(stream, [=] {
    while (static_cast<int32_t>(read(counter) - target) < 0) {
      if (read(failed) != 0) {
        if (left != nullptr) *left = 1;
        return;
      }
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  });
  return absl::OkStatus();
}

absl::Status FakeDevices::NormPart(DType dtype, NormKind kind, absl::Span<const TransformPiece> pieces, double* result,
                                   void* stream) {
  absl::Status status = EnterOn("NormPart", stream);
  status.Update(ReachPieces("NormPart", pieces, SizeOf(dtype), SizeOf(dtype)));
  status.Update(Reach("NormPart", result, sizeof(double)));
  if (!status.ok()) return status;
  const std::vector<TransformPiece> copy(pieces.begin(), pieces.end());
  Enqueue(stream, [dtype, kind, copy, result] {
    *result = 0;
    for (const TransformPiece& piece : copy) {
      const double part = CpuNormPart({const_cast<void*>(piece.in), piece.count, dtype, {}}, kind);
      *result = JoinParts(kind, *result, part);
    }
  });
  return absl::OkStatus();
}

absl::Status FakeDevices::FinishClip(NormKind kind, double max_norm, ClipNumbers* numbers, void* stream) {
  absl::Status status = EnterOn("FinishClip", stream);
  status.Update(Reach("FinishClip", numbers, sizeof(ClipNumbers)));
  if (!status.ok()) return status;
  Enqueue(stream, [=] { ddp::FinishClip(kind, max_norm, *numbers); });
  return absl::OkStatus();
}

absl::Status FakeDevices::Hash(absl::Span<const TransformPiece> pieces, uint64_t* results, void* stream) {
  absl::Status status = EnterOn("Hash", stream);
  status.Update(ReachPieces("Hash", pieces, 1, 1));
  status.Update(Reach("Hash", results, pieces.size() * sizeof(uint64_t)));
  if (!status.ok()) return status;
  const std::vector<TransformPiece> copy(pieces.begin(), pieces.end());
  Enqueue(stream, [copy, results] {
    for (size_t k = 0; k < copy.size(); ++k) results[k] = CpuHash(copy[k].in, copy[k].count);
  });
  return absl::OkStatus();
}

absl::Status FakeDevices::RunBlocks(const blocks::Pass& pass, void* stream) {
  const bool quantize = pass.step == blocks::Pass::Step::kQuantize,
             dequantize = pass.step == blocks::Pass::Step::kDequantize;
  const uint64_t array = pass.count * SizeOf(static_cast<DType>(pass.dtype));
  const uint64_t groups = blocks::GroupsOf(pass.count) * blocks::kGroupBytes;
  absl::Status status = EnterOn("RunBlocks", stream);
  for (int r = 0; r < pass.ins; ++r) {
    const char* const in = static_cast<const char*>(pass.in) + static_cast<uint64_t>(r) * pass.stride;
    status.Update(Reach("RunBlocks", in, quantize ? array : groups));
  }
  status.Update(Reach("RunBlocks", pass.out, dequantize ? array : groups));
  if (status.ok()) Enqueue(stream, [pass] { CpuRunBlocks(pass); });
  return status;
}

absl::Status FakeDevices::RunLowRank(LowRankPass pass, DType dtype, const LowRankStep& step,
                                     absl::Span<const LowRankMatrix> matrices, void* stream) {
  absl::Status status = EnterOn("RunLowRank", stream);
  for (const uint32_t* word : {step.kept, step.nonfinite}) status.Update(Reach("RunLowRank", word, sizeof(*word)));
  for (const LowRankMatrix& a : matrices) {
    constexpr size_t kFloat = sizeof(float);
    const size_t size = SizeOf(dtype), all = a.rows * a.columns, p = a.rank * a.rows, q = a.rank * a.columns;
    const std::pair<const void*, size_t> arrays[] = {
        {a.gradient, all * size},    {a.p_message, p * size},     {a.q_message, q * size},
        {a.errors[0], all * kFloat}, {a.errors[1], all * kFloat}, {a.q[0], q * kFloat},
        {a.q[1], q * kFloat},        {a.p, p * kFloat},           {a.partials, LowRankChunks(a.rows) * q * kFloat}};
    for (const auto& [data, bytes] : arrays) status.Update(Reach("RunLowRank", data, bytes));
  }
  const std::vector<LowRankMatrix> copy(matrices.begin(), matrices.end());
  if (status.ok()) Enqueue(stream, [=] { CpuLowRank(pass, dtype, step, copy); });
  return status;
}

absl::Status FakeDevices::UpdateScale(const ScaleRule& rule, ScalerNumbers* numbers, void* stream) {
  absl::Status status = EnterOn("UpdateScale", stream);
  status.Update(Reach("UpdateScale", numbers, sizeof(ScalerNumbers)));
  if (!status.ok()) return status;
  Enqueue(stream, [rule, numbers] { ddp::UpdateScale(rule, *numbers); });
  return absl::OkStatus();
}

}  // namespace ddp::testing
