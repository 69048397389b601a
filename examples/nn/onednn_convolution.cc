// SPDX-License-Identifier: Apache-2.0
#include <dnnl.hpp>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "examples/nn/onednn_image.h"
#include "examples/nn/onednn_session.h"

namespace nn::onednn {
namespace {

// A convolution's problem as its three directions share it.
struct Problem {
  memory::desc src, weight, bias, dst;
  memory::dims strides, padding;
};

dnnl::convolution_forward::primitive_desc DescribeForward(const Problem& p, dnnl::algorithm algorithm,
                                                          const dnnl::primitive_attr& attr, const dnnl::engine& engine,
                                                          bool allow_empty) {
#if DNNL_VERSION_MAJOR >= 3
  return {engine,    prop_kind::forward_training,
          algorithm, p.src,
          p.weight,  p.bias,
          p.dst,     p.strides,
          p.padding, p.padding,
          attr,      allow_empty};
#else
  return {{prop_kind::forward_training, algorithm, p.src, p.weight, p.bias, p.dst, p.strides, p.padding, p.padding},
          attr,
          engine,
          allow_empty};
#endif
}

dnnl::convolution_backward_weights::primitive_desc DescribeWeights(
    const Problem& p, dnnl::algorithm algorithm, const dnnl::convolution_forward::primitive_desc& hint,
    const dnnl::engine& engine, bool allow_empty) {
#if DNNL_VERSION_MAJOR >= 3
  return {engine,    algorithm, p.src,     p.weight, p.bias,           p.dst,
          p.strides, p.padding, p.padding, hint,     UserScratchpad(), allow_empty};
#else
  return {{algorithm, p.src, p.weight, p.bias, p.dst, p.strides, p.padding, p.padding},
          UserScratchpad(),
          engine,
          hint,
          allow_empty};
#endif
}

dnnl::convolution_backward_data::primitive_desc DescribeData(const Problem& p, dnnl::algorithm algorithm,
                                                             const dnnl::convolution_forward::primitive_desc& hint,
                                                             const dnnl::engine& engine, bool allow_empty) {
#if DNNL_VERSION_MAJOR >= 3
  return {engine,    algorithm, p.src, p.weight,         p.dst,      p.strides,
          p.padding, p.padding, hint,  UserScratchpad(), allow_empty};
#else
  return {{algorithm, p.src, p.weight, p.dst, p.strides, p.padding, p.padding},
          UserScratchpad(),
          engine,
          hint,
          allow_empty};
#endif
}

// Winograd's algorithm where it wins and there is one, else the direct one: describe(algorithm, allow_empty).
template <class Describe>
auto Choose(bool winograd, const Describe& describe) {
  if (winograd) {
    // An empty description is falsy: this processor, or this version of oneDNN, has no such kernel.
    if (auto description = describe(dnnl::algorithm::convolution_winograd, true)) return description;
  }
  return describe(dnnl::algorithm::convolution_direct, false);
}

template <class Description>
bool IsReference(const Description& description) {
  return absl::StartsWith(description.impl_info_str(), "ref");
}

}  // namespace

// The layout that a convolution of ordinary size chooses when it is free to, if its backward chooses the same (without
// AVX it does not, and would be slow). All operations then take it, so that nothing has to be rearranged between them.
Session::Session() : impl_(std::make_unique<Impl>()) {
  const ImageShape shape = {32, 16, 16};
  using Tag = memory::format_tag;
  const Problem free = {Images(8, shape, Tag::any),
                        memory::desc({32, 32, 3, 3}, memory::data_type::f32, Tag::any),
                        Vector(32),
                        Images(8, shape, Tag::any),
                        {1, 1},
                        {1, 1}};
  const auto forward = DescribeForward(free, dnnl::algorithm::convolution_direct, {}, impl_->engine, false);
  const auto backward = DescribeData(free, dnnl::algorithm::convolution_direct, forward, impl_->engine, false);
  const memory::desc chosen = forward.dst_desc();
  if (backward.diff_dst_desc() != chosen) return;
  for (const auto& [tag, block] : {std::pair(Tag::nChw16c, 16), std::pair(Tag::nChw8c, 8), std::pair(Tag::nhwc, 0)}) {
    if (chosen != Images(8, shape, tag)) continue;
    impl_->native = tag;
    impl_->block = block;
  }
}

bool HasBfloat16() {
  const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  using Tag = memory::format_tag;
  constexpr auto kType = memory::data_type::bf16;
  const ImageShape shape = {32, 16, 16};
  const Problem problem = {Images(8, shape, Tag::any, kType),
                           memory::desc({32, 32, 3, 3}, kType, Tag::any),
                           Vector(32),
                           Images(8, shape, Tag::any),
                           {1, 1},
                           {1, 1}};
  return static_cast<bool>(DescribeForward(problem, dnnl::algorithm::convolution_direct, {}, engine, true));
}

// Weights are rearranged for each direction as it likes them: 0.6 ms of a step of ResNet-20 at batch 64, and several
// times that saved.
struct Convolution::Plan {
  SessionPtr session;
  bool bfloat16 = false;
  Operation forward, backward_weight, backward_input;
  Operation order_forward, order_input, store_weight, add_weight;
  Operation round_x, round_dy, flatten_dy;
  FloatArray weight, input_weight, dweight;  // as a direction likes them
  FloatArray x, dy;                          // in bfloat16
  FloatArray flat_dy;                        // in the plain layout, if the weights' gradient needs that
  std::vector<float> dbias;
};

Convolution::Convolution(SessionPtr session, const ConvolutionShape& shape, int rows, const ConvolutionOptions& options)
    : plan_(std::make_unique<Plan>()) {
  Plan& plan = *plan_;
  plan.session = std::move(session);
  plan.bfloat16 = options.bfloat16;
  Session::Impl& impl = plan.session->impl();
  const auto type = options.bfloat16 ? memory::data_type::bf16 : kFloat;
  const memory::dims dims = {shape.outputs, shape.in.channels, shape.kernel, shape.kernel};
  const memory::desc plain(dims, kFloat, memory::format_tag::oihw);
  const memory::desc free_weight(dims, type, memory::format_tag::any);
  const memory::desc x = impl.Describe(rows, shape.in, shape.in_layout);
  const memory::desc y = impl.Describe(rows, shape.out(), Layout::kNative);
  const memory::desc factor_x = impl.Describe(rows, shape.in, shape.in_layout, type);
  const memory::desc factor_dy = impl.Describe(rows, shape.out(), Layout::kNative, type);
  const memory::desc bias = options.bias ? Vector(shape.outputs) : memory::desc();
  const memory::dims strides = {shape.stride, shape.stride}, padding = {shape.padding, shape.padding};
  // Measured: it loses with fewer channels.
  const bool winograd = shape.kernel == 3 && shape.stride == 1 && shape.in.channels >= 32 && !options.bfloat16;

  const auto forward = Choose(winograd, [&](dnnl::algorithm algorithm, bool allow_empty) {
    return DescribeForward({factor_x, free_weight, bias, y, strides, padding}, algorithm, UserScratchpad(), impl.engine,
                           allow_empty);
  });
  const memory::desc dweight(dims, kFloat, memory::format_tag::any);
  const auto weights_of = [&](const memory::desc& dy) {
    return Choose(winograd, [&](dnnl::algorithm algorithm, bool allow_empty) {
      return DescribeWeights({factor_x, dweight, bias, dy, strides, padding}, algorithm, forward, impl.engine,
                             allow_empty);
    });
  };
  auto weights = weights_of(factor_dy);
  memory::desc weights_dy = factor_dy;
  // Of images of one channel oneDNN 2.6 has but its reference where there is AVX2 and no more, a hundred times slower
  // than products of matrices, which want the plain layout.
  if (IsReference(weights)) {
    const memory::desc flat_dy = Images(rows, shape.out(), memory::format_tag::nchw, type);
    if (const auto other = weights_of(flat_dy); !IsReference(other)) {
      weights = other;
      weights_dy = flat_dy;
      plan.flatten_dy = MakeReorder(impl, factor_dy, flat_dy, false);
      plan.flat_dy = FloatsFor(flat_dy);
    }
  }
  const auto data = Choose(winograd, [&](dnnl::algorithm algorithm, bool allow_empty) {
    return DescribeData({x, free_weight, {}, factor_dy, strides, padding}, algorithm, forward, impl.engine,
                        allow_empty);
  });

  plan.forward = Operation(dnnl::convolution_forward(forward), forward, impl);
  plan.forward.Operand(DNNL_ARG_SRC, factor_x);
  plan.forward.Operand(DNNL_ARG_WEIGHTS, forward.weights_desc());
  if (options.bias) plan.forward.Operand(DNNL_ARG_BIAS, bias);
  plan.forward.Operand(DNNL_ARG_DST, y);
  plan.order_forward = MakeReorder(impl, plain, forward.weights_desc(), false);
  plan.weight = FloatsFor(forward.weights_desc());

  plan.backward_weight = Operation(dnnl::convolution_backward_weights(weights), weights, impl);
  plan.backward_weight.Operand(DNNL_ARG_SRC, factor_x);
  plan.backward_weight.Operand(DNNL_ARG_DIFF_DST, weights_dy);
  plan.backward_weight.Operand(DNNL_ARG_DIFF_WEIGHTS, weights.diff_weights_desc());
  if (options.bias) plan.backward_weight.Operand(DNNL_ARG_DIFF_BIAS, bias);
  plan.store_weight = MakeReorder(impl, weights.diff_weights_desc(), plain, false);
  plan.add_weight = MakeReorder(impl, weights.diff_weights_desc(), plain, true);
  plan.dweight = FloatsFor(weights.diff_weights_desc());
  if (options.bias) plan.dbias.resize(static_cast<size_t>(shape.outputs));

  plan.backward_input = Operation(dnnl::convolution_backward_data(data), data, impl);
  plan.backward_input.Operand(DNNL_ARG_DIFF_DST, factor_dy);
  plan.backward_input.Operand(DNNL_ARG_WEIGHTS, data.weights_desc());
  plan.backward_input.Operand(DNNL_ARG_DIFF_SRC, x);
  plan.order_input = MakeReorder(impl, plain, data.weights_desc(), false);
  plan.input_weight = FloatsFor(data.weights_desc());
  if (!options.bfloat16) return;
  // Of oneDNN 2.6, where images are narrow or a kernel is smaller than its stride: what an earlier operation has left
  // in the scratchpad gets into the result.
  if (shape.stride > 1) {
    plan.forward.ClearScratchpad();
    plan.backward_weight.ClearScratchpad();
  }
  plan.round_x = MakeReorder(impl, x, factor_x, false);
  plan.round_dy = MakeReorder(impl, y, factor_dy, false);
  plan.x = FloatsFor(factor_x);
  plan.dy = FloatsFor(factor_dy);
}

Convolution::~Convolution() = default;

void Convolution::Forward(const float* x, const float* weight, const float* bias, float* y) {
  Plan& plan = *plan_;
  RunReorder(plan.order_forward, weight, plan.weight.get());
  if (plan.bfloat16) {
    RunReorder(plan.round_x, x, plan.x.get());
    x = plan.x.get();
  }
  if (bias != nullptr) plan.forward.Set(DNNL_ARG_BIAS, bias);
  plan.forward.Run({{DNNL_ARG_SRC, x}, {DNNL_ARG_WEIGHTS, plan.weight.get()}, {DNNL_ARG_DST, y}});
}

void Convolution::BackwardWeight(const float* x, const float* dy, float* dweight, float* dbias, bool accumulate) {
  Plan& plan = *plan_;
  if (plan.bfloat16) {
    RunReorder(plan.round_dy, dy, plan.dy.get());
    dy = plan.dy.get();
    x = plan.x.get();
  }
  if (plan.flat_dy != nullptr) {
    RunReorder(plan.flatten_dy, dy, plan.flat_dy.get());
    dy = plan.flat_dy.get();
  }
  Operation& backward = plan.backward_weight;
  if (dbias != nullptr) backward.Set(DNNL_ARG_DIFF_BIAS, plan.dbias.data());
  backward.Run({{DNNL_ARG_SRC, x}, {DNNL_ARG_DIFF_DST, dy}, {DNNL_ARG_DIFF_WEIGHTS, plan.dweight.get()}});
  RunReorder(accumulate ? plan.add_weight : plan.store_weight, plan.dweight.get(), dweight);
  if (dbias == nullptr) return;
  for (size_t i = 0; i < plan.dbias.size(); ++i) dbias[i] = plan.dbias[i] + (accumulate ? dbias[i] : 0);
}

void Convolution::BackwardInput(const float* dy, const float* weight, float* dx) {
  Plan& plan = *plan_;
  RunReorder(plan.order_input, weight, plan.input_weight.get());
  plan.backward_input.Run({{DNNL_ARG_DIFF_DST, plan.bfloat16 ? plan.dy.get() : dy},
                           {DNNL_ARG_WEIGHTS, plan.input_weight.get()},
                           {DNNL_ARG_DIFF_SRC, dx}});
}

}  // namespace nn::onednn
