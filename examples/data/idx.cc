// SPDX-License-Identifier: Apache-2.0
#include "examples/data/idx.h"

#include <zlib.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "examples/data/file.h"

namespace examples {
namespace {

constexpr size_t kFirstBuffer = size_t{64} << 20;

// The decoded bytes of a file, from first to last.
class Source {
 public:
  virtual ~Source() = default;

  // Fills `out` as far as there are bytes; returns how many. An error where the input is damaged.
  virtual absl::StatusOr<size_t> Read(absl::Span<uint8_t> out) = 0;

  // No more than this can come in all.
  virtual size_t Limit() const = 0;
};

class PlainSource final : public Source {
 public:
  explicit PlainSource(absl::Span<const uint8_t> file) : rest_(file), limit_(file.size()) {}

  absl::StatusOr<size_t> Read(absl::Span<uint8_t> out) override {
    const size_t count = std::min(out.size(), rest_.size());
    std::copy_n(rest_.begin(), count, out.begin());
    rest_.remove_prefix(count);
    return count;
  }
  size_t Limit() const override { return limit_; }

 private:
  absl::Span<const uint8_t> rest_;
  size_t limit_;
};

class GzipSource final : public Source {
 public:
  static bool Recognises(absl::Span<const uint8_t> file) {
    return file.size() >= 2 && file[0] == 0x1f && file[1] == 0x8b;
  }

  explicit GzipSource(absl::Span<const uint8_t> file) : rest_(file), limit_(file.size() * kMostPerByte) {
    open_ = inflateInit2(&stream_, 16 + MAX_WBITS) == Z_OK;  // 16: with gzip's header and checksum
  }
  ~GzipSource() override {
    if (open_) inflateEnd(&stream_);
  }
  GzipSource(const GzipSource&) = delete;
  GzipSource& operator=(const GzipSource&) = delete;

  // zlib counts in 32 bits, so that both sides are handed over in pieces. At the end of the stream, which comes after
  // its checksum was verified, nothing may be left of the file.
  absl::StatusOr<size_t> Read(absl::Span<uint8_t> out) override {
    if (!open_) return absl::ResourceExhaustedError("zlib found no memory to decompress with");
    size_t done = 0;
    while (done < out.size() && !ended_) {
      const uInt in_piece = Piece(rest_.size());
      const uInt out_piece = Piece(out.size() - done);
      stream_.next_in = const_cast<Bytef*>(rest_.data());  // zlib's own interface before ZLIB_CONST
      stream_.avail_in = in_piece;
      stream_.next_out = out.data() + done;
      stream_.avail_out = out_piece;
      const int result = inflate(&stream_, Z_NO_FLUSH);
      rest_.remove_prefix(in_piece - stream_.avail_in);
      done += out_piece - stream_.avail_out;
      if (result == Z_STREAM_END) {
        ended_ = true;
        if (!rest_.empty()) {
          return absl::InvalidArgumentError(absl::StrCat(rest_.size(), " bytes follow the end of the gzip stream"));
        }
      } else if (result == Z_BUF_ERROR || (result == Z_OK && rest_.empty() && stream_.avail_out > 0)) {
        return absl::InvalidArgumentError("the gzip stream is truncated");
      } else if (result != Z_OK) {
        return absl::InvalidArgumentError(absl::StrCat("the gzip stream is damaged", stream_.msg != nullptr ? ": " : "",
                                                       stream_.msg != nullptr ? stream_.msg : ""));
      }
    }
    return done;
  }
  size_t Limit() const override { return limit_; }

 private:
  static constexpr size_t kMostPerByte = 1032;  // the best that deflate can do

  static uInt Piece(size_t bytes) { return static_cast<uInt>(std::min<size_t>(bytes, size_t{1} << 30)); }

  absl::Span<const uint8_t> rest_;
  size_t limit_;
  z_stream stream_ = {};
  bool open_ = false;
  bool ended_ = false;
};

// Reads the header and checks it against what is expected and what the file can hold; returns the dimensions.
absl::StatusOr<std::vector<size_t>> ReadHeader(Source& source, int rank) {
  uint8_t header[4 + 4 * 8];
  absl::StatusOr<size_t> got = source.Read(absl::MakeSpan(header, 4));
  if (!got.ok()) return got.status();
  if (*got < 4) return absl::InvalidArgumentError(absl::StrCat("it ends after ", *got, " bytes, within the header"));
  if (header[0] != 0 || header[1] != 0) {
    const std::string start = absl::BytesToHexString(absl::string_view(reinterpret_cast<char*>(header), 4));
    return absl::InvalidArgumentError(
        absl::StrCat("it is not an IDX file: it begins with 0x", start, ", not with two zero bytes"));
  }
  if (header[2] != 0x08) {
    return absl::InvalidArgumentError(absl::StrCat("its elements are of type 0x", absl::Hex(header[2], absl::kZeroPad2),
                                                   ", not unsigned bytes (0x08)"));
  }
  if (header[3] != rank) {
    return absl::InvalidArgumentError(
        absl::StrCat("it has ", int{header[3]}, " dimensions where ", rank, rank == 1 ? " is" : " are", " expected"));
  }
  const size_t dims_bytes = 4 * static_cast<size_t>(rank);
  got = source.Read(absl::MakeSpan(header + 4, dims_bytes));
  if (!got.ok()) return got.status();
  if (*got < dims_bytes) {
    return absl::InvalidArgumentError(absl::StrCat("it ends after ", 4 + *got, " bytes, within the header"));
  }
  std::vector<size_t> dims;
  for (const uint8_t* p = header + 4; p < header + 4 + dims_bytes; p += 4) {
    dims.push_back(size_t{p[0]} << 24 | size_t{p[1]} << 16 | size_t{p[2]} << 8 | size_t{p[3]});
  }
  return dims;
}

// The number of elements; refused if it is 0, or more than could follow the header.
absl::StatusOr<size_t> CountElements(absl::Span<const size_t> dims, size_t limit) {
  size_t count = 1;
  for (const size_t dim : dims) {
    if (dim == 0) {
      return absl::InvalidArgumentError(absl::StrCat("it is empty: its dimensions are ", absl::StrJoin(dims, " x ")));
    }
    if (count > std::numeric_limits<size_t>::max() / dim)
      count = std::numeric_limits<size_t>::max();
    else
      count *= dim;
  }
  if (count > limit) {
    return absl::InvalidArgumentError(absl::StrCat("it is truncated or damaged: its header announces ",
                                                   absl::StrJoin(dims, " x "), " bytes, it can hold at most ", limit));
  }
  return count;
}

}  // namespace

absl::StatusOr<IdxArray> DecodeIdx(absl::Span<const uint8_t> file, int rank) {
  std::unique_ptr<Source> source;
  if (GzipSource::Recognises(file)) {
    source = std::make_unique<GzipSource>(file);
  } else {
    source = std::make_unique<PlainSource>(file);
  }
  absl::StatusOr<std::vector<size_t>> dims = ReadHeader(*source, rank);
  if (!dims.ok()) return dims.status();
  const absl::StatusOr<size_t> count = CountElements(*dims, source->Limit());
  if (!count.ok()) return count.status();

  // The buffer grows with what really comes: a few compressed bytes could announce terabytes.
  IdxArray array;
  array.dims = *std::move(dims);
  while (array.bytes.size() < *count) {
    const size_t have = array.bytes.size();
    array.bytes.resize(std::min(*count, std::max(2 * have, kFirstBuffer)));
    const absl::StatusOr<size_t> got = source->Read(absl::MakeSpan(array.bytes).subspan(have));
    if (!got.ok()) return got.status();
    if (have + *got < array.bytes.size()) {
      return absl::InvalidArgumentError(absl::StrCat("it is truncated: ", have + *got, " of the ", *count,
                                                     " bytes that its header announces are there"));
    }
  }
  // One byte more than there should be; in a gzip stream, this is also what verifies the checksum.
  uint8_t extra;
  const absl::StatusOr<size_t> more = source->Read(absl::MakeSpan(&extra, 1));
  if (!more.ok()) return more.status();
  if (*more != 0) {
    return absl::InvalidArgumentError(absl::StrCat("more follows the ", *count, " bytes that its header announces"));
  }
  return array;
}

absl::StatusOr<IdxArray> ReadIdxFile(const std::string& folder, absl::string_view name, int rank) {
  std::string path = absl::StrCat(folder, "/", name);
  absl::StatusOr<std::vector<uint8_t>> file = ReadFile(path);
  if (absl::IsNotFound(file.status())) {
    file = ReadFile(absl::StrCat(path, ".gz"));
    if (file.ok()) path += ".gz";
  }
  if (absl::IsNotFound(file.status())) {
    return absl::NotFoundError(absl::StrCat("no ", name, " and no ", name, ".gz in the folder ", folder,
                                            ": give --data a folder with MNIST's four IDX files"));
  }
  if (!file.ok()) return file.status();
  absl::StatusOr<IdxArray> array = DecodeIdx(*file, rank);
  if (array.ok()) return array;
  return absl::InvalidArgumentError(
      absl::StrCat("cannot use ", path, ": ", array.status().message(), "; copy or download it again"));
}

}  // namespace examples
