// SPDX-License-Identifier: Apache-2.0
// Safetensors files: whatever their bytes, either all weights are filled, or one line tells what is wrong and none has
// been touched. Once as a whole file, and once as a header before the data that fits it.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "examples/train/safetensors.h"

namespace {

void Require(bool condition) {
  if (!condition) std::abort();
}

void Decode(absl::Span<const uint8_t> file) {
  constexpr float kUntouched = -7;
  std::vector<float> weight(6, kUntouched), bias(2, kUntouched);
  const std::vector<examples::Tensor> tensors = {{"1.weight", {2, 3}, absl::MakeSpan(weight)},
                                                 {"1.bias", {2}, absl::MakeSpan(bias)}};
  const absl::Status status = examples::DecodeSafetensors(file, tensors);
  if (status.ok()) return;
  Require(absl::IsDataLoss(status) || absl::IsFailedPrecondition(status));
  Require(!status.message().empty());
  // Nothing that a terminal would obey.
  for (const char c : status.message()) Require(static_cast<uint8_t>(c) >= ' ' && c != 0x7f);
  const auto untouched = [](float value) { return value == kUntouched; };
  Require(std::all_of(weight.begin(), weight.end(), untouched) && std::all_of(bias.begin(), bias.end(), untouched));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Decode({data, size});
  const uint64_t length = size;
  std::vector<uint8_t> file(sizeof(length) + size + 32);
  std::memcpy(file.data(), &length, sizeof(length));
  std::copy_n(data, size, file.begin() + sizeof(length));
  Decode(file);
  return 0;
}
