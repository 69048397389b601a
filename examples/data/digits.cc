// SPDX-License-Identifier: Apache-2.0
#include <iterator>

#include "absl/strings/string_view.h"
#include "examples/data/dataset.h"

namespace examples {
namespace {

constexpr size_t kDigitPixels = 64;

// 64 pixels from 'A' (0) to 'Q' (16), then the label: see make_digits.py.
constexpr char kDigits[][kDigitPixels + 2] = {
#include "examples/data/digits_data.inc"
};
static_assert(std::size(kDigits) == 1797);

void Append(absl::string_view digit, Images& images) {
  for (const char pixel : digit.substr(0, kDigitPixels)) images.pixels.push_back(static_cast<uint8_t>(pixel - 'A'));
  images.labels.push_back(static_cast<uint8_t>(digit[kDigitPixels] - '0'));
}

}  // namespace

Dataset EmbeddedDigits() {
  Dataset dataset;
  dataset.name = "digits (embedded)";
  dataset.height = dataset.width = 8;
  dataset.classes = 10;
  // Every fifth image is for testing: neighbours come from the same writer, so both parts hold every hand.
  for (size_t i = 0; i < std::size(kDigits); ++i) Append(kDigits[i], i % 5 == 0 ? dataset.test : dataset.train);
  Normalize(dataset);
  return dataset;
}

}  // namespace examples
