// SPDX-License-Identifier: Apache-2.0
#include "examples/nn/pooling.h"

#include <algorithm>
#include <cstddef>
#include <memory>
#include <utility>

#include "examples/nn/check.h"
#include "examples/nn/dropout_hash.h"

namespace nn {
namespace {

size_t Count(int rows, int size) { return static_cast<size_t>(rows) * static_cast<size_t>(size); }

}  // namespace

Pool2d::Pool2d(onednn::SessionPtr session, const Pool2dOptions& options, int max_batch)
    : session_(std::move(session)), options_(options), max_batch_(max_batch) {
  NN_CHECK(options.out().height > 0 && options.out().width > 0 && max_batch > 0);
  NN_CHECK(options.kind == PoolKind::kMax || (options.stride == 0 && options.padding == 0));
  NN_CHECK(2 * options.padding <= std::min(options.height, options.width));
  if (options.kind == PoolKind::kMax) {
    which_.resize(Count(max_batch, output_size()));
  } else {
    AverageFor(max_batch);
  }
}

onednn::AveragePooling& Pool2d::AverageFor(int rows) {
  return averages_.Get(rows, [&] {
    return std::make_unique<onednn::AveragePooling>(session_, options_.in, options_.height, options_.width, rows);
  });
}

Windows Pool2d::WindowsOf(int rows) const {
  const auto size = [](int n) { return static_cast<size_t>(n); };
  const size_t block = size(session_->Block(options_.in.channels));
  return {.planes = Count(rows, input_size()) / (Pixels(1, options_.in) * block),
          .in_height = size(options_.in.height),
          .in_width = size(options_.in.width),
          .height = size(options_.height),
          .width = size(options_.width),
          .block = block,
          .stride = size(options_.stride),
          .padding = size(options_.padding)};
}

void Pool2d::Forward(const float* x, float* y, int rows) {
  NN_CHECK(rows > 0 && rows <= max_batch_);
  if (options_.kind == PoolKind::kMax) {
    MaxPool(WindowsOf(rows), relu(), x, y, which_.data());
    return;
  }
  AverageFor(rows).Forward(x, y);
  if (relu()) Relu(y, Count(rows, output_size()));
}

void Pool2d::Backward(const float* /*x*/, const float* y, float* dy, float* dx, int rows, bool /*accumulate*/,
                      GradReadyFn /*grad_ready*/) {
  if (dx == nullptr) return;
  if (options_.kind == PoolKind::kMax) {
    MaxPoolBackward(WindowsOf(rows), relu(), y, which_.data(), dy, dx);
    return;
  }
  if (relu()) MaskPositive(y, dy, Count(rows, output_size()));
  AverageFor(rows).Backward(dy, dx);
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
  const DropoutChoice choice(p_, seed_, passes_);
  for (size_t i = 0; i < Count(rows, size_); ++i) to[i] = from[i] * choice.Factor(i);  // a NaN stays, as in PyTorch
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
