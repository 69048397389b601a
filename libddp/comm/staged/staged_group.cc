// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/staged/staged_group.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "libddp/base/env.h"
#include "libddp/base/log.h"
#include "libddp/base/numa.h"
#include "libddp/base/process_id.h"
#include "libddp/comm/base/exchange.h"
#include "libddp/comm/base/node_layout.h"
#include "libddp/comm/gpu/local_moves.h"
#include "libddp/comm/peers/peer_moves.h"
#include "libddp/comm/ring/staging_ring.h"
#include "libddp/comm/staged/host_moves.h"
#include "libddp/comm/staged/node_groups.h"
#include "libddp/comm/staged/node_moves.h"
#include "libddp/comm/staged/staged_calibration.h"
#include "libddp/comm/staged/staged_moves.h"

namespace ddp {
namespace {

constexpr char kMeasure[] = "measure";  // DDP_STAGED_LIMITS, if it is not set

// The kernels watch the words by themselves, so that nothing else has to be done for the GPU to come free.
class StagedTransport final : public DeviceTransport {
 public:
  explicit StagedTransport(std::shared_ptr<StagingRing> ring) : ring_(std::move(ring)) {}

  absl::Status Health() override { return absl::OkStatus(); }
  void Abort(const absl::Status&) override { ring_->Abort(); }
  absl::Duration LeaveTime() const override { return absl::Seconds(1); }

 private:
  const std::shared_ptr<StagingRing> ring_;
};

// A rank that fails tells the group on CPU memory first, and then ends the others, which know less of the cause. What
// these say counts if the first word does not come.
constexpr absl::Duration kFirstWord = absl::Milliseconds(30);

// Where the host takes part its thread knows what is wrong.
class HostTransport final : public DeviceTransport {
 public:
  HostTransport(std::shared_ptr<StagingRing> ring, std::weak_ptr<NodeGroups> groups, std::shared_ptr<HostPart> host)
      : ring_(std::move(ring)), groups_(std::move(groups)), host_(std::move(host)) {}

  absl::Status Health() override { return host_->status(kFirstWord); }
  bool TellsTimeouts() const override { return true; }
  void Abort(const absl::Status& why) override {
    if (ring_ != nullptr) ring_->Abort();
    host_->Leave();
    if (const std::shared_ptr<NodeGroups> groups = groups_.lock()) groups->Fail(why);
    host_->Release();
  }
  absl::Duration LeaveTime() const override { return absl::Seconds(1); }

 private:
  const std::shared_ptr<StagingRing> ring_;  // null: this rank is alone on its node
  const std::weak_ptr<NodeGroups> groups_;   // gone with the group: a Work, which keeps this, may outlive it
  const std::shared_ptr<HostPart> host_;
};

// Who reduces: DDP_STAGED_REDUCE.
enum class Reducers : uint8_t { kGpu, kCpu, kAuto };

absl::StatusOr<Reducers> ReadReducers() {
  const std::string text = ReadEnv(Env::kStagedReduce).value_or("gpu");
  if (text == "gpu") return Reducers::kGpu;
  if (text == "cpu") return Reducers::kCpu;
  if (text == "auto") return Reducers::kAuto;
  return absl::InvalidArgumentError(absl::StrCat("DDP_STAGED_REDUCE is '", text, "'; it must be gpu, cpu or auto"));
}

// What a rank tells the others of itself.
struct Seat {
  ProcessId process;
  int blocks = 0;
  Reducers reducers = Reducers::kGpu;
  StagedLimits limits;
  bool fixed = false;  // the limits
  char host[256] = {}, gpu[64] = {};
};

absl::StatusOr<Seat> Sit(int ranks, const DeviceGroupOptions& options) {
  if (options.device.kind != Device::Kind::kCuda) {
    return absl::FailedPreconditionError("a group of GPUs needs ContextOptions::device to be one on every rank");
  }
  DeviceRuntime& runtime = *options.runtime;
  if (absl::Status s = runtime.Check(options.device); !s.ok()) return s;
  const DeviceGuard guard(runtime, options.device);
  if (!guard.status().ok()) return guard.status();
  absl::StatusOr<std::string> gpu = runtime.Identity(options.device);
  if (!gpu.ok()) return gpu.status();
  absl::StatusOr<int> blocks = runtime.StagedBlocks();
  if (!blocks.ok()) return blocks.status();
  const absl::StatusOr<Reducers> reducers = ReadReducers();
  if (!reducers.ok()) return reducers.status();
  Seat seat{
      .process = ProcessId::OfSelf(), .blocks = *blocks, .reducers = *reducers, .limits = StagedLimits::For(ranks)};
  const std::string limits =
      options.staged_limits.empty() ? ReadEnv(Env::kStagedLimits).value_or(kMeasure) : options.staged_limits;
  if (absl::Status s = seat.limits.Parse(limits); !s.ok()) return s;
  seat.fixed = limits != kMeasure;
  options.host.copy(seat.host, sizeof seat.host - 1);
  gpu->copy(seat.gpu, sizeof seat.gpu - 1);
  return seat;
}

// What the ranks have agreed on.
struct Terms {
  int blocks;  // that every rank may use
  StagedLimits limits;
  bool fixed;               // the limits: nobody measures
  bool shared_gpu = false;  // by ranks of one process
};

// Ranks of one process that share a GPU divide it: all their kernels have to run at once there. Their copies might wait
// for each other for ever in one of its queues, so they use none. Those of several processes take turns.
absl::StatusOr<Terms> AgreeOnTerms(const std::vector<Seat>& seats) {
  if (seats.size() > staged::kMaxRanks) {
    return absl::UnimplementedError(absl::StrCat("on GPUs the hierarchical backend works with up to ",
                                                 staged::kMaxRanks, " ranks of a node, not ", seats.size(),
                                                 "; use nccl"));
  }
  const int least = staged::kPairStages * staged::kPairChannels * static_cast<int>(seats.size());
  Terms terms = {seats[0].blocks, seats[0].limits, seats[0].fixed || seats.size() == 1};
  for (size_t r = 0; r < seats.size(); ++r) {
    const Seat& seat = seats[r];
    const auto same = [](const char* a, const char* b) { return absl::string_view(a) == b; };
    const auto together = std::count_if(seats.begin(), seats.end(), [&](const Seat& other) {
      return other.process.SameProcess(seat.process) && same(other.gpu, seat.gpu);
    });
    // Processes that share a GPU take turns on it, which tells nothing.
    terms.fixed |= std::any_of(seats.begin() + static_cast<ptrdiff_t>(r) + 1, seats.end(),
                               [&](const Seat& other) { return same(other.gpu, seat.gpu); });
    terms.blocks = std::min(terms.blocks, seat.blocks / static_cast<int>(together));
    if (together > 1) terms.limits.copies = StagedLimits::kNever;
    terms.shared_gpu |= together > 1;
    if (terms.blocks >= least) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        together, " ranks of one process share GPU ", absl::string_view(seat.gpu), ", which runs ", seat.blocks,
        " of their thread blocks at once: too few. Start fewer ranks on it, or each in a process of its own"));
  }
  const uint64_t wanted = std::max<uint64_t>(terms.limits.blocks, static_cast<uint64_t>(least));
  if (wanted < static_cast<uint64_t>(terms.blocks)) terms.blocks = static_cast<int>(wanted);
  return terms;
}

// The shared memory, and the copies if all ranks have what these take; else everything goes by kernels.
absl::Status MakeMemory(ProcessGroup& control, const DeviceGroupOptions& options, int node, StagedLimits* limits,
                        std::shared_ptr<StagingRing>* ring, std::shared_ptr<StagedCopies>* copies) {
  DeviceRuntime& runtime = *options.runtime;
  if (limits->copies != StagedLimits::kNever) {
    const StagingRing::Beside beside = StagedCopies::Shared(control.size(), limits->chunk);
    absl::StatusOr<std::shared_ptr<StagingRing>> made =
        StagingRing::Create(control, runtime, options.device, node, beside);
    absl::Status status = made.status();
    if (status.ok()) {
      absl::StatusOr<std::shared_ptr<StagedCopies>> theirs =
          StagedCopies::Create(*made, runtime, options.device, limits->chunk);
      status = Agree(control, theirs.status());
      if (status.ok()) {
        *ring = *std::move(made);
        *copies = *std::move(theirs);
      }
    }
    if (!absl::IsResourceExhausted(status)) return status;
    LogInfo("rank ", control.rank(), ": the copy engines are not used: ", status.message());
    limits->copies = StagedLimits::kNever;
  }
  absl::StatusOr<std::shared_ptr<StagingRing>> made = StagingRing::Create(control, runtime, options.device, node, {});
  if (!made.ok()) return made.status();
  *ring = *std::move(made);
  return absl::OkStatus();
}

// The nodes of the group on CPU memory, and no node on two hosts.
NodeLayout LayoutOf(const InternalGroup& control, const std::vector<Seat>& seats) {
  std::vector<std::string> nodes;
  for (size_t r = 0; r < seats.size(); ++r) {
    const int node = control.layout() == nullptr ? 0 : control.layout()->node_of(static_cast<int>(r));
    nodes.push_back(absl::StrCat(node, " of ", absl::string_view(seats[r].host)));
  }
  return CutIntoNodes(nodes, 0);
}

// For a group of several nodes: memory of this rank's own. `ring`: null if it is alone on its node.
absl::StatusOr<HostStage> MakeStage(const DeviceGroupOptions& options, const StagingRing* ring) {
  const DeviceGuard guard(*options.runtime, options.device);
  if (!guard.status().ok()) return guard.status();
  absl::StatusOr<std::shared_ptr<void>> slots = options.runtime->AllocatePinned(HostStage::kBytes);
  if (!slots.ok()) return slots.status();
  absl::StatusOr<HostStage> stage = HostStage::Create(*options.runtime, static_cast<char*>(slots->get()), *slots);
  if (stage.ok() && ring != nullptr) stage->left = ring->left();
  return stage;
}

struct NodeRing {
  std::shared_ptr<StagingRing> ring;
  Terms terms;
};

// What the ranks of one node share, where others join them. Collective over `control`, which has the ranks of the
// seats; if a rank fails, all do. Nothing is measured: the limits are those of all-reduces in the node, of which there
// are none.
absl::StatusOr<NodeRing> MakeRing(ProcessGroup& control, const std::vector<Seat>& seats,
                                  const DeviceGroupOptions& options) {
  absl::StatusOr<Terms> terms = AgreeOnTerms(seats);
  if (!terms.ok()) return terms.status();
  terms->limits.copies = StagedLimits::kNever;
  const int numa_node = NumaNodeOfPci(seats[static_cast<size_t>(control.rank())].gpu);
  absl::StatusOr<std::shared_ptr<StagingRing>> ring =
      StagingRing::Create(control, *options.runtime, options.device, numa_node, {});
  if (!ring.ok()) return ring.status();
  return NodeRing{*std::move(ring), *terms};
}

// What the processors of one node need to reduce. Without groups they do not.
struct HostSide {
  std::shared_ptr<NodeGroups> groups;
  HostStage stage;
};

// Sets limits->host, and returns what that needs. Collective.
absl::StatusOr<HostSide> MakeHostSide(InternalGroup& control, const NodeLayout& layout, Reducers reducers,
                                      const DeviceGroupOptions& options, StagingRing& ring, StagedCopies* copies,
                                      Terms* terms) {
  if (reducers == Reducers::kGpu || (reducers == Reducers::kAuto && terms->fixed)) return HostSide{};
  absl::StatusOr<std::unique_ptr<NodeGroups>> groups = NodeGroups::Create(control, layout);
  if (!groups.ok()) return groups.status();
  HostSide side;
  side.groups = *std::move(groups);
  absl::StatusOr<HostStage> stage =
      ShareHostStage(*side.groups->all, *options.runtime, options.device, !terms->shared_gpu);
  if (reducers == Reducers::kAuto && absl::IsResourceExhausted(stage.status())) {
    LogInfo("rank ", control.rank(), ": the GPUs reduce by themselves: ", stage.status().message());
    return HostSide{};
  }
  if (!stage.ok()) return stage.status();
  side.stage = *std::move(stage);
  side.stage.left = ring.left();
  if (reducers == Reducers::kCpu) {
    terms->limits.host = 0;
    return side;
  }
  const absl::Status measured =
      CalibrateHost(control, options, ring, copies, terms->blocks, side.groups, side.stage, &terms->limits);
  if (!measured.ok()) return measured;
  return terms->limits.host == StagedLimits::kNever ? HostSide{} : side;
}

absl::StatusOr<DeviceBackend> OnOneNode(InternalGroup& control, const NodeLayout& layout,
                                        const std::vector<Seat>& seats, const DeviceGroupOptions& options) {
  absl::StatusOr<Terms> terms = AgreeOnTerms(seats);
  if (!terms.ok()) return terms.status();
  const Seat& seat = seats[static_cast<size_t>(control.rank())];
  std::shared_ptr<StagingRing> ring;
  std::shared_ptr<StagedCopies> copies;
  const int node = NumaNodeOfPci(seat.gpu);
  if (absl::Status s = MakeMemory(control, options, node, &terms->limits, &ring, &copies); !s.ok()) return s;
  LogInfo("rank ", control.rank(), ": hierarchical backend on GPUs, ", control.size(), " ranks, GPU ", seat.gpu,
          ", NUMA node ", node, ", ", ring->bytes() >> 20, " MiB of host memory");
  if (!terms->fixed) {
    const absl::Status s = CalibrateStaged(control, options, *ring, copies.get(), terms->blocks, &terms->limits);
    if (!s.ok()) return s;
  }
  absl::StatusOr<HostSide> made =
      MakeHostSide(control, layout, seats[0].reducers, options, *ring, copies.get(), &*terms);
  if (!made.ok()) return made.status();
  const HostSide side = *std::move(made);
  DeviceBackend backend;
  if (side.groups == nullptr) {
    backend.transport = std::make_shared<StagedTransport>(ring);
  } else {
    backend.transport = std::make_shared<HostTransport>(ring, side.groups, side.stage.host);
  }
  backend.make_moves = [ring, copies, side, terms = *terms](InternalGroup& group, const DeviceEngine& engine) {
    std::unique_ptr<DeviceMoves> moves =
        std::make_unique<StagedMoves>(ring, copies, group, engine, terms.blocks, terms.limits);
    if (side.groups != nullptr) {
      moves = std::make_unique<HostMoves>(side.groups, side.stage, terms.limits.host, std::move(moves), group, engine);
    }
    return moves;
  };
  if (absl::Status s = AddPeerCopies(control, options, nullptr, &backend); !s.ok()) return s;
  return backend;
}

absl::StatusOr<DeviceBackend> OnNodes(InternalGroup& control, const NodeLayout& layout, const std::vector<Seat>& seats,
                                      const DeviceGroupOptions& options) {
  absl::StatusOr<std::unique_ptr<NodeGroups>> made = NodeGroups::Create(control, layout);
  if (!made.ok()) return made.status();
  const std::shared_ptr<NodeGroups> groups = *std::move(made);
  NodeRing ring{nullptr, {}};  // a rank that is alone on its node needs none
  absl::Status status;
  if (groups->width() > 1) {
    std::vector<Seat> here;
    for (const int r : layout.ranks[static_cast<size_t>(groups->node_index())]) {
      here.push_back(seats[static_cast<size_t>(r)]);
    }
    absl::StatusOr<NodeRing> shared = MakeRing(*groups->node, here, options);
    status = shared.status();
    if (shared.ok()) ring = *std::move(shared);
  }
  absl::StatusOr<HostStage> stage = HostStage{};
  if (status.ok()) {
    stage = MakeStage(options, ring.ring.get());
    status = stage.status();
  }
  if (absl::Status s = Agree(control, status); !s.ok()) return s;
  LogInfo("rank ", control.rank(), ": hierarchical backend on GPUs, ", control.size(), " ranks on ", layout.nodes(),
          " nodes, this is rank ", groups->local(), " of node ", groups->node_index(), ", GPU ",
          seats[static_cast<size_t>(control.rank())].gpu);
  DeviceBackend backend;
  backend.transport = std::make_shared<HostTransport>(ring.ring, groups, stage->host);
  backend.make_moves = [groups, ring, stage = *stage](InternalGroup& group, const DeviceEngine& engine) {
    std::unique_ptr<DeviceMoves> in_node;
    if (ring.ring == nullptr) {
      in_node = std::make_unique<LocalMoves>(engine.runtime(), engine.options().device);
    } else {
      in_node = std::make_unique<StagedMoves>(ring.ring, nullptr, *groups->node, engine, ring.terms.blocks,
                                              ring.terms.limits);
    }
    return std::make_unique<NodeMoves>(groups, stage, std::move(in_node), group, engine);
  };
  return backend;
}

}  // namespace

absl::StatusOr<std::unique_ptr<ProcessGroup>> CreateStagedGroup(std::unique_ptr<ProcessGroup> control,
                                                                const DeviceGroupOptions& options) {
  auto* const internal = dynamic_cast<InternalGroup*>(control.get());
  if (internal == nullptr)
    return absl::InvalidArgumentError("a GPU's group needs a group of libddp's own on CPU memory");
  const absl::StatusOr<Seat> seat = Sit(control->size(), options);
  if (absl::Status s = Agree(*control, seat.status()); !s.ok()) return s;
  const absl::StatusOr<std::vector<Seat>> seats = Exchange(*control, *seat);
  if (!seats.ok()) return seats.status();
  const NodeLayout layout = LayoutOf(*internal, *seats);
  absl::StatusOr<DeviceBackend> backend =
      layout.nodes() == 1 ? OnOneNode(*internal, layout, *seats, options) : OnNodes(*internal, layout, *seats, options);
  if (!backend.ok()) return backend.status();
  absl::StatusOr<std::unique_ptr<PeerBoard>> board = PeerBoard::Create(*control, options.host);
  if (!board.ok()) return board.status();
  backend->board = *std::move(board);
  backend->split = CreateStagedGroup;
  return CreateDeviceGroup(std::move(control), options, *std::move(backend));
}

}  // namespace ddp
