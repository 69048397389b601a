// SPDX-License-Identifier: Apache-2.0
// The reader of CIFAR-10: what it reads, and what it refuses.
#include "examples/data/cifar.h"

#include <cstdio>
#include <filesystem>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/support/catch.h"
#include "tests/support/temporary_folder.h"

namespace examples {
namespace {

using Bytes = std::vector<uint8_t>;

// Images whose first pixel of each channel says which they are.
Bytes File(size_t images, uint8_t first) {
  Bytes bytes;
  for (size_t i = 0; i < images; ++i) {
    bytes.push_back(static_cast<uint8_t>((first + i) % 10));
    Bytes pixels(3072, 100);
    for (size_t channel = 0; channel < 3; ++channel) pixels[channel * 1024] = static_cast<uint8_t>(first + i + channel);
    bytes.insert(bytes.end(), pixels.begin(), pixels.end());
  }
  return bytes;
}

std::string ErrorOf(const Bytes& file) {
  Images images;
  const absl::StatusOr<size_t> count = DecodeCifar(file, images);
  CHECK(images.labels.empty());
  CHECK(images.pixels.empty());
  return count.ok() ? "" : std::string(count.status().message());
}

class Folder : public ddp::testing::TemporaryFolder {
 public:
  Folder() {
    for (int i = 1; i <= 5; ++i)
      Write(absl::StrCat("data_batch_", i, ".bin"), examples::File(2, static_cast<uint8_t>(10 * i)));
    Write("test_batch.bin", examples::File(2, 60));
  }
  std::string Error() const { return std::string(LoadDataset(path()).status().message()); }
};

TEST_CASE("Images are added as they are in the file") {
  Images images;
  REQUIRE(DecodeCifar(File(3, 4), images).value() == 3);
  REQUIRE(DecodeCifar(File(1, 9), images).value() == 1);
  CHECK(images.labels == std::vector<uint16_t>{4, 5, 6, 9});
  REQUIRE(images.pixels.size() == 4 * 3072);
  CHECK(images.pixels[3072] == 5);
  CHECK(images.pixels[3072 + 2048] == 7);
}

TEST_CASE("Files that are none of CIFAR-10's are refused in one line") {
  CHECK(ErrorOf({}) == "it is empty");
  Bytes cut = File(2, 0);
  cut.pop_back();
  CHECK(absl::StrContains(ErrorOf(cut), "truncated, or no binary file of CIFAR-10: 6145 bytes"));
  CHECK(absl::StrContains(ErrorOf(Bytes(3074 * 5)), "CIFAR-100"));
  Bytes wrong = File(3, 0);
  wrong[2 * 3073] = 10;
  CHECK(absl::StrContains(ErrorOf(wrong), "image 2 has the label 10 where 0 to 9 are expected"));
}

TEST_CASE("A folder is read whole, itself or as the archive unpacks") {
  const Folder folder;
  for (const bool nested : {false, true}) {
    if (nested) {
      std::filesystem::create_directory(folder.path() + "/cifar-10-batches-bin");
      for (const char* name : {"data_batch_1.bin", "data_batch_2.bin", "data_batch_3.bin", "data_batch_4.bin",
                               "data_batch_5.bin", "test_batch.bin"}) {
        std::filesystem::rename(absl::StrCat(folder.path(), "/", name),
                                absl::StrCat(folder.path(), "/cifar-10-batches-bin/", name));
      }
    }
    const absl::StatusOr<Dataset> data = LoadDataset(folder.path());
    REQUIRE(data.ok());
    CHECK(data->channels == 3);
    CHECK(data->features() == 3072);
    CHECK(data->train.count() == 10);
    CHECK(data->test.count() == 2);
    CHECK(data->mirrored_alike);
    CHECK(data->train.pixels[5 * 3072] == 31);
    CHECK(data->mean.size() == 3);
  }
}

TEST_CASE("A folder with a file that is missing, damaged, or shorter than the others is refused by its name") {
  Folder folder;
  std::filesystem::remove(folder.path() + "/data_batch_3.bin");
  CHECK(absl::StrContains(folder.Error(), "no data_batch_3.bin in the folder"));
  folder.Write("data_batch_3.bin", File(1, 0));
  CHECK(
      absl::StrContains(folder.Error(), "data_batch_1.bin has 2 images, data_batch_3.bin has 1; one of them is trunc"));
  folder.Write("data_batch_3.bin", Bytes{1, 2, 3});
  CHECK(absl::StrContains(folder.Error(), "data_batch_3.bin: it is truncated, or no binary file of CIFAR-10"));
  CHECK(absl::StrContains(folder.Error(), "download it again"));
}

}  // namespace
}  // namespace examples
