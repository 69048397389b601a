#include "libddp/comm/multi_node_group.h"
#include "libddp/comm/memory/allocation_table.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <functional>
#include <mutex>
#include <string>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "libddp/base/log.h"
#include "libddp/comm/base/exchange.h"
#include "libddp/comm/base/internal_group.h"
#include "libddp/comm/base/validate.h"
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

class MultiNodeGroup final : public InternalGroup {
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

  absl::StatusOr<Work> AllReduce(Buffers in, Buffers out, const ReduceOptions& options, Stream) override {
    return Reduce(Kind::kAllReduce, "all_reduce", in, out, 1, options);
  }
  absl::StatusOr<Work> ReduceScatter(Buffers in, Buffers out, const ReduceOptions& options, Stream) override {
    return Reduce(Kind::kReduceScatter, "reduce_scatter", in, out, static_cast<size_t>(size()), options);
  }
  absl::StatusOr<Work> Broadcast(Buffers buffers, int root, Stream) override;
  absl::StatusOr<Work> AllGather(Buffers in, Buffers out, Stream) override;
  absl::StatusOr<Work> AllGatherV(Buffers in, Buffers out, absl::Span<const size_t> counts, Stream) override;
  absl::StatusOr<Work> AllToAll(Buffers in, Buffers out, Stream) override;
  absl::StatusOr<Work> Barrier() override { return Launch(Make({}, even_, {}, {}, 0)); }

  absl::StatusOr<Work> Send(Buffers buffers, int to, int tag, Stream) override;
  absl::StatusOr<Work> Recv(Buffers buffers, int from, int tag, Stream) override;
  absl::StatusOr<Allocation> Allocate(size_t bytes, Device device) override;
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
  NodeOperation* Make(const OperationKey& key, const BlockPlan& plan, Buffers in, Buffers out, size_t count) {
    auto* operation = new NodeOperation(&pipeline_, key, members_.layout, plan, rank());
    operation->in = Ranges(in);
    operation->out = Ranges(out);
    operation->count = count;
    return operation;
  }
  // One block for each rank, all of `count` elements.
  NodeOperation* MakePerRank(const OperationKey& key, Buffers in, Buffers out, size_t count, size_t block) {
    NodeOperation* const operation = Make(key, per_rank_, in, out, count);
    for (int r = 0; r <= size(); ++r) operation->begins.push_back(static_cast<size_t>(r) * block);
    return operation;
  }
  absl::StatusOr<Work> Launch(NodeOperation* operation) {
    operation->Cut();
    return pipeline_.Launch(operation);
  }
  absl::StatusOr<Work> Reduce(Kind kind, absl::string_view call, Buffers in, Buffers out, size_t out_times,
                              const ReduceOptions& options);

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

absl::StatusOr<Work> MultiNodeGroup::Reduce(Kind kind, absl::string_view call, Buffers in, Buffers out,
                                            size_t out_times, const ReduceOptions& options) {
  const CallCheck check(rank(), size(), call);
  Extent from, to;
  if (absl::Status s = check.InOut(in, out, 1, out_times, &from, &to); !s.ok()) return s;
  // A node's sum is neither divided nor rounded: that is done once, to the sum over all nodes.
  const bool narrow = from.dtype == DType::kFloat16 || from.dtype == DType::kBFloat16;
  const DType partial = narrow ? DType::kFloat32 : from.dtype;
  absl::StatusOr<CpuReduce> sum = CpuReduce::Create({.in = from.dtype,
                                                     .out = partial,
                                                     .op = options.op == ReduceOp::kAvg ? ReduceOp::kSum : options.op,
                                                     .prescale = options.prescale});
  if (!sum.ok()) return check.Error(sum.status().message());
  absl::StatusOr<CpuReduce> finish = CpuReduce::Create({.in = partial,
                                                        .out = to.dtype,
                                                        .op = options.op,
                                                        .postscale = options.postscale,
                                                        .average_over = size(),
                                                        .check_nonfinite = options.nonfinite != nullptr});
  if (!finish.ok()) return check.Error(finish.status().message());
  const OperationKey key{.kind = kind,
                         .in = from.dtype,
                         .out = to.dtype,
                         .op = options.op,
                         .check_nonfinite = options.nonfinite != nullptr};
  NodeOperation* const operation =
      kind == Kind::kAllReduce
          ? Make(key, AllReducePlan(from.count, SizeOf(partial), SizeOf(to.dtype)), in, out, from.count)
          : MakePerRank(key, in, out, from.count, to.count);
  operation->partial = partial;
  operation->sums_as_is = partial == from.dtype && options.prescale == 1;
  operation->sum = *sum;
  operation->finish = *finish;
  operation->nonfinite = options.nonfinite;
  operation->bucket = options.bucket;
  operation->parameters = std::bit_cast<uint64_t>(options.prescale) * 31 + std::bit_cast<uint64_t>(options.postscale);
  return Launch(operation);
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

absl::StatusOr<Work> MultiNodeGroup::Broadcast(Buffers buffers, int root, Stream) {
  const CallCheck check(rank(), size(), "broadcast");
  Extent extent;
  if (absl::Status s = check.CheckBuffers("in", buffers, &extent); !s.ok()) return s;
  if (absl::Status s = check.Root(root); !s.ok()) return s;
  return Launch(
      Make({.kind = Kind::kBroadcast, .in = extent.dtype, .out = extent.dtype, .root = static_cast<uint16_t>(root)},
           from_root_[static_cast<size_t>(root)], buffers, buffers, extent.count));
}

absl::StatusOr<Work> MultiNodeGroup::AllGather(Buffers in, Buffers out, Stream) {
  const CallCheck check(rank(), size(), "all_gather");
  Extent from, to;
  if (absl::Status s = check.InOut(in, out, static_cast<size_t>(size()), 1, &from, &to); !s.ok()) return s;
  if (from.dtype != to.dtype) return check.Error("in and out have different types");
  return Launch(
      MakePerRank({.kind = Kind::kAllGather, .in = from.dtype, .out = from.dtype}, in, out, from.count, from.count));
}

absl::StatusOr<Work> MultiNodeGroup::AllGatherV(Buffers in, Buffers out, absl::Span<const size_t> counts, Stream) {
  Extent to;
  if (absl::Status s = CallCheck(rank(), size(), "all_gather_v").Counts(in, out, counts, &to); !s.ok()) return s;
  NodeOperation* const operation =
      Make({.kind = Kind::kAllGatherV, .in = to.dtype, .out = to.dtype}, per_rank_, in, out, to.count);
  operation->begins.push_back(0);
  for (const size_t count : counts) {
    operation->begins.push_back(operation->begins.back() + count);
    operation->parameters = std::rotl(operation->parameters, 23) * 0x9e3779b97f4a7c15 + count;
  }
  return Launch(operation);
}

absl::StatusOr<Work> MultiNodeGroup::AllToAll(Buffers in, Buffers out, Stream) {
  Extent extent;
  if (absl::Status s = CallCheck(rank(), size(), "all_to_all").Parts(in, out, &extent); !s.ok()) return s;
  return Launch(MakePerRank({.kind = Kind::kAllToAll, .in = extent.dtype, .out = extent.dtype}, in, out, extent.count,
                            extent.count / static_cast<size_t>(size())));
}

absl::StatusOr<Allocation> MultiNodeGroup::Allocate(size_t bytes, Device device) {
  if (absl::Status s = CallCheck(rank(), size(), "allocate").AllocationOf(bytes, device); !s.ok()) return s;
  std::lock_guard<std::mutex> lock(exchange_mutex_);
  return memory_.Allocate(bytes);
}

absl::Status MultiNodeGroup::Register(const Allocation& memory) {
  std::lock_guard<std::mutex> lock(exchange_mutex_);
  return memory_.Register(memory);
}

absl::StatusOr<Work> MultiNodeGroup::Send(Buffers buffers, int to, int tag, Stream) {
  const CallCheck check(rank(), size(), "send");
  Extent extent;
  if (absl::Status s = check.CheckBuffers("message", buffers, &extent); !s.ok()) return s;
  if (absl::Status s = check.PeerAndTag(to, tag); !s.ok()) return s;
  return pipeline_.Send({to, tag, extent.dtype, extent.count, Ranges(buffers)});
}

absl::StatusOr<Work> MultiNodeGroup::Recv(Buffers buffers, int from, int tag, Stream) {
  const CallCheck check(rank(), size(), "recv");
  Extent extent;
  if (absl::Status s = check.CheckBuffers("message", buffers, &extent); !s.ok()) return s;
  if (absl::Status s = check.PeerAndTag(from, tag); !s.ok()) return s;
  return pipeline_.Recv({from, tag, extent.dtype, extent.count, Ranges(buffers)});
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
