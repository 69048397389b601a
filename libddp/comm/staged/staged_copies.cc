// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/staged/staged_copies.h"

#include <algorithm>
#include <utility>

#include "libddp/base/round.h"
#include "libddp/comm/ring/staged_plan.h"

namespace ddp {
namespace {

using staged::kCopyDepth;
using staged::kCopyLanes;

constexpr uint64_t kSlotAlign = 4096;
constexpr uint64_t kCountBytes = 256;  // before what is fetched

uint64_t SlotsBegin(int ranks) { return RoundUp(staged::TurnCounterBytes(ranks), kSlotAlign); }

}  // namespace

StagingRing::Beside StagedCopies::Shared(int ranks, uint64_t chunk) {
  return {SlotsBegin(ranks), kCopyLanes * kCopyDepth * chunk};
}

absl::StatusOr<std::shared_ptr<StagedCopies>> StagedCopies::Create(std::shared_ptr<StagingRing> ring,
                                                                   DeviceRuntime& runtime, Device device,
                                                                   uint64_t chunk) {
  static_assert(kCountBytes >= staged::kTurnCounts * sizeof(uint64_t));
  const uint64_t peers = static_cast<uint64_t>(ring->size() - 1);
  std::shared_ptr<StagedCopies> copies(new StagedCopies(std::move(ring), runtime, chunk));
  absl::StatusOr<std::shared_ptr<void>> memory =
      runtime.Allocate(device, kCountBytes + kCopyLanes * kCopyDepth * peers * chunk);
  if (!memory.ok()) return memory.status();
  copies->memory_ = *std::move(memory);
  const DeviceGuard guard(runtime, device);
  if (!guard.status().ok()) return guard.status();
  if (absl::Status s = copies->MakeStreams(); !s.ok()) return s;
  return copies;
}

absl::Status StagedCopies::MakeStreams() {
  absl::Status status;
  const auto make_event = [&](OwnedEvent* event) {
    absl::StatusOr<OwnedEvent> made = MakeEvent(runtime_);
    status.Update(made.status());
    if (made.ok()) *event = *std::move(made);
  };
  make_event(&begin_);
  for (int way = 0; way < staged::kWays; ++way) {
    make_event(&copied_[way]);
    for (Lane& lane : lanes_) {
      for (OwnedEvent& event : lane.told[way]) make_event(&event);
      absl::StatusOr<OwnedStream> stream = MakeStream(runtime_);
      status.Update(stream.status());
      if (stream.ok()) lane.stream[way] = *std::move(stream);
    }
  }
  for (Lane& lane : lanes_) {
    for (OwnedEvent& event : lane.reduced) make_event(&event);
  }
  return status;
}

char* StagedCopies::SlotOf(int rank, const Step& step) const {
  const uint64_t index = (static_cast<uint64_t>(rank) * kCopyLanes + static_cast<uint64_t>(step.lane)) * kCopyDepth;
  return ring_->beside() + SlotsBegin(ring_->size()) + (index + step.number % kCopyDepth) * chunk_;
}

char* StagedCopies::FetchedInto(int ranks, const Step& step) const {
  const uint64_t index = static_cast<uint64_t>(step.lane) * kCopyDepth + step.number % kCopyDepth;
  return static_cast<char*>(memory_.get()) + kCountBytes + index * static_cast<uint64_t>(ranks - 1) * chunk_;
}

absl::Status StagedCopies::AllReduce(staged::Collective c, uint64_t chunk_elements, void* stream) {
  const uint64_t chunks = CeilDiv(c.count, chunk_elements);
  if (absl::Status s = runtime_.Record(begin_.get(), stream); !s.ok()) return s;
  for (uint64_t index = 0; index < chunks; ++index) {
    const int lane = static_cast<int>(index % kCopyLanes);
    Step step = {
        index, index / kCopyLanes, (chunks - static_cast<uint64_t>(lane) + kCopyLanes - 1) / kCopyLanes, lane, {}};
    step.chunk.begin = index * chunk_elements;
    step.chunk.count = std::min(chunk_elements, c.count - step.chunk.begin);
    step.chunk.fetched = FetchedInto(c.at.ranks, step);
    step.chunk.stride = chunk_;
    if (absl::Status s = Down(c, step); !s.ok()) return s;
    if (absl::Status s = Up(c, step); !s.ok()) return s;
    if (absl::Status s = Reduce(c, step, stream); !s.ok()) return s;
  }
  return absl::OkStatus();
}

absl::Status StagedCopies::TakeTurn(const staged::Collective& c, staged::Way way, const Step& step, bool waits,
                                    uint64_t number) {
  staged::Turn turn = {};
  turn.at = c.at;
  turn.counters = reinterpret_cast<staged::Counter*>(ring_->beside());
  turn.counts = static_cast<uint64_t*>(memory_.get());
  turn.way = way;
  turn.lane = step.lane;
  turn.waits = waits;
  turn.number = number;
  turn.advance = !waits && step.number + 1 == step.chunks ? step.chunks : 0;
  return runtime_.RunStaged(turn, lanes_[step.lane].stream[way].get());
}

const OwnedEvent& StagedCopies::Told(staged::Way way, uint64_t index) const {
  return lanes_[index % kCopyLanes].told[way][index / kCopyLanes % kTold];
}

absl::Status StagedCopies::AfterTelling(staged::Way way, const Step& step, staged::Way told, uint64_t before) {
  if (step.index < before) return absl::OkStatus();
  return runtime_.WaitEvent(lanes_[step.lane].stream[way].get(), Told(told, step.index - before).get());
}

absl::Status StagedCopies::AfterTheLast(staged::Way way, const Step& step) {
  if (step.index == 0) return absl::OkStatus();
  return runtime_.WaitEvent(lanes_[step.lane].stream[way].get(), copied_[way].get());
}

absl::Status StagedCopies::Down(const staged::Collective& c, const Step& step) {
  void* const mine = lanes_[step.lane].stream[staged::kDown].get();
  if (step.number == 0) {
    if (absl::Status s = runtime_.WaitEvent(mine, begin_.get()); !s.ok()) return s;
  }
  // The first chunk waits until all slots of the operation before are free.
  if (step.number == 0 || step.number >= kCopyDepth) {
    const uint64_t up = step.number == 0 ? 0 : step.number - kCopyDepth + 1;
    absl::Status own = AfterTelling(staged::kDown, step, staged::kDown, 3);
    own.Update(AfterTelling(staged::kDown, step, staged::kUp, kCopyLanes * kCopyDepth));
    own.Update(AfterTelling(staged::kDown, step, staged::kUp, kCopyLanes * kCopyDepth + 1));
    if (!own.ok()) return own;
    if (absl::Status s = TakeTurn(c, staged::kDown, step, true, up); !s.ok()) return s;
  }
  if (absl::Status s = AfterTheLast(staged::kDown, step); !s.ok()) return s;
  const uint64_t size = static_cast<uint64_t>(c.in_size), bytes = step.chunk.count * size;
  for (uint64_t done = 0, n = 0; done < bytes; done += n) {
    n = bytes - done;
    const char* const from = Locate(c.in, step.chunk.begin * size + done, &n);
    if (absl::Status s = runtime_.Copy(SlotOf(c.at.rank, step) + done, from, n, mine); !s.ok()) return s;
  }
  if (absl::Status s = runtime_.Record(copied_[staged::kDown].get(), mine); !s.ok()) return s;
  if (absl::Status s = TakeTurn(c, staged::kDown, step, false, step.number + 1); !s.ok()) return s;
  return runtime_.Record(Told(staged::kDown, step.index).get(), mine);
}

absl::Status StagedCopies::Up(const staged::Collective& c, const Step& step) {
  Lane& lane = lanes_[step.lane];
  void* const mine = lane.stream[staged::kUp].get();
  if (step.number == 0) {
    if (absl::Status s = runtime_.WaitEvent(mine, begin_.get()); !s.ok()) return s;
  }
  absl::Status own = AfterTelling(staged::kUp, step, staged::kDown, 0);
  own.Update(AfterTelling(staged::kUp, step, staged::kDown, 1));
  own.Update(AfterTelling(staged::kUp, step, staged::kUp, 3));
  if (!own.ok()) return own;
  if (absl::Status s = TakeTurn(c, staged::kUp, step, true, step.number + 1); !s.ok()) return s;
  if (absl::Status s = AfterTheLast(staged::kUp, step); !s.ok()) return s;
  if (step.number >= kCopyDepth) {
    const OwnedEvent& reduced = lane.reduced[step.number % kCopyDepth];
    if (absl::Status s = runtime_.WaitEvent(mine, reduced.get()); !s.ok()) return s;
  }
  // Each rank begins with its neighbour: not all read the same memory at once.
  for (int k = 1; k < c.at.ranks; ++k) {
    const int from = (c.at.rank + k) % c.at.ranks, place = from < c.at.rank ? from : from - 1;
    char* const to = FetchedInto(c.at.ranks, step) + static_cast<uint64_t>(place) * chunk_;
    const uint64_t bytes = step.chunk.count * static_cast<uint64_t>(c.in_size);
    if (absl::Status s = runtime_.Copy(to, SlotOf(from, step), bytes, mine); !s.ok()) return s;
  }
  if (absl::Status s = runtime_.Record(copied_[staged::kUp].get(), mine); !s.ok()) return s;
  if (absl::Status s = TakeTurn(c, staged::kUp, step, false, step.number + 1); !s.ok()) return s;
  return runtime_.Record(Told(staged::kUp, step.index).get(), mine);
}

// What is up of this rank's peers is down of its own: in place it may be written over.
absl::Status StagedCopies::Reduce(staged::Collective c, const Step& step, void* stream) {
  Lane& lane = lanes_[step.lane];
  if (absl::Status s = runtime_.WaitEvent(stream, Told(staged::kUp, step.index).get()); !s.ok()) return s;
  c.move = staged::Move::kAllReduceFetched;
  c.chunk = step.chunk;
  PlanFetched(&c);
  if (absl::Status s = runtime_.RunStaged(c, stream); !s.ok()) return s;
  return runtime_.Record(lane.reduced[step.number % kCopyDepth].get(), stream);
}

}  // namespace ddp
