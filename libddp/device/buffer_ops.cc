#include "libddp/device/buffer_ops.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "libddp/device/cpu_norm.h"
#include "libddp/device/cpu_reduce.h"

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

}  // namespace

absl::Status CopyScaled(Buffers from, Buffers to, double scale, Stream) {
  if (from.empty() || to.empty()) return absl::OkStatus();
  const DType in = from[0].dtype, out = to[0].dtype;
  if (in == out && scale == 1) {
    WalkTogether(from, to, [&](const void* source, void* target, size_t n) {
      if (source != target) std::memcpy(target, source, n * SizeOf(in));
    });
    return absl::OkStatus();
  }
  const absl::StatusOr<CpuReduce> copy = CpuReduce::Create({.in = in, .out = out, .postscale = scale});
  if (!copy.ok()) return copy.status();
  WalkTogether(from, to, [&](const void* source, void* target, size_t n) { (*copy)(&source, 1, &target, 1, n); });
  return absl::OkStatus();
}

void Zero(Buffers buffers, Stream) {
  for (const Buffer& b : buffers) {
    if (b.count > 0) std::memset(b.data, 0, b.count * SizeOf(b.dtype));
  }
}

absl::Status CheckFinite(Buffers buffers, uint32_t* nonfinite, Stream) {
  for (const Buffer& b : buffers) {
    const absl::StatusOr<CpuReduce> check = CpuReduce::Create({.in = b.dtype, .out = b.dtype, .check_nonfinite = true});
    if (!check.ok()) return check.status();
    const void* const in = b.data;
    if (b.count > 0 && (*check)(&in, 1, nullptr, 0, b.count)) *nonfinite = 1;
  }
  return absl::OkStatus();
}

double Norm(Buffers buffers, NormKind kind) {
  double total = 0;
  for (const Buffer& b : buffers) {
    const double part = CpuNormPart(b, kind);
    if (kind == NormKind::kMax) {
      total = std::isnan(part) || part > total ? part : total;
      if (std::isnan(total)) return total;
    } else {
      total += part;
    }
  }
  return kind == NormKind::kL2 ? std::sqrt(total) : total;
}

}  // namespace ddp
