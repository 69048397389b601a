// SPDX-License-Identifier: Apache-2.0
#include "libddp/device/buffer_ops.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <vector>

#include "hwy/targets.h"
#include "tests/support/catch.h"
#include "tests/support/numbers.h"

namespace ddp::testing {
namespace {

constexpr DType kFloats[] = {DType::kFloat64, DType::kFloat32, DType::kFloat16, DType::kBFloat16};

struct Array {
  Array(DType type, size_t n) : bytes(n * SizeOf(type) + 8), dtype(type), count(n) {}
  Buffer View(size_t first, size_t n) { return {bytes.data() + first * SizeOf(dtype), n, dtype, {}}; }
  Buffer whole() { return View(0, count); }
  void Set(size_t i, double x) { SetElement(dtype, bytes.data(), i, x); }
  double Get(size_t i) const { return GetElement(dtype, bytes.data(), i); }

  std::vector<char> bytes;
  DType dtype;
  size_t count;
};

TEST_CASE("copies convert, scale, and go over ranges that are cut differently") {
  for (const DType in : kFloats) {
    for (const DType out : kFloats) {
      Array from(in, 100), to(out, 100);
      for (size_t i = 0; i < 100; ++i) from.Set(i, static_cast<double>(i) - 50);
      const std::vector<Buffer> source = {from.View(0, 3), from.View(3, 0), from.View(3, 60), from.View(63, 37)};
      const std::vector<Buffer> target = {to.View(0, 41), to.View(41, 59)};
      const absl::Status status = CopyScaled(source, target, 0.5, {});
      if ((in == DType::kFloat64) != (out == DType::kFloat64)) {
        CHECK(status.code() == absl::StatusCode::kInvalidArgument);
        continue;
      }
      REQUIRE(status.ok());
      for (size_t i = 0; i < 100; ++i) REQUIRE(to.Get(i) == (static_cast<double>(i) - 50) / 2);
      REQUIRE(CopyScaled(target, target, 4, {}).ok());
      for (size_t i = 0; i < 100; ++i) REQUIRE(to.Get(i) == (static_cast<double>(i) - 50) * 2);
    }
  }
  Array from(DType::kInt64, 3), to(DType::kInt64, 3);
  from.Set(2, 77);
  const Buffer a = from.whole(), b = to.whole();
  REQUIRE(CopyScaled({&a, 1}, {&b, 1}, 1, {}).ok());
  CHECK(to.Get(2) == 77);
  REQUIRE(Zero({&b, 1}, {}).ok());
  CHECK(to.Get(2) == 0);
}

TEST_CASE("what is not finite is found at any place") {
  for (const DType dtype : kFloats) {
    for (const size_t at : {0, 1, 16, 63, 99}) {
      for (const double bad : {HUGE_VAL, -HUGE_VAL, static_cast<double>(NAN)}) {
        Array array(dtype, 100);
        for (size_t i = 0; i < 100; ++i) array.Set(i, 1000);
        const Buffer whole = array.whole();
        uint32_t nonfinite = 0;
        REQUIRE(CheckFinite({&whole, 1}, &nonfinite, {}).ok());
        REQUIRE(nonfinite == 0);
        array.Set(at, bad);
        REQUIRE(CheckFinite({&whole, 1}, &nonfinite, {}).ok());
        REQUIRE(nonfinite == 1);
        REQUIRE(array.Get(98) == (at == 98 ? bad : 1000));
      }
    }
  }
}

TEST_CASE("norms are exact where numbers are, for every count and type") {
  for (const DType dtype : kFloats) {
    for (const size_t n : {0, 1, 2, 15, 16, 17, 100, 1000}) {
      Array array(dtype, n);
      double sum = 0, squares = 0, most = 0;
      for (size_t i = 0; i < n; ++i) {
        const double x = static_cast<double>(i * 7 % 31) - 15;
        array.Set(i, x);
        sum += std::abs(x);
        squares += x * x;
        most = std::max(most, std::abs(x));
      }
      const std::vector<Buffer> ranges = {array.View(0, n / 3), array.View(n / 3, n - n / 3)};
      REQUIRE(Norm(ranges, NormKind::kL1) == sum);
      REQUIRE(Norm(ranges, NormKind::kL2) == std::sqrt(squares));
      REQUIRE(Norm(ranges, NormKind::kMax) == most);
    }
  }
}

TEST_CASE("norms do not overflow in float32, and tell NaN and infinity") {
  Array array(DType::kFloat32, 40);
  for (size_t i = 0; i < 40; ++i) array.Set(i, 1e30);
  const Buffer whole = array.whole();
  CHECK(Norm({&whole, 1}, NormKind::kL2) == Approx(1e30 * std::sqrt(40.0)));
  for (const size_t at : {0, 17, 39}) {
    array.Set(at, -HUGE_VAL);
    for (const NormKind kind : {NormKind::kL1, NormKind::kL2, NormKind::kMax}) {
      CHECK(std::isinf(Norm({&whole, 1}, kind)));
    }
    array.Set(at, NAN);
    for (const NormKind kind : {NormKind::kL1, NormKind::kL2, NormKind::kMax}) {
      CHECK(std::isnan(Norm({&whole, 1}, kind)));
    }
    array.Set(at, 1);
  }
}

TEST_CASE("norms have the same bits with every vector width") {
  const auto choose = [](int64_t targets) {
    hwy::SetSupportedTargetsForTest(targets);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  };
  for (const DType dtype : kFloats) {
    Array array(dtype, 1237);
    for (size_t i = 0; i < array.count; ++i) array.Set(i, Awkward(3, i));
    const Buffer whole = array.whole();
    for (const NormKind kind : {NormKind::kL1, NormKind::kL2}) {
      const uint64_t best = std::bit_cast<uint64_t>(Norm({&whole, 1}, kind));
      for (const int64_t target : hwy::SupportedAndGeneratedTargets()) {
        choose(target);
        CHECK(std::bit_cast<uint64_t>(Norm({&whole, 1}, kind)) == best);
      }
      choose(0);
    }
  }
}

}  // namespace
}  // namespace ddp::testing
