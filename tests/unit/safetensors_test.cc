// SPDX-License-Identifier: Apache-2.0
// Weights in safetensors files: round trips, and what is refused.
#include "examples/train/safetensors.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "examples/data/file.h"
#include "tests/support/catch.h"
#include "tests/support/temporary_folder.h"

namespace examples {
namespace {

// A model's weights, which begin as `first`, first + 1, ...
struct Weights {
  explicit Weights(float first) : weight(6), variance(2) {
    for (float& value : weight) value = first++;
    for (float& value : variance) value = first++;
  }
  std::vector<Tensor> tensors() {
    return {{"3.weight", {2, 3}, absl::MakeSpan(weight)}, {"3.running_var", {2}, absl::MakeSpan(variance)}};
  }
  std::vector<float> weight, variance;
};

std::vector<uint8_t> File(const std::string& header, size_t data_bytes) {
  const uint64_t length = header.size();
  std::vector<uint8_t> file(sizeof(length) + header.size() + data_bytes, 1);
  std::memcpy(file.data(), &length, sizeof(length));
  std::copy(header.begin(), header.end(), file.begin() + sizeof(length));
  return file;
}

std::string ErrorOf(const std::vector<uint8_t>& file) {
  Weights weights(5), same(5);
  const absl::Status status = DecodeSafetensors(file, weights.tensors());
  CHECK(weights.weight == same.weight);
  CHECK(weights.variance == same.variance);
  return std::string(status.message());
}

struct TemporaryFile {
  const ddp::testing::TemporaryFolder folder = {};
  const std::string file = folder.File("weights");
};

TEST_CASE("What is saved is loaded again, bit for bit, and other programs find what they look for") {
  const TemporaryFile temporary;
  Weights saved(1.5f), loaded(100);
  saved.weight[2] = NAN;
  saved.weight[3] = -0.0f;
  REQUIRE(SaveSafetensors(**AtomicFile::Create(temporary.file), saved.tensors(), 42).ok());
  REQUIRE(LoadSafetensors(temporary.file, loaded.tensors()).ok());
  CHECK(std::memcmp(saved.weight.data(), loaded.weight.data(), 6 * sizeof(float)) == 0);
  CHECK(saved.variance == loaded.variance);

  const std::vector<uint8_t> bytes = ReadFile(temporary.file).value();
  uint64_t length;
  std::memcpy(&length, bytes.data(), 8);
  CHECK(length % 8 == 0);
  const auto header = nlohmann::json::parse(bytes.data() + 8, bytes.data() + 8 + length);
  CHECK(header.at("3.num_batches_tracked").at("dtype") == "I64");
  CHECK(header.at("3.num_batches_tracked").at("shape").empty());
  CHECK(header.at("3.weight").at("data_offsets") == std::vector<int>{8, 32});
  int64_t batches;
  std::memcpy(&batches, bytes.data() + 8 + length, 8);
  CHECK(batches == 42);
  CHECK(bytes.size() == 8 + length + 8 + 24 + 8);
  for (size_t size = 0; size < bytes.size(); ++size) {
    CHECK(!ErrorOf({bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(size)}).empty());
  }
}

TEST_CASE("The order of tensors and of keys does not matter") {
  Weights weights(0);
  const std::string header = R"({"3.running_var":{"shape":[2],"data_offsets":[0,8],"dtype":"F32"},)"
                             R"("__metadata__":{"a":"b"},)"
                             R"("3.weight":{"data_offsets":[8,32],"dtype":"F32","shape":[2,3]}}   )";
  REQUIRE(DecodeSafetensors(File(header, 32), weights.tensors()).ok());
  CHECK(weights.weight[0] != 0);
  CHECK(weights.variance[1] != 7);
}

TEST_CASE("Files of another model, or type, or damaged ones are refused with nothing touched") {
  const std::string weight = R"("3.weight":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]})";
  const std::string variance = R"("3.running_var":{"dtype":"F32","shape":[2],"data_offsets":[24,32]})";
  const auto error = [&](const std::string& entries, size_t bytes = 32) {
    return ErrorOf(File(absl::StrCat("{", entries, "}"), bytes));
  };
  CHECK(absl::StrContains(error(weight, 24), "does not hold 3.running_var; give the weights of this --model"));
  CHECK(absl::StrContains(
      error(weight + "," + variance + R"(,"x":{"dtype":"F32","shape":[],"data_offsets":[32,36]})", 36),
      "it also holds x"));
  CHECK(absl::StrContains(error(R"("3.weight":{"dtype":"F32","shape":[3,2],"data_offsets":[0,24]},)" + variance),
                          "its 3.weight is [3, 2] where [2, 3] is expected"));
  CHECK(absl::StrContains(error(R"("3.weight":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,24]},)" + variance),
                          "its 3.weight is of type BF16 where F32 is expected"));
  CHECK(absl::StrContains(error(weight + "," + variance, 31), "3.running_var lies in bytes 24 to 32 of 31"));
  CHECK(absl::StrContains(error(weight + "," + variance, 40), "8 bytes follow its last tensor"));
  CHECK(absl::StrContains(error(R"("3.weight":{"dtype":"F32","shape":[2,3],"data_offsets":[0,25]})", 25),
                          "its 3.weight has 25 bytes"));
  for (const char* bad : {R"("3.weight":[])", R"("3.weight":{"dtype":"F32"})", R"("3.weight":)", "\xff",
                          R"("3.weight":{"dtype":"F32","shape":[-2,3],"data_offsets":[0,24]})",
                          R"("3.weight":{"dtype":"F32","shape":[2.0,3],"data_offsets":[0,24]})",
                          R"("3.weight":{"dtype":7,"shape":[2,3],"data_offsets":[0,24]})"}) {
    CHECK(absl::StrContains(error(bad), "no safetensors file: its header is not of that form"));
  }
  CHECK(absl::StrContains(ErrorOf({1, 2, 3}), "no safetensors file, or truncated"));
  CHECK(absl::StrContains(ErrorOf(std::vector<uint8_t>(16, 255)), "its header would take 18446744073709551615 of 8"));
  Weights weights(0);
  CHECK(absl::StrContains(LoadSafetensors("/nowhere/w", weights.tensors()).message(), "--init_weights=/nowhere/w: "));
}

}  // namespace
}  // namespace examples
