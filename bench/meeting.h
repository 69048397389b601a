// SPDX-License-Identifier: Apache-2.0
// Where the ranks of a benchmark meet: a barrier, small reductions and the times of each rank, in memory of their own.
#ifndef BENCH_MEETING_H_
#define BENCH_MEETING_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace bench {

inline constexpr int kMaxRanks = 64;
inline constexpr int kMaxGroups = 512;

int64_t NowNs();  // on the clock that all processes of a host share

// More ranks than processors: waiting in the processor would only keep the awaited rank from running.
bool Oversubscribed(int ranks);

// Waits in the processor, `spins` times, then by giving it away.
class Patience {
 public:
  explicit Patience(int spins) : spins_left_(spins) {}
  void Pause();

 private:
  int spins_left_;
};

class Meeting {
 public:
  struct Shared;
  static size_t Bytes();

  // `memory`: Bytes() bytes of zeros, shared, aligned to a cache line. At most kMaxRanks ranks.
  Meeting(void* memory, int rank, int ranks);

  int rank() const { return rank_; }
  int ranks() const { return ranks_; }

  void Barrier();
  int64_t Max(int64_t value);  // over the ranks; the same on each
  int64_t Sum(int64_t value);

  // One-way latency of a cache line between ranks 0 and 1 in nanoseconds, the best of several batches; 0 for one rank.
  // The other ranks sleep. It tells where a virtual machine's host has put two processors: on one core, near each
  // other, or far apart.
  double LinkNs();

  // This rank's begin and end of timed group `index`.
  void Record(int index, int64_t begin_ns, int64_t end_ns);

  // For each of the first `groups`: from the first rank's begin to the last rank's end. Collective.
  std::vector<double> Durations(int groups);

 private:
  Shared& shared_;
  const int rank_;
  const int ranks_;
  const int spins_;
  int turn_ = 0;
  int round_ = 0;
};

}  // namespace bench

#endif  // BENCH_MEETING_H_
