// SPDX-License-Identifier: Apache-2.0
// What the ranks of a host share for messages from one to another; laid out behind the ControlBlock.
//
//   Channel[n][n]  one for each sender and receiver
//     envelopes    a ring: message number q uses envelope q % kEnvelopes. The data of a small message lies in it.
//     data         a ring of bytes: of larger eager messages, and of long lists of ranges
//     replies      a ring, the other way: what the receiver says about messages whose data it has to fetch
//   BounceRing[n]  one for each sender: chunks of a message that the receiver cannot fetch by itself
//
// Each word is written by one side, and each side's words lie in cache lines of their own.
#ifndef LIBDDP_COMM_MESSAGES_CHANNEL_BLOCK_H_
#define LIBDDP_COMM_MESSAGES_CHANNEL_BLOCK_H_

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "ddp/types.h"
#include "libddp/base/page.h"
#include "libddp/comm/memory/allocation_table.h"

namespace ddp {

inline constexpr uint64_t kEnvelopes = 8;
inline constexpr uint64_t kReplies = 16;
inline constexpr uint64_t kBounceChunks = 4;
inline constexpr size_t kBounceBytes = size_t{64} << 10;

// By the sender. Everything but `number` is written before it.
struct Envelope {
  enum class Contents : uint8_t {
    kData,           // the message itself
    kSharedRanges,   // ListedRange[ranges], with addresses that the whole group can reach
    kPrivateRanges,  // ListedRange[ranges], with addresses of the sender's process
    kNothing,        // too many ranges to list
  };
  std::atomic<uint64_t> number;  // of the message in its channel, + 1
  uint64_t count;                // elements
  int32_t tag;
  uint16_t ranges;
  DType dtype;
  Contents contents;
  uint32_t place;  // of what does not fit in here, in the ring of data
};
static_assert(sizeof(Envelope) == 32);

// By the receiver, about the message with that number.
struct Reply {
  enum : uint64_t {
    kReceived,     // it has been fetched: the sender may use its buffers again
    kRequestData,  // put it into the bounce ring
  };
  static uint64_t Make(uint64_t message, uint64_t kind) { return message << 1 | kind; }
  std::atomic<uint64_t> number;  // of the reply in its channel, + 1
  uint64_t what;
};

// Whether a ring of so many places has one for the next entry, of `written` so far. *taken: how many the writer knows
// to have been taken out; it looks at the reader's line only where that does not do.
inline bool HasPlace(uint64_t written, uint64_t* taken, const std::atomic<uint64_t>& reader, uint64_t places) {
  if (written - *taken >= places) *taken = reader.load(std::memory_order_acquire);
  return written - *taken < places;
}

struct alignas(kCacheLine) Channel {
  std::atomic<uint64_t> taken;  // by the receiver: envelopes 0 .. taken - 1 may be used again
  alignas(kCacheLine) Reply replies[kReplies];
  alignas(kCacheLine) std::atomic<uint64_t> replies_taken;  // by the sender
};

// One message at a time passes through.
struct alignas(kCacheLine) BounceRing {
  std::atomic<uint64_t> message;  // by the sender: whose chunks these are, see Make
  uint64_t first;                 // the number of its first chunk
  std::atomic<uint64_t> filled;   // by the sender: chunks 0 .. filled - 1, over the group's life, have been put in
  alignas(kCacheLine) std::atomic<uint64_t> emptied;  // by the receiver

  static uint64_t Make(int receiver, uint64_t message) { return static_cast<uint64_t>(receiver + 1) << 48 | message; }
};

class ChannelBlock {
 public:
  ChannelBlock() = default;
  ChannelBlock(char* base, int ranks) : base_(base), ranks_(static_cast<size_t>(ranks)) {}

  static size_t Bytes(int ranks) { return ChannelBlock(nullptr, ranks).ChunkOffset(static_cast<size_t>(ranks), 0); }

  // The data, or the list of ranges, lie in the envelope up to so many bytes, in the ring up to `most_bytes`. There is
  // one channel for each pair, so with many ranks it is less.
  size_t envelope_bytes() const { return ranks_ <= 16 ? 1024 : 256; }
  size_t most_bytes() const { return std::max(envelope_bytes(), std::min(kMostBytes, ring_bytes() / 16)); }
  // As large as can be, so that its lines have left the caches next to the receiver's core before they are written
  // again: to take them back from there can cost three times as much.
  size_t ring_bytes() const { return size_t{ranks_ <= 4 ? 1024u : ranks_ <= 8 ? 256u : ranks_ <= 16 ? 64u : 0u} << 10; }

  bool InEnvelope(size_t bytes) const { return bytes <= envelope_bytes(); }
  // What an envelope with so many bytes in it takes. In the line of the header if they fit in there, else aligned as
  // memcpy likes it.
  size_t EnvelopeBytes(size_t bytes) const {
    return bytes <= kInHeader ? sizeof(Envelope) + bytes : kCacheLine + bytes;
  }
  // Where the next `bytes` lie that do not fit into an envelope; moves *end behind them. The last kEnvelopes messages
  // take half of the ring at most, and what is skipped at its end a sixteenth: nobody writes over what is still to be
  // read.
  size_t Place(size_t* end, size_t bytes) const {
    if (*end + bytes > ring_bytes()) *end = 0;
    const size_t place = *end;
    *end += (bytes + kCacheLine - 1) / kCacheLine * kCacheLine;
    return place;
  }
  char* payload(int sender, int receiver, Envelope& e, size_t bytes) const {
    if (!InEnvelope(bytes)) return ring(sender, receiver) + e.place;
    return reinterpret_cast<char*>(&e) + EnvelopeBytes(bytes) - bytes;
  }

  Channel& channel(int sender, int receiver) const { return reinterpret_cast<Channel*>(base_)[Pair(sender, receiver)]; }
  Envelope& envelope(int sender, int receiver, uint64_t number) const {
    return *reinterpret_cast<Envelope*>(base_ +
                                        EnvelopeOffset(Pair(sender, receiver) * kEnvelopes + number % kEnvelopes));
  }
  // Nobody sends to itself.
  char* ring(int sender, int receiver) const {
    const size_t s = static_cast<size_t>(sender), r = static_cast<size_t>(receiver);
    return base_ + RingOffset(s * (ranks_ - 1) + r - (r > s ? 1 : 0));
  }
  BounceRing& bounce_ring(int sender) const { return reinterpret_cast<BounceRing*>(base_ + BounceOffset())[sender]; }
  char* chunk(int sender, uint64_t number) const {
    return base_ + ChunkOffset(static_cast<size_t>(sender), number % kBounceChunks);
  }

 private:
  static constexpr size_t kMostBytes = size_t{32} << 10;
  static constexpr size_t kInHeader = kCacheLine - sizeof(Envelope);

  size_t Pair(int sender, int receiver) const {
    return static_cast<size_t>(sender) * ranks_ + static_cast<size_t>(receiver);
  }
  size_t EnvelopeOffset(size_t index) const {
    return ranks_ * ranks_ * sizeof(Channel) + index * (kCacheLine + envelope_bytes());
  }
  size_t RingOffset(size_t index) const { return EnvelopeOffset(ranks_ * ranks_ * kEnvelopes) + index * ring_bytes(); }
  size_t BounceOffset() const { return RingOffset(ranks_ == 0 ? 0 : ranks_ * (ranks_ - 1)); }
  size_t ChunkOffset(size_t sender, uint64_t index) const {
    return BounceOffset() + ranks_ * sizeof(BounceRing) +
           (sender * kBounceChunks + index) * (kBounceBytes + kCacheLine);
  }

  char* base_ = nullptr;
  size_t ranks_ = 0;
};

}  // namespace ddp

#endif  // LIBDDP_COMM_MESSAGES_CHANNEL_BLOCK_H_
