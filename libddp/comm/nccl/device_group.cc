#include "libddp/comm/nccl/device_group.h"

#include <algorithm>
#include <mutex>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "ddp/collectives.h"
#include "libddp/base/env.h"
#include "libddp/base/failed_ranks.h"
#include "libddp/base/log.h"
#include "libddp/base/owner_process.h"
#include "libddp/comm/base/checked_group.h"
#include "libddp/comm/base/exchange.h"
#include "libddp/comm/base/joined_work.h"
#include "libddp/comm/health/peer_board.h"
#include "libddp/comm/memory/allocation_table.h"
#include "libddp/comm/nccl/communicator.h"
#include "libddp/comm/nccl/device_engine.h"
#include "libddp/comm/nccl/device_moves.h"
#include "libddp/comm/nccl/reduce_plan.h"
#include "libddp/comm/nccl/registered_memory.h"

namespace ddp {
namespace {

using Kind = OperationKey::Kind;

// A hash of what has to be equal on all ranks besides kind, types and count.
uint64_t Mix(uint64_t hash, uint64_t value) { return (hash ^ value) * 0x9e3779b97f4a7c15u + (hash >> 29); }
uint64_t Shape(uint64_t hash, Buffers buffers) {
  for (const Buffer& b : buffers) hash = Mix(hash, b.count);
  return hash;
}

class DeviceGroup final : public CheckedGroup {
 public:
  DeviceGroup(std::shared_ptr<InternalGroup> control, DeviceGroupOptions options,
              std::shared_ptr<NcclCommunicator> communicator, std::shared_ptr<DeviceEngine> engine)
      : control_(std::move(control)),
        options_(std::move(options)),
        communicator_(std::move(communicator)),
        memory_(communicator_ == nullptr
                    ? nullptr
                    : std::make_unique<RegisteredMemory>(communicator_, *control_, options_.timeout)),
        engine_(std::move(engine)),
        moves_(communicator_.get(), memory_.get(), options_.runtime, control_->rank(), control_->size()) {}
  ~DeviceGroup() override {
    if (!owner_.IsHere()) {  // a child by fork can use neither CUDA nor its parent's NCCL
      (void)memory_.release();
      KeepForever(engine_);
      KeepForever(communicator_);
      return;
    }
    engine_->Shutdown();
    if (communicator_ != nullptr) communicator_->Destroy();  // before its memory goes
  }

  int rank() const override { return control_->rank(); }
  int size() const override { return control_->size(); }
  absl::string_view backend() const override { return communicator_ == nullptr ? "local" : "nccl"; }
  Device device() const override { return options_.device; }

  absl::StatusOr<Allocation> Allocate(size_t bytes, Device device) override {
    return device.kind == Device::Kind::kCpu ? control_->Allocate(bytes, device)
                                             : CheckedGroup::Allocate(bytes, device);
  }
  absl::StatusOr<std::unique_ptr<ProcessGroup>> Split(int color, int key) override {
    absl::StatusOr<std::unique_ptr<ProcessGroup>> control = control_->Split(color, key);
    if (!control.ok()) return control.status();
    if (*control == nullptr) return std::unique_ptr<ProcessGroup>();
    // A communicator of its own: those that ncclCommSplit makes can take each other along when one is aborted. One rank
    // alone needs none.
    return (*control)->size() == 1 ? CreateLocalDeviceGroup(*std::move(control), options_)
                                   : CreateNcclGroup(*std::move(control), options_);
  }

  absl::Status Register(const Allocation& memory) override {
    if (memory.data() != nullptr && memory.device().kind == Device::Kind::kCpu) return control_->Register(memory);
    if (absl::Status s = Check("register").AllocationOf(memory.bytes(), memory.device()); !s.ok()) return s;
    if (absl::Status s = status(); !s.ok()) return s;
    const std::lock_guard<std::mutex> lock(allocate_mutex_);
    if (memory_ != nullptr) {
      if (absl::Status s = memory_->Adopt(memory); !s.ok()) return s;
    }
    allocations_.Add(memory);
    return absl::OkStatus();
  }
  std::optional<AllocatedRange> Find(const void* data, size_t bytes) const override {
    std::optional<AllocatedRange> found = allocations_.Find(data, bytes);
    return found.has_value() ? found : control_->Find(data, bytes);
  }
  void Fail(const absl::Status& why) override {
    engine_->Fail(why);
    control_->Fail(engine_->status());
  }
  absl::Status status() const override {
    absl::Status status = engine_->status();
    return status.ok() ? control_->status() : status;
  }
  const uint32_t* failed_word() const override { return engine_->failed_word(); }
  void Progress() override { control_->Progress(); }
  Observer* observer() const override { return control_->observer(); }

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
    const size_t count = std::accumulate(shown.begin(), shown.end(), size_t{0},
                                         [](size_t sum, const Buffer& b) { return sum + b.count; });
    board->PostHostCall({.kind = call.kind, .in = dtype, .out = dtype}, count);
    return control_.get();
  }

  Work StartChecked(const CheckedCall& call) override;
  Work StartComposed(const CheckedCall& call) override;
  Work StartMessage(const MessageCall& m) override {
    const OperationKey key{.in = m.extent.dtype, .out = m.extent.dtype};
    const DeviceOperation operation{key, {0, m.extent.count, 0}, m.send ? "send" : "recv", m.peer, m.tag};
    return engine_->Launch(operation, m.after, [&](void* stream) {
      return m.send ? moves_.Send(m.buffers, m.peer, stream) : moves_.Recv(m.buffers, m.peer, stream);
    });
  }
  absl::StatusOr<Allocation> AllocateHere(size_t bytes) override;
  // `shape`: of the ranges, a hash of what must be equal on all ranks.
  Work Launch(const CheckedCall& call, uint64_t shape, absl::FunctionRef<absl::Status(void*)> enqueue) {
    const DeviceOperation operation{.key = call.key,
                                    .entry = {call.key.Pack(), call.count, Mix(shape, call.parameters)},
                                    .bucket = call.reduce == nullptr ? -1 : call.reduce->bucket};
    if (call.count > 0) return engine_->Launch(operation, call.after, enqueue);
    return engine_->Launch(operation, call.after, [](void*) { return absl::OkStatus(); });
  }
  Work Reduce(const CheckedCall& call);
  Work Barrier();
  ReduceTransport TransportOf(Kind kind, Buffers in, Buffers out, size_t total_bytes) const;

  const OwnerProcess owner_;
  const std::shared_ptr<InternalGroup> control_;
  const DeviceGroupOptions options_;
  const std::shared_ptr<NcclCommunicator> communicator_;  // null in a world of one
  std::unique_ptr<RegisteredMemory> memory_;
  const std::shared_ptr<DeviceEngine> engine_;
  DeviceMoves moves_;
  std::mutex allocate_mutex_;
  AllocationTable allocations_{0};  // of the GPU's memory
};

Work DeviceGroup::StartChecked(const CheckedCall& call) {
  const Buffers in = call.in, out = call.out;
  switch (call.key.kind) {
    case Kind::kAllReduce:
    case Kind::kReduceScatter:
      return Reduce(call);
    case Kind::kBroadcast:
      return Launch(call, Shape(0, in), [&](void* stream) { return moves_.Broadcast(in, call.key.root, stream); });
    case Kind::kAllGather: {
      const std::vector<size_t> counts(static_cast<size_t>(size()), call.count);
      return Launch(call, Mix(Shape(Shape(0, in), out), moves_.Misaligned(out, in) ? 1 : 0),
                    [&](void* stream) { return moves_.AllGather(in, out, counts, stream); });
    }
    case Kind::kAllGatherV:
      return Launch(call, Shape(0, out), [&](void* stream) { return moves_.AllGather(in, out, call.counts, stream); });
    case Kind::kAllToAll: {
      const bool direct = moves_.SendsFromRegistered(in, out);  // peers have to receive so
      return Launch(call, direct ? 1 : 0, [&](void* stream) { return moves_.AllToAll(in, out, direct, stream); });
    }
    case Kind::kBarrier:
      return Barrier();
    default:
      return absl::InternalError("an unknown operation");
  }
}

Work DeviceGroup::StartComposed(const CheckedCall& call) {
  const Buffers in = call.in, out = call.out;
  const int root = call.key.root;
  switch (call.key.kind) {
    case Kind::kReduce: {
      const ReducePlan plan = PlanReduce(call.key.in, call.key.out, *call.reduce, {.ranks = size()});
      return Launch(call, Shape(0, in),
                    [&](void* stream) { return moves_.ReduceTo(root, plan, in, out, call.reduce->nonfinite, stream); });
    }
    case Kind::kGather:
      return Launch(call, 0, [&](void* stream) { return moves_.Gather(in, out, root, stream); });
    case Kind::kScatter:
      return Launch(call, 0, [&](void* stream) { return moves_.Scatter(in, out, root, stream); });
    case Kind::kAllToAllV: {  // every rank has a number of elements of its own
      const DeviceOperation operation{.key = call.key, .entry = {call.key.Pack(), 0, 0}};
      return engine_->Launch(operation, call.after, [&](void* stream) {
        return moves_.AllToAll(in, call.counts, out, call.out_counts, stream);
      });
    }
    case Kind::kSendRecv: {
      const DeviceOperation operation{call.key, {0, call.count, 0}, "send_recv", call.to, call.tag};
      return engine_->Launch(operation, call.after,
                             [&](void* stream) { return moves_.SendRecv(in, call.to, out, call.from, stream); });
    }
    default:
      return CheckedGroup::StartComposed(call);
  }
}

Work DeviceGroup::Reduce(const CheckedCall& call) {
  const Buffers in = call.in, out = call.out;
  const OperationKey& key = call.key;
  const ReducePlan plan =
      PlanReduce(key.in, key.out, *call.reduce, TransportOf(key.kind, in, out, call.count * SizeOf(key.in)));
  return Launch(call, Mix(Shape(Shape(0, in), out), moves_.Misaligned(in, out) ? 1 : 0), [&](void* stream) {
    return moves_.Reduce(key.kind == Kind::kReduceScatter, plan, in, out, call.count, call.reduce->nonfinite, stream);
  });
}

ReduceTransport DeviceGroup::TransportOf(Kind kind, Buffers in, Buffers out, size_t total_bytes) const {
  ReduceTransport transport{.ranks = size()};
  if (memory_ == nullptr) return transport;
  transport.avg_keeps_symmetric = kind == Kind::kReduceScatter && communicator_->setup().features.avg_keeps_symmetric;
  // What is registered is so on all ranks, and so must the choice be.
  for (const Buffers buffers : {in, out}) {
    for (const Buffer& b : buffers) {
      transport.path = memory_->PathOf(b, total_bytes);
      if (transport.path == ReducePath::kPlain) return transport;
    }
  }
  return transport;
}

// The CPU's operations, too: the stream's are done when a small sum behind them is.
Work DeviceGroup::Barrier() {
  Work control = control_->Barrier();
  if (!control.call_status().ok()) return control;
  const DeviceOperation operation{{}, {OperationKey{}.Pack(), 0, 0}};
  Work work = engine_->Launch(operation, kNoStream, [&](void* stream) { return moves_.Barrier(stream); });
  return JoinWorks({std::move(control), std::move(work)});
}

absl::StatusOr<Allocation> DeviceGroup::AllocateHere(size_t bytes) {
  const Device device = options_.device;
  if (absl::Status s = status(); !s.ok()) return s;
  const std::lock_guard<std::mutex> lock(allocate_mutex_);
  if (memory_ == nullptr) {
    absl::StatusOr<std::shared_ptr<void>> data = options_.runtime->Allocate(device, bytes);
    if (!data.ok()) return data.status();
    const Allocation allocation(*std::move(data), bytes, device);
    allocations_.Add(allocation);
    return allocation;
  }
  absl::StatusOr<Allocation> allocation = memory_->Allocate(bytes);
  if (allocation.ok()) allocations_.Add(*allocation);
  const absl::StatusCode code = allocation.status().code();
  // All ranks were told of these; anything else leaves them apart.
  if (!allocation.ok() && code != absl::StatusCode::kResourceExhausted &&
      code != absl::StatusCode::kFailedPrecondition) {
    engine_->Fail(NameRank(rank(), "allocate", allocation.status()));
    return engine_->status();  // the first cause, which may have been another's
  }
  return allocation;
}

// --- creation -------------------------------------------------------------------------------------------------------

// What this rank brings along, or why it cannot: agreed before anybody enters NCCL, where it would be waited for.
struct Offer {
  nccl::Api api;
  nccl::Features features;
};

absl::StatusOr<Offer> MakeOffer(const DeviceGroupOptions& options) {
  if (options.device.kind != Device::Kind::kCuda) {
    return absl::FailedPreconditionError(
        "the nccl backend works on GPUs: set ContextOptions::device, usually to the GPU of the local rank's number");
  }
  Offer offer;
  if (absl::Status s = options.runtime->Check(options.device); !s.ok()) return s;
  if (options.api.has_value()) {
    offer.api = *options.api;
  } else {
    absl::StatusOr<nccl::Api> api = nccl::Load();
    if (!api.ok()) return api.status();
    offer.api = *api;
  }
  absl::StatusOr<nccl::Features> features = nccl::FeaturesOf(offer.api);
  if (!features.ok()) return features.status();
  offer.features = *features;
  return offer;
}

// Version and GPU of each rank: all the same, and all different unless NCCL was told that they need not be. GPUs of
// several hosts may have the same name.
absl::Status Compare(ProcessGroup& control, const std::string& version, const std::string& gpu,
                     const std::string& host) {
  absl::StatusOr<std::vector<std::string>> texts = GatherStrings(control, absl::StrCat(version, " ", gpu, " ", host));
  if (!texts.ok()) return texts.status();
  std::vector<std::pair<std::string, std::string>> all;
  for (const std::string& text : *texts) all.emplace_back(absl::StrSplit(text, absl::MaxSplits(' ', 1)));
  const auto gpu_of = [](const std::string& place) { return place.substr(0, place.find(' ')); };
  const bool may_share = ReadEnv(Env::kNcclMultiRankGpu) == "1";
  for (size_t r = 1; r < all.size(); ++r) {
    if (all[r].first != all[0].first) {
      return absl::FailedPreconditionError(absl::StrCat("rank 0 has NCCL ", all[0].first, " and rank ", r, " has ",
                                                        all[r].first,
                                                        "; all ranks need the same (DDP_NCCL_LIBRARY names one)"));
    }
    for (size_t q = 0; q < r; ++q) {
      if (may_share || all[q].second != all[r].second) continue;
      return absl::FailedPreconditionError(
          absl::StrCat("ranks ", q, " and ", r, " use the same GPU, ", gpu_of(all[r].second),
                       "; NCCL needs one for each: give every rank the GPU of its local rank's number, and start no "
                       "more ranks on a host than it has GPUs"));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<NcclCommunicator>> Connect(ProcessGroup& control, const Offer& offer,
                                                          const DeviceGroupOptions& options, PeerBoard& board) {
  NcclSetup setup{.api = offer.api,
                  .features = offer.features,
                  .rank = control.rank(),
                  .size = control.size(),
                  .device = options.device,
                  .runtime = options.runtime};
  absl::Status status;
  if (setup.rank == 0) {
    const nccl::Result result = offer.api.GetUniqueId(&setup.id);
    status = result == nccl::kSuccess
                 ? absl::OkStatus()
                 : absl::InternalError(absl::StrCat("ncclGetUniqueId: ", offer.api.GetErrorString(result),
                                                    "; has this host a network interface?"));
  }
  if (absl::Status s = Agree(control, status); !s.ok()) return s;
  const Buffer id{setup.id.internal, sizeof setup.id.internal, DType::kUInt8, Device{}};
  if (absl::Status s = control.Broadcast(id, 0).Wait(); !s.ok()) return s;
  absl::StatusOr<std::shared_ptr<NcclCommunicator>> communicator =
      NcclCommunicator::Create(setup, absl::Now() + options.timeout, [&] {
        if (absl::Status s = board.failure(); !s.ok()) return s;
        return board.Gone(0);
      });
  if (!communicator.ok()) {
    const absl::Status first = board.Fail(communicator.status());
    control.Abort(first);  // for those that wait for us below
    return first;
  }
  if (absl::Status s = Agree(control, absl::OkStatus()); !s.ok()) return s;
  return communicator;
}

absl::StatusOr<std::unique_ptr<ProcessGroup>> Assemble(std::unique_ptr<ProcessGroup> over_cpu,
                                                       const DeviceGroupOptions& options,
                                                       std::shared_ptr<NcclCommunicator> communicator,
                                                       std::shared_ptr<PeerBoard> board) {
  const std::shared_ptr<ProcessGroup> shared = std::move(over_cpu);
  const auto control = std::dynamic_pointer_cast<InternalGroup>(shared);
  if (control == nullptr)
    return absl::InvalidArgumentError("a GPU's group needs a group of libddp's own on CPU memory");
  absl::StatusOr<std::shared_ptr<DeviceEngine>> engine =
      DeviceEngine::Create({.rank = control->rank(),
                            .size = control->size(),
                            .device = options.device,
                            .timeout = options.timeout,
                            .abort_grace = options.abort_grace,
                            .runtime = options.runtime,
                            .transport = communicator,
                            .board = std::move(board),
                            .control = control,
                            .stall_warning = options.stall_warning,
                            .observer = options.observer,
                            .group = options.observer == nullptr ? 0 : options.observer->AddGroup(),
                            .progress = options.progress});
  if (absl::Status s = Agree(*control, engine.status()); !s.ok()) {
    if (engine.ok()) (*engine)->Shutdown();
    return s;
  }
  return std::unique_ptr<ProcessGroup>(new DeviceGroup(control, options, std::move(communicator), *std::move(engine)));
}

}  // namespace

absl::StatusOr<std::unique_ptr<ProcessGroup>> CreateNcclGroup(std::unique_ptr<ProcessGroup> control,
                                                              const DeviceGroupOptions& options) {
  absl::StatusOr<Offer> offer = MakeOffer(options);
  if (absl::Status s = Agree(*control, offer.status()); !s.ok()) return s;
  absl::StatusOr<std::string> gpu = options.runtime->Identity(options.device);
  if (absl::Status s = Agree(*control, gpu.status()); !s.ok()) return s;
  if (absl::Status s = Compare(*control, offer->features.version_text(), *gpu, options.host); !s.ok()) return s;
  absl::StatusOr<std::unique_ptr<PeerBoard>> board = PeerBoard::Create(*control, options.host);
  if (!board.ok()) return board.status();
  const std::shared_ptr<PeerBoard> shared = *std::move(board);
  absl::StatusOr<std::shared_ptr<NcclCommunicator>> communicator = Connect(*control, *offer, options, *shared);
  if (!communicator.ok()) return communicator.status();
  Log().info("rank {}: nccl backend, NCCL {}, {} ranks, GPU {}", control->rank(), offer->features.version_text(),
             control->size(), *gpu);
  return Assemble(std::move(control), options, *std::move(communicator), shared);
}

absl::StatusOr<std::unique_ptr<ProcessGroup>> CreateLocalDeviceGroup(std::unique_ptr<ProcessGroup> control,
                                                                     const DeviceGroupOptions& options) {
  return Assemble(std::move(control), options, nullptr, nullptr);
}

}  // namespace ddp
