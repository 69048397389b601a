// SPDX-License-Identifier: Apache-2.0
#include "tests/support/numbers.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>

namespace ddp::testing {
namespace {

template <typename T>
T Load(const void* data, size_t i) {
  T value;
  std::memcpy(&value, static_cast<const char*>(data) + i * sizeof(T), sizeof(T));
  return value;
}

template <typename T>
void Save(void* data, size_t i, T value) {
  std::memcpy(static_cast<char*>(data) + i * sizeof(T), &value, sizeof(T));
}

// IEEE half has 10 bits of fraction and exponents from -14; below that, multiples of 2^-24. Rounding up in the fraction
// carries into the exponent by itself, and from the largest exponent into infinity.
uint16_t HalfBits(double value) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const double size = std::fabs(value);
  if (std::isnan(value)) return sign | 0x7e00;
  if (size >= 65520) return sign | 0x7c00;
  if (size < std::ldexp(1, -14))
    return static_cast<uint16_t>(sign | static_cast<int>(std::nearbyint(std::ldexp(size, 24))));
  int exponent = 0;
  const double fraction = std::frexp(size, &exponent);  // in [0.5, 1)
  const int rounded = static_cast<int>(std::nearbyint(fraction * 2048));
  return static_cast<uint16_t>(sign | (((exponent + 14) << 10) + rounded - 1024));
}

double HalfValue(uint16_t bits) {
  const double sign = (bits & 0x8000) != 0 ? -1 : 1;
  const int exponent = (bits >> 10) & 31;
  const int fraction = bits & 1023;
  if (exponent == 31) return fraction != 0 ? std::numeric_limits<double>::quiet_NaN() : sign * HUGE_VAL;
  return sign * (exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(fraction + 1024, exponent - 25));
}

// bfloat16 is the upper half of a float32. `value` is one of those.
uint16_t BFloat16Bits(double value) {
  if (std::isnan(value)) return 0x7fc0;
  const uint32_t bits = std::bit_cast<uint32_t>(static_cast<float>(value));
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

int64_t Truncated(DType dtype, int64_t value) {
  switch (dtype) {
    case DType::kInt32:
      return static_cast<int32_t>(value);
    case DType::kInt8:
      return static_cast<int8_t>(value);
    case DType::kUInt8:
      return static_cast<uint8_t>(value);
    default:
      return value;
  }
}

template <typename T>
T Combine(ReduceOp op, T a, T b) {
  if (op == ReduceOp::kMin || op == ReduceOp::kMax) {
    if (a != a || b != b) return a != a ? a : b;
    return op == ReduceOp::kMin ? std::min(a, b) : std::max(a, b);
  }
  return op == ReduceOp::kProduct ? a * b : a + b;
}

// How many ranks share memory here.
size_t NodeSize(size_t ranks) {
  const char* text = std::getenv("DDP_NODE_SIZE");
  return text == nullptr ? ranks : static_cast<size_t>(std::atoi(text));
}

template <typename T>
T ReduceFloats(ReduceOp op, absl::Span<const double> by_rank, double prescale, double postscale) {
  if (op == ReduceOp::kAvg) postscale /= static_cast<double>(by_rank.size());
  const auto value = [&](size_t r) { return static_cast<T>(static_cast<T>(by_rank[r]) * static_cast<T>(prescale)); };
  const size_t node = NodeSize(by_rank.size());
  T sum = 0;
  for (size_t first = 0; first < by_rank.size(); first += node) {
    T of_node = value(first);
    for (size_t r = first + 1; r < std::min(first + node, by_rank.size()); ++r)
      of_node = Combine(op, of_node, value(r));
    sum = first == 0 ? of_node : Combine(op, sum, of_node);
  }
  return sum * static_cast<T>(postscale);
}

}  // namespace

double GetElement(DType dtype, const void* data, size_t i) {
  switch (dtype) {
    case DType::kFloat64:
      return Load<double>(data, i);
    case DType::kFloat32:
      return Load<float>(data, i);
    case DType::kFloat16:
      return HalfValue(Load<uint16_t>(data, i));
    case DType::kBFloat16:
      return std::bit_cast<float>(uint32_t{Load<uint16_t>(data, i)} << 16);
    case DType::kInt64:
      return static_cast<double>(Load<int64_t>(data, i));
    case DType::kInt32:
      return Load<int32_t>(data, i);
    case DType::kInt8:
      return Load<int8_t>(data, i);
    case DType::kUInt8:
      return Load<uint8_t>(data, i);
  }
  return 0;
}

void SetElement(DType dtype, void* data, size_t i, double value) {
  switch (dtype) {
    case DType::kFloat64:
      return Save<double>(data, i, value);
    case DType::kFloat32:
      return Save<float>(data, i, static_cast<float>(value));
    case DType::kFloat16:
      return Save<uint16_t>(data, i, HalfBits(value));
    case DType::kBFloat16:
      return Save<uint16_t>(data, i, BFloat16Bits(value));
    case DType::kInt64:
      return Save<int64_t>(data, i, static_cast<int64_t>(value));
    case DType::kInt32:
      return Save<int32_t>(data, i, static_cast<int32_t>(value));
    case DType::kInt8:
      return Save<int8_t>(data, i, static_cast<int8_t>(value));
    case DType::kUInt8:
      return Save<uint8_t>(data, i, static_cast<uint8_t>(value));
  }
}

double WholeNumber(DType dtype, ReduceOp op, int rank, size_t i) {
  const size_t mixed = i * 7 + static_cast<size_t>(rank) * 13 + i / 5;
  const bool negative_too = dtype != DType::kUInt8;
  switch (op) {
    case ReduceOp::kAvg:
      return 12 * (static_cast<double>(mixed % 5) - (negative_too ? 2 : 0));
    case ReduceOp::kProduct:
      return negative_too ? std::array{1, 2, 3, -1, -2}[mixed % 5] : 1 + static_cast<int>(mixed % 3);
    default:
      return static_cast<double>(mixed % 31) - (negative_too ? 15 : 0);
  }
}

double Awkward(int rank, size_t i) {
  // Large values that nearly cancel, with small ones between them.
  uint64_t bits = (i + 1) * 0x9e3779b97f4a7c15u + static_cast<uint64_t>(rank) * 0xd1b54a32d192ed03u;
  bits ^= bits >> 29;
  bits *= 0xbf58476d1ce4e5b9u;
  const double unit = static_cast<double>(bits >> 11) * 0x1p-53 - 0.5;
  return static_cast<float>(std::ldexp(unit, static_cast<int>(bits & 15)));
}

double Reduce(DType dtype, ReduceOp op, absl::Span<const double> by_rank, double prescale, double postscale) {
  if (dtype == DType::kFloat64) return ReduceFloats<double>(op, by_rank, prescale, postscale);
  if (IsFloatingPoint(dtype)) return ReduceFloats<float>(op, by_rank, prescale, postscale);
  int64_t result = static_cast<int64_t>(by_rank[0]);
  for (size_t r = 1; r < by_rank.size(); ++r) {
    result = Truncated(dtype, Combine(op, result, static_cast<int64_t>(by_rank[r])));
  }
  if (op == ReduceOp::kAvg) result /= static_cast<int64_t>(by_rank.size());
  return static_cast<double>(result);
}

}  // namespace ddp::testing
