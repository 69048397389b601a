// SPDX-License-Identifier: Apache-2.0
#include "libddp/reducer/bucket_plan.h"

#include <algorithm>
#include <map>
#include <utility>

namespace ddp {

std::vector<Bucket> PlanBuckets(absl::Span<const BucketItem> items, absl::Span<const size_t> order, size_t first_cap,
                                size_t cap) {
  struct Open {
    Bucket bucket;
    size_t cap;
    size_t last = 0;  // position in `order` of its last item
  };
  std::map<DType, Open> open;
  std::map<size_t, Bucket> closed;  // by the position at which they are complete
  for (size_t position = 0; position < order.size(); ++position) {
    const BucketItem& item = items[order[position]];
    Open& current = open.try_emplace(item.dtype, Open{{}, first_cap}).first->second;
    current.bucket.dtype = item.dtype;
    current.bucket.items.push_back(order[position]);
    current.bucket.bytes += item.bytes;
    current.last = position;
    if (current.bucket.bytes >= current.cap) {
      closed.emplace(position, std::exchange(current.bucket, {}));
      current.cap = cap;
    }
  }
  for (auto& [dtype, rest] : open) {
    if (!rest.bucket.items.empty()) closed.emplace(rest.last, std::move(rest.bucket));
  }
  std::vector<Bucket> buckets;
  buckets.reserve(closed.size());
  for (auto& [position, bucket] : closed) buckets.push_back(std::move(bucket));
  return buckets;
}

bool SamePlan(absl::Span<const Bucket> a, absl::Span<const Bucket> b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const Bucket& x, const Bucket& y) { return x.items == y.items; });
}

size_t Lateness(absl::Span<const Bucket> plan, absl::Span<const BucketItem> items, absl::Span<const size_t> order) {
  std::vector<size_t> ready_bytes(items.size());  // by item: what had become ready when it had
  size_t bytes = 0;
  for (const size_t i : order) ready_bytes[i] = bytes += items[i].bytes;
  size_t launched = 0, own = 0, worst = 0;
  for (const Bucket& bucket : plan) {
    for (const size_t i : bucket.items) launched = std::max(launched, ready_bytes[i]);
    own += bucket.bytes;
    worst = std::max(worst, launched - std::min(launched, own));
  }
  return worst;
}

}  // namespace ddp
