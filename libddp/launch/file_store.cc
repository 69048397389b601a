// SPDX-License-Identifier: Apache-2.0
// The file is a sequence of records, each a fixed head, then run id, key and value. Whoever writes holds an exclusive
// flock, has first read all that others wrote, and appends one record; whoever reads holds a shared one, so that nobody
// writes meanwhile. Both read on from where they last stopped into a map. A record that ends after the file does is
// therefore one whose writer died: readers ignore it, and the next writer cuts it off.
//
// Keys of other runs are stepped over, so what an earlier run left behind is not believed. A run that is still under
// way is another matter: its ranks and ours would wait for each other's files. So each store holds a read lock on one
// byte far behind the end of the file, which byte depends on the run id; who finds another one locked is refused. The
// lock is of the open file: the kernel releases it when the last process that has it open ends. That is the rank, or a
// child that it forked; a program that it started has not. A lock of the process would end with the rank, but also when
// another of its threads, as a rank of its own, closes the file.
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ddp/store.h"
#include "libddp/base/log.h"
#include "libddp/launch/store_limits.h"

namespace ddp {
namespace {

constexpr char kMarker[4] = {'d', 'd', 'p', '1'};
constexpr off_t kRunBytes = off_t{1} << 40;  // where the bytes that stand for runs begin
constexpr off_t kRunBytesCount = off_t{1} << 20;
constexpr absl::Duration kOpenTimeout = absl::Minutes(1);

// Each kind has keys of its own. Counter values are int64_t, the total after an Add.
enum EntryKind : uint32_t { kValue = 0, kCounter = 1, kOpenings = 2, kKinds = 3 };

struct Head {
  char marker[4];
  uint32_t kind;
  uint32_t run_id_size;
  uint32_t key_size;
  uint32_t value_size;
};

absl::Status ErrnoError(int error, absl::string_view call, absl::string_view path, absl::string_view remedy) {
  absl::StatusCode code = absl::StatusCode::kInvalidArgument;
  if (error == EACCES || error == EPERM || error == EROFS) code = absl::StatusCode::kPermissionDenied;
  if (error == ENOSPC || error == EDQUOT || error == EFBIG || error == EMFILE || error == ENFILE || error == ENOMEM) {
    code = absl::StatusCode::kResourceExhausted;
  }
  return absl::Status(code, absl::StrCat("file store '", path, "': ", call, ": ", std::strerror(error), "; ", remedy));
}

class FileDescriptor {
 public:
  explicit FileDescriptor(int fd = -1) : fd_(fd) {}
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~FileDescriptor() {
    if (fd_ >= 0) close(fd_);
  }
  int get() const { return fd_; }

 private:
  int fd_;
};

// Holds a lock on the file while it lives; released by the kernel if we die.
class FileLock {
 public:
  FileLock(int fd, int how) : fd_(fd) {
    while (flock(fd_, how | LOCK_NB) != 0) {
      error_ = errno;
      if (error_ != EINTR) return;
    }
    error_ = 0;
  }
  ~FileLock() {
    if (error_ == 0) flock(fd_, LOCK_UN);
  }
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;

  int error() const { return error_; }
  bool busy() const { return error_ == EWOULDBLOCK; }

 private:
  const int fd_;
  int error_ = 0;
};

// Sleeps 1, 2, 4, 8, 10, 10... ms, never beyond the deadline.
class RetryDelay {
 public:
  void Sleep(absl::Time deadline) {
    absl::SleepFor(std::clamp(deadline - absl::Now(), absl::ZeroDuration(), pause_));
    pause_ = std::min(2 * pause_, absl::Milliseconds(10));
  }

 private:
  absl::Duration pause_ = absl::Milliseconds(1);
};

class FileStore final : public Store {
 public:
  explicit FileStore(FileStoreOptions options) : options_(std::move(options)) {}

  // Opens the file and counts the opening.
  absl::Status Open();

  absl::Status Set(absl::string_view key, absl::string_view value, absl::Time deadline) override;
  absl::StatusOr<std::string> Get(absl::string_view key, absl::Time deadline) override;
  absl::StatusOr<int64_t> Add(absl::string_view key, int64_t delta, absl::Time deadline) override;

 private:
  using Map = std::map<std::string, std::string, std::less<>>;

  absl::Status Reopen();
  absl::Status ClaimRun();
  std::string Name() const { return absl::StrCat("file store '", options_.path, "'"); }
  absl::Status CheckCall(absl::string_view key, size_t value_size) const;
  absl::Status LockError(int error) const;
  absl::Status Late(absl::string_view what, absl::string_view key, absl::string_view remedy) const;
  absl::Status Foreign(absl::string_view what) const;

  // Calls `write` under an exclusive lock, with the map up to date, as soon as the lock can be had.
  template <typename Write>
  absl::Status Exclusively(absl::string_view key, absl::Time deadline, const Write& write);
  absl::StatusOr<int64_t> Increase(EntryKind kind, absl::string_view key, int64_t delta);

  // These three need a lock on the file.
  absl::Status ReadOn();
  absl::StatusOr<bool> ReadRecord(off_t end);
  absl::Status Append(EntryKind kind, absl::string_view key, absl::string_view value);
  absl::Status ReadAt(off_t at, char* data, size_t size) const;

  const FileStoreOptions options_;
  pid_t pid_ = 0;
  std::mutex mutex_;  // of all below; never held while sleeping
  FileDescriptor file_;
  off_t read_ = 0;  // all complete records before are in the maps
  Map maps_[kKinds];
};

absl::Status FileStore::Reopen() {
  // O_NONBLOCK: whatever the path names, opening it does not hang. In a folder that others may write to, a link or a
  // file of somebody else's would let them decide what the ranks tell each other.
  constexpr int kFlags = O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK | O_NOCTTY;
  file_ = FileDescriptor(open(options_.path.c_str(), kFlags, 0600));
  if (file_.get() < 0 && errno == ELOOP) {
    return absl::PermissionDeniedError(
        absl::StrCat("file store '", options_.path, "' is a symbolic link; name the file itself"));
  }
  if (file_.get() < 0) {
    return ErrnoError(errno, "open", options_.path, "name a file that this user may write, in a folder that exists");
  }
  struct stat about;
  if (fstat(file_.get(), &about) != 0) return ErrnoError(errno, "fstat", options_.path, "name another file");
  if (!S_ISREG(about.st_mode)) {
    return absl::InvalidArgumentError(
        absl::StrCat("file store '", options_.path, "' is not a regular file; name another one"));
  }
  if (about.st_uid != geteuid() || (about.st_mode & (S_IWGRP | S_IWOTH)) != 0) {
    return absl::PermissionDeniedError(absl::StrCat(
        "file store '", options_.path, "' ",
        about.st_uid != geteuid() ? absl::StrCat("belongs to user ", about.st_uid) : "can be written by other users",
        "; name a file that does not exist yet, in a folder of your own"));
  }
  return absl::OkStatus();
}

// Needs the exclusive lock.
absl::Status FileStore::ClaimRun() {
  uint64_t hash = 14695981039346656037u;  // FNV-1a
  for (const char c : options_.run_id) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211u;
  const off_t mine = kRunBytes + static_cast<off_t>(hash % kRunBytesCount);
  const std::pair<off_t, off_t> others[] = {{kRunBytes, mine}, {mine + 1, kRunBytes + kRunBytesCount}};
  for (const auto& [begin, end] : others) {
    if (begin == end) continue;  // a length of 0 would mean all that follows
    struct flock lock = {};
    lock.l_type = F_WRLCK;
    lock.l_whence = SEEK_SET;
    lock.l_start = begin;
    lock.l_len = end - begin;
    if (fcntl(file_.get(), F_OFD_GETLK, &lock) != 0) return LockError(errno);
    if (lock.l_type != F_UNLCK) {
      return absl::FailedPreconditionError(
          absl::StrCat("file store '", options_.path, "': another run is using it, not run '", options_.run_id,
                       "'; give each run a path of its own, or end what an earlier "
                       "run has left running, a forked child of a rank included (fuser "
                       "names the processes that have the file open)"));
    }
  }
  struct flock lock = {};
  lock.l_type = F_RDLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = mine;
  lock.l_len = 1;
  return fcntl(file_.get(), F_OFD_SETLK, &lock) == 0 ? absl::OkStatus() : LockError(errno);
}

absl::Status FileStore::Open() {
  pid_ = getpid();
  if (options_.run_id.size() > kMaxStoreKey) {
    return absl::InvalidArgumentError(absl::StrCat("file store '", options_.path, "': the run id has ",
                                                   options_.run_id.size(), " bytes, more than ", kMaxStoreKey,
                                                   "; choose a shorter one"));
  }
  if (absl::Status s = Reopen(); !s.ok()) return s;
  // Until we have the lock, the last rank of an earlier run may remove the name: then what we opened is nobody's file
  // any more, and we open again.
  const absl::Time deadline = absl::Now() + kOpenTimeout;
  for (bool counted = false; !counted;) {
    const absl::Status s = Exclusively("", deadline, [&]() -> absl::Status {
      struct stat ours, named;
      if (fstat(file_.get(), &ours) != 0) return ErrnoError(errno, "fstat", options_.path, "name another file");
      if (lstat(options_.path.c_str(), &named) != 0 || named.st_ino != ours.st_ino || named.st_dev != ours.st_dev) {
        return absl::OkStatus();
      }
      if (absl::Status claimed = ClaimRun(); !claimed.ok()) return claimed;
      const absl::StatusOr<int64_t> openings = Increase(kOpenings, "", 1);
      if (!openings.ok()) return openings.status();
      counted = true;
      if (*openings == options_.world_size && unlink(options_.path.c_str()) != 0) {
        LogWarn("file store '", options_.path, "': cannot remove the name: ", std::strerror(errno),
                "; delete it after the run");
      }
      return absl::OkStatus();
    });
    if (!s.ok()) return s;
    if (!counted) {
      std::lock_guard lock(mutex_);
      read_ = 0;
      for (Map& map : maps_) map.clear();
      if (absl::Status reopened = Reopen(); !reopened.ok()) return reopened;
    }
  }
  return absl::OkStatus();
}

absl::Status FileStore::CheckCall(absl::string_view key, size_t value_size) const {
  if (absl::Status s = CheckStoreLimits(Name(), key, value_size); !s.ok()) return s;
  // After fork, parent and child share one lock, which then keeps them apart no longer.
  if (getpid() != pid_) {
    return absl::FailedPreconditionError(
        absl::StrCat("file store '", options_.path, "' was opened before fork; open one in each process"));
  }
  return absl::OkStatus();
}

absl::Status FileStore::LockError(int error) const {
  return ErrnoError(error, "flock", options_.path, "name a file on a local file system");
}

absl::Status FileStore::Late(absl::string_view what, absl::string_view key, absl::string_view remedy) const {
  return absl::DeadlineExceededError(
      absl::StrCat("file store '", options_.path, "': ", what, " key '", key, "' in time; ", remedy));
}

absl::Status FileStore::Foreign(absl::string_view what) const {
  return absl::DataLossError(absl::StrCat("file store '", options_.path, "': ", what, " at byte ", read_,
                                          "; it is damaged or not a store: delete it, or name another file"));
}

template <typename Write>
absl::Status FileStore::Exclusively(absl::string_view key, absl::Time deadline, const Write& write) {
  for (RetryDelay delay;; delay.Sleep(deadline)) {
    {
      std::lock_guard guard(mutex_);
      const FileLock lock(file_.get(), LOCK_EX);
      if (lock.error() == 0) {
        absl::Status s = ReadOn();
        return s.ok() ? write() : s;
      }
      if (!lock.busy()) return LockError(lock.error());
    }
    if (absl::Now() >= deadline) {
      return Late("another process kept the file locked, no way to write", key, "is one stopped, or hung?");
    }
  }
}

absl::Status FileStore::Set(absl::string_view key, absl::string_view value, absl::Time deadline) {
  if (absl::Status s = CheckCall(key, value.size()); !s.ok()) return s;
  return Exclusively(key, deadline, [&] { return Append(kValue, key, value); });
}

absl::StatusOr<int64_t> FileStore::Increase(EntryKind kind, absl::string_view key, int64_t delta) {
  int64_t total = 0;
  if (const auto it = maps_[kind].find(key); it != maps_[kind].end()) {
    std::memcpy(&total, it->second.data(), sizeof(total));
  }
  const absl::StatusOr<int64_t> sum = CounterAfterAdd(Name(), key, total, delta);
  if (!sum.ok()) return sum;
  const absl::Status s = Append(kind, key, {reinterpret_cast<const char*>(&*sum), sizeof(*sum)});
  if (!s.ok()) return s;
  return sum;
}

absl::StatusOr<int64_t> FileStore::Add(absl::string_view key, int64_t delta, absl::Time deadline) {
  if (absl::Status s = CheckCall(key, sizeof(delta)); !s.ok()) return s;
  absl::StatusOr<int64_t> total = 0;
  absl::Status s = Exclusively(key, deadline, [&] {
    total = Increase(kCounter, key, delta);
    return total.status();
  });
  if (!s.ok()) return s;
  return total;
}

absl::StatusOr<std::string> FileStore::Get(absl::string_view key, absl::Time deadline) {
  if (absl::Status s = CheckCall(key, 0); !s.ok()) return s;
  for (RetryDelay delay;; delay.Sleep(deadline)) {
    {
      std::lock_guard guard(mutex_);
      // Nothing to read, nothing to lock: waiting readers do not keep writers out.
      struct stat about;
      if (fstat(file_.get(), &about) != 0) return ErrnoError(errno, "fstat", options_.path, "name another file");
      if (about.st_size != read_) {
        const FileLock lock(file_.get(), LOCK_SH);
        if (lock.error() == 0) {
          if (absl::Status s = ReadOn(); !s.ok()) return s;
        } else if (!lock.busy()) {
          return LockError(lock.error());
        }
      }
      const auto it = maps_[kValue].find(key);
      if (it != maps_[kValue].end()) return it->second;
    }
    if (absl::Now() >= deadline) {
      return Late("no rank has set", key, "is every rank started, with the same path and run id?");
    }
  }
}

absl::Status FileStore::ReadAt(off_t at, char* data, size_t size) const {
  while (size > 0) {
    const ssize_t n = pread(file_.get(), data, size, at);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return ErrnoError(errno, "read", options_.path, "name another file");
    if (n == 0) return Foreign("the file was cut off by another program");
    at += n;
    data += n;
    size -= static_cast<size_t>(n);
  }
  return absl::OkStatus();
}

absl::Status FileStore::ReadOn() {
  struct stat about;
  if (fstat(file_.get(), &about) != 0) return ErrnoError(errno, "fstat", options_.path, "name another file");
  if (about.st_size < read_) return Foreign("the file was cut off by another program");
  while (true) {
    const absl::StatusOr<bool> more = ReadRecord(about.st_size);
    if (!more.ok()) return more.status();
    if (!*more) return absl::OkStatus();
  }
}

// False if no complete record is left before `end`. Records of other runs are stepped over.
absl::StatusOr<bool> FileStore::ReadRecord(off_t end) {
  const size_t left = static_cast<size_t>(end - read_);
  Head head = {};
  if (absl::Status s = ReadAt(read_, reinterpret_cast<char*>(&head), std::min(left, sizeof(head))); !s.ok()) return s;
  if (std::memcmp(head.marker, kMarker, std::min(left, sizeof(kMarker))) != 0) return Foreign("no record starts");
  if (left < sizeof(head)) return false;
  if (head.kind >= kKinds || head.run_id_size > kMaxStoreKey || head.key_size > kMaxStoreKey ||
      head.value_size > kMaxStoreValue || (head.kind != kValue && head.value_size != sizeof(int64_t))) {
    return Foreign("an impossible record");
  }
  const size_t size = sizeof(head) + head.run_id_size + head.key_size + head.value_size;
  if (left < size) return false;
  std::string names(head.run_id_size + head.key_size, '\0');
  if (absl::Status s = ReadAt(read_ + sizeof(head), names.data(), names.size()); !s.ok()) return s;
  if (absl::string_view(names).substr(0, head.run_id_size) == options_.run_id) {
    std::string value(head.value_size, '\0');
    if (absl::Status s = ReadAt(read_ + size - value.size(), value.data(), value.size()); !s.ok()) return s;
    maps_[head.kind].insert_or_assign(names.substr(head.run_id_size), std::move(value));
  }
  read_ += static_cast<off_t>(size);
  return true;
}

absl::Status FileStore::Append(EntryKind kind, absl::string_view key, absl::string_view value) {
  Head head = {{},
               kind,
               static_cast<uint32_t>(options_.run_id.size()),
               static_cast<uint32_t>(key.size()),
               static_cast<uint32_t>(value.size())};
  std::memcpy(head.marker, kMarker, sizeof(kMarker));
  const std::string record =
      absl::StrCat(absl::string_view(reinterpret_cast<const char*>(&head), sizeof(head)), options_.run_id, key, value);
  // What a dead writer left behind goes first: a shorter record written over it would be followed by the rest of it.
  if (ftruncate(file_.get(), read_) != 0) return ErrnoError(errno, "ftruncate", options_.path, "name another file");
  for (size_t done = 0; done < record.size();) {
    const ssize_t n = pwrite(file_.get(), record.data() + done, record.size() - done, read_ + static_cast<off_t>(done));
    if (n < 0 && errno == EINTR) continue;
    // What was written of the record stays as its torn tail.
    if (n < 0) return ErrnoError(errno, "write", options_.path, "make room, or name a file on another file system");
    done += static_cast<size_t>(n);
  }
  read_ += static_cast<off_t>(record.size());
  maps_[kind].insert_or_assign(std::string(key), std::string(value));
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::shared_ptr<Store>> CreateFileStore(FileStoreOptions options) {
  auto store = std::make_shared<FileStore>(std::move(options));
  if (absl::Status s = store->Open(); !s.ok()) return s;
  return store;
}

}  // namespace ddp
