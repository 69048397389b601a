// SPDX-License-Identifier: Apache-2.0
#include "libddp/launch/store_secret.h"

#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "tests/support/catch.h"
#include "tests/unit/store_contract.h"

namespace ddp {
namespace {

constexpr int kPort = 12345;

// A folder that stands in for XDG_RUNTIME_DIR.
class RuntimeFolder {
 public:
  RuntimeFolder() { setenv("XDG_RUNTIME_DIR", folder_.path().c_str(), 1); }
  ~RuntimeFolder() { unsetenv("XDG_RUNTIME_DIR"); }
  const std::string& path() const { return folder_.path(); }

 private:
  const Folder folder_;
};

TEST_CASE("a proof is HMAC-SHA256 over the parts with their lengths") {
  // By Python's hmac, over each part's length in 8 little-endian bytes and the part.
  CHECK(absl::BytesToHexString(Proof("secret", {"client", "", {"\x00\xff", 2}})) ==
        "07a72d6b0f4d7ea5753297b31d37f453682e325f7b3efda3bec0e4e7ae5b59e5");
  CHECK(Proof("secret", {"ab", "c"}) != Proof("secret", {"a", "bc"}));
  CHECK(Proof("secret", {"ab"}) != Proof("secret2", {"ab"}));
  CHECK(SameProof("abc", "abc"));
  CHECK_FALSE(SameProof("abc", "abd"));
  CHECK_FALSE(SameProof("abc", "ab"));
}

TEST_CASE("random bytes differ from call to call") {
  const std::string a = RandomBytes(32).value();
  CHECK(a.size() == 32);
  CHECK(a != RandomBytes(32).value());
}

TEST_CASE("a secret file can be read by its user alone, and goes with its owner") {
  const RuntimeFolder folder;
  const std::string path = SecretFile::PathFor(kPort);
  CHECK(std::filesystem::path(path).parent_path() == folder.path());
  CHECK(SecretFile::Read(kPort).status().code() == absl::StatusCode::kNotFound);
  {
    const SecretFile file = SecretFile::Create(kPort).value();
    struct stat about;
    REQUIRE(stat(path.c_str(), &about) == 0);
    CHECK((about.st_mode & 07777) == 0600);
    CHECK(file.secret().size() == 64);
    CHECK(SecretFile::Read(kPort).value() == file.secret());
    CHECK(SecretFile::Read(kPort + 1).status().code() == absl::StatusCode::kNotFound);
  }
  CHECK(std::filesystem::is_empty(folder.path()));
}

TEST_CASE("what an earlier run left behind is replaced, also a link, and not what it points to") {
  const RuntimeFolder folder;
  const std::string path = SecretFile::PathFor(kPort);
  const std::string other = folder.path() + "/other";
  std::ofstream(other) << std::string(64, 'x');
  SECTION("a file") { std::ofstream(path) << std::string(64, 'x'); }
  SECTION("a link") { REQUIRE(symlink(other.c_str(), path.c_str()) == 0); }
  SECTION("a dangling link") { REQUIRE(symlink("/nowhere/else", path.c_str()) == 0); }
  {
    const SecretFile file = SecretFile::Create(kPort).value();
    CHECK(SecretFile::Read(kPort).value() == file.secret());
    CHECK(file.secret() != std::string(64, 'x'));
  }
  CHECK(std::filesystem::file_size(other) == 64);
}

TEST_CASE("whoever reads while it is made or replaced finds a whole secret, or none") {
  const RuntimeFolder folder;
  std::atomic<bool> through{false};
  std::thread writer([&] {
    for (int i = 0; i < 2000; ++i) {
      const SecretFile replaced = SecretFile::Create(kPort).value();
      const SecretFile file = SecretFile::Create(kPort).value();
    }
    through = true;
  });
  absl::Status wrong;
  while (!through) {
    const absl::Status s = SecretFile::Read(kPort).status();
    if (!absl::IsNotFound(s)) wrong.Update(s);
  }
  writer.join();
  CHECK(wrong == absl::OkStatus());
  CHECK(std::filesystem::is_empty(folder.path()));
}

TEST_CASE("a file that another run has replaced is not removed") {
  const RuntimeFolder folder;
  SecretFile first = SecretFile::Create(kPort).value();
  const SecretFile second = SecretFile::Create(kPort).value();
  first.Remove();
  CHECK(SecretFile::Read(kPort).value_or("") == second.secret());
}

TEST_CASE("a file that somebody else could have made or read is refused") {
  const RuntimeFolder folder;
  const std::string path = SecretFile::PathFor(kPort);
  const auto refused = [&](absl::StatusCode code, const std::string& why) {
    CheckStatus(SecretFile::Read(kPort).status(), code, {path, why, "DDP_STORE_SECRET"});
  };
  const auto write = [&](const std::string& text) {
    std::ofstream(path) << text;
    chmod(path.c_str(), 0600);
  };
  SECTION("a link") {
    std::ofstream(folder.path() + "/other") << std::string(64, 'x');
    REQUIRE(symlink("other", path.c_str()) == 0);
    refused(absl::StatusCode::kPermissionDenied, "open");
  }
  SECTION("readable by others") {
    write(std::string(64, 'x'));
    chmod(path.c_str(), 0640);
    refused(absl::StatusCode::kPermissionDenied, "others than its owner");
  }
  SECTION("another user's") {
    write(std::string(64, 'x'));
    if (geteuid() != 0 || chown(path.c_str(), 65534, 65534) != 0) {
      WARN("not tested: only root can give a file away");
      return;
    }
    refused(absl::StatusCode::kPermissionDenied, "belongs to user 65534");
  }
  SECTION("a folder") {
    std::filesystem::create_directory(path);
    refused(absl::StatusCode::kPermissionDenied, "not a regular file");
    CheckStatus(SecretFile::Create(kPort).status(), absl::StatusCode::kPermissionDenied, {path, "DDP_STORE_PORT"});
  }
  SECTION("a pipe") {
    REQUIRE(mkfifo(path.c_str(), 0600) == 0);
    refused(absl::StatusCode::kPermissionDenied, "not a regular file");
  }
  SECTION("too short") {
    write("short");
    refused(absl::StatusCode::kDataLoss, "no secret");
  }
}

TEST_CASE("a runtime folder that is missing or open to others is not used") {
  const Folder folder;
  setenv("XDG_RUNTIME_DIR", (folder.path() + "/gone").c_str(), 1);
  CHECK(std::filesystem::path(SecretFile::PathFor(kPort)).parent_path() == "/tmp");
  setenv("XDG_RUNTIME_DIR", folder.path().c_str(), 1);
  CHECK(std::filesystem::path(SecretFile::PathFor(kPort)).parent_path() == folder.path());
  chmod(folder.path().c_str(), 0755);
  CHECK(std::filesystem::path(SecretFile::PathFor(kPort)).parent_path() == "/tmp");
  unsetenv("XDG_RUNTIME_DIR");
  CHECK(std::filesystem::path(SecretFile::PathFor(kPort)).parent_path() == "/tmp");
}

}  // namespace
}  // namespace ddp
