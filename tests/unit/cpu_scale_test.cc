// Scaling and the search for what is not finite, against scalars, for every instruction set that this processor has.
#include "libddp/device/cpu_scale.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "hwy/targets.h"
#include "tests/support/catch.h"
#include "tests/support/numbers.h"

namespace ddp {
namespace {

using testing::GetElement;
using testing::SetElement;

constexpr DType kTypes[] = {DType::kFloat64, DType::kFloat32, DType::kFloat16, DType::kBFloat16};

template <typename Body>
void ForEachTarget(const Body& body) {
  struct Restore {
    ~Restore() { Choose(0); }
    static void Choose(int64_t targets) {
      hwy::SetSupportedTargetsForTest(targets);
      hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    }
  } restore;
  for (const int64_t target : hwy::SupportedAndGeneratedTargets()) {
    Restore::Choose(target);
    INFO("target " << hwy::TargetName(target));
    body();
  }
}

// Elements with fractions that rounding has to do something about; nothing that is not finite.
std::vector<char> Numbers(DType dtype, size_t count, size_t offset) {
  std::vector<char> bytes((count + offset) * SizeOf(dtype) + 64, 0x55);
  for (size_t i = 0; i < count; ++i) {
    SetElement(dtype, bytes.data() + offset * SizeOf(dtype), i, std::sin(static_cast<double>(i + 1)) * 1000);
  }
  return bytes;
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
          for (size_t i = 0; i < count; ++i) {
            const double x = GetElement(dtype, want, i);
            const double product =
                dtype == DType::kFloat64 ? x * factor : static_cast<double>(static_cast<float>(x) * factor);
            SetElement(dtype, want, i, product);
          }
          REQUIRE_FALSE(CpuHasNonfinite(dtype, data, count));
          REQUIRE_FALSE(CpuScale(dtype, data, count, factor));
          REQUIRE(bytes == expected);
        }
      }
    }
  });
}

TEST_CASE("what is not finite is found wherever it is, before it is multiplied") {
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
      // An overflow that the factor makes is not one of the gradient's.
      std::vector<char> bytes(8);
      SetElement(dtype, bytes.data(), 0, dtype == DType::kFloat16 ? 60000 : 3e38);
      if (dtype != DType::kFloat64) {
        CHECK_FALSE(CpuScale(dtype, bytes.data(), 1, 4));
        CHECK(std::isinf(GetElement(dtype, bytes.data(), 0)));
      }
    }
  });
}

TEST_CASE("the largest and the smallest numbers are finite") {
  ForEachTarget([] {
    for (const DType dtype : kTypes) {
      std::vector<char> bytes(64 * 8);
      const double largest[] = {std::numeric_limits<double>::max(), std::numeric_limits<float>::max(), 65504,
                                3.3895313892515355e38};
      for (size_t i = 0; i < 64; ++i) {
        const double big = largest[static_cast<size_t>(dtype)];
        SetElement(dtype, bytes.data(), i, i % 3 == 0 ? big : i % 3 == 1 ? -big : 0);
      }
      CHECK_FALSE(CpuHasNonfinite(dtype, bytes.data(), 64));
    }
  });
}

}  // namespace ddp
