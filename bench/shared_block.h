// SPDX-License-Identifier: Apache-2.0
// Memory that the ranks of a benchmark have in common: for its barrier, its clock and the bound, none of which may use
// what is measured.
#ifndef BENCH_SHARED_BLOCK_H_
#define BENCH_SHARED_BLOCK_H_

#include <cstddef>
#include <memory>

#include "absl/status/statusor.h"
#include "ddp/process_group.h"

namespace bench {

// Before anything is reserved: whether there is room for `shared` bytes of all ranks together and `own` of each, so
// that the kernel need not end a rank. Collective over `group`, whose ranks are processes of one host.
absl::Status CheckMemory(ddp::ProcessGroup& group, size_t shared, size_t own);

// One mapping of a memfd, with huge pages where the kernel is willing. It goes when the last rank that maps it does.
class SharedBlock {
 public:
  // Collective over `group`, whose ranks are processes of one host. Zero at first.
  static absl::StatusOr<std::unique_ptr<SharedBlock>> Create(ddp::ProcessGroup& group, size_t bytes);

  ~SharedBlock();
  SharedBlock(const SharedBlock&) = delete;
  SharedBlock& operator=(const SharedBlock&) = delete;

  char* data() const { return data_; }

 private:
  SharedBlock() = default;
  absl::Status Map(int fd, size_t bytes);

  void* hole_ = nullptr;
  size_t hole_bytes_ = 0;
  char* data_ = nullptr;
};

// A range of this process alone, on huge pages and already touched: the "ordinary" buffer of a program that takes care.
class PrivateMemory {
 public:
  static absl::StatusOr<PrivateMemory> Create(size_t bytes);

  char* data() const { return data_.get(); }

 private:
  std::shared_ptr<char> data_;
};

}  // namespace bench

#endif  // BENCH_SHARED_BLOCK_H_
