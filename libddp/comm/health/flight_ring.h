// SPDX-License-Identifier: Apache-2.0
// The flight recorder's memory: what each rank of a group has been doing last, where its peers can read it, also when
// the rank hangs or has died.
#ifndef LIBDDP_COMM_HEALTH_FLIGHT_RING_H_
#define LIBDDP_COMM_HEALTH_FLIGHT_RING_H_

#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace ddp {

inline constexpr uint64_t kFlightEntries = 256;  // of each rank

// Nanoseconds on CLOCK_MONOTONIC, a few milliseconds old: reading the exact time would cost more than all the rest of
// an entry, and a hang is told in seconds.
inline int64_t CoarseNowNs() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC_COARSE, &t);
  return t.tv_sec * int64_t{1'000'000'000} + t.tv_nsec;
}

enum class FlightState : uint8_t {
  kQueued,     // called here
  kAnnounced,  // the peers know
  kReady,      // all ranks have announced it, as seen from here
  kDone,
  kFailed,
};

// One operation, as read from a ring.
struct FlightRecord {
  uint64_t sequence = 0;
  FlightState state = FlightState::kQueued;
  uint64_t what = 0;  // OperationKey::Pack
  uint64_t count = 0;
  int bucket = -1;
  int64_t ns[4] = {};  // when it was queued, announced, ready, and ended; 0: not yet
};

// A cache line, written by its rank only. Fields are stored with release order so that a reader who sees any of a new
// operation's also sees that `head` has changed.
struct alignas(64) FlightEntry {
  std::atomic<uint64_t> head;  // sequence + 1, and the state in the low 3 bits; 0 while it is rewritten
  std::atomic<uint64_t> what, count;
  std::atomic<int64_t> bucket;
  std::atomic<int64_t> ns[4];
};
static_assert(sizeof(FlightEntry) == 64);

// One rank's ring. Everything but Read is for that rank, one thread at a time.
class FlightRing {
 public:
  void Queue(uint64_t sequence, uint64_t what, uint64_t count, int bucket, int64_t now_ns) {
    FlightEntry& e = entries_[sequence % kFlightEntries];
    e.head.store(0, std::memory_order_relaxed);
    e.what.store(what, std::memory_order_release);
    e.count.store(count, std::memory_order_release);
    e.bucket.store(bucket, std::memory_order_release);
    e.ns[0].store(now_ns, std::memory_order_release);
    for (int i = 1; i < 4; ++i) e.ns[i].store(0, std::memory_order_release);
    e.head.store(Head(sequence, FlightState::kQueued), std::memory_order_release);
  }
  void Enter(uint64_t sequence, FlightState state, int64_t now_ns) {
    FlightEntry& e = entries_[sequence % kFlightEntries];
    if (!Holds(e, sequence)) return;  // so many came after it that its place is taken
    // It may have passed through the states before at once.
    for (int i = 1; i < 3 && state == FlightState::kDone; ++i) {
      if (e.ns[i].load(std::memory_order_relaxed) == 0) e.ns[i].store(now_ns, std::memory_order_release);
    }
    e.ns[std::min(static_cast<int>(state), 3)].store(now_ns, std::memory_order_release);
    e.head.store(Head(sequence, state), std::memory_order_release);
  }
  // When the operation entered the state; 0 if it did not, or is not in the ring any more.
  int64_t TimeOf(uint64_t sequence, FlightState state) const {
    const FlightEntry& e = entries_[sequence % kFlightEntries];
    if (!Holds(e, sequence)) return 0;
    return e.ns[std::min(static_cast<int>(state), 3)].load(std::memory_order_relaxed);
  }

  // The operations that the ring holds, by sequence. Any thread of any process; one that changes all the time, because
  // its rank is busy, is left out.
  std::vector<FlightRecord> Read() const {
    std::vector<FlightRecord> records;
    for (const FlightEntry& e : entries_) {
      FlightRecord r;
      for (int tries = 0; tries < 8; ++tries) {
        if (!ReadOne(e, &r)) continue;
        records.push_back(r);
        break;
      }
    }
    std::sort(records.begin(), records.end(),
              [](const FlightRecord& a, const FlightRecord& b) { return a.sequence < b.sequence; });
    return records;
  }

 private:
  static bool Holds(const FlightEntry& e, uint64_t sequence) {
    return e.head.load(std::memory_order_relaxed) >> 3 == sequence + 1;
  }
  static bool ReadOne(const FlightEntry& e, FlightRecord* r) {
    const uint64_t head = e.head.load(std::memory_order_acquire);
    r->what = e.what.load(std::memory_order_acquire);
    r->count = e.count.load(std::memory_order_acquire);
    r->bucket = static_cast<int>(e.bucket.load(std::memory_order_acquire));
    for (int i = 0; i < 4; ++i) r->ns[i] = e.ns[i].load(std::memory_order_acquire);
    if (head == 0 || e.head.load(std::memory_order_relaxed) != head) return false;
    r->sequence = (head >> 3) - 1;
    r->state = static_cast<FlightState>(head & 7);
    return true;
  }
  static uint64_t Head(uint64_t sequence, FlightState state) {
    return (sequence + 1) << 3 | static_cast<uint64_t>(state);
  }

  FlightEntry entries_[kFlightEntries];
};

}  // namespace ddp

#endif  // LIBDDP_COMM_HEALTH_FLIGHT_RING_H_
