// SPDX-License-Identifier: Apache-2.0
// Messages of the staged protocol (staged_protocol.h), in rings of their own between each two ranks.
#ifndef LIBDDP_DEVICE_STAGED_MESSAGES_H_
#define LIBDDP_DEVICE_STAGED_MESSAGES_H_

#include <cstdint>

#include "libddp/device/staged_protocol.h"

namespace ddp::staged {

// Messages to and from any number of peers at once, by byte. What both sides of one message do depends on its size
// alone.
struct Exchange {
  Place at;
  uint64_t send_begin[kMaxRanks], send_bytes[kMaxRanks], receive_begin[kMaxRanks], receive_bytes[kMaxRanks];
  RangeTable in, out;
};

template <typename Block>
DDP_HOST_DEVICE void SendMessage(Block& block, const Exchange& e, int peer, int channel) {
  uint64_t* const count = PairCountOf(e.at, kSent, peer, channel);
  uint64_t number = block.Load(count);
  const auto received = [&](int) {
    return Level{PairCounterOf(e.at, kReceived, e.at.rank, peer, channel), number - kDepth + 1};
  };
  for (uint64_t at = static_cast<uint64_t>(channel) * kPairSlotBytes; at < e.send_bytes[peer];
       at += kPairChannels * kPairSlotBytes, ++number) {
    if (number >= kDepth && !block.Wait(1, received)) return;
    const uint64_t left = e.send_bytes[peer] - at, bytes = left < kPairSlotBytes ? left : kPairSlotBytes;
    char* const slot = PairSlotOf(e.at, e.at.rank, peer, channel, number);
    for (uint64_t done = 0, n = 0; done < bytes; done += n) {
      n = bytes - done;
      const char* const from = Locate(e.in, e.send_begin[peer] + at + done, &n);
      const Piece piece = {slot + done, from, n};
      block.Copy(&piece, 1, false);
    }
    block.Signal({PairCounterOf(e.at, kSent, e.at.rank, peer, channel), number + 1});
  }
  block.Store(count, number);
}

template <typename Block>
DDP_HOST_DEVICE void ReceiveMessage(Block& block, const Exchange& e, int peer, int channel) {
  uint64_t* const count = PairCountOf(e.at, kReceived, peer, channel);
  uint64_t number = block.Load(count);
  const auto sent = [&](int) { return Level{PairCounterOf(e.at, kSent, peer, e.at.rank, channel), number + 1}; };
  for (uint64_t at = static_cast<uint64_t>(channel) * kPairSlotBytes; at < e.receive_bytes[peer];
       at += kPairChannels * kPairSlotBytes, ++number) {
    if (!block.Wait(1, sent)) return;
    const uint64_t left = e.receive_bytes[peer] - at, bytes = left < kPairSlotBytes ? left : kPairSlotBytes;
    const char* const slot = PairSlotOf(e.at, peer, e.at.rank, channel, number);
    for (uint64_t done = 0, n = 0; done < bytes; done += n) {
      n = bytes - done;
      char* const to = Locate(e.out, e.receive_begin[peer] + at + done, &n);
      const Piece piece = {to, slot + done, n};
      block.Copy(&piece, 1, true);
    }
    block.Signal({PairCounterOf(e.at, kReceived, peer, e.at.rank, channel), number + 1});
  }
  block.Store(count, number);
}

DDP_HOST_DEVICE inline int BlocksOf(const Exchange& e) { return e.at.ranks * kPairChannels * kPairStages; }

// Sending and receiving are different thread blocks, so no order of messages can make two ranks wait for each other.
template <typename Block>
DDP_HOST_DEVICE void RunExchange(Block& block, const Exchange& e, int index) {
  const int peer = index / (kPairChannels * kPairStages), channel = index / kPairStages % kPairChannels;
  if (peer == e.at.rank || !block.Begin()) return;
  if (index % kPairStages == kSent) {
    SendMessage(block, e, peer, channel);
  } else {
    ReceiveMessage(block, e, peer, channel);
  }
}

}  // namespace ddp::staged

#endif  // LIBDDP_DEVICE_STAGED_MESSAGES_H_
