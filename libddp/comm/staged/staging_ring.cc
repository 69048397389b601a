#include "libddp/comm/staged/staging_ring.h"

#include <atomic>
#include <map>
#include <mutex>
#include <numeric>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "libddp/base/round.h"
#include "libddp/comm/base/exchange.h"
#include "libddp/comm/memory/share_segment.h"

namespace ddp {
namespace {

// Memory that CUDA knows. Ranks that are threads share one mapping, which is registered once.
class RegisteredMemory {
 public:
  static absl::StatusOr<std::shared_ptr<void>> Get(DeviceRuntime& runtime,
                                                   const std::shared_ptr<SharedSegment>& memory) {
    const std::lock_guard<std::mutex> lock(Mutex());
    const auto entry = Known().find(memory->data());
    std::shared_ptr<RegisteredMemory> present = entry == Known().end() ? nullptr : entry->second.lock();
    if (present == nullptr) {
      absl::StatusOr<std::shared_ptr<void>> made = runtime.RegisterHost(memory->data(), memory->bytes());
      if (!made.ok()) return made.status();
      present = std::make_shared<RegisteredMemory>(memory, *std::move(made));
      Known()[memory->data()] = present;
    }
    return std::shared_ptr<void>(present, present->registered_.get());
  }
  RegisteredMemory(std::shared_ptr<SharedSegment> memory, std::shared_ptr<void> registered)
      : memory_(std::move(memory)), registered_(std::move(registered)) {}
  // Another may have taken the address by now.
  ~RegisteredMemory() {
    const std::lock_guard<std::mutex> lock(Mutex());
    const auto entry = Known().find(memory_->data());
    if (entry != Known().end() && entry->second.expired()) Known().erase(entry);
  }

 private:
  static std::mutex& Mutex() {
    static auto* const mutex = new std::mutex;
    return *mutex;
  }
  static std::map<const void*, std::weak_ptr<RegisteredMemory>>& Known() {
    static auto* const known = new std::map<const void*, std::weak_ptr<RegisteredMemory>>;
    return *known;
  }

  const std::shared_ptr<SharedSegment> memory_;  // mapped for as long as it is registered
  const std::shared_ptr<void> registered_;
};

}  // namespace

absl::StatusOr<std::shared_ptr<StagingRing>> StagingRing::Create(ProcessGroup& control, DeviceRuntime& runtime,
                                                                 Device device) {
  std::vector<int> ranks(static_cast<size_t>(control.size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  std::shared_ptr<StagingRing> ring(new StagingRing);
  ring->rank_ = control.rank();
  ring->size_ = control.size();
  absl::StatusOr<std::shared_ptr<SharedSegment>> memory =
      ShareSegment(ControlShare(control.rank(), ranks, staged::RingBytes(control.size())), ExchangeOver(control));
  if (!memory.ok()) return memory.status();
  ring->memory_ = *std::move(memory);
  if (absl::Status s = Agree(control, ring->Register(runtime, device)); !s.ok()) return s;
  return ring;
}

absl::Status StagingRing::Register(DeviceRuntime& runtime, Device device) {
  const DeviceGuard guard(runtime, device);
  if (!guard.status().ok()) return guard.status();
  absl::StatusOr<std::shared_ptr<void>> registered = RegisteredMemory::Get(runtime, memory_);
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

void StagingRing::Abort() { std::atomic_ref<uint32_t>(*abort_word()).store(1, std::memory_order_seq_cst); }
bool StagingRing::aborted() const {
  return std::atomic_ref<uint32_t>(*abort_word()).load(std::memory_order_acquire) != 0;
}

}  // namespace ddp
