// What the ranks of a host share for messages from one to another; laid out behind the ControlBlock.
//
//   Channel[n][n]  one for each sender and receiver
//     envelopes    a ring: message number q uses envelope q % kEnvelopes. A small message's data go with it.
//     replies      a ring, the other way: what the receiver says about messages too large for an envelope
//   Pipe[n]        one for each sender: chunks of a message that the receiver cannot fetch by itself
//
// Each word is written by one side, and each side's words lie in cache lines of their own.
#ifndef LIBDDP_COMM_CHANNEL_BLOCK_H_
#define LIBDDP_COMM_CHANNEL_BLOCK_H_

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "ddp/types.h"
#include "libddp/comm/control_block.h"

namespace ddp {

inline constexpr uint64_t kEnvelopes = 8;
inline constexpr uint64_t kReplies = 16;
inline constexpr uint64_t kPipeChunks = 4;
inline constexpr size_t kPipeBytes = size_t{64} << 10;

// By the sender. Everything but `number` is written before it. The data, or the list of ranges, follow.
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

  char* payload() { return reinterpret_cast<char*>(this + 1); }
};
static_assert(sizeof(Envelope) == 24);

// By the receiver, about the message with that number.
struct Reply {
  enum : uint64_t {
    kReceived,  // it has been fetched: the sender's buffers are free again
    kFeed,      // put it through the pipe
  };
  static uint64_t Make(uint64_t message, uint64_t kind) { return message << 1 | kind; }
  std::atomic<uint64_t> number;  // of the reply in its channel, + 1
  uint64_t what;
};

struct alignas(kCacheLine) Channel {
  std::atomic<uint64_t> taken;  // by the receiver: envelopes 0 .. taken - 1 may be used again
  alignas(kCacheLine) Reply replies[kReplies];
  alignas(kCacheLine) std::atomic<uint64_t> replies_taken;  // by the sender
};

// One message at a time passes through.
struct alignas(kCacheLine) Pipe {
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

  // An envelope has room for so many bytes of data. There is one channel for each pair, so with many ranks less.
  size_t payload_bytes() const { return ranks_ <= 4 ? 16384 : ranks_ <= 8 ? 8192 : ranks_ <= 16 ? 2048 : 256; }

  Channel& channel(int sender, int receiver) const {
    return reinterpret_cast<Channel*>(base_)[static_cast<size_t>(sender) * ranks_ + static_cast<size_t>(receiver)];
  }
  Envelope& envelope(int sender, int receiver, uint64_t number) const {
    const size_t pair = static_cast<size_t>(sender) * ranks_ + static_cast<size_t>(receiver);
    return *reinterpret_cast<Envelope*>(base_ + EnvelopeOffset(pair * kEnvelopes + number % kEnvelopes));
  }
  Pipe& pipe(int sender) const {
    return reinterpret_cast<Pipe*>(base_ + EnvelopeOffset(ranks_ * ranks_ * kEnvelopes))[sender];
  }
  char* chunk(int sender, uint64_t number) const {
    return base_ + ChunkOffset(static_cast<size_t>(sender), number % kPipeChunks);
  }

 private:
  size_t EnvelopeOffset(size_t index) const {
    // The header and 40 bytes of data share a line.
    return ranks_ * ranks_ * sizeof(Channel) + index * (kCacheLine + payload_bytes());
  }
  size_t ChunkOffset(size_t sender, uint64_t index) const {
    return EnvelopeOffset(ranks_ * ranks_ * kEnvelopes) + ranks_ * sizeof(Pipe) +
           (sender * kPipeChunks + index) * (kPipeBytes + kCacheLine);
  }

  char* base_ = nullptr;
  size_t ranks_ = 0;
};

}  // namespace ddp

#endif  // LIBDDP_COMM_CHANNEL_BLOCK_H_
