// SPDX-License-Identifier: Apache-2.0
// Memory that the ranks of one host have in common.
#ifndef LIBDDP_COMM_MEMORY_SHARED_SEGMENT_H_
#define LIBDDP_COMM_MEMORY_SHARED_SEGMENT_H_

#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace ddp {

// One mapping of a segment. Each process has its own mapping of the same memory; ranks that are threads of one process
// share it. The kernel frees the memory with the last mapping, also when processes die.
class SharedSegment {
 public:
  enum class Kind {
    kMemfd,  // anonymous; peers open it through /proc, for which they must see this process there
    kPosix,  // has a name in /dev/shm until it is sealed
    kAuto,   // a memfd, or a POSIX object where memfds are not permitted
  };

  // As DDP_SHARED_MEMORY says. InvalidArgument if it cannot be understood.
  static absl::StatusOr<Kind> KindFromEnv();

  // A segment of `bytes` bytes of zeros, with no memory behind it yet (see Reserve). ResourceExhausted or Unavailable
  // name the system call and the remedy: Unavailable where another kind may work.
  static absl::StatusOr<std::shared_ptr<SharedSegment>> Create(size_t bytes, Kind kind);

  // Opens what another rank of this host created: `handle` is that rank's handle(). It keeps its segment, unsealed,
  // until everybody has it open, or a rank has failed. Unavailable where this process cannot reach that segment,
  // ResourceExhausted where it may not open another file.
  static absl::StatusOr<std::shared_ptr<SharedSegment>> Open(absl::string_view handle);

  ~SharedSegment();
  SharedSegment(const SharedSegment&) = delete;
  SharedSegment& operator=(const SharedSegment&) = delete;

  char* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  const std::string& handle() const { return handle_; }

  // Puts memory behind [offset, offset + bytes), so that touching it cannot fail later. ResourceExhausted where there
  // is none left.
  absl::Status Reserve(size_t offset, size_t bytes);
  // The same for memory that is to be given to Prepare. A huge page comes in one piece: made of small ones that are
  // there already, as Prepare would, it is cleared and copied once more.
  absl::Status ReserveHugePages(size_t offset, size_t bytes);

  // Huge pages and page tables for a range, where the kernel is willing. Only speed depends on it.
  void Prepare(size_t offset, size_t bytes);

  // Everybody has it open: drops the name.
  void Seal();

  // Marks that this process has the segment open as number `place`. The kernel removes the mark when the process ends
  // or closes the segment. So a peer can be seen to live even by a process in another container. A process cannot see
  // its own marks. Does nothing where files cannot be locked.
  void Mark(int place) const;
  bool Marked(int place) const;

  // Gives the process its own copy of the pages of [address, address + bytes), where it sees the segment at `offset`.
  // Their contents stay, but from then on neither side sees what the other writes. Threads of this process may write to
  // them meanwhile; no write is lost. Pages copied earlier do not change again. ResourceExhausted if memory is short:
  // then some pages are still shared. Thread-safe.
  absl::Status MakePrivate(char* address, size_t offset, size_t bytes);

  // Maps [offset, offset + bytes), which begins a page, at other addresses too. There it stays shared, also after
  // MakePrivate and MapAt, for as long as somebody has the view. ResourceExhausted if there is no room for it.
  absl::StatusOr<std::shared_ptr<char>> ViewAgain(size_t offset, size_t bytes) const;

  // Maps the segment, from `offset` on, at [address, address + bytes), whole pages, in place of what is there. Nobody
  // may be using the addresses. ResourceExhausted if there is no room for another mapping.
  absl::Status MapAt(char* address, size_t offset, size_t bytes);

  // Unmaps the memory, but keeps the addresses, and what is mapped over them at [kept, kept + bytes). Does nothing if
  // other ranks are threads of this process, which use it too.
  void Forget(const char* kept, size_t bytes);

 private:
  SharedSegment() = default;
  absl::Status Map();
  absl::Status Back(size_t offset, size_t bytes);
  absl::Status MapAt(char* address, size_t offset, size_t bytes, int sharing);
  absl::Status MakePagesPrivate(char* address, size_t offset, size_t bytes);

  char* data_ = nullptr;
  size_t bytes_ = 0;
  int fd_ = -1;
  std::atomic<bool> sealed_{false};
  std::atomic<bool> used_by_threads_{false};
  std::string posix_name_;  // not empty: to be unlinked by Seal
  std::string handle_;
  std::mutex private_mutex_;
  std::vector<bool> private_;  // by page of the segment: MakePrivate has been there
};

}  // namespace ddp

#endif  // LIBDDP_COMM_MEMORY_SHARED_SEGMENT_H_
