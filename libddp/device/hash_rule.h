// SPDX-License-Identifier: Apache-2.0
// The hash by which ranks compare what they hold. Plain arithmetic, so that a kernel gets the CPU's numbers.
//
// An array is taken as words of 8 bytes, little-endian, the last one filled up with zeros. Its hash is the sum of
// HashWord(word i, i + 1) over all words, plus HashWord(bytes, 0): a sum, so that any number of threads may hash parts
// of it in any order. HashWord is a bijection of the word for each index, so arrays that differ in one word, be it by
// one bit, always have different hashes; others have equal ones about once in 2^64.
#ifndef LIBDDP_DEVICE_HASH_RULE_H_
#define LIBDDP_DEVICE_HASH_RULE_H_

#include <cstdint>

#include "libddp/device/scale_rule.h"

namespace ddp {

DDP_HOST_DEVICE inline uint64_t HashWord(uint64_t word, uint64_t index) {
  uint64_t x = word ^ (index * 0x9e3779b97f4a7c15u);
  x ^= x >> 32;
  x *= 0xd6e8feb86659fd93u;
  return x ^ (x >> 32);
}

}  // namespace ddp

#endif  // LIBDDP_DEVICE_HASH_RULE_H_
