// Notices when a peer process dies.
#ifndef LIBDDP_COMM_PEER_WATCH_H_
#define LIBDDP_COMM_PEER_WATCH_H_

#include <sys/types.h>

#include <vector>

#include "absl/types/span.h"

namespace ddp {

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
