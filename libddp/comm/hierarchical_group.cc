#include "libddp/comm/hierarchical_group.h"
#include "libddp/comm/memory/allocation_table.h"

#include <algorithm>
#include <bit>
#include <iterator>
#include <mutex>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "libddp/base/log.h"
#include "libddp/comm/base/exchange.h"
#include "libddp/comm/base/internal_group.h"
#include "libddp/comm/base/validate.h"
#include "libddp/comm/host/engine.h"
#include "libddp/comm/introduction.h"
#include "libddp/comm/local_group.h"
#include "libddp/comm/memory/group_memory.h"
#include "libddp/comm/memory/share_segment.h"
#include "libddp/comm/memory/shared_segment.h"
#include "libddp/comm/messages/channels.h"
#include "libddp/comm/multi_node_group.h"

namespace ddp {
namespace {

using Kind = OperationKey::Kind;

constexpr ReduceOp kReduceOps[] = {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct};
constexpr DType kDTypes[] = {DType::kFloat64, DType::kFloat32, DType::kFloat16, DType::kBFloat16,
                             DType::kInt64,   DType::kInt32,   DType::kInt8,    DType::kUInt8};

std::vector<int> AllRanks(int size) {
  std::vector<int> ranks(static_cast<size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

class HierarchicalGroup final : public InternalGroup {
 public:
  HierarchicalGroup(std::shared_ptr<SharedSegment> control, EngineOptions options, ProgressThread* progress,
                    uint64_t allocation_numbers)
      : control_(std::move(control)),
        progress_(progress),
        allocations_(options.rank, allocation_numbers),
        engine_(Complete(std::move(options)), progress),
        channels_(ChannelBlock(control_->data() + ControlBlock::Bytes(size()), size()), &engine_, progress),
        memory_(this, AllRanks(size()), &allocations_, /*viewed=*/false) {
    engine_.DoBesides([this] { channels_.Progress(); });
    for (ReduceOp op : kReduceOps) {
      for (DType dtype : kDTypes) {
        absl::StatusOr<CpuReduce> reduce =
            CpuReduce::Create({.in = dtype, .out = dtype, .op = op, .average_over = size()});
        if (reduce.ok()) plain_[static_cast<size_t>(op)][static_cast<size_t>(dtype)] = *reduce;
      }
    }
  }

  int rank() const override { return engine_.options().rank; }
  int size() const override { return engine_.options().size; }
  absl::string_view backend() const override { return "hierarchical"; }

  absl::StatusOr<Work> AllReduce(Buffers in, Buffers out, const ReduceOptions& options, Stream) override {
    return Reduce(Kind::kAllReduce, "all_reduce", in, out, 1, options);
  }
  absl::StatusOr<Work> ReduceScatter(Buffers in, Buffers out, const ReduceOptions& options, Stream) override {
    return Reduce(Kind::kReduceScatter, "reduce_scatter", in, out, static_cast<size_t>(size()), options);
  }
  absl::StatusOr<Work> Broadcast(Buffers buffers, int root, Stream) override {
    const CallCheck check(rank(), size(), "broadcast");
    Extent extent;
    if (absl::Status s = check.CheckBuffers("in", buffers, &extent); !s.ok()) return s;
    if (absl::Status s = check.Root(root); !s.ok()) return s;
    return Launch(
        {.kind = Kind::kBroadcast, .in = extent.dtype, .out = extent.dtype, .root = static_cast<uint16_t>(root)},
        buffers, buffers, extent.count);
  }
  absl::StatusOr<Work> AllGather(Buffers in, Buffers out, Stream) override {
    const CallCheck check(rank(), size(), "all_gather");
    Extent from, to;
    if (absl::Status s = check.InOut(in, out, static_cast<size_t>(size()), 1, &from, &to); !s.ok()) return s;
    if (from.dtype != to.dtype) return check.Error("in and out have different types");
    return Launch({.kind = Kind::kAllGather, .in = from.dtype, .out = from.dtype}, in, out, from.count);
  }
  absl::StatusOr<Work> AllGatherV(Buffers in, Buffers out, absl::Span<const size_t> counts, Stream) override {
    Extent to;
    if (absl::Status s = CallCheck(rank(), size(), "all_gather_v").Counts(in, out, counts, &to); !s.ok()) return s;
    Operation* const operation = Make({.kind = Kind::kAllGatherV, .in = to.dtype, .out = to.dtype}, in, out, to.count);
    operation->begins.push_back(0);
    for (const size_t count : counts) {
      operation->begins.push_back(operation->begins.back() + count);
      operation->parameters = std::rotl(operation->parameters, 23) * 0x9e3779b97f4a7c15 + count;
    }
    return engine_.Launch(operation);
  }
  absl::StatusOr<Work> AllToAll(Buffers in, Buffers out, Stream) override {
    Extent extent;
    if (absl::Status s = CallCheck(rank(), size(), "all_to_all").Parts(in, out, &extent); !s.ok()) return s;
    return Launch({.kind = Kind::kAllToAll, .in = extent.dtype, .out = extent.dtype}, in, out, extent.count);
  }
  absl::StatusOr<Work> Send(Buffers buffers, int to, int tag, Stream) override {
    Extent extent;
    if (absl::Status s = CheckMessage("send", buffers, to, tag, &extent); !s.ok()) return s;
    return channels_.Send({MessageSpec::Kind::kSend, to, tag, extent.dtype, extent.count, Ranges(buffers)});
  }
  absl::StatusOr<Work> Recv(Buffers buffers, int from, int tag, Stream) override {
    Extent extent;
    if (absl::Status s = CheckMessage("recv", buffers, from, tag, &extent); !s.ok()) return s;
    return channels_.Recv({MessageSpec::Kind::kRecv, from, tag, extent.dtype, extent.count, Ranges(buffers)});
  }
  absl::StatusOr<Work> Barrier() override { return Launch({}, {}, {}, 0); }

  absl::StatusOr<Allocation> Allocate(size_t bytes, Device device) override {
    if (absl::Status s = CallCheck(rank(), size(), "allocate").AllocationOf(bytes, device); !s.ok()) return s;
    std::lock_guard<std::mutex> lock(exchange_mutex_);
    return memory_.Allocate(bytes);
  }
  absl::Status Register(const Allocation& memory) override {
    std::lock_guard<std::mutex> lock(exchange_mutex_);
    return memory_.Register(memory);
  }
  std::optional<AllocatedRange> Find(const void* data, size_t bytes) const override {
    return memory_.Find(data, bytes);
  }
  absl::StatusOr<std::unique_ptr<ProcessGroup>> Split(int color, int key) override;

  void Abort(absl::Status why) override {
    Fail(absl::AbortedError(absl::StrCat("rank ", rank(), " aborted the group: ", why.message())));
  }
  void Fail(const absl::Status& why) override { engine_.Fail(why); }
  absl::Status status() const override { return engine_.status(); }
  void Progress() override {
    engine_.Progress();
    channels_.Progress();
  }
  Observer* observer() const override { return engine_.listener(); }

  // Of the memory that the ranks of a group have in common.
  static size_t SharedBytes(int ranks) { return ControlBlock::Bytes(ranks) + ChannelBlock::Bytes(ranks); }

 private:
  absl::Status CheckMessage(absl::string_view call, Buffers buffers, int peer, int tag, Extent* extent) const {
    const CallCheck check(rank(), size(), call);
    if (absl::Status s = check.CheckBuffers("message", buffers, extent); !s.ok()) return s;
    return check.PeerAndTag(peer, tag);
  }

  absl::StatusOr<Work> Launch(const OperationKey& key, Buffers in, Buffers out, size_t count) {
    return engine_.Launch(Make(key, in, out, count));
  }

  Operation* Make(const OperationKey& key, Buffers in, Buffers out, size_t count) {
    auto* operation = new Operation(&engine_, key);
    operation->in = Ranges(in);
    operation->out = Ranges(out);
    operation->count = count;
    return operation;
  }

  absl::StatusOr<Work> Reduce(Kind kind, absl::string_view call, Buffers in, Buffers out, size_t out_times,
                              const ReduceOptions& options) {
    const CallCheck check(rank(), size(), call);
    Extent from, to;
    if (absl::Status s = check.InOut(in, out, 1, out_times, &from, &to); !s.ok()) return s;
    const bool plain =
        from.dtype == to.dtype && options.prescale == 1 && options.postscale == 1 && options.nonfinite == nullptr;
    CpuReduce reduce = plain_[static_cast<size_t>(options.op)][static_cast<size_t>(from.dtype)];
    if (!plain) {
      absl::StatusOr<CpuReduce> made = CpuReduce::Create({.in = from.dtype,
                                                          .out = to.dtype,
                                                          .op = options.op,
                                                          .prescale = options.prescale,
                                                          .postscale = options.postscale,
                                                          .average_over = size(),
                                                          .check_nonfinite = options.nonfinite != nullptr});
      if (!made.ok()) return check.Error(made.status().message());
      reduce = *made;
    }
    Operation* const operation = Make({.kind = kind,
                                       .in = from.dtype,
                                       .out = to.dtype,
                                       .op = options.op,
                                       .check_nonfinite = options.nonfinite != nullptr},
                                      in, out, from.count);
    operation->reduce = reduce;
    if (!plain) {
      operation->parameters =
          std::bit_cast<uint64_t>(options.prescale) * 31 + std::bit_cast<uint64_t>(options.postscale);
    }
    operation->nonfinite = options.nonfinite;
    operation->bucket = options.bucket;
    return engine_.Launch(operation);
  }

  EngineOptions Complete(EngineOptions options) {
    options.control = ControlBlock(control_->data(), options.size);
    options.allocations = &allocations_;
    return options;
  }

  const std::shared_ptr<SharedSegment> control_;
  ProgressThread* const progress_;
  AllocationTable allocations_;
  Engine engine_;
  Channels channels_;
  CpuReduce plain_[std::size(kReduceOps)][std::size(kDTypes)];  // without scaling, conversion or check: prepared once
  std::mutex exchange_mutex_;                                   // one Allocate, Register or Split at a time
  GroupMemory memory_;
};

// The new group's first rank makes its control block. All ranks of this group take part in the exchanges, so that all
// learn of any failure.
absl::StatusOr<std::unique_ptr<ProcessGroup>> HierarchicalGroup::Split(int color, int key) {
  struct Wish {
    int32_t color, key;
  };
  std::lock_guard<std::mutex> lock(exchange_mutex_);
  absl::StatusOr<std::vector<Wish>> wishes = Exchange(*this, Wish{color, key});
  if (!wishes.ok()) return wishes.status();
  std::vector<int> members;
  for (int r = 0; color >= 0 && r < size(); ++r) {
    if ((*wishes)[static_cast<size_t>(r)].color == color) members.push_back(r);
  }
  std::stable_sort(members.begin(), members.end(), [&](int a, int b) {
    return (*wishes)[static_cast<size_t>(a)].key < (*wishes)[static_cast<size_t>(b)].key;
  });
  const int count = static_cast<int>(members.size());
  const size_t bytes = HierarchicalGroup::SharedBytes(count);

  const int place = static_cast<int>(std::find(members.begin(), members.end(), rank()) - members.begin());
  SegmentShare share{.rank = rank()};
  if (count > 1) share = ControlShare(rank(), members, bytes);
  absl::StatusOr<std::shared_ptr<SharedSegment>> segment = ShareSegment(share, ExchangeOver(*this));
  if (!segment.ok()) return segment.status();
  if (count == 0) return nullptr;
  if (count == 1) return CreateLocalGroup(observer());
  (*segment)->Prepare(0, bytes);

  const EngineOptions& all = engine_.options();
  std::vector<ProcessId> processes;
  processes.reserve(members.size());
  for (const int r : members) processes.push_back(all.peers.process(r));
  EngineOptions options{.rank = place,
                        .size = count,
                        .oversubscribed = all.oversubscribed,
                        .timeout = all.timeout,
                        .stall_warning = all.stall_warning,
                        .observer = all.observer,
                        .group = all.observer == nullptr ? 0 : all.observer->AddGroup(),
                        .control = {},
                        .peers = PeerWatch(processes, *segment)};
  return MakeHierarchicalGroup(*std::move(segment), std::move(options), progress_);
}

}  // namespace

// --- creation -------------------------------------------------------------------------------------------------------

size_t HierarchicalBytes(int ranks) { return HierarchicalGroup::SharedBytes(ranks); }

std::unique_ptr<ProcessGroup> MakeHierarchicalGroup(std::shared_ptr<SharedSegment> memory, EngineOptions options,
                                                    ProgressThread* progress, uint64_t allocation_numbers) {
  return std::make_unique<HierarchicalGroup>(std::move(memory), std::move(options), progress, allocation_numbers);
}

absl::StatusOr<std::unique_ptr<ProcessGroup>> CreateHierarchicalGroup(Rendezvous& rendezvous,
                                                                      const GroupOptions& options) {
  const int rank = rendezvous.rank(), size = rendezvous.size();
  const size_t bytes = HierarchicalGroup::SharedBytes(size);

  absl::StatusOr<Introduction> introduced = Introduction::OfSelf(rank);
  if (!introduced.ok()) return introduced.status();
  absl::StatusOr<std::vector<Introduction>> introductions = Introduce(rendezvous, *introduced, options.deadline);
  if (!introductions.ok()) return introductions.status();
  const std::vector<Introduction>& all = *introductions;
  if (NodeLayout layout = LayoutOf(all); layout.nodes() > 1) {
    return CreateMultiNodeGroup(rendezvous, all, std::move(layout), options);
  }
  absl::StatusOr<std::shared_ptr<SharedSegment>> segment =
      ShareSegment(ControlShare(rank, AllRanks(size), bytes), ExchangeOver(rendezvous, options.deadline));
  if (!segment.ok()) return segment.status();
  (*segment)->Prepare(0, bytes);

  const bool oversubscribed = MoreRanksThanCpus(all, rank);
  Log().info("rank {}: hierarchical backend, {} ranks on {}{}, reduction with {}", rank, size, all[0].host_name,
             oversubscribed ? " (more ranks than processors)" : "", CpuReduceTarget());
  EngineOptions engine{.rank = rank,
                       .size = size,
                       .oversubscribed = oversubscribed,
                       .timeout = options.timeout,
                       .stall_warning = options.stall_warning,
                       .observer = options.observer,
                       .group = options.observer == nullptr ? 0 : options.observer->AddGroup(),
                       .control = {},
                       .peers = PeerWatch(ProcessesOf(all), *segment)};
  return MakeHierarchicalGroup(*std::move(segment), std::move(engine), options.progress);
}

}  // namespace ddp
