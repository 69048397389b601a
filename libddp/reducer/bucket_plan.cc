// SPDX-License-Identifier: Apache-2.0
#include "libddp/reducer/bucket_plan.h"

#include <algorithm>
#include <map>
#include <utility>

namespace ddp {

namespace {

// Whether a bucket of so many bytes is closed before the next item of its dtype; `rest` are the bytes of this item and
// of all behind it. Of bucket and rest together, (all - last_cap) / 2 are to come later, so that the bucket has
// last_cap more than they have, and at least last_cap. The item is left to them if half of it or more lies within that.
bool Tapers(size_t bucket, size_t rest, size_t item, size_t last_cap) {
  if (bucket < last_cap || rest == 0) return false;
  const size_t all = bucket + rest;
  return all > 2 * last_cap && 2 * rest - item <= std::max(2 * last_cap, all - last_cap);
}

}  // namespace

std::vector<Bucket> PlanBuckets(absl::Span<const BucketItem> items, absl::Span<const size_t> order,
                                const BucketCaps& caps) {
  struct Open {
    Bucket bucket;
    size_t cap;
    size_t last = 0;  // position in `order` of its last item
    size_t rest = 0;  // bytes of this dtype that are in no bucket yet
  };
  std::map<DType, Open> open;
  std::map<size_t, Bucket> closed;  // by the position at which they are complete
  const auto close = [&](Open& full) {
    const size_t next = caps.last < caps.others ? std::max(full.cap, 2 * full.bucket.bytes) : caps.others;
    full.cap = std::min(next, caps.others);
    closed.emplace(full.last, std::exchange(full.bucket, {}));
  };
  for (const size_t i : order) {
    open.try_emplace(items[i].dtype, Open{{}, caps.first}).first->second.rest += items[i].bytes;
  }
  for (size_t position = 0; position < order.size(); ++position) {
    const BucketItem& item = items[order[position]];
    Open& current = open.at(item.dtype);
    if (Tapers(current.bucket.bytes, current.rest, item.bytes, caps.last)) close(current);
    current.bucket.dtype = item.dtype;
    current.bucket.items.push_back(order[position]);
    current.bucket.bytes += item.bytes;
    current.rest -= item.bytes;
    current.last = position;
    if (current.bucket.bytes >= current.cap) close(current);
  }
  for (auto& [dtype, last] : open) {
    if (!last.bucket.items.empty()) close(last);
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
