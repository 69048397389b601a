// SPDX-License-Identifier: Apache-2.0
#include "examples/data/cifar.h"

#include <unistd.h>

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "examples/data/file.h"

namespace examples {
namespace {

constexpr size_t kCifarPixels = 3 * 32 * 32;
constexpr size_t kRecord = 1 + kCifarPixels;
constexpr size_t kCifar100Record = 2 + kCifarPixels;
constexpr int kCifar10Classes = 10;
constexpr absl::string_view kFirstFile = "data_batch_1.bin";

absl::StatusOr<size_t> ReadCifarFile(const std::string& folder, const std::string& name, Images& images) {
  const std::string path = absl::StrCat(folder, "/", name);
  const absl::StatusOr<std::vector<uint8_t>> file = ReadFile(path);
  if (absl::IsNotFound(file.status())) {
    return absl::NotFoundError(absl::StrCat("no ", name, " in the folder ", folder,
                                            ": give --data a folder with CIFAR-10's six binary files"));
  }
  if (!file.ok()) return file.status();
  const absl::StatusOr<size_t> count = DecodeCifar(*file, images);
  if (count.ok()) return count;
  return absl::InvalidArgumentError(
      absl::StrCat("cannot use ", path, ": ", count.status().message(), "; copy or download it again"));
}

}  // namespace

absl::StatusOr<size_t> DecodeCifar(absl::Span<const uint8_t> file, Images& images) {
  if (file.empty()) return absl::InvalidArgumentError("it is empty");
  if (file.size() % kRecord != 0) {
    if (file.size() % kCifar100Record == 0) {
      return absl::InvalidArgumentError("it is a file of CIFAR-100, which has two labels an image, not of CIFAR-10");
    }
    return absl::InvalidArgumentError(absl::StrCat("it is truncated, or no binary file of CIFAR-10: ", file.size(),
                                                   " bytes are not a whole number of images of ", kRecord));
  }
  const size_t count = file.size() / kRecord;
  for (size_t i = 0; i < count; ++i) {
    if (file[i * kRecord] < kCifar10Classes) continue;
    return absl::InvalidArgumentError(absl::StrCat("it is damaged, or no binary file of CIFAR-10: image ", i,
                                                   " has the label ", int{file[i * kRecord]}, " where 0 to ",
                                                   kCifar10Classes - 1, " are expected"));
  }
  for (absl::Span<const uint8_t> rest = file; !rest.empty(); rest.remove_prefix(kRecord)) {
    images.labels.push_back(rest[0]);
    images.pixels.insert(images.pixels.end(), rest.begin() + 1, rest.begin() + kRecord);
  }
  return count;
}

std::string FindCifarFolder(const std::string& folder) {
  for (const std::string& candidate : {folder, absl::StrCat(folder, "/cifar-10-batches-bin")}) {
    if (access(absl::StrCat(candidate, "/", kFirstFile).c_str(), F_OK) == 0) return candidate;
  }
  return "";
}

absl::StatusOr<Dataset> LoadCifarFolder(const std::string& folder) {
  Dataset dataset;
  dataset.name = folder;
  dataset.channels = 3;
  dataset.height = dataset.width = 32;
  dataset.classes = kCifar10Classes;
  dataset.mirrored_alike = true;
  size_t expected = 0;  // as many as in the first file
  for (int i = 1; i <= 6; ++i) {
    const std::string name = i <= 5 ? absl::StrCat("data_batch_", i, ".bin") : "test_batch.bin";
    const absl::StatusOr<size_t> count = ReadCifarFile(folder, name, i <= 5 ? dataset.train : dataset.test);
    if (!count.ok()) return count.status();
    if (i == 1) expected = *count;
    if (*count != expected) {
      return absl::InvalidArgumentError(absl::StrCat("cannot use the folder ", folder, ": ", kFirstFile, " has ",
                                                     expected, " images, ", name, " has ", *count,
                                                     "; one of them is truncated, fetch them anew"));
    }
  }
  Normalize(dataset);
  return dataset;
}

}  // namespace examples
