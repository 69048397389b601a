// SPDX-License-Identifier: Apache-2.0
// What a training's summary says, in words and as JSON.
#include "examples/train/summary.h"

#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/strings/match.h"
#include "tests/support/catch.h"
#include "tests/support/temporary_folder.h"

namespace {

TEST_CASE("a training is at most the whole of what large products reach") {
  examples::Summary summary;
  summary.measured_steps = 1;
  summary.flops_per_sample = 1'000'000'000;
  summary.samples_per_second = 8;
  const ddp::testing::TemporaryFolder folder;
  const std::string path = folder.path() + "/summary.json";
  const auto operations = [&] {
    REQUIRE(examples::WriteJson(summary, path).ok());
    return nlohmann::json::parse(std::ifstream(path))["operations"];
  };
  SECTION("a part of it") {
    summary.product_flops_per_second = 16e9;
    CHECK(operations()["share_of_products"] == 0.5);
    CHECK_FALSE(operations().contains("why_no_share"));
    CHECK(
        absl::StrContains(examples::ToText(summary), "8 GFLOP/s (only products and convolutions are counted): 50.0 %"));
  }
  SECTION("more than that") {
    summary.product_flops_per_second = 4e9;
    CHECK_FALSE(operations().contains("share_of_products"));
    CHECK(operations()["product_flops_per_second"] == 4e9);
    CHECK(operations()["why_no_share"] == "large matrix products, measured after the training, were slower");
    CHECK(
        absl::StrContains(examples::ToText(summary),
                          "no share is given, as large matrix products, measured after the training, were slower (4"));
  }
}

}  // namespace
