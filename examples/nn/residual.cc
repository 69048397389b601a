// SPDX-License-Identifier: Apache-2.0
#include "examples/nn/residual.h"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <utility>
#include <vector>

#include "examples/nn/check.h"
#include "examples/nn/kernels.h"

namespace nn {

BasicBlock::BasicBlock(const onednn::SessionPtr& session, const ImageShape& in, int outputs, int stride, int max_batch)
    : session_(session),
      in_(in),
      stride_(stride),
      conv1_(session, {.in = in, .outputs = outputs, .stride = stride, .padding = 1, .bias = false}, max_batch),
      bn1_(session, conv1_.output_shape(), Activation::kRelu, max_batch),
      conv2_(session, {.in = conv1_.output_shape(), .outputs = outputs, .padding = 1, .bias = false}, max_batch),
      bn2_(session, conv1_.output_shape(), Activation::kNone, max_batch) {
  NN_CHECK(outputs >= in.channels);
  SetParts({{"conv1", &conv1_}, {"bn1", &bn1_}, {"conv2", &conv2_}, {"bn2", &bn2_}});
  for (auto& output : outputs_) {
    output = hwy::AllocateAligned<float>(static_cast<size_t>(max_batch) * static_cast<size_t>(output_size()));
    NN_CHECK(output != nullptr);
  }
}

// An image lies as [channels / block][height][width][block], whatever its block.
template <class Fn>
void BasicBlock::ForEachStretch(int rows, const Fn& fn) const {
  const ImageShape out = output_shape();
  const auto in_block = static_cast<size_t>(session_->Block(in_.channels));
  const auto out_block = static_cast<size_t>(session_->Block(out.channels));
  const size_t step = std::min(in_block, out_block);
  const auto in_size = static_cast<size_t>(input_size()), out_size = static_cast<size_t>(output_size());
  const auto in_plane = static_cast<size_t>(in_.height) * static_cast<size_t>(in_.width);
  const auto out_plane = static_cast<size_t>(out.height) * static_cast<size_t>(out.width);
  for (size_t row = 0; row < static_cast<size_t>(rows); ++row) {
    for (size_t c = 0; c < static_cast<size_t>(in_.channels); c += step) {
      const size_t in_first = row * in_size + c / in_block * in_plane * in_block + c % in_block;
      const size_t out_first = row * out_size + c / out_block * out_plane * out_block + c % out_block;
      for (size_t y = 0; y < static_cast<size_t>(out.height); ++y) {
        const size_t in_line = y * static_cast<size_t>(stride_ * in_.width),
                     out_line = y * static_cast<size_t>(out.width);
        for (size_t x = 0; x < static_cast<size_t>(out.width); ++x) {
          fn(in_first + (in_line + x * static_cast<size_t>(stride_)) * in_block, out_first + (out_line + x) * out_block,
             step);
        }
      }
    }
  }
}

void BasicBlock::Forward(const float* x, float* y, int rows) {
  conv1_.Forward(x, outputs_[0].get(), rows);
  bn1_.Forward(outputs_[0].get(), outputs_[1].get(), rows);
  conv2_.Forward(outputs_[1].get(), outputs_[2].get(), rows);
  bn2_.Forward(outputs_[2].get(), y, rows);
  const size_t count = static_cast<size_t>(rows) * static_cast<size_t>(output_size());
  if (output_shape() == in_) {
    AddRelu(x, y, count);
    return;
  }
  ForEachStretch(rows, [&](size_t from, size_t to, size_t floats) {
    for (size_t i = 0; i < floats; ++i) y[to + i] += x[from + i];
  });
  Relu(y, count);
}

void BasicBlock::Backward(const float* x, const float* y, float* dy, float* dx, int rows, bool accumulate,
                          GradReadyFn grad_ready) {
  const size_t count = static_cast<size_t>(rows) * static_cast<size_t>(output_size());
  MaskPositive(y, dy, count);
  float* d1 = session_->Temporary(0, count);
  float* d2 = session_->Temporary(1, count);
  bn2_.Backward(outputs_[2].get(), nullptr, dy, d1, rows, accumulate, Ready(3, grad_ready));
  conv2_.Backward(outputs_[1].get(), nullptr, d1, d2, rows, accumulate, Ready(2, grad_ready));
  bn1_.Backward(outputs_[0].get(), nullptr, d2, d1, rows, accumulate, Ready(1, grad_ready));
  conv1_.Backward(x, nullptr, d1, dx, rows, accumulate, Ready(0, grad_ready));
  if (dx == nullptr) return;
  if (output_shape() == in_) {
    Add(dy, dx, count);
    return;
  }
  ForEachStretch(rows, [&](size_t to, size_t from, size_t floats) {
    for (size_t i = 0; i < floats; ++i) dx[to + i] += dy[from + i];
  });
}

Bottleneck::Bottleneck(const onednn::SessionPtr& session, const BottleneckOptions& o, int max_batch)
    : session_(session),
      conv1_(session, {.in = o.in, .outputs = o.width, .kernel = 1, .bias = false}, max_batch),
      bn1_(session, conv1_.output_shape(), Activation::kRelu, max_batch),
      conv2_(session,
             {.in = conv1_.output_shape(), .outputs = o.width, .stride = o.stride, .padding = 1, .bias = false},
             max_batch),
      bn2_(session, conv2_.output_shape(), Activation::kRelu, max_batch),
      conv3_(session, {.in = conv2_.output_shape(), .outputs = 4 * o.width, .kernel = 1, .bias = false}, max_batch),
      bn3_(session, o.out(), Activation::kNone, max_batch),
      projection_(
          !o.projected()
              ? nullptr
              : new Projection{{session,
                                {.in = o.in, .outputs = 4 * o.width, .kernel = 1, .stride = o.stride, .bias = false},
                                max_batch},
                               {session, o.out(), Activation::kNone, max_batch},
                               nullptr}) {
  SetParts(BottleneckParts({&conv1_, &bn1_, &conv2_, &bn2_, &conv3_, &bn3_},
                           projection_ == nullptr ? nullptr : &projection_->conv,
                           projection_ == nullptr ? nullptr : &projection_->bn));
  const auto allocate = [&](const Layer& layer) {
    auto output =
        hwy::AllocateAligned<float>(static_cast<size_t>(max_batch) * static_cast<size_t>(layer.output_size()));
    NN_CHECK(output != nullptr);
    return output;
  };
  const Layer* const layers[] = {&conv1_, &bn1_, &conv2_, &bn2_, &conv3_};
  for (size_t i = 0; i < std::size(layers); ++i) outputs_[i] = allocate(*layers[i]);
  if (projection_ != nullptr) projection_->output = allocate(projection_->conv);
}

void Bottleneck::Forward(const float* x, float* y, int rows) {
  conv1_.Forward(x, outputs_[0].get(), rows);
  bn1_.Forward(outputs_[0].get(), outputs_[1].get(), rows);
  conv2_.Forward(outputs_[1].get(), outputs_[2].get(), rows);
  bn2_.Forward(outputs_[2].get(), outputs_[3].get(), rows);
  conv3_.Forward(outputs_[3].get(), outputs_[4].get(), rows);
  bn3_.Forward(outputs_[4].get(), y, rows);
  const size_t count = static_cast<size_t>(rows) * static_cast<size_t>(output_size());
  if (projection_ == nullptr) {
    AddRelu(x, y, count);
    return;
  }
  float* const shortcut = session_->Temporary(0, count);
  projection_->conv.Forward(x, projection_->output.get(), rows);
  projection_->bn.Forward(projection_->output.get(), shortcut, rows);
  AddRelu(shortcut, y, count);
}

// The shortcut first, so that gradients are announced in the reverse order of the parameters.
void Bottleneck::Backward(const float* x, const float* y, float* dy, float* dx, int rows, bool accumulate,
                          GradReadyFn grad_ready) {
  const auto floats = [&](int size) { return static_cast<size_t>(rows) * static_cast<size_t>(size); };
  MaskPositive(y, dy, floats(output_size()));
  float* const a = session_->Temporary(0, floats(std::max(output_size(), conv1_.output_size())));
  float* const b = session_->Temporary(1, floats(std::max(conv2_.output_size(), input_size())));
  if (projection_ != nullptr) {
    projection_->bn.Backward(projection_->output.get(), nullptr, dy, a, rows, accumulate, Ready(7, grad_ready));
    projection_->conv.Backward(x, nullptr, a, dx, rows, accumulate, Ready(6, grad_ready));
  }
  bn3_.Backward(outputs_[4].get(), nullptr, dy, a, rows, accumulate, Ready(5, grad_ready));
  conv3_.Backward(outputs_[3].get(), nullptr, a, b, rows, accumulate, Ready(4, grad_ready));
  bn2_.Backward(outputs_[2].get(), nullptr, b, b, rows, accumulate, Ready(3, grad_ready));
  conv2_.Backward(outputs_[1].get(), nullptr, b, a, rows, accumulate, Ready(2, grad_ready));
  bn1_.Backward(outputs_[0].get(), nullptr, a, a, rows, accumulate, Ready(1, grad_ready));
  float* const body = projection_ == nullptr ? dx : dx == nullptr ? nullptr : b;
  conv1_.Backward(x, nullptr, a, body, rows, accumulate, Ready(0, grad_ready));
  if (dx != nullptr) Add(projection_ == nullptr ? dy : b, dx, floats(input_size()));
}

}  // namespace nn
