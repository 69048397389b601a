#include "examples/nn/pooling.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <utility>

#include "examples/nn/check.h"
#include "examples/nn/kernels.h"

namespace nn {
namespace {

size_t Count(int rows, int size) { return static_cast<size_t>(rows) * static_cast<size_t>(size); }

// SplitMix64's mixing (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014) of a counter.
uint64_t Mix(uint64_t z) {
  z += 0x9e3779b97f4a7c15;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

}  // namespace

Pool2d::Pool2d(onednn::SessionPtr session, onednn::PoolKind kind, const ImageShape& shape, int kernel_height,
               int kernel_width, Activation activation, int max_batch)
    : session_(std::move(session)),
      kind_(kind),
      in_(shape),
      out_{shape.channels, shape.height / kernel_height, shape.width / kernel_width},
      activation_(activation),
      max_batch_(max_batch) {
  NN_CHECK(out_.height > 0 && out_.width > 0 && max_batch > 0);
  PoolingFor(max_batch);
}

std::unique_ptr<Pool2d> Pool2d::Global(onednn::SessionPtr session, const ImageShape& shape, int max_batch) {
  return std::unique_ptr<Pool2d>(new Pool2d(std::move(session), onednn::PoolKind::kAverage, shape, shape.height,
                                            shape.width, Activation::kNone, max_batch));
}

onednn::Pooling& Pool2d::PoolingFor(int rows) {
  NN_CHECK(rows > 0 && rows <= max_batch_);
  return poolings_.Get(rows, [&] {
    return std::make_unique<onednn::Pooling>(session_, kind_, in_, in_.height / out_.height, in_.width / out_.width,
                                             rows);
  });
}

void Pool2d::Forward(const float* x, float* y, int rows) {
  PoolingFor(rows).Forward(x, y);
  if (activation_ == Activation::kRelu) Relu(y, Count(rows, output_size()));
}

void Pool2d::Backward(const float* /*x*/, const float* y, float* dy, float* dx, int rows, bool /*accumulate*/,
                      GradReadyFn /*grad_ready*/) {
  if (dx == nullptr) return;
  if (activation_ == Activation::kRelu) MaskPositive(y, dy, Count(rows, output_size()));
  PoolingFor(rows).Backward(dy, dx);
}

Flatten::Flatten(onednn::SessionPtr session, const ImageShape& shape, int max_batch)
    : session_(std::move(session)), shape_(shape), max_batch_(max_batch) {
  NN_CHECK(max_batch > 0);
}

void Flatten::Forward(const float* x, float* y, int rows) {
  NN_CHECK(rows > 0 && rows <= max_batch_);
  const auto make = [&] {
    return std::make_unique<onednn::Relayout>(session_, shape_, rows, Layout::kNative, Layout::kPlain);
  };
  forward_.Get(rows, make).Run(x, y);
}

void Flatten::Backward(const float* /*x*/, const float* /*y*/, float* dy, float* dx, int rows, bool /*accumulate*/,
                       GradReadyFn /*grad_ready*/) {
  if (dx == nullptr) return;
  const auto make = [&] {
    return std::make_unique<onednn::Relayout>(session_, shape_, rows, Layout::kPlain, Layout::kNative);
  };
  backward_.Get(rows, make).Run(dy, dx);
}

Dropout::Dropout(int size, double p, uint64_t seed) : size_(size), p_(p), seed_(seed) {
  NN_CHECK(size > 0 && p >= 0 && p < 1);
}

void Dropout::Apply(const float* from, float* to, int rows) const {
  const auto limit = static_cast<uint64_t>(std::ldexp(p_, 32));  // of 32 random bits
  const float scale = static_cast<float>(1 / (1 - p_));
  const uint64_t stream = Mix(seed_ ^ Mix(passes_));
  for (size_t i = 0; i < Count(rows, size_); ++i) to[i] = Mix(stream + i) >> 32 < limit ? 0.0f : from[i] * scale;
}

void Dropout::Forward(const float* x, float* y, int rows) {
  if (!training_) {
    std::copy_n(x, Count(rows, size_), y);
    return;
  }
  ++passes_;
  Apply(x, y, rows);
}

void Dropout::Backward(const float* /*x*/, const float* /*y*/, float* dy, float* dx, int rows, bool /*accumulate*/,
                       GradReadyFn /*grad_ready*/) {
  if (dx != nullptr) Apply(dy, dx, rows);
}

}  // namespace nn
