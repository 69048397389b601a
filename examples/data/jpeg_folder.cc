// SPDX-License-Identifier: Apache-2.0
#include "examples/data/jpeg_folder.h"

#include <algorithm>
#include <filesystem>
#include <limits>
#include <map>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "examples/data/jpeg.h"

namespace examples {
namespace {

namespace fs = std::filesystem;

// ImageNet's, of red, green, blue; and of their mean.
constexpr float kMean[] = {123.675f, 116.28f, 103.53f}, kDeviation[] = {58.395f, 57.12f, 57.375f};
constexpr float kGreyMean = 114.495f, kGreyDeviation = 57.63f;

using Classes = std::map<std::string, std::vector<std::string>>;  // files by class, sorted

absl::Status Refuse(const std::string& path, absl::string_view why) {
  return absl::InvalidArgumentError(absl::StrCat("cannot use ", path, ": ", why));
}

bool IsHidden(const fs::path& path) { return path.filename().string()[0] == '.'; }

absl::StatusOr<std::vector<std::string>> ListFiles(const fs::path& folder) {
  std::vector<std::string> files;
  std::error_code error;
  for (fs::recursive_directory_iterator it(folder, fs::directory_options::follow_directory_symlink, error), end;
       !error && it != end; it.increment(error)) {
    if (IsHidden(it->path())) {
      it.disable_recursion_pending();  // what an editor or a notebook keeps beside the images
      continue;
    }
    if (it->is_directory(error)) continue;
    const std::string file = it->path().string();
    if (!absl::EndsWithIgnoreCase(file, ".jpg") && !absl::EndsWithIgnoreCase(file, ".jpeg")) {
      return Refuse(file, "its name is not that of a JPEG file (.jpg, .jpeg); convert or remove it");
    }
    files.push_back(file);
  }
  if (error) return Refuse(folder.string(), error.message());
  if (files.empty()) return Refuse(folder.string(), "a class needs at least one JPEG file; add some or remove it");
  std::sort(files.begin(), files.end());
  return files;
}

absl::StatusOr<Classes> ListClasses(const fs::path& folder) {
  Classes classes;
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    if (!it->is_directory(error) || IsHidden(it->path())) continue;
    absl::StatusOr<std::vector<std::string>> files = ListFiles(it->path());
    if (!files.ok()) return files.status();
    classes[it->path().filename().string()] = *std::move(files);
  }
  if (error) return Refuse(folder.string(), error.message());
  if (classes.empty()) return Refuse(folder.string(), "there must be a folder for each class in it");
  if (classes.size() > std::numeric_limits<uint16_t>::max()) return Refuse(folder.string(), "too many classes");
  return classes;
}

}  // namespace

bool IsJpegFolder(const std::string& folder) {
  std::error_code error;
  return fs::is_directory(fs::path(folder) / "train", error);
}

absl::StatusOr<Dataset> LoadJpegFolder(const std::string& folder, const ImageSize& size) {
  if (!HaveJpeg()) {
    return absl::UnimplementedError(
        absl::StrCat("cannot use ", folder,
                     ": this build reads no JPEG files; install libturbojpeg0-dev, configure "
                     "and build again"));
  }
  const absl::StatusOr<Classes> train = ListClasses(fs::path(folder) / "train");
  if (!train.ok()) return train.status();
  const absl::StatusOr<Classes> test = ListClasses(fs::path(folder) / "val");
  if (!test.ok()) return test.status();
  Dataset data;
  data.name = folder;
  data.channels = size.channels;
  data.height = size.height;
  data.width = size.width;
  data.margin = std::min(size.height, size.width) / 14;  // as 224 pixels are cut out of 256
  data.classes = static_cast<int>(train->size());
  data.mirrored_alike = true;
  for (int channel = 0; channel < size.channels; ++channel) {
    data.mean.push_back(size.channels == 1 ? kGreyMean : kMean[channel]);
    data.deviation.push_back(size.channels == 1 ? kGreyDeviation : kDeviation[channel]);
  }
  for (const auto& [classes, images] : {std::pair(&*train, &data.train), std::pair(&*test, &data.test)}) {
    for (const auto& [name, files] : *classes) {
      const auto found = train->find(name);
      if (found == train->end()) {
        return Refuse(absl::StrCat(folder, "/val/", name), "there is no class of this name in the folder train");
      }
      const auto label = static_cast<uint16_t>(std::distance(train->begin(), found));
      images->files.insert(images->files.end(), files.begin(), files.end());
      images->labels.insert(images->labels.end(), files.size(), label);
    }
  }
  return data;
}

}  // namespace examples
