// SPDX-License-Identifier: Apache-2.0
#include "examples/data/file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"

namespace examples {
namespace {

absl::Status Failed(absl::string_view what, absl::string_view path) {
  return absl::ErrnoToStatus(errno, absl::StrCat("cannot ", what, " ", path));
}

std::string FolderOf(const std::string& path) {
  const size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

class AtomicFileImpl final : public AtomicFile {
 public:
  AtomicFileImpl(int fd, std::string path, std::string temporary)
      : fd_(fd), path_(std::move(path)), temporary_(std::move(temporary)) {}

  // Removed while the lock is held: afterwards the name may be another process's.
  ~AtomicFileImpl() override {
    if (!renamed_) unlink(temporary_.c_str());
    close(fd_);
  }

  absl::Status Write(const void* data, size_t size) override {
    const char* next = static_cast<const char*>(data);
    while (size > 0) {
      const ssize_t written = write(fd_, next, size);
      if (written < 0 && errno == EINTR) continue;
      if (written < 0) return Failed("write", temporary_);
      next += written;
      size -= static_cast<size_t>(written);
    }
    return absl::OkStatus();
  }

  absl::Status Commit() override {
    if (fsync(fd_) != 0) return Failed("sync", temporary_);
    if (rename(temporary_.c_str(), path_.c_str()) != 0) return Failed("rename the finished file to", path_);
    renamed_ = true;
    // The new name is on the disk only when the folder is.
    const std::string folder = FolderOf(path_);
    const int fd = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return Failed("open the folder", folder);
    const absl::Cleanup close_fd = [fd] { close(fd); };
    if (fsync(fd) != 0 && errno != EINVAL) return Failed("sync the folder", folder);  // EINVAL: it cannot be synced
    return absl::OkStatus();
  }

 private:
  int fd_;
  std::string path_;
  std::string temporary_;
  bool renamed_ = false;
};

enum class Claim { kMine, kTaken, kGone };

// Locks an open temporary file for as long as it is open. The lock of a process ends with it, so that what is not
// locked belongs to nobody. A file system without locks has to do without. kGone: before we had the lock, its former
// owner renamed or removed it.
Claim ClaimTemporary(int fd, const std::string& temporary) {
  if (flock(fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) return Claim::kTaken;
  struct stat opened, named;
  if (fstat(fd, &opened) != 0 || stat(temporary.c_str(), &named) != 0) return Claim::kGone;
  return opened.st_dev == named.st_dev && opened.st_ino == named.st_ino ? Claim::kMine : Claim::kGone;
}

std::string TemporaryOf(const std::string& path) { return absl::StrCat(path, ".tmp"); }

}  // namespace

absl::StatusOr<std::vector<uint8_t>> ReadFile(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // a pipe by this name may not stop us
  if (fd < 0) return Failed("open", path);
  const absl::Cleanup close_fd = [fd] { close(fd); };
  struct stat info;
  if (fstat(fd, &info) != 0) return Failed("look at", path);
  if (!S_ISREG(info.st_mode)) return absl::InvalidArgumentError(absl::StrCat(path, " is not a regular file"));
  std::vector<uint8_t> bytes(static_cast<size_t>(info.st_size));
  size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t got = read(fd, bytes.data() + done, bytes.size() - done);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return Failed("read", path);
    if (got == 0) break;  // it shrank meanwhile: whoever decodes it will find it truncated
    done += static_cast<size_t>(got);
  }
  bytes.resize(done);
  return bytes;
}

absl::StatusOr<std::unique_ptr<AtomicFile>> AtomicFile::Create(const std::string& path) {
  // Renaming over a device or a folder would replace or miss it.
  struct stat info;
  if (stat(path.c_str(), &info) == 0 && !S_ISREG(info.st_mode)) {
    return absl::InvalidArgumentError(absl::StrCat("cannot write ", path, ": it exists and is not a regular file"));
  }
  std::string temporary = TemporaryOf(path);
  while (true) {
    // O_NONBLOCK: a pipe by this name may not stop us.
    const int fd = open(temporary.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0666);
    if (fd < 0) return Failed("create", temporary);
    const Claim claim = ClaimTemporary(fd, temporary);
    if (claim == Claim::kMine) {
      auto file = std::make_unique<AtomicFileImpl>(fd, path, temporary);
      if (ftruncate(fd, 0) != 0) return Failed("empty", temporary);
      return file;
    }
    close(fd);
    if (claim == Claim::kTaken) {
      return absl::FailedPreconditionError(
          absl::StrCat("cannot write ", path, ": another process is writing it; give each run a file of its own"));
    }
  }
}

void RemoveUnfinished(const std::string& path) {
  const std::string temporary = TemporaryOf(path);
  const int fd = open(temporary.c_str(), O_WRONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
  if (fd < 0) return;
  if (ClaimTemporary(fd, temporary) == Claim::kMine) unlink(temporary.c_str());
  close(fd);
}

}  // namespace examples
