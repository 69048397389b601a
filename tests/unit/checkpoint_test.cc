// SPDX-License-Identifier: Apache-2.0
#include "examples/train/checkpoint.h"

#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "examples/data/file.h"
#include "examples/train/checkpoint_writer.h"
#include "examples/train/sha256.h"
#include "tests/support/catch.h"
#include "tests/support/temporary_folder.h"

namespace examples {
namespace {

namespace fs = std::filesystem;

// Two tensors and the folder that their checkpoints go to.
class Fixture {
 public:
  Fixture() {
    for (size_t i = 0; i < weight_.size(); ++i) weight_[i] = 0.1f * static_cast<float>(i);
  }

  std::vector<Tensor> Tensors() {
    return {{"1.weight", {3, 4}, absl::MakeSpan(weight_)}, {"1.bias", {3}, absl::MakeSpan(bias_)}};
  }
  absl::Status Save(const std::string& optimizer = "sgd") {
    const absl::StatusOr<std::unique_ptr<AtomicFile>> file = AtomicFile::Create(path_);
    return file.ok() ? SaveCheckpoint(**file, optimizer, progress_, Tensors()) : file.status();
  }
  std::vector<uint8_t> Bytes() const {
    const absl::StatusOr<std::vector<uint8_t>> bytes = ReadFile(path_);
    REQUIRE(bytes.ok());
    return *bytes;
  }
  void WriteBytes(const std::vector<uint8_t>& bytes) const { folder_.Write("a.ckpt", bytes); }
  size_t FilesInFolder() const {
    return static_cast<size_t>(std::distance(fs::directory_iterator(folder_.path()), fs::directory_iterator()));
  }

  const ddp::testing::TemporaryFolder folder_;
  const std::string path_ = folder_.File("a.ckpt");
  std::vector<float> weight_ = std::vector<float>(12);
  std::vector<float> bias_ = {1, -2, 3e-42f};
  Progress progress_ = {.step = 24,
                        .epoch = 2,
                        .epoch_samples = 640,
                        .seed = -1,
                        .train_samples = 1437,
                        .optimizer_steps = 24,
                        .drop_last = 1,
                        .loss_steps = 10,
                        .loss_sum = 0.1,
                        .lr = 1e-300,
                        .momentum = 0.9,
                        .weight_decay = 1.0 / 3};
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

// The checkpoint with `what` in its header replaced, sealed anew.
void ReplaceInHeader(Fixture& f, const std::string& what, const std::string& with) {
  REQUIRE(f.Save().ok());
  const std::vector<uint8_t> good = f.Bytes();
  std::string text(good.begin(), good.end());
  const size_t at = text.find(what);
  REQUIRE(at != std::string::npos);
  text.replace(at, what.size(), with);
  std::vector<uint8_t> bytes(text.begin(), text.end());
  uint32_t length = 0;
  std::memcpy(&length, &bytes[12], sizeof(length));
  length += static_cast<uint32_t>(with.size() - what.size());
  std::memcpy(&bytes[12], &length, sizeof(length));
  Reseal(bytes);
  f.WriteBytes(bytes);
}

}  // namespace

TEST_CASE("a checkpoint says in which environment it was written, and loads all the same") {
  Fixture f;
  CheckpointWriter writer(*AtomicFile::Create(f.path_), "sgd", R"({"system": "Linux 6.1", "cpu": {"cores": 2}})");
  writer.Start(f.progress_, f.Tensors());
  REQUIRE(writer.Finish().ok());
  const std::vector<uint8_t> bytes = f.Bytes();
  CHECK(absl::StrContains(std::string(bytes.begin(), bytes.end()),
                          R"("environment":{"cpu":{"cores":2},"system":"Linux 6.1"})"));
  const absl::StatusOr<Progress> loaded = LoadCheckpoint(f.path_, "sgd", f.Tensors());
  REQUIRE(loaded.ok());
  CHECK(*loaded == f.progress_);
}

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

TEST_CASE("a header whose numbers and words are of another kind is refused") {
  Fixture f;
  for (const auto& [what, with] : std::vector<std::pair<std::string, std::string>>{
           {"\"step\":24", "\"step\":24.5"},
           {"\"step\":24", "\"step\":true"},
           {"\"step\":24", "\"step\":1e300"},
           {"\"step\":24", "\"step\":null"},
           {"\"lr\":1e-300", "\"lr\":\"fast\""},
           {"\"lr\":1e-300", "\"lr\":1e999"},
           {"\"shape\":[3]", "\"shape\":[3.0]"},
           {"\"shape\":[3]", "\"shape\":3"},
           {"\"name\":\"1.bias\"", "\"name\":17"},
           {"\"optimizer\":\"sgd\"", "\"optimizer\":[]"},
       }) {
    INFO(with);
    ReplaceInHeader(f, what, with);
    RequireRefused(f, f.Tensors(), absl::StatusCode::kDataLoss, "header");
  }
  ReplaceInHeader(f, "\"step\":24", "\"step\":18446744073709551615");
  RequireRefused(f, f.Tensors(), absl::StatusCode::kDataLoss, "step is -1");
  // Whatever a file says, a message stays one line that no terminal obeys.
  ReplaceInHeader(f, "\"name\":\"1.bias\"", "\"name\":\"a\\nb\\u001b[2J\"");
  RequireRefused(f, f.Tensors(), absl::StatusCode::kFailedPrecondition, "a\\nb\\x1b[2J [3] where 1.bias [3]");
}

TEST_CASE("a save that fails leaves the old checkpoint and no temporary file") {
  Fixture f;
  REQUIRE(f.Save().ok());
  const std::vector<uint8_t> good = f.Bytes();
  SECTION("given up half-way") {
    absl::StatusOr<std::unique_ptr<AtomicFile>> file = AtomicFile::Create(f.path_);
    REQUIRE(file.ok());
    REQUIRE((*file)->Begin().ok());
    REQUIRE((*file)->Write("abc", 3).ok());
    CHECK(f.FilesInFolder() == 3);
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

TEST_CASE("what a killed process was writing is taken over, what somebody writes now is not") {
  Fixture f;
  REQUIRE(f.Save().ok());
  const std::vector<uint8_t> good = f.Bytes();
  const auto be_killed = [&] {
    for (const char* name : {".tmp", ".lock"}) std::ofstream(f.path_ + name) << std::string(10000, 'x');
  };
  be_killed();
  RemoveUnfinished(f.path_);
  CHECK(f.FilesInFolder() == 1);
  RemoveUnfinished(f.path_);

  be_killed();
  REQUIRE(f.Save().ok());
  CHECK(f.Bytes() == good);
  CHECK(f.FilesInFolder() == 1);

  absl::StatusOr<std::unique_ptr<AtomicFile>> file = AtomicFile::Create(f.path_);
  REQUIRE(file.ok());
  // From the beginning to the end, not only while it is being written.
  for (int writes = 0; writes <= 2; ++writes) {
    const absl::Status second = f.Save();
    CHECK(absl::IsFailedPrecondition(second));
    CHECK(absl::StrContains(second.message(), "a.ckpt: another process writes it, and holds "));
    REQUIRE((*file)->Begin().ok());
    REQUIRE((*file)->Write("abc", 3).ok());
    RemoveUnfinished(f.path_);
    CHECK(f.FilesInFolder() == 3);
    REQUIRE((*file)->Commit().ok());
  }
  CHECK(f.Bytes().size() == 3);
  file->reset();
  REQUIRE(f.Save().ok());
  CHECK(f.Bytes() == good);
  CHECK(f.FilesInFolder() == 1);
}

TEST_CASE("a claim that ends in time is waited for") {
  Fixture f;
  std::unique_ptr<AtomicFile> file = *AtomicFile::Create(f.path_);
  std::thread end([&] {
    absl::SleepFor(absl::Milliseconds(50));
    file.reset();
  });
  CHECK(AtomicFile::Create(f.path_, absl::InfiniteDuration()).ok());
  end.join();
}

TEST_CASE("a process that is stopped loses its file to the others of its run, and to nobody else") {
  Fixture f;
  constexpr absl::Duration kPatience = absl::Milliseconds(20);
  std::unique_ptr<AtomicFile> stopped = *AtomicFile::Create(f.path_, kPatience, 17);
  REQUIRE(stopped->Begin().ok());
  REQUIRE(stopped->Write("old", 3).ok());
  for (const uint64_t other : {uint64_t{0}, uint64_t{18}}) {
    CHECK(absl::IsFailedPrecondition(AtomicFile::Create(f.path_, kPatience, other).status()));
  }
  const std::unique_ptr<AtomicFile> next = *AtomicFile::Create(f.path_, kPatience, 17);
  REQUIRE(next->Begin().ok());
  REQUIRE(next->Write("n", 1).ok());
  // It goes on in the middle of a checkpoint, and ends.
  REQUIRE(stopped->Write("old", 3).ok());
  for (const absl::Status& status : {stopped->Commit(), stopped->Begin()}) {
    CHECK(absl::IsFailedPrecondition(status));
    CHECK(absl::StrContains(status.message(), "is not this process's any more"));
  }
  stopped.reset();
  CHECK(absl::IsFailedPrecondition(AtomicFile::Create(f.path_).status()));
  REQUIRE(next->Write("ew", 2).ok());
  REQUIRE(next->Commit().ok());
  CHECK(f.Bytes() == std::vector<uint8_t>{'n', 'e', 'w'});
}

TEST_CASE("a symbolic link is written through, and stays a link") {
  Fixture f;
  fs::create_directory(f.folder_.File("far"));
  fs::create_symlink("far/middle", f.path_);
  fs::create_symlink(f.folder_.File("far/end"), f.folder_.File("far/middle"));
  for (int saves = 0; saves < 2; ++saves) {  // without the target, and with it
    REQUIRE(f.Save().ok());
    CHECK(fs::is_symlink(f.path_));
    CHECK(fs::is_symlink(f.folder_.File("far/middle")));
    CHECK(fs::is_regular_file(fs::symlink_status(f.folder_.File("far/end"))));
    CHECK(f.FilesInFolder() == 2);
  }
  CHECK(LoadCheckpoint(f.path_, "sgd", f.Tensors()).ok());
  // Who writes the target writes the link.
  const std::unique_ptr<AtomicFile> file = *AtomicFile::Create(f.folder_.File("far/end"));
  CHECK(absl::IsFailedPrecondition(f.Save()));
}

#if !defined(__SANITIZE_THREAD__)  // which does not survive fork

// Runs `body` in a process of its own; returns the signal that killed it, or 0.
int RunAndWait(const std::function<void()>& body, absl::Duration kill_after = absl::InfiniteDuration()) {
  const pid_t pid = fork();
  REQUIRE(pid >= 0);
  if (pid == 0) {
    body();
    _exit(0);
  }
  if (kill_after < absl::InfiniteDuration()) {
    absl::SleepFor(kill_after);
    kill(pid, SIGKILL);
  }
  int status = 0;
  REQUIRE(waitpid(pid, &status, 0) == pid);
  return WIFSIGNALED(status) ? WTERMSIG(status) : 0;
}

TEST_CASE("a process killed after any number of bytes leaves the checkpoint before") {
  Fixture f;
  REQUIRE(f.Save().ok());
  const std::vector<uint8_t> good = f.Bytes();
  f.weight_[0] = 5;
  for (rlim_t bytes = 0; bytes < good.size(); ++bytes) {
    INFO(bytes);
    // Whoever writes beyond the limit is killed.
    const int signal = RunAndWait([&] {
      std::signal(SIGXFSZ, SIG_DFL);
      const struct rlimit none = {0, 0}, limit = {bytes, bytes};
      setrlimit(RLIMIT_CORE, &none);
      setrlimit(RLIMIT_FSIZE, &limit);
      f.Save().IgnoreError();
    });
    REQUIRE(signal == SIGXFSZ);
    REQUIRE(f.Bytes() == good);
    REQUIRE(f.FilesInFolder() == 3);  // never more than one that is not finished, and the lock
  }
  REQUIRE(f.Save().ok());
  CHECK(f.Bytes() != good);
  CHECK(f.FilesInFolder() == 1);
}

TEST_CASE("a process killed at any moment leaves one whole checkpoint") {
  Fixture f;
  REQUIRE(f.Save().ok());
  std::mt19937 random(7);
  int64_t last = f.progress_.step;
  for (int kills = 0; kills < 100; ++kills) {
    // Saves as fast as it can; every number in a checkpoint is its step.
    const int signal = RunAndWait(
        [&] {
          for (int64_t step = last + 1;; ++step) {
            f.progress_.step = step;
            std::fill(f.weight_.begin(), f.weight_.end(), static_cast<float>(step));
            if (!f.Save().ok()) _exit(1);
          }
        },
        absl::Microseconds(random() % 10000));
    REQUIRE(signal == SIGKILL);
    const absl::StatusOr<Progress> loaded = LoadCheckpoint(f.path_, "sgd", f.Tensors());
    INFO(loaded.status().ToString());
    REQUIRE(loaded.ok());
    REQUIRE(loaded->step >= last);
    if (loaded->step > 24) {
      REQUIRE(f.weight_ == std::vector<float>(f.weight_.size(), static_cast<float>(loaded->step)));
    }
    REQUIRE(f.FilesInFolder() <= 3);
    last = loaded->step;
  }
  CHECK(last > 24);
  RemoveUnfinished(f.path_);
  CHECK(f.FilesInFolder() == 1);
}

#endif

TEST_CASE("a checkpoint is written while its tensors change") {
  Fixture f;
  CheckpointWriter writer(*AtomicFile::Create(f.path_), "sgd");
  for (int64_t step = 1; step <= 20; ++step) {
    f.progress_.step = step;
    std::fill(f.weight_.begin(), f.weight_.end(), static_cast<float>(step));
    writer.Start(f.progress_, f.Tensors());
    std::fill(f.weight_.begin(), f.weight_.end(), -1.0f);
  }
  REQUIRE(writer.Finish().ok());
  CHECK_FALSE(writer.failed());
  const absl::StatusOr<Progress> loaded = LoadCheckpoint(f.path_, "sgd", f.Tensors());
  REQUIRE(loaded.ok());
  CHECK(loaded->step == 20);
  CHECK(f.weight_ == std::vector<float>(f.weight_.size(), 20.0f));
}

TEST_CASE("a checkpoint that could not be written in the background is told of, and ends the writing") {
  Fixture f;
  REQUIRE(f.Save().ok());
  const std::vector<uint8_t> good = f.Bytes();
  CheckpointWriter writer(*AtomicFile::Create(f.path_), "sgd");
  REQUIRE(fs::create_directory(f.path_ + ".tmp"));
  writer.Start(f.progress_, f.Tensors());
  CHECK(absl::StrContains(writer.Finish().message(), "a.ckpt.tmp"));
  CHECK(writer.failed());
  fs::remove(f.path_ + ".tmp");
  f.progress_.step = 25;
  writer.Start(f.progress_, f.Tensors());
  CHECK_FALSE(writer.Finish().ok());
  CHECK(f.Bytes() == good);
}

TEST_CASE("a checkpoint is written to regular files only") {
  Fixture f;
  CHECK(absl::IsInvalidArgument(AtomicFile::Create("/dev/null").status()));
  CHECK(absl::IsInvalidArgument(AtomicFile::Create(f.folder_.path()).status()));
  REQUIRE(mkfifo((f.path_ + ".tmp").c_str(), 0600) == 0);
  CHECK_FALSE((*AtomicFile::Create(f.path_))->Begin().ok());  // and does not wait for a reader
  CHECK(absl::IsNotFound(AtomicFile::Create(f.folder_.File("no/such")).status()));
}

}  // namespace examples
