// SPDX-License-Identifier: Apache-2.0
// Which gradients are reduced together.
#ifndef LIBDDP_REDUCER_BUCKET_PLAN_H_
#define LIBDDP_REDUCER_BUCKET_PLAN_H_

#include <cstddef>
#include <vector>

#include "absl/types/span.h"
#include "ddp/types.h"

namespace ddp {

struct BucketItem {
  DType dtype = DType::kFloat32;
  size_t bytes = 0;
};

struct Bucket {
  DType dtype = DType::kFloat32;
  std::vector<size_t> items;  // indices, in the order in which they are expected to become ready
  size_t bytes = 0;
};

// Bytes of a bucket: of the first, from which they grow, of the others, and of the last, to which they taper. They
// neither grow nor taper if `last` is not below `others`.
struct BucketCaps {
  size_t first = 0, others = 0, last = 0;
};

// Goes through the items in `order` (the order in which they are expected to become ready) and fills one bucket per
// dtype at a time; a bucket is closed when it has reached its cap: the first of a dtype, or one of the others. An item
// is never split. The result is ordered by when a bucket is complete, which is the order of launch. A pure function,
// after PyTorch's rule (Li et al. 2020, "PyTorch Distributed", section 3.2.3).
//
// Unlike there, the buckets of a dtype grow from the first one and taper towards the end. A cap is twice the bytes of
// the bucket before, so that a slow link does not wait for long: while it passes one bucket, the next becomes ready.
// They taper because nothing hides the last one: a bucket is also closed when it has `last` bytes more than what comes
// after it, as nearly as the items allow. So it passes while the rest becomes ready, if a link passes bytes twice as
// fast as they become ready; from the end, buckets have about 1, 2, 4, ... times `last`. The last one has at most twice
// that, or its last item and up to `last`.
std::vector<Bucket> PlanBuckets(absl::Span<const BucketItem> items, absl::Span<const size_t> order,
                                const BucketCaps& caps);

bool SamePlan(absl::Span<const Bucket> a, absl::Span<const Bucket> b);

// How badly a plan fits an order in which its items became ready: a bucket is launched when it and all before it are
// complete; of all buckets, the most bytes that had become ready by then beyond the buckets' own. 0 for the order that
// the plan was made from, if all items have one dtype.
size_t Lateness(absl::Span<const Bucket> plan, absl::Span<const BucketItem> items, absl::Span<const size_t> order);

}  // namespace ddp

#endif  // LIBDDP_REDUCER_BUCKET_PLAN_H_
