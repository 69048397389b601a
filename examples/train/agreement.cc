// SPDX-License-Identifier: Apache-2.0
#include "examples/train/agreement.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "ddp/collectives.h"
#include "examples/nn/device.h"
#include "examples/nn/sync_group.h"

namespace examples {
namespace {

constexpr absl::string_view kAgreed = "agreed";

}  // namespace

absl::Status Agreed(absl::Status error) {
  error.SetPayload(kAgreed, absl::Cord());
  return error;
}

bool IsAgreed(const absl::Status& error) { return error.GetPayload(kAgreed).has_value(); }

absl::Status AgreeOn(ddp::ProcessGroup& group, const absl::Status& mine) {
  // A status travels as its code, in one character, and its message.
  const std::string text =
      absl::StrCat(std::string(1, static_cast<char>('A' + static_cast<int>(mine.code()))), mine.message());
  const absl::StatusOr<std::vector<std::string>> all = ddp::GatherStrings(group, text);
  if (!all.ok()) return all.status();
  const auto failed = std::find_if(all->begin(), all->end(), [](const std::string& s) { return s[0] != 'A'; });
  if (failed == all->end()) return absl::OkStatus();
  const bool everywhere = std::count(all->begin(), all->end(), *failed) == group.size();
  const std::string who = everywhere ? "" : absl::StrCat("rank ", failed - all->begin(), ": ");
  return Agreed(absl::Status(static_cast<absl::StatusCode>((*failed)[0] - 'A'), absl::StrCat(who, failed->substr(1))));
}

std::string ExactText(double value) {
  std::array<char, 32> text;
  return {text.data(), std::to_chars(text.data(), text.data() + text.size(), value).ptr};
}

absl::Status RequireSame(ddp::ProcessGroup& group, absl::string_view mine, absl::string_view remedy) {
  const absl::StatusOr<std::vector<std::string>> all = ddp::GatherStrings(group, mine);
  if (!all.ok()) return all.status();
  const std::vector<std::string> first = absl::StrSplit(all->front(), '\n');
  for (size_t rank = 1; rank < all->size(); ++rank) {
    const std::vector<std::string> other = absl::StrSplit((*all)[rank], '\n');
    if (other == first) continue;
    size_t line = 0;
    while (line + 1 < std::min(first.size(), other.size()) && first[line] == other[line]) ++line;
    return Agreed(absl::FailedPreconditionError(
        absl::StrCat("rank ", rank, " has ", other[line], ", rank 0 has ", first[line], "; ", remedy)));
  }
  return absl::OkStatus();
}

absl::Status EndTogether(ddp::ProcessGroup& group, absl::FunctionRef<absl::Status()> what) {
  absl::Status status;
  try {
    status = what();
  } catch (const std::bad_alloc&) {
    status = absl::ResourceExhaustedError("not enough memory; give a smaller model or --batch");
  } catch (const nn::SyncError& e) {
    status = e.status();
  } catch (const nn::DeviceError& e) {
    status = absl::InternalError(e.what());
  } catch (const std::invalid_argument& e) {  // a batch that a layer cannot compute
    status = absl::InvalidArgumentError(e.what());
  }
  if (!status.ok() && !IsAgreed(status)) group.Abort(status);
  return status;
}

absl::StatusOr<StepNotice> StepNotice::Create(ddp::ProcessGroup& group) {
  absl::StatusOr<ddp::Allocation> memory = group.Allocate(sizeof(int32_t), ddp::Device{});
  if (!memory.ok()) return memory.status();
  return StepNotice(group, *std::move(memory));
}

StepNotice::~StepNotice() {
  if (work_.Done()) return;
  group_->Abort(absl::AbortedError("a StepNotice was destroyed in the middle of a step"));
  work_.Wait().IgnoreError();
}

absl::Status StepNotice::Begin(int32_t mine) {
  *static_cast<int32_t*>(memory_.data()) = mine;
  const ddp::Buffer buffer = memory_.View(ddp::DType::kInt32, 0, 1);
  work_ = group_->AllReduce(buffer, buffer, {.op = ddp::ReduceOp::kMax});
  return work_.call_status();
}

absl::StatusOr<int32_t> StepNotice::End() {
  if (absl::Status status = work_.Wait(); !status.ok()) return status;
  return *static_cast<const int32_t*>(memory_.data());
}

}  // namespace examples
