#include "libddp/comm/peer_watch.h"

#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

namespace ddp {

PeerWatch::PeerWatch(absl::Span<const pid_t> pids) {
  for (pid_t pid : pids) {
    Peer peer{pid, -1};
    if (pid != getpid()) peer.pidfd = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
    peers_.push_back(peer);
  }
}

PeerWatch::~PeerWatch() {
  for (const Peer& peer : peers_) {
    if (peer.pidfd >= 0) close(peer.pidfd);
  }
}

PeerWatch::PeerWatch(PeerWatch&& other) noexcept : peers_(std::exchange(other.peers_, {})) {}

PeerWatch& PeerWatch::operator=(PeerWatch&& other) noexcept {
  std::swap(peers_, other.peers_);
  return *this;
}

bool PeerWatch::InThisProcess(int rank) const { return pid(rank) == getpid(); }

std::vector<int> PeerWatch::Dead() const {
  std::vector<pollfd> fds;
  std::vector<int> ranks, dead;
  for (size_t r = 0; r < peers_.size(); ++r) {
    const Peer& peer = peers_[r];
    if (peer.pidfd >= 0) {
      fds.push_back({peer.pidfd, POLLIN, 0});
      ranks.push_back(static_cast<int>(r));
    } else if (peer.pid != getpid() && kill(peer.pid, 0) != 0 && errno == ESRCH) {
      dead.push_back(static_cast<int>(r));  // without pidfds a zombie still counts as alive; its time-out ends it
    }
  }
  if (poll(fds.data(), fds.size(), 0) > 0) {
    for (size_t i = 0; i < fds.size(); ++i) {
      if (fds[i].revents != 0) dead.push_back(ranks[i]);
    }
  }
  return dead;
}

}  // namespace ddp
