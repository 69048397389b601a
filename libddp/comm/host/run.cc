// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/host/run.h"

#include <algorithm>

#include "absl/container/inlined_vector.h"

namespace ddp {

// Stretch by stretch, where ranges of this rank's data end at different places.
void Run::Reduce(const Piece& piece, absl::FunctionRef<const char*(int)> others, char* copy) const {
  const size_t in_size = op_.in_size(), out_size = op_.out_size();
  absl::InlinedVector<const void*, 16> from(static_cast<size_t>(host_.size));
  bool nonfinite = false;
  for (size_t at = 0; at < piece.elements;) {
    size_t in_left = 0, out_left = 0;
    const char* const in = op_.in.At((piece.from + at) * in_size, &in_left);
    void* const to[] = {op_.out.At((piece.to + at) * out_size, &out_left),
                        copy == nullptr ? nullptr : copy + at * out_size};
    for (int r = 0; r < host_.size; ++r) {
      from[static_cast<size_t>(r)] = r == host_.rank ? in : others(r) + at * in_size;
    }
    const size_t n = std::min({piece.elements - at, in_left / in_size, out_left / out_size});
    nonfinite |= op_.reduce(from.data(), host_.size, to, copy == nullptr ? 1 : 2, n);
    at += n;
  }
  if (nonfinite) host_.control.slot(op_.sequence, host_.rank).nonfinite.store(1, std::memory_order_relaxed);
}

absl::StatusOr<std::unique_ptr<Run>> MakeRun(Route route, const Operation& operation, const RunContext& host,
                                             uint64_t first_round) {
  switch (route) {
    case Route::kInline:
      return MakeInlineRun(operation, host);
    case Route::kDirect:
      return MakeDirectRun(operation, host);
    case Route::kFetched:
      return MakeFetchedRun(operation, host, first_round);
    case Route::kStaged:
      break;
  }
  return MakeStagedRun(operation, host, first_round);
}

}  // namespace ddp
