// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/memory/shared_writer.h"

#include <algorithm>
#include <cstddef>
#include <vector>

#include "tests/support/catch.h"

namespace ddp {
namespace {

constexpr size_t kLine = 64;

struct alignas(kLine) Line {
  char bytes[kLine];
};

std::vector<char> Pattern(size_t bytes, size_t seed) {
  std::vector<char> data(bytes);
  for (size_t i = 0; i < bytes; ++i) data[i] = static_cast<char>((i * 131 + seed * 29) % 251);
  return data;
}

// Calls copy(to, bytes) for places from `first` bytes behind the beginning of a line on; then the target holds
// `expected` there, and its neighbours what they held before.
template <typename Copy>
void CheckCopies(size_t first, const std::vector<char>& expected, Copy&& copy) {
  std::vector<Line> lines(expected.size() / kLine + 4);
  char* const target = lines.data()->bytes;
  std::fill(target, target + lines.size() * kLine, 'x');
  copy(target + kLine + first, expected.size());
  CHECK(std::equal(expected.begin(), expected.end(), target + kLine + first));
  CHECK(std::count(target, target + kLine + first, 'x') == static_cast<long>(kLine + first));
  CHECK(target[kLine + first + expected.size()] == 'x');
}

TEST_CASE("a copy past the caches is exact and writes nothing else") {
  for (const size_t bytes : {size_t{0}, size_t{1}, size_t{63}, size_t{64}, size_t{65}, size_t{4096}, size_t{5003}}) {
    const std::vector<char> data = Pattern(bytes + 1, bytes);
    for (const size_t from : {size_t{0}, size_t{1}}) {
      for (const size_t to_first : {size_t{0}, size_t{4}, size_t{63}}) {
        CheckCopies(to_first, {data.begin() + static_cast<long>(from), data.begin() + static_cast<long>(from + bytes)},
                    [&](char* to, size_t n) { SharedWriter::CopyPastCaches(data.data() + from, to, n); });
      }
    }
  }
}

TEST_CASE("copies are exact whatever their size, place and ranges") {
  SharedWriter writer;
  for (size_t bytes = 2000; bytes < 5000; bytes += 17) {
    std::vector<char> data = Pattern(bytes, bytes), rest = Pattern(bytes, bytes + 1);
    RangeList one, two;
    one.Add(data.data(), bytes);
    two.Add(data.data(), 700);
    two.Add(rest.data(), bytes - 700);
    std::vector<char> both(bytes);
    for (size_t i = 0; i < bytes; ++i) both[i] = i < 700 ? data[i] : rest[i - 700];
    const size_t skip = bytes % 3 * 400;  // into the lists
    const auto from = [&](const std::vector<char>& all) {
      return std::vector<char>(all.begin() + static_cast<long>(skip), all.end());
    };
    for (const size_t first : {size_t{0}, size_t{24}}) {
      if (bytes % 2 == 0) writer.GoPastCaches();
      CheckCopies(first, from(data), [&](char* to, size_t n) { writer.Copy(one, skip, to, n); });
      CheckCopies(first, from(both), [&](char* to, size_t n) { writer.Copy(two, skip, to, n); });
    }
  }
}

}  // namespace
}  // namespace ddp
