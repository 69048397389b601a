// SPDX-License-Identifier: Apache-2.0
#include "announcements.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <thread>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "tensors.h"

namespace ddp_torch {
namespace {

using Clock = std::chrono::steady_clock;

// Rank 0 makes the memory, the others open it by its descriptor in rank 0's process, so that no name is left behind.
int OpenShared(ddp::Store& store, int rank, size_t bytes, absl::Time deadline) {
  if (rank == 0) {
    const int fd = memfd_create("ddp_torch", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, static_cast<off_t>(bytes)) != 0) return -1;
    const absl::Status set = store.Set("announcements", absl::StrCat("/proc/", getpid(), "/fd/", fd), deadline);
    return set.ok() ? fd : -1;
  }
  const absl::StatusOr<std::string> path = store.Get("announcements", deadline);
  return path.ok() ? open(path->c_str(), O_RDWR | O_CLOEXEC) : -1;
}

}  // namespace

Announcements::Announcements(ddp::Store& store, int rank, int size, std::chrono::milliseconds timeout)
    : rank_(rank), size_(size) {
  const size_t bytes = sizeof(Ring) * static_cast<size_t>(size) * static_cast<size_t>(size);
  const absl::Time deadline = absl::Now() + absl::FromChrono(timeout);
  const int fd = OpenShared(store, rank, bytes, deadline);
  void* memory = fd < 0 ? MAP_FAILED : mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  const int error = errno;
  // Rank 0 keeps its descriptor open until all have opened it.
  bool all = memory != MAP_FAILED && store.Add("announcements/open", 1, deadline).ok();
  while (all && rank == 0) {
    const absl::StatusOr<int64_t> count = store.Add("announcements/open", 0, deadline);
    if (!count.ok() || *count == size) break;
    all = absl::Now() < deadline;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  if (fd >= 0) close(fd);
  if (memory == MAP_FAILED || !all) {
    C10_THROW_ERROR(DistBackendError,
                    absl::StrCat("[Rank ", rank, "] ddp: the ranks do not share memory for messages (", strerror(error),
                                 "). Run all of them on one host and as one user."));
  }
  rings_ = static_cast<Ring*>(memory);
}

Announcements::~Announcements() {
  if (rings_ != nullptr) munmap(rings_, sizeof(Ring) * static_cast<size_t>(size_) * static_cast<size_t>(size_));
}

void Announcements::Announce(int to, int tag, std::chrono::milliseconds timeout) {
  const std::lock_guard<std::mutex> lock(write_mutex_);
  Ring& ring = RingOf(rank_, to);
  const uint64_t at = ring.written.load(std::memory_order_relaxed);
  const Clock::time_point deadline = Clock::now() + timeout;
  while (at - ring.read.load(std::memory_order_acquire) == kTags) {
    if (Clock::now() > deadline) {
      C10_THROW_ERROR(DistBackendError,
                      absl::StrCat("[Rank ", rank_, "] ddp:send: Timed out: rank ", to, " has not received the last ",
                                   kTags, " messages. Receive them, or give init_process_group a longer timeout."));
    }
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  ring.tags[at % kTags].store(tag, std::memory_order_relaxed);
  ring.written.store(at + 1, std::memory_order_release);
}

void Announcements::Drain(int from) {
  Ring& ring = RingOf(from, rank_);
  uint64_t at = ring.read.load(std::memory_order_relaxed);
  for (const uint64_t end = ring.written.load(std::memory_order_acquire); at != end; ++at) {
    Count(from, ring.tags[at % kTags].load(std::memory_order_relaxed), 1);
  }
  ring.read.store(at, std::memory_order_release);
}

// A program may never use a tag again, so nothing is kept of one that is even.
void Announcements::Count(int from, int tag, int by) {
  const auto entry = waiting_.try_emplace({from, tag}).first;
  entry->second += by;
  if (entry->second == 0) waiting_.erase(entry);
}

void Announcements::Consume(int from, int tag) {
  const std::lock_guard<std::mutex> lock(read_mutex_);
  Drain(from);
  Count(from, tag, -1);
}

int Announcements::ConsumeAny(int tag, std::chrono::milliseconds timeout) {
  const Clock::time_point deadline = Clock::now() + timeout;
  for (int tries = 0;; ++tries) {
    {
      const std::lock_guard<std::mutex> lock(read_mutex_);
      for (int from = 0; from < size_; ++from) {
        Drain(from);
        const auto found = waiting_.find({from, tag});
        if (found == waiting_.end() || found->second <= 0) continue;
        Count(from, tag, -1);
        return from;
      }
    }
    if (Clock::now() >= deadline) return -1;
    if (tries < 1000) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }
}

}  // namespace ddp_torch
