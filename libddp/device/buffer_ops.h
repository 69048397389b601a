// SPDX-License-Identifier: Apache-2.0
// What the layers above do to arrays by themselves: copy, convert, scale, zero, look for what is not finite, measure.
// The one place that asks on which device memory lies: a GPU's is worked on in the order of the stream given with it.
#ifndef LIBDDP_DEVICE_BUFFER_OPS_H_
#define LIBDDP_DEVICE_BUFFER_OPS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ddp/types.h"
#include "libddp/device/block_rule.h"
#include "libddp/device/device_runtime.h"

namespace ddp {

// Of all buffers together.
inline size_t Elements(Buffers buffers) {
  size_t count = 0;
  for (const Buffer& b : buffers) count += b.count;
  return count;
}

// to = scale * from, element by element, converting between float32 and the 16-bit floats with one rounding. Equal
// total counts; `to` may be `from`. A scale of 1 between equal types moves bits. If `nonfinite` is set, 1 is stored
// there if `to` gets an infinity or a NaN (floating-point types; a GPU must be able to write there). InvalidArgument
// for types that do not convert. Between a GPU and the CPU the host waits until it has happened.
absl::Status CopyScaled(Buffers from, Buffers to, double scale, Stream stream, uint32_t* nonfinite = nullptr);

// Arrays in and out of block-scaled 8-bit numbers, in memory of `device`; see block_rule.h.
absl::Status RunBlocks(const blocks::Pass& pass, Device device, Stream stream);

absl::Status Zero(Buffers buffers, Stream stream);

// Stores 1 in *nonfinite if an element is an infinity or a NaN; otherwise leaves it alone. Floating-point types.
absl::Status CheckFinite(Buffers buffers, uint32_t* nonfinite, Stream stream);

// The norm of all elements together, computed in float64 in an order that depends on the counts alone: equal inputs
// give equal bits on every processor. NaN and infinities come out as such. Floating-point types, host memory.
double Norm(Buffers buffers, NormKind kind);

// The same wherever the buffers are. The host waits for a GPU's, whose order of additions is another.
absl::StatusOr<double> Norm(Buffers buffers, NormKind kind, Stream stream);

// On a GPU: scales the buffers by ClipFactor of their norm, which is stored in numbers->norm, in the GPU's memory. All
// of it happens in the order of the stream.
absl::Status Clip(Buffers buffers, NormKind kind, double max_norm, ClipNumbers* numbers, Stream stream);

// Low-rank compression of matrices on `device`; see low_rank.h. `dtype`: of gradients and messages; float32 or a 16-bit
// float.
absl::Status RunLowRank(LowRankPass pass, DType dtype, const LowRankStep& step,
                        absl::Span<const LowRankMatrix> matrices, Device device, Stream stream);

// Zeroed memory, for as long as it has an owner.
absl::StatusOr<std::shared_ptr<void>> AllocateOn(Device device, size_t bytes);

// An array on the stream's device for use in the stream's order. Not thread-safe.
class StreamArray {
 public:
  static absl::StatusOr<StreamArray> Make(size_t count, DType dtype, Stream stream);
  StreamArray(StreamArray&& other) noexcept
      : host_(std::move(other.host_)), stream_(other.stream_), buffer_(std::exchange(other.buffer_, {})) {}
  StreamArray& operator=(StreamArray&& other) noexcept {
    std::swap(host_, other.host_);
    std::swap(stream_, other.stream_);
    std::swap(buffer_, other.buffer_);
    return *this;
  }
  ~StreamArray();

  const Buffer& buffer() const { return buffer_; }
  Buffers span() const { return {&buffer_, 1}; }

 private:
  StreamArray() = default;
  std::vector<char> host_;  // on the CPU
  Stream stream_;
  Buffer buffer_;
};

}  // namespace ddp

#endif  // LIBDDP_DEVICE_BUFFER_OPS_H_
