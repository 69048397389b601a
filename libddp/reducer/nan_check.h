// SPDX-License-Identifier: Apache-2.0
// Which ranks bring an infinity or a NaN into the sums of a step, and in which gradient.
#ifndef LIBDDP_REDUCER_NAN_CHECK_H_
#define LIBDDP_REDUCER_NAN_CHECK_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "ddp/process_group.h"
#include "ddp/types.h"
#include "libddp/base/owner_process.h"
#include "libddp/reducer/bucket_plan.h"
#include "libddp/reducer/memory.h"

namespace ddp {

// In each step: Begin; Look at every bucket just before it is reduced, because the reduction overwrites what the rank
// has brought; Finish. Steps that are captured into a CUDA graph are not looked at. Not thread-safe.
class NanCheck {
 public:
  // Between steps; before the first one.
  absl::Status Reset(size_t parameters, Device device);
  void Begin();
  // On a GPU in the order of `stream`.
  absl::Status Look(const Bucket& bucket, const std::vector<Trained>& all, Stream stream);
  // Collective, unless the step is captured. The host must have waited for the streams of Look. *finding: DataLoss with
  // the ranks and, for each, its first gradient in `order`, in which they were ready there; the same on all ranks.
  absl::Status Finish(ProcessGroup& group, absl::Span<const size_t> order, const std::vector<Trained>& all,
                      int64_t step, absl::Status* finding);
  bool captured() const { return captured_; }  // this step
  // The GPU may write to its memory for ever, which is kept.
  void Forsake() { KeepForever(std::move(memory_)); }

 private:
  uint32_t* words() const { return static_cast<uint32_t*>(memory_.get()); }

  size_t parameters_ = 0;
  std::shared_ptr<void> memory_;  // a word for each parameter: 1 if not finite. Of the host; a GPU writes there, too
  bool captured_ = false;
};

}  // namespace ddp

#endif  // LIBDDP_REDUCER_NAN_CHECK_H_
