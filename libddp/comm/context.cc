// SPDX-License-Identifier: Apache-2.0
// How a Context begins and ends.
#include "libddp/comm/context_impl.h"

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <tuple>
#include <utility>

#include "absl/time/clock.h"
#include "libddp/base/env.h"
#include "libddp/base/log.h"
#include "libddp/base/process_id.h"
#include "libddp/comm/auto_group.h"
#include "libddp/comm/base/exchange.h"
#include "libddp/comm/context_settings.h"
#include "libddp/comm/context_terms.h"
#include "libddp/comm/gpu/device_group.h"
#include "libddp/comm/introduction.h"
#include "libddp/comm/local_group.h"
#include "libddp/comm/staged/staged_group.h"
#include "libddp/launch/launch_store.h"
#include "libddp/launch/topology.h"

namespace ddp {

namespace {

// How long a rank that cannot take part waits for the others to hear of it.
constexpr absl::Duration kRefusalTime = absl::Seconds(10);

}  // namespace

ContextImpl::~ContextImpl() {
  if (!process_.IsHere()) {  // a child by fork has none of the threads, and nothing to say to the peers
    (void)world_.release();
    for (std::unique_ptr<ProcessGroup>& group : failed_worlds_) (void)group.release();
    (void)spare_.release();
    (void)progress_.release();
    (void)observer_.release();
    (void)over_store_.release();
    (void)mpi_.release();
    return;
  }
  if (world_ != nullptr) observer_->End(*world_);
  // A peer may be stuck then, or gone: the end of MPI must not wait for it for ever.
  const bool sound = world_ != nullptr && world_->status().ok() && world_->size() == info_.world_size;
  if (mpi_ != nullptr && !sound) mpi_->MarkFailed();
}

absl::Status ContextImpl::Start(const ContextOptions& options) {
  if (absl::Status s = Identify(options); !s.ok()) return s;
  const absl::Status settings = ReadSettings(options);
  Rendezvous* rendezvous = nullptr;
  if (info_.world_size > 1 || (settings.ok() && backend_ == "hierarchical")) {
    const absl::StatusOr<Rendezvous*> met = Meet(options, settings);
    if (!met.ok()) return met.status();
    rendezvous = *met;
  } else if (!settings.ok()) {
    return settings;
  }
  // Some launchers let each rank see its own GPU only.
  if (device_.kind == Device::Kind::kCuda && device_.index == -1) {
    device_.index = static_cast<int16_t>(Devices().Count() == 1 ? 0 : info_.local_rank);
  }
  observer_ = CreateContextObserver({.rank = info_.rank,
                                     .user = options.observer,
                                     .trace = options.trace.value_or(ReadEnv(Env::kTrace).value_or("")),
                                     .flight_recorder = ReadEnv(Env::kFlightRecorder).value_or("")});
  absl::StatusOr<std::unique_ptr<ProcessGroup>> world = OverCpu(rendezvous);
  if (world.ok()) world = OnDevice(*std::move(world));
  if (!world.ok()) return world.status();
  world_ = *std::move(world);
  members_.resize(static_cast<size_t>(info_.world_size));
  std::iota(members_.begin(), members_.end(), 0);
  choice_.backend = std::string(world_->backend());
  return observer_->Begin(*world_);
}

// Who this rank is: in the program's communicator, or as the options or the launcher say.
absl::Status ContextImpl::Identify(const ContextOptions& options) {
  if (options.mpi_comm == nullptr) {
    absl::StatusOr<LaunchInfo> info = DetectLaunch(options);
    if (!info.ok()) return info.status();
    info_ = *std::move(info);
    if (LacksSrun(info_)) {
      LogWarn(
          "this program is in a Slurm job of several tasks, but srun has not started it, so it is alone; start it with "
          "srun if it is to have one rank for each task");
    }
    return absl::OkStatus();
  }
  if (options.rank || options.world_size || options.local_rank || options.local_world_size || options.store) {
    return absl::InvalidArgumentError(
        "ContextOptions has both mpi_comm and an identity (rank, world_size, local_rank, local_world_size or store); "
        "set one of them");
  }
  absl::StatusOr<std::unique_ptr<MpiSession>> session = MpiSession::Adopt(options.mpi_comm);
  if (!session.ok()) return session.status();
  mpi_ = *std::move(session);
  info_.rank = mpi_->rendezvous().rank();
  info_.world_size = mpi_->rendezvous().size();
  info_.launcher = "mpi";
  info_.rendezvous = RendezvousMethod::kMpi;
  return absl::OkStatus();
}

// What this rank decides alone.
absl::Status ContextImpl::ReadSettings(const ContextOptions& options) {
  device_ = options.device;
  const absl::StatusOr<ContextTimes> times = ReadTimes(options);
  if (!times.ok()) return Invalid(times.status().message());
  std::tie(timeout_, stall_warning_) = std::tie(times->timeout, times->stall_warning);
  if (absl::Status s = CheckEnvChoices(); !s.ok()) return Invalid(s.message());
  if (absl::Status s = ReadNodeSize(info_.rank).status(); !s.ok()) return s;
  const absl::StatusOr<PeerLimits> peer_copies = PeerLimits::FromEnv();
  if (!peer_copies.ok()) return Invalid(peer_copies.status().message());
  peer_copies_ = *peer_copies;
  fresh_probe_ = options.fresh_probe.value_or(ReadEnv(Env::kFreshProbe) == "1");
  return ChooseBackend(options);
}

NcclGroupOptions ContextImpl::OnGpuBy() const {
  NcclGroupOptions options;
  options.device = device_;
  options.timeout = timeout_;
  options.stall_warning = stall_warning_;
  options.observer = observer_.get();
  options.progress = progress_.get();
  options.always_abortable = chosen_;
  if (chosen_ || backend_ == "auto" || !peer_copies_.automatic) options.peer_copies = peer_copies_;
  if (choice_.without_p2p) options.peer_copies = {};
  return options;
}

absl::StatusOr<std::unique_ptr<ProcessGroup>> ContextImpl::ChooseOnGpus(std::unique_ptr<ProcessGroup> over_cpu) {
  AutoGroupOptions options;
  static_cast<NcclGroupOptions&>(options) = OnGpuBy();
  options.probe.fresh = fresh_probe_;
  absl::StatusOr<AutoGroup> made = CreateAutoGroup(std::move(over_cpu), options);
  if (!made.ok()) return made.status();
  choice_ = std::move(made->choice);
  backend_ = choice_.backend;  // for smaller groups, too
  chosen_ = true;
  forget_nccl_ = std::move(made->forget);
  return std::move(made->group);
}

// The group of the same ranks that works on this context's device. A recovery may have done without NCCL on some of
// them, and not have got as far on others.
absl::StatusOr<std::unique_ptr<ProcessGroup>> ContextImpl::OnDevice(std::unique_ptr<ProcessGroup> over_cpu) {
  if (device_.kind == Device::Kind::kCpu) return over_cpu;
  if (backend_ == "auto") return ChooseOnGpus(std::move(over_cpu));
  NcclGroupOptions options = OnGpuBy();
  options.given = std::exchange(nccl_comm_, nullptr);
  // One rank of several needs neither; a world of one has NCCL if the program says so.
  const bool several = over_cpu->size() > 1;
  bool nccl = backend_ == "nccl" && (several || info_.world_size == 1);
  if (several) {
    const absl::StatusOr<std::vector<uint8_t>> all = Exchange(*over_cpu, static_cast<uint8_t>(nccl));
    if (!all.ok()) return all.status();
    nccl = std::find(all->begin(), all->end(), 0) == all->end();
  }
  if (nccl) return CreateNcclGroup(std::move(over_cpu), options);
  if (several) return CreateStagedGroup(std::move(over_cpu), options);
  return CreateLocalDeviceGroup(std::move(over_cpu), options);
}

// All ranks over CPU memory: the world itself, or what a world of GPUs agrees by. No rendezvous: one rank alone.
absl::StatusOr<std::unique_ptr<ProcessGroup>> ContextImpl::OverCpu(Rendezvous* rendezvous) {
  if (rendezvous == nullptr) return CreateLocalGroup(observer_->listener(), timeout_);
  GroupOptions group = GroupBy(absl::Now() + timeout_);
  if (info_.world_size == 1) return CreateHierarchicalGroup(*rendezvous, group);
  group.observer = nullptr;  // nothing happens in the spare that a user should hear of
  absl::StatusOr<std::unique_ptr<ProcessGroup>> spare = CreateHierarchicalGroup(*rendezvous, group);
  if (!spare.ok()) return spare.status();
  spare_ = *std::move(spare);
  return CreateGroupOfSameRanks(*spare_, observer_.get());
}

// Decides between the backends that this build has.
absl::Status ContextImpl::ChooseBackend(const ContextOptions& options) {
  absl::StatusOr<std::string> backend = ReadBackend(options);
  if (!backend.ok()) return Invalid(backend.status().message());
  backend_ = *std::move(backend);
  const bool gpu = device_.kind == Device::Kind::kCuda;
  nccl_comm_ = static_cast<nccl::Comm*>(options.nccl_comm);
  if (nccl_comm_ != nullptr) {
    if (*nccl_comm_ == nullptr) return Invalid("ContextOptions::nccl_comm is the address of a null communicator");
    if (!gpu || (backend_ != "auto" && backend_ != "nccl")) {
      return Invalid(
          "ContextOptions::nccl_comm is set, so device has to be its GPU, and the backend nccl or unset, not ",
          backend_, gpu ? "" : " on the CPU");
    }
    backend_ = "nccl";
  }
  if (backend_ == "auto" && info_.world_size == 1) backend_ = "local";
  if (backend_ == "auto" && !gpu) backend_ = "hierarchical";
  if (backend_ == "hierarchical" || backend_ == "auto") return absl::OkStatus();
  if (backend_ == "nccl") {
    if (gpu) return absl::OkStatus();
    return Invalid(
        "the nccl backend works on GPUs, but ContextOptions::device is the CPU; set it to a GPU, or use auto or "
        "hierarchical");
  }
  if (info_.world_size == 1) return absl::OkStatus();
  return Invalid("the local backend is for a world of 1, not of ", info_.world_size, "; use auto or hierarchical");
}

// Meets the other ranks, and learns from them whether all can begin. A rank that cannot comes as well, so that nobody
// waits for it; but it does not begin MPI, which it would have to end, too, and a process has MPI but once.
absl::StatusOr<Rendezvous*> ContextImpl::Meet(const ContextOptions& options, const absl::Status& settings) {
  if (!settings.ok() && mpi_ == nullptr && info_.rendezvous == RendezvousMethod::kMpi) return settings;
  const absl::Duration patience = settings.ok() ? timeout_ : std::min(timeout_, kRefusalTime);
  const absl::StatusOr<Rendezvous*> rendezvous = OpenRendezvous(options, patience);
  if (!rendezvous.ok()) return settings.ok() ? rendezvous.status() : settings;
  const absl::StatusOr<std::vector<ContextTerms>> all =
      AgreeOnTerms(**rendezvous, {.backend = backend_, .device = device_.kind, .host = HostId(), .settings = settings},
                   absl::Now() + patience);
  if (!all.ok()) return all.status();
  if (options.mpi_comm == nullptr) return rendezvous;
  // No launcher says so of a communicator's ranks.
  const auto here = [&](const ContextTerms& other) {
    return other.host == (*all)[static_cast<size_t>(info_.rank)].host;
  };
  info_.local_rank = static_cast<int>(std::count_if(all->begin(), all->begin() + info_.rank, here));
  info_.local_world_size = static_cast<int>(std::count_if(all->begin(), all->end(), here));
  return rendezvous;
}

absl::StatusOr<Rendezvous*> ContextImpl::OpenRendezvous(const ContextOptions& options, absl::Duration patience) {
  if (mpi_ == nullptr && info_.rendezvous == RendezvousMethod::kMpi) {
    absl::StatusOr<std::unique_ptr<MpiSession>> session = MpiSession::Open(info_);
    if (!session.ok()) return session.status();
    mpi_ = *std::move(session);
  }
  if (mpi_ != nullptr) return &mpi_->rendezvous();
  store_ = options.store;
  if (info_.rendezvous == RendezvousMethod::kTcpStore) {
    absl::StatusOr<LaunchStore> opened = OpenLaunchStore(info_, patience);
    if (!opened.ok()) return opened.status();
    store_ = std::move(opened->store);
    key_prefix_ = std::move(opened->prefix);
  } else if (store_ == nullptr) {
    store_ = CreateMemoryStore();
  }
  over_store_ = CreateStoreRendezvous(store_, info_.rank, info_.world_size, absl::StrCat(key_prefix_, "world"));
  return over_store_.get();
}

absl::StatusOr<std::unique_ptr<Context>> Context::Create(const ContextOptions& options) {
  auto context = std::make_unique<ContextImpl>();
  if (absl::Status s = context->Start(options); !s.ok()) return s;
  return std::unique_ptr<Context>(std::move(context));
}

}  // namespace ddp
