// SPDX-License-Identifier: Apache-2.0
// Statistics of the durations of steps, in bounded memory.
#ifndef EXAMPLES_TRAIN_DURATIONS_H_
#define EXAMPLES_TRAIN_DURATIONS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace examples {

// Count, sum, minimum and maximum are exact. The median is that of all durations up to kMost of them, and beyond that
// of at least half as many, evenly spaced.
class Durations {
 public:
  static constexpr size_t kMost = 32768;

  // The first `warmup` durations are discarded as soon as there are later ones.
  explicit Durations(int64_t warmup) : warmup_(warmup) { kept_.reserve(kMost); }

  // Forgets all, and begins with the warm-up.
  void Restart() {
    added_ = 0;
    Clear();
  }

  void Add(int64_t ns) {
    if (added_++ == warmup_) Clear();
    sum_ns_ += ns;
    least_ns_ = count_ == 0 ? ns : std::min(least_ns_, ns);
    most_ns_ = count_ == 0 ? ns : std::max(most_ns_, ns);
    if (count_++ % stride_ == 0) Keep(ns);
  }

  bool warmup_counted() const { return added_ <= warmup_; }
  int64_t count() const { return count_; }
  int64_t sum_ns() const { return sum_ns_; }
  int64_t least_ns() const { return least_ns_; }
  int64_t most_ns() const { return most_ns_; }
  // 0 if there are none; for an even number of durations, the mean of the two in the middle.
  double median_ns() const {
    std::vector<int64_t> ns = kept_;
    if (ns.empty()) return 0;
    const auto upper = ns.begin() + static_cast<std::ptrdiff_t>(ns.size() / 2);
    std::nth_element(ns.begin(), upper, ns.end());
    const int64_t lower = ns.size() % 2 == 1 ? *upper : *std::max_element(ns.begin(), upper);
    return (static_cast<double>(lower) + static_cast<double>(*upper)) / 2;
  }

 private:
  void Clear() {
    kept_.clear();
    count_ = sum_ns_ = 0;
    stride_ = 1;
  }
  void Keep(int64_t ns) {
    kept_.push_back(ns);
    if (kept_.size() < kMost) return;
    for (size_t i = 0; i < kMost / 2; ++i) kept_[i] = kept_[2 * i];
    kept_.resize(kMost / 2);
    stride_ *= 2;
  }

  const int64_t warmup_;
  std::vector<int64_t> kept_;  // every stride_-th
  int64_t added_ = 0, count_ = 0, stride_ = 1;
  int64_t sum_ns_ = 0, least_ns_ = 0, most_ns_ = 0;
};

}  // namespace examples

#endif  // EXAMPLES_TRAIN_DURATIONS_H_
