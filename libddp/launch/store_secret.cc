// SPDX-License-Identifier: Apache-2.0
#include "libddp/launch/store_secret.h"

#include <fcntl.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "libddp/base/env.h"

namespace ddp {
namespace {

constexpr size_t kSecretSize = 64;  // 32 bytes as hexadecimal digits

absl::Status FileError(absl::StatusCode code, absl::string_view path, absl::string_view what) {
  return absl::Status(code, absl::StrCat("secret file '", path, "': ", what,
                                         "; set DDP_STORE_SECRET to a text of your own on all ranks, or DDP_STORE_PORT "
                                         "to another port"));
}

absl::Status ErrnoError(absl::string_view path, absl::string_view call) {
  const int error = errno;
  absl::StatusCode code = absl::StatusCode::kPermissionDenied;
  if (error == ENOENT) code = absl::StatusCode::kNotFound;
  if (error == ENOSPC || error == EDQUOT || error == EMFILE || error == ENFILE) {
    code = absl::StatusCode::kResourceExhausted;
  }
  return FileError(code, path, absl::StrCat(call, ": ", std::strerror(error)));
}

// Whether it is what Create makes. Anything else at that name was put there by somebody with other intentions.
absl::Status CheckOwner(int fd, absl::string_view path) {
  struct stat about;
  if (fstat(fd, &about) != 0) return ErrnoError(path, "fstat");
  if (!S_ISREG(about.st_mode)) return FileError(absl::StatusCode::kPermissionDenied, path, "it is not a regular file");
  if (about.st_uid != geteuid()) {
    return FileError(absl::StatusCode::kPermissionDenied, path, absl::StrCat("it belongs to user ", about.st_uid));
  }
  if ((about.st_mode & 077) != 0) {
    return FileError(absl::StatusCode::kPermissionDenied, path, "others than its owner may use it");
  }
  return absl::OkStatus();
}

absl::Status WriteAll(int fd, absl::string_view path, absl::string_view text) {
  while (!text.empty()) {
    const ssize_t n = write(fd, text.data(), text.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return ErrnoError(path, "write");
    text.remove_prefix(static_cast<size_t>(n));
  }
  return absl::OkStatus();
}

// XDG_RUNTIME_DIR is a folder that only its user can enter; the variable may outlive it, or a change of user.
bool IsPrivateFolder(const std::string& path) {
  struct stat about;
  return stat(path.c_str(), &about) == 0 && S_ISDIR(about.st_mode) && about.st_uid == geteuid() &&
         (about.st_mode & 077) == 0;
}

absl::StatusOr<std::string> ReadSecretFile(const std::string& path) {
  // O_NONBLOCK: whatever has that name, opening it does not hang.
  const int fd = open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  if (fd < 0) return ErrnoError(path, "open");
  absl::Status s = CheckOwner(fd, path);
  std::string secret(kSecretSize, '\0');
  ssize_t n = -1;
  while (s.ok() && (n = read(fd, secret.data(), secret.size())) < 0 && errno == EINTR) {
  }
  if (s.ok() && n != static_cast<ssize_t>(kSecretSize)) {
    s = FileError(absl::StatusCode::kDataLoss, path, "it holds no secret");
  }
  close(fd);
  if (!s.ok()) return s;
  return secret;
}

}  // namespace

absl::StatusOr<std::string> RandomBytes(size_t size) {
  std::string bytes(size, '\0');
  if (RAND_bytes(reinterpret_cast<unsigned char*>(bytes.data()), static_cast<int>(size)) != 1) {
    return absl::InternalError("the system has no random numbers to give (RAND_bytes of OpenSSL failed)");
  }
  return bytes;
}

std::string Proof(absl::string_view secret, absl::Span<const absl::string_view> parts) {
  std::string message;
  for (const absl::string_view part : parts) {
    for (int shift = 0; shift < 64; shift += 8) {
      message.push_back(static_cast<char>(static_cast<uint64_t>(part.size()) >> shift));
    }
    message.append(part.data(), part.size());
  }
  std::string proof(kProofSize, '\0');
  unsigned int size = 0;
  HMAC(EVP_sha256(), secret.data(), static_cast<int>(secret.size()),
       reinterpret_cast<const unsigned char*>(message.data()), message.size(),
       reinterpret_cast<unsigned char*>(proof.data()), &size);
  return proof;
}

bool SameProof(absl::string_view a, absl::string_view b) {
  return a.size() == b.size() && CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

std::string SecretFile::PathFor(int port) {
  const std::string folder = ReadEnv(Env::kXdgRuntimeDir).value_or("");
  return absl::StrCat(!folder.empty() && IsPrivateFolder(folder) ? folder : "/tmp", "/ddp-store-", geteuid(), "-",
                      port);
}

absl::StatusOr<SecretFile> SecretFile::Create(int port) {
  const absl::StatusOr<std::string> random = RandomBytes(kSecretSize / 2);
  if (!random.ok()) return random.status();
  const std::string path = PathFor(port);
  // Under a name of its own first: who reads `path` meanwhile finds nothing or a whole secret. Renaming replaces what a
  // run that was killed has left; in /tmp the sticky bit keeps us from replacing what belongs to others.
  std::string unfinished = absl::StrCat(path, ".XXXXXX");
  const int fd = mkostemp(unfinished.data(), O_CLOEXEC);
  if (fd < 0) return ErrnoError(path, "mkostemp");
  SecretFile file;
  file.secret_ = absl::BytesToHexString(*random);
  absl::Status status = WriteAll(fd, path, file.secret_);
  close(fd);
  if (status.ok() && rename(unfinished.c_str(), path.c_str()) != 0) status = ErrnoError(path, "rename");
  if (!status.ok()) {
    unlink(unfinished.c_str());
    return status;
  }
  file.path_ = path;
  return file;
}

absl::StatusOr<std::string> SecretFile::Read(int port) { return ReadSecretFile(PathFor(port)); }

SecretFile::SecretFile(SecretFile&& other) noexcept
    : path_(std::exchange(other.path_, {})), secret_(std::exchange(other.secret_, {})) {}

SecretFile& SecretFile::operator=(SecretFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(secret_, other.secret_);
  return *this;
}

// By its text, as the next file may have the number of one that is gone.
void SecretFile::Remove() {
  if (!path_.empty() && ReadSecretFile(path_).value_or("") == secret_) unlink(path_.c_str());
  path_.clear();
}

}  // namespace ddp
