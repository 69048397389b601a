// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/gpu/device_moves.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "libddp/comm/base/exchange.h"
#include "libddp/device/buffer_ops.h"

namespace ddp {

uint64_t MixHash(uint64_t hash, uint64_t value) { return (hash ^ value) * 0x9e3779b97f4a7c15u + (hash >> 29); }

uint64_t HashOfRanges(uint64_t hash, Buffers buffers) {
  for (const Buffer& b : buffers) hash = MixHash(hash, b.count);
  return hash;
}

std::vector<TransformPiece> PairPieces(Buffers from, Buffers to) {
  std::vector<TransformPiece> pieces;
  size_t i = 0, j = 0, i_done = 0, j_done = 0;
  while (i < from.size() && j < to.size()) {
    const size_t n = std::min(from[i].count - i_done, to[j].count - j_done);
    if (n > 0) {
      pieces.push_back({static_cast<const char*>(from[i].data) + i_done * SizeOf(from[i].dtype),
                        static_cast<char*>(to[j].data) + j_done * SizeOf(to[j].dtype), n});
    }
    i_done += n;
    j_done += n;
    if (i_done == from[i].count) i_done = 0, ++i;
    if (j < to.size() && j_done == to[j].count) j_done = 0, ++j;
  }
  return pieces;
}

absl::Status CopyPieces(DeviceRuntime& runtime, Buffers from, Buffers to, void* stream) {
  std::vector<TransformPiece> pieces = PairPieces(from, to);
  pieces.erase(std::remove_if(pieces.begin(), pieces.end(), [](const TransformPiece& p) { return p.in == p.out; }),
               pieces.end());
  if (pieces.empty()) return absl::OkStatus();
  return runtime.Run({from[0].dtype, from[0].dtype, 1, nullptr}, pieces, stream);
}

absl::StatusOr<Allocation> AllocatePlain(DeviceRuntime& runtime, Device device, size_t bytes) {
  absl::StatusOr<std::shared_ptr<void>> data = runtime.Allocate(device, bytes);
  if (!data.ok()) return data.status();
  return Allocation(*std::move(data), bytes, device);
}

absl::Status NoGpuMemory(size_t bytes, absl::string_view why) {
  return absl::ResourceExhaustedError(absl::StrCat("no ", bytes, " bytes of GPU memory left (", why, ")"));
}

absl::StatusOr<Allocation> AllocateTogether(ProcessGroup& control, DeviceRuntime& runtime, Device device,
                                            size_t bytes) {
  struct Outcome {
    uint64_t bytes;
    Note note;
  };
  absl::StatusOr<Allocation> mine = AllocatePlain(runtime, device, bytes);
  const absl::Status status = mine.ok() ? absl::OkStatus() : NoGpuMemory(bytes, mine.status().message());
  absl::StatusOr<std::vector<Outcome>> all = Exchange(control, Outcome{bytes, Note(status, "")});
  if (!all.ok()) return all.status();
  for (size_t r = 1; r < all->size(); ++r) {
    if ((*all)[r].bytes == (*all)[0].bytes) continue;
    return absl::FailedPreconditionError(
        absl::StrCat("ranks disagree about the size of an allocation: rank 0 asks for ", (*all)[0].bytes,
                     " bytes, rank ", r, " for ", (*all)[r].bytes));
  }
  for (size_t r = 0; r < all->size(); ++r) {
    if (absl::Status s = (*all)[r].note.status(r); !s.ok()) return s;
  }
  return mine;
}

absl::Status StreamScratch::Allocate(size_t count, DType dtype, Device device) {
  absl::StatusOr<void*> data = runtime_.AllocateOnStream(count * SizeOf(dtype), stream_);
  if (!data.ok()) return data.status();
  buffer_ = {*data, count, dtype, device};
  return absl::OkStatus();
}

absl::Status StreamScratch::AllocateFor(Buffers like) {
  return Allocate(std::max<size_t>(Elements(like), 1), like[0].dtype, like[0].device);
}

}  // namespace ddp
