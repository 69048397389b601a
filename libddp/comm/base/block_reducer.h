// SPDX-License-Identifier: Apache-2.0
// Gradients in block-scaled 8 bits (block_rule.h), reduced in one operation.
#ifndef LIBDDP_COMM_BASE_BLOCK_REDUCER_H_
#define LIBDDP_COMM_BASE_BLOCK_REDUCER_H_

#include "ddp/process_group.h"
#include "libddp/device/block_rule.h"

namespace ddp {

// buffer = postscale * sum(prescale * buffer), each contribution and the sum in 8 bits.
struct BlockReduce {
  Buffer buffer;  // float32, float16 or bfloat16
  blocks::Format format = blocks::Format::kInt8;
  float prescale = 1, postscale = 1;
  int bucket = -1;  // as in ReduceOptions
  Stream after = {};
};

// What a group may be besides: it does in one operation, with less data to move, what a hook does in several
// (reducer/block_hook.cc). The bits are the same.
class BlockReducer {
 public:
  // The same on all ranks. If not, the rest may not be called.
  virtual bool reduces_blocks() const = 0;
  virtual Work AllReduceBlocks(const BlockReduce& reduce) = 0;

 protected:
  ~BlockReducer() = default;
};

// Null if the group cannot.
inline BlockReducer* BlockReducerOf(ProcessGroup& group) {
  auto* const reducer = dynamic_cast<BlockReducer*>(&group);
  return reducer != nullptr && reducer->reduces_blocks() ? reducer : nullptr;
}

}  // namespace ddp

#endif  // LIBDDP_COMM_BASE_BLOCK_REDUCER_H_
