// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <numeric>
#include <set>
#include <string>

#include "examples/data/dataset.h"
#include "tests/support/catch.h"

namespace examples {

TEST_CASE("the embedded digits are the whole of the data set") {
  const Dataset digits = EmbeddedDigits();
  REQUIRE(digits.train.count() == 1437);
  REQUIRE(digits.test.count() == 360);
  REQUIRE(digits.features() == 64);
  REQUIRE(digits.train.pixels.size() == 1437 * 64);
  REQUIRE(digits.test.pixels.size() == 360 * 64);

  // Known of the published data: how often each digit occurs, and the sum of all pixels.
  std::array<int, 10> counts = {};
  uint64_t sum = 0;
  for (const Images* part : {&digits.train, &digits.test}) {
    for (const uint8_t label : part->labels) ++counts.at(label);
    for (const uint8_t pixel : part->pixels) REQUIRE(pixel <= 16);
    sum = std::accumulate(part->pixels.begin(), part->pixels.end(), sum);
  }
  CHECK(counts == std::array<int, 10>{178, 182, 177, 183, 181, 182, 181, 179, 174, 180});
  CHECK(sum == 561718);
}

TEST_CASE("no test image is among those for training") {
  const Dataset digits = EmbeddedDigits();
  std::set<std::string> seen;
  for (size_t i = 0; i < digits.train.count(); ++i) {
    const auto first = digits.train.pixels.begin() + static_cast<std::ptrdiff_t>(i * 64);
    seen.emplace(first, first + 64);
  }
  for (size_t i = 0; i < digits.test.count(); ++i) {
    const auto first = digits.test.pixels.begin() + static_cast<std::ptrdiff_t>(i * 64);
    CHECK(seen.count(std::string(first, first + 64)) == 0);
  }
}

TEST_CASE("the digits are what is trained on when no folder is given") {
  for (const char* source : {"", "digits"}) {
    const absl::StatusOr<Dataset> data = LoadDataset(source);
    REQUIRE(data.ok());
    CHECK(data->train.count() == 1437);
  }
}

}  // namespace examples
