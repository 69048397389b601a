// SPDX-License-Identifier: Apache-2.0
// A hierarchical group whose ranks are on several nodes.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "libddp/comm/base/range_list.h"
#include "libddp/comm/hierarchical_group.h"
#include "libddp/comm/nodes/node_pipeline.h"

namespace ddp {
namespace {

using Kind = OperationKey::Kind;

// About so many bytes more are sent in the time that another exchange would take.
constexpr size_t kExchangeBytes = size_t{16} << 10;
// Of a share above that it costs more to sum all of it on each node than to send one message less for each chunk.
constexpr size_t kMostOnEachNode = size_t{512} << 10;

class MultiNodeGroup final : public HierarchicalGroup {
 public:
  MultiNodeGroup(Members members, const std::shared_ptr<SharedSegment>& segment, const GroupOptions& options,
                 std::unique_ptr<NodeWire> wire)
      : HierarchicalGroup(std::move(members), options, Address::kAllocations, /*viewed=*/true),
        even_(BlockPlan::Even(members_.layout)),
        on_each_node_(BlockPlan::OnEachNode(members_.layout, members_.layout.node_of(rank()))),
        per_rank_(BlockPlan::PerRank(members_.layout)),
        pipeline_(PipelineOptions(segment, std::move(wire)), options.progress) {
    for (int r = 0; r < size(); ++r) from_root_.push_back(BlockPlan::FromRoot(members_.layout, r));
  }

  void Abort(absl::Status why) override {
    pipeline_.Fail(
        absl::AbortedError(absl::StrCat(world_ranks().NameOf(rank()), " aborted the group: ", why.message())),
        /*background=*/false);
  }
  // Not only by the program's threads.
  void Fail(const absl::Status& why) override { pipeline_.Fail(why, /*background=*/true); }
  absl::Status status() const override { return pipeline_.status(); }
  AbsentRanks AskNodes() override { return pipeline_.AskNodes(); }
  void Progress() override { pipeline_.Progress(); }
  Observer* observer() const override { return pipeline_.listener(); }

 private:
  Work StartChecked(const CheckedCall& call) override;
  Work StartMessage(const MessageCall& m) override {
    NodeMessageSpec spec{m.peer, m.tag, m.extent.dtype, m.extent.count, m.timeout, Ranges(m.buffers)};
    return m.send ? pipeline_.Send(std::move(spec)) : pipeline_.Recv(std::move(spec));
  }
  NodeWire* wire() override { return pipeline_.options().wire.get(); }
  NodePipelineOptions PipelineOptions(const std::shared_ptr<SharedSegment>& segment, std::unique_ptr<NodeWire> wire);
  void SetReduce(const CheckedCall& call, NodeOperation* operation) const;
  const BlockPlan& PlanOf(const CheckedCall& call) const;
  const BlockPlan& AllReducePlan(size_t elements, size_t partial_size, size_t out_size) const;

  const BlockPlan even_, on_each_node_, per_rank_;
  std::vector<BlockPlan> from_root_;
  NodePipeline pipeline_;
};

NodePipelineOptions MultiNodeGroup::PipelineOptions(const std::shared_ptr<SharedSegment>& segment,
                                                    std::unique_ptr<NodeWire> wire) {
  // The engines do parts of the group's operations: nobody hears of these.
  GroupOptions reducing = options_, spreading = options_;
  reducing.observer = spreading.observer = nullptr;
  reducing.stall_warning = spreading.stall_warning = absl::ZeroDuration();
  std::vector<std::string> host_names;
  for (const Introduction& i : members_.all) host_names.push_back(i.host_name);
  const size_t control = ControlBlock::Bytes(static_cast<int>(members_.node().size()));
  return {.rank = rank(),
          .layout = members_.layout,
          .host_names = std::move(host_names),
          .oversubscribed = members_.oversubscribed,
          .stall_warning = options_.stall_warning,
          .observer = options_.observer,
          .group = GroupNumber(options_),
          .reducing = EngineAt(*segment, 0, reducing),
          .spreading = EngineAt(*segment, control, spreading),
          .allocations = &allocations_,
          .segment = segment,
          .scratch_offset = 2 * control,
          .wire = std::move(wire)};
}

// A node's sum has this type: it is neither divided nor rounded, which is done once, to the sum over all nodes.
DType PartialOf(DType in) { return in == DType::kFloat16 || in == DType::kBFloat16 ? DType::kFloat32 : in; }

Work MultiNodeGroup::StartChecked(const CheckedCall& call) {
  auto* operation = new NodeOperation(&pipeline_, call.key, members_.layout, PlanOf(call), rank());
  operation->called = call.called;
  operation->in = Ranges(call.in);
  operation->out = Ranges(call.out);
  operation->count = call.count;
  operation->parameters = call.parameters;
  operation->begins = call.Begins();
  operation->timeout = call.timeout;
  // One block for each rank, all of so many elements.
  const auto cut = [&](size_t block) {
    for (int r = 0; r <= size(); ++r) operation->begins.push_back(static_cast<size_t>(r) * block);
  };
  if (call.key.kind == Kind::kReduceScatter) cut(call.out_count);
  if (call.key.kind == Kind::kAllGather) cut(call.count);
  if (call.key.kind == Kind::kAllToAll) cut(call.count / static_cast<size_t>(size()));
  if (call.reduce != nullptr) SetReduce(call, operation);
  operation->Cut();
  return pipeline_.Launch(operation);
}

// Which types and scales there are has been checked for the whole reduction; its two steps have no fewer.
void MultiNodeGroup::SetReduce(const CheckedCall& call, NodeOperation* operation) const {
  const ReduceOptions& options = *call.reduce;
  const DType partial = PartialOf(call.key.in);
  operation->partial = partial;
  operation->sums_as_is = partial == call.key.in && options.prescale == 1;
  operation->sum = *CpuReduce::Create({.in = call.key.in,
                                       .out = partial,
                                       .op = options.op == ReduceOp::kAvg ? ReduceOp::kSum : options.op,
                                       .prescale = options.prescale});
  operation->finish = *CpuReduce::Create({.in = partial,
                                          .out = call.key.out,
                                          .op = options.op,
                                          .postscale = options.postscale,
                                          .average_over = size(),
                                          .check_nonfinite = options.nonfinite != nullptr});
  operation->nonfinite = options.nonfinite;
  operation->bucket = options.bucket;
}

const BlockPlan& MultiNodeGroup::PlanOf(const CheckedCall& call) const {
  switch (call.key.kind) {
    case Kind::kAllReduce:
      return AllReducePlan(call.count, SizeOf(PartialOf(call.key.in)), SizeOf(call.key.out));
    case Kind::kBroadcast:
      return from_root_[call.key.root];
    case Kind::kReduceScatter:
    case Kind::kAllGather:
    case Kind::kAllGatherV:
    case Kind::kAllToAll:
      return per_rank_;
    default:
      return even_;
  }
}

// If a block has one root, every rank sends and receives sums of (N - 1) / N of its share, then as much of final
// values. If it has a root on each node, a rank sends and receives sums of N - 1 times its share, and that is all. The
// second takes one exchange instead of two, for two nodes with as many bytes; both make the same sums, bit for bit.
const BlockPlan& MultiNodeGroup::AllReducePlan(size_t elements, size_t partial_size, size_t out_size) const {
  const size_t nodes = static_cast<size_t>(members_.layout.nodes());
  const size_t share = elements / static_cast<size_t>(members_.layout.widest());
  const size_t twice = (nodes - 1) * share / nodes * (partial_size + out_size),
               once = (nodes - 1) * share * partial_size;
  const bool on_each = once <= twice + kExchangeBytes && share * partial_size <= kMostOnEachNode;
  return on_each ? on_each_node_ : even_;
}

}  // namespace

// A control block for each of the two engines.
size_t MultiNodeGroupBytes(int ranks) { return 2 * ControlBlock::Bytes(ranks); }

std::unique_ptr<ProcessGroup> MakeMultiNodeGroup(Members members, const std::shared_ptr<SharedSegment>& segment,
                                                 const GroupOptions& options, std::unique_ptr<NodeWire> wire) {
  return std::make_unique<MultiNodeGroup>(std::move(members), segment, options, std::move(wire));
}

}  // namespace ddp
