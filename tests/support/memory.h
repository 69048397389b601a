// SPDX-License-Identifier: Apache-2.0
// Memory for a test's operations, in the kinds that a group has to cope with.
#ifndef TESTS_SUPPORT_MEMORY_H_
#define TESTS_SUPPORT_MEMORY_H_

#include <algorithm>
#include <cstddef>
#include <memory>
#include <random>
#include <vector>

#include "ddp/process_group.h"
#include "tests/support/numbers.h"
#include "tests/support/ranks.h"

namespace ddp::testing {

enum class Placement {
  kAllocated,  // from ProcessGroup::Allocate
  kOrdinary,   // the program's own
  kUnaligned,  // the program's own, at an address with no more alignment than an element needs
  kMixed,      // allocated on even ranks, ordinary on odd ones
};
inline constexpr Placement kAllPlacements[] = {Placement::kAllocated, Placement::kOrdinary, Placement::kUnaligned,
                                               Placement::kMixed};

// An array, of zeros. Making one is collective, and so is its end.
class Memory {
 public:
  Memory(Rank& rank, Placement placement, DType dtype, size_t count) : count_(count), dtype_(dtype) {
    const size_t bytes = std::max<size_t>(1, count * SizeOf(dtype));
    const bool allocated = placement == Placement::kAllocated || placement == Placement::kMixed;
    if (allocated) lent_ = rank.Lend(bytes);
    if (allocated && (placement == Placement::kAllocated || rank.rank() % 2 == 0)) {
      data_ = static_cast<char*>(lent_->data());
    } else {
      ordinary_.resize(bytes + 64);
      data_ = ordinary_.data() + (placement == Placement::kUnaligned ? SizeOf(dtype) : 0);
    }
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  size_t count() const { return count_; }
  void* data() const { return data_; }
  double Get(size_t i) const { return GetElement(dtype_, data_, i); }
  void Set(size_t i, double value) { SetElement(dtype_, data_, i, value); }
  void Fill(double value) {
    for (size_t i = 0; i < count_; ++i) Set(i, value);
  }

  Buffer Range(size_t first, size_t count) const { return Buffer{data_ + first * SizeOf(dtype_), count, dtype_, {}}; }
  Buffer whole() const { return Range(0, count_); }

  // The part [first, first + count) cut into `pieces` ranges at random places, some perhaps empty.
  std::vector<Buffer> Cut(size_t first, size_t count, int pieces, unsigned seed) const {
    std::mt19937 random(seed);
    std::vector<size_t> cuts = {0, count};
    for (int i = 1; i < pieces; ++i) cuts.push_back(random() % (count + 1));
    std::sort(cuts.begin(), cuts.end());
    std::vector<Buffer> ranges;
    for (size_t i = 0; i + 1 < cuts.size(); ++i) ranges.push_back(Range(first + cuts[i], cuts[i + 1] - cuts[i]));
    return ranges;
  }
  std::vector<Buffer> Cut(int pieces, unsigned seed) const { return Cut(0, count_, pieces, seed); }

 private:
  size_t count_;
  DType dtype_;
  std::shared_ptr<const Allocation> lent_;
  std::vector<char> ordinary_;
  char* data_ = nullptr;
};

}  // namespace ddp::testing

#endif  // TESTS_SUPPORT_MEMORY_H_
