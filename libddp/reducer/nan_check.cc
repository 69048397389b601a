// SPDX-License-Identifier: Apache-2.0
#include "libddp/reducer/nan_check.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "libddp/comm/base/exchange.h"
#include "libddp/device/buffer_ops.h"

namespace ddp {
namespace {

// One rank's gradients that are not finite.
struct Found {
  int32_t first = 0;  // parameter
  int32_t count = 0;
};

std::string Describe(const std::vector<Found>& found, const std::vector<Trained>& all) {
  constexpr size_t kNamed = 8;
  std::string text;
  size_t ranks = 0;
  for (size_t r = 0; r < found.size(); ++r) {
    if (found[r].count == 0 || ++ranks > kNamed) continue;
    absl::StrAppend(&text, ranks > 1 ? ", " : "", "rank ", r,
                    ranks > 1 ? " in that of '" : " has an infinity or a NaN in the gradient of '",
                    all[static_cast<size_t>(found[r].first)].parameter.name, "'");
    if (found[r].count > 1) absl::StrAppend(&text, " (the first of ", found[r].count, ")");
  }
  if (ranks > kNamed) absl::StrAppend(&text, " and ", ranks - kNamed, " more ranks");
  return text;
}

}  // namespace

absl::Status NanCheck::Reset(size_t parameters, Device device) {
  parameters_ = parameters;
  const size_t bytes = std::max<size_t>(parameters, 1) * sizeof(uint32_t);
  absl::StatusOr<std::shared_ptr<void>> memory;
  if (IsGpu(device)) {
    const DeviceGuard guard(Devices(), device);
    if (!guard.status().ok()) return guard.status();
    memory = Devices().AllocatePinned(bytes);
  } else {
    memory = AllocateOn(device, bytes);
  }
  if (!memory.ok()) return memory.status();
  memory_ = *std::move(memory);
  return absl::OkStatus();
}

void NanCheck::Begin() {
  std::fill_n(words(), parameters_, 0);
  captured_ = false;
}

absl::Status NanCheck::Look(const Bucket& bucket, const std::vector<Trained>& all, Stream stream) {
  if (IsGpu(stream.device)) {
    const DeviceGuard guard(Devices(), stream.device);
    if (!guard.status().ok()) return guard.status();
    const absl::StatusOr<bool> capturing = Devices().Capturing(stream.native);
    if (!capturing.ok()) return capturing.status();
    captured_ |= *capturing;
    if (captured_) return absl::OkStatus();
  }
  for (const size_t i : bucket.items) {
    if (all[i].slot.count == 0) continue;
    if (absl::Status s = CheckFinite(all[i].slot, words() + i, stream); !s.ok()) return s;
  }
  return absl::OkStatus();
}

absl::Status NanCheck::Finish(ProcessGroup& group, absl::Span<const size_t> order, const std::vector<Trained>& all,
                              int64_t step, absl::Status* finding) {
  *finding = absl::OkStatus();
  Found mine;
  for (const size_t i : order) {
    if (words()[i] != 0 && mine.count++ == 0) mine.first = static_cast<int32_t>(i);
  }
  const absl::StatusOr<std::vector<Found>> found = Exchange(group, mine);
  if (!found.ok()) return found.status();
  const std::string text = Describe(*found, all);
  if (!text.empty()) {
    *finding = absl::DataLossError(
        absl::StrCat(text, ", in step ", step,
                     " before the sum over ranks; look at the batch, the loss and the learning rate of this step"));
  }
  return absl::OkStatus();
}

}  // namespace ddp
