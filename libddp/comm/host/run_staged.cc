// SPDX-License-Identifier: Apache-2.0
// Private data passes through the stages in rounds. In a round each rank (1) copies into its stage what others need of
// its data, (2) once all have, reduces its own share from its private data and the others' stages, keeping one copy and
// leaving one in its own stage where nobody's input lies, and (3) once all have, copies the others' results out. All
// but an all-reduce is over once all have done (1): each rank takes what is its own from the others' stages. Stages
// alternate between two halves: a rank that lays out round g + 2 has seen everybody do (1) of round g + 1, and so end
// round g. A round fits the cache: that, not the number of steps, decides the speed.
#include <algorithm>

#include "libddp/base/round.h"
#include "libddp/comm/host/run.h"

namespace ddp {
namespace {

class StagedRun final : public Run {
 public:
  StagedRun(const Operation& operation, const RunContext& host, uint64_t first_round)
      : Run({.takes_turns = true}, operation, host), first_round_(first_round) {
    const size_t share = kStageBytes / slot_size_ / static_cast<size_t>(host.size) / kShareAlign * kShareAlign;
    round_elements_ = operation.Scatters() ? share : share * static_cast<size_t>(host.size);
    size_t most = operation.Scatters() ? operation.count / static_cast<size_t>(host.size) : 0;
    for (int r = 0; r < host.size && !operation.Scatters(); ++r) most = std::max(most, map_.InElements(r));
    rounds_ = CeilDiv(most, round_elements_);
  }

  absl::StatusOr<bool> Advance(bool, int) override {
    const ControlBlock& control = host_.control;
    bool progressed = false;
    for (; round_ < rounds_; progressed = true) {
      const uint64_t reached = first_round_ + round_ + 1;
      switch (phase_) {
        case Phase::kCopyIn:
          CopyIn();
          control.peer(host_.rank).copied.store(reached, std::memory_order_release);
          phase_ = Phase::kReduce;
          break;
        case Phase::kReduce:
          if (!control.AllReached(&PeerLine::copied, reached)) return progressed;
          if (op_.Reduces()) ReduceShare();
          if (op_.IsAllReduce()) control.peer(host_.rank).reduced.store(reached, std::memory_order_release);
          phase_ = Phase::kCopyOut;
          break;
        case Phase::kCopyOut:
          if (op_.IsAllReduce() && !control.AllReached(&PeerLine::reduced, reached)) return progressed;
          CopyOut();
          phase_ = Phase::kCopyIn;
          ++round_;
          break;
      }
    }
    return progressed;
  }
  bool Done() const override { return round_ == rounds_; }
  bool PeerDone(int peer) const override {
    const PeerLine& line = host_.control.peer(peer);
    return (op_.IsAllReduce() ? line.reduced : line.copied).load(std::memory_order_acquire) >= first_round_ + rounds_;
  }
  uint64_t Rounds() const override { return rounds_; }

 private:
  enum class Phase { kCopyIn, kReduce, kCopyOut } phase_ = Phase::kCopyIn;

  // Where in a stage the data for `rank` lies.
  char* Area(int stage_of, int rank) const {
    const size_t begin = op_.IsAllReduce() ? RoundMap().Reduced(rank).from
                         : op_.Scatters()  ? round_elements_ * static_cast<size_t>(rank)
                                           : 0;
    return host_.control.stage(stage_of, first_round_ + round_) + begin * slot_size_;
  }

  // What this round does of a piece. A round of an all-reduce is an all-reduce of its own.
  size_t base() const { return round_ * round_elements_; }
  DataMap RoundMap() const { return {op_.key(), std::min(round_elements_, op_.count - base()), {}, host_.size}; }
  Piece Shift(Piece piece) const { return {piece.from + base(), piece.to + base(), piece.elements}; }
  Piece Clip(Piece piece) const {
    piece.elements = std::min(round_elements_, piece.elements - std::min(base(), piece.elements));
    return Shift(piece);
  }
  Piece Reduced(int owner) const {
    return op_.IsAllReduce() ? Shift(RoundMap().Reduced(owner)) : Clip(map_.Reduced(owner));
  }
  Piece Moved(int source, int target) const {
    return op_.IsAllReduce() ? Shift(RoundMap().Moved(source, target)) : Clip(map_.Moved(source, target));
  }

  void CopyIn() const {
    for (int r = 0; r < host_.size; ++r) {
      if (r == host_.rank) continue;
      const Piece piece = op_.Reduces() ? Reduced(r) : Moved(host_.rank, r);
      host_.writer->Copy(op_.in, piece.from * op_.in_size(), Area(host_.rank, r), piece.elements * op_.in_size());
      if (!op_.Reduces() && !op_.Scatters()) return;  // the same for all
    }
  }

  void ReduceShare() const {
    const Piece share = Reduced(host_.rank);
    const size_t bytes = share.elements * op_.out_size();
    // The others' copy is written at once, or past the caches as soon as the result is here.
    char* const copy = op_.IsAllReduce() ? Area(host_.rank, host_.rank) : nullptr;
    const bool at_once = host_.writer->Plain(bytes);
    Reduce(
        share, [&](int r) { return Area(r, host_.rank); }, at_once ? copy : nullptr);
    if (copy != nullptr && !at_once) host_.writer->Copy(op_.out, share.to * op_.out_size(), copy, bytes);
  }

  void CopyOut() const {
    const size_t size = op_.out_size();
    for (int r = 0; r < host_.size; ++r) {
      const Piece piece = Moved(r, host_.rank);
      if (r == host_.rank) {
        MoveOwn(piece);
      } else {
        op_.out.CopyIn(piece.to * size, Area(r, op_.IsAllReduce() ? r : host_.rank), piece.elements * size);
      }
    }
  }

  const size_t slot_size_ = std::max(op_.in_size(), op_.out_size());
  const uint64_t first_round_;
  size_t round_elements_ = 0;  // at most, of one piece; of an all-reduce in all
  uint64_t rounds_ = 0, round_ = 0;
};

}  // namespace

std::unique_ptr<Run> MakeStagedRun(const Operation& operation, const RunContext& host, uint64_t first_round) {
  return std::make_unique<StagedRun>(operation, host, first_round);
}

}  // namespace ddp
