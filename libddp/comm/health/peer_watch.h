// SPDX-License-Identifier: Apache-2.0
// Notices when a peer process dies.
#ifndef LIBDDP_COMM_HEALTH_PEER_WATCH_H_
#define LIBDDP_COMM_HEALTH_PEER_WATCH_H_

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "libddp/base/process_id.h"
#include "libddp/comm/memory/shared_segment.h"

namespace ddp {

// Who waits looks after its peers about so often.
inline constexpr int64_t kLookEveryNs = 1'000'000;
// What a dead rank has announced may still end well without it, unless it took a part with it: that shows in this time.
inline constexpr int64_t kDeathGraceNs = 200'000'000;

// A process that lives answers in this time, also if its progress thread rests and its processors are busy.
inline constexpr int64_t kAnswerNs = 2'000'000'000;

// How errors say that a peer is gone.
std::string DiedText(int rank, pid_t pid);
std::string LeftText(int rank, absl::string_view without);  // "taking part in operation 7"

// Copies watch by the same descriptors. Dead may be called by several threads at a time.
class PeerWatch {
 public:
  PeerWatch() = default;
  // By rank. Ranks of this process are not watched; of those that it does not see, in other containers, nothing is
  // known before UseMarks. ResourceExhausted if this process may not open so many files: it would learn of deaths too
  // late.
  static absl::StatusOr<PeerWatch> Create(absl::Span<const ProcessId> processes);
  // Watches those by their marks in `segment`, where they have made them.
  void UseMarks(std::shared_ptr<const SharedSegment> segment);

  // The ranks whose process has ended, also if nobody has waited for it yet. One system call, and one more for each
  // rank in another container; never blocks.
  std::vector<int> Dead() const;

  bool InThisProcess(int rank) const { return peer(rank).how == How::kNot; }
  // Whether system calls of this process know the rank's process by pid(rank).
  bool Visible(int rank) const { return process(rank).VisibleTo(self_); }
  pid_t pid(int rank) const { return process(rank).pid; }
  const ProcessId& process(int rank) const { return peer(rank).process; }

 private:
  class OwnedDescriptor;
  enum class How {
    kNot,      // it is this process
    kByPidfd,  // null on a kernel without pidfd_open
    kByMark,
    kUnknown,  // only its silence can be noticed
  };
  struct Peer {
    ProcessId process;
    How how = How::kNot;
    std::shared_ptr<const OwnedDescriptor> pidfd = nullptr;
  };
  const Peer& peer(int rank) const { return peers_[static_cast<size_t>(rank)]; }

  ProcessId self_;
  std::vector<Peer> peers_;
  std::shared_ptr<const SharedSegment> segment_;
};

}  // namespace ddp

#endif  // LIBDDP_COMM_HEALTH_PEER_WATCH_H_
