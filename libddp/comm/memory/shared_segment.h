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

// One mapping of one segment. Ranks that are threads of one process share the mapping itself; processes map the same
// memory each for itself. The memory lives as long as anyone maps it, and nothing has to be removed when a process
// dies.
class SharedSegment : public std::enable_shared_from_this<SharedSegment> {
 public:
  enum class Kind {
    kMemfd,  // anonymous; peers open it through /proc, for which they must see this process there
    kPosix,  // has a name in /dev/shm until it is sealed
    kAuto,   // a memfd, or a POSIX object where memfds are not permitted
  };

  // As DDP_SHARED_MEMORY says. InvalidArgument if it cannot be understood.
  static absl::StatusOr<Kind> KindFromEnv();

  // A segment of `bytes` bytes of zeros, with no memory behind it yet (see Reserve). ResourceExhausted or Unavailable
  // name the system call and the remedy.
  static absl::StatusOr<std::shared_ptr<SharedSegment>> Create(size_t bytes, Kind kind);

  // Opens what another rank of this host created: `handle` is that rank's handle(). It keeps its segment, unsealed,
  // until everybody has it open. Unavailable where this process cannot reach that segment.
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

  // Huge pages and page tables for a range, where the kernel is willing. Only speed depends on it.
  void Prepare(size_t offset, size_t bytes);

  // Everybody has it open: drops the name.
  void Seal();

  // Says that this process has the segment open as number `place`. The kernel takes the mark away when the process ends
  // or lets go of the segment, so it tells a living peer from a dead one where processes do not see each other. Marks
  // of this process itself cannot be seen. Nothing happens where files cannot be locked.
  void Mark(int place) const;
  bool Marked(int place) const;

  // The pages of [address, address + bytes), where this process sees the segment from `offset` on, become its own:
  // their contents stay, but neither side sees any more what the other writes there. Threads of this process may be
  // writing to them meanwhile, no write is lost. Pages that are its own already stay as they are. ResourceExhausted
  // where memory is short; the pages that it was short for are unchanged. Thread-safe.
  absl::Status MakePrivate(char* address, size_t offset, size_t bytes);

  // [offset, offset + bytes), which begins a page, at other addresses too: there it stays what it is, whatever becomes
  // of the first ones, for as long as somebody has the view. ResourceExhausted where there is no room for it.
  absl::StatusOr<std::shared_ptr<char>> ViewAgain(size_t offset, size_t bytes) const;

  // Replaces what this process has mapped at [address, address + bytes), whole pages, by the segment from `offset` on.
  // Nobody may be using the addresses. ResourceExhausted where there is no room for another mapping.
  absl::Status MapAt(char* address, size_t offset, size_t bytes);

  // Lets go of the memory, but neither of the addresses nor of what something else is mapped over at
  // [kept, kept + bytes). Nothing happens where other ranks are threads of this process, which use it too.
  void Forget(const char* kept, size_t bytes);

 private:
  SharedSegment() = default;
  absl::Status Map();
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
