// SPDX-License-Identifier: Apache-2.0
// Chooses the elements that dropout sets to 0, equally on all devices.
#ifndef EXAMPLES_NN_DROPOUT_HASH_H_
#define EXAMPLES_NN_DROPOUT_HASH_H_

#include <cstdint>

#include "examples/nn/host_device.h"

namespace nn {

// The mixing function of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
NN_HOST_DEVICE inline uint64_t Mix(uint64_t z) {
  z += 0x9e3779b97f4a7c15;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

// The choice of one forward pass.
struct DropoutChoice {
  DropoutChoice(double p, uint64_t seed, uint64_t pass)
      : stream(StreamOf(seed, pass)),
        limit(static_cast<uint64_t>(p * 0x1p32)),
        scale(static_cast<float>(1 / (1 - p))) {}

  NN_HOST_DEVICE static uint64_t StreamOf(uint64_t seed, uint64_t pass) { return Mix(seed ^ Mix(pass)); }

  // Returns the factor of element i.
  NN_HOST_DEVICE float Factor(uint64_t i) const { return Mix(stream + i) >> 32 < limit ? 0.0f : scale; }

  uint64_t stream, limit;  // limit: compared with 32 random bits
  float scale;
};

}  // namespace nn

#endif  // EXAMPLES_NN_DROPOUT_HASH_H_
