// SPDX-License-Identifier: Apache-2.0
// The hash by which ranks compare their values.
#include "libddp/device/cpu_hash.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <set>
#include <vector>

#include "libddp/device/hash_rule.h"
#include "tests/support/catch.h"

namespace ddp {
namespace {

std::vector<unsigned char> Numbers(size_t n) {
  std::vector<unsigned char> bytes(n);
  for (size_t i = 0; i < n; ++i) bytes[i] = static_cast<unsigned char>(i * i + 7 * i);
  return bytes;
}

// Word by word, as hash_rule.h says.
uint64_t Reference(const unsigned char* data, size_t bytes) {
  uint64_t sum = HashWord(bytes, 0);
  for (size_t at = 0; at < bytes; at += 8) {
    uint64_t word = 0;
    for (size_t k = 0; k < 8 && at + k < bytes; ++k) word |= uint64_t{data[at + k]} << (8 * k);
    sum += HashWord(word, at / 8 + 1);
  }
  return sum;
}

TEST_CASE("a hash is the sum over the words, whatever the length and the alignment") {
  const std::vector<unsigned char> bytes = Numbers(300);
  for (size_t n = 0; n < 290; ++n) {
    for (size_t shift = 0; shift < 9; ++shift) {
      const std::vector<unsigned char> exact(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(n));
      std::vector<unsigned char> shifted(n + shift);
      if (n > 0) std::memcpy(shifted.data() + shift, exact.data(), n);
      REQUIRE(CpuHash(shifted.data() + shift, n) == Reference(exact.data(), n));
    }
  }
}

TEST_CASE("every bit counts, and so do the place and the length") {
  std::set<uint64_t> seen;
  std::vector<unsigned char> bytes = Numbers(203);
  seen.insert(CpuHash(bytes.data(), bytes.size()));
  size_t made = 1;
  for (size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
    bytes[bit / 8] ^= static_cast<unsigned char>(1 << bit % 8);
    seen.insert(CpuHash(bytes.data(), bytes.size()));
    bytes[bit / 8] ^= static_cast<unsigned char>(1 << bit % 8);
    ++made;
  }
  for (size_t i = 8; i + 8 <= bytes.size(); i += 8) {  // two words change places
    std::swap_ranges(bytes.begin(), bytes.begin() + 8, bytes.begin() + static_cast<std::ptrdiff_t>(i));
    seen.insert(CpuHash(bytes.data(), bytes.size()));
    std::swap_ranges(bytes.begin(), bytes.begin() + 8, bytes.begin() + static_cast<std::ptrdiff_t>(i));
    ++made;
  }
  const std::vector<unsigned char> zeros(100);
  for (size_t n = 0; n < zeros.size(); ++n, ++made) seen.insert(CpuHash(zeros.data(), n));
  CHECK(seen.size() == made);
}

// What an optimizer does wrongly on one rank changes many elements by about as much.
TEST_CASE("changes of many elements do not cancel") {
  std::vector<float> values(1 << 14);
  std::iota(values.begin(), values.end(), 1.0f);
  std::set<uint64_t> seen;
  size_t made = 0;
  for (int step = 0; step < 200; ++step, ++made) {
    for (size_t i = 0; i < values.size(); ++i) values[i] += i % 2 == 0 ? 1.0f : -1.0f;
    seen.insert(CpuHash(values.data(), values.size() * sizeof(float)));
  }
  CHECK(seen.size() == made);
}

}  // namespace
}  // namespace ddp
