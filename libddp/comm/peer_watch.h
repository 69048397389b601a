// Notices when a peer process dies.
#ifndef LIBDDP_COMM_PEER_WATCH_H_
#define LIBDDP_COMM_PEER_WATCH_H_

#include <sys/types.h>

#include <cstdint>
#include <vector>

#include "absl/types/span.h"

namespace ddp {

// Who waits looks after its peers about so often.
inline constexpr int64_t kLookEveryNs = 1'000'000;
// What a dead rank has announced may still end well without it, unless it took a part with it: that shows in this time.
inline constexpr int64_t kDeathGraceNs = 200'000'000;

// Not thread-safe.
class PeerWatch {
 public:
  PeerWatch() = default;
  // Process ids by rank. Ranks of this process are not watched.
  explicit PeerWatch(absl::Span<const pid_t> pids);
  ~PeerWatch();
  PeerWatch(PeerWatch&& other) noexcept;
  PeerWatch& operator=(PeerWatch&& other) noexcept;

  // The ranks whose process has ended, also if nobody has waited for it yet. One system call; never blocks.
  std::vector<int> Dead() const;

  bool InThisProcess(int rank) const;
  pid_t pid(int rank) const { return peers_[static_cast<size_t>(rank)].pid; }

 private:
  struct Peer {
    pid_t pid = 0;
    int pidfd = -1;  // -1: this process, or a kernel without pidfd_open
  };
  std::vector<Peer> peers_;
};

}  // namespace ddp

#endif  // LIBDDP_COMM_PEER_WATCH_H_
