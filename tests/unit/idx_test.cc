// SPDX-License-Identifier: Apache-2.0
#include "examples/data/idx.h"

#include <sys/resource.h>
#include <unistd.h>
#include <zlib.h>

#include <filesystem>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "examples/data/dataset.h"
#include "tests/support/catch.h"
#include "tests/support/temporary_folder.h"

namespace examples {
namespace {

using Bytes = std::vector<uint8_t>;

// An IDX file of unsigned bytes 0, 1, 2, ...
Bytes Idx(const std::vector<uint32_t>& dims, size_t elements, uint8_t type = 0x08) {
  Bytes bytes = {0, 0, type, static_cast<uint8_t>(dims.size())};
  for (const uint32_t dim : dims) {
    for (int shift = 24; shift >= 0; shift -= 8) bytes.push_back(static_cast<uint8_t>(dim >> shift));
  }
  for (size_t i = 0; i < elements; ++i) bytes.push_back(static_cast<uint8_t>(i));
  return bytes;
}

Bytes Gzip(const Bytes& bytes) {
  z_stream stream = {};
  REQUIRE(deflateInit2(&stream, 6, Z_DEFLATED, 16 + MAX_WBITS, 8, Z_DEFAULT_STRATEGY) == Z_OK);
  Bytes out(deflateBound(&stream, bytes.size()) + 32);
  stream.next_in = const_cast<uint8_t*>(bytes.data());
  stream.avail_in = static_cast<uInt>(bytes.size());
  stream.next_out = out.data();
  stream.avail_out = static_cast<uInt>(out.size());
  REQUIRE(deflate(&stream, Z_FINISH) == Z_STREAM_END);
  out.resize(stream.total_out);
  deflateEnd(&stream);
  return out;
}

void RequireError(const Bytes& file, int rank, const std::string& part) {
  const absl::StatusOr<IdxArray> array = DecodeIdx(file, rank);
  INFO(array.status().ToString());
  REQUIRE(absl::IsInvalidArgument(array.status()));
  CHECK(absl::StrContains(array.status().message(), part));
  CHECK_FALSE(absl::StrContains(array.status().message(), "\n"));
}

class Folder : public ddp::testing::TemporaryFolder {
 public:
  void WriteAll(uint32_t train, uint32_t test) const {
    Write("train-images-idx3-ubyte", Idx({train, 2, 3}, train * 6));
    Write("train-labels-idx1-ubyte.gz", Gzip(Idx({train}, train)));
    Write("t10k-images-idx3-ubyte.gz", Gzip(Idx({test, 2, 3}, test * 6)));
    Write("t10k-labels-idx1-ubyte", Idx({test}, test));
  }
  std::string Error() const {
    const absl::StatusOr<Dataset> data = LoadDataset(path());
    REQUIRE_FALSE(data.ok());
    CHECK_FALSE(absl::StrContains(data.status().message(), "\n"));
    return std::string(data.status().message());
  }
};

}  // namespace

TEST_CASE("IDX files are decoded, plain and compressed") {
  const Bytes plain = Idx({3, 2, 4}, 24);
  for (const Bytes& file : {plain, Gzip(plain)}) {
    const absl::StatusOr<IdxArray> array = DecodeIdx(file, 3);
    REQUIRE(array.ok());
    CHECK(array->dims == std::vector<size_t>{3, 2, 4});
    REQUIRE(array->bytes.size() == 24);
    for (size_t i = 0; i < 24; ++i) CHECK(array->bytes[i] == i);
  }
}

TEST_CASE("a wrong IDX file is told what is wrong with it") {
  RequireError({}, 1, "ends after 0 bytes");
  RequireError({0, 0, 8}, 1, "ends after 3 bytes");
  RequireError({0, 0, 8, 1, 0, 0}, 1, "ends after 6 bytes");
  RequireError({'P', 'K', 3, 4, 0}, 1, "not an IDX file");
  RequireError(Idx({2}, 8, 0x0d), 1, "type 0x0d");
  RequireError(Idx({2, 2}, 4), 3, "2 dimensions where 3");
  RequireError(Idx({4, 0, 2}, 0), 3, "empty");
  RequireError(Idx({5}, 4), 1, "truncated");
  RequireError(Idx({5}, 6), 1, "more follows");
}

TEST_CASE("every truncation and every damaged byte of a compressed file is noticed") {
  const Bytes good = Gzip(Idx({40, 5}, 200));
  for (size_t size = 0; size < good.size(); ++size) {
    INFO(size);
    REQUIRE_FALSE(DecodeIdx(absl::MakeConstSpan(good).first(size), 2).ok());
  }
  const absl::StatusOr<IdxArray> whole = DecodeIdx(good, 2);
  REQUIRE(whole.ok());
  // Bytes 4 to 9 of a gzip header (time, hints, system) carry no data.
  for (size_t at = 10; at < good.size(); ++at) {
    INFO(at);
    Bytes bad = good;
    bad[at] ^= 0x10;
    const absl::StatusOr<IdxArray> array = DecodeIdx(bad, 2);
    REQUIRE((!array.ok() || array->bytes == whole->bytes));  // some bits of the format are padding
  }
  Bytes longer = good;
  longer.push_back(0);
  RequireError(longer, 2, "follow the end of the gzip stream");
  RequireError(Gzip(Idx({40, 5}, 201)), 2, "more follows");
  RequireError(Gzip(Idx({40, 5}, 199)), 2, "truncated");
}

TEST_CASE("a header cannot make the reader allocate what the file does not hold") {
  const uint32_t huge = 0xffffffff;
  RequireError(Idx({huge, huge, huge}, 100), 3, "truncated or damaged");
  RequireError(Idx({100'000'000}, 100), 1, "truncated or damaged");
  RequireError(Gzip(Idx({huge, huge}, 100)), 2, "truncated or damaged");
  // Within what deflate could at best hold, and yet not there.
  struct rusage before = {}, after = {};
  getrusage(RUSAGE_SELF, &before);
  Bytes noise = Idx({900'000'000}, 0);
  uint32_t state = 1;
  for (int i = 0; i < 1'000'000; ++i)
    noise.push_back(static_cast<uint8_t>((state = state * 1664525 + 1013904223) >> 24));
  RequireError(Gzip(noise), 1, "truncated");
  getrusage(RUSAGE_SELF, &after);
  // Less than the 900 MB that the header asks for; ThreadSanitizer takes several bytes for each of ours.
  CHECK(after.ru_maxrss - before.ru_maxrss < 600 * 1024);
}

TEST_CASE("a folder of IDX files becomes a data set") {
  const Folder folder;
  folder.WriteAll(10, 4);
  const absl::StatusOr<Dataset> data = LoadDataset(folder.path());
  INFO(data.status().ToString());
  REQUIRE(data.ok());
  CHECK(data->train.count() == 10);
  CHECK(data->test.count() == 4);
  CHECK(data->features() == 6);
  CHECK(data->mean[0] == ddp::testing::Approx(29.5));  // of 0 to 59

  // Normalised: mean 0, variance 1.
  std::vector<uint32_t> all = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9};
  std::vector<float> pixels(60);
  std::vector<int32_t> labels(10);
  REQUIRE(GatherBatch(*data, data->train, all, {}, pixels.data(), labels.data()).ok());
  double sum = 0, squares = 0;
  for (const float x : pixels) sum += x, squares += x * x;
  CHECK(sum / 60 == ddp::testing::Approx(0).margin(1e-6));
  CHECK(squares / 60 == ddp::testing::Approx(1));
  CHECK(labels == std::vector<int32_t>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9});
}

TEST_CASE("what is wrong with a folder is said with the file's name and the remedy") {
  CHECK(absl::StrContains(LoadDataset("/nowhere").status().message(), "no train-images-idx3-ubyte"));
  const Folder folder;
  CHECK(absl::StrContains(folder.Error(), "give --data a folder"));
  folder.WriteAll(10, 4);
  folder.Write("train-labels-idx1-ubyte.gz", Gzip(Idx({9}, 9)));
  CHECK(absl::StrContains(folder.Error(), "10 images, train-labels-idx1-ubyte has 9 labels"));
  folder.WriteAll(11, 4);
  CHECK(absl::StrContains(folder.Error(), "label 10 at position 10"));
  folder.WriteAll(10, 4);
  folder.Write("t10k-images-idx3-ubyte.gz", Gzip(Idx({4, 3, 3}, 36)));
  CHECK(absl::StrContains(folder.Error(), "training images have 2 x 3 pixels, test images 3 x 3"));
  folder.WriteAll(10, 4);
  folder.Write("t10k-labels-idx1-ubyte", Idx({4}, 3));
  const std::string error = folder.Error();
  CHECK(absl::StrContains(error, "t10k-labels-idx1-ubyte"));
  CHECK(absl::StrContains(error, "download it again"));
  std::filesystem::remove(folder.path() + "/t10k-labels-idx1-ubyte");
  std::filesystem::create_directory(folder.path() + "/t10k-labels-idx1-ubyte");
  CHECK(absl::StrContains(folder.Error(), "not a regular file"));
}

}  // namespace examples
