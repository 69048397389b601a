// SPDX-License-Identifier: Apache-2.0
// A wire between ranks that are threads of one process: for trying out a node layout, and for what only one process
// shows, such as data races.
#ifndef LIBDDP_LAUNCH_MEMORY_WIRE_H_
#define LIBDDP_LAUNCH_MEMORY_WIRE_H_

#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>

#include "absl/types/span.h"
#include "libddp/launch/wire.h"

namespace ddp {

// Where the messages wait. One for all ranks. Thread-safe.
class MemoryExchange {
 public:
  void Put(int from, int to, uint64_t tag, std::string message);
  // Gives rank `to` what has come for these receives, whose tags count from `first_tag`, in their order.
  void Deliver(int to, uint64_t first_tag, absl::Span<Transfer* const> receives);
  // Drops `count` messages to this rank that have come or will come.
  void Drop(int to, uint64_t tag, int count);

 private:
  std::mutex mutex_;
  std::map<std::tuple<int, uint64_t, int>, std::deque<std::string>> waiting_;  // by receiver, tag, sender
  std::map<std::pair<int, uint64_t>, int> dropped_;                            // by receiver, tag: how many to come
};

std::unique_ptr<Wire> CreateMemoryWire(std::shared_ptr<MemoryExchange> exchange, int rank);

}  // namespace ddp

#endif  // LIBDDP_LAUNCH_MEMORY_WIRE_H_
