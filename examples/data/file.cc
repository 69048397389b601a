// SPDX-License-Identifier: Apache-2.0
#include "examples/data/file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

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

enum class Claim : uint8_t { kMine, kTaken, kGone };

// Whether an open file still has this name.
bool HasName(int fd, const std::string& path) {
  struct stat opened, named;
  return fstat(fd, &opened) == 0 && stat(path.c_str(), &named) == 0 && opened.st_dev == named.st_dev &&
         opened.st_ino == named.st_ino;
}

// Locks an open lock file for as long as it is open. A file system without locks has to do without. kGone: before we
// had the lock, its former owner removed the file.
Claim ClaimLock(int fd, const std::string& lock) {
  if (flock(fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) return Claim::kTaken;
  return HasName(fd, lock) ? Claim::kMine : Claim::kGone;
}

std::string LockOf(const std::string& path) { return absl::StrCat(path, ".lock"); }
std::string TemporaryOf(const std::string& path) { return absl::StrCat(path, ".tmp"); }

// Whether a process of this run has claimed this lock file.
bool IsOf(const std::string& lock, uint64_t run) {
  const int fd = open(lock.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
  if (fd < 0) return false;
  uint64_t its = 0;
  const bool read = pread(fd, &its, sizeof its, 0) == sizeof its;
  close(fd);
  return read && its == run;
}

// O_NONBLOCK: a pipe by this name may not stop us.
int OpenOwn(const std::string& path, int flags) {
  return open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | flags, 0666);
}

class AtomicFileImpl final : public AtomicFile {
 public:
  AtomicFileImpl(int lock, std::string path) : lock_(lock), path_(std::move(path)), temporary_(TemporaryOf(path_)) {}

  // Removed while the lock is held: afterwards the names may be another process's.
  ~AtomicFileImpl() override {
    Close();
    if (CheckOwner().ok()) {
      unlink(temporary_.c_str());
      unlink(LockOf(path_).c_str());
    }
    close(lock_);
  }

  absl::Status Begin() override {
    Close();
    if (absl::Status s = CheckOwner(); !s.ok()) return s;
    fd_ = OpenOwn(temporary_, O_TRUNC);
    return fd_ < 0 ? Failed("create", temporary_) : absl::OkStatus();
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
    Close();
    if (absl::Status s = CheckOwner(); !s.ok()) return s;
    if (rename(temporary_.c_str(), path_.c_str()) != 0) return Failed("rename the finished file to", path_);
    // The new name is on the disk only when the folder is.
    const std::string folder = FolderOf(path_);
    const int fd = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return Failed("open the folder", folder);
    const absl::Cleanup close_fd = [fd] { close(fd); };
    if (fsync(fd) != 0 && errno != EINVAL) return Failed("sync the folder", folder);  // EINVAL: it cannot be synced
    return absl::OkStatus();
  }

  const std::string& path() const override { return path_; }

 private:
  void Close() {
    if (fd_ >= 0) close(std::exchange(fd_, -1));
  }
  absl::Status CheckOwner() const {
    if (HasName(lock_, LockOf(path_))) return absl::OkStatus();
    return absl::FailedPreconditionError(
        absl::StrCat("cannot write ", path_, " any more: ", LockOf(path_),
                     " is not this process's any more; the others of its run went on without it"));
  }

  const int lock_;
  const std::string path_;
  const std::string temporary_;
  int fd_ = -1;
};

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

std::string FollowLinks(std::string path) {
  constexpr int kMost = 40;  // as many as Linux follows
  std::error_code none;
  for (int i = 0; i < kMost && std::filesystem::is_symlink(path, none); ++i) {
    path = (std::filesystem::path(path).parent_path() / std::filesystem::read_symlink(path, none)).string();
  }
  return path;
}

absl::StatusOr<std::unique_ptr<AtomicFile>> AtomicFile::Create(const std::string& path, absl::Duration patience,
                                                               uint64_t run) {
  // Renaming over a device or a folder would replace or miss it.
  struct stat info;
  if (stat(path.c_str(), &info) == 0 && !S_ISREG(info.st_mode)) {
    return absl::InvalidArgumentError(absl::StrCat("cannot write ", path, ": it exists and is not a regular file"));
  }
  std::string target = FollowLinks(path);
  const std::string lock = LockOf(target);
  const absl::Time deadline = absl::Now() + patience;
  while (true) {
    const int fd = OpenOwn(lock, 0);
    if (fd < 0) return Failed("create", lock);
    const Claim claim = ClaimLock(fd, lock);
    if (claim == Claim::kMine) {
      if (run != 0 && (ftruncate(fd, 0) != 0 || pwrite(fd, &run, sizeof run, 0) != sizeof run)) {
        const absl::Status status = Failed("write", lock);
        close(fd);
        return status;
      }
      return std::make_unique<AtomicFileImpl>(fd, std::move(target));
    }
    const absl::Cleanup close_fd = [fd] { close(fd); };
    if (claim == Claim::kGone) continue;
    if (absl::Now() >= deadline) {
      if (run != 0 && IsOf(lock, run)) {
        unlink(TemporaryOf(target).c_str());
        unlink(lock.c_str());
        continue;
      }
      return absl::FailedPreconditionError(absl::StrCat("cannot write ", path,
                                                        ": another process writes it, and holds ", lock,
                                                        "; wait for its end, or give each run a file of its own"));
    }
    absl::SleepFor(absl::Milliseconds(20));
  }
}

void RemoveUnfinished(const std::string& path) {
  const std::string target = FollowLinks(path);
  if (access(LockOf(target).c_str(), F_OK) == 0) AtomicFile::Create(target).IgnoreError();
}

}  // namespace examples
