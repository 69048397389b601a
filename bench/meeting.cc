// SPDX-License-Identifier: Apache-2.0
#include "bench/meeting.h"

#include <sched.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <limits>
#include <utility>

namespace bench {
namespace {

constexpr int kSpins = 20000;
constexpr int kSpinsOversubscribed = 50;

}  // namespace

struct Meeting::Shared {
  struct Times {
    alignas(64) int64_t begin[kMaxGroups];
    int64_t end[kMaxGroups];
  };
  alignas(64) std::atomic<int> arrived;
  alignas(64) std::atomic<int> turn;
  alignas(64) std::atomic<int> ping;
  alignas(64) std::atomic<int> pong;
  alignas(64) int64_t values[kMaxRanks];
  Times times[kMaxRanks];
};

int64_t NowNs() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * int64_t{1'000'000'000} + t.tv_nsec;
}

bool Oversubscribed(int ranks) { return ranks > sysconf(_SC_NPROCESSORS_ONLN); }

void Patience::Pause() {
  if (spins_left_ <= 0) {
    sched_yield();
    return;
  }
  --spins_left_;
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

size_t Meeting::Bytes() { return sizeof(Shared); }

Meeting::Meeting(void* memory, int rank, int ranks)
    : shared_(*static_cast<Shared*>(memory)),
      rank_(rank),
      ranks_(ranks),
      spins_(Oversubscribed(ranks) ? kSpinsOversubscribed : kSpins) {}

void Meeting::Barrier() {
  const int mine = ++turn_;
  if (shared_.arrived.fetch_add(1, std::memory_order_acq_rel) == ranks_ - 1) {
    shared_.arrived.store(0, std::memory_order_relaxed);
    shared_.turn.store(mine, std::memory_order_release);
    return;
  }
  for (Patience patience(spins_); shared_.turn.load(std::memory_order_acquire) != mine;) patience.Pause();
}

int64_t Meeting::Max(int64_t value) {
  shared_.values[rank_] = value;
  Barrier();
  const int64_t max = *std::max_element(shared_.values, shared_.values + ranks_);
  Barrier();
  return max;
}

int64_t Meeting::Sum(int64_t value) {
  shared_.values[rank_] = value;
  Barrier();
  int64_t sum = 0;
  for (int r = 0; r < ranks_; ++r) sum += shared_.values[r];
  Barrier();
  return sum;
}

double Meeting::LinkNs() {
  if (ranks_ < 2) return 0;
  constexpr int kRounds = 200, kBatches = 8;
  const int from = round_;
  round_ += kRounds * kBatches;
  int64_t best = 0;
  const auto await = [](const std::atomic<int>& word, int value) {
    for (Patience patience(kSpins); word.load(std::memory_order_acquire) < value;) patience.Pause();
  };
  Barrier();
  if (rank_ == 0) {
    best = std::numeric_limits<int64_t>::max();
    for (int i = from; i < round_;) {
      const int64_t begin = NowNs();
      for (const int end = i + kRounds; i < end;) {
        shared_.ping.store(++i, std::memory_order_release);
        await(shared_.pong, i);
      }
      best = std::min(best, NowNs() - begin);
    }
  } else if (rank_ == 1) {
    for (int i = from + 1; i <= round_; ++i) {
      await(shared_.ping, i);
      shared_.pong.store(i, std::memory_order_release);
    }
  } else {
    while (shared_.pong.load(std::memory_order_acquire) < round_) usleep(500);
  }
  return static_cast<double>(Max(best)) / (2.0 * kRounds);
}

void Meeting::Record(int index, int64_t begin_ns, int64_t end_ns) {
  shared_.times[rank_].begin[index] = begin_ns;
  shared_.times[rank_].end[index] = end_ns;
}

std::vector<double> Meeting::Durations(int groups) {
  Barrier();
  std::vector<double> durations;
  for (int g = 0; g < groups; ++g) {
    int64_t first = std::numeric_limits<int64_t>::max(), last = 0;
    for (int r = 0; r < ranks_; ++r) {
      first = std::min(first, shared_.times[r].begin[g]);
      last = std::max(last, shared_.times[r].end[g]);
    }
    durations.push_back(static_cast<double>(last - first));
  }
  Barrier();
  return durations;
}

}  // namespace bench
