// SPDX-License-Identifier: Apache-2.0
// A chunk of an operation on its way through three stages, of which those of different chunks overlap:
//
//   reducing    on each node the ranks sum their data; each then owns the node's sum of its slice
//   exchanging  the owner of a block on each node sends its node's sum to the block's root, which adds them in node
//               order, scales, checks and rounds once, and sends the result to the other owners
//   spreading   on each node the ranks gather each other's slices
//
// The first and the last stage are operations of two engines over memory that the ranks of a node share; the second
// uses the wire. There are two engines because all ranks must launch the operations of one in the same order: each gets
// the chunks in their order, but whether one chunk's third stage or a later one's first comes earlier depends on time.
#ifndef LIBDDP_COMM_NODES_CHUNK_H_
#define LIBDDP_COMM_NODES_CHUNK_H_

#include <cstddef>
#include <deque>
#include <set>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "libddp/comm/base/node_layout.h"
#include "libddp/comm/health/flight_notes.h"
#include "libddp/comm/host/engine.h"
#include "libddp/comm/memory/allocation_table.h"
#include "libddp/comm/nodes/node_operation.h"
#include "libddp/comm/nodes/node_scratch.h"
#include "libddp/comm/nodes/node_wire.h"

namespace ddp {

// Who gives up when, of the time-out. First whoever waits within its node for a rank that has not come: it knows which
// one it is. Then who waits for another node, and knows only that a message is missing. Then who waits for a rank of
// its node that may itself be waiting for another one. Last who knows of none of these.
inline constexpr double kReducingShare = 0.95, kNodesShare = 1.1, kSpreadingShare = 1.2, kUnknownShare = 1.3;

// What the chunks of a group work with.
struct ChunkContext {
  const NodeLayout& layout;
  const int rank;
  Engine& reducing;
  Engine& spreading;
  NodeWire& wire;
  const AllocationTable& allocations;
  const FlightNotes& notes;

  int node() const { return layout.node_of(rank); }
  int local() const { return layout.local_of(rank); }
  int width() const { return layout.width(node()); }
};

// Used for one chunk after the other. Not thread-safe.
class Chunk {
 public:
  // The context and the scratch memory, which the engines know, outlive this. `number`: of this chunk in that.
  Chunk(const ChunkContext& context, NodeScratch& scratch, size_t number)
      : context_(context), memory_(scratch), number_(number), scratch_(scratch.chunk(number)) {}

  // Begins the operation's next chunk. `earlier`: the chunk before it, or null. Errors: those of an engine, and
  // ResourceExhausted.
  absl::Status Begin(NodeOperation* operation, const Chunk* earlier);
  // Does what can be done without waiting; returns whether anything was. Each stage takes the chunks in their order.
  absl::StatusOr<bool> Advance(const Chunk* earlier);

  bool finished() const { return stage_ == Stage::kFinished; }
  // Whether the engines have nothing to do with it.
  bool LeftEngines() const { return part_.Done(); }
  const NodeOperation* operation() const { return operation_; }
  // The ranks of other nodes that it waits for: for them to make the call or, if all have (`arrived`), to do their
  // part.
  std::set<int> Missing(bool* arrived) const;

 private:
  enum class Stage { kReducing, kExchanging, kSpreading, kFinished };

  absl::Status LaunchReducing();
  absl::StatusOr<bool> Exchange(const Chunk* earlier);
  absl::Status LaunchSpreading();
  absl::Status Launch(Engine* engine, Operation* part);

  void ReceiveHeaders();
  void SendHeaders();
  absl::Status CompareHeaders();
  void PlaceSlice();
  char* PlaceSum(int block, char* scratch);
  char* PlaceFinal(int block, char* scratch);
  char* View(char* data, size_t bytes);
  void ReceiveSums();
  void ReceiveResults(const Chunk* earlier);
  void SendSums();
  void FinishBlocks();
  void Sum(int block, const char* received, size_t stride, char* result) const;
  void SendParts();
  void TakeParts() const;
  void TakeFinals() const;
  void AddSlices(const RangeList& from, size_t size, bool scatter, RangeList* to) const;
  void CollectFlags() const;

  const BlockPlan& plan() const { return operation_->plan(); }
  const std::vector<int>& slice() const { return plan().slice(context_.node(), context_.local()); }
  bool alone() const { return context_.width() == 1; }
  bool is_root(int block) const { return plan().root(block) == context_.rank; }
  NodeOperation::Part PartOf(int block) const { return operation_->PartOf(block, index_); }
  // Each rank compares its call with one rank of each other node; within a node the engine does.
  int HeaderRank(int node) const { return context_.layout.rank(node, context_.local() % context_.layout.width(node)); }
  // The other nodes' one after the other, in their order, then this one's.
  char* HeaderOf(int node) const {
    const int own = context_.node();
    const int place = node < own ? node : (node == own ? context_.layout.nodes() : node) - 1;
    return scratch_ + areas_.headers + static_cast<size_t>(place) * operation_->HeaderStride();
  }
  // Of the message that brings a block's final value.
  size_t ResultBytes(int block) const {
    return operation_->flags() ? operation_->Stride(room_) : PartOf(block).count * operation_->out_size();
  }
  char* ResultOf(int block) const {
    return scratch_ + areas_.result + operation_->ResultPlace(block) * operation_->Stride(room_);
  }
  char* FinalOf(int block) const { return finals_.empty() ? ResultOf(block) : finals_[operation_->SlicePlace(block)]; }
  // Calls fn(the block's owner) for each other node.
  template <typename Fn>
  void ForOtherOwners(int block, Fn&& fn) const {
    for (int n = 0; n < context_.layout.nodes(); ++n) {
      if (n != context_.node()) fn(plan().owner(n, block));
    }
  }

  const ChunkContext& context_;
  NodeScratch& memory_;
  const size_t number_;
  char* const scratch_;
  NodeOperation* operation_ = nullptr;
  size_t index_ = 0, room_ = 0;
  NodeOperation::Areas areas_;
  Stage stage_ = Stage::kReducing;
  // Where the sums and the final values of this rank's slice lie, block by block. The final values of most operations
  // are in areas_.result instead.
  absl::InlinedVector<char*, 4> sums_, finals_;
  bool carried_ = false;                               // the sums travel with the header
  bool agreed_ = false;                                // all nodes make the same call
  bool exposed_ = false;                               // the wire works on the user's memory
  bool receiving_ = false;                             // results can come
  bool summed_ = false;                                // the blocks whose root this rank is have their final values
  Work part_;                                          // what an engine does of it
  std::deque<Transfer> headers_, partials_, results_;  // to be received
  std::deque<Transfer> sends_;
};

}  // namespace ddp

#endif  // LIBDDP_COMM_NODES_CHUNK_H_
