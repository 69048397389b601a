// SPDX-License-Identifier: Apache-2.0
#include "libddp/device/cpu_hash.h"

#include <bit>
#include <cstring>

#include "libddp/device/hash_rule.h"

namespace ddp {
namespace {

static_assert(std::endian::native == std::endian::little);

uint64_t LoadWord(const char* from, size_t bytes = sizeof(uint64_t)) {
  uint64_t word = 0;
  std::memcpy(&word, from, bytes);
  return word;
}

}  // namespace

// Four sums that do not wait for each other: the multiplication takes longer than everything else.
uint64_t CpuHash(const void* data, size_t bytes) {
  const char* const in = static_cast<const char*>(data);
  uint64_t sums[4] = {HashWord(bytes, 0), 0, 0, 0};
  const size_t words = bytes / 8;
  size_t i = 0;
  for (; i + 4 <= words; i += 4) {
    for (size_t k = 0; k < 4; ++k) sums[k] += HashWord(LoadWord(in + (i + k) * 8), i + k + 1);
  }
  for (; i < words; ++i) sums[0] += HashWord(LoadWord(in + i * 8), i + 1);
  if (bytes % 8 != 0) sums[1] += HashWord(LoadWord(in + i * 8, bytes % 8), i + 1);
  return sums[0] + sums[1] + sums[2] + sums[3];
}

}  // namespace ddp
