// SPDX-License-Identifier: Apache-2.0
// Scaling and the search for what is not finite, against scalars, for every instruction set that this processor has.
#include "libddp/device/cpu_scale.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "tests/support/catch.h"
#include "tests/support/numbers.h"
#include "tests/support/targets.h"

namespace ddp {
namespace {

using testing::ForEachTarget;
using testing::GetElement;
using testing::SetElement;

constexpr DType kTypes[] = {DType::kFloat64, DType::kFloat32, DType::kFloat16, DType::kBFloat16};

// Elements with fractions that rounding has to do something about; nothing that is not finite.
std::vector<char> Numbers(DType dtype, size_t count, size_t offset) {
  std::vector<char> bytes((count + offset) * SizeOf(dtype) + 64, 0x55);
  for (size_t i = 0; i < count; ++i) {
    SetElement(dtype, bytes.data() + offset * SizeOf(dtype), i, std::sin(static_cast<double>(i + 1)) * 1000);
  }
  return bytes;
}

double Largest(DType dtype) {
  constexpr double kLargest[] = {std::numeric_limits<double>::max(), std::numeric_limits<float>::max(), 65504,
                                 0x1.fep127};
  return kLargest[static_cast<size_t>(dtype)];
}

}  // namespace

TEST_CASE("each element is multiplied and rounded once, nothing beside them is touched") {
  ForEachTarget([] {
    for (const DType dtype : kTypes) {
      for (const size_t count : {0u, 1u, 7u, 16u, 63u, 64u, 65u, 1000u}) {
        for (const float factor : {1.0f, 1.0f / 3, 65536.0f, 1e-8f}) {
          std::vector<char> bytes = Numbers(dtype, count, 1), expected = bytes;
          char* data = bytes.data() + SizeOf(dtype);
          char* want = expected.data() + SizeOf(dtype);
          bool overflows = false;
          for (size_t i = 0; i < count; ++i) {
            const double x = GetElement(dtype, want, i);
            const double product =
                dtype == DType::kFloat64 ? x * factor : static_cast<double>(static_cast<float>(x) * factor);
            SetElement(dtype, want, i, product);
            overflows |= std::isinf(GetElement(dtype, want, i));
          }
          REQUIRE_FALSE(CpuHasNonfinite(dtype, data, count));
          REQUIRE(CpuScale(dtype, data, count, factor) == overflows);
          REQUIRE(bytes == expected);
        }
      }
    }
  });
}

TEST_CASE("what is not finite is found wherever it is, and whatever it is multiplied by") {
  ForEachTarget([] {
    for (const DType dtype : kTypes) {
      for (const size_t count : {1u, 5u, 64u, 131u}) {
        for (size_t at = 0; at < count; ++at) {
          for (const double bad : {std::numeric_limits<double>::infinity(), -std::numeric_limits<double>::infinity(),
                                   std::numeric_limits<double>::quiet_NaN()}) {
            std::vector<char> bytes = Numbers(dtype, count, 0);
            SetElement(dtype, bytes.data(), at, bad);
            const std::vector<char> before = bytes;
            REQUIRE(CpuHasNonfinite(dtype, bytes.data(), count));
            REQUIRE(bytes == before);
            REQUIRE(CpuScale(dtype, bytes.data(), count, 0.0f));
            REQUIRE(CpuHasNonfinite(dtype, bytes.data(), count));  // infinity times 0 is not finite either
          }
        }
      }
    }
  });
}

TEST_CASE("an overflow is found as the product is stored") {
  ForEachTarget([] {
    for (const DType dtype : kTypes) {
      const double largest = Largest(dtype);
      const float little = std::nextafter(1.0f, 2.0f);  // 16-bit floats are rounded back to the largest
      for (const size_t count : {1u, 5u, 64u, 131u}) {
        for (size_t at = 0; at < count; ++at) {
          for (const float factor : {2.0f, little, 1.0f, -2.0f}) {
            std::vector<char> bytes = Numbers(dtype, count, 0);
            SetElement(dtype, bytes.data(), at, at % 2 == 0 ? largest : -largest);
            const bool overflows = std::abs(factor) == 2 || (factor == little && SizeOf(dtype) > 2);
            REQUIRE(CpuScale(dtype, bytes.data(), count, factor) == overflows);
            REQUIRE(std::isinf(GetElement(dtype, bytes.data(), at)) == overflows);
          }
        }
      }
    }
  });
}

TEST_CASE("the largest and the smallest numbers are finite") {
  ForEachTarget([] {
    for (const DType dtype : kTypes) {
      std::vector<char> bytes(64 * 8);
      for (size_t i = 0; i < 64; ++i) {
        const double big = Largest(dtype);
        SetElement(dtype, bytes.data(), i, i % 3 == 0 ? big : i % 3 == 1 ? -big : 0);
      }
      CHECK_FALSE(CpuHasNonfinite(dtype, bytes.data(), 64));
    }
  });
}

}  // namespace ddp
