// SPDX-License-Identifier: Apache-2.0
// How large buckets should be on a group, from what its operations cost.
#ifndef LIBDDP_REDUCER_BUCKET_SIZE_H_
#define LIBDDP_REDUCER_BUCKET_SIZE_H_

#include <cstddef>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "ddp/process_group.h"

namespace ddp {

// An all-reduce of s bytes takes about latency + s * ns_per_byte (Hockney's model).
struct LinkModel {
  double latency_ns = 0;
  double ns_per_byte = 0;
};

struct LinkSample {
  size_t bytes = 0;
  double ns = 0;
};

// The line through the samples with the least relative squared error, so that small sizes count as much as large ones;
// neither coefficient is below 0. At least two different sizes.
LinkModel FitLink(absl::Span<const LinkSample> samples);

// The bucket size that leaves the least communication after a backward pass over `total_bytes` of gradients: what the
// last bucket takes, bucket * ns_per_byte, and what dividing costs, total / bucket * latency, are balanced at
// sqrt(total * latency / ns_per_byte). Between 64 KiB and 25 MiB.
size_t BestBucketBytes(const LinkModel& link, size_t total_bytes);

// What takes as long to pass as an operation's latency; SIZE_MAX if bytes cost nothing.
size_t LatencyInBytes(const LinkModel& link);

// Collective; takes some milliseconds. Times float32 all-reduces of several sizes. All ranks get rank 0's result.
absl::StatusOr<LinkModel> MeasureLink(ProcessGroup& group, Device device);

}  // namespace ddp

#endif  // LIBDDP_REDUCER_BUCKET_SIZE_H_
