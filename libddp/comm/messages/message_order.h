// SPDX-License-Identifier: Apache-2.0
// Which of several messages that are not done have waited their turn: whose time-outs run.
#ifndef LIBDDP_COMM_MESSAGES_MESSAGE_ORDER_H_
#define LIBDDP_COMM_MESSAGES_MESSAGE_ORDER_H_

#include <cstdint>
#include <vector>

namespace ddp {

// Of the messages to each peer and of those from it, the one that was posted first: the others are queued behind it. A
// Message has `peer`, `is_send()` and `posted`, a number that grows with each call.
template <typename Message>
std::vector<Message*> OldestOfEach(const std::vector<Message*>& messages, int ranks) {
  std::vector<Message*> oldest(2 * static_cast<size_t>(ranks));
  for (Message* const message : messages) {
    Message*& first = oldest[2 * static_cast<size_t>(message->peer) + (message->is_send() ? 1 : 0)];
    if (first == nullptr || message->posted < first->posted) first = message;
  }
  std::erase(oldest, nullptr);
  return oldest;
}

}  // namespace ddp

#endif  // LIBDDP_COMM_MESSAGES_MESSAGE_ORDER_H_
