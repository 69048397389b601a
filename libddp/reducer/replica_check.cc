// SPDX-License-Identifier: Apache-2.0
#include "libddp/reducer/replica_check.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "libddp/base/spin.h"
#include "libddp/comm/base/exchange.h"
#include "libddp/device/buffer_ops.h"
#include "libddp/device/cpu_hash.h"

namespace ddp {
namespace {

std::string Ranks(const std::vector<size_t>& ranks) {
  return absl::StrCat(ranks.size() == 1 ? "rank " : "ranks ", absl::StrJoin(ranks, ", "));
}

size_t BytesOf(const Buffer& b) { return b.count * SizeOf(b.dtype); }

}  // namespace

// Word 0 says whether this rank is compared; then come the hashes of what is in host memory, then the GPU's.
absl::Status ReplicaCheck::Begin(ProcessGroup& group, int64_t step, bool compared, std::vector<Replica> replicas,
                                 Stream stream) {
  if (group.size() == 1) return absl::OkStatus();
  step_ = step;
  replicas_ = std::move(replicas);
  ranks_ = static_cast<size_t>(group.size());
  std::vector<size_t> order(replicas_.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  const auto gpus =
      std::stable_partition(order.begin(), order.end(), [this](size_t i) { return !IsGpu(replicas_[i].data.device); });
  const size_t on_host = static_cast<size_t>(gpus - order.begin());
  mine_.assign(replicas_.size() + 1, compared ? 1 : 0);
  word_of_.resize(replicas_.size());
  for (size_t k = 0; k < order.size(); ++k) {
    word_of_[order[k]] = k + 1;
    const Buffer& data = replicas_[order[k]].data;
    if (k < on_host) mine_[k + 1] = CpuHash(data.data, BytesOf(data));
  }
  all_.assign(mine_.size() * ranks_, 0);
  on_gpu_ = on_host < order.size();
  Buffer in = Bytes(absl::MakeSpan(mine_)), out = Bytes(absl::MakeSpan(all_));
  if (on_gpu_) {
    if (absl::Status s = HashOnGpu(group, order, on_host, stream); !s.ok()) return s;
    in = arrays_->mine.View(in.dtype, 0, in.count);
    out = arrays_->all.View(out.dtype, 0, out.count);
  }
  exchange_ = group.AllGather(in, out, stream);
  if (absl::Status s = exchange_.call_status(); !s.ok()) return s;
  under_way_ = true;
  return absl::OkStatus();
}

absl::Status ReplicaCheck::HashOnGpu(ProcessGroup& group, absl::Span<const size_t> order, size_t on_host,
                                     Stream stream) {
  const DeviceGuard guard(Devices(), stream.device);
  if (!guard.status().ok()) return guard.status();
  if (absl::Status s = MakeArrays(group, stream.device); !s.ok()) return s;
  std::vector<TransformPiece> pieces;
  for (const size_t i : order.subspan(on_host)) {
    pieces.push_back({replicas_[i].data.data, nullptr, BytesOf(replicas_[i].data)});
  }
  const size_t host_words = on_host + 1;
  std::copy_n(mine_.begin(), host_words, static_cast<uint64_t*>(arrays_->pinned.get()));
  auto* const mine = static_cast<uint64_t*>(arrays_->mine.data());
  absl::Status status = Devices().Copy(mine, arrays_->pinned.get(), host_words * sizeof(uint64_t), stream.native);
  if (status.ok()) status = Devices().Hash(pieces, mine + host_words, stream.native);
  return status;
}

absl::Status ReplicaCheck::MakeArrays(ProcessGroup& group, Device device) {
  const size_t words = mine_.size();
  if (arrays_ != nullptr && arrays_->words == words && arrays_->ranks == ranks_) return absl::OkStatus();
  auto arrays = std::make_unique<DeviceArrays>();
  arrays->words = words;
  arrays->ranks = ranks_;
  absl::StatusOr<Allocation> mine = group.Allocate(words * sizeof(uint64_t), device);
  if (!mine.ok()) return mine.status();
  absl::StatusOr<Allocation> all = group.Allocate(words * ranks_ * sizeof(uint64_t), device);
  if (!all.ok()) return all.status();
  absl::StatusOr<std::shared_ptr<void>> pinned = Devices().AllocatePinned(words * (ranks_ + 1) * sizeof(uint64_t));
  if (!pinned.ok()) return pinned.status();
  absl::StatusOr<OwnedEvent> event = MakeEvent(Devices());
  if (!event.ok()) return event.status();
  arrays->mine = *std::move(mine);
  arrays->all = *std::move(all);
  arrays->pinned = *std::move(pinned);
  arrays->fetched = *std::move(event);
  arrays_ = std::move(arrays);
  return absl::OkStatus();
}

absl::Status ReplicaCheck::Fetch(Stream stream) {
  if (!under_way_ || !on_gpu_) return absl::OkStatus();
  const DeviceGuard guard(Devices(), stream.device);
  absl::Status status = guard.status();
  if (status.ok()) status = exchange_.BlockStream(stream);
  if (status.ok()) {
    status = Devices().Copy(arrays_->pinned_all(), arrays_->all.data(), all_.size() * sizeof(uint64_t), stream.native);
  }
  if (status.ok()) status = Devices().Record(arrays_->fetched.get(), stream.native);
  return status;
}

absl::Status ReplicaCheck::Finish(absl::Status* divergence, absl::FunctionRef<bool()> give_up) {
  *divergence = absl::OkStatus();
  if (!under_way_) return absl::OkStatus();
  absl::Status status = exchange_.Wait();
  if (status.ok() && on_gpu_) status = WaitForEvent(arrays_->fetched, give_up);
  if (!status.ok()) return status;
  under_way_ = false;
  exchange_ = Work();
  if (on_gpu_) std::copy_n(arrays_->pinned_all(), all_.size(), all_.begin());
  *divergence = Compare();
  if (divergence->ok()) equal_at_ = step_;
  return absl::OkStatus();
}

void ReplicaCheck::Drop() {
  if (!std::exchange(under_way_, false)) return;
  const bool failed = !exchange_.Wait().ok();
  exchange_ = Work();
  if (!on_gpu_) return;
  const int64_t until = NowNs() + kLeaveFailedNs;
  const absl::Status fetched = WaitForEvent(arrays_->fetched, [&] { return failed && NowNs() > until; });
  if (absl::IsDeadlineExceeded(fetched)) Forsake();
}

absl::Status ReplicaCheck::Compare() const {
  std::vector<size_t> compared;
  for (size_t r = 0; r < ranks_; ++r) {
    if (all_[r * mine_.size()] != 0) compared.push_back(r);
  }
  const auto hash = [this](size_t rank, size_t replica) { return all_[rank * mine_.size() + word_of_[replica]]; };
  std::vector<size_t> differing;  // replicas
  for (size_t i = 0; i < replicas_.size(); ++i) {
    const bool equal =
        std::all_of(compared.begin(), compared.end(), [&](size_t r) { return hash(r, i) == hash(compared[0], i); });
    if (!equal) differing.push_back(i);
  }
  if (differing.empty()) return absl::OkStatus();

  // What most ranks have is taken for right; of equal numbers, what the lowest rank has.
  std::map<uint64_t, size_t> votes;
  for (const size_t r : compared) ++votes[hash(r, differing[0])];
  size_t usual = compared[0];
  for (const size_t r : compared) {
    if (votes[hash(r, differing[0])] > votes[hash(usual, differing[0])]) usual = r;
  }
  std::vector<size_t> same, others;
  for (const size_t r : compared) {
    (hash(r, differing[0]) == hash(usual, differing[0]) ? same : others).push_back(r);
  }
  return absl::FailedPreconditionError(absl::StrCat(
      "ranks have trained apart: in step ", step_ + 1, " ", Ranks(others), others.size() == 1 ? " has" : " have",
      " other values of ", replicas_[differing[0]].name, " than ", Ranks(same), " (", differing.size(), " of ",
      replicas_.size(), " differ; ",
      equal_at_ < 0 ? std::string("there was no check before") : absl::StrCat("all were equal in step ", equal_at_ + 1),
      "). Look for a FinishBackward that was left out, a gradient that is not announced or is written after GradReady, "
      "values filled after Create without BroadcastValues, and optimizer steps that not all ranks make"));
}

}  // namespace ddp
