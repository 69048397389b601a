// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/nccl/api.h"

#include <atomic>

#include "absl/strings/str_cat.h"

namespace ddp::nccl {
namespace {

constexpr int kOldest = 21800;
constexpr int kFirstWithWindows = 22700;
// Of a reduce-scatter. Up to 2.32.3 there are none for the average of an all-reduce on registered memory, but NCCL
// looks for them and fails with "invalid device function": not to be asked for.
constexpr int kFirstWithSymmetricAvg = 23003;
// What NCCL 2.28.3 makes one symmetric kernel of, it sums in part only: fixed in 2.28.7.
constexpr int kFirstThatFuses = 22800, kFirstThatFusesWell = 22807;
constexpr int kFirstWithSymmetricAbort = 22902;

std::string VersionText(int version) {
  return absl::StrCat(version / 10000, ".", version / 100 % 100, ".", version % 100);
}

std::atomic<bool> started{false};

}  // namespace

bool Started() { return started.load(); }
void MarkStarted() { started.store(true); }

std::string Features::version_text() const { return VersionText(version); }

absl::StatusOr<Features> FeaturesOf(const Api& api) {
  Features features;
  if (api.GetVersion(&features.version) != kSuccess) {
    return absl::InternalError("ncclGetVersion failed: the NCCL library is damaged, install it again");
  }
  if (features.version < kOldest) {
    // Before 2.9 the number had one digit less for the minor version.
    return absl::FailedPreconditionError(absl::StrCat(
        "NCCL ",
        features.version < 10000 ? absl::StrCat(features.version / 1000, ".", features.version / 100 % 10)
                                 : VersionText(features.version),
        " is too old: libddp needs 2.18 or newer (package libnccl2, or name another by DDP_NCCL_LIBRARY)"));
  }
  features.windows = features.version >= kFirstWithWindows && api.MemAlloc != nullptr && api.MemFree != nullptr &&
                     api.CommWindowRegister != nullptr && api.CommWindowDeregister != nullptr;
  features.avg_keeps_symmetric = features.version >= kFirstWithSymmetricAvg;
  features.groups_of_sums = features.version < kFirstThatFuses || features.version >= kFirstThatFusesWell;
  features.symmetric_abort = features.version >= kFirstWithSymmetricAbort;
  return features;
}

DataType ToNccl(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return kFloat64;
    case DType::kFloat32:
      return kFloat32;
    case DType::kFloat16:
      return kFloat16;
    case DType::kBFloat16:
      return kBfloat16;
    case DType::kInt64:
      return kInt64;
    case DType::kInt32:
      return kInt32;
    case DType::kInt8:
      return kInt8;
    case DType::kUInt8:
      return kUint8;
  }
  return kUint8;
}

}  // namespace ddp::nccl
