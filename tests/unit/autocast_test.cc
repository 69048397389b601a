// SPDX-License-Identifier: Apache-2.0
// The autocast policy: types by operation, scopes, threads, and the cache of converted weights.
#include "ddp/autocast.h"

#include <cstdint>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "tests/support/catch.h"
#include "tests/support/numbers.h"

namespace ddp {
namespace {

constexpr Device::Kind kCpu = Device::Kind::kCpu, kCuda = Device::Kind::kCuda;
constexpr DType kF64 = DType::kFloat64, kF32 = DType::kFloat32, kF16 = DType::kFloat16, kBf16 = DType::kBFloat16;

constexpr AutocastOp kLower[] = {AutocastOp::kConvolution, AutocastOp::kLinear, AutocastOp::kMatmul};
constexpr AutocastOp kLosses[] = {AutocastOp::kCrossEntropy, AutocastOp::kNll, AutocastOp::kLoss};
constexpr AutocastOp kFloat32OnCuda[] = {AutocastOp::kSoftmax,
                                         AutocastOp::kLogSoftmax,
                                         AutocastOp::kLayerNormStatistics,
                                         AutocastOp::kGroupNormStatistics,
                                         AutocastOp::kExp,
                                         AutocastOp::kLog,
                                         AutocastOp::kPow,
                                         AutocastOp::kSum,
                                         AutocastOp::kNorm};
constexpr AutocastOp kWidest[] = {AutocastOp::kAdd, AutocastOp::kConcat};
constexpr AutocastOp kFirst[] = {AutocastOp::kBatchNorm, AutocastOp::kRelu, AutocastOp::kPool, AutocastOp::kOther};

DType TypeFor(AutocastOp op, std::vector<DType> inputs) { return Autocast::TypeFor(op, kCpu, inputs); }

// `count` float32 numbers that 16-bit floats hold exactly.
std::vector<float> Weights(size_t count) {
  std::vector<float> weights(count);
  for (size_t i = 0; i < count; ++i) weights[i] = static_cast<float>(i % 64) - 32;
  return weights;
}

Buffer Whole(std::vector<float>& weights) { return {weights.data(), weights.size(), kF32, {}}; }

Allocation Cast(const Buffer& weight, DType dtype) {
  absl::StatusOr<Allocation> copy = Autocast::CastWeight(weight, dtype);
  INFO(copy.status().ToString());
  REQUIRE(copy.ok());
  return *std::move(copy);
}

}  // namespace

void CheckFirst(Device::Kind kind, AutocastOp op) {
  CHECK(Autocast::TypeFor(op, kind, {kBf16, kF32}) == kBf16);
  CHECK(Autocast::TypeFor(op, kind, {kF32, kBf16}) == kF32);
  CHECK(Autocast::TypeFor(op, kind, {kF16}) == kF16);
  CHECK(Autocast::TypeFor(op, kind, {kF64, kF32}) == kF64);
}

void CheckFloat32(Device::Kind kind, AutocastOp op) {
  CHECK(Autocast::TypeFor(op, kind, {kBf16}) == kF32);
  CHECK(Autocast::TypeFor(op, kind, {kF16}) == kF32);
  CHECK(Autocast::TypeFor(op, kind, {kF32}) == kF32);
  CHECK(Autocast::TypeFor(op, kind, {kF64}) == kF64);
  CHECK(Autocast::TypeFor(op, kind, {kBf16, DType::kInt64}) == kF32);  // a loss and its labels
}

void CheckWidest(Device::Kind kind, AutocastOp op) {
  CHECK(Autocast::TypeFor(op, kind, {kBf16, kF32}) == kF32);
  CHECK(Autocast::TypeFor(op, kind, {kBf16, kBf16}) == kBf16);
  CHECK(Autocast::TypeFor(op, kind, {kBf16, kF16}) == kF32);
  CHECK(Autocast::TypeFor(op, kind, {kF32, kF64, kF16}) == kF64);
  CHECK(Autocast::TypeFor(op, kind, {DType::kInt32, kF16}) == kF16);
}

TEST_CASE("each operation runs in the type of its list, and the CPU's lists are shorter than CUDA's") {
  for (const Device::Kind kind : {kCpu, kCuda}) {
    INFO((kind == kCpu ? "CPU" : "CUDA"));
    const Autocast autocast(kind, kBf16);
    for (const AutocastOp op : kLower) {
      CHECK(Autocast::TypeFor(op, kind, {kF32, kF32}) == kBf16);
      CHECK(Autocast::TypeFor(op, kind, {kF16, kF32}) == kBf16);
      CHECK(Autocast::TypeFor(op, kind, {kBf16, kBf16}) == kBf16);
      CHECK(Autocast::TypeFor(op, kind, {kF64, kF32}) == kF64);
    }
    for (const AutocastOp op : kLosses) CheckFloat32(kind, op);
    for (const AutocastOp op : kFloat32OnCuda) (kind == kCuda ? CheckFloat32 : CheckFirst)(kind, op);
    for (const AutocastOp op : kWidest) CheckWidest(kind, op);
    (kind == kCuda ? CheckWidest : CheckFirst)(kind, AutocastOp::kDot);
    for (const AutocastOp op : kFirst) CheckFirst(kind, op);
    CHECK(Autocast::TypeFor(AutocastOp::kLinear, kind, {DType::kInt8, DType::kInt64}) == DType::kInt8);
    CHECK(Autocast::TypeFor(AutocastOp::kSum, kind, {DType::kInt64}) == DType::kInt64);
  }
}

TEST_CASE("without autocast an operation keeps its type, and promotes where it has to") {
  CHECK_FALSE(Autocast::enabled(kCpu));
  for (const auto ops : {absl::MakeConstSpan(kLower), absl::MakeConstSpan(kLosses), absl::MakeConstSpan(kFloat32OnCuda),
                         absl::MakeConstSpan(kFirst)}) {
    for (const AutocastOp op : ops) {
      CHECK(TypeFor(op, {kF32}) == kF32);
      CHECK(TypeFor(op, {kF16}) == kF16);
    }
  }
  for (const AutocastOp op : kWidest) CHECK(TypeFor(op, {kF16, kF32}) == kF32);
  // Types that are not floating-point do not count.
  for (const auto ops : {absl::MakeConstSpan(kLower), absl::MakeConstSpan(kFirst)}) {
    for (const AutocastOp op : ops) CHECK(TypeFor(op, {DType::kInt64, kF16}) == kF16);
  }
}

TEST_CASE("the defaults are bfloat16 on the CPU and float16 on CUDA, each kind for itself") {
  CHECK(Autocast::DefaultType(kCpu) == kBf16);
  CHECK(Autocast::DefaultType(kCuda) == kF16);
  {
    const Autocast autocast(kCuda);
    CHECK(Autocast::enabled(kCuda));
    CHECK(Autocast::dtype(kCuda) == kF16);
    CHECK_FALSE(Autocast::enabled(kCpu));
    CHECK(Autocast::TypeFor(AutocastOp::kLinear, kCuda, {kF32}) == kF16);
    CHECK(Autocast::TypeFor(AutocastOp::kLinear, kCpu, {kF32}) == kF32);
  }
  CHECK_FALSE(Autocast::enabled(kCuda));
}

TEST_CASE("scopes nest, and the innermost counts") {
  {
    const Autocast outer(kCpu, kF16);
    CHECK(TypeFor(AutocastOp::kLinear, {kF32}) == kF16);
    {
      const Autocast inner(kCpu, kBf16);
      CHECK(Autocast::dtype(kCpu) == kBf16);
      CHECK(TypeFor(AutocastOp::kLinear, {kF32}) == kBf16);
      {
        const Autocast off(kCpu, kF32);
        CHECK_FALSE(Autocast::enabled(kCpu));
        CHECK(TypeFor(AutocastOp::kLinear, {kF32}) == kF32);
        CHECK(TypeFor(AutocastOp::kSoftmax, {kF16}) == kF16);
      }
      CHECK(TypeFor(AutocastOp::kLinear, {kF32}) == kBf16);
    }
    CHECK(TypeFor(AutocastOp::kLinear, {kF32}) == kF16);
    const Autocast unknown(kCpu, DType::kInt8);
    CHECK_FALSE(Autocast::enabled(kCpu));
  }
  CHECK_FALSE(Autocast::enabled(kCpu));
  CHECK(Autocast::dtype(kCpu) == kBf16);
}

TEST_CASE("each thread has a policy of its own") {
  const Autocast autocast(kCpu);
  bool enabled = true;
  std::thread([&] { enabled = Autocast::enabled(kCpu); }).join();
  CHECK_FALSE(enabled);
  CHECK(Autocast::enabled(kCpu));
}

TEST_CASE("a weight is converted to nearest, ties to even") {
  std::vector<float> weights = {1, -2.5f, 1.0f + 1.0f / 256, 1.0f + 3.0f / 256, 3e38f, 1e-40f};
  const Allocation brain = Cast(Whole(weights), kBf16);
  const Buffer view = brain.View(kBf16, 0, weights.size());
  CHECK(testing::GetElement(kBf16, view.data, 0) == 1);
  CHECK(testing::GetElement(kBf16, view.data, 1) == -2.5);
  CHECK(testing::GetElement(kBf16, view.data, 2) == 1);
  CHECK(testing::GetElement(kBf16, view.data, 3) == 1 + 4.0 / 256);
  const Allocation half = Cast(Whole(weights), kF16);
  CHECK(testing::GetElement(kF16, half.data(), 1) == -2.5);
  // Of the type already: the weight itself.
  CHECK(Cast(Whole(weights), kF32).data() == weights.data());
  int32_t number = 1;
  CHECK(absl::IsInvalidArgument(Autocast::CastWeight({&number, 1, DType::kInt32, {}}, kF16).status()));
  CHECK(!Autocast::CastWeight({&number, 1, kF32, {kCuda, 99}}, kF16).ok());
}

TEST_CASE("a weight is converted once in the outermost scope, and anew in the next") {
  std::vector<float> weights = Weights(1000), others = Weights(1000);
  for (int iteration = 0; iteration < 3; ++iteration) {
    weights[0] = static_cast<float>(iteration);
    const Autocast outer(kCpu);
    const Allocation first = Cast(Whole(weights), kBf16);
    CHECK(testing::GetElement(kBf16, first.data(), 0) == iteration);
    {
      const Autocast inner(kCpu);
      CHECK(Cast(Whole(weights), kBf16).data() == first.data());
    }
    // An inner scope's end keeps the cache. A change within a scope is not seen: it is a copy that is handed out.
    weights[0] = 77;
    CHECK(Cast(Whole(weights), kBf16).data() == first.data());
    CHECK(testing::GetElement(kBf16, first.data(), 0) == iteration);
    // Another type, another weight, a part of one: copies of their own.
    std::set<void*> copies = {first.data()};
    CHECK(copies.insert(Cast(Whole(weights), kF16).data()).second);
    CHECK(copies.insert(Cast(Whole(others), kBf16).data()).second);
    CHECK(copies.insert(Cast({weights.data(), 10, kF32, {}}, kBf16).data()).second);
  }
  // Outside nothing is remembered.
  const Allocation one = Cast(Whole(weights), kBf16), two = Cast(Whole(weights), kBf16);
  CHECK(one.data() != two.data());
}

TEST_CASE("a copy that backward still reads is left alone by the next iteration") {
  std::vector<float> weights = Weights(100);
  Allocation kept;
  {
    const Autocast autocast(kCpu);
    kept = Cast(Whole(weights), kBf16);
  }
  weights[0] = 1;
  {
    const Autocast autocast(kCpu);
    const Allocation next = Cast(Whole(weights), kBf16);
    CHECK(next.data() != kept.data());
    CHECK(testing::GetElement(kBf16, next.data(), 0) == 1);
  }
  CHECK(testing::GetElement(kBf16, kept.data(), 0) == -32);
  // Given back, its memory is used again: no iteration allocates.
  kept = Allocation();
  std::set<void*> places;
  for (int iteration = 0; iteration < 5; ++iteration) {
    const Autocast autocast(kCpu);
    places.insert(Cast(Whole(weights), kBf16).data());
  }
  CHECK(places.size() == 1);
}

// A layer as examples/nn may have one: it decides in forward, and backward follows.
class Layer {
 public:
  explicit Layer(std::vector<float>& weights) : weights_(weights) {}

  void Forward() {
    dtype_ = Autocast::TypeFor(AutocastOp::kLinear, kCpu, {kF32, kF32});
    cast_ = Cast(Whole(weights_), dtype_);
  }
  // What backward multiplies by: the weight as forward saw it.
  double Backward() {
    const double w = testing::GetElement(dtype_, cast_.data(), 2);
    cast_ = Allocation();
    return w;
  }
  DType dtype() const { return dtype_; }

 private:
  std::vector<float>& weights_;
  DType dtype_ = kF32;
  Allocation cast_;
};

TEST_CASE("backward runs in forward's type, after the scope too") {
  std::vector<float> weights = {1, 2, 1.0f + 1.0f / 256};
  Layer layer(weights);
  {
    const Autocast autocast(kCpu);
    layer.Forward();
  }
  CHECK(layer.dtype() == kBf16);
  CHECK(layer.Backward() == 1);
  layer.Forward();
  CHECK(layer.dtype() == kF32);
  CHECK(layer.Backward() == 1 + 1.0 / 256);
}

}  // namespace ddp
