// SPDX-License-Identifier: Apache-2.0
// A training in whole numbers, so that its state after any number of steps by any ranks is known exactly: what the
// ranks of a fault test compute together, and the test alone.
#ifndef TESTS_FAULT_TRAINING_H_
#define TESTS_FAULT_TRAINING_H_

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace ddp::testing {

inline constexpr size_t kTensors = 4;
inline constexpr size_t kElements = 20'000;  // of each

// Tensor by tensor. Whole numbers, small enough that float32 holds every sum.
struct TrainingState {
  std::vector<float> values = std::vector<float>(kTensors * kElements);
  std::vector<float> momenta = std::vector<float>(kTensors * kElements);
};

// What `rank` of the world contributes in `step` to the gradient of element i, whose value is `value`.
inline float Gradient(int rank, int64_t step, size_t i, float value) {
  return static_cast<float>(((rank + 1) * (step + 3) + static_cast<int64_t>(i * 7) + static_cast<int64_t>(value)) % 61);
}

// The optimizer, for one element: `sum` is that of all ranks' gradients.
inline void Update(float sum, float* value, float* momentum) {
  *momentum = std::fmod(*momentum + sum, 509.0f);
  *value = std::fmod(*value + *momentum, 1021.0f);
}

// Steps `from` to `to` - 1 by `ranks` of the world.
inline void Simulate(const std::vector<int>& ranks, int64_t from, int64_t to, TrainingState* state) {
  for (int64_t step = from; step < to; ++step) {
    for (size_t i = 0; i < state->values.size(); ++i) {
      float sum = 0;
      for (const int rank : ranks) sum += Gradient(rank, step, i, state->values[i]);
      Update(sum, &state->values[i], &state->momenta[i]);
    }
  }
}

// FNV-1a.
inline uint64_t Hash(const TrainingState& state) {
  uint64_t hash = 14695981039346656037u;
  for (const std::vector<float>* all : {&state.values, &state.momenta}) {
    for (const float f : *all) hash = (hash ^ static_cast<uint64_t>(f)) * 1099511628211u;
  }
  return hash;
}

}  // namespace ddp::testing

#endif  // TESTS_FAULT_TRAINING_H_
