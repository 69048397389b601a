// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/health/shared_failure.h"

#include "absl/strings/str_cat.h"
#include "libddp/base/spin.h"

namespace ddp {
namespace {

constexpr int64_t kPatienceNs = 1'000'000'000;

}  // namespace

bool SharedFailure::Claim(int rank) {
  uint32_t none = kNone;
  return state_.compare_exchange_strong(none, kWriting + static_cast<uint32_t>(rank));
}

void SharedFailure::Write(const absl::Status& why) {
  cause_.Pack(why);
  state_.store(kWritten, std::memory_order_release);
}

absl::Status SharedFailure::Record(const absl::Status& why, int rank) {
  if (Claim(rank)) {
    Write(why);
    return why;
  }
  const int64_t give_up = NowNs() + kPatienceNs;
  for (Backoff backoff(/*oversubscribed=*/true);; backoff.Pause()) {
    const uint32_t state = state_.load(std::memory_order_acquire);
    if (state == kWritten) return cause_.Unpack();
    if (NowNs() < give_up) continue;
    const int writer = static_cast<int>(state - kWriting);
    return WithFailedRanks(absl::Status(why.code(), absl::StrCat("rank ", writer,
                                                                 " failed first, and died or was stopped before it had "
                                                                 "said why; here: ",
                                                                 why.message())),
                           {writer});
  }
}

absl::Status SharedFailure::cause() const {
  return state_.load(std::memory_order_acquire) == kWritten ? cause_.Unpack() : absl::OkStatus();
}

}  // namespace ddp
