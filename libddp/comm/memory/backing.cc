// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/memory/backing.h"

#include <cstring>
#include <utility>

namespace ddp {

// The deleter of an Allocation's memory: how an Allocation leads back to its Backing.
struct BackingOwner {
  std::shared_ptr<Backing> backing;
  void operator()(void*) const {}
};

Allocation Backing::Make(char* data, size_t bytes, std::shared_ptr<void> addresses,
                         std::shared_ptr<SharedSegment> segment) {
  auto backing = std::make_shared<Backing>();
  backing->data_ = data;
  backing->bytes_ = bytes;
  backing->addresses_ = std::move(addresses);
  backing->segment_ = std::move(segment);
  return Allocation(std::shared_ptr<void>(data, BackingOwner{std::move(backing)}), bytes, Device{});
}

Backing* Backing::Of(const Allocation& allocation) {
  const BackingOwner* const owner = std::get_deleter<BackingOwner>(allocation.owner());
  return owner == nullptr ? nullptr : owner->backing.get();
}

absl::Status Backing::MoveTo(std::shared_ptr<SharedSegment> segment, size_t offset) {
  std::memcpy(segment->data() + offset, data_, bytes_);
  if (absl::Status s = segment->MapAt(data_, offset, bytes_); !s.ok()) return s;
  moved_->store(true);
  view_.reset();
  moved_ = std::make_shared<std::atomic<bool>>(false);
  // Two owners: both are ours. Otherwise a thread is still fetching a message that nobody has asked for.
  if (segment_ != nullptr && addresses_ == segment_ && segment_.use_count() == 2) segment_->Forget(data_, bytes_);
  segment_ = std::move(segment);
  return absl::OkStatus();
}

}  // namespace ddp
