#include "libddp/comm/hierarchical_group.h"
#include "libddp/comm/memory/allocation_table.h"

#include <algorithm>
#include <mutex>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "libddp/base/log.h"
#include "libddp/comm/base/checked_group.h"
#include "libddp/comm/base/exchange.h"
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

std::vector<int> AllRanks(int size) {
  std::vector<int> ranks(static_cast<size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

class HierarchicalGroup final : public CheckedGroup {
 public:
  HierarchicalGroup(std::shared_ptr<SharedSegment> control, EngineOptions options, ProgressThread* progress,
                    uint64_t allocation_numbers)
      : control_(std::move(control)),
        progress_(progress),
        allocations_(options.rank, allocation_numbers),
        engine_(Complete(std::move(options)), progress),
        channels_(ChannelBlock(control_->data() + ControlBlock::Bytes(size()), size()), &engine_, progress),
        memory_(this, AllRanks(size()), &allocations_, /*viewed=*/false) {
    engine_.SetIdleCallback([this] { channels_.Progress(); });
  }

  int rank() const override { return engine_.options().rank; }
  int size() const override { return engine_.options().size; }
  absl::string_view backend() const override { return "hierarchical"; }

  absl::Status Register(const Allocation& memory) override {
    std::lock_guard<std::mutex> lock(exchange_mutex_);
    return memory_.Register(memory);
  }
  std::optional<AllocatedRange> Find(const void* data, size_t bytes) const override {
    return memory_.Find(data, bytes);
  }
  absl::StatusOr<std::unique_ptr<ProcessGroup>> Split(int color, int key) override;

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
  absl::StatusOr<Work> Start(const Call& call) override {
    auto* operation = new Operation(&engine_, call.key);
    operation->in = Ranges(call.in);
    operation->out = Ranges(call.out);
    operation->count = call.count;
    operation->parameters = call.parameters;
    operation->begins = call.Begins();
    if (call.reduce != nullptr) {
      operation->reduce = call.kernel;
      operation->nonfinite = call.reduce->nonfinite;
      operation->bucket = call.reduce->bucket;
    }
    return engine_.Launch(operation);
  }
  absl::StatusOr<Work> StartMessage(const MessageCall& m) override {
    const auto kind = m.send ? MessageSpec::Kind::kSend : MessageSpec::Kind::kRecv;
    MessageSpec spec{kind, m.peer, m.tag, m.extent.dtype, m.extent.count, Ranges(m.buffers)};
    return m.send ? channels_.Send(std::move(spec)) : channels_.Recv(std::move(spec));
  }
  absl::StatusOr<Allocation> AllocateHere(size_t bytes) override {
    std::lock_guard<std::mutex> lock(exchange_mutex_);
    return memory_.Allocate(bytes);
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
  std::mutex exchange_mutex_;  // one Allocate, Register or Split at a time
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
