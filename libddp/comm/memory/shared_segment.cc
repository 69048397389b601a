// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/memory/shared_segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "libddp/base/among_threads.h"
#include "libddp/base/descriptors.h"
#include "libddp/base/env.h"
#include "libddp/base/memory_room.h"
#include "libddp/base/page.h"
#include "libddp/base/process_id.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

namespace ddp {
namespace {

constexpr char kProc[] = "/proc/";

// On the byte of that number, whether or not the file has it. A record lock, since unlike one of the open file
// description it does not pass to the children of a fork, which may live on.
struct flock LockOf(int place) {
  struct flock lock = {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = place;
  lock.l_len = 1;
  return lock;
}

std::string Failure(absl::string_view call, int error) { return absl::StrCat(call, ": ", std::strerror(error)); }

absl::Status NoMemory(absl::string_view call, int error, size_t bytes) {
  return absl::ResourceExhaustedError(absl::StrCat("no shared memory left for ", bytes, " bytes (",
                                                   Failure(call, error),
                                                   "): free some, or give the container more (docker run "
                                                   "--shm-size=, --memory=)"));
}

// A larger file ends the process by SIGXFSZ.
absl::Status CheckFileLimit(size_t bytes) {
  rlimit limit = {};
  if (getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY || bytes <= limit.rlim_cur) {
    return absl::OkStatus();
  }
  return absl::ResourceExhaustedError(absl::StrCat("shared memory of ", bytes,
                                                   " bytes is larger than a file of this process may be, ",
                                                   limit.rlim_cur, " bytes; raise ulimit -f"));
}

}  // namespace

absl::StatusOr<SharedSegment::Kind> SharedSegment::KindFromEnv() {
  const std::string text = ReadEnv(Env::kSharedMemory).value_or("auto");
  if (text == "auto") return Kind::kAuto;
  if (text == "memfd") return Kind::kMemfd;
  if (text == "posix") return Kind::kPosix;
  return absl::InvalidArgumentError(
      absl::StrCat("DDP_SHARED_MEMORY is '", text, "'; it must be auto, memfd or posix, or unset"));
}

absl::StatusOr<std::shared_ptr<SharedSegment>> SharedSegment::Create(size_t bytes, Kind kind) {
  const ProcessId self = ProcessId::OfSelf();
  std::shared_ptr<SharedSegment> segment(new SharedSegment);
  segment->bytes_ = RoundUp(bytes, kHugePage);
  if (absl::Status s = CheckFileLimit(segment->bytes_); !s.ok()) return s;
  std::string where;
  if (kind != Kind::kPosix) {
    segment->fd_ = memfd_create("ddp", MFD_CLOEXEC);
    const int error = segment->fd_ < 0 ? errno : 0;
    // Not Unavailable: another kind of memory takes a file descriptor, too.
    if (absl::Status s = OutOfDescriptors("memfd_create", error); !s.ok()) return s;
    if (error != 0 && kind == Kind::kMemfd) {
      return absl::UnavailableError(
          absl::StrCat(Failure("memfd_create", error), "; DDP_SHARED_MEMORY=posix uses /dev/shm instead"));
    }
    where = absl::StrCat(kProc, self.pid, "/fd/", segment->fd_);
  }
  if (segment->fd_ < 0) {
    where = absl::StrCat("/ddp-", self.pid, "-", absl::Hex(self.token), "-",
                         absl::Hex(reinterpret_cast<uintptr_t>(segment.get())));
    segment->fd_ = shm_open(where.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (const int error = errno; segment->fd_ < 0) {
      if (absl::Status s = OutOfDescriptors("shm_open", error); !s.ok()) return s;
      return absl::UnavailableError(absl::StrCat(Failure("shm_open", error), "; is /dev/shm mounted and writable?"));
    }
    segment->posix_name_ = where;
  }
  if (ftruncate(segment->fd_, static_cast<off_t>(segment->bytes_)) != 0) return NoMemory("ftruncate", errno, bytes);
  if (absl::Status s = segment->Map(); !s.ok()) return s;
  struct stat file = {};
  if (fstat(segment->fd_, &file) != 0) return absl::UnavailableError(Failure("fstat", errno));
  segment->handle_ = absl::StrCat(self.token, ",", AmongThreads<SharedSegment>::Publish(segment), ",", segment->bytes_,
                                  ",", file.st_dev, ",", file.st_ino, ",", where);
  return segment;
}

// What /proc or /dev/shm shows under the name may be something else in this process's namespaces: the kernel's number
// for the file tells. Where it is another file, it is not opened.
absl::StatusOr<std::shared_ptr<SharedSegment>> SharedSegment::Open(absl::string_view handle) {
  const std::vector<absl::string_view> fields = absl::StrSplit(handle, absl::MaxSplits(',', 5));
  uint64_t token = 0, number = 0, bytes = 0, device = 0, inode = 0;
  if (fields.size() != 6 || !absl::SimpleAtoi(fields[0], &token) || !absl::SimpleAtoi(fields[1], &number) ||
      !absl::SimpleAtoi(fields[2], &bytes) || !absl::SimpleAtoi(fields[3], &device) ||
      !absl::SimpleAtoi(fields[4], &inode)) {
    return absl::InternalError(absl::StrCat("not the handle of a shared segment: '", handle, "'"));
  }
  if (token == ProcessId::OfSelf().token) {  // a thread of this process made it
    std::shared_ptr<SharedSegment> theirs = AmongThreads<SharedSegment>::Find(number);
    if (theirs == nullptr) return absl::AbortedError("the rank that made the shared memory has given it up");
    theirs->used_by_threads_ = true;
    return theirs;
  }
  const std::string where(fields[5]);
  const bool memfd = where.rfind(kProc, 0) == 0;
  const auto unreachable = [&](const std::string& why) {
    return absl::UnavailableError(absl::StrCat(
        "cannot open the shared memory of a peer, ", where, " (", why, "): ",
        memfd ? "do all ranks run as one user in one container? Else DDP_SHARED_MEMORY=auto, and containers that have "
                "/dev/shm in common (docker run --ipc=host)"
              : "ranks of one host name must run as one user and have /dev/shm in common (docker run --ipc=host); in "
                "containers of different host names they are nodes, which exchange messages over MPI"));
  };
  const auto is_meant = [&](const struct stat& file) {
    return file.st_dev == device && file.st_ino == inode && static_cast<uint64_t>(file.st_size) == bytes;
  };
  struct stat file = {};
  if (memfd && stat(where.c_str(), &file) != 0) return unreachable(Failure("stat", errno));
  if (memfd && !is_meant(file)) return unreachable("another process has that number here");
  std::shared_ptr<SharedSegment> segment(new SharedSegment);
  segment->bytes_ = bytes;
  segment->handle_ = std::string(handle);
  segment->fd_ = memfd ? open(where.c_str(), O_RDWR | O_CLOEXEC) : shm_open(where.c_str(), O_RDWR | O_CLOEXEC, 0);
  if (const int error = errno; segment->fd_ < 0) {
    const char* const call = memfd ? "open" : "shm_open";
    if (absl::Status s = OutOfDescriptors(call, error); !s.ok()) return s;
    return unreachable(Failure(call, error));
  }
  if (fstat(segment->fd_, &file) != 0) return unreachable(Failure("fstat", errno));
  if (!is_meant(file)) return unreachable("another file has that name here");
  if (!memfd) segment->posix_name_ = where;  // whoever is left takes the name away
  if (absl::Status s = segment->Map(); !s.ok()) return s;
  return segment;
}

absl::Status SharedSegment::Map() {
  // On a huge-page boundary, so that file and addresses agree on where huge pages begin: take a larger hole, then map
  // inside it.
  void* hole = mmap(nullptr, bytes_ + kHugePage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (hole == MAP_FAILED) return NoMemory("mmap", errno, bytes_);
  char* const begin = static_cast<char*>(hole);
  char* const at = begin + (kHugePage - reinterpret_cast<uintptr_t>(begin) % kHugePage) % kHugePage;
  void* mapped = mmap(at, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd_, 0);
  const int error = errno;
  if (mapped == MAP_FAILED) {
    munmap(hole, bytes_ + kHugePage);
    return NoMemory("mmap", error, bytes_);
  }
  if (at > begin) munmap(begin, static_cast<size_t>(at - begin));
  if (at + bytes_ < begin + bytes_ + kHugePage) {
    munmap(at + bytes_, static_cast<size_t>(begin + kHugePage - at));
  }
  data_ = at;
  return absl::OkStatus();
}

SharedSegment::~SharedSegment() {
  if (data_ != nullptr) munmap(data_, bytes_);
  Seal();
  if (fd_ >= 0) close(fd_);
}

absl::Status SharedSegment::Reserve(size_t offset, size_t bytes) {
  if (absl::Status s = CheckRoom({MemoryRoom::For(bytes)}, bytes); !s.ok()) return s;
  return Back(offset, bytes);
}

// Piece by piece: at a signal a kernel before 6.10 gives back what the call has reserved so far, so that under a timer
// of the program's one call for everything would never end. A piece that is interrupted is tried again in halves.
absl::Status SharedSegment::Back(size_t offset, size_t bytes) {
  const size_t end = offset + bytes;
  for (size_t at = offset, most = kHugePage; at < end;) {
    const size_t piece = std::min(end - at, most - at % most);
    const int error = posix_fallocate(fd_, static_cast<off_t>(at), static_cast<off_t>(piece));
    if (error == EINTR) {
      most = std::max(PageSize(), most / 2);
    } else if (error == 0) {
      at += piece;
      most = std::min(kHugePage, most * 2);
    } else {
      return NoMemory("posix_fallocate", error, bytes);
    }
  }
  return absl::OkStatus();
}

absl::Status SharedSegment::ReserveHugePages(size_t offset, size_t bytes) {
  if (absl::Status s = CheckRoom({MemoryRoom::For(bytes)}, bytes); !s.ok()) return s;
  const size_t from = RoundUp(offset, kHugePage), to = (offset + bytes) / kHugePage * kHugePage;
  bool begun = from < to;
  for (size_t at = from; begun && at < to; at += kHugePage) {
    begun = Back(at, PageSize()).ok();
  }
  if (begun) madvise(data_ + from, to - from, MADV_COLLAPSE);
  return Back(offset, bytes);
}

void SharedSegment::Prepare(size_t offset, size_t bytes) {
  const auto [begin, end] = WholePages(offset, bytes, PageSize());
  if (bytes >= kHugePage) {
    const size_t from = RoundUp(begin, kHugePage), to = end / kHugePage * kHugePage;
    if (to > from) madvise(data_ + from, to - from, MADV_COLLAPSE);
  }
  madvise(data_ + begin, end - begin, MADV_POPULATE_WRITE);
}

void SharedSegment::Seal() {
  // Ranks that are threads share the object: the first to come does it.
  if (!sealed_.exchange(true) && !posix_name_.empty()) shm_unlink(posix_name_.c_str());
}

void SharedSegment::Mark(int place) const {
  const struct flock lock = LockOf(place);
  static_cast<void>(fcntl(fd_, F_SETLK, &lock));
}

bool SharedSegment::Marked(int place) const {
  struct flock lock = LockOf(place);
  return fcntl(fd_, F_GETLK, &lock) == 0 && lock.l_type != F_UNLCK;
}

absl::Status SharedSegment::MapAt(char* address, size_t offset, size_t bytes) {
  if (absl::Status s = MapAt(address, offset, bytes, MAP_SHARED); !s.ok()) return s;
  madvise(address, bytes, MADV_POPULATE_WRITE);  // only speed depends on it
  return absl::OkStatus();
}

// Somewhere else first: if that fails, what was mapped before is still there.
absl::Status SharedSegment::MapAt(char* address, size_t offset, size_t bytes, int sharing) {
  void* const fresh = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, sharing, fd_, static_cast<off_t>(offset));
  if (fresh == MAP_FAILED) return NoMemory("mmap", errno, bytes);
  if (mremap(fresh, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, address) != MAP_FAILED) return absl::OkStatus();
  const int error = errno;
  munmap(fresh, bytes);
  return NoMemory("mremap", error, bytes);
}

// A private mapping shows the common pages until the process first writes to one, which gives it a copy. The kernel
// makes that copy; so whatever this process writes meanwhile, before or after, goes into it.
absl::Status SharedSegment::MakePrivate(char* address, size_t offset, size_t bytes) {
  const size_t page = PageSize();
  const PageSpan span = WholePages(offset, bytes, page);
  address -= offset - span.begin;
  offset = span.begin;
  bytes = span.end - span.begin;
  if (absl::Status s = CheckRoom({MemoryRoom::For(bytes)}, bytes); !s.ok()) return s;
  // Once only: mapped a second time, a page would show again what the others have made of it.
  std::lock_guard<std::mutex> lock(private_mutex_);
  private_.resize(bytes_ / page);
  const auto is_private = [&](size_t at) { return private_[(offset + at) / page]; };
  for (size_t begin = 0, end = 0; begin < bytes; begin = end) {
    for (end = begin; end < bytes && is_private(end) == is_private(begin);) end += page;
    if (is_private(begin)) continue;
    if (absl::Status s = MakePagesPrivate(address + begin, offset + begin, end - begin); !s.ok()) return s;
    for (size_t at = begin; at < end; at += page) private_[(offset + at) / page] = true;
  }
  return absl::OkStatus();
}

absl::Status SharedSegment::MakePagesPrivate(char* address, size_t offset, size_t bytes) {
  if (absl::Status s = MapAt(address, offset, bytes, MAP_PRIVATE); !s.ok()) return s;
  if (madvise(address, bytes, MADV_POPULATE_WRITE) == 0) return absl::OkStatus();
  // A kernel before 5.14. Exchanging a byte for itself is a write that loses nobody else's.
  for (char* page = address; page < address + bytes; page += PageSize()) {
    std::atomic_ref<char> byte(*page);
    for (char value = byte.load(std::memory_order_relaxed); !byte.compare_exchange_weak(value, value);) {
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<char>> SharedSegment::ViewAgain(size_t offset, size_t bytes) const {
  void* const view = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, static_cast<off_t>(offset));
  if (view == MAP_FAILED) return NoMemory("mmap", errno, bytes);
  madvise(view, bytes, MADV_POPULATE_WRITE);  // only speed depends on it
  return std::shared_ptr<char>(static_cast<char*>(view), [bytes](char* begin) { munmap(begin, bytes); });
}

void SharedSegment::Forget(const char* kept, size_t bytes) {
  if (used_by_threads_) return;
  const auto forget = [](char* begin, const char* end) {
    if (end > begin) {
      // Where it fails the memory stays as it was, which nobody uses any more.
      static_cast<void>(mmap(begin, static_cast<size_t>(end - begin), PROT_NONE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0));
    }
  };
  forget(data_, kept);
  forget(const_cast<char*>(kept) + RoundUp(bytes, PageSize()), data_ + bytes_);
  close(fd_);
  fd_ = -1;
}

}  // namespace ddp
