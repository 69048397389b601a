// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/gpu/device_peers.h"

#include <time.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "libddp/base/failed_ranks.h"
#include "libddp/base/spin.h"
#include "libddp/comm/gpu/device_engine.h"
#include "libddp/comm/health/peer_watch.h"

namespace ddp {
namespace {

// Peers that call something else are found out where they leave this rank waiting.
constexpr int64_t kDisagreementGraceNs = 5'000'000;

// `cause`, which explains `error`.
absl::Status Because(const absl::Status& cause, const absl::Status& error) {
  return WithFailedRanks(absl::Status(cause.code(), absl::StrCat(cause.message(), " (", error.message(), ")")),
                         FailedRanks(cause));
}

}  // namespace

absl::Status DevicePeers::Check(const DeviceOperation& operation, uint64_t sequence, int64_t waited_ns) const {
  if (options_.board == nullptr) return absl::OkStatus();
  PeerBoard& board = *options_.board;
  if (operation.message == nullptr && waited_ns > kDisagreementGraceNs) {
    if (const auto text = board.Disagreement(sequence, operation.entry)) return absl::FailedPreconditionError(*text);
    if (const auto text = board.CallsOnHost(sequence, operation.entry)) return absl::FailedPreconditionError(*text);
  }
  return waited_ns > kDeathGraceNs ? board.Gone(sequence) : absl::OkStatus();
}

// Other hosts are not on the board: the group over CPU memory learns of their failures.
absl::Status DevicePeers::Failure() const {
  if (options_.board == nullptr) return absl::OkStatus();
  if (absl::Status s = options_.board->failure(); !s.ok()) return s;
  const std::shared_ptr<InternalGroup> control = options_.control.lock();
  return control == nullptr ? absl::OkStatus() : control->status();
}

// The connections of a process that dies break before it is seen to be dead. Ranks of other hosts are not on the board:
// their group over CPU memory tells why they have failed, whether they have left, and whether they answer.
std::optional<absl::Status> DevicePeers::Cause(const absl::Status& error, uint64_t sequence, int64_t since_ns) const {
  const bool broken = absl::IsUnavailable(error), late = absl::IsDeadlineExceeded(error);
  const bool may_be_theirs = broken || late || absl::IsInternal(error);
  if (options_.board == nullptr || absl::IsInvalidArgument(error)) return error;
  if (late && !FailedRanks(error).empty()) return error;
  if (const absl::Status gone = options_.board->Gone(sequence); !gone.ok()) return Because(gone, error);
  const std::shared_ptr<InternalGroup> control = options_.control.lock();
  const AbsentRanks absent = control != nullptr && may_be_theirs ? control->AskNodes() : AbsentRanks();
  if (const absl::Status s = control == nullptr ? absl::OkStatus() : control->status(); !s.ok()) {
    return Because(s, error);
  }
  if (!absent.left.empty()) {
    const std::string text = LeftText(absent.left[0], absl::StrCat("taking part in operation ", sequence, kLeftRemedy));
    return Because(WithFailedRanks(absl::UnavailableError(text), absent.left), error);
  }
  const int64_t passed = NowNs() - since_ns;
  if (passed < (absent.silent.empty() ? (broken ? kDeathGraceNs : 0) : kAnswerNs)) return std::nullopt;
  if (absent.silent.empty()) return error;
  const std::string text =
      absl::StrCat("no answer for ", absl::FormatDuration(absl::Nanoseconds(kAnswerNs)), " from ", absent.where,
                   ": the process has ended or is stopped, or its host or the link to it is down");
  return Because(WithFailedRanks(absl::Status(error.code(), text), absent.silent), error);
}

absl::Status DevicePeers::Explain(const absl::Status& error, uint64_t sequence) const {
  for (const int64_t since = NowNs();;) {
    if (std::optional<absl::Status> cause = Cause(error, sequence, since)) return *std::move(cause);
    const timespec nap{0, 1'000'000};
    nanosleep(&nap, nullptr);
  }
}

void DevicePeers::TellStall(const DeviceOperation& operation, uint64_t sequence, int64_t waited_ns) const {
  const int64_t patience = absl::ToInt64Nanoseconds(options_.stall_warning);
  if (options_.observer == nullptr || options_.board == nullptr || patience <= 0 || waited_ns < patience) return;
  if (operation.message != nullptr) return;  // the receiver alone knows when it wants it
  if (!options_.board->ShouldTellStall(sequence, waited_ns, patience)) return;
  std::vector<int> missing;
  std::string laggards = Laggards(operation, sequence, &missing);
  absl::StrAppend(&laggards, options_.world_ranks.Note(options_.rank, missing));
  options_.observer->OnIncident(options_.board->Incident(
      false, StallText(options_.rank, absl::StrCat("operation ", sequence, ", ", operation.Describe()), waited_ns,
                       laggards, operation.timeout)));
}

// Where nothing is missing on this host, the transport may know more, and gets the time to say so.
absl::Status DevicePeers::InTime(const DeviceOperation& operation, uint64_t sequence, int64_t waited_ns) const {
  const int64_t timeout_ns = absl::ToInt64Nanoseconds(operation.timeout);
  if (waited_ns <= timeout_ns) return absl::OkStatus();
  const bool may_know_more = options_.transport != nullptr && options_.transport->TellsTimeouts() &&
                             waited_ns / 11 * 10 <= timeout_ns &&
                             (operation.message != nullptr || options_.board->Missing(sequence).empty());
  return may_know_more ? absl::OkStatus() : TimedOut(operation, sequence);
}

absl::Status DevicePeers::TimedOut(const DeviceOperation& operation, uint64_t sequence) const {
  if (operation.message != nullptr) {
    return absl::DeadlineExceededError(absl::StrCat(
        "rank ", options_.rank, ": ", operation.Describe(), ", timed out after ",
        absl::FormatDuration(operation.timeout), ": rank ", operation.peer,
        " has not made the matching call, or waits for a message that this rank has still to send: over NCCL messages "
        "are sent and received in the order of the calls (DDP_TIMEOUT sets the limit in seconds)"));
  }
  std::vector<int> missing;
  const std::string laggards = Laggards(operation, sequence, &missing);
  return WithFailedRanks(
      absl::DeadlineExceededError(absl::StrCat(
          "rank ", options_.rank, ": operation ", sequence, ", ", operation.Describe(), ", timed out after ",
          absl::FormatDuration(operation.timeout), ": ", laggards,
          missing.empty() ? "" : "; they are stopped, stuck or slow", " (DDP_TIMEOUT sets the limit in seconds)")),
      missing);
}

absl::Status DevicePeers::GraphTimedOut(uint32_t begun, absl::Duration timeout) const {
  const std::vector<int> missing = options_.board->MissingGraphs(begun);
  return WithFailedRanks(
      absl::DeadlineExceededError(absl::StrCat(
          "rank ", options_.rank, ": operations captured into a CUDA graph timed out after ",
          absl::FormatDuration(timeout), ": ",
          missing.empty() ? "all ranks of this host run theirs; the GPU or the network is stuck, or a rank elsewhere "
                            "has not launched its graph"
                          : absl::StrCat("rank ", absl::StrJoin(missing, ", "), " has not launched its graph"),
          " (DDP_TIMEOUT sets the limit in seconds)")),
      missing);
}

std::string DevicePeers::Laggards(const DeviceOperation& operation, uint64_t sequence, std::vector<int>* ranks) const {
  if (options_.board != nullptr) *ranks = options_.board->Missing(sequence);
  const OperationKey& key = operation.key;
  const bool rootless = key.kind == OperationKey::Kind::kBroadcast &&
                        std::find(ranks->begin(), ranks->end(), int{key.root}) != ranks->end();
  if (rootless) *ranks = {key.root};  // everybody waits for the root first
  if (!ranks->empty()) return absl::StrCat("did not arrive: rank ", absl::StrJoin(*ranks, ", "));
  return "all ranks of this host have called it; the GPU or the network is stuck, or a rank elsewhere did not arrive";
}

}  // namespace ddp
