// SPDX-License-Identifier: Apache-2.0
// CIFAR-10's binary files: whatever their bytes, either images that are the file's, or one line that tells what is
// wrong and nothing has been added. The first two bytes say how often the rest is repeated, so that whole images are
// met.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "examples/data/cifar.h"

namespace {

void Require(bool condition) {
  if (!condition) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) return 0;
  const size_t repeats = 1 + (data[0] | size_t{data[1]} << 8) % 6146;
  std::vector<uint8_t> file;
  for (size_t i = 0; i < repeats && file.size() < 100000; ++i) file.insert(file.end(), data + 2, data + size);
  examples::Images images;
  images.labels = {7};
  images.pixels.assign(3072, 1);
  const absl::StatusOr<size_t> count = examples::DecodeCifar(file, images);
  if (count.ok()) {
    Require(*count > 0 && *count * 3073 == file.size());
    Require(images.labels.size() == 1 + *count && images.pixels.size() == images.labels.size() * 3072);
    for (const uint8_t label : images.labels) Require(label < 10);
    Require(images.pixels.back() == file.back());
  } else {
    Require(absl::IsInvalidArgument(count.status()));
    Require(!count.status().message().empty() && count.status().message().find('\n') == absl::string_view::npos);
    Require(images.labels.size() == 1 && images.pixels.size() == 3072);
  }
  return 0;
}
