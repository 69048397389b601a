// SPDX-License-Identifier: Apache-2.0
// Block-scaled 8-bit numbers: the rule against numbers counted out, and the CPU's kernels against the rule, for every
// instruction set that this processor has.
#include "libddp/device/cpu_blocks.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "ddp/types.h"
#include "tests/support/catch.h"
#include "tests/support/numbers.h"
#include "tests/support/targets.h"

namespace ddp {
namespace {

using blocks::Format;
using blocks::Pass;
using testing::ForEachTarget;
using testing::GetElement;
using testing::SetElement;

constexpr Format kFormats[] = {Format::kInt8, Format::kFloat8E4M3};
constexpr DType kTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// All finite numbers of e4m3, from 0 up, as its definition has them.
std::vector<double> Float8Numbers() {
  std::vector<double> numbers;
  for (int code = 0; code < 0x7f; ++code) {
    const int exponent = code >> 3, fraction = code & 7;
    numbers.push_back(exponent == 0 ? std::ldexp(fraction, -9) : std::ldexp(8 + fraction, exponent - 10));
  }
  return numbers;
}

TEST_CASE("8-bit values are what their formats say") {
  const std::vector<double> numbers = Float8Numbers();
  CHECK(numbers.back() == 448);
  for (int code = 0; code < 0x7f; ++code) {
    const auto value = static_cast<uint8_t>(code);
    const double number = numbers[static_cast<size_t>(code)];
    CHECK(blocks::Decode(Format::kFloat8E4M3, value) == number);
    CHECK(blocks::Decode(Format::kFloat8E4M3, value | 0x80) == -number);
    CHECK(blocks::Encode(Format::kFloat8E4M3, static_cast<float>(number)) == value);
    CHECK(blocks::Encode(Format::kFloat8E4M3, static_cast<float>(-number)) == (value | 0x80));
    if (code == 0x7e) continue;
    // Halfway to the next it is the even one; a little off, the nearer one.
    const auto half = static_cast<float>((number + numbers[static_cast<size_t>(code + 1)]) / 2);
    CHECK(blocks::Encode(Format::kFloat8E4M3, half) == code + (code & 1));
    CHECK(blocks::Encode(Format::kFloat8E4M3, std::nextafter(half, 0.0f)) == code);
    CHECK(blocks::Encode(Format::kFloat8E4M3, std::nextafter(half, 1e9f)) == code + 1);
  }
  for (int q = -127; q <= 127; ++q) {
    const auto value = static_cast<uint8_t>(static_cast<int8_t>(q));
    CHECK(blocks::Decode(Format::kInt8, value) == static_cast<float>(q));
    for (const float off : {-0.49f, 0.0f, 0.49f}) {
      CHECK(blocks::Encode(Format::kInt8, static_cast<float>(q) + off) == value);
    }
  }
  CHECK(blocks::Encode(Format::kInt8, 2.5f) == 2);
  CHECK(blocks::Encode(Format::kInt8, 3.5f) == 4);
}

// What the kernels have to do, by block_rule.h.
class Reference {
 public:
  explicit Reference(Format format) : format_(format) {}

  std::vector<char> Quantize(const std::vector<float>& x) const {
    std::vector<char> groups(blocks::GroupsOf(x.size()) * blocks::kGroupBytes);
    for (size_t b = 0; b < groups.size() / blocks::kGroupBytes * blocks::kGroupBlocks; ++b) {
      uint32_t largest = 0;
      const auto at = [&](size_t i) { return b * blocks::kBlock + i < x.size() ? x[b * blocks::kBlock + i] : 0.0f; };
      for (size_t i = 0; i < blocks::kBlock; ++i) {
        largest = std::max(largest, blocks::BitsOf(at(i)) & blocks::kMagnitude);
      }
      const float scale = blocks::ScaleOf(format_, largest), inverse = blocks::InverseOf(format_, largest);
      std::memcpy(&groups[ScaleAt(b)], &scale, sizeof scale);
      for (size_t i = 0; i < blocks::kBlock; ++i) {
        groups[ValueAt(b, i)] = static_cast<char>(inverse == 0 ? 0 : blocks::Encode(format_, at(i) * inverse));
      }
    }
    return groups;
  }
  std::vector<float> Dequantize(const char* groups, size_t count) const {
    std::vector<float> x(count);
    for (size_t i = 0; i < count; ++i) {
      const size_t b = i / blocks::kBlock;
      float scale = 0;
      std::memcpy(&scale, groups + ScaleAt(b), sizeof scale);
      x[i] = blocks::Decode(format_, static_cast<uint8_t>(groups[ValueAt(b, i % blocks::kBlock)])) * scale;
    }
    return x;
  }

 private:
  static size_t ScaleAt(size_t b) { return b / 4 * 528 + 512 + b % 4 * 4; }
  static size_t ValueAt(size_t b, size_t i) { return b / 4 * 528 + b % 4 * 128 + i; }
  const Format format_;
};

// Blocks of very different sizes, one of zeros, one of numbers next to nothing.
std::vector<float> Numbers(int rank, size_t count) {
  std::vector<float> x(count);
  for (size_t i = 0; i < count; ++i) {
    const size_t b = i / blocks::kBlock;
    const auto size = static_cast<int>(b * 7 % 40) - 20;
    x[i] = b == 2 ? 0.0f : std::ldexp(static_cast<float>(testing::Awkward(rank, i)), b == 3 ? -120 : size);
  }
  return x;
}

std::vector<char> Run(Pass pass, size_t bytes) {
  std::vector<char> out(bytes + 64, 0x55);
  pass.out = out.data();
  CpuRunBlocks(pass);
  CHECK(std::all_of(out.end() - 64, out.end(), [](char c) { return c == 0x55; }));
  out.resize(bytes);
  return out;
}

TEST_CASE("kernels of 8-bit blocks have the rule's bits, with every vector width and type") {
  ForEachTarget([] {
    for (const Format format : kFormats) {
      const Reference reference(format);
      for (const DType dtype : kTypes) {
        for (const size_t count : {1, 7, 127, 128, 129, 511, 512, 513, 1500, 5000}) {
          INFO("format " << static_cast<int>(format) << ", dtype " << static_cast<int>(dtype) << ", " << count);
          std::vector<char> array(count * SizeOf(dtype));
          std::vector<float> scaled = Numbers(0, count);
          for (size_t i = 0; i < count; ++i) {
            SetElement(dtype, array.data(), i, scaled[i]);
            scaled[i] = static_cast<float>(GetElement(dtype, array.data(), i)) * 0.3f;
          }
          const size_t bytes = blocks::GroupsOf(count) * blocks::kGroupBytes;
          Pass pass{.format = format, .dtype = static_cast<uint8_t>(dtype), .in = array.data(), .count = count};
          pass.scale = 0.3f;
          const std::vector<char> groups = Run(pass, bytes);
          CHECK(groups == reference.Quantize(scaled));
          pass.step = Pass::Step::kDequantize;
          pass.in = groups.data();
          const std::vector<char> back = Run(pass, array.size());
          const std::vector<float> expected = reference.Dequantize(groups.data(), count);
          std::vector<char> rounded(array.size());
          for (size_t i = 0; i < count; ++i) SetElement(dtype, rounded.data(), i, expected[i]);
          CHECK(back == rounded);
        }
      }
    }
  });
}

TEST_CASE("contributions in 8 bits are added in rank order, and the sum is quantized") {
  ForEachTarget([] {
    for (const Format format : kFormats) {
      const Reference reference(format);
      for (const int ranks : {1, 2, 3, 8}) {
        constexpr size_t kCount = 2048;
        constexpr size_t kBytes = kCount / blocks::kGroup * blocks::kGroupBytes;
        std::vector<char> all;
        std::vector<float> sum(kCount);
        for (int r = 0; r < ranks; ++r) {
          const std::vector<char> one = reference.Quantize(Numbers(r, kCount));
          const std::vector<float> x = reference.Dequantize(one.data(), kCount);
          for (size_t i = 0; i < kCount; ++i) sum[i] = r == 0 ? x[i] : sum[i] + x[i];
          all.insert(all.end(), one.begin(), one.end());
          all.resize(all.size() + 32);  // between the inputs
        }
        const auto scale = static_cast<float>(1.0 / ranks);
        for (float& x : sum) x *= scale;
        Pass pass{.step = Pass::Step::kReduce, .format = format, .in = all.data(), .count = kCount};
        pass.ins = ranks;
        pass.stride = kBytes + 32;
        pass.scale = scale;
        CHECK(Run(pass, kBytes) == reference.Quantize(sum));
      }
    }
  });
}

std::vector<float> ThereAndBack(Format format, const std::vector<float>& x) {
  Pass pass{.format = format, .in = x.data(), .count = x.size()};
  const std::vector<char> groups = Run(pass, blocks::GroupsOf(x.size()) * blocks::kGroupBytes);
  pass.step = Pass::Step::kDequantize;
  pass.in = groups.data();
  const std::vector<char> bytes = Run(pass, x.size() * sizeof(float));
  std::vector<float> back(x.size());
  std::memcpy(back.data(), bytes.data(), bytes.size());
  return back;
}

TEST_CASE("rounding to 8 bits is as exact as it says") {
  for (const Format format : kFormats) {
    for (const float size : {1e-25f, 1e-3f, 1.0f, 1e30f}) {
      std::vector<float> x = Numbers(1, blocks::kBlock);
      for (float& one : x) one *= size;
      float largest = 0;
      for (const float one : x) largest = std::max(largest, std::abs(one));
      const std::vector<float> back = ThereAndBack(format, x);
      for (size_t i = 0; i < x.size(); ++i) {
        const double most =
            format == Format::kInt8 ? largest / 254.0 : std::max(std::abs(x[i]) / 16.0, largest / 448.0 / 1024);
        CHECK(std::abs(static_cast<double>(back[i]) - x[i]) <= most * 1.00001);
      }
    }
  }
}

TEST_CASE("a block with what is not finite becomes NaN, and its neighbours stay; one of tiny numbers becomes zero") {
  ForEachTarget([] {
    for (const Format format : kFormats) {
      for (const float bad : {kInf, -kInf, kNan}) {
        std::vector<float> x(700, 2.0f);
        x[300] = bad;
        const std::vector<float> back = ThereAndBack(format, x);
        for (size_t i = 0; i < x.size(); ++i) {
          if (i / blocks::kBlock == 2) {
            CHECK(std::isnan(back[i]));
          } else {
            CHECK(back[i] == 2);
          }
        }
      }
      const std::vector<float> tiny(200, 0x1p-101f), least(200, 0x1p-100f), denormal(200, 1e-44f);
      CHECK(ThereAndBack(format, tiny) == std::vector<float>(200));
      CHECK(ThereAndBack(format, denormal) == std::vector<float>(200));
      CHECK(std::abs(ThereAndBack(format, least)[199] / 0x1p-100f - 1) < 1e-6f);
      const std::vector<float> huge(200, 3e38f);
      CHECK(std::abs(ThereAndBack(format, huge)[0] / 3e38f - 1) < 1e-6f);
    }
  });
}

}  // namespace
}  // namespace ddp
