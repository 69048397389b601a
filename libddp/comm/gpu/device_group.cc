// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/gpu/device_group.h"

#include <algorithm>
#include <bit>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "libddp/base/failed_ranks.h"
#include "libddp/base/owner_process.h"
#include "libddp/comm/base/checked_group.h"
#include "libddp/comm/base/exchange.h"
#include "libddp/comm/base/joined_work.h"
#include "libddp/comm/gpu/local_moves.h"
#include "libddp/comm/memory/allocation_table.h"
#include "libddp/device/buffer_ops.h"

namespace ddp {
namespace {

using Kind = OperationKey::Kind;

class DeviceGroup final : public CheckedGroup, public BlockReducer {
 public:
  DeviceGroup(std::shared_ptr<InternalGroup> control, DeviceGroupOptions options, DeviceBackend backend,
              std::shared_ptr<DeviceEngine> engine)
      : CheckedGroup(options.timeout, control->world_ranks()),
        control_(std::move(control)),
        options_(std::move(options)),
        split_(std::move(backend.split)),
        engine_(std::move(engine)),
        moves_(backend.make_moves(*control_, *engine_)) {}
  ~DeviceGroup() override {
    if (!owner_.IsHere()) {  // a child by fork can use neither CUDA nor what its parent has made with it
      (void)moves_.release();
      KeepForever(engine_);
      return;
    }
    engine_->Shutdown();
  }

  int rank() const override { return control_->rank(); }
  int size() const override { return control_->size(); }
  absl::string_view backend() const override { return moves_->backend(); }
  Device device() const override { return options_.device; }

  absl::StatusOr<Allocation> Allocate(size_t bytes, Device device) override {
    return device.kind == Device::Kind::kCpu ? control_->Allocate(bytes, device)
                                             : CheckedGroup::Allocate(bytes, device);
  }
  absl::StatusOr<std::unique_ptr<ProcessGroup>> Split(int color, int key) override {
    absl::StatusOr<std::unique_ptr<ProcessGroup>> control = control_->Split(color, key);
    if (!control.ok()) return control.status();
    if (*control == nullptr) return std::unique_ptr<ProcessGroup>();
    DeviceGroupOptions options = options_;
    options.timeout = timeout();
    if ((*control)->size() == 1) return CreateLocalDeviceGroup(*std::move(control), options);
    const WorldRanks ranks = WorldRanksOf(**control);
    const int rank = (*control)->rank();
    absl::StatusOr<std::unique_ptr<ProcessGroup>> part = split_(*std::move(control), options);
    if (part.ok()) return part;
    return ranks.Named(part.status(), rank);
  }

  absl::Status Register(const Allocation& memory) override {
    if (memory.data() != nullptr && memory.device().kind == Device::Kind::kCpu) return control_->Register(memory);
    if (absl::Status s = Check("register").AllocationOf(memory.bytes(), memory.device()); !s.ok()) return s;
    if (absl::Status s = status(); !s.ok()) return s;
    const std::lock_guard<std::mutex> lock(allocate_mutex_);
    const absl::StatusOr<std::vector<uint64_t>> sizes = Exchange<uint64_t>(*control_, memory.bytes());
    if (!sizes.ok()) return sizes.status();
    for (size_t r = 1; r < sizes->size(); ++r) {
      if ((*sizes)[r] == (*sizes)[0]) continue;
      return absl::FailedPreconditionError(absl::StrCat("ranks register memory of different sizes: rank 0 has ",
                                                        (*sizes)[0], " bytes, rank ", r, " has ", (*sizes)[r]));
    }
    if (absl::Status s = moves_->Adopt(memory); !s.ok()) return s;
    allocations_.Add(memory);
    return absl::OkStatus();
  }
  std::optional<AllocatedRange> Find(const void* data, size_t bytes) const override {
    std::optional<AllocatedRange> found = allocations_.Find(data, bytes);
    return found.has_value() ? found : control_->Find(data, bytes);
  }
  absl::Status SetTimeout(absl::Duration timeout) override {
    const absl::Status status = CheckedGroup::SetTimeout(timeout);
    return status.ok() ? control_->SetTimeout(timeout) : status;
  }
  // An operation on CPU memory may have failed already. Then that is the cause, and `why` may only follow from it.
  void Fail(const absl::Status& why) override {
    const absl::Status first = control_->status();
    engine_->Fail(first.ok() ? why : first);
    control_->Fail(engine_->status());
  }
  absl::Status status() const override {
    absl::Status status = engine_->status();
    return status.ok() ? control_->status() : status;
  }
  absl::Status AwaitFree() const { return engine_->AwaitFree(); }
  const uint32_t* failed_word() const override { return engine_->failed_word(); }
  void Progress() override { control_->Progress(); }
  absl::Status MayBeCaptured() const override { return moves_->MayBeCaptured(); }
  Observer* observer() const override { return control_->observer(); }
  bool reduces_blocks() const override { return moves_->block_moves() != nullptr; }
  Work AllReduceBlocks(const BlockReduce& reduce) override;

 private:
  static bool OnCpu(Buffers buffers) {
    return std::all_of(buffers.begin(), buffers.end(),
                       [](const Buffer& b) { return b.device.kind == Device::Kind::kCpu; });
  }
  // The group for a call on CPU memory; peers that wait for this rank on the GPU can learn of the call.
  ProcessGroup* Other(const Call& call) override {
    if (call.kind == Kind::kBarrier || !OnCpu(call.in) || !OnCpu(call.out)) return nullptr;
    PeerBoard* const board = engine_->options().board.get();
    const bool message = call.kind == Kind::kSend || call.kind == Kind::kRecv || call.kind == Kind::kSendRecv;
    if (board == nullptr || message) return control_.get();
    // All ranks count these calls alike, also one that brings nothing.
    const Buffers shown = call.in.empty() ? call.out : call.in;
    const DType dtype = shown.empty() ? DType::kUInt8 : shown[0].dtype;
    board->PostHostCall({.kind = call.kind, .in = dtype, .out = dtype}, Elements(shown));
    return control_.get();
  }

  Work StartChecked(const CheckedCall& call) override;
  Work StartComposed(const CheckedCall& call) override;
  Work StartMessage(const MessageCall& m) override {
    const OperationKey key{.in = m.extent.dtype, .out = m.extent.dtype};
    const DeviceOperation operation{.key = key,
                                    .entry = {0, m.extent.count, 0},
                                    .message = m.send ? "send" : "recv",
                                    .peer = m.peer,
                                    .tag = m.tag,
                                    .timeout = m.timeout};
    return Launch(operation, m.after, [&](void* stream) {
      return m.send ? moves_->Send(m.buffers, m.peer, stream) : moves_->Recv(m.buffers, m.peer, stream);
    });
  }
  absl::StatusOr<Allocation> AllocateHere(size_t bytes) override;
  Work Launch(const DeviceOperation& operation, Stream after,
              absl::FunctionRef<absl::Status(void* stream)> enqueue) const;
  Work Barrier(const CheckedCall& call);

  const OwnerProcess owner_;
  const std::shared_ptr<InternalGroup> control_;
  const DeviceGroupOptions options_;
  const std::function<absl::StatusOr<std::unique_ptr<ProcessGroup>>(std::unique_ptr<ProcessGroup>,
                                                                    const DeviceGroupOptions&)>
      split_;
  const std::shared_ptr<DeviceEngine> engine_;
  std::unique_ptr<DeviceMoves> moves_;
  std::mutex allocate_mutex_;
  AllocationTable allocations_{0};  // of the GPU's memory
};

// What cannot be captured is refused before anybody hears of it.
Work DeviceGroup::Launch(const DeviceOperation& operation, Stream after,
                         absl::FunctionRef<absl::Status(void* stream)> enqueue) const {
  if (const absl::Status refusal = moves_->MayBeCaptured(); IsGpu(after.device) && !refusal.ok()) {
    const DeviceGuard guard(*options_.runtime, options_.device);
    const absl::StatusOr<bool> capturing = options_.runtime->Capturing(after.native);
    if (capturing.ok() && *capturing) {
      return NameRank(*this, operation.Describe(),
                      absl::Status(refusal.code(), absl::StrCat("a CUDA graph cannot hold this: ", refusal.message())));
    }
  }
  return engine_->Launch(operation, after, enqueue);
}

Work DeviceGroup::StartChecked(const CheckedCall& call) {
  if (call.key.kind == Kind::kBarrier) return Barrier(call);
  const DeviceOperation operation{.key = call.key,
                                  .entry = {call.key.Pack(), call.count, MixHash(moves_->Shape(call), call.parameters)},
                                  .bucket = call.reduce == nullptr ? -1 : call.reduce->bucket,
                                  .timeout = call.timeout};
  return Launch(operation, call.after,
                [&](void* stream) { return call.count > 0 ? moves_->Enqueue(call, stream) : absl::OkStatus(); });
}

Work DeviceGroup::AllReduceBlocks(const BlockReduce& reduce) {
  const DType dtype = reduce.buffer.dtype;
  const OperationKey key{.kind = Kind::kAllReduce, .in = dtype, .out = dtype};
  uint64_t parameters = MixHash(1, static_cast<uint64_t>(reduce.format));
  for (const float scale : {reduce.prescale, reduce.postscale}) {
    parameters = MixHash(parameters, std::bit_cast<uint32_t>(scale));
  }
  const DeviceOperation operation{.key = key,
                                  .entry = {key.Pack(), reduce.buffer.count, parameters},
                                  .bucket = reduce.bucket,
                                  .timeout = timeout()};
  return engine_->Launch(operation, reduce.after, [&](void* stream) {
    return reduce.buffer.count > 0 ? moves_->block_moves()->ReduceBlocks(reduce, stream) : absl::OkStatus();
  });
}

Work DeviceGroup::StartComposed(const CheckedCall& call) {
  const auto launch = [&](const DeviceOperation& operation) {
    return Launch(operation, call.after, [&](void* stream) { return moves_->Enqueue(call, stream); });
  };
  switch (call.key.kind) {
    case Kind::kReduceScatterV:
      return CheckedGroup::StartComposed(call);
    case Kind::kAllToAllV:  // every rank has a number of elements of its own
      return launch({.key = call.key, .entry = {call.key.Pack(), 0, 0}, .timeout = call.timeout});
    case Kind::kSendRecv:
      return launch({.key = call.key,
                     .entry = {0, call.count, 0},
                     .message = "send_recv",
                     .peer = call.to,
                     .tag = call.tag,
                     .timeout = call.timeout});
    default:
      return StartChecked(call);
  }
}

// The CPU's operations, too: the stream's are done when a barrier behind them is.
Work DeviceGroup::Barrier(const CheckedCall& call) {
  Work control = control_->Barrier();
  if (!control.call_status().ok()) return control;
  const DeviceOperation operation{.key = call.key, .entry = {call.key.Pack(), 0, 0}, .timeout = call.timeout};
  Work work = engine_->Launch(operation, kNoStream, [&](void* stream) { return moves_->Barrier(stream); });
  return JoinWorks({std::move(control), std::move(work)});
}

absl::StatusOr<Allocation> DeviceGroup::AllocateHere(size_t bytes) {
  if (absl::Status s = status(); !s.ok()) return s;
  const std::lock_guard<std::mutex> lock(allocate_mutex_);
  absl::StatusOr<Allocation> allocation = moves_->Allocate(bytes);
  if (allocation.ok()) allocations_.Add(*allocation);
  const absl::StatusCode code = allocation.status().code();
  // All ranks were told of these; anything else leaves them apart.
  if (!allocation.ok() && size() > 1 && code != absl::StatusCode::kResourceExhausted &&
      code != absl::StatusCode::kFailedPrecondition) {
    engine_->Fail(NameRank(rank(), "allocate", allocation.status()));
    return engine_->status();  // the first cause, which may have been another's
  }
  return allocation;
}

}  // namespace

absl::StatusOr<std::unique_ptr<ProcessGroup>> CreateDeviceGroup(std::unique_ptr<ProcessGroup> over_cpu,
                                                                const DeviceGroupOptions& options,
                                                                DeviceBackend backend) {
  const std::shared_ptr<ProcessGroup> shared = std::move(over_cpu);
  const auto control = std::dynamic_pointer_cast<InternalGroup>(shared);
  if (control == nullptr)
    return absl::InvalidArgumentError("a GPU's group needs a group of libddp's own on CPU memory");
  absl::StatusOr<std::shared_ptr<DeviceEngine>> engine =
      DeviceEngine::Create({.rank = control->rank(),
                            .device = options.device,
                            .abort_grace = options.abort_grace,
                            .runtime = options.runtime,
                            .transport = backend.transport,
                            .board = backend.board,
                            .control = control,
                            .stall_warning = options.stall_warning,
                            .observer = options.observer,
                            .group = options.observer == nullptr ? 0 : options.observer->AddGroup(),
                            .world_ranks = control->world_ranks(),
                            .progress = options.progress});
  if (absl::Status s = Agree(*control, engine.status()); !s.ok()) {
    if (engine.ok()) (*engine)->Shutdown();
    return s;
  }
  return std::unique_ptr<ProcessGroup>(new DeviceGroup(control, options, std::move(backend), *std::move(engine)));
}

absl::Status AwaitFree(ProcessGroup& group) {
  auto* const on_gpu = dynamic_cast<DeviceGroup*>(&group);
  return on_gpu == nullptr ? absl::OkStatus() : on_gpu->AwaitFree();
}

absl::StatusOr<std::unique_ptr<ProcessGroup>> CreateLocalDeviceGroup(std::unique_ptr<ProcessGroup> control,
                                                                     const DeviceGroupOptions& options) {
  DeviceBackend backend;
  backend.make_moves = [options](InternalGroup&, const DeviceEngine&) {
    return std::make_unique<LocalMoves>(*options.runtime, options.device);
  };
  return CreateDeviceGroup(std::move(control), options, std::move(backend));
}

}  // namespace ddp
