// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/health/peer_watch.h"

#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "libddp/base/descriptors.h"

namespace ddp {

std::string DiedText(int rank, pid_t pid) {
  return absl::StrCat("rank ", rank, " (process ", pid,
                      ") has died; see its own output for the reason, and start the job again");
}

std::string LeftText(int rank, absl::string_view without) {
  return absl::StrCat("rank ", rank, " has left the group without ", without);
}

class PeerWatch::OwnedDescriptor {
 public:
  explicit OwnedDescriptor(int fd) : fd_(fd) {}
  ~OwnedDescriptor() { close(fd_); }
  OwnedDescriptor(const OwnedDescriptor&) = delete;
  OwnedDescriptor& operator=(const OwnedDescriptor&) = delete;

  int get() const { return fd_; }

 private:
  const int fd_;
};

absl::StatusOr<PeerWatch> PeerWatch::Create(absl::Span<const ProcessId> processes) {
  PeerWatch watch;
  watch.self_ = ProcessId::OfSelf();
  for (const ProcessId& process : processes) {
    Peer peer{.process = process};
    if (process.SameProcess(watch.self_)) {
      peer.how = How::kNot;
    } else if (process.VisibleTo(watch.self_)) {
      peer.how = How::kByPidfd;
      const int fd = static_cast<int>(syscall(SYS_pidfd_open, process.pid, 0));
      // Other errors: the kernel has no pidfds, a container does not permit them, or the process has gone already.
      if (absl::Status s = OutOfDescriptors("pidfd_open", fd < 0 ? errno : 0); !s.ok()) return s;
      if (fd >= 0) peer.pidfd = std::make_shared<OwnedDescriptor>(fd);
    } else {
      peer.how = How::kUnknown;
    }
    watch.peers_.push_back(std::move(peer));
  }
  return watch;
}

void PeerWatch::UseMarks(std::shared_ptr<const SharedSegment> segment) {
  segment_ = std::move(segment);
  for (size_t r = 0; r < peers_.size(); ++r) {
    if (peers_[r].how == How::kUnknown && segment_->Marked(static_cast<int>(r))) peers_[r].how = How::kByMark;
  }
}

std::vector<int> PeerWatch::Dead() const {
  std::vector<pollfd> fds;
  std::vector<int> ranks, dead;
  for (int r = 0; r < static_cast<int>(peers_.size()); ++r) {
    if (peer(r).pidfd != nullptr) {
      fds.push_back({peer(r).pidfd->get(), POLLIN, 0});
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
