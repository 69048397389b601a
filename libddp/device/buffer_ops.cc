// SPDX-License-Identifier: Apache-2.0
#include "libddp/device/buffer_ops.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <utility>
#include <vector>

#include "libddp/device/cpu_blocks.h"
#include "libddp/device/cpu_low_rank.h"
#include "libddp/device/cpu_norm.h"
#include "libddp/device/cpu_reduce.h"
#include "libddp/device/host_memory.h"

namespace ddp {
namespace {

void* At(const Buffer& b, size_t element) { return static_cast<char*>(b.data) + element * SizeOf(b.dtype); }

// Walks both lists at once; calls fn(source, target, elements) for each stretch that is contiguous in both.
template <typename Fn>
void WalkTogether(Buffers from, Buffers to, Fn&& fn) {
  size_t i = 0, k = 0, in = 0, out = 0;  // elements done of from[i] and to[k]
  while (i < from.size() && k < to.size()) {
    const size_t n = std::min(from[i].count - in, to[k].count - out);
    if (n > 0) fn(At(from[i], in), At(to[k], out), n);
    if ((in += n) == from[i].count) ++i, in = 0;
    if ((out += n) == to[k].count) ++k, out = 0;
  }
}

bool OnGpu(Buffers buffers) { return !buffers.empty() && IsGpu(buffers[0].device); }

absl::Status RunOnGpu(const Transform& transform, absl::Span<const TransformPiece> pieces, Stream stream) {
  if (pieces.empty()) return absl::OkStatus();
  const DeviceGuard guard(Devices(), stream.device);
  if (!guard.status().ok()) return guard.status();
  return Devices().Run(transform, pieces, stream.native);
}

absl::Status CopyOnGpu(Buffers from, Buffers to, double scale, Stream stream, uint32_t* nonfinite) {
  const bool same = from[0].dtype == to[0].dtype && scale == 1 && nonfinite == nullptr;
  std::vector<TransformPiece> pieces;
  WalkTogether(from, to, [&](const void* source, void* target, size_t n) {
    if (!same || source != target) pieces.push_back({source, target, n});
  });
  return RunOnGpu({.in = from[0].dtype, .out = to[0].dtype, .scale = scale, .nonfinite = nonfinite}, pieces, stream);
}

// The GPU converts, in an array of its own.
absl::Status CopyAcross(Buffers from, Buffers to, double scale, Stream stream, uint32_t* nonfinite) {
  const DeviceGuard guard(Devices(), stream.device);
  if (!guard.status().ok()) return guard.status();
  const absl::StatusOr<StreamArray> array =
      StreamArray::Make(Elements(from), (OnGpu(from) ? to : from)[0].dtype, stream);
  if (!array.ok()) return array.status();
  absl::Status status;
  if (OnGpu(from)) status = CopyOnGpu(from, array->span(), scale, stream, nonfinite);
  const auto move = [&](const void* source, void* target, size_t n) {
    status.Update(Devices().Copy(target, source, n * SizeOf(array->buffer().dtype), stream.native));
  };
  if (OnGpu(from)) {
    WalkTogether(array->span(), to, move);
  } else {
    WalkTogether(from, array->span(), move);
    status.Update(CopyOnGpu(array->span(), to, scale, stream, nonfinite));
  }
  status.Update(Synchronize(stream));
  return status;
}

}  // namespace

absl::Status CopyScaled(Buffers from, Buffers to, double scale, Stream stream, uint32_t* nonfinite) {
  if (from.empty() || to.empty()) return absl::OkStatus();
  if (OnGpu(from) != OnGpu(to)) return CopyAcross(from, to, scale, stream, nonfinite);
  if (OnGpu(from)) return CopyOnGpu(from, to, scale, stream, nonfinite);
  const DType in = from[0].dtype, out = to[0].dtype;
  if (in == out && scale == 1 && nonfinite == nullptr) {
    WalkTogether(from, to, [&](const void* source, void* target, size_t n) {
      if (source != target) std::memcpy(target, source, n * SizeOf(in));
    });
    return absl::OkStatus();
  }
  const absl::StatusOr<CpuReduce> copy =
      CpuReduce::Create({.in = in, .out = out, .postscale = scale, .check_nonfinite = nonfinite != nullptr});
  if (!copy.ok()) return copy.status();
  WalkTogether(from, to, [&](const void* source, void* target, size_t n) {
    if ((*copy)(&source, 1, &target, 1, n)) *nonfinite = 1;
  });
  return absl::OkStatus();
}

absl::Status RunBlocks(const blocks::Pass& pass, Device device, Stream stream) {
  if (!IsGpu(device)) {
    CpuRunBlocks(pass);
    return absl::OkStatus();
  }
  const DeviceGuard guard(Devices(), device);
  return guard.status().ok() ? Devices().RunBlocks(pass, stream.native) : guard.status();
}

absl::Status Zero(Buffers buffers, Stream stream) {
  if (OnGpu(buffers)) {
    const DeviceGuard guard(Devices(), stream.device);
    absl::Status status = guard.status();
    for (const Buffer& b : buffers) {
      if (b.count > 0) status.Update(Devices().Zero(b.data, b.count * SizeOf(b.dtype), stream.native));
    }
    return status;
  }
  for (const Buffer& b : buffers) {
    if (b.count > 0) std::memset(b.data, 0, b.count * SizeOf(b.dtype));
  }
  return absl::OkStatus();
}

absl::Status CheckFinite(Buffers buffers, uint32_t* nonfinite, Stream stream) {
  if (OnGpu(buffers)) {
    std::vector<TransformPiece> pieces;
    for (const Buffer& b : buffers) pieces.push_back({b.data, nullptr, b.count});
    return RunOnGpu({.in = buffers[0].dtype, .out = buffers[0].dtype, .nonfinite = nonfinite}, pieces, stream);
  }
  for (const Buffer& b : buffers) {
    const absl::StatusOr<CpuReduce> check = CpuReduce::Create({.in = b.dtype, .out = b.dtype, .check_nonfinite = true});
    if (!check.ok()) return check.status();
    const void* const in = b.data;
    if (b.count > 0 && (*check)(&in, 1, nullptr, 0, b.count)) *nonfinite = 1;
  }
  return absl::OkStatus();
}

double Norm(Buffers buffers, NormKind kind) {
  double part = 0;
  for (const Buffer& b : buffers) part = JoinParts(kind, part, CpuNormPart(b, kind));
  return NormOfPart(kind, part);
}

namespace {

constexpr DType kNormTypes[] = {DType::kFloat64, DType::kFloat32, DType::kFloat16, DType::kBFloat16};
static_assert(std::size(kNormTypes) == kNormParts);

std::vector<TransformPiece> PiecesInPlace(Buffers buffers, DType dtype) {
  std::vector<TransformPiece> pieces;
  for (const Buffer& b : buffers) {
    if (b.dtype == dtype) pieces.push_back({b.data, b.data, b.count});
  }
  return pieces;
}

// *numbers = the norm of a GPU's buffers, and the factor that clips them.
absl::Status StartNorm(Buffers buffers, NormKind kind, double max_norm, ClipNumbers* numbers, Stream stream) {
  const Buffer parts{numbers->parts, kNormParts, DType::kFloat64, stream.device};
  absl::Status status = Zero({&parts, 1}, stream);
  for (size_t t = 0; t < kNormParts && status.ok(); ++t) {
    const std::vector<TransformPiece> pieces = PiecesInPlace(buffers, kNormTypes[t]);
    if (pieces.empty()) continue;
    status = Devices().NormPart(kNormTypes[t], kind, pieces, numbers->parts + t, stream.native);
  }
  return status.ok() ? Devices().FinishClip(kind, max_norm, numbers, stream.native) : status;
}

}  // namespace

absl::StatusOr<double> Norm(Buffers buffers, NormKind kind, Stream stream) {
  if (!OnGpu(buffers)) return Norm(buffers, kind);
  const DeviceGuard guard(Devices(), stream.device);
  if (!guard.status().ok()) return guard.status();
  const absl::StatusOr<StreamArray> memory = StreamArray::Make(sizeof(ClipNumbers), DType::kUInt8, stream);
  if (!memory.ok()) return memory.status();
  auto* const numbers = static_cast<ClipNumbers*>(memory->buffer().data);
  double norm = 0;
  absl::Status status = StartNorm(buffers, kind, 1, numbers, stream);
  if (status.ok()) status = Devices().Copy(&norm, &numbers->norm, sizeof norm, stream.native);
  status.Update(Synchronize(stream));
  if (!status.ok()) return status;
  return norm;
}

absl::Status Clip(Buffers buffers, NormKind kind, double max_norm, ClipNumbers* numbers, Stream stream) {
  const DeviceGuard guard(Devices(), stream.device);
  absl::Status status = guard.status();
  if (status.ok()) status = StartNorm(buffers, kind, max_norm, numbers, stream);
  for (const DType dtype : kNormTypes) {
    const std::vector<TransformPiece> pieces = PiecesInPlace(buffers, dtype);
    if (pieces.empty() || !status.ok()) continue;
    status = Devices().Run({.in = dtype, .out = dtype, .factor = &numbers->factor}, pieces, stream.native);
  }
  return status;
}

absl::Status RunLowRank(LowRankPass pass, DType dtype, const LowRankStep& step,
                        absl::Span<const LowRankMatrix> matrices, Device device, Stream stream) {
  if (!IsGpu(device)) {
    CpuLowRank(pass, dtype, step, matrices);
    return absl::OkStatus();
  }
  const DeviceGuard guard(Devices(), device);
  if (!guard.status().ok()) return guard.status();
  return Devices().RunLowRank(pass, dtype, step, matrices, stream.native);
}

absl::StatusOr<std::shared_ptr<void>> AllocateOn(Device device, size_t bytes) {
  return IsGpu(device) ? Devices().Allocate(device, bytes) : AllocateHost(bytes);
}

absl::StatusOr<StreamArray> StreamArray::Make(size_t count, DType dtype, Stream stream) {
  StreamArray array;
  array.stream_ = stream;
  const size_t bytes = std::max<size_t>(count, 1) * SizeOf(dtype);
  if (!IsGpu(stream.device)) {
    array.host_.resize(bytes);
    array.buffer_ = {array.host_.data(), count, dtype, {}};
    return array;
  }
  const DeviceGuard guard(Devices(), stream.device);
  if (!guard.status().ok()) return guard.status();
  const absl::StatusOr<void*> data = Devices().AllocateOnStream(bytes, stream.native);
  if (!data.ok()) return data.status();
  array.buffer_ = {*data, count, dtype, stream.device};
  return array;
}

StreamArray::~StreamArray() {
  if (!IsGpu(buffer_.device) || buffer_.data == nullptr) return;
  const DeviceGuard guard(Devices(), stream_.device);
  Devices().FreeOnStream(buffer_.data, stream_.native).IgnoreError();
}

}  // namespace ddp
