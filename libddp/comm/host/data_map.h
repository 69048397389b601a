// SPDX-License-Identifier: Apache-2.0
// Which elements of whose data an operation reduces and moves.
#ifndef LIBDDP_COMM_HOST_DATA_MAP_H_
#define LIBDDP_COMM_HOST_DATA_MAP_H_

#include <cstddef>

#include "absl/types/span.h"
#include "libddp/comm/base/operation_key.h"

namespace ddp {

struct Piece {
  size_t from = 0, to = 0;  // where it begins in the arrays of the source and of the target
  size_t elements = 0;
};

// Shares of an array begin at multiples of so many elements: whole cache lines for every type.
inline constexpr size_t kShareAlign = 64;

// Everything is in elements.
class DataMap {
 public:
  // `count` and `begins`: as in Operation, which outlives this.
  DataMap(const OperationKey& key, size_t count, absl::Span<const size_t> begins, int ranks);

  // What the owner reduces: this piece of every rank's input into its own output.
  Piece Reduced(int owner) const;
  // What `target` copies from `source`: of an all-reduce from its output, of other operations from its input.
  Piece Moved(int source, int target) const;

  size_t InElements(int rank) const { return begins_.empty() ? count_ : Moved(rank, rank).elements; }
  // What others have to write to the rank's output.
  size_t ResultElements(int rank) const;

 private:
  Piece Share(int rank) const;

  OperationKey::Kind kind_;
  int root_;
  size_t count_, ranks_;
  size_t part_;  // of `count`, each rank's; of an all-reduce all but the last ones'
  absl::Span<const size_t> begins_;
};

}  // namespace ddp

#endif  // LIBDDP_COMM_HOST_DATA_MAP_H_
