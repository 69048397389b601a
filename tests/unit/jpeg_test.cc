// SPDX-License-Identifier: Apache-2.0
// Folders of JPEG files: classes, sizes, crops, threads, and what is wrong with them.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "examples/data/dataset.h"
#include "examples/data/sampler.h"
#include "examples/train/batch_loader.h"
#include "tests/support/catch.h"
#include "tests/support/jpeg_files.h"

namespace examples {
namespace {

using ddp::testing::Colour;
using ddp::testing::JpegFolder;
using ddp::testing::MakeJpeg;

constexpr ImageSize kSize = {3, 28, 28};

Dataset Load(const JpegFolder& folder, const ImageSize& size = kSize) {
  const absl::StatusOr<Dataset> data = LoadDataset(folder.path(), size);
  INFO(data.status());
  REQUIRE(data.ok());
  return *data;
}

std::string LoadError(const JpegFolder& folder) {
  return std::string(LoadDataset(folder.path(), kSize).status().message());
}

// The pixels of one image, from 0 to 255 again.
std::vector<float> Pixels(const Dataset& data, const Images& images, uint32_t index, const Augmentation& how = {}) {
  std::vector<float> pixels(static_cast<size_t>(data.features()));
  int32_t label = -1;
  const absl::Status status = GatherBatch(data, images, {index}, how, pixels.data(), &label);
  INFO(status);
  REQUIRE(status.ok());
  CHECK(label == images.labels[index]);
  const size_t plane = pixels.size() / static_cast<size_t>(data.channels);
  for (size_t i = 0; i < pixels.size(); ++i) pixels[i] = pixels[i] * data.deviation[i / plane] + data.mean[i / plane];
  return pixels;
}

bool Near(const std::vector<float>& pixels, const std::vector<int>& wanted, float tolerance) {
  const size_t plane = pixels.size() / wanted.size();
  for (size_t i = 0; i < pixels.size(); ++i) {
    if (std::abs(pixels[i] - static_cast<float>(wanted[i / plane])) > tolerance) return false;
  }
  return true;
}

TEST_CASE("Classes and files have the order of their names, at any depth") {
  const JpegFolder folder;
  const std::string image = MakeJpeg(40, 40, {1, 2, 3});
  for (const char* name :
       {"train/b/2.jpg", "train/b/10.JPEG", "train/a/z.Jpg", "train/a/deep/1.jpg", "train/.hidden/1.txt",
        "train/b/.DS_Store", "train/a/.hidden/1.jpg", "train/a/.hidden/2.txt", "val/b/1.jpeg"}) {
    folder.Write(name, image);
  }
  const Dataset data = Load(folder);
  std::vector<std::string> names;
  for (const std::string& file : data.train.files) names.push_back(file.substr(folder.path().size()));
  CHECK(names ==
        std::vector<std::string>{"/train/a/deep/1.jpg", "/train/a/z.Jpg", "/train/b/10.JPEG", "/train/b/2.jpg"});
  CHECK(data.train.labels == std::vector<uint16_t>{0, 0, 1, 1});
  CHECK(data.test.labels == std::vector<uint16_t>{1});  // as in train, although it is the only class here
  CHECK(data.classes == 2);
  CHECK(data.features() == 3 * 28 * 28);
  CHECK(data.mirrored_alike);
}

TEST_CASE("Images of every size and shape fill the model's") {
  const JpegFolder folder;
  folder.Write("val/a/1.jpg", MakeJpeg(8, 8, {0, 0, 0}));
  int number = 100;
  for (const auto& [width, height] :
       {std::pair(1, 1), {7, 300}, {28, 28}, {33, 32}, {500, 31}, {640, 480}, {1000, 1000}}) {
    folder.Write("train/a/" + std::to_string(number++) + ".jpg", MakeJpeg(width, height, {200, 100, 50}));
  }
  const Dataset colour = Load(folder), grey = Load(folder, {1, 8, 9});
  for (uint32_t i = 0; i < colour.train.count(); ++i) {
    INFO(colour.train.files[i]);
    CHECK(Near(Pixels(colour, colour.train, i), {200, 100, 50}, 2));
    CHECK(Near(Pixels(grey, grey.train, i), {124}, 2));
  }
}

TEST_CASE("The middle is cut out, and crops reach into the margin") {
  const JpegFolder folder;
  const auto thirds = [](int x, int) {
    return x < 32 ? Colour{255, 0, 0} : x < 64 ? Colour{0, 255, 0} : Colour{0, 0, 255};
  };
  // 28 + 2 x 2 pixels of the smaller side are kept, and no more are needed: nothing is scaled.
  folder.Write("train/a/1.jpg", MakeJpeg(96, 32, thirds));
  folder.Write("train/a/2.jpg", MakeJpeg(32, 32, [](int x, int) {
                 return x < 16 ? Colour{0, 0, 0} : Colour{255, 255, 255};
               }));
  folder.Write("val/a/1.jpg", MakeJpeg(96, 32, thirds));
  const Dataset data = Load(folder);
  REQUIRE(data.margin == 2);
  CHECK(Near(Pixels(data, data.train, 0), {0, 255, 0}, 3));
  int mirrored = 0;
  std::set<int> borders;  // where the second image changes from black to white
  for (uint64_t epoch = 0; epoch < 40; ++epoch) {
    const Augmentation augmentation = {.crop_padding = data.margin, .flip = true, .seed = 1, .epoch = epoch};
    CHECK(Near(Pixels(data, data.train, 0, augmentation), {0, 255, 0}, 3));  // never beyond the margin
    const std::vector<float> second = Pixels(data, data.train, 1, augmentation);
    mirrored += second[0] > 128 ? 1 : 0;
    if (second[0] < 128) {
      borders.insert(static_cast<int>(std::find_if(second.begin(), second.end(), [](float p) { return p > 128; }) -
                                      second.begin()));
    }
  }
  CHECK(mirrored > 5);
  CHECK(mirrored < 35);
  CHECK(borders == std::set<int>{12, 13, 14, 15, 16});
}

TEST_CASE("Larger images are averaged, not sampled") {
  const JpegFolder folder;
  const auto columns = [](int x, int) { return x % 2 == 0 ? Colour{0, 0, 0} : Colour{255, 255, 255}; };
  for (const int size : {64, 100, 256, 700}) {
    folder.Write("train/a/" + std::to_string(size) + ".jpg", MakeJpeg(size, size, columns));
  }
  folder.Write("val/a/1.jpg", MakeJpeg(8, 8, {0, 0, 0}));
  const Dataset data = Load(folder);
  for (uint32_t i = 0; i < data.train.count(); ++i) {
    INFO(data.train.files[i]);
    const std::vector<float> pixels = Pixels(data, data.train, i);
    CHECK(Near(pixels, {127, 127, 127}, 40));  // not the 0 and 255 of the file
    const float sum = std::accumulate(pixels.begin(), pixels.end(), 0.0f);
    CHECK(std::abs(sum / static_cast<float>(pixels.size()) - 127.5f) < 3);
  }
}

TEST_CASE("Threads and ranks do not change a bit of a batch") {
  const JpegFolder folder;
  folder.WriteTwoClasses(9, 40);
  const Dataset data = Load(folder);
  REQUIRE(data.train.count() == 18);
  const Augmentation augmentation = {.crop_padding = data.margin, .flip = true};
  // The second global batch of the fourth epoch, all of it and in two parts.
  const auto batch_of = [&](int rank, int ranks, int threads) {
    const SamplerOptions options = {
        .samples = data.train.count(), .batch = 8u / static_cast<unsigned>(ranks), .rank = rank, .world_size = ranks};
    BatchLoader loader(data, options, augmentation, nn::Cpu(), threads);
    loader.Start(3, 1);
    const Batch batch = loader.Next().value();
    return std::vector<float>(batch.pixels, batch.pixels + batch.labels.size() * static_cast<size_t>(data.features()));
  };
  const std::vector<float> whole = batch_of(0, 1, 1);
  CHECK(whole == batch_of(0, 1, 3));
  CHECK(whole == batch_of(0, 1, 20));  // more than there are images
  const std::vector<float> parts[] = {batch_of(0, 2, 2), batch_of(1, 2, 1)};
  const auto features = static_cast<size_t>(data.features());
  for (size_t row = 0; row < 8; ++row) {
    CHECK(std::equal(parts[row % 2].begin() + static_cast<ptrdiff_t>(row / 2 * features),
                     parts[row % 2].begin() + static_cast<ptrdiff_t>((row / 2 + 1) * features),
                     whole.begin() + static_cast<ptrdiff_t>(row * features)));
  }
}

TEST_CASE("A file that is damaged or no JPEG is named when its batch is made") {
  const JpegFolder folder;
  folder.WriteTwoClasses(2, 40);
  const std::string good = MakeJpeg(40, 40, [](int x, int y) {
    return Colour{static_cast<uint8_t>(x * 5), static_cast<uint8_t>(y * 5), 9};
  });
  std::string bytes, why;
  SECTION("cut off") {
    bytes = good.substr(0, good.size() / 2);
    why = "it is damaged (";
  }
  SECTION("only a beginning") {
    bytes = good.substr(0, 20);
    why = "it is damaged (";
  }
  SECTION("empty") { why = "it is no JPEG file; convert or remove it"; }
  SECTION("a PNG file by a wrong name") {
    bytes = "\x89PNG\r\n\x1a\n";
    why = "it is no JPEG file; convert or remove it";
  }
  SECTION("for printers") {
    bytes = MakeJpeg(
        8, 8,
        [](int, int) {
          return Colour{1, 2, 3};
        },
        TJPF_CMYK);
    why = "its colours are CMYK; convert it to RGB";
  }
  folder.Write("train/plain/11.jpg", bytes);
  const Dataset data = Load(folder);
  std::vector<float> pixels(4 * static_cast<size_t>(data.features()));
  std::vector<int32_t> labels(4);
  const std::string wanted = "cannot use the image " + folder.path() + "/train/plain/11.jpg: " + why;
  for (const int threads : {1, 3}) {
    const absl::Status status = GatherBatch(data, data.train, {0, 1, 2, 3}, {}, pixels.data(), labels.data(), threads);
    INFO(status);
    CHECK(absl::StartsWith(status.message(), wanted));
  }
  BatchLoader loader(data, {.samples = 4, .batch = 4}, {});
  loader.Start(0, 0);
  CHECK(absl::StartsWith(loader.Next().status().message(), wanted));
}

TEST_CASE("A file that has gone since is named") {
  const JpegFolder folder;
  folder.WriteTwoClasses(1, 40);
  const Dataset data = Load(folder);
  std::filesystem::remove(data.train.files[1]);
  std::vector<float> pixels(static_cast<size_t>(data.features()));
  int32_t label = 0;
  CHECK(
      absl::StrContains(GatherBatch(data, data.train, {1}, {}, pixels.data(), &label).message(), data.train.files[1]));
}

TEST_CASE("What a folder lacks is said at once") {
  const JpegFolder folder;
  const std::string image = MakeJpeg(8, 8, {1, 2, 3});
  folder.Write("train/a/1.jpg", image);
  CHECK(LoadError(folder) == "cannot use " + folder.path() + "/val: No such file or directory");
  folder.Write("val/README", "");
  CHECK(LoadError(folder) == "cannot use " + folder.path() + "/val: there must be a folder for each class in it");
  folder.Write("val/b/1.jpg", image);
  CHECK(LoadError(folder) ==
        "cannot use " + folder.path() + "/val/b: there is no class of this name in the folder train");
  folder.Write("train/b/notes.txt", "");
  CHECK(LoadError(folder) ==
        "cannot use " + folder.path() +
            "/train/b/notes.txt: its name is not that of a JPEG file (.jpg, .jpeg); convert or remove it");
  std::filesystem::remove(folder.path() + "/train/b/notes.txt");
  CHECK(LoadError(folder) ==
        "cannot use " + folder.path() + "/train/b: a class needs at least one JPEG file; add some or remove it");
}

TEST_CASE("Random damage ends in an image or an error") {
  const JpegFolder folder;
  folder.WriteTwoClasses(1, 40);
  const Dataset data = Load(folder);
  const std::string good = MakeJpeg(24, 24, [](int x, int y) {
    return Colour{static_cast<uint8_t>(x * 9), static_cast<uint8_t>(y * 9), 77};
  });
  std::mt19937 random(1);
  std::vector<float> pixels(static_cast<size_t>(data.features()));
  int32_t label = 0, failed = 0;
  for (int i = 0; i < 300; ++i) {
    std::string bytes = good;
    for (int k = 0; k < 1 + i % 4; ++k) bytes[3 + random() % (bytes.size() - 3)] = static_cast<char>(random());
    folder.Write("train/plain/10.jpg", bytes);
    const absl::Status status = GatherBatch(data, data.train, {0}, {}, pixels.data(), &label);
    failed += status.ok() ? 0 : 1;
    if (!status.ok()) CHECK(absl::StrContains(status.message(), "/train/plain/10.jpg: "));
  }
  CHECK(failed > 30);
  CHECK(failed < 300);
}

}  // namespace
}  // namespace examples
