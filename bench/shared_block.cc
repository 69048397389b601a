// SPDX-License-Identifier: Apache-2.0
#include "bench/shared_block.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "libddp/base/memory_room.h"

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

namespace bench {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;

char* NextHugePage(void* at) {
  return static_cast<char*>(at) + (kHugePage - reinterpret_cast<uintptr_t>(at) % kHugePage) % kHugePage;
}

size_t WholeHugePages(size_t bytes) { return (bytes + kHugePage - 1) / kHugePage * kHugePage; }

absl::Status SystemError(absl::string_view call, size_t bytes) {
  return absl::ResourceExhaustedError(absl::StrCat("the benchmark's own ", bytes, " bytes: ", call, ": ",
                                                   std::strerror(errno), "; choose a smaller -e"));
}

}  // namespace

absl::Status CheckMemory(ddp::ProcessGroup& group, size_t shared, size_t own) {
  const auto ranks = static_cast<size_t>(group.size());
  const size_t share = own + (shared + ranks - 1) / ranks;
  const std::vector<ddp::MemoryRoom> rooms(ranks, ddp::MemoryRoom::For(share));
  if (absl::Status s = ddp::CheckRoom(rooms, share); !s.ok()) {
    return absl::Status(s.code(), absl::StrCat(s.message(), "; or choose a smaller -e"));
  }
  return group.Barrier().Wait();  // nobody finds that there is less because of what another has reserved already
}

absl::StatusOr<std::unique_ptr<SharedBlock>> SharedBlock::Create(ddp::ProcessGroup& group, size_t bytes) {
  std::unique_ptr<SharedBlock> block(new SharedBlock);
  bytes = WholeHugePages(bytes);
  char path[64] = {};
  int fd = -1;
  if (group.rank() == 0) {
    fd = memfd_create("ddp-bench", MFD_CLOEXEC);
    if (fd < 0) return SystemError("memfd_create", bytes);
    if (const int error = posix_fallocate(fd, 0, static_cast<off_t>(bytes)); error != 0) {
      close(fd);
      errno = error;
      return SystemError("posix_fallocate", bytes);
    }
    std::snprintf(path, sizeof path, "/proc/%d/fd/%d", static_cast<int>(getpid()), fd);
  }
  const ddp::Buffer word{path, sizeof path, ddp::DType::kUInt8, {}};
  if (absl::Status told = group.Broadcast(word, 0).Wait(); !told.ok()) return told;
  if (group.rank() != 0) {
    fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) return SystemError(absl::StrCat("open ", path), bytes);
  }
  absl::Status mapped = block->Map(fd, bytes);
  // Rank 0 keeps its descriptor until the others have theirs.
  if (mapped.ok()) mapped = group.Barrier().Wait();
  close(fd);
  if (!mapped.ok()) return mapped;
  return block;
}

absl::Status SharedBlock::Map(int fd, size_t bytes) {
  hole_bytes_ = bytes + kHugePage;
  hole_ = mmap(nullptr, hole_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (hole_ == MAP_FAILED) {
    hole_ = nullptr;
    return SystemError("mmap", bytes);
  }
  void* mapped = mmap(NextHugePage(hole_), bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0);
  if (mapped == MAP_FAILED) return SystemError("mmap", bytes);
  data_ = static_cast<char*>(mapped);
  madvise(data_, bytes, MADV_COLLAPSE);  // a kernel that cannot leaves small pages
  // Page tables too: a first touch inside a timed call would be charged to it.
  for (size_t at = 0; at < bytes; at += 4096) static_cast<volatile char*>(data_)[at] = 0;
  return absl::OkStatus();
}

SharedBlock::~SharedBlock() {
  if (hole_ != nullptr) munmap(hole_, hole_bytes_);
}

absl::StatusOr<PrivateMemory> PrivateMemory::Create(size_t bytes) {
  const size_t whole = WholeHugePages(bytes) + kHugePage;
  void* base = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) return SystemError("mmap", bytes);
  madvise(base, whole, MADV_HUGEPAGE);
  PrivateMemory memory;
  memory.data_ = std::shared_ptr<char>(NextHugePage(base), [base, whole](char*) { munmap(base, whole); });
  std::memset(memory.data(), 0, bytes);
  return memory;
}

}  // namespace bench
