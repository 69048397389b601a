#include "examples/train/checkpoint.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "examples/data/file.h"
#include "examples/train/sha256.h"
#include "tests/support/catch.h"

namespace examples {
namespace {

namespace fs = std::filesystem;

// Two tensors and the folder that their checkpoints go to.
class Fixture {
 public:
  Fixture() {
    std::string pattern = (fs::temp_directory_path() / "checkpoint_test.XXXXXX").string();
    REQUIRE(mkdtemp(pattern.data()) != nullptr);
    folder_ = pattern;
    path_ = folder_ + "/a.ckpt";
    for (size_t i = 0; i < weight_.size(); ++i) weight_[i] = 0.1f * static_cast<float>(i);
  }
  ~Fixture() { fs::remove_all(folder_); }

  std::vector<Tensor> Tensors() {
    return {{"1.weight", {3, 4}, absl::MakeSpan(weight_)}, {"1.bias", {3}, absl::MakeSpan(bias_)}};
  }
  absl::Status Save(const std::string& optimizer = "sgd") {
    return SaveCheckpoint(path_, optimizer, progress_, Tensors());
  }
  std::vector<uint8_t> Bytes() const {
    const absl::StatusOr<std::vector<uint8_t>> bytes = ReadFile(path_);
    REQUIRE(bytes.ok());
    return *bytes;
  }
  void WriteBytes(const std::vector<uint8_t>& bytes) const {
    std::ofstream(path_, std::ios::binary)
        .write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  }
  size_t FilesInFolder() const {
    return static_cast<size_t>(std::distance(fs::directory_iterator(folder_), fs::directory_iterator()));
  }

  std::string folder_, path_;
  std::vector<float> weight_ = std::vector<float>(12);
  std::vector<float> bias_ = {1, -2, 3e-42f};
  Progress progress_ = {
      .step = 24, .epoch = 2, .epoch_samples = 640, .seed = -1, .train_samples = 1437, .optimizer_steps = 24};
};

// Loading fails with `part` in a one-line message that names the file, and the tensors are as before.
void RequireRefused(Fixture& f, const std::vector<Tensor>& tensors, absl::StatusCode code, const std::string& part,
                    const std::string& optimizer = "sgd") {
  const std::vector<float> weight = f.weight_, bias = f.bias_;
  const absl::StatusOr<Progress> loaded = LoadCheckpoint(f.path_, optimizer, tensors);
  INFO(loaded.status().ToString());
  REQUIRE_FALSE(loaded.ok());
  CHECK(loaded.status().code() == code);
  CHECK(absl::StrContains(loaded.status().message(), part));
  CHECK(absl::StrContains(loaded.status().message(), f.path_));
  CHECK_FALSE(absl::StrContains(loaded.status().message(), "\n"));
  CHECK(f.weight_ == weight);
  CHECK(f.bias_ == bias);
}

// Gives changed contents the checksum that fits them.
void Reseal(std::vector<uint8_t>& bytes) {
  Sha256 sha;
  sha.Update(bytes.data(), bytes.size() - 32);
  const Sha256::Digest digest = sha.Finish();
  std::copy(digest.begin(), digest.end(), bytes.end() - 32);
}

}  // namespace

TEST_CASE("a checkpoint gives back what was saved, bit for bit") {
  Fixture f;
  REQUIRE(f.Save().ok());
  CHECK(f.FilesInFolder() == 1);
  const std::vector<float> weight = f.weight_, bias = f.bias_;
  std::fill(f.weight_.begin(), f.weight_.end(), -1.0f);
  std::fill(f.bias_.begin(), f.bias_.end(), -1.0f);
  const absl::StatusOr<Progress> loaded = LoadCheckpoint(f.path_, "sgd", f.Tensors());
  REQUIRE(loaded.ok());
  CHECK(*loaded == f.progress_);
  CHECK(f.weight_ == weight);
  CHECK(f.bias_ == bias);
}

TEST_CASE("every truncation and every damaged byte is noticed, and nothing is loaded") {
  Fixture f;
  REQUIRE(f.Save().ok());
  const std::vector<uint8_t> good = f.Bytes();
  const std::vector<float> weight = f.weight_;
  for (size_t size = 0; size < good.size(); ++size) {
    INFO(size);
    REQUIRE_FALSE(DecodeCheckpoint(absl::MakeConstSpan(good).first(size), "sgd", f.Tensors()).ok());
  }
  for (size_t at = 0; at < good.size(); ++at) {
    INFO(at);
    std::vector<uint8_t> bad = good;
    bad[at] ^= 1;
    REQUIRE_FALSE(DecodeCheckpoint(bad, "sgd", f.Tensors()).ok());
  }
  CHECK(f.weight_ == weight);
}

TEST_CASE("what is wrong with a checkpoint is said") {
  Fixture f;
  RequireRefused(f, f.Tensors(), absl::StatusCode::kNotFound, "a file that --save wrote");
  f.WriteBytes({'h', 'e', 'l', 'l', 'o'});
  RequireRefused(f, f.Tensors(), absl::StatusCode::kInvalidArgument, "not a checkpoint");
  REQUIRE(f.Save().ok());
  const std::vector<uint8_t> good = f.Bytes();

  std::vector<uint8_t> bytes = good;
  bytes.pop_back();
  f.WriteBytes(bytes);
  RequireRefused(f, f.Tensors(), absl::StatusCode::kDataLoss, "truncated or damaged");

  bytes = good;
  bytes[8] = 7;
  f.WriteBytes(bytes);
  RequireRefused(f, f.Tensors(), absl::StatusCode::kFailedPrecondition, "version 7");

  bytes = good;
  bytes[15] = 0xff;  // the header's length
  Reseal(bytes);
  f.WriteBytes(bytes);
  RequireRefused(f, f.Tensors(), absl::StatusCode::kDataLoss, "header");

  bytes = good;
  bytes[20] = '!';  // within the JSON
  Reseal(bytes);
  f.WriteBytes(bytes);
  RequireRefused(f, f.Tensors(), absl::StatusCode::kDataLoss, "header");

  bytes = good;
  bytes.insert(bytes.end() - 32, 4, 0);
  Reseal(bytes);
  f.WriteBytes(bytes);
  RequireRefused(f, f.Tensors(), absl::StatusCode::kDataLoss, "64 bytes of tensors where 60");
}

TEST_CASE("a checkpoint of another training is refused, and what differs is named") {
  Fixture f;
  REQUIRE(f.Save().ok());
  const auto refused = absl::StatusCode::kFailedPrecondition;
  RequireRefused(f, f.Tensors(), refused, "--optimizer=sgd, this run has --optimizer=adam", "adam");
  std::vector<Tensor> tensors = f.Tensors();
  tensors[0].shape = {4, 3};
  RequireRefused(f, tensors, refused, "1.weight [3, 4] where 1.weight [4, 3] is expected");
  tensors = f.Tensors();
  tensors[1].name = "2.bias";
  RequireRefused(f, tensors, refused, "1.bias [3] where 2.bias [3] is expected");
  tensors = f.Tensors();
  tensors.pop_back();
  RequireRefused(f, tensors, refused, "also holds 1.bias");
  tensors = f.Tensors();
  tensors.push_back({"3.weight", {3}, absl::MakeSpan(f.bias_)});
  RequireRefused(f, tensors, refused, "does not hold 3.weight");
}

TEST_CASE("numbers that no training has are refused") {
  Fixture f;
  f.progress_.epoch_samples = -64;
  REQUIRE(f.Save().ok());
  RequireRefused(f, f.Tensors(), absl::StatusCode::kDataLoss, "epoch_samples is -64");
}

TEST_CASE("a save that fails leaves the old checkpoint and no temporary file") {
  Fixture f;
  REQUIRE(f.Save().ok());
  const std::vector<uint8_t> good = f.Bytes();
  SECTION("given up half-way") {
    absl::StatusOr<std::unique_ptr<AtomicFile>> file = AtomicFile::Create(f.path_);
    REQUIRE(file.ok());
    REQUIRE((*file)->Write("abc", 3).ok());
    CHECK(f.FilesInFolder() == 2);
    file->reset();
    CHECK(f.Bytes() == good);
    CHECK(f.FilesInFolder() == 1);
  }
  SECTION("the disk is full") {
    struct rlimit old = {};
    REQUIRE(getrlimit(RLIMIT_FSIZE, &old) == 0);
    const struct rlimit tiny = {100, old.rlim_max};
    const auto handler = std::signal(SIGXFSZ, SIG_IGN);
    REQUIRE(setrlimit(RLIMIT_FSIZE, &tiny) == 0);
    f.weight_[0] = 5;
    const absl::Status status = f.Save();
    setrlimit(RLIMIT_FSIZE, &old);
    std::signal(SIGXFSZ, handler);
    INFO(status.ToString());
    REQUIRE_FALSE(status.ok());
    CHECK(absl::StrContains(status.message(), "a.ckpt"));
    CHECK(f.Bytes() == good);
    CHECK(f.FilesInFolder() == 1);
  }
}

TEST_CASE("a checkpoint is written to regular files only") {
  Fixture f;
  CHECK(absl::IsInvalidArgument(AtomicFile::Create("/dev/null").status()));
  CHECK(absl::IsInvalidArgument(AtomicFile::Create(f.folder_).status()));
  CHECK(absl::IsNotFound(AtomicFile::Create(f.folder_ + "/no/such").status()));
}

}  // namespace examples
