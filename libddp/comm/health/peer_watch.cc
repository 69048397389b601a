// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/health/peer_watch.h"

#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"

namespace ddp {

std::string DiedText(int rank, pid_t pid) {
  return absl::StrCat("rank ", rank, " (process ", pid,
                      ") has died; see its own output for the reason, and start the job again");
}

std::string LeftText(int rank, absl::string_view without) {
  return absl::StrCat("rank ", rank, " has left the group without ", without);
}

PeerWatch::PeerWatch(absl::Span<const ProcessId> processes, std::shared_ptr<const SharedSegment> segment)
    : self_(ProcessId::OfSelf()), segment_(std::move(segment)) {
  for (const ProcessId& process : processes) {
    Peer peer{process};
    if (process.SameProcess(self_)) {
      peer.how = How::kNot;
    } else if (process.VisibleTo(self_)) {
      peer.how = How::kByPidfd;
      peer.pidfd = static_cast<int>(syscall(SYS_pidfd_open, process.pid, 0));
    } else {
      const bool marked = segment_ != nullptr && segment_->Marked(static_cast<int>(peers_.size()));
      peer.how = marked ? How::kByMark : How::kUnknown;
    }
    peers_.push_back(peer);
  }
}

PeerWatch::~PeerWatch() {
  for (const Peer& peer : peers_) {
    if (peer.pidfd >= 0) close(peer.pidfd);
  }
}

PeerWatch::PeerWatch(PeerWatch&& other) noexcept
    : self_(other.self_), peers_(std::exchange(other.peers_, {})), segment_(std::move(other.segment_)) {}

PeerWatch& PeerWatch::operator=(PeerWatch&& other) noexcept {
  std::swap(self_, other.self_);
  std::swap(peers_, other.peers_);
  std::swap(segment_, other.segment_);
  return *this;
}

std::vector<int> PeerWatch::Dead() const {
  std::vector<pollfd> fds;
  std::vector<int> ranks, dead;
  for (int r = 0; r < static_cast<int>(peers_.size()); ++r) {
    if (peer(r).pidfd >= 0) {
      fds.push_back({peer(r).pidfd, POLLIN, 0});
      ranks.push_back(r);
    } else if (peer(r).how == How::kByPidfd && kill(pid(r), 0) != 0 && errno == ESRCH) {
      dead.push_back(r);  // without pidfds a zombie still counts as alive; its time-out ends it
    } else if (peer(r).how == How::kByMark && !segment_->Marked(r)) {
      dead.push_back(r);
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
