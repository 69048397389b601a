// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/ring/staging_ring.h"

#include <atomic>
#include <map>
#include <mutex>
#include <numeric>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "libddp/base/log.h"
#include "libddp/base/memory_room.h"
#include "libddp/base/numa.h"
#include "libddp/base/round.h"
#include "libddp/comm/base/exchange.h"
#include "libddp/comm/memory/share_segment.h"

namespace ddp {
namespace {

// Memory that CUDA knows. Ranks that are threads share one mapping, which is registered once.
class RegisteredSegment {
 public:
  static absl::StatusOr<std::shared_ptr<void>> Get(DeviceRuntime& runtime,
                                                   const std::shared_ptr<SharedSegment>& memory) {
    const std::lock_guard<std::mutex> lock(Mutex());
    const auto entry = Known().find(memory->data());
    std::shared_ptr<RegisteredSegment> present = entry == Known().end() ? nullptr : entry->second.lock();
    if (present == nullptr) {
      absl::StatusOr<std::shared_ptr<void>> made = runtime.RegisterHost(memory->data(), memory->bytes());
      if (!made.ok()) return made.status();
      present = std::make_shared<RegisteredSegment>(memory, *std::move(made));
      Known()[memory->data()] = present;
    }
    return std::shared_ptr<void>(present, present->registered_.get());
  }
  RegisteredSegment(std::shared_ptr<SharedSegment> memory, std::shared_ptr<void> registered)
      : memory_(std::move(memory)), registered_(std::move(registered)) {}
  // Another may have taken the address by now.
  ~RegisteredSegment() {
    const std::lock_guard<std::mutex> lock(Mutex());
    const auto entry = Known().find(memory_->data());
    if (entry != Known().end() && entry->second.expired()) Known().erase(entry);
  }

 private:
  static std::mutex& Mutex() {
    static auto* const mutex = new std::mutex;
    return *mutex;
  }
  static std::map<const void*, std::weak_ptr<RegisteredSegment>>& Known() {
    static auto* const known = new std::map<const void*, std::weak_ptr<RegisteredSegment>>;
    return *known;
  }

  const std::shared_ptr<SharedSegment> memory_;  // mapped for as long as it is registered
  const std::shared_ptr<void> registered_;
};

constexpr size_t kPage = 4096;

size_t BytesOf(int ranks, const StagingRing::Beside& beside) {
  const size_t words = static_cast<size_t>(ranks) * staged::kAbortWords * staged::kLine;
  return RoundUp(beside.only_words ? words : staged::RingBytes(ranks), kPage);
}

}  // namespace

absl::StatusOr<std::shared_ptr<StagingRing>> StagingRing::Create(ProcessGroup& control, DeviceRuntime& runtime,
                                                                 Device device, int node, Beside beside) {
  std::vector<int> ranks(static_cast<size_t>(control.size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  std::shared_ptr<StagingRing> ring(new StagingRing);
  ring->rank_ = control.rank();
  ring->size_ = control.size();
  ring->ring_bytes_ = BytesOf(ring->size_, beside);
  SegmentShare share = ControlShare(ring->rank_, ranks, 0);
  share.bytes = ring->ring_bytes_ + beside.common + static_cast<uint64_t>(ring->size_) * beside.each;
  share.ready = CheckRoom({MemoryRoom::For(share.bytes)}, share.bytes);
  absl::StatusOr<std::shared_ptr<SharedSegment>> memory = ShareSegment(share, ExchangeOver(control));
  if (!memory.ok()) return memory.status();
  ring->memory_ = *std::move(memory);
  if (absl::Status s = Agree(control, ring->Reserve(node, beside)); !s.ok()) return s;
  if (absl::Status s = Agree(control, ring->Register(runtime, device)); !s.ok()) return s;
  return ring;
}

// What a rank's GPU writes lies near it, and the rest near rank 0's.
absl::Status StagingRing::Reserve(int node, Beside beside) {
  const auto take = [&](size_t begin, size_t end) {
    if (node >= 0) {
      const absl::Status near = PreferNode(memory_->data() + begin, end - begin, node);
      if (!near.ok()) LogDebug("rank ", rank_, ": ", near.message());
    }
    return memory_->Reserve(begin, end - begin);
  };
  if (beside.only_words) return rank_ == 0 ? take(0, memory_->bytes()) : absl::OkStatus();
  const staged::Place place = {rank_, size_, memory_->data(), nullptr, nullptr};
  const auto slots_of = [&](int rank) {
    return RoundUp(static_cast<size_t>(SlotOf(place, 0, rank, 0, 0) - memory_->data()), kPage);
  };
  const size_t each_begin = ring_bytes_ + beside.common;
  absl::Status status = take(slots_of(rank_), slots_of(rank_ + 1));
  if (rank_ == 0) {
    status.Update(take(0, slots_of(0)));
    status.Update(take(slots_of(size_), each_begin));
  }
  if (beside.each > 0) {
    const size_t mine = each_begin + static_cast<size_t>(rank_) * beside.each;
    status.Update(take(mine, mine + beside.each));
  }
  return status;
}

absl::Status StagingRing::Register(DeviceRuntime& runtime, Device device) {
  const DeviceGuard guard(runtime, device);
  if (!guard.status().ok()) return guard.status();
  absl::StatusOr<std::shared_ptr<void>> registered = RegisteredSegment::Get(runtime, memory_);
  if (!registered.ok()) {
    return absl::Status(
        registered.status().code(),
        absl::StrCat("GPU ", device.index, ": ", memory_->bytes(),
                     " bytes of shared memory cannot be used by the GPU: ", registered.status().message(),
                     "; free host memory, or raise the container's limits (docker run "
                     "--ulimit memlock=-1 --shm-size=1g)"));
  }
  registered_ = *std::move(registered);
  absl::StatusOr<std::shared_ptr<void>> counts = runtime.Allocate(device, staged::kCounts * sizeof(uint64_t));
  if (!counts.ok()) return counts.status();
  counts_ = *std::move(counts);
  return absl::OkStatus();
}

staged::Place StagingRing::PlaceOf(uint32_t* failed) const {
  return {rank_, size_, static_cast<char*>(registered_.get()), static_cast<uint64_t*>(counts_.get()), failed};
}

char* StagingRing::beside() const { return static_cast<char*>(registered_.get()) + ring_bytes_; }
char* StagingRing::beside_on_host() const { return memory_->data() + ring_bytes_; }

void StagingRing::Abort() {
  for (int r = 0; r < size_; ++r) SetAbortWords(r);
}
void StagingRing::Leave() { SetAbortWords(rank_); }
void StagingRing::SetAbortWords(int rank) {
  for (int i = 0; i < staged::kAbortWords; ++i) {
    std::atomic_ref<uint32_t>(*abort_word(rank, i)).store(1, std::memory_order_seq_cst);
  }
}
uint32_t* StagingRing::abort_word(int rank, int index) const {
  return staged::AbortWordOf({rank_, size_, memory_->data(), nullptr, nullptr}, rank, index);
}

}  // namespace ddp
