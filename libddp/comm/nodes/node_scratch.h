// SPDX-License-Identifier: Apache-2.0
// The memory in which a rank exchanges chunks with other nodes.
#ifndef LIBDDP_COMM_NODES_NODE_SCRATCH_H_
#define LIBDDP_COMM_NODES_NODE_SCRATCH_H_

#include <array>
#include <cstddef>

#include "absl/status/status.h"
#include "libddp/comm/memory/shared_segment.h"

namespace ddp {

// Chunks under way at a time.
inline constexpr size_t kChunksInFlight = 4;
// Scratch memory of one chunk: for messages of 512 KiB between two nodes.
inline constexpr size_t kScratchBytes = size_t{13} << 18;

// A rank's share of its node's segment, kScratchBytes for each chunk. It is reserved, near the rank, when an operation
// needs it: a group whose operations are all small has little. Not thread-safe.
class NodeScratch {
 public:
  static constexpr size_t kBytes = kChunksInFlight * kScratchBytes;

  // The segment outlives the last call of Reserve.
  NodeScratch(SharedSegment& segment, size_t offset) : segment_(segment), offset_(offset) {}

  char* chunk(size_t number) const { return segment_.data() + OffsetOf(number); }
  // The first `bytes` of a chunk's can be used from now on. ResourceExhausted if there is too little memory.
  absl::Status Reserve(size_t number, size_t bytes) {
    if (whole_ || (bytes <= kLeast && begun_[number])) return absl::OkStatus();
    const bool little = bytes <= kLeast;
    const size_t begin = little ? OffsetOf(number) : offset_, size = little ? kLeast : kBytes;
    if (absl::Status s = segment_.ReserveHugePages(begin, size); !s.ok()) return s;
    segment_.Prepare(begin, size);
    begun_[number] = true;
    whole_ = !little;
    return absl::OkStatus();
  }

 private:
  // Operations of some KiB need no more: headers take most of it.
  static constexpr size_t kLeast = size_t{256} << 10;

  size_t OffsetOf(size_t number) const { return offset_ + number * kScratchBytes; }

  SharedSegment& segment_;
  const size_t offset_;
  std::array<bool, kChunksInFlight> begun_ = {};  // by chunk: kLeast of it is reserved
  bool whole_ = false;                            // so is everything
};

}  // namespace ddp

#endif  // LIBDDP_COMM_NODES_NODE_SCRATCH_H_
