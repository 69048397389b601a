// SPDX-License-Identifier: Apache-2.0
#include "bench/pattern.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>

#include "bench/meeting.h"

namespace bench {
namespace {

using ddp::DType;
using ddp::ReduceOp;

// A sum over kMaxRanks ranks stays within +-192, which even bfloat16 holds exactly; so does a product, where at most
// seven factors are 2.
constexpr std::array<int, 7> kValues = {-3, -2, -1, 0, 1, 2, 3};
constexpr std::array<int, 3> kFactors = {-1, 1, 2};
constexpr int kRanksWithTwo = 7;
constexpr int kLargest = 256;  // unsigned bytes wrap below zero

// IEEE half precision, rounded toward zero.
uint16_t EncodeHalf(double value) {
  if (value == 0) return 0;
  int exponent = 0;
  const double mantissa = std::frexp(std::abs(value), &exponent);
  const int bits = (exponent + 14) << 10 | static_cast<int>((mantissa * 2 - 1) * 1024);
  return static_cast<uint16_t>(bits | (value < 0 ? 0x8000 : 0));
}

}  // namespace

Pattern::Pattern(const Case& c) : case_(c), segments_(c.Results()), op_(c.info().reduces ? c.op : ReduceOp::kSum) {
  for (int value = kValues.front(); value <= kValues.back(); ++value) contributions_.push_back(Encode(value, 1));
  const int divisor = op_ == ReduceOp::kAvg ? case_.ranks : 1;
  for (int value = -kLargest; value <= kLargest; ++value) results_.push_back(Encode(value, divisor));
}

uint64_t Pattern::Encode(int value, int divisor) const {
  const double quotient = static_cast<double>(value) / divisor;
  // Integers wrap in their own type before they are divided.
  switch (case_.dtype) {
    case DType::kFloat64:
      return std::bit_cast<uint64_t>(quotient);
    case DType::kFloat32:
      return std::bit_cast<uint32_t>(static_cast<float>(quotient));
    case DType::kBFloat16:
      return std::bit_cast<uint32_t>(static_cast<float>(quotient)) >> 16;
    case DType::kFloat16:
      return EncodeHalf(quotient);
    case DType::kInt64:
    case DType::kInt32:
      return static_cast<uint64_t>(static_cast<int64_t>(value / divisor));
    case DType::kInt8:
      return static_cast<uint64_t>(static_cast<int64_t>(static_cast<int8_t>(value) / divisor));
    case DType::kUInt8:
      return static_cast<uint64_t>(static_cast<uint8_t>(value) / divisor);
  }
  return 0;
}

int Pattern::Value(size_t index, int rank, uint32_t salt) const {
  const uint32_t hash = static_cast<uint32_t>(index) * 2654435761u + static_cast<uint32_t>(rank) * 2654435769u + salt;
  const uint32_t spread = hash >> 16;
  // More ranks than kMaxRanks add nothing.
  if (rank >= kMaxRanks && case_.info().reduces) return op_ == ReduceOp::kProduct ? 1 : 0;
  if (op_ != ReduceOp::kProduct) return kValues[spread * kValues.size() >> 16];
  const size_t choices = rank < kRanksWithTwo ? kFactors.size() : kFactors.size() - 1;
  return kFactors[spread * choices >> 16];
}

int Pattern::Reduced(size_t index, uint32_t salt) const {
  int result = Value(index, 0, salt);
  for (int r = 1; r < case_.ranks; ++r) {
    const int value = Value(index, r, salt);
    switch (op_) {
      case ReduceOp::kSum:
      case ReduceOp::kAvg:
        result += value;
        break;
      case ReduceOp::kProduct:
        result *= value;
        break;
      // As the type orders them: what is negative here is large where there are no signs.
      case ReduceOp::kMin:
        result = case_.dtype == DType::kUInt8 ? std::min<uint8_t>(result, value) : std::min(result, value);
        break;
      case ReduceOp::kMax:
        result = case_.dtype == DType::kUInt8 ? std::max<uint8_t>(result, value) : std::max(result, value);
        break;
    }
  }
  return result;
}

template <typename Word>
bool Pattern::Wrong(Word got, int want) const {
  const Word expected = static_cast<Word>(results_[static_cast<size_t>(want + kLargest)]);
  if (op_ != ReduceOp::kAvg || !ddp::IsFloatingPoint(case_.dtype)) return got != expected;
  // An average may be rounded either way.
  return static_cast<Word>(got - expected + 1) > 2;
}

template <typename Fn>
auto Pattern::WithWord(Fn&& fn) const {
  switch (ddp::SizeOf(case_.dtype)) {
    case 1:
      return fn(uint8_t{});
    case 2:
      return fn(uint16_t{});
    case 4:
      return fn(uint32_t{});
    default:
      return fn(uint64_t{});
  }
}

void Pattern::Fill(void* in, uint32_t salt) const {
  WithWord([&]<typename Word>(Word) {
    Word* const words = static_cast<Word*>(in);
    for (size_t i = 0; i < case_.InCount(); ++i) {
      words[i] = static_cast<Word>(contributions_[static_cast<size_t>(Value(i, case_.rank, salt) - kValues.front())]);
    }
  });
}

void Pattern::FillEqual(void* in) const {
  WithWord([&]<typename Word>(Word) {
    const int value = Value(0, case_.rank, 0);
    Word* const words = static_cast<Word*>(in);
    std::fill(words, words + case_.InCount(),
              static_cast<Word>(contributions_[static_cast<size_t>(value - kValues.front())]));
  });
}

int64_t Pattern::Count(const void* out, uint32_t salt, bool equal) const {
  return WithWord([&]<typename Word>(Word) {
    int64_t wrong = 0;
    for (const Segment& segment : segments_) {
      const Word* const words = static_cast<const Word*>(out) + segment.to;
      const size_t step = equal ? std::max<size_t>(1, segment.count / 2) : 1;
      for (size_t i = 0; i < segment.count; i += step) {
        const size_t from = equal ? 0 : segment.from + i;
        wrong += Wrong(words[i], segment.rank < 0 ? Reduced(from, salt) : Value(from, segment.rank, salt));
      }
    }
    return wrong;
  });
}

}  // namespace bench
