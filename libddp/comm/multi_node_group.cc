#include "libddp/comm/multi_node_group.h"
#include "libddp/comm/memory/allocation_table.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <mutex>
#include <string>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "libddp/base/log.h"
#include "libddp/comm/base/checked_group.h"
#include "libddp/comm/base/exchange.h"
#include "libddp/comm/hierarchical_group.h"
#include "libddp/comm/local_group.h"
#include "libddp/comm/memory/group_memory.h"
#include "libddp/comm/memory/share_segment.h"
#include "libddp/comm/nodes/node_pipeline.h"
#include "libddp/launch/memory_wire.h"

namespace ddp {
namespace {

using Kind = OperationKey::Kind;

// Who gives up when, of the time-out. First whoever waits within its node for a rank that has not come: it knows which
// one it is, a rank of another node only that a message is missing. Last whoever waits for a rank of its node that may
// itself be waiting for another node.
constexpr double kReducingShare = 0.95, kSpreadingShare = 1.05;

// About so many bytes more are sent in the time that another exchange would take.
constexpr size_t kExchangeBytes = size_t{16} << 10;
// Of a share above that it costs more to sum all of it on each node than to send one message less for each chunk.
constexpr size_t kMostOnEachNode = size_t{512} << 10;

// What ranks that are to form a group know of each other, by rank in it.
struct Members {
  int rank = 0;  // this process's
  NodeLayout layout;
  std::vector<std::string> host_names;
  std::vector<ProcessId> processes;
  std::vector<int> wire_ranks;
  bool oversubscribed = false;
};

// Channels of the wire are numbered alike on the ranks that use them; every rank knows which it has not used yet.
using ChannelCounter = std::shared_ptr<std::atomic<uint32_t>>;

class MultiNodeGroup final : public CheckedGroup {
 public:
  MultiNodeGroup(NodePipelineOptions options, Members members, ChannelCounter channels, const GroupOptions& group)
      : members_(std::move(members)),
        channels_(std::move(channels)),
        group_options_(group),
        even_(BlockPlan::Even(members_.layout)),
        on_each_node_(BlockPlan::OnEachNode(members_.layout, members_.layout.node_of(rank()))),
        per_rank_(BlockPlan::PerRank(members_.layout)),
        allocations_(members_.layout.local_of(rank())),
        pipeline_(WithTable(std::move(options)), group.progress),
        memory_(this, members_.layout.ranks[static_cast<size_t>(members_.layout.node_of(rank()))], &allocations_,
                /*viewed=*/true) {
    for (int r = 0; r < size(); ++r) from_root_.push_back(BlockPlan::FromRoot(members_.layout, r));
  }

  int rank() const override { return members_.rank; }
  int size() const override { return members_.layout.size(); }
  absl::string_view backend() const override { return "hierarchical"; }

  absl::Status Register(const Allocation& memory) override;
  std::optional<AllocatedRange> Find(const void* data, size_t bytes) const override {
    return memory_.Find(data, bytes);
  }
  absl::StatusOr<std::unique_ptr<ProcessGroup>> Split(int color, int key) override;

  void Abort(absl::Status why) override {
    pipeline_.Fail(absl::AbortedError(absl::StrCat("rank ", rank(), " aborted the group: ", why.message())),
                   /*background=*/false);
  }
  // Not only by the program's threads.
  void Fail(const absl::Status& why) override { pipeline_.Fail(why, /*background=*/true); }
  absl::Status status() const override { return pipeline_.status(); }
  void Progress() override { pipeline_.Progress(); }
  Observer* observer() const override { return pipeline_.listener(); }

 private:
  absl::StatusOr<Work> Start(const Call& call) override;
  absl::StatusOr<Work> StartMessage(const MessageCall& m) override {
    NodeMessageSpec spec{m.peer, m.tag, m.extent.dtype, m.extent.count, Ranges(m.buffers)};
    return m.send ? pipeline_.Send(std::move(spec)) : pipeline_.Recv(std::move(spec));
  }
  absl::StatusOr<Allocation> AllocateHere(size_t bytes) override {
    std::lock_guard<std::mutex> lock(exchange_mutex_);
    return memory_.Allocate(bytes);
  }
  void SetReduce(const Call& call, NodeOperation* operation) const;
  const BlockPlan& PlanOf(const Call& call) const;
  const BlockPlan& AllReducePlan(size_t elements, size_t partial_size, size_t out_size) const;
  NodePipelineOptions WithTable(NodePipelineOptions options) {
    options.allocations = options.reducing.allocations = options.spreading.allocations = &allocations_;
    return options;
  }

  const Members members_;
  const ChannelCounter channels_;
  const GroupOptions group_options_;

  const BlockPlan even_, on_each_node_, per_rank_;
  std::vector<BlockPlan> from_root_;
  AllocationTable allocations_;
  NodePipeline pipeline_;
  std::mutex exchange_mutex_;  // one Allocate, Register or Split at a time
  GroupMemory memory_;
};

// A node's sum has this type: it is neither divided nor rounded, which is done once, to the sum over all nodes.
DType PartialOf(DType in) { return in == DType::kFloat16 || in == DType::kBFloat16 ? DType::kFloat32 : in; }

absl::StatusOr<Work> MultiNodeGroup::Start(const Call& call) {
  auto* operation = new NodeOperation(&pipeline_, call.key, members_.layout, PlanOf(call), rank());
  operation->in = Ranges(call.in);
  operation->out = Ranges(call.out);
  operation->count = call.count;
  operation->parameters = call.parameters;
  operation->begins = call.Begins();
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
void MultiNodeGroup::SetReduce(const Call& call, NodeOperation* operation) const {
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

const BlockPlan& MultiNodeGroup::PlanOf(const Call& call) const {
  switch (call.key.kind) {
    case Kind::kAllReduce:
      return AllReducePlan(call.count, SizeOf(PartialOf(call.key.in)), SizeOf(call.key.out));
    case Kind::kBroadcast:
      return from_root_[call.key.root];
    case Kind::kBarrier:
      return even_;
    case Kind::kReduceScatter:
    case Kind::kAllGather:
    case Kind::kAllGatherV:
    case Kind::kAllToAll:
      return per_rank_;
  }
  return even_;
}

// With blocks at home on one node each, every rank sends and receives sums of (N - 1) / N of its share, then as much of
// final values; with blocks at home on each node, sums of N - 1 times its share, and that is all. The second takes one
// exchange instead of two, for two nodes with as many bytes; both make the same sums, bit for bit.
const BlockPlan& MultiNodeGroup::AllReducePlan(size_t elements, size_t partial_size, size_t out_size) const {
  const size_t nodes = static_cast<size_t>(members_.layout.nodes());
  const size_t share = elements / static_cast<size_t>(members_.layout.widest());
  const size_t twice = (nodes - 1) * share / nodes * (partial_size + out_size),
               once = (nodes - 1) * share * partial_size;
  const bool on_each = once <= twice + kExchangeBytes && share * partial_size <= kMostOnEachNode;
  return on_each ? on_each_node_ : even_;
}

absl::Status MultiNodeGroup::Register(const Allocation& memory) {
  std::lock_guard<std::mutex> lock(exchange_mutex_);
  return memory_.Register(memory);
}

// --- creation -------------------------------------------------------------------------------------------------------

// What a node's segment holds: a control block for each of the two engines, then the ranks' scratch memory. Where the
// group has one node only, a control block.
size_t SegmentBytes(const NodeLayout& layout, int rank) {
  const int width = layout.width(layout.node_of(rank));
  if (layout.nodes() == 1) return HierarchicalBytes(width);
  return 2 * ControlBlock::Bytes(width) + static_cast<size_t>(width) * kChunksInFlight * kScratchBytes;
}

std::unique_ptr<ProcessGroup> MakeGroup(Members members, std::shared_ptr<SharedSegment> segment,
                                        const GroupOptions& group, std::unique_ptr<Wire> wire,
                                        ChannelCounter channels) {
  const NodeLayout& layout = members.layout;
  const std::vector<int>& ranks = layout.ranks[static_cast<size_t>(layout.node_of(members.rank))];
  const int width = static_cast<int>(ranks.size());
  std::vector<ProcessId> processes;
  processes.reserve(ranks.size());
  for (const int r : ranks) processes.push_back(members.processes[static_cast<size_t>(r)]);
  const bool several = layout.nodes() > 1;
  const uint64_t number = group.observer == nullptr ? 0 : group.observer->AddGroup();
  // Of several nodes' group the engines are parts, of which nobody is told.
  const auto engine = [&](size_t offset, absl::Duration limit) {
    return EngineOptions{.rank = layout.local_of(members.rank),
                         .size = width,
                         .oversubscribed = members.oversubscribed,
                         .timeout = limit,
                         .stall_warning = several ? absl::ZeroDuration() : group.stall_warning,
                         .observer = several ? nullptr : group.observer,
                         .group = number,
                         .control = ControlBlock(segment->data() + offset, width),
                         .peers = PeerWatch(processes, segment),
                         .names = ranks};
  };
  if (!several) return MakeHierarchicalGroup(segment, engine(0, group.timeout), group.progress);
  NodePipelineOptions options{.rank = members.rank,
                              .layout = layout,
                              .host_names = members.host_names,
                              .wire_ranks = members.wire_ranks,
                              .oversubscribed = members.oversubscribed,
                              .timeout = group.timeout,
                              .stall_warning = group.stall_warning,
                              .observer = group.observer,
                              .group = number,
                              .reducing = engine(0, kReducingShare * group.timeout),
                              .spreading = engine(ControlBlock::Bytes(width), kSpreadingShare * group.timeout),
                              .segment = segment,
                              .scratch_offset = 2 * ControlBlock::Bytes(width),
                              .wire = std::move(wire)};
  return std::make_unique<MultiNodeGroup>(std::move(options), std::move(members), std::move(channels), group);
}

// All ranks of this group take part in the exchanges, so that all learn of any failure.
absl::StatusOr<std::unique_ptr<ProcessGroup>> MultiNodeGroup::Split(int color, int key) {
  struct Wish {
    int32_t color, key;
    uint32_t channel;
  };
  std::lock_guard<std::mutex> lock(exchange_mutex_);
  absl::StatusOr<std::vector<Wish>> wishes = Exchange(*this, Wish{color, key, channels_->load()});
  if (!wishes.ok()) return wishes.status();
  uint32_t channel = 0;
  std::vector<int> ranks;
  for (int r = 0; r < size(); ++r) {
    const Wish& wish = (*wishes)[static_cast<size_t>(r)];
    channel = std::max(channel, wish.channel);
    if (color >= 0 && wish.color == color) ranks.push_back(r);
  }
  if (channel >= pipeline_.options().wire->channels()) {  // so for all ranks
    return absl::ResourceExhaustedError(
        absl::StrCat("rank ", rank(), ": MPI has no tags left for another group of several nodes, after ", channel,
                     "; keep groups instead of making new ones"));
  }
  channels_->store(channel + 1);
  std::stable_sort(ranks.begin(), ranks.end(), [&](int a, int b) {
    return (*wishes)[static_cast<size_t>(a)].key < (*wishes)[static_cast<size_t>(b)].key;
  });
  if (ranks.size() < 2) {
    if (absl::Status s = ShareSegment({.rank = rank()}, ExchangeOver(*this)).status(); !s.ok()) return s;
    return ranks.empty() ? nullptr : CreateLocalGroup(observer());
  }

  Members members;
  members.oversubscribed = members_.oversubscribed;
  std::vector<std::string> nodes;
  for (const int r : ranks) {
    if (r == rank()) members.rank = static_cast<int>(nodes.size());
    nodes.push_back(absl::StrCat(members_.layout.node_of(r)));
    members.host_names.push_back(members_.host_names[static_cast<size_t>(r)]);
    members.processes.push_back(members_.processes[static_cast<size_t>(r)]);
    members.wire_ranks.push_back(members_.wire_ranks[static_cast<size_t>(r)]);
  }
  members.layout = CutIntoNodes(nodes, 0);
  std::vector<int> node;  // this rank's, as this group counts
  for (const int r : members.layout.ranks[static_cast<size_t>(members.layout.node_of(members.rank))]) {
    node.push_back(ranks[static_cast<size_t>(r)]);
  }
  const size_t bytes = SegmentBytes(members.layout, members.rank);
  absl::StatusOr<std::shared_ptr<SharedSegment>> segment =
      ShareSegment(ControlShare(rank(), node, bytes), ExchangeOver(*this));
  if (!segment.ok()) return segment.status();
  (*segment)->Prepare(0, bytes);
  return MakeGroup(std::move(members), *std::move(segment), group_options_, pipeline_.options().wire->Channel(channel),
                   channels_);
}

// Between threads of one process memory is the wire: rank 0 makes it, and keeps it until the next exchange.
absl::StatusOr<std::unique_ptr<Wire>> OpenMemoryWire(Rendezvous& rendezvous, std::shared_ptr<MemoryExchange>* exchange,
                                                     absl::Time deadline) {
  if (rendezvous.rank() == 0) *exchange = std::make_shared<MemoryExchange>();
  absl::StatusOr<std::vector<std::string>> addresses = rendezvous.AllGather(
      absl::StrCat(reinterpret_cast<uintptr_t>(exchange)), "opening of the wire between threads", deadline);
  if (!addresses.ok()) return addresses.status();
  uintptr_t address = 0;
  if (!absl::SimpleAtoi((*addresses)[0], &address)) return absl::InternalError("not an address: " + (*addresses)[0]);
  if (rendezvous.rank() != 0) *exchange = *reinterpret_cast<const std::shared_ptr<MemoryExchange>*>(address);
  return CreateMemoryWire(*exchange, rendezvous.rank());
}

absl::StatusOr<std::unique_ptr<Wire>> OpenWire(Rendezvous& rendezvous, const std::vector<Introduction>& all,
                                               const NodeLayout& layout, std::shared_ptr<MemoryExchange>* exchange,
                                               absl::Time deadline) {
  const bool threads =
      std::all_of(all.begin(), all.end(), [&](const Introduction& i) { return i.process.SameProcess(all[0].process); });
  if (threads) return OpenMemoryWire(rendezvous, exchange, deadline);
  absl::StatusOr<std::unique_ptr<Wire>> wire = rendezvous.OpenWire();
  if (wire.ok()) return wire;
  const int other = layout.rank(1, 0);
  return absl::Status(
      wire.status().code(),
      absl::StrCat("rank 0 is on node 0 (host ", all[0].host_name, ") and rank ", other, " on node 1 (host ",
                   all[static_cast<size_t>(other)].host_name, "): ", wire.status().message()));
}

}  // namespace

absl::StatusOr<std::unique_ptr<ProcessGroup>> CreateMultiNodeGroup(Rendezvous& rendezvous,
                                                                   const std::vector<Introduction>& all,
                                                                   NodeLayout layout, const GroupOptions& options) {
  const int rank = rendezvous.rank();
  std::shared_ptr<MemoryExchange> memory;
  absl::StatusOr<std::unique_ptr<Wire>> wire = OpenWire(rendezvous, all, layout, &memory, options.deadline);
  if (!wire.ok()) return wire.status();

  Members members;
  members.rank = rank;
  members.layout = std::move(layout);
  members.oversubscribed = MoreRanksThanCpus(all, rank);
  members.processes = ProcessesOf(all);
  for (size_t r = 0; r < all.size(); ++r) {
    members.host_names.push_back(all[r].host_name);
    members.wire_ranks.push_back(static_cast<int>(r));
  }
  const size_t bytes = SegmentBytes(members.layout, rank);
  absl::StatusOr<std::shared_ptr<SharedSegment>> segment =
      ShareSegment(ControlShare(rank, members.layout.ranks[static_cast<size_t>(members.layout.node_of(rank))], bytes),
                   ExchangeOver(rendezvous, options.deadline));
  if (!segment.ok()) return segment.status();
  (*segment)->Prepare(0, bytes);
  Log().info(
      "rank {}: hierarchical backend, {} ranks on {} nodes, this is rank {} of node {} (host {}){}, reduction with {}",
      rank, all.size(), members.layout.nodes(), members.layout.local_of(rank), members.layout.node_of(rank),
      all[static_cast<size_t>(rank)].host_name, members.oversubscribed ? " (more ranks than processors)" : "",
      CpuReduceTarget());
  return MakeGroup(std::move(members), *std::move(segment), options, *std::move(wire),
                   std::make_shared<std::atomic<uint32_t>>(1));
}

}  // namespace ddp
