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
#include "libddp/comm/staged/staged_calibration.h"
#include "libddp/comm/staged/staged_moves.h"
#include "libddp/comm/staged/staging_ring.h"

namespace ddp {
namespace {

constexpr char kMeasure[] = "measure";  // DDP_STAGED_LIMITS, if it is not set

// The kernels watch the words by themselves, so that nothing else has to be done for the GPU to come free.
class StagedTransport final : public DeviceTransport {
 public:
  explicit StagedTransport(std::shared_ptr<StagingRing> ring) : ring_(std::move(ring)) {}

  absl::Status Health() override { return absl::OkStatus(); }
  void Abort() override { ring_->Abort(); }
  absl::Duration LeaveTime() const override { return absl::Seconds(1); }

 private:
  const std::shared_ptr<StagingRing> ring_;
};

// What a rank tells the others of itself.
struct Seat {
  ProcessId process;
  int blocks = 0;
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
  Seat seat{.process = ProcessId::OfSelf(), .blocks = *blocks, .limits = StagedLimits::For(ranks)};
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
  bool fixed;  // the limits: nobody measures
};

// Ranks of one process that share a GPU divide it: all their kernels have to run at once there. Their copies might wait
// for each other for ever in one of its queues, so they use none. Those of several processes take turns.
absl::StatusOr<Terms> AgreeOnTerms(ProcessGroup& control, const Seat& mine) {
  absl::StatusOr<std::vector<Seat>> seats = Exchange(control, mine);
  if (!seats.ok()) return seats.status();
  Terms terms = {mine.blocks, (*seats)[0].limits, (*seats)[0].fixed || control.size() == 1};
  for (size_t r = 0; r < seats->size(); ++r) {
    const Seat& seat = (*seats)[r];
    const auto same = [](const char* a, const char* b) { return absl::string_view(a) == b; };
    if (!same(seat.host, (*seats)[0].host)) {
      return absl::UnimplementedError(absl::StrCat(
          "ranks 0 and ", r, " are on different hosts, and on GPUs the hierarchical backend works on one; use nccl"));
    }
    const auto together = std::count_if(seats->begin(), seats->end(), [&](const Seat& other) {
      return other.process.SameProcess(seat.process) && same(other.gpu, seat.gpu);
    });
    // Processes that share a GPU take turns on it, which tells nothing.
    terms.fixed |= std::any_of(seats->begin() + static_cast<ptrdiff_t>(r) + 1, seats->end(),
                               [&](const Seat& other) { return same(other.gpu, seat.gpu); });
    terms.blocks = std::min(terms.blocks, seat.blocks / static_cast<int>(together));
    if (together > 1) terms.limits.copies = StagedLimits::kNever;
    if (terms.blocks >= staged::kPairStages * staged::kPairChannels * control.size()) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        together, " ranks of one process share GPU ", absl::string_view(seat.gpu), ", which runs ", seat.blocks,
        " of their thread blocks at once: too few. Start fewer ranks on it, or each in a process of its own"));
  }
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
    Log().info("rank {}: the copy engines are not used: {}", control.rank(), std::string(status.message()));
    limits->copies = StagedLimits::kNever;
  }
  absl::StatusOr<std::shared_ptr<StagingRing>> made = StagingRing::Create(control, runtime, options.device, node, {});
  if (made.ok()) *ring = *std::move(made);
  return made.status();
}

}  // namespace

absl::StatusOr<std::unique_ptr<ProcessGroup>> CreateStagedGroup(std::unique_ptr<ProcessGroup> control,
                                                                const DeviceGroupOptions& options) {
  if (control->size() > staged::kMaxRanks) {
    return absl::UnimplementedError(absl::StrCat("on GPUs the hierarchical backend works with up to ",
                                                 staged::kMaxRanks, " ranks, not ", control->size(), "; use nccl"));
  }
  absl::StatusOr<Seat> seat = Sit(control->size(), options);
  if (absl::Status s = Agree(*control, seat.status()); !s.ok()) return s;
  absl::StatusOr<Terms> terms = AgreeOnTerms(*control, *seat);
  if (!terms.ok()) return terms.status();
  absl::StatusOr<std::unique_ptr<PeerBoard>> board = PeerBoard::Create(*control, options.host);
  if (!board.ok()) return board.status();
  std::shared_ptr<StagingRing> ring;
  std::shared_ptr<StagedCopies> copies;
  const int node = NumaNodeOfPci(seat->gpu);
  if (absl::Status s = MakeMemory(*control, options, node, &terms->limits, &ring, &copies); !s.ok()) return s;
  Log().info("rank {}: hierarchical backend on GPUs, {} ranks, GPU {}, NUMA node {}, {} MiB of host memory",
             control->rank(), control->size(), seat->gpu, node, ring->bytes() >> 20);
  if (!terms->fixed) {
    const absl::Status s = CalibrateStaged(*control, options, *ring, copies.get(), terms->blocks, &terms->limits);
    if (!s.ok()) return s;
  }
  DeviceBackend backend;
  backend.transport = std::make_shared<StagedTransport>(ring);
  backend.board = *std::move(board);
  backend.make_moves = [ring, copies, terms = *terms](InternalGroup& group, const DeviceEngine& engine) {
    return std::make_unique<StagedMoves>(ring, copies, group, engine, terms.blocks, terms.limits);
  };
  backend.split = CreateStagedGroup;
  return CreateDeviceGroup(std::move(control), options, std::move(backend));
}

}  // namespace ddp
