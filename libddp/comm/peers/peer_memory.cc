// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/peers/peer_memory.h"

#include <atomic>
#include <mutex>
#include <utility>

#include "libddp/base/round.h"
#include "libddp/comm/base/exchange.h"
#include "libddp/device/staged_memory.h"

namespace ddp {

using SharedMemory = DeviceRuntime::SharedMemory;

size_t PeerMemory::SharedBytes(int ranks) { return static_cast<size_t>(ranks) * staged::kLine; }

uint32_t* PeerMemory::Own::DoneWord(int rank) const {
  return reinterpret_cast<uint32_t*>(ring->beside_on_host() + static_cast<size_t>(rank) * staged::kLine);
}

bool PeerMemory::Own::AllDone() const {
  for (int r = 0; r < ring->size(); ++r) {
    if (std::atomic_ref<uint32_t>(*DoneWord(r)).load(std::memory_order_acquire) == 0) return false;
  }
  return true;
}

void PeerMemory::FreeWhatIsDone(Device device) { FreeWhatIsDone(device, nullptr); }

// Nobody is told when the last peer has done: so each call looks at what is left of all groups.
void PeerMemory::FreeWhatIsDone(Device device, Own* one_more) {
  static auto* const mutex = new std::mutex;
  static auto* const kept = new std::vector<Own>;
  std::vector<Own> done;  // freed without the lock
  const std::lock_guard<std::mutex> lock(*mutex);
  if (one_more != nullptr) kept->push_back(std::move(*one_more));
  for (auto own = kept->begin(); own != kept->end();) {
    if (own->device != device || !own->AllDone()) {
      ++own;
      continue;
    }
    done.push_back(std::move(*own));
    own = kept->erase(own);
  }
}

absl::StatusOr<std::unique_ptr<PeerMemory>> PeerMemory::Create(ProcessGroup& control, DeviceRuntime& runtime,
                                                               Device device, std::shared_ptr<StagingRing> ring,
                                                               size_t bytes) {
  FreeWhatIsDone(device);
  absl::StatusOr<std::shared_ptr<void>> data =
      runtime.Allocate(device, RoundUp(bytes, size_t{DeviceRuntime::kSharedAlign}));
  absl::StatusOr<SharedMemory> mine = data.ok() ? runtime.ShareMemory(device, data->get()) : data.status();
  if (absl::Status s = Agree(control, mine.status()); !s.ok()) return s;
  absl::StatusOr<std::vector<SharedMemory>> all = Exchange(control, *mine);
  if (!all.ok()) return all.status();
  std::unique_ptr<PeerMemory> memory(new PeerMemory({device, std::move(ring), *std::move(data)}, control.rank()));
  const DeviceGuard guard(runtime, device);
  absl::Status opened = guard.status();
  memory->views_.resize(all->size());
  for (size_t r = 0; r < all->size() && opened.ok(); ++r) {
    if (static_cast<int>(r) == memory->rank_) {
      memory->views_[r] = memory->own_.data;
      continue;
    }
    absl::StatusOr<std::shared_ptr<void>> view = runtime.OpenMemory((*all)[r]);
    opened.Update(view.status());
    if (view.ok()) memory->views_[r] = *std::move(view);
  }
  if (absl::Status s = Agree(control, opened); !s.ok()) return s;
  return memory;
}

// Peers' memory is closed before they hear that this rank has done.
PeerMemory::~PeerMemory() {
  views_.clear();
  std::atomic_ref<uint32_t>(*own_.DoneWord(rank_)).store(1, std::memory_order_release);
  FreeWhatIsDone(own_.device, &own_);
}

}  // namespace ddp
