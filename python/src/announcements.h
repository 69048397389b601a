// SPDX-License-Identifier: Apache-2.0
// Tells a rank which peers have sent it a message, so that it can receive from any of them.
#ifndef DDP_PYTHON_SRC_ANNOUNCEMENTS_H_
#define DDP_PYTHON_SRC_ANNOUNCEMENTS_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "ddp/store.h"

namespace ddp_torch {

// A ring of tags for each pair of ranks, in memory that all ranks of the host share. Thread-safe.
class Announcements {
 public:
  // Collective.
  Announcements(ddp::Store& store, int rank, int size, std::chrono::milliseconds timeout);
  ~Announcements();
  Announcements(const Announcements&) = delete;
  Announcements& operator=(const Announcements&) = delete;

  // Called before the message is sent. Waits while the receiver has not looked at the last 4096.
  void Announce(int to, int tag, std::chrono::milliseconds timeout);
  // A message from this rank with this tag is received, or will be.
  void Consume(int from, int tag);
  // Consumes a message that any rank has announced, and returns the rank, or -1 after the time-out.
  int ConsumeAny(int tag, std::chrono::milliseconds timeout);

 private:
  static constexpr uint64_t kTags = 4096;
  struct Ring {
    std::atomic<uint64_t> written, read;
    std::atomic<int32_t> tags[kTags];
  };
  Ring& RingOf(int from, int to) { return rings_[static_cast<size_t>(from) * static_cast<size_t>(size_) + to]; }
  void Drain(int from);
  void Count(int from, int tag, int by);

  int rank_, size_;
  Ring* rings_ = nullptr;
  std::mutex write_mutex_, read_mutex_;
  // Announced minus consumed, by rank and tag, where they differ.
  std::map<std::pair<int, int>, int64_t> waiting_;
};

}  // namespace ddp_torch

#endif  // DDP_PYTHON_SRC_ANNOUNCEMENTS_H_
