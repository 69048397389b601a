#include "libddp/comm/staged/staged_group.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "libddp/base/log.h"
#include "libddp/base/process_id.h"
#include "libddp/comm/base/exchange.h"
#include "libddp/comm/staged/staged_moves.h"
#include "libddp/comm/staged/staging_ring.h"

namespace ddp {
namespace {

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
  char host[256] = {}, gpu[64] = {};
};

absl::StatusOr<Seat> Sit(const DeviceGroupOptions& options) {
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
  Seat seat{.process = ProcessId::OfSelf(), .blocks = *blocks};
  options.host.copy(seat.host, sizeof seat.host - 1);
  gpu->copy(seat.gpu, sizeof seat.gpu - 1);
  return seat;
}

// The thread blocks that every rank may use. Ranks of one process that share a GPU divide it: all their kernels have to
// run at once there. Those of several processes take turns.
absl::StatusOr<int> AgreeOnBlocks(ProcessGroup& control, const Seat& mine) {
  absl::StatusOr<std::vector<Seat>> seats = Exchange(control, mine);
  if (!seats.ok()) return seats.status();
  int blocks = mine.blocks;
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
    blocks = std::min(blocks, seat.blocks / static_cast<int>(together));
    if (blocks >= staged::kPairStages * staged::kPairChannels * control.size()) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        together, " ranks of one process share GPU ", absl::string_view(seat.gpu), ", which runs ", seat.blocks,
        " of their thread blocks at once: too few. Start fewer ranks on it, or each in a process of its own"));
  }
  return blocks;
}

}  // namespace

absl::StatusOr<std::unique_ptr<ProcessGroup>> CreateStagedGroup(std::unique_ptr<ProcessGroup> control,
                                                                const DeviceGroupOptions& options) {
  if (control->size() > staged::kMaxRanks) {
    return absl::UnimplementedError(absl::StrCat("on GPUs the hierarchical backend works with up to ",
                                                 staged::kMaxRanks, " ranks, not ", control->size(), "; use nccl"));
  }
  absl::StatusOr<Seat> seat = Sit(options);
  if (absl::Status s = Agree(*control, seat.status()); !s.ok()) return s;
  absl::StatusOr<int> blocks = AgreeOnBlocks(*control, *seat);
  if (!blocks.ok()) return blocks.status();
  absl::StatusOr<std::unique_ptr<PeerBoard>> board = PeerBoard::Create(*control, options.host);
  if (!board.ok()) return board.status();
  absl::StatusOr<std::shared_ptr<StagingRing>> ring = StagingRing::Create(*control, *options.runtime, options.device);
  if (!ring.ok()) return ring.status();
  Log().info("rank {}: hierarchical backend on GPUs, {} ranks, GPU {}, {} MiB of host memory", control->rank(),
             control->size(), seat->gpu, staged::RingBytes(control->size()) >> 20);
  DeviceBackend backend;
  backend.transport = std::make_shared<StagedTransport>(*ring);
  backend.board = *std::move(board);
  backend.make_moves = [ring = *ring, blocks = *blocks](InternalGroup& group, const DeviceEngine& engine) {
    return std::make_unique<StagedMoves>(ring, group, engine, blocks);
  };
  backend.split = CreateStagedGroup;
  return CreateDeviceGroup(std::move(control), options, std::move(backend));
}

}  // namespace ddp
