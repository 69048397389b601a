// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/peers/peer_copies.h"

#include <algorithm>

#include "libddp/base/round.h"
#include "libddp/comm/base/exchange.h"
#include "libddp/comm/ring/staged_plan.h"

namespace ddp {
namespace {

// Parts begin at multiples of so many elements, whatever their type.
constexpr uint64_t kPeerPartAlign = 64;

}  // namespace

absl::StatusOr<std::shared_ptr<PeerCopies>> PeerCopies::Create(ProcessGroup& control, DeviceRuntime& runtime,
                                                               Device device, uint64_t chunk) {
  const uint64_t ranks = static_cast<uint64_t>(control.size());
  StagingRing::Beside beside;
  beside.common = RoundUp(PeerMemory::SharedBytes(control.size()), size_t{4096});
  beside.only_words = true;
  absl::StatusOr<std::shared_ptr<StagingRing>> ring = StagingRing::Create(control, runtime, device, -1, beside);
  if (!ring.ok()) return ring.status();
  std::shared_ptr<PeerCopies> copies(new PeerCopies(*ring, runtime));
  copies->slot_ = RoundUp(std::max(CeilDiv(chunk, ranks), kPeerPartAlign * sizeof(double)), uint64_t{256});
  absl::StatusOr<std::shared_ptr<void>> met = runtime.Allocate(device, sizeof(uint64_t));
  if (absl::Status s = Agree(control, met.status()); !s.ok()) return s;
  copies->met_ = *std::move(met);
  absl::StatusOr<std::unique_ptr<PeerMemory>> memory =
      PeerMemory::Create(control, runtime, device, *ring, ranks * (copies->slot_ + sizeof(staged::Counter)));
  if (!memory.ok()) return memory.status();
  copies->memory_ = *std::move(memory);
  return copies;
}

absl::Status PeerCopies::AllReduce(staged::Collective c, uint32_t* failed, void* stream) {
  c.at = ring_->PlaceOf(failed);
  c.move = staged::Move::kAllReduceFetched;
  const uint64_t ranks = static_cast<uint64_t>(c.at.ranks),
                 size = static_cast<uint64_t>(std::max(c.in_size, c.out_size));
  const uint64_t most = slot_ / size / kPeerPartAlign * kPeerPartAlign * ranks;
  const uint64_t step = RoundUp(CeilDiv(c.count, CeilDiv(c.count, most)), kPeerPartAlign * ranks);
  for (uint64_t begin = 0; begin < c.count; begin += step) {
    if (absl::Status s = Chunk(c, begin, std::min(step, c.count - begin), stream); !s.ok()) return s;
  }
  return absl::OkStatus();
}

absl::Status PeerCopies::Meet(const staged::Collective& c, void* stream) {
  staged::Meeting meeting = {};
  meeting.at = c.at;
  meeting.met = static_cast<uint64_t*>(met_.get());
  for (int r = 0; r < c.at.ranks; ++r) meeting.told[r] = reinterpret_cast<staged::Counter*>(CountersOf(r));
  return runtime_.RunStaged(meeting, stream);
}

absl::Status PeerCopies::Push(const staged::Collective& c, int to, uint64_t begin, uint64_t count, void* stream) {
  const uint64_t size = static_cast<uint64_t>(c.in_size);
  for (uint64_t done = 0, n = 0; done < count * size; done += n) {
    n = count * size - done;
    const char* const from = Locate(c.in, begin * size + done, &n);
    if (absl::Status s = runtime_.Copy(PushedBy(c.at.rank, to) + done, from, n, stream); !s.ok()) return s;
  }
  return absl::OkStatus();
}

// The rank whose result it is has looked for infinities and NaN, but tells nobody.
absl::Status PeerCopies::Pull(const staged::Collective& c, int from, uint64_t begin, uint64_t count, void* stream) {
  const uint64_t size = static_cast<uint64_t>(c.out_size);
  const auto type = static_cast<DType>(c.arithmetic.out_type);
  const Transform look = {.in = type, .out = type, .nonfinite = c.arithmetic.nonfinite};
  for (uint64_t done = 0, n = 0; done < count * size; done += n) {
    n = count * size - done;
    char* const to = Locate(c.out, begin * size + done, &n);
    if (absl::Status s = runtime_.Copy(to, ResultOf(from) + done, n, stream); !s.ok()) return s;
    if (look.nonfinite == nullptr) continue;
    const TransformPiece piece{to, nullptr, n / size};
    if (absl::Status s = runtime_.Run(look, {&piece, 1}, stream); !s.ok()) return s;
  }
  return absl::OkStatus();
}

// Nobody writes to a slot that is still read: who pushes again has met the reader when that had reduced, and who
// reduces again when it had pulled. Each rank begins with its neighbour: not all use the same GPU's memory at once.
absl::Status PeerCopies::Chunk(staged::Collective c, uint64_t begin, uint64_t count, void* stream) {
  const int ranks = c.at.ranks, me = c.at.rank;
  const uint64_t part = RoundUp(CeilDiv(count, static_cast<uint64_t>(ranks)), kPeerPartAlign);
  const auto begin_of = [&](int r) { return begin + std::min(count, static_cast<uint64_t>(r) * part); };
  const auto count_of = [&](int r) { return begin_of(r + 1) - begin_of(r); };
  for (int k = 1; k < ranks; ++k) {
    const int to = (me + k) % ranks;
    if (absl::Status s = Push(c, to, begin_of(to), count_of(to), stream); !s.ok()) return s;
  }
  if (absl::Status s = Meet(c, stream); !s.ok()) return s;
  if (count_of(me) > 0) {
    c.chunk = {begin_of(me), count_of(me), SlotOf(me, 0), slot_, ResultOf(me), /*looked=*/true};
    PlanFetched(&c);
    if (absl::Status s = runtime_.RunStaged(c, stream); !s.ok()) return s;
  }
  if (absl::Status s = Meet(c, stream); !s.ok()) return s;
  for (int k = 1; k < ranks; ++k) {
    const int from = (me + k) % ranks;
    if (absl::Status s = Pull(c, from, begin_of(from), count_of(from), stream); !s.ok()) return s;
  }
  return absl::OkStatus();
}

}  // namespace ddp
