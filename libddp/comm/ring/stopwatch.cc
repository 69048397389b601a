// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/ring/stopwatch.h"

#include <chrono>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace ddp {

absl::Status Stopwatch::Prepare(size_t bytes) {
  absl::StatusOr<std::shared_ptr<void>> words = runtime_.AllocatePinned(sizeof(uint32_t));
  if (!words.ok()) return words.status();
  words_ = *std::move(words);
  absl::StatusOr<std::shared_ptr<void>> data = runtime_.Allocate(options_.device, bytes);
  if (!data.ok()) return data.status();
  data_ = *std::move(data);
  absl::StatusOr<OwnedStream> stream = MakeStream(runtime_);
  if (!stream.ok()) return stream.status();
  stream_ = *std::move(stream);
  for (OwnedEvent* event : {&begin_, &end_}) {
    absl::StatusOr<OwnedEvent> made = MakeEvent(runtime_, /*timed=*/true);
    if (!made.ok()) return made.status();
    *event = *std::move(made);
  }
  return absl::OkStatus();
}

absl::StatusOr<double> Stopwatch::TimeOf(int repeats, absl::FunctionRef<absl::Status()> enqueue) {
  absl::Status status = enqueue();
  status.Update(runtime_.Record(begin_.get(), stream_.get()));
  for (int k = 0; k < repeats; ++k) status.Update(enqueue());
  status.Update(runtime_.Record(end_.get(), stream_.get()));
  status.Update(Await());
  if (!status.ok()) {
    ring_.Abort();
    return status;
  }
  absl::StatusOr<double> us = runtime_.ElapsedUs(begin_.get(), end_.get());
  return us.ok() ? *us / repeats : us;
}

absl::Status Stopwatch::Await() {
  const absl::Time until = absl::Now() + options_.timeout;
  while (true) {
    absl::StatusOr<bool> finished = runtime_.Finished(end_.get());
    if (!finished.ok()) return finished.status();
    if (*finished) return absl::OkStatus();
    if (absl::Status s = control_.status(); !s.ok()) return s;
    if (absl::Now() >= until) {
      return absl::DeadlineExceededError(
          absl::StrCat("GPU ", options_.device.index, " did not end its first all-reduces in ",
                       absl::FormatDuration(options_.timeout), ": does another program keep a GPU busy?"));
    }
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

}  // namespace ddp
