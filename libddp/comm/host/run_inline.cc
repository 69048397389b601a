// SPDX-License-Identifier: Apache-2.0
// A little data, which travels with the announcements: each rank computes its own result.
#include "libddp/comm/host/run.h"

namespace ddp {
namespace {

class InlineRun final : public Run {
 public:
  InlineRun(const Operation& operation, const RunContext& host) : Run({.is_brief = true}, operation, host) {}

  absl::StatusOr<bool> Advance(bool, int) override {
    done_ = true;
    const size_t size = op_.in_size();
    // What this rank has published may have left its caches: it uses its own data.
    const auto published = [&](int r) { return host_.control.inlined(op_.sequence, r, map_.InElements(r) * size); };
    if (op_.Reduces()) {
      const bool scatter = op_.Scatters();
      const Piece mine = scatter ? map_.Reduced(host_.rank) : Piece{0, 0, op_.count};
      Reduce(mine, [&](int r) { return published(r) + mine.from * size; });
      return true;
    }
    for (int r = 0; r < host_.size; ++r) {
      const Piece piece = map_.Moved(r, host_.rank);
      if (r == host_.rank) {
        MoveOwn(piece);
      } else {
        op_.out.CopyIn(piece.to * size, published(r) + piece.from * size, piece.elements * size);
      }
    }
    return true;
  }
  bool Done() const override { return done_; }
  bool PeerDone(int) const override { return true; }

 private:
  bool done_ = false;
};

}  // namespace

void PublishInline(const Operation& operation, const RunContext& host, SharedWriter* writer) {
  if (operation.IsBroadcast() && operation.key().root != host.rank) return;
  const size_t bytes = operation.in.bytes();
  char* const to = host.control.inlined(operation.sequence, host.rank, bytes);
  if (!operation.Scatters()) return writer->Copy(operation.in, 0, to, bytes);
  // All but this rank's own part.
  const size_t part = bytes / static_cast<size_t>(host.size), own = part * static_cast<size_t>(host.rank);
  writer->Copy(operation.in, 0, to, own);
  writer->Copy(operation.in, own + part, to + own + part, bytes - own - part);
}

std::unique_ptr<Run> MakeInlineRun(const Operation& operation, const RunContext& host) {
  return std::make_unique<InlineRun>(operation, host);
}

}  // namespace ddp
