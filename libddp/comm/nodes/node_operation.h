// SPDX-License-Identifier: Apache-2.0
// One operation of a group of several nodes: what it is, and how it is cut into blocks and chunks.
#ifndef LIBDDP_COMM_NODES_NODE_OPERATION_H_
#define LIBDDP_COMM_NODES_NODE_OPERATION_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "libddp/comm/base/node_layout.h"
#include "libddp/comm/base/operation_key.h"
#include "libddp/comm/base/range_list.h"
#include "libddp/comm/nodes/block_plan.h"
#include "libddp/comm/nodes/node_work.h"
#include "libddp/device/cpu_reduce.h"

namespace ddp {

// What nodes tell each other of an operation before they use each other's data.
struct NodeHeader {
  uint64_t sequence = 0;
  CallSummary call = {};
  friend bool operator==(const NodeHeader&, const NodeHeader&) = default;
};

// Life: queued -> begun, chunk by chunk -> finished. The pipeline's mutex guards everything but the atomics.
class NodeOperation final : public NodeWork {
 public:
  // The layout and the plan outlive the operation.
  NodeOperation(NodePipeline* pipeline, const OperationKey& key, const NodeLayout& layout, const BlockPlan& plan,
                int rank)
      : NodeWork(pipeline), key_(key), layout_(layout), plan_(plan), rank_(rank) {}

  // --- set before the launch ---
  ProgramCall called;
  RangeList in, out;  // this rank's data
  size_t count = 0;   // as Operation::count
  // Where block b begins in the whole array, and at last its end; only for a plan with a block for each rank.
  std::vector<size_t> begins;
  DType partial = DType::kUInt8;  // of a node's sum
  bool sums_as_is = false;        // the sum of one rank alone is what it has
  CpuReduce sum, finish;          // within a node, and between nodes
  uint64_t parameters = 0;        // of what else all ranks must agree on
  uint32_t* nonfinite = nullptr;
  int bucket = -1;
  absl::Duration timeout = absl::InfiniteDuration();
  // Decides on the chunks; to be called when all of these are set.
  void Cut();

  // --- the pipeline's ---
  uint64_t sequence = 0;
  size_t begun = 0, finished = 0;            // chunks
  bool exposed = false;                      // the wire works on `in` or `out`, in their second view
  std::vector<std::shared_ptr<char>> views;  // which the wire works on

  NodeHeader header() const { return {sequence, {called.key.Pack(), called.count, parameters}}; }
  // FailedPrecondition, with both calls, if a rank of another node makes another one.
  absl::Status Compare(const NodeHeader& theirs, int their_rank) const;

  const OperationKey& key() const { return key_; }
  const BlockPlan& plan() const { return plan_; }
  std::string Describe() const override;  // "operation 7, all_reduce(avg, float32, 100 elements), bucket 3"
  size_t in_size() const { return SizeOf(key_.in); }
  size_t out_size() const { return SizeOf(key_.out); }
  size_t partial_size() const { return SizeOf(partial); }

  bool Is(OperationKey::Kind kind) const { return key_.kind == kind; }
  // Whether blocks are summed, and whether their final values go to everybody.
  bool reduces() const { return Is(OperationKey::Kind::kAllReduce) || Is(OperationKey::Kind::kReduceScatter); }
  bool spreads() const;
  bool exchanges_all() const { return Is(OperationKey::Kind::kAllToAll); }
  // Whether the final value of a block travels with a word that says whether it has an inf or nan.
  bool flags() const { return Is(OperationKey::Kind::kAllReduce) && nonfinite != nullptr; }

  size_t chunks() const { return chunks_; }
  // Whether this rank's sums of the chunk travel with its header: a message less, to the same ranks.
  bool Carries(size_t chunk) const { return carries_ && chunk == 0; }
  // Elements that each block has room for in a chunk.
  size_t Room(size_t chunk) const;
  // What of a block belongs to a chunk: elements [begin, begin + count) of the whole array.
  struct Part {
    size_t begin = 0, count = 0;
  };
  Part PartOf(int block, size_t chunk) const;
  // From one block's final value to the next one's, in bytes.
  size_t Stride(size_t room) const { return room * out_size() + (flags() ? sizeof(uint64_t) : 0); }

  // Where things lie in the scratch memory of a chunk, as offsets in bytes.
  struct Areas {
    size_t partial = 0;   // the node's sums of this rank's slice
    size_t received = 0;  // other nodes' sums of the blocks whose root this rank is
    size_t result = 0;    // final values: of this rank's slice; of the blocks whose root it is
    size_t zeros = 0;     // read where a slice has no data
    size_t waste = 0;     // written where a slice has no data, and the flags
    size_t headers = 0;   // by node, see HeaderStride
    size_t end = 0;
  };
  Areas AreasFor(size_t room) const { return AreasFor(room, layout_.node_of(rank_)); }
  // From one header to the next one, with what it carries. The same for all calls, as the ranks may not agree on one.
  size_t HeaderStride() const;
  // The place in this rank's slice of a block that it owns, and the place in `result` of the block's final value.
  size_t SlicePlace(int block) const;
  size_t ResultPlace(int block) const;

 private:
  ~NodeOperation() override = default;

  Areas AreasFor(size_t room, int node) const;
  bool Fits(size_t room) const;
  size_t BlockElements() const;
  // Elements of a block that belong to the chunks before this one.
  size_t Before(size_t chunk) const { return chunk == 0 ? 0 : first_ + (chunk - 1) * room_; }

  const OperationKey key_;
  const NodeLayout& layout_;
  const BlockPlan& plan_;
  const int rank_;
  size_t first_ = 0, room_ = 0;  // of the first chunk, and of all but that and perhaps the last
  size_t chunks_ = 1;
  bool carries_ = false;
};

}  // namespace ddp

#endif  // LIBDDP_COMM_NODES_NODE_OPERATION_H_
