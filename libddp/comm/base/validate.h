// Checks of the arguments of collective calls, the same for every backend.
#ifndef LIBDDP_COMM_BASE_VALIDATE_H_
#define LIBDDP_COMM_BASE_VALIDATE_H_

#include <cstddef>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "ddp/process_group.h"
#include "ddp/types.h"

namespace ddp {

// What a list of buffers amounts to.
struct Extent {
  size_t count = 0;
  DType dtype = DType::kFloat32;
};

// One collective call of one rank; makes errors that name both: "rank 1: all_reduce: ...".
class CallCheck {
 public:
  // `device`: where the backend works.
  CallCheck(int rank, int size, absl::string_view call, Device device = {})
      : rank_(rank), size_(size), call_(call), device_(device) {}

  absl::Status Error(absl::string_view what) const;

  // All buffers on the device, of one dtype, none null.
  absl::Status CheckBuffers(absl::string_view name, Buffers buffers, Extent* extent) const;
  // in and out, where count(in) * in_times == count(out) * out_times, of one dtype.
  absl::Status InOut(Buffers in, Buffers out, size_t in_times, size_t out_times, Extent* in_extent,
                     Extent* out_extent) const;
  // in has counts[rank] elements and out as many as all counts together, of one dtype.
  absl::Status Counts(Buffers in, Buffers out, absl::Span<const size_t> counts, Extent* out_extent) const;
  // As InOut, for `size` equal parts each.
  absl::Status Parts(Buffers in, Buffers out, Extent* extent) const;
  absl::Status Root(int root) const;
  // The other end of a message.
  absl::Status PeerAndTag(int peer, int tag) const;
  // See CheckStream.
  absl::Status After(Stream after) const;
  absl::Status AllocationOf(size_t bytes, Device device) const;

 private:
  int rank_, size_;
  absl::string_view call_;
  Device device_;
};

}  // namespace ddp

#endif  // LIBDDP_COMM_BASE_VALIDATE_H_
