// SPDX-License-Identifier: Apache-2.0
// IDX files: whatever their bytes, either an array that is what the header says, or one line that tells what is wrong.
// The first byte says how many dimensions are expected; the rest is the file, once as it is and once compressed, which
// must not make a difference.
#include <zlib.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "examples/data/idx.h"

namespace {

constexpr size_t kMostPerByte = 1032;  // that deflate can make of one

void Require(bool condition) {
  if (!condition) std::abort();
}

absl::StatusOr<examples::IdxArray> Decode(absl::Span<const uint8_t> file, int rank) {
  absl::StatusOr<examples::IdxArray> array = examples::DecodeIdx(file, rank);
  if (array.ok()) {
    Require(array->dims.size() == static_cast<size_t>(rank));
    size_t count = 1;
    for (const size_t dim : array->dims) count *= dim;
    Require(count > 0 && array->bytes.size() == count && count <= file.size() * kMostPerByte);
  } else {
    Require(absl::IsInvalidArgument(array.status()));
    Require(!array.status().message().empty() && array.status().message().find('\n') == absl::string_view::npos);
  }
  return array;
}

std::vector<uint8_t> Gzip(absl::Span<const uint8_t> bytes) {
  z_stream stream = {};
  Require(deflateInit2(&stream, Z_BEST_SPEED, Z_DEFLATED, 16 + MAX_WBITS, 8, Z_DEFAULT_STRATEGY) == Z_OK);
  std::vector<uint8_t> out(deflateBound(&stream, bytes.size()));
  stream.next_in = const_cast<Bytef*>(bytes.data());  // zlib's own interface before ZLIB_CONST
  stream.avail_in = static_cast<uInt>(bytes.size());
  stream.next_out = out.data();
  stream.avail_out = static_cast<uInt>(out.size());
  Require(deflate(&stream, Z_FINISH) == Z_STREAM_END);
  out.resize(out.size() - stream.avail_out);
  deflateEnd(&stream);
  return out;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const int rank = 1 + data[0] % 8;
  const absl::Span<const uint8_t> file(data + 1, size - 1);
  const absl::StatusOr<examples::IdxArray> plain = Decode(file, rank);
  const bool is_gzip = file.size() >= 2 && file[0] == 0x1f && file[1] == 0x8b;
  if (is_gzip) return 0;
  const absl::StatusOr<examples::IdxArray> compressed = Decode(Gzip(file), rank);
  Require(compressed.ok() == plain.ok());
  if (plain.ok()) Require(compressed->dims == plain->dims && compressed->bytes == plain->bytes);
  return 0;
}
