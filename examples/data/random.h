// SPDX-License-Identifier: Apache-2.0
// Random numbers that are equal on all platforms. Those of the standard library differ between implementations.
#ifndef EXAMPLES_DATA_RANDOM_H_
#define EXAMPLES_DATA_RANDOM_H_

#include <cstdint>

namespace examples {

// SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
class Random {
 public:
  // Adjacent seeds and epochs give independent streams, because both pass through the generator's mixing function.
  Random(uint64_t seed, uint64_t epoch) : state_(seed) { state_ = Next() ^ (epoch * 0xd1342543de82ef95); }

  uint64_t Next() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
  }

  // Returns a number that is uniform in 0 .. n - 1, without bias and almost always without a division (Lemire: Fast
  // random integer generation in an interval, 2019).
  uint32_t Below(uint32_t n) {
    uint64_t product = (Next() >> 32) * n;
    if (static_cast<uint32_t>(product) < n) {
      const uint32_t threshold = -n % n;
      while (static_cast<uint32_t>(product) < threshold) product = (Next() >> 32) * n;
    }
    return static_cast<uint32_t>(product >> 32);
  }

 private:
  uint64_t state_;
};

}  // namespace examples

#endif  // EXAMPLES_DATA_RANDOM_H_
