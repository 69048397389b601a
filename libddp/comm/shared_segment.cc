#include "libddp/comm/shared_segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <limits>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "libddp/base/env.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

namespace ddp {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kPage = 4096;

// Tells this process from every other, also from one with the same process id in another container, and from its
// children, which inherit the random number.
uint64_t ProcessToken() {
  static const uint64_t token = [] {
    uint64_t random = 0;
    if (getrandom(&random, sizeof random, 0) != sizeof random) random = static_cast<uint64_t>(getpid());
    return random;
  }();
  return token + static_cast<uint64_t>(getpid()) * 0x9e3779b97f4a7c15u;
}

std::string Failure(absl::string_view call, int error) { return absl::StrCat(call, ": ", std::strerror(error)); }

absl::Status NoMemory(absl::string_view call, int error, size_t bytes) {
  return absl::ResourceExhaustedError(absl::StrCat("no shared memory left for ", bytes, " bytes (",
                                                   Failure(call, error),
                                                   "): free some, or give the container more (docker run "
                                                   "--shm-size=, --memory=)"));
}

// Touching a memfd beyond what the machine has ends in the kernel's out-of-memory killer, not in an error: look first.
size_t AvailableMemory() {
  std::ifstream meminfo("/proc/meminfo");
  std::string key, unit;
  uint64_t kib = 0;
  while (meminfo >> key >> kib) {
    if (key == "MemAvailable:") return kib * 1024;
    std::getline(meminfo, unit);
  }
  return std::numeric_limits<size_t>::max();
}

}  // namespace

absl::StatusOr<std::shared_ptr<SharedSegment>> SharedSegment::Create(size_t bytes) {
  std::shared_ptr<SharedSegment> segment(new SharedSegment);
  segment->bytes_ = (bytes + kHugePage - 1) / kHugePage * kHugePage;
  std::string where;
  if (ReadEnv(Env::kSharedMemory).value_or("auto") == "posix") {
    const std::string name = absl::StrCat("/ddp-", getpid(), "-", absl::Hex(ProcessToken()), "-",
                                          absl::Hex(reinterpret_cast<uintptr_t>(segment.get())));
    segment->fd_ = shm_open(name.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (segment->fd_ < 0) {
      return absl::UnavailableError(absl::StrCat(Failure("shm_open", errno), "; is /dev/shm mounted and writable?"));
    }
    segment->posix_name_ = name;
    where = name;
  } else {
    segment->fd_ = memfd_create("ddp", MFD_CLOEXEC);
    if (segment->fd_ < 0) {
      return absl::UnavailableError(
          absl::StrCat(Failure("memfd_create", errno), "; DDP_SHARED_MEMORY=posix uses /dev/shm instead"));
    }
    where = absl::StrCat("/proc/", getpid(), "/fd/", segment->fd_);
  }
  if (ftruncate(segment->fd_, static_cast<off_t>(segment->bytes_)) != 0) return NoMemory("ftruncate", errno, bytes);
  if (absl::Status s = segment->Map(); !s.ok()) return s;
  segment->handle_ =
      absl::StrCat(ProcessToken(), ",", reinterpret_cast<uintptr_t>(segment.get()), ",", segment->bytes_, ",", where);
  return segment;
}

absl::StatusOr<std::shared_ptr<SharedSegment>> SharedSegment::Open(absl::string_view handle) {
  const std::vector<absl::string_view> fields = absl::StrSplit(handle, absl::MaxSplits(',', 3));
  uint64_t token = 0, object = 0, bytes = 0;
  if (fields.size() != 4 || !absl::SimpleAtoi(fields[0], &token) || !absl::SimpleAtoi(fields[1], &object) ||
      !absl::SimpleAtoi(fields[2], &bytes)) {
    return absl::InternalError(absl::StrCat("not the handle of a shared segment: '", handle, "'"));
  }
  if (token == ProcessToken()) {  // a thread of this process made it, and waits for us
    auto* const theirs = reinterpret_cast<SharedSegment*>(static_cast<uintptr_t>(object));
    theirs->used_by_threads_ = true;
    return theirs->shared_from_this();
  }
  std::shared_ptr<SharedSegment> segment(new SharedSegment);
  segment->bytes_ = bytes;
  segment->handle_ = std::string(handle);
  const std::string where(fields[3]);
  const bool memfd = where.rfind("/proc/", 0) == 0;
  segment->fd_ = memfd ? open(where.c_str(), O_RDWR | O_CLOEXEC) : shm_open(where.c_str(), O_RDWR | O_CLOEXEC, 0);
  if (segment->fd_ < 0) {
    const int error = errno;
    return absl::UnavailableError(absl::StrCat(
        "cannot open the shared memory of a peer, ", where, " (", Failure(memfd ? "open" : "shm_open", error), "); ",
        memfd ? "are all ranks of one user and one container? Else set DDP_SHARED_MEMORY=posix"
              : "do all ranks see the same /dev/shm?"));
  }
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
  if (bytes > AvailableMemory()) return NoMemory("MemAvailable", ENOMEM, bytes);
  int error = 0;
  do {
    error = posix_fallocate(fd_, static_cast<off_t>(offset), static_cast<off_t>(bytes));
  } while (error == EINTR);
  return error == 0 ? absl::OkStatus() : NoMemory("posix_fallocate", error, bytes);
}

void SharedSegment::Prepare(size_t offset, size_t bytes) {
  const size_t begin = offset / kPage * kPage;
  const size_t end = (offset + bytes + kPage - 1) / kPage * kPage;
  if (bytes >= kHugePage) {
    const size_t from = (begin + kHugePage - 1) / kHugePage * kHugePage, to = end / kHugePage * kHugePage;
    if (to > from) madvise(data_ + from, to - from, MADV_COLLAPSE);
  }
  madvise(data_ + begin, end - begin, MADV_POPULATE_WRITE);
}

void SharedSegment::Seal() {
  // Ranks that are threads share the object: the first to come does it.
  if (!sealed_.exchange(true) && !posix_name_.empty()) shm_unlink(posix_name_.c_str());
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
  const size_t before = offset % kPage;
  bytes = (before + bytes + kPage - 1) / kPage * kPage;
  address -= before;
  offset -= before;
  if (bytes > AvailableMemory()) return NoMemory("MemAvailable", ENOMEM, bytes);
  // Once only: mapped a second time, a page would show again what the others have made of it.
  std::lock_guard<std::mutex> lock(private_mutex_);
  private_.resize(bytes_ / kPage);
  const auto is_private = [&](size_t at) { return private_[(offset + at) / kPage]; };
  for (size_t begin = 0, end = 0; begin < bytes; begin = end) {
    for (end = begin; end < bytes && is_private(end) == is_private(begin);) end += kPage;
    if (is_private(begin)) continue;
    if (absl::Status s = MakePagesPrivate(address + begin, offset + begin, end - begin); !s.ok()) return s;
    for (size_t at = begin; at < end; at += kPage) private_[(offset + at) / kPage] = true;
  }
  return absl::OkStatus();
}

absl::Status SharedSegment::MakePagesPrivate(char* address, size_t offset, size_t bytes) {
  if (absl::Status s = MapAt(address, offset, bytes, MAP_PRIVATE); !s.ok()) return s;
  if (madvise(address, bytes, MADV_POPULATE_WRITE) == 0) return absl::OkStatus();
  // A kernel before 5.14. Exchanging a byte for itself is a write that loses nobody else's.
  for (char* page = address; page < address + bytes; page += kPage) {
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
  forget(const_cast<char*>(kept) + (bytes + kPage - 1) / kPage * kPage, data_ + bytes_);
  close(fd_);
  fd_ = -1;
}

}  // namespace ddp
