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

Pattern::Pattern(DType dtype, ReduceOp op, int ranks) : dtype_(dtype), op_(op), ranks_(ranks) {
  for (int value = kValues.front(); value <= kValues.back(); ++value) contributions_.push_back(Encode(value, 1));
  const int divisor = op == ReduceOp::kAvg ? ranks : 1;
  for (int value = -kLargest; value <= kLargest; ++value) results_.push_back(Encode(value, divisor));
}

uint64_t Pattern::Encode(int value, int divisor) const {
  const double quotient = static_cast<double>(value) / divisor;
  // Integers wrap in their own type before they are divided.
  switch (dtype_) {
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
  if (op_ != ReduceOp::kProduct) return kValues[spread * kValues.size() >> 16];
  const size_t choices = rank < kRanksWithTwo ? kFactors.size() : kFactors.size() - 1;
  return kFactors[spread * choices >> 16];
}

int Pattern::Reduced(size_t index, uint32_t salt) const {
  int result = Value(index, 0, salt);
  for (int r = 1; r < ranks_; ++r) {
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
        result = dtype_ == DType::kUInt8 ? std::min<uint8_t>(result, value) : std::min(result, value);
        break;
      case ReduceOp::kMax:
        result = dtype_ == DType::kUInt8 ? std::max<uint8_t>(result, value) : std::max(result, value);
        break;
    }
  }
  return result;
}

template <typename Word>
bool Pattern::Wrong(Word got, int want) const {
  const Word expected = static_cast<Word>(results_[static_cast<size_t>(want + kLargest)]);
  if (op_ != ReduceOp::kAvg || !ddp::IsFloatingPoint(dtype_)) return got != expected;
  // An average may be rounded either way.
  return static_cast<Word>(got - expected + 1) > 2;
}

template <typename Fn>
auto Pattern::WithWord(Fn&& fn) const {
  switch (ddp::SizeOf(dtype_)) {
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

void Pattern::Fill(void* data, size_t count, int rank, uint32_t salt) const {
  WithWord([&]<typename Word>(Word) {
    Word* const words = static_cast<Word*>(data);
    for (size_t i = 0; i < count; ++i) {
      words[i] = static_cast<Word>(contributions_[static_cast<size_t>(Value(i, rank, salt) - kValues.front())]);
    }
  });
}

int64_t Pattern::CountWrong(const void* data, size_t count, uint32_t salt) const {
  return WithWord([&]<typename Word>(Word) {
    const Word* const words = static_cast<const Word*>(data);
    int64_t wrong = 0;
    for (size_t i = 0; i < count; ++i) wrong += Wrong(words[i], Reduced(i, salt));
    return wrong;
  });
}

void Pattern::FillEqual(void* data, size_t count, int rank) const {
  WithWord([&]<typename Word>(Word) {
    const int value = Value(0, rank, 0);
    const Word word = static_cast<Word>(contributions_[static_cast<size_t>(value - kValues.front())]);
    Word* const words = static_cast<Word*>(data);
    std::fill(words, words + count, word);
  });
}

int64_t Pattern::CountWrongEqual(const void* data, size_t count) const {
  if (count == 0) return 0;
  return WithWord([&]<typename Word>(Word) {
    const Word* const words = static_cast<const Word*>(data);
    const int want = Reduced(0, 0);
    return int64_t{Wrong(words[0], want)} + Wrong(words[count / 2], want) + Wrong(words[count - 1], want);
  });
}

}  // namespace bench
