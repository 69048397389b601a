// SPDX-License-Identifier: Apache-2.0
// Messages between ranks that have no memory in common. Somebody else carries them: the library has no network
// transport of its own.
#ifndef LIBDDP_LAUNCH_WIRE_H_
#define LIBDDP_LAUNCH_WIRE_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"

namespace ddp {

// One message under way, sent or to be received. The caller owns it and the memory; once it is handed to the wire both
// stay in place, and the memory is left alone, until it is done.
struct Transfer {
  static constexpr int kAnyPeer = -1;

  int peer = kAnyPeer;  // a rank; for a receive perhaps any, and then whose it was
  int tag = 0;          // 0 to Wire::kTags - 1
  void* data = nullptr;
  size_t bytes = 0;  // of a receive: how many fit, then how many came
  bool done = false;
  bool truncated = false;  // more came than fitted: the ranks disagree
};

// Point-to-point messages, asynchronous. Those from one rank to another with one tag arrive in the order in which they
// were sent, each in the receive that was started first. Nothing here ever blocks or times out: whoever waits polls,
// and gives up.
//
// Not thread-safe: one thread at a time.
class Wire {
 public:
  static constexpr int kTags = 8;

  // Waits for nothing. What is still under way must have been given up.
  virtual ~Wire() = default;

  // Whether the calling thread may use the wire. `background`: it is a thread of the library's own, which could collide
  // with what the program does elsewhere. Where it may not, the program's calls must do the work.
  virtual bool Usable(bool background) const = 0;

  // Starts a transfer. Unavailable names the call that failed.
  virtual absl::Status Send(Transfer* transfer) = 0;
  virtual absl::Status Receive(Transfer* transfer) = 0;

  // Moves what can be moved and marks what is done.
  virtual absl::Status Poll() = 0;

  // Takes back a receive that nothing has come for. False: it is done, or cannot be taken back.
  virtual bool Cancel(Transfer* transfer) = 0;

  // Gives up all that is under way. False: something may still read and write there, so every Transfer and its memory
  // must stay for as long as the process lives.
  virtual bool Abandon() = 0;

  // Receives `count` more messages with this tag, of at most `bytes` bytes from any rank, and drops them: also after
  // the end of this wire.
  virtual void Drain(int tag, size_t bytes, int count) = 0;

  // A wire between the same ranks whose messages never meet those of this one or of another channel: 0, which is the
  // first, to channels() - 1.
  virtual std::unique_ptr<Wire> Channel(uint32_t channel) const = 0;
  virtual uint32_t channels() const = 0;
};

}  // namespace ddp

#endif  // LIBDDP_LAUNCH_WIRE_H_
