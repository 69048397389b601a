// SPDX-License-Identifier: Apache-2.0
// Checks of the arguments of collective calls, the same for every backend.
#ifndef LIBDDP_COMM_BASE_VALIDATE_H_
#define LIBDDP_COMM_BASE_VALIDATE_H_

#include <cstddef>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "ddp/process_group.h"
#include "ddp/types.h"
#include "libddp/comm/base/world_ranks.h"

namespace ddp {

// What a list of buffers amounts to.
struct Extent {
  size_t count = 0;
  DType dtype = DType::kFloat32;
};

// Those above are for composed operations.
inline constexpr int kHighestTag = (1 << 30) - 1;

// One collective call of one rank; makes errors that name both: "rank 1: all_reduce: ...".
class CallCheck {
 public:
  // `device`: where the backend works. `world_ranks`, if not null, outlives this.
  CallCheck(int rank, int size, absl::string_view call, Device device = {}, const WorldRanks* world_ranks = nullptr)
      : rank_(rank), size_(size), call_(call), device_(device), world_ranks_(world_ranks) {}

  absl::Status Error(absl::string_view what) const;

  // All buffers on the device, of one dtype, none null.
  absl::Status CheckBuffers(absl::string_view name, Buffers buffers, Extent* extent) const;
  // The arguments of any call but a barrier. Sets what `in` and `out` amount to.
  absl::Status Arguments(const Call& call, Extent* in, Extent* out) const;
  absl::Status Root(int root) const;
  absl::Status AllocationOf(size_t bytes, Device device) const;

 private:
  absl::Status InOut(const Call& call, Extent* in, Extent* out) const;
  absl::Status NotAtRoot(const Call& call, Extent* in, Extent* out) const;
  absl::Status Counts(const Call& call, size_t in, size_t out) const;
  absl::Status PeerAndTag(int peer, int tag) const;

  int rank_, size_;
  absl::string_view call_;
  Device device_;
  const WorldRanks* world_ranks_;
};

}  // namespace ddp

#endif  // LIBDDP_COMM_BASE_VALIDATE_H_
