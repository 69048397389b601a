// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/nccl/nccl_group.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "ddp/collectives.h"
#include "libddp/base/env.h"
#include "libddp/base/log.h"
#include "libddp/comm/base/exchange.h"
#include "libddp/comm/base/internal_group.h"
#include "libddp/comm/nccl/communicator.h"
#include "libddp/comm/nccl/nccl_moves.h"
#include "libddp/comm/peers/peer_moves.h"

namespace ddp {
namespace {

// What this rank brings along, or why it cannot: agreed before anybody enters NCCL, where it would be waited for.
struct Offer {
  nccl::Api api;
  nccl::Features features;
};

// Ranks of other hosts have to hear of a failure before NCCL is aborted: a thread of the library's own tells them, and
// hears.
absl::StatusOr<Offer> MakeOffer(ProcessGroup& control, const NcclGroupOptions& options) {
  if (absl::Status s = CheckBackground(control); !s.ok()) return s;
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
  if (options.always_abortable && !offer.features.symmetric_abort) offer.features.windows = false;
  return offer;
}

// Whether the program's communicator is of these ranks, and of this GPU here.
absl::Status CheckGiven(const nccl::Api& api, const NcclGroupOptions& options, int rank, int size) {
  if (options.given == nullptr) return absl::OkStatus();
  int ranks = 0, user_rank = 0, device = 0;
  const nccl::Comm comm = *options.given;
  for (const nccl::Result result :
       {api.CommCount(comm, &ranks), api.CommUserRank(comm, &user_rank), api.CommCuDevice(comm, &device)}) {
    if (result == nccl::kSuccess) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("ContextOptions::nccl_comm is no communicator that works: ", api.GetErrorString(result)));
  }
  if (ranks == size && user_rank == rank && device == options.device.index) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("ContextOptions::nccl_comm is rank ", user_rank, " of ", ranks, " on GPU ", device,
                   ", but this is rank ", rank, " of ", size, " on GPU ", options.device.index,
                   "; give the communicator of all ranks, in the world's order, and set ContextOptions::device to its "
                   "GPU"));
}

absl::Status CheckAllGive(ProcessGroup& control, bool mine) {
  const absl::StatusOr<std::vector<uint8_t>> all = Exchange<uint8_t>(control, mine ? 1 : 0);
  if (!all.ok()) return all.status();
  for (size_t r = 1; r < all->size(); ++r) {
    if ((*all)[r] == (*all)[0]) continue;
    const bool zero_gives = (*all)[0] != 0;
    return absl::FailedPreconditionError(
        absl::StrCat("rank ", zero_gives ? 0 : r, " gives a communicator (ContextOptions::nccl_comm), rank ",
                     zero_gives ? r : 0, " gives none; give one on all ranks or none"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<NcclCommunicator>> Connect(ProcessGroup& control, const Offer& offer,
                                                          const NcclGroupOptions& options, PeerBoard& board) {
  NcclSetup setup{.api = offer.api,
                  .features = offer.features,
                  .given = options.given,
                  .rank = control.rank(),
                  .size = control.size(),
                  .device = options.device,
                  .runtime = options.runtime,
                  .warm_up_limit = options.warm_up_limit};
  absl::Status status;
  nccl::MarkStarted();
  if (setup.rank == 0 && setup.given == nullptr) {
    const nccl::Result result = offer.api.GetUniqueId(&setup.id);
    status = result == nccl::kSuccess
                 ? absl::OkStatus()
                 : absl::InternalError(absl::StrCat("ncclGetUniqueId: ", offer.api.GetErrorString(result),
                                                    "; has this host a network interface?"));
  }
  if (absl::Status s = Agree(control, status); !s.ok()) return s;
  const Buffer id{setup.id.internal, sizeof setup.id.internal, DType::kUInt8, Device{}};
  if (absl::Status s = control.Broadcast(id, 0).Wait(); !s.ok()) return s;
  const auto interrupted = [&] {
    if (absl::Status s = board.failure(); !s.ok()) return s;
    if (absl::Status s = control.status(); !s.ok()) return s;  // ranks of other hosts have no place on the board
    return board.Gone(0);
  };
  absl::Status first;
  absl::StatusOr<std::shared_ptr<NcclCommunicator>> communicator = NcclCommunicator::Create(
      setup, absl::Now() + options.start_limit.value_or(options.timeout), interrupted, [&](const absl::Status& why) {
        first = board.Fail(why);
        control.Abort(first);  // for other hosts, and those that wait for us below
        board.PostFailed();
        board.LetThemKnow();
      });
  if (!communicator.ok()) return first;
  if (absl::Status s = Agree(control, absl::OkStatus()); !s.ok()) return s;
  return communicator;
}

}  // namespace

// GPUs of several hosts may have the same name.
absl::Status CheckNcclRanks(ProcessGroup& control, const std::string& version, const std::string& gpu,
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

absl::StatusOr<std::unique_ptr<ProcessGroup>> CreateNcclGroup(std::unique_ptr<ProcessGroup> control,
                                                              const NcclGroupOptions& options) {
  absl::StatusOr<Offer> offer = MakeOffer(*control, options);
  if (absl::Status s = Agree(*control, offer.status()); !s.ok()) return s;
  if (absl::Status s = CheckAllGive(*control, options.given != nullptr); !s.ok()) return s;
  if (absl::Status s = Agree(*control, CheckGiven(offer->api, options, control->rank(), control->size())); !s.ok()) {
    return s;
  }
  absl::StatusOr<std::string> gpu = options.runtime->Identity(options.device);
  if (absl::Status s = Agree(*control, gpu.status()); !s.ok()) return s;
  if (absl::Status s = CheckNcclRanks(*control, offer->features.version_text(), *gpu, options.host); !s.ok()) return s;
  absl::StatusOr<std::unique_ptr<PeerBoard>> board = PeerBoard::Create(*control, options.host);
  if (!board.ok()) return board.status();
  const std::shared_ptr<PeerBoard> shared = *std::move(board);
  absl::StatusOr<std::shared_ptr<NcclCommunicator>> communicator = Connect(*control, *offer, options, *shared);
  if (!communicator.ok()) return communicator.status();
  LogInfo("rank ", control->rank(), ": nccl backend, NCCL ", offer->features.version_text(), ", ", control->size(),
          " ranks, GPU ", *gpu);
  DeviceBackend backend;
  backend.transport = *communicator;
  backend.board = shared;
  backend.make_moves = [communicator = *communicator](InternalGroup& group, const DeviceEngine&) {
    return std::make_unique<NcclMoves>(communicator, group);
  };
  const auto sum = [communicator = *communicator](const Buffer& array, void* stream) {
    return communicator->Call("ncclAllReduce", [&](const nccl::Api& api, nccl::Comm comm) {
      return api.AllReduce(array.data, array.data, array.count, nccl::kFloat32, nccl::kSum, comm, stream);
    });
  };
  if (absl::Status s = AddPeerCopies(*control, options, sum, &backend); !s.ok()) return s;
  // A communicator of its own: those that ncclCommSplit makes can take each other along when one is aborted.
  backend.split = [api = options.api, always_abortable = options.always_abortable](std::unique_ptr<ProcessGroup> fewer,
                                                                                   const DeviceGroupOptions& as_this) {
    NcclGroupOptions part{as_this, api};
    part.always_abortable = always_abortable;
    return CreateNcclGroup(std::move(fewer), part);
  };
  return CreateDeviceGroup(std::move(control), options, std::move(backend));
}

}  // namespace ddp
