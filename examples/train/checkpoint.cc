// SPDX-License-Identifier: Apache-2.0
#include "examples/train/checkpoint.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "examples/data/file.h"
#include "examples/train/sha256.h"

namespace examples {
namespace {

static_assert(std::endian::native == std::endian::little, "the file is written as memory is laid out");

using nlohmann::json;

constexpr absl::string_view kMagic = "DDPCKPT\n";
constexpr uint32_t kVersion = 2;
constexpr size_t kFixedBytes = 16;  // magic, version, header length

// The numbers of a Progress by their names in the header; one table of a kind for both directions.
template <typename T>
struct Field {
  const char* name;
  T Progress::*member;
  bool optional = false;  // left out where it is 0
};
constexpr Field<int64_t> kCounts[] = {
    {"step", &Progress::step},
    {"epoch", &Progress::epoch},
    {"epoch_samples", &Progress::epoch_samples},
    {"seed", &Progress::seed},
    {"train_samples", &Progress::train_samples},
    {"optimizer_steps", &Progress::optimizer_steps},
    {"drop_last", &Progress::drop_last},
    {"loss_steps", &Progress::loss_steps},
    {"growth_tracker", &Progress::growth_tracker, true},
};
constexpr Field<double> kReals[] = {
    {"loss_sum", &Progress::loss_sum},           {"lr", &Progress::lr},
    {"momentum", &Progress::momentum},           {"weight_decay", &Progress::weight_decay},
    {"loss_scale", &Progress::loss_scale, true},
};

std::string EncodeHeader(const std::string& optimizer, const Progress& progress, absl::Span<const Tensor> tensors,
                         const std::string& environment) {
  json header;
  header["optimizer"] = optimizer;
  const auto write = [&](const auto& field) {
    if (!field.optional || progress.*field.member != 0) header["progress"][field.name] = progress.*field.member;
  };
  for (const auto& field : kCounts) write(field);
  for (const auto& field : kReals) write(field);
  header["tensors"] = json::array();
  for (const Tensor& tensor : tensors) header["tensors"].push_back({{"name", tensor.name}, {"shape", tensor.shape}});
  if (!environment.empty()) header["environment"] = json::parse(environment);
  return header.dump();
}

// Throw where the header has another form; get<int64_t>() would also take true and 1e300.
int64_t WholeNumber(const json& value) { return value.get_ref<const json::number_integer_t&>(); }
const json::array_t& List(const json& value) { return value.get_ref<const json::array_t&>(); }
double RealNumber(const json& value) { return value.get_ref<const json::number_float_t&>(); }

// A file may say anything; a message is one line.
std::string Word(const json& text) { return absl::Utf8SafeCHexEscape(text.get_ref<const std::string&>()); }

std::string Describe(absl::string_view name, absl::Span<const int64_t> shape) {
  return absl::StrCat(name, " [", absl::StrJoin(shape, ", "), "]");
}

absl::Status Damaged(absl::string_view what) {
  return absl::DataLossError(absl::StrCat(what, "; take an older copy of it, or start without --resume"));
}

absl::Status OtherTraining(absl::string_view what) {
  return absl::FailedPreconditionError(
      absl::StrCat(what, "; give the flags that it was saved with, or start without --resume"));
}

absl::Status CompareTensors(const json::array_t& saved, absl::Span<const Tensor> tensors) {
  for (size_t i = 0; i < std::min(saved.size(), tensors.size()); ++i) {
    const std::string name = Word(saved[i].at("name"));
    std::vector<int64_t> shape;
    for (const json& size : List(saved[i].at("shape"))) shape.push_back(WholeNumber(size));
    if (name != tensors[i].name || shape != tensors[i].shape) {
      return OtherTraining(absl::StrCat("it was saved from another model: it holds ", Describe(name, shape), " where ",
                                        Describe(tensors[i].name, tensors[i].shape), " is expected"));
    }
  }
  if (saved.size() > tensors.size()) {
    return OtherTraining(absl::StrCat("it was saved from another model or optimizer: it also holds ",
                                      Word(saved[tensors.size()].at("name"))));
  }
  if (saved.size() < tensors.size()) {
    return OtherTraining(
        absl::StrCat("it was saved from another model or optimizer: it does not hold ", tensors[saved.size()].name));
  }
  return absl::OkStatus();
}

// Throws json::exception where the header has another form.
absl::StatusOr<Progress> ReadHeader(const json& header, const std::string& optimizer,
                                    absl::Span<const Tensor> tensors) {
  const std::string saved_optimizer = Word(header.at("optimizer"));
  if (saved_optimizer != optimizer) {
    return OtherTraining(
        absl::StrCat("it was saved with --optimizer=", saved_optimizer, ", this run has --optimizer=", optimizer));
  }
  if (absl::Status status = CompareTensors(List(header.at("tensors")), tensors); !status.ok()) return status;
  Progress progress;
  const json& numbers = header.at("progress");
  const auto missing = [&](const auto& field) { return field.optional && !numbers.contains(field.name); };
  for (const auto& field : kReals) {
    if (!missing(field)) progress.*field.member = RealNumber(numbers.at(field.name));
  }
  for (const auto& field : kCounts) {
    if (missing(field)) continue;
    const int64_t number = WholeNumber(numbers.at(field.name));
    // Any 64 bits are a seed.
    if (number < 0 && field.member != &Progress::seed) return Damaged(absl::StrCat("its ", field.name, " is ", number));
    progress.*field.member = number;
  }
  return progress;
}

}  // namespace

absl::Status SaveCheckpoint(AtomicFile& file, const std::string& optimizer, const Progress& progress,
                            absl::Span<const Tensor> tensors, const std::string& environment) {
  if (absl::Status s = file.Begin(); !s.ok()) return s;
  Sha256 sha;
  const auto write = [&](const void* data, size_t size) {
    sha.Update(data, size);
    return file.Write(data, size);
  };

  const std::string header = EncodeHeader(optimizer, progress, tensors, environment);
  const uint32_t numbers[] = {kVersion, static_cast<uint32_t>(header.size())};
  if (absl::Status s = write(kMagic.data(), kMagic.size()); !s.ok()) return s;
  if (absl::Status s = write(numbers, sizeof(numbers)); !s.ok()) return s;
  if (absl::Status s = write(header.data(), header.size()); !s.ok()) return s;
  for (const Tensor& tensor : tensors) {
    if (absl::Status s = write(tensor.data.data(), tensor.data.size() * sizeof(float)); !s.ok()) return s;
  }
  const Sha256::Digest digest = sha.Finish();
  if (absl::Status s = file.Write(digest.data(), digest.size()); !s.ok()) return s;
  return file.Commit();
}

absl::StatusOr<Progress> DecodeCheckpoint(absl::Span<const uint8_t> file, const std::string& optimizer,
                                          absl::Span<const Tensor> tensors) {
  if (file.size() < kMagic.size() || std::memcmp(file.data(), kMagic.data(), kMagic.size()) != 0) {
    return absl::InvalidArgumentError("it is not a checkpoint of this program; give --resume a file that --save wrote");
  }
  if (file.size() < kFixedBytes) return Damaged("it is truncated");
  uint32_t numbers[2];
  std::memcpy(numbers, file.data() + kMagic.size(), sizeof(numbers));
  if (numbers[0] != kVersion) {
    return absl::FailedPreconditionError(absl::StrCat("it has format version ", numbers[0],
                                                      ", this program reads version ", kVersion,
                                                      "; resume with the program that saved it"));
  }
  // Nothing but the checksum vouches for the rest, so that comes first.
  if (file.size() < kFixedBytes + sizeof(Sha256::Digest)) return Damaged("it is truncated");
  const absl::Span<const uint8_t> content = file.first(file.size() - sizeof(Sha256::Digest));
  Sha256 sha;
  sha.Update(content.data(), content.size());
  const Sha256::Digest digest = sha.Finish();
  if (!std::equal(digest.begin(), digest.end(), content.end())) {
    return Damaged("it is truncated or damaged: its checksum does not fit");
  }

  absl::Span<const uint8_t> rest = content.subspan(kFixedBytes);
  if (numbers[1] > rest.size()) return Damaged("its header is longer than the file");
  absl::StatusOr<Progress> progress;
  try {
    progress = ReadHeader(json::parse(rest.data(), rest.data() + numbers[1]), optimizer, tensors);
  } catch (const json::exception&) {
    return Damaged("its header is not of the form that this program writes");
  }
  if (!progress.ok()) return progress;
  rest.remove_prefix(numbers[1]);
  size_t bytes = 0;
  for (const Tensor& tensor : tensors) bytes += tensor.data.size() * sizeof(float);
  if (rest.size() != bytes) {
    return Damaged(absl::StrCat("it holds ", rest.size(), " bytes of tensors where ", bytes, " are expected"));
  }
  for (const Tensor& tensor : tensors) {
    const size_t size = tensor.data.size() * sizeof(float);
    std::memcpy(tensor.data.data(), rest.data(), size);
    rest.remove_prefix(size);
  }
  return progress;
}

absl::StatusOr<Progress> LoadCheckpoint(const std::string& path, const std::string& optimizer,
                                        absl::Span<const Tensor> tensors) {
  const absl::StatusOr<std::vector<uint8_t>> file = ReadFile(path);
  if (!file.ok()) {
    return absl::Status(file.status().code(), absl::StrCat("cannot resume: ", file.status().message(),
                                                           "; give --resume a file that --save wrote"));
  }
  absl::StatusOr<Progress> progress = DecodeCheckpoint(*file, optimizer, tensors);
  if (progress.ok()) return progress;
  return absl::Status(progress.status().code(),
                      absl::StrCat("cannot resume from ", path, ": ", progress.status().message()));
}

}  // namespace examples
