// SPDX-License-Identifier: Apache-2.0
// Where in the shared memory of the staged protocol (staged_protocol.h) counters, slots and packets lie, and in a GPU's
// memory a rank's own counts.
#ifndef LIBDDP_DEVICE_STAGED_MEMORY_H_
#define LIBDDP_DEVICE_STAGED_MEMORY_H_

#include <cstddef>
#include <cstdint>

#include "libddp/device/scale_rule.h"

namespace ddp::staged {

inline constexpr int kMaxRanks = 16;  // of one group, on one node
inline constexpr int kMaxChannels = 16;
inline constexpr int kDepth = 4;  // slots of a ring
inline constexpr size_t kSlotBytes = 64 << 10;
inline constexpr int kPairChannels = 2;  // of a message between two ranks
inline constexpr size_t kPairSlotBytes = 16 << 10;
inline constexpr int kPacketChannels = 64;
inline constexpr uint64_t kPackets = 2048;  // of a channel in one operation
inline constexpr int kPacketBytes = 12;     // of data
inline constexpr size_t kLine = 64;

struct alignas(kLine) Counter {
  uint64_t value;
};

// Elements, the first one lowest; 0 where there is none.
struct PacketData {
  uint32_t word[kPacketBytes / 4];
};
// GPUs load and store it as a whole. The mark is another in each operation.
struct alignas(16) Packet {
  PacketData data;
  uint32_t mark;
};

// What all kernels of a rank have in common.
struct Place {
  int rank, ranks;
  char* ring;        // the shared memory, where this GPU sees it
  uint64_t* counts;  // this rank's own, in the GPU's memory: kCounts
  uint32_t* failed;  // this process's: set by an operation that has to be left
};

// Counters of a rank and channel: of its input ring and of its result ring, how many slots it has filled, and how many
// of everybody's it has done with.
enum Stage : int { kWritten, kConsumed, kPublished, kFetched, kStages };

// Not 0: thread block `index` of this rank leaves. A GPU reads a line of host memory for one thread block after the
// other, a microsecond each: so each has a line.
inline constexpr int kAbortWords = 64;
DDP_HOST_DEVICE inline uint32_t* AbortWordOf(const Place& at, int rank, int index) {
  return reinterpret_cast<uint32_t*>(at.ring + static_cast<size_t>(rank * kAbortWords + index % kAbortWords) * kLine);
}
DDP_HOST_DEVICE inline Counter* CounterOf(const Place& at, Stage stage, int rank, int channel) {
  return reinterpret_cast<Counter*>(AbortWordOf(at, at.ranks, 0)) + (rank * kMaxChannels + channel) * kStages + stage;
}
// Of the messages from one rank to another.
enum PairStage : int { kSent, kReceived, kPairStages };
DDP_HOST_DEVICE inline Counter* PairCounterOf(const Place& at, PairStage stage, int from, int to, int channel) {
  return CounterOf(at, kWritten, at.ranks, 0) + ((from * at.ranks + to) * kPairChannels + channel) * kPairStages +
         stage;
}
DDP_HOST_DEVICE inline char* SlotsBegin(const Place& at) {
  return reinterpret_cast<char*>(PairCounterOf(at, kSent, at.ranks, 0, 0));
}
// ring: 0 the input's, 1 the result's.
DDP_HOST_DEVICE inline char* SlotOf(const Place& at, int ring, int rank, int channel, uint64_t number) {
  const size_t index =
      (static_cast<size_t>(rank) * kMaxChannels + static_cast<size_t>(channel)) * 2 + static_cast<size_t>(ring);
  return SlotsBegin(at) + (index * kDepth + number % kDepth) * kSlotBytes;
}
DDP_HOST_DEVICE inline char* PairSlotOf(const Place& at, int from, int to, int channel, uint64_t number) {
  const size_t pair = static_cast<size_t>(from) * static_cast<size_t>(at.ranks) + static_cast<size_t>(to);
  const size_t index = pair * kPairChannels + static_cast<size_t>(channel);
  return SlotOf(at, 0, at.ranks, 0, 0) + (index * kDepth + number % kDepth) * kPairSlotBytes;
}
// Operations that follow each other use different ones.
DDP_HOST_DEVICE inline Packet* PacketsOf(const Place& at, int rank, int channel, uint64_t operation) {
  const size_t index = (static_cast<size_t>(rank) * 2 + operation % 2) * kPacketChannels + static_cast<size_t>(channel);
  return reinterpret_cast<Packet*>(PairSlotOf(at, at.ranks, 0, 0, 0)) + index * kPackets;
}
DDP_HOST_DEVICE inline size_t RingBytes(int ranks) {
  char* const anywhere = reinterpret_cast<char*>(kLine);  // but at null, where pointers have no arithmetic
  const Place at{0, ranks, anywhere, nullptr, nullptr};
  return static_cast<size_t>(reinterpret_cast<char*>(PacketsOf(at, ranks, 0, 0)) - at.ring);
}

// A rank's own counts: of slots in each stage, of the operations by packets in each channel, and LeftOf.
inline constexpr int kPairCounts = kMaxRanks * kPairChannels * kPairStages;
inline constexpr int kCounts = kMaxChannels * kStages + kPairCounts + kPacketChannels + 1;
DDP_HOST_DEVICE inline uint64_t* CountOf(const Place& at, Stage stage, int channel) {
  return at.counts + channel * kStages + stage;
}
DDP_HOST_DEVICE inline uint64_t* PairCountOf(const Place& at, PairStage stage, int peer, int channel) {
  return at.counts + kMaxChannels * kStages + (peer * kPairChannels + channel) * kPairStages + stage;
}

DDP_HOST_DEVICE inline uint64_t* PacketCountOf(const Place& at, int channel) {
  return at.counts + kMaxChannels * kStages + kPairCounts + channel;
}
// Not 0: the stream has gone on although something has not come that it, or a kernel on it, waited for, so that what
// follows has nothing to give to others. It is the stream that sets it; the words come when the failure is known.
DDP_HOST_DEVICE inline uint64_t* LeftOf(const Place& at) { return at.counts + kCounts - 1; }

}  // namespace ddp::staged

#endif  // LIBDDP_DEVICE_STAGED_MEMORY_H_
