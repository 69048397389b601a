// SPDX-License-Identifier: Apache-2.0
// Checkpoints: whatever their bytes, either they are loaded, and hold numbers that a training can have, or one line
// tells what is wrong and nothing has been touched. Once as they are, and once with the checksum that fits them, behind
// which no fuzzer would ever get.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "examples/train/checkpoint.h"
#include "examples/train/sha256.h"

namespace {

void Require(bool condition) {
  if (!condition) std::abort();
}

void Decode(absl::Span<const uint8_t> file) {
  constexpr float kUntouched = -7;
  std::vector<float> weight(12, kUntouched), bias(3, kUntouched);
  const std::vector<examples::Tensor> tensors = {{"1.weight", {3, 4}, absl::MakeSpan(weight)},
                                                 {"1.bias", {3}, absl::MakeSpan(bias)}};
  const absl::StatusOr<examples::Progress> progress = examples::DecodeCheckpoint(file, "sgd", tensors);
  if (progress.ok()) {
    Require(progress->step >= 0 && progress->epoch >= 0 && progress->epoch_samples >= 0);
    Require(progress->train_samples >= 0 && progress->optimizer_steps >= 0 && progress->loss_steps >= 0);
    Require(std::isfinite(progress->lr) && std::isfinite(progress->loss_sum));
    return;
  }
  Require(absl::IsInvalidArgument(progress.status()) || absl::IsDataLoss(progress.status()) ||
          absl::IsFailedPrecondition(progress.status()));
  Require(!progress.status().message().empty());
  // Nothing that a terminal would obey.
  for (const char c : progress.status().message()) Require(static_cast<uint8_t>(c) >= ' ' && c != 0x7f);
  const auto untouched = [](float value) { return value == kUntouched; };
  Require(std::all_of(weight.begin(), weight.end(), untouched) && std::all_of(bias.begin(), bias.end(), untouched));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Decode({data, size});
  examples::Sha256 sha;
  sha.Update(data, size);
  const examples::Sha256::Digest digest = sha.Finish();
  std::vector<uint8_t> sealed(data, data + size);
  sealed.insert(sealed.end(), digest.begin(), digest.end());
  Decode(sealed);
  return 0;
}
