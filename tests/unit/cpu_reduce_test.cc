// SPDX-License-Identifier: Apache-2.0
// CpuReduce against scalar references, for every instruction set that this processor has.
#include "libddp/device/cpu_reduce.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "hwy/targets.h"
#include "tests/support/catch.h"
#include "tests/support/numbers.h"
#include "tests/support/targets.h"

namespace ddp {
namespace {

using testing::ForEachTarget;
using testing::GetElement;
using testing::kAllDTypes;
using testing::kAllOps;
using testing::SetElement;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// An array of one rank, `offset` elements after an aligned address, with a guard behind it.
class Array {
 public:
  explicit Array(DType dtype, size_t count, size_t offset = 0)
      : dtype_(dtype), count_(count), offset_(offset), bytes_((count + offset) * SizeOf(dtype) + 64, kGuard) {}

  void* data() { return bytes_.data() + offset_ * SizeOf(dtype_); }
  const void* data() const { return bytes_.data() + offset_ * SizeOf(dtype_); }
  double Get(size_t i) const { return GetElement(dtype_, data(), i); }
  void Set(size_t i, double value) { SetElement(dtype_, data(), i, value); }
  bool GuardIntact() const {
    return std::all_of(bytes_.end() - 64, bytes_.end(), [](char c) { return c == kGuard; });
  }

  // The first element whose bits differ, any NaN being equal to any other; the count if there is none.
  size_t FirstDifference(const Array& other) const {
    const size_t size = SizeOf(dtype_);
    for (size_t i = 0; i < count_; ++i) {
      const bool same = std::memcmp(static_cast<const char*>(data()) + i * size,
                                    static_cast<const char*>(other.data()) + i * size, size) == 0;
      if (!same && !(std::isnan(Get(i)) && std::isnan(other.Get(i)))) return i;
    }
    return count_;
  }

 private:
  static constexpr char kGuard = 0x55;
  DType dtype_;
  size_t count_, offset_;
  std::vector<char> bytes_;
};

using Arrays = std::vector<Array>;

template <typename Pointer, typename List>
std::vector<Pointer> Pointers(List& arrays) {
  std::vector<Pointer> pointers;
  for (auto& array : arrays) pointers.push_back(array.data());
  return pointers;
}

bool Run(const CpuReduceSpec& spec, const Arrays& in, Arrays& out, size_t count) {
  const absl::StatusOr<CpuReduce> reduce = CpuReduce::Create(spec);
  REQUIRE(reduce.ok());
  return (*reduce)(Pointers<const void*>(in).data(), static_cast<int>(in.size()), Pointers<void*>(out).data(),
                   static_cast<int>(out.size()), count);
}

// Any bits: for floats infinities, NaNs and subnormals are among them, but most are of ordinary size.
Arrays RandomArrays(DType dtype, size_t ranks, size_t count, uint64_t seed, size_t offset = 0) {
  std::mt19937_64 random(seed);
  Arrays arrays;
  for (size_t r = 0; r < ranks; ++r) {
    Array array(dtype, count, offset);
    for (size_t i = 0; i < count; ++i) {
      const uint64_t bits = random();
      if (IsFloatingPoint(dtype) && bits % 16 != 0) {
        array.Set(i, std::ldexp(static_cast<double>(random() >> 11) - 0x1p52, static_cast<int>(bits >> 61) - 52));
      } else {
        std::memcpy(static_cast<char*>(array.data()) + i * SizeOf(dtype), &bits, SizeOf(dtype));
      }
    }
    arrays.push_back(std::move(array));
  }
  return arrays;
}

// Whole numbers of at most 2^53, so that GetElement is exact.
Arrays WholeArrays(DType dtype, ReduceOp op, size_t ranks, size_t count) {
  Arrays arrays;
  for (size_t r = 0; r < ranks; ++r) {
    arrays.emplace_back(dtype, count);
    for (size_t i = 0; i < count; ++i) {
      arrays.back().Set(i, testing::WholeNumber(dtype, op, static_cast<int>(r), i));
    }
  }
  return arrays;
}

Array Expected(const CpuReduceSpec& spec, const Arrays& in, size_t count) {
  Array expected(spec.out, count);
  std::vector<double> by_rank(in.size());
  for (size_t i = 0; i < count; ++i) {
    for (size_t r = 0; r < in.size(); ++r) by_rank[r] = in[r].Get(i);
    expected.Set(i, testing::Reduce(spec.in, spec.op, by_rank, spec.prescale, spec.postscale));
  }
  return expected;
}

void CheckAgainstReference(const CpuReduceSpec& spec, const Arrays& in, size_t count) {
  const Array expected = Expected(spec, in, count);
  ForEachTarget([&] {
    CHECK(std::string(CpuReduceTarget()) == hwy::TargetName(hwy::SupportedAndGeneratedTargets().front()));
    Arrays out(in.size(), Array(spec.out, count));
    Run(spec, in, out, count);
    for (const Array& array : out) {
      const size_t i = array.FirstDifference(expected);
      INFO(Name(spec.op) << " of " << Name(spec.in) << " into " << Name(spec.out) << ", ranks " << in.size()
                         << ", count " << count << ", at " << i);
      if (i < count) CHECK(array.Get(i) == expected.Get(i));
      REQUIRE(i == count);
      REQUIRE(array.GuardIntact());
    }
  });
}

std::vector<std::pair<DType, DType>> AllTypePairs() {
  std::vector<std::pair<DType, DType>> pairs;
  for (const DType dtype : kAllDTypes) pairs.emplace_back(dtype, dtype);
  constexpr DType kSmallFloats[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
  for (const DType in : kSmallFloats) {
    for (const DType out : kSmallFloats) {
      if (in != out) pairs.emplace_back(in, out);
    }
  }
  return pairs;
}

TEST_CASE("every type, op, number of ranks and count agrees with a scalar reference") {
  for (const auto& [in, out] : AllTypePairs()) {
    for (const ReduceOp op : kAllOps) {
      for (const size_t ranks : {1, 2, 3, 4, 5, 8}) {
        CpuReduceSpec spec{.in = in, .out = out, .op = op, .average_over = static_cast<int>(ranks)};
        for (const size_t count : {0, 1, 7, 64, 333}) {
          CheckAgainstReference(spec, WholeArrays(in, op, ranks, count), count);
          if (in != DType::kInt64) CheckAgainstReference(spec, RandomArrays(in, ranks, count, count), count);
        }
      }
    }
  }
}

TEST_CASE("large counts") {
  constexpr size_t kCount = (1 << 18) + 13;
  for (const DType dtype : kAllDTypes) {
    CheckAgainstReference({.in = dtype, .out = dtype}, WholeArrays(dtype, ReduceOp::kSum, 2, kCount), kCount);
  }
}

TEST_CASE("the same bits for every instruction set and every split of the range") {
  constexpr size_t kCount = 1500;
  std::mt19937 random(7);
  for (const auto& types : AllTypePairs()) {
    const DType in = types.first, out = types.second;
    for (const ReduceOp op : kAllOps) {
      CpuReduceSpec spec{.in = in, .out = out, .op = op, .average_over = 3};
      if (IsFloatingPoint(in)) spec.prescale = 0.7, spec.postscale = 1.3;
      const Arrays inputs = RandomArrays(in, 3, kCount, 11);
      Arrays whole(1, Array(out, kCount));
      Run(spec, inputs, whole, kCount);
      ForEachTarget([&] {
        const absl::StatusOr<CpuReduce> reduce = CpuReduce::Create(spec);
        REQUIRE(reduce.ok());
        Array parts(out, kCount);
        for (size_t first = 0; first < kCount;) {
          const size_t count = std::min<size_t>(kCount - first, random() % 150);
          std::vector<const void*> from;
          for (const Array& array : inputs) {
            from.push_back(static_cast<const char*>(array.data()) + first * SizeOf(in));
          }
          void* to = static_cast<char*>(parts.data()) + first * SizeOf(out);
          (*reduce)(from.data(), 3, &to, 1, count);
          first += count;
        }
        INFO(Name(op) << " of " << Name(in) << " into " << Name(out));
        REQUIRE(parts.FirstDifference(whole[0]) == kCount);
      });
    }
  }
}

TEST_CASE("in place, at addresses aligned to their element only") {
  constexpr size_t kCount = 301;
  for (const DType dtype : kAllDTypes) {
    if (dtype == DType::kInt64) continue;  // the reference computes in double
    for (const size_t ranks : {1, 2, 3, 4, 8}) {
      const CpuReduceSpec spec{.in = dtype, .out = dtype};
      const Arrays inputs = RandomArrays(dtype, ranks, kCount, 3, 1);
      const Array expected = Expected(spec, inputs, kCount);
      ForEachTarget([&] {
        Arrays arrays = inputs;
        const auto pointers = Pointers<void*>(arrays);
        const absl::StatusOr<CpuReduce> reduce = CpuReduce::Create(spec);
        (*reduce)(pointers.data(), static_cast<int>(ranks), pointers.data(), static_cast<int>(ranks), kCount);
        for (const Array& array : arrays) {
          INFO(Name(dtype) << ", ranks " << ranks);
          REQUIRE(array.FirstDifference(expected) == kCount);
          REQUIRE(array.GuardIntact());
        }
      });
    }
  }
}

TEST_CASE("every 16-bit pattern converts to float32 and back") {
  constexpr size_t kPatterns = 65536;
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    Array narrow(dtype, kPatterns);
    Array wide(DType::kFloat32, kPatterns);
    for (size_t i = 0; i < kPatterns; ++i) {
      const auto bits = static_cast<uint16_t>(i);
      std::memcpy(static_cast<char*>(narrow.data()) + 2 * i, &bits, 2);
      wide.Set(i, narrow.Get(i));
    }
    ForEachTarget([&] {
      INFO(Name(dtype));
      Arrays out(1, Array(DType::kFloat32, kPatterns));
      Run({.in = dtype, .out = DType::kFloat32}, {narrow}, out, kPatterns);
      CHECK(out[0].FirstDifference(wide) == kPatterns);
      Arrays back(1, Array(dtype, kPatterns));
      Run({.in = DType::kFloat32, .out = dtype}, {wide}, back, kPatterns);
      CHECK(back[0].FirstDifference(narrow) == kPatterns);
    });
  }
}

// Between two neighbours of a 16-bit type lies one float32 that is as far from either: it must go to the even one, and
// the float32 next to it on each side to the neighbour on that side. The value after the largest finite one is
// infinity.
TEST_CASE("rounding to 16 bits is to nearest, ties to even") {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    const uint16_t infinity = dtype == DType::kFloat16 ? 0x7c00 : 0x7f80;
    const size_t count = size_t{infinity} * 6;
    Array wide(DType::kFloat32, count);
    Array expected(dtype, count);
    const auto value = [&](uint32_t bits) {  // infinity's pattern read as one more power of two
      if (dtype == DType::kBFloat16)
        return static_cast<double>(bits) == infinity ? 0x1p128 : GetElement(dtype, &bits, 0);
      return bits == infinity ? 65536.0 : GetElement(dtype, &bits, 0);
    };
    size_t i = 0;
    for (uint32_t low = 0; low < infinity; ++low) {
      const auto middle = static_cast<float>((value(low) + value(low + 1)) / 2);
      const uint32_t even = low % 2 == 0 ? low : low + 1;
      const std::pair<float, uint32_t> cases[] = {
          {std::nextafter(middle, -kInf), low}, {middle, even}, {std::nextafter(middle, kInf), low + 1}};
      for (const auto& [from, to] : cases) {
        for (const bool negative : {false, true}) {
          const auto bits = static_cast<uint16_t>(to | (negative ? 0x8000 : 0));
          wide.Set(i, negative ? -from : from);
          std::memcpy(static_cast<char*>(expected.data()) + 2 * i, &bits, 2);
          ++i;
        }
      }
    }
    REQUIRE(i == count);
    ForEachTarget([&] {
      Arrays out(1, Array(dtype, count));
      Run({.in = DType::kFloat32, .out = dtype}, {wide}, out, count);
      const size_t at = out[0].FirstDifference(expected);
      INFO(Name(dtype) << " at " << at << ": " << wide.Get(at % count));
      CHECK(at == count);
    });
  }
}

TEST_CASE("16-bit types are summed and scaled in float32 and rounded once") {
  ForEachTarget([&] {
    Arrays in(2, Array(DType::kFloat16, 1));
    in[0].Set(0, 65504);
    in[1].Set(0, 65504);
    Arrays out(1, Array(DType::kFloat16, 1));
    Run({.in = DType::kFloat16, .out = DType::kFloat16, .op = ReduceOp::kAvg, .average_over = 2}, in, out, 1);
    CHECK(out[0].Get(0) == 65504);

    Arrays ones(4, Array(DType::kBFloat16, 1));
    ones[0].Set(0, 256);
    for (size_t r = 1; r < 4; ++r) ones[r].Set(0, 1);  // 256 + 1 is 256 in bfloat16
    Arrays sum(1, Array(DType::kBFloat16, 1));
    Run({.in = DType::kBFloat16, .out = DType::kBFloat16}, ones, sum, 1);
    CHECK(sum[0].Get(0) == 260);  // 259 rounds up; each addition rounded would have left 256
  });
}

TEST_CASE("scales") {
  constexpr size_t kCount = 150;
  for (const auto& [in, out] : AllTypePairs()) {
    if (!IsFloatingPoint(in)) continue;
    for (const ReduceOp op : kAllOps) {
      for (const size_t ranks : {2, 3, 8}) {
        for (const auto& [pre, post] : {std::pair{1 / 3.0, 1.0}, {1.0, 1 / 3.0}, {-0.3, 1.7}}) {
          const CpuReduceSpec spec{.in = in,
                                   .out = out,
                                   .op = op,
                                   .prescale = pre,
                                   .postscale = post,
                                   .average_over = static_cast<int>(ranks)};
          CheckAgainstReference(spec, RandomArrays(in, ranks, kCount, 5), kCount);
        }
      }
    }
  }
}

TEST_CASE("a NaN of any rank is the minimum and the maximum") {
  ForEachTarget([&] {
    for (const ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax}) {
      for (size_t position = 0; position < 3; ++position) {
        Arrays in(3, Array(DType::kFloat32, 70));
        for (size_t r = 0; r < 3; ++r) {
          for (size_t i = 0; i < 70; ++i) in[r].Set(i, r == position ? kNan : static_cast<double>(r));
        }
        Arrays out(1, Array(DType::kFloat32, 70));
        Run({.op = op}, in, out, 70);
        for (size_t i = 0; i < 70; ++i) REQUIRE(std::isnan(out[0].Get(i)));
      }
    }
  });
}

TEST_CASE("one non-finite result anywhere is found") {
  constexpr size_t kCount = 150;
  ForEachTarget([&] {
    for (const DType dtype : {DType::kFloat64, DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
      for (const size_t ranks : {2, 5}) {
        Arrays in = WholeArrays(dtype, ReduceOp::kSum, ranks, kCount);
        Arrays out(ranks, Array(dtype, kCount));
        CpuReduceSpec spec{.in = dtype, .out = dtype, .check_nonfinite = true};
        INFO(Name(dtype) << ", ranks " << ranks);
        REQUIRE_FALSE(Run(spec, in, out, kCount));
        for (size_t i = 0; i < kCount; ++i) {
          const double good = in[1].Get(i);
          in[1].Set(i, i % 3 == 0 ? kNan : i % 3 == 1 ? kInf : -kInf);
          REQUIRE(Run(spec, in, out, kCount));
          in[1].Set(i, good);
        }
        in[0].Set(3, kInf);
        spec.check_nonfinite = false;
        REQUIRE_FALSE(Run(spec, in, out, kCount));
      }
    }
  });
}

// Two summands of the input type `in` that are finite, as is their sum in float32.
struct Summands {
  DType in, out;
  double a, b;
  bool overflows;  // the sum, as it is rounded to `out`
};

// Half a unit in the last place above the largest finite number is the least that becomes infinite.
TEST_CASE("the non-finite check looks at what is stored") {
  constexpr double kHalfMax = 65504, kBrainMax = 0x1.fep127, kBrainHalfUlp = 0x1p119;
  const Summands cases[] = {
      {DType::kFloat16, DType::kFloat16, 40000, 40000, true},
      {DType::kFloat16, DType::kFloat16, 32768, 32736, false},
      {DType::kFloat16, DType::kFloat16, kHalfMax, 16, true},
      {DType::kFloat16, DType::kFloat16, kHalfMax, 15.9921875, false},
      {DType::kFloat16, DType::kFloat32, 40000, 40000, false},
      {DType::kFloat16, DType::kBFloat16, kHalfMax, kHalfMax, false},
      {DType::kFloat32, DType::kFloat16, kHalfMax, 16, true},
      {DType::kFloat32, DType::kFloat16, kHalfMax, 15.99609375, false},
      {DType::kFloat32, DType::kBFloat16, kBrainMax, kBrainHalfUlp, true},
      {DType::kFloat32, DType::kBFloat16, kBrainMax, kBrainHalfUlp / 2, false},
      {DType::kBFloat16, DType::kBFloat16, kBrainMax, kBrainHalfUlp, true},
      {DType::kBFloat16, DType::kBFloat16, kBrainMax, kBrainHalfUlp / 2, false},
      {DType::kBFloat16, DType::kFloat16, 65536, -1, true},
      {DType::kBFloat16, DType::kFloat16, 65536, -256, false},
      {DType::kBFloat16, DType::kFloat32, kBrainMax, kBrainHalfUlp, false},
  };
  constexpr size_t kCount = 150;
  ForEachTarget([&] {
    for (const Summands& c : cases) {
      for (const size_t ranks : {2, 5}) {
        Arrays in(ranks, Array(c.in, kCount));
        for (Array& array : in) {
          for (size_t i = 0; i < kCount; ++i) array.Set(i, 0);
        }
        Arrays out(ranks, Array(c.out, kCount));
        const CpuReduceSpec spec{.in = c.in, .out = c.out, .check_nonfinite = true};
        for (size_t i = 0; i < kCount; ++i) {
          const double sign = i % 2 == 0 ? 1 : -1;
          in[0].Set(i, sign * c.a);
          in[1].Set(i, sign * c.b);
          INFO(Name(c.in) << " into " << Name(c.out) << ": " << c.a << " + " << c.b << " at " << i);
          REQUIRE(Run(spec, in, out, kCount) == c.overflows);
          REQUIRE(std::isinf(out[ranks - 1].Get(i)) == c.overflows);
          in[0].Set(i, 0);
          in[1].Set(i, 0);
        }
      }
    }

    Arrays large(2, Array(DType::kFloat32, 1));
    large[0].Set(0, 3e38);
    large[1].Set(0, 3e38);
    Arrays sum(1, Array(DType::kFloat32, 1));
    CHECK(Run({.check_nonfinite = true}, large, sum, 1));
    CHECK_FALSE(Run({.prescale = 0.5, .check_nonfinite = true}, large, sum, 1));
    CHECK(Run({.op = ReduceOp::kMax, .postscale = 4, .check_nonfinite = true}, large, sum, 1));
  });
}

template <typename T>
std::vector<T> ReduceIntegers(DType dtype, ReduceOp op, const std::vector<T>& a, const std::vector<T>& b,
                              int average_over = 2) {
  const absl::StatusOr<CpuReduce> reduce =
      CpuReduce::Create({.in = dtype, .out = dtype, .op = op, .average_over = average_over});
  REQUIRE(reduce.ok());
  std::vector<T> result(a.size());
  const void* in[] = {a.data(), b.data()};
  void* out[] = {result.data()};
  CHECK_FALSE((*reduce)(in, 2, out, 1, a.size()));
  return result;
}

TEST_CASE("integer sums and products wrap around; averages are truncated toward zero") {
  constexpr int64_t kMin64 = std::numeric_limits<int64_t>::min(), kMax64 = std::numeric_limits<int64_t>::max();
  constexpr int32_t kMin32 = std::numeric_limits<int32_t>::min(), kMax32 = std::numeric_limits<int32_t>::max();
  using Int64s = std::vector<int64_t>;
  using Int32s = std::vector<int32_t>;
  using Int8s = std::vector<int8_t>;
  using UInt8s = std::vector<uint8_t>;
  ForEachTarget([&] {
    CHECK(ReduceIntegers<int64_t>(DType::kInt64, ReduceOp::kSum, {kMax64, kMin64, (1LL << 53) + 1}, {1, -1, 0}) ==
          Int64s{kMin64, kMax64, (1LL << 53) + 1});
    CHECK(ReduceIntegers<int64_t>(DType::kInt64, ReduceOp::kProduct, {kMax64, 1LL << 32, 3}, {2, 1LL << 32, -4}) ==
          Int64s{-2, 0, -12});
    CHECK(ReduceIntegers<int64_t>(DType::kInt64, ReduceOp::kMax, {kMin64, 5}, {kMax64, -5}) == Int64s{kMax64, 5});
    CHECK(ReduceIntegers<int64_t>(DType::kInt64, ReduceOp::kMin, {kMin64, 5}, {kMax64, -5}) == Int64s{kMin64, -5});
    CHECK(ReduceIntegers<int32_t>(DType::kInt32, ReduceOp::kSum, {kMax32, kMin32}, {1, -1}) == Int32s{kMin32, kMax32});
    CHECK(ReduceIntegers<int32_t>(DType::kInt32, ReduceOp::kProduct, {kMax32, 1 << 16}, {kMax32, 1 << 16}) ==
          Int32s{1, 0});
    CHECK(ReduceIntegers<int8_t>(DType::kInt8, ReduceOp::kSum, {127, -128}, {1, -1}) == Int8s{-128, 127});
    CHECK(ReduceIntegers<int8_t>(DType::kInt8, ReduceOp::kProduct, {127, -128}, {3, -1}) == Int8s{125, -128});
    CHECK(ReduceIntegers<uint8_t>(DType::kUInt8, ReduceOp::kSum, {255, 200}, {1, 100}) == UInt8s{0, 44});
    CHECK(ReduceIntegers<uint8_t>(DType::kUInt8, ReduceOp::kMax, {255, 1}, {1, 2}) == UInt8s{255, 2});

    CHECK(ReduceIntegers<int64_t>(DType::kInt64, ReduceOp::kAvg, {-7, 7, kMin64}, {0, 0, 0}) ==
          Int64s{-3, 3, kMin64 / 2});
    CHECK(ReduceIntegers<int32_t>(DType::kInt32, ReduceOp::kAvg, {-1, 1, -3}, {0, 0, 0}) == Int32s{0, 0, -1});
    CHECK(ReduceIntegers<int8_t>(DType::kInt8, ReduceOp::kAvg, {-100, 101}, {-27, 0}, 200) == Int8s{0, 0});
    CHECK(ReduceIntegers<uint8_t>(DType::kUInt8, ReduceOp::kAvg, {250, 9}, {1, 0}) == UInt8s{125, 4});
  });
}

void CheckRefused(const CpuReduceSpec& spec, const std::vector<std::string>& words) {
  const absl::StatusOr<CpuReduce> reduce = CpuReduce::Create(spec);
  REQUIRE(reduce.status().code() == absl::StatusCode::kInvalidArgument);
  for (const std::string& word : words) {
    INFO(reduce.status().ToString());
    CHECK(absl::StrContains(reduce.status().message(), word));
  }
}

TEST_CASE("what cannot be reduced is refused") {
  for (const DType in : kAllDTypes) {
    for (const DType out : kAllDTypes) {
      const auto converts = [](DType d) { return IsFloatingPoint(d) && d != DType::kFloat64; };
      if (in == out || (converts(in) && converts(out))) {
        CHECK(CpuReduce::Create({.in = in, .out = out}).ok());
      } else {
        CheckRefused({.in = in, .out = out}, {absl::StrCat(Name(in), " into ", Name(out)), "same type"});
      }
    }
  }
  CheckRefused({.in = DType::kInt32, .out = DType::kInt32, .prescale = 2}, {"int32", "prescale"});
  CheckRefused({.in = DType::kInt8, .out = DType::kInt8, .postscale = 2}, {"int8", "postscale"});
  CheckRefused({.in = DType::kUInt8, .out = DType::kUInt8, .check_nonfinite = true}, {"uint8", "nonfinite"});
  CheckRefused({.op = ReduceOp::kAvg, .average_over = 0}, {"average_over is 0", "number of ranks"});
}

}  // namespace
}  // namespace ddp
