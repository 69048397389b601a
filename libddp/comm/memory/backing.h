// SPDX-License-Identifier: Apache-2.0
// The memory of an Allocation of a CPU group.
#ifndef LIBDDP_COMM_MEMORY_BACKING_H_
#define LIBDDP_COMM_MEMORY_BACKING_H_

#include <atomic>
#include <cstddef>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "ddp/process_group.h"
#include "libddp/comm/memory/shared_segment.h"

namespace ddp {

// Its addresses never change. What is mapped there changes when another group registers the Allocation: see MoveTo.
// Used by one thread at a time.
class Backing {
 public:
  // An Allocation of [data, data + bytes), which begins a page, in `addresses`. `segment` if it is what they show.
  static Allocation Make(char* data, size_t bytes, std::shared_ptr<void> addresses,
                         std::shared_ptr<SharedSegment> segment);

  // Keeps the second view of the memory for as long as its group has it.
  void KeepView(std::shared_ptr<char> view) { view_ = std::move(view); }

  // Null for memory from elsewhere.
  static Backing* Of(const Allocation& allocation);

  // Copies the memory to `segment` at `offset`, and maps that at its addresses. Nobody may be using them. The group
  // that had the memory before can no longer reduce it in place. Changes nothing if MapAt fails.
  absl::Status MoveTo(std::shared_ptr<SharedSegment> segment, size_t offset);

  char* data() const { return data_; }

  // Set when it moves away from the group that has it now.
  std::shared_ptr<const std::atomic<bool>> moved() const { return moved_; }

 private:
  friend struct BackingOwner;

  char* data_ = nullptr;
  size_t bytes_ = 0;
  std::shared_ptr<void> addresses_;
  std::shared_ptr<SharedSegment> segment_;
  std::shared_ptr<char> view_;
  std::shared_ptr<std::atomic<bool>> moved_ = std::make_shared<std::atomic<bool>>(false);
};

}  // namespace ddp

#endif  // LIBDDP_COMM_MEMORY_BACKING_H_
