// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/hierarchical_group.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "libddp/base/among_threads.h"
#include "libddp/base/log.h"
#include "libddp/comm/base/exchange.h"
#include "libddp/comm/local_group.h"
#include "libddp/comm/memory/share_segment.h"
#include "libddp/comm/nodes/node_scratch.h"
#include "libddp/launch/memory_wire.h"

namespace ddp {
namespace {

// What comes after the first meeting waits for nobody but takes a moment, of which a rank that comes last may leave
// none.
constexpr absl::Duration kIntroducedTime = absl::Seconds(5);

// Collective over `exchange`, which calls the members `names`.
absl::StatusOr<std::unique_ptr<ProcessGroup>> MakeGroup(Members members, const std::vector<int>& names,
                                                        const ExchangeNotes& exchange, const GroupOptions& options,
                                                        absl::FunctionRef<std::unique_ptr<NodeWire>()> make_wire) {
  std::vector<int> node;
  std::vector<ProcessId> processes;
  for (const int r : members.node()) {
    node.push_back(names[static_cast<size_t>(r)]);
    processes.push_back(members.all[static_cast<size_t>(r)].process);
  }
  const int width = static_cast<int>(node.size());
  const bool one_node = members.layout.nodes() == 1;
  const size_t bytes = one_node ? HostGroupBytes(width) : MultiNodeGroupBytes(width);
  absl::StatusOr<PeerWatch> peers = PeerWatch::Create(processes);
  SegmentShare share = ControlShare(names[static_cast<size_t>(members.rank)], node, bytes);
  if (!one_node) share.bytes += node.size() * NodeScratch::kBytes;
  share.ready = peers.status();
  absl::StatusOr<std::shared_ptr<SharedSegment>> segment = ShareSegment(share, exchange);
  if (!segment.ok()) return segment.status();
  (*segment)->Prepare(0, bytes);
  members.peers = *std::move(peers);
  members.peers.UseMarks(*segment);
  if (one_node) return MakeHostGroup(std::move(members), *std::move(segment), options);
  return MakeMultiNodeGroup(std::move(members), *segment, options, make_wire());
}

// Between threads of one process memory is the wire: rank 0 makes it, and keeps it until the next exchange.
absl::StatusOr<std::unique_ptr<Wire>> OpenMemoryWire(Rendezvous& rendezvous, std::shared_ptr<MemoryExchange>* exchange,
                                                     absl::Time deadline) {
  uint64_t number = 0;
  if (rendezvous.rank() == 0) {
    *exchange = std::make_shared<MemoryExchange>();
    number = AmongThreads<MemoryExchange>::Publish(*exchange);
  }
  absl::StatusOr<std::vector<std::string>> numbers =
      rendezvous.AllGather(absl::StrCat(number), "opening of the wire between threads", deadline);
  if (!numbers.ok()) return numbers.status();
  if (!absl::SimpleAtoi((*numbers)[0], &number)) return absl::InternalError("not a number: " + (*numbers)[0]);
  if (rendezvous.rank() != 0) *exchange = AmongThreads<MemoryExchange>::Find(number);
  if (*exchange == nullptr) return absl::AbortedError("rank 0, which made the wire between threads, has given it up");
  return CreateMemoryWire(*exchange, rendezvous.rank());
}

absl::StatusOr<std::unique_ptr<Wire>> OpenWire(Rendezvous& rendezvous, const Members& members,
                                               std::shared_ptr<MemoryExchange>* exchange, absl::Time deadline) {
  const std::vector<Introduction>& all = members.all;
  const bool threads =
      std::all_of(all.begin(), all.end(), [&](const Introduction& i) { return i.process.SameProcess(all[0].process); });
  if (threads) return OpenMemoryWire(rendezvous, exchange, deadline);
  absl::StatusOr<std::unique_ptr<Wire>> wire = rendezvous.OpenWire();
  if (wire.ok()) return wire;
  const int other = members.layout.rank(1, 0);
  return absl::Status(
      wire.status().code(),
      absl::StrCat("rank 0 is on node 0 (host ", all[0].host_name, ") and rank ", other, " on node 1 (host ",
                   all[static_cast<size_t>(other)].host_name, "): ", wire.status().message()));
}

}  // namespace

EngineOptions HierarchicalGroup::EngineAt(const SharedSegment& segment, size_t offset, const GroupOptions& options) {
  const int width = static_cast<int>(members_.node().size());
  return {.rank = members_.local(),
          .size = width,
          .oversubscribed = members_.oversubscribed,
          .stall_warning = options.stall_warning,
          .observer = options.observer,
          .group = GroupNumber(options),
          .control = ControlBlock(segment.data() + offset, width),
          .peers = members_.peers,
          .allocations = &allocations_,
          .names = members_.node(),
          .world_ranks = options.world_ranks};
}

absl::StatusOr<std::unique_ptr<ProcessGroup>> HierarchicalGroup::SplitUnheard(int color, int key) {
  GroupOptions options = options_;
  options.observer = nullptr;
  options.stall_warning = absl::ZeroDuration();
  return SplitWith(color, key, std::move(options));
}

absl::Status HierarchicalGroup::CheckBackground() {
  if (wire() == nullptr || wire()->Usable(/*background=*/true)) return absl::OkStatus();
  return absl::FailedPreconditionError(
      "the program initialised MPI for fewer threads than MPI_THREAD_MULTIPLE, so that no thread of the library's own "
      "can use it, which GPUs on several nodes need; call MPI_Init_thread with MPI_THREAD_MULTIPLE, or leave it to "
      "libddp to initialise MPI");
}

// All ranks of this group take part in the exchanges, so that all learn of any failure.
absl::StatusOr<std::unique_ptr<ProcessGroup>> HierarchicalGroup::SplitWith(int color, int key, GroupOptions options) {
  struct Wish {
    int32_t color, key;
    uint32_t channel;
  };
  std::lock_guard<std::mutex> lock(exchange_mutex_);
  absl::StatusOr<std::vector<Wish>> wishes =
      Exchange(*this, Wish{color, key, wire() == nullptr ? 0 : wire()->next_channel()});
  if (!wishes.ok()) return wishes.status();
  uint32_t channel = 0;
  std::vector<int> ranks;
  for (int r = 0; r < size(); ++r) {
    const Wish& wish = (*wishes)[static_cast<size_t>(r)];
    channel = std::max(channel, wish.channel);
    if (color >= 0 && wish.color == color) ranks.push_back(r);
  }
  if (wire() != nullptr) {
    if (channel >= wire()->channels()) {  // so for all ranks
      return absl::ResourceExhaustedError(
          absl::StrCat("rank ", rank(), ": MPI has no tags left for another group of several nodes, after ", channel,
                       "; keep groups instead of making new ones"));
    }
    wire()->SkipChannel(channel);
  }
  std::stable_sort(ranks.begin(), ranks.end(), [&](int a, int b) {
    return (*wishes)[static_cast<size_t>(a)].key < (*wishes)[static_cast<size_t>(b)].key;
  });
  if (ranks.size() < 2) {
    if (absl::Status s = ShareSegment({.rank = rank()}, ExchangeOver(*this)).status(); !s.ok()) return s;
    if (ranks.empty()) return std::unique_ptr<ProcessGroup>();
    return CreateLocalGroup(options.observer == nullptr ? nullptr : observer(), timeout(), world_ranks().Part(ranks));
  }
  Members members;
  members.oversubscribed = members_.oversubscribed;
  std::vector<std::string> nodes;
  for (const int r : ranks) {
    if (r == rank()) members.rank = static_cast<int>(nodes.size());
    nodes.push_back(absl::StrCat(members_.layout.node_of(r)));
    members.all.push_back(members_.all[static_cast<size_t>(r)]);
  }
  members.layout = CutIntoNodes(nodes, 0);
  options.timeout = timeout();
  options.world_ranks = world_ranks().Part(ranks);
  return MakeGroup(std::move(members), ranks, ExchangeOver(*this), options,
                   [&] { return wire()->Channel(channel, ranks); });
}

absl::StatusOr<std::unique_ptr<ProcessGroup>> CreateGroupOfSameRanks(ProcessGroup& group, ContextObserver* observer) {
  return dynamic_cast<HierarchicalGroup&>(group).Split(0, group.rank(), observer);
}

absl::StatusOr<std::unique_ptr<ProcessGroup>> CreateHierarchicalGroup(Rendezvous& rendezvous,
                                                                      const GroupOptions& options) {
  const int rank = rendezvous.rank(), size = rendezvous.size();
  absl::StatusOr<Introduction> introduced = Introduction::OfSelf(rank);
  if (!introduced.ok()) return introduced.status();
  absl::StatusOr<std::vector<Introduction>> introductions = Introduce(rendezvous, *introduced, options.deadline);
  if (!introductions.ok()) return introductions.status();
  const absl::Time deadline = std::max(options.deadline, absl::Now() + kIntroducedTime);
  Members members;
  members.rank = rank;
  members.all = *std::move(introductions);
  members.layout = LayoutOf(members.all);
  members.oversubscribed = MoreRanksThanCpus(members.all, rank);
  const NodeLayout& layout = members.layout;
  const std::string& host = members.all[static_cast<size_t>(rank)].host_name;
  std::string where = host;
  std::shared_ptr<MemoryExchange> memory;
  std::unique_ptr<NodeWire> wire;
  if (layout.nodes() > 1) {
    where = absl::StrCat(layout.nodes(), " nodes, this is rank ", members.local(), " of node ", layout.node_of(rank),
                         " (host ", host, ")");
    absl::StatusOr<std::unique_ptr<Wire>> opened = OpenWire(rendezvous, members, &memory, deadline);
    if (!opened.ok()) return opened.status();
    wire = std::make_unique<NodeWire>(*std::move(opened), size);
  }
  if (members.oversubscribed) absl::StrAppend(&where, " (more ranks than processors)");
  std::vector<int> ranks(static_cast<size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  absl::StatusOr<std::unique_ptr<ProcessGroup>> group = MakeGroup(
      std::move(members), ranks, ExchangeOver(rendezvous, deadline), options, [&] { return std::move(wire); });
  if (group.ok()) {
    LogInfo("rank ", rank, ": hierarchical backend, ", size, " ranks on ", where, ", reduction with ",
            CpuReduceTarget());
  }
  return group;
}

}  // namespace ddp
