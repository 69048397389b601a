// SPDX-License-Identifier: Apache-2.0
#include "examples/train/safetensors.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "examples/data/file.h"

namespace examples {
namespace {

static_assert(std::endian::native == std::endian::little, "the file is written as memory is laid out");

using nlohmann::json;

constexpr size_t kLengthBytes = 8;
constexpr uint64_t kLongestHeader = 100'000'000;  // as the format's own reader has it
constexpr absl::string_view kCounter = "num_batches_tracked";

absl::Status Damaged(absl::string_view what) {
  return absl::DataLossError(absl::StrCat(what, "; give --init_weights a complete safetensors file"));
}

absl::Status OtherModel(absl::string_view what) {
  return absl::FailedPreconditionError(absl::StrCat(what, "; give the weights of this --model and data"));
}

// Throw where the header has another form; get<uint64_t>() would also take true and 1e300.
uint64_t Size(const json& value) { return value.get_ref<const json::number_unsigned_t&>(); }
const json::array_t& List(const json& value) { return value.get_ref<const json::array_t&>(); }

// A file may say anything; a message is one line.
std::string Word(const std::string& text) { return absl::Utf8SafeCHexEscape(text); }

// A tensor as the header tells of it: bytes [begin, end) of the data.
struct Entry {
  std::string name;
  std::string dtype;
  std::vector<uint64_t> shape;
  uint64_t begin = 0;
  uint64_t end = 0;
};

// Entries in the order of their data, which must follow each other from the beginning to the end of `data_bytes`.
absl::StatusOr<std::vector<Entry>> ReadEntries(const json& header, uint64_t data_bytes) {
  std::vector<Entry> entries;
  for (const auto& [name, value] : header.get_ref<const json::object_t&>()) {
    if (name == "__metadata__") continue;
    Entry entry{name, value.at("dtype").get_ref<const std::string&>(), {}, 0, 0};
    for (const json& size : List(value.at("shape"))) entry.shape.push_back(Size(size));
    const json::array_t& offsets = List(value.at("data_offsets"));
    if (offsets.size() != 2) return Damaged(absl::StrCat(Word(name), " has no begin and end"));
    entry.begin = Size(offsets[0]);
    entry.end = Size(offsets[1]);
    entries.push_back(std::move(entry));
  }
  std::sort(entries.begin(), entries.end(),
            [](const Entry& a, const Entry& b) { return std::pair(a.begin, a.end) < std::pair(b.begin, b.end); });
  uint64_t end = 0;
  for (const Entry& entry : entries) {
    if (entry.begin != end || entry.end < entry.begin || entry.end > data_bytes) {
      return Damaged(absl::StrCat("it is truncated or damaged: ", Word(entry.name), " lies in bytes ", entry.begin,
                                  " to ", entry.end, " of ", data_bytes));
    }
    end = entry.end;
  }
  if (end != data_bytes) return Damaged(absl::StrCat(data_bytes - end, " bytes follow its last tensor"));
  return entries;
}

absl::Status CheckEntry(const Entry& entry, const Tensor& tensor) {
  if (entry.dtype != "F32") {
    return OtherModel(absl::StrCat("its ", tensor.name, " is of type ", Word(entry.dtype), " where F32 is expected"));
  }
  const bool same = std::equal(entry.shape.begin(), entry.shape.end(), tensor.shape.begin(), tensor.shape.end(),
                               [](uint64_t a, int64_t b) { return a == static_cast<uint64_t>(b); });
  if (!same) {
    return OtherModel(absl::StrCat("its ", tensor.name, " is [", absl::StrJoin(entry.shape, ", "), "] where [",
                                   absl::StrJoin(tensor.shape, ", "), "] is expected"));
  }
  if (entry.end - entry.begin != tensor.data.size() * sizeof(float)) {
    return Damaged(absl::StrCat("its ", tensor.name, " has ", entry.end - entry.begin, " bytes"));
  }
  return absl::OkStatus();
}

// The entry of each tensor.
absl::StatusOr<std::vector<const Entry*>> Match(absl::Span<const Entry> entries, absl::Span<const Tensor> tensors) {
  std::vector<const Entry*> found;
  for (const Tensor& tensor : tensors) {
    const auto entry =
        std::find_if(entries.begin(), entries.end(), [&](const Entry& e) { return e.name == tensor.name; });
    if (entry == entries.end()) return OtherModel(absl::StrCat("it does not hold ", tensor.name));
    if (absl::Status status = CheckEntry(*entry, tensor); !status.ok()) return status;
    found.push_back(&*entry);
  }
  for (const Entry& entry : entries) {
    if (absl::EndsWith(entry.name, kCounter) || std::find(found.begin(), found.end(), &entry) != found.end()) continue;
    return OtherModel(absl::StrCat("it also holds ", Word(entry.name)));
  }
  return found;
}

}  // namespace

absl::Status SaveSafetensors(AtomicFile& file, absl::Span<const Tensor> tensors, int64_t batches) {
  if (absl::Status s = file.Begin(); !s.ok()) return s;
  json header = {{"__metadata__", {{"format", "pt"}}}};
  uint64_t end = 0;
  const auto add = [&](const std::string& name, const char* dtype, const std::vector<int64_t>& shape, uint64_t bytes) {
    header[name] = {{"dtype", dtype}, {"shape", shape}, {"data_offsets", {end, end + bytes}}};
    end += bytes;
  };
  // The counters first, so that every tensor is aligned to its elements.
  size_t counters = 0;
  for (const Tensor& tensor : tensors) {
    absl::string_view name = tensor.name;
    if (!absl::ConsumeSuffix(&name, "running_var")) continue;
    add(absl::StrCat(name, kCounter), "I64", {}, sizeof(batches));
    ++counters;
  }
  for (const Tensor& tensor : tensors) add(tensor.name, "F32", tensor.shape, tensor.data.size() * sizeof(float));
  std::string text = header.dump();
  text.append((kLengthBytes - text.size() % kLengthBytes) % kLengthBytes, ' ');
  const uint64_t length = text.size();
  if (absl::Status s = file.Write(&length, sizeof(length)); !s.ok()) return s;
  if (absl::Status s = file.Write(text.data(), text.size()); !s.ok()) return s;
  for (size_t i = 0; i < counters; ++i) {
    if (absl::Status s = file.Write(&batches, sizeof(batches)); !s.ok()) return s;
  }
  for (const Tensor& tensor : tensors) {
    if (absl::Status s = file.Write(tensor.data.data(), tensor.data.size() * sizeof(float)); !s.ok()) return s;
  }
  return file.Commit();
}

absl::Status DecodeSafetensors(absl::Span<const uint8_t> file, absl::Span<const Tensor> tensors) {
  if (file.size() < kLengthBytes) return Damaged("it is no safetensors file, or truncated");
  uint64_t length;
  std::memcpy(&length, file.data(), sizeof(length));
  const absl::Span<const uint8_t> rest = file.subspan(kLengthBytes);
  if (length > kLongestHeader || length > rest.size()) {
    return Damaged(absl::StrCat("it is no safetensors file, or truncated: its header would take ", length, " of ",
                                rest.size(), " bytes"));
  }
  const absl::Span<const uint8_t> data = rest.subspan(length);
  absl::StatusOr<std::vector<Entry>> entries;
  try {
    entries = ReadEntries(json::parse(rest.data(), rest.data() + length), data.size());
  } catch (const json::exception&) {
    return Damaged("it is no safetensors file: its header is not of that form");
  }
  if (!entries.ok()) return entries.status();
  const absl::StatusOr<std::vector<const Entry*>> found = Match(*entries, tensors);
  if (!found.ok()) return found.status();
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].data.empty()) continue;
    std::memcpy(tensors[i].data.data(), data.data() + (*found)[i]->begin, tensors[i].data.size() * sizeof(float));
  }
  return absl::OkStatus();
}

absl::Status LoadSafetensors(const std::string& path, absl::Span<const Tensor> tensors) {
  const absl::StatusOr<std::vector<uint8_t>> file = ReadFile(path);
  const absl::Status status = file.ok() ? DecodeSafetensors(*file, tensors) : file.status();
  if (status.ok()) return status;
  return absl::Status(status.code(), absl::StrCat("cannot begin with --init_weights=", path, ": ", status.message()));
}

}  // namespace examples
