// SPDX-License-Identifier: Apache-2.0
#include "examples/nn/onednn_image.h"

#include <dnnl.hpp>
#include <memory>
#include <utility>
#include <vector>

#include "examples/nn/check.h"
#include "examples/nn/onednn_session.h"

namespace nn::onednn {
namespace {

// Memory by which a forward operation tells its backward one something, where it does.
void ShareWorkspace(const memory::desc& desc, Operation& forward, Operation& backward, std::vector<float>& workspace) {
  if (desc.get_size() == 0) return;
  workspace.resize(desc.get_size() / sizeof(float) + 1);
  for (Operation* operation : {&forward, &backward}) {
    operation->Operand(DNNL_ARG_WORKSPACE, desc);
    operation->Set(DNNL_ARG_WORKSPACE, workspace.data());
  }
}

}  // namespace

Session::~Session() = default;

int Session::Block(int channels) const { return impl_->block == 0 ? channels : impl_->block; }

size_t Session::Floats(const ImageShape& shape, Layout layout) const {
  return impl_->Describe(1, shape, layout).get_size() / sizeof(float);
}

float* Session::Temporary(int which, size_t floats) {
  NN_CHECK(which == 0 || which == 1);
  return impl_->AtLeast(which, floats);
}

ImageShape ConvolutionShape::out() const {
  return {outputs, (in.height + 2 * padding - kernel) / stride + 1, (in.width + 2 * padding - kernel) / stride + 1};
}

// oneDNN 2 wants it there, where it is of no use; oneDNN 3 refuses what is of no use.
constexpr bool kBackwardTakesShift = DNNL_VERSION_MAJOR < 3;

struct BatchNormalization::Plan {
  SessionPtr session;
  Operation training, evaluation, backward;
  std::vector<float> workspace;  // the ReLU's mask, in bits or bytes
};

BatchNormalization::BatchNormalization(SessionPtr session, const ImageShape& shape, int rows, float eps, bool relu)
    : plan_(std::make_unique<Plan>()) {
  Plan& plan = *plan_;
  plan.session = std::move(session);
  Session::Impl& impl = plan.session->impl();
  const memory::desc images = impl.Describe(rows, shape, Layout::kNative);
  using Flags = dnnl::normalization_flags;
  const Flags plain = Flags::use_scale | Flags::use_shift, flags = relu ? plain | Flags::fuse_norm_relu : plain;
  using Forward = dnnl::batch_normalization_forward;
  using Backward = dnnl::batch_normalization_backward;
  const dnnl::primitive_attr attr = UserScratchpad();
#if DNNL_VERSION_MAJOR >= 3
  const Forward::primitive_desc training(impl.engine, prop_kind::forward_training, images, images, eps, flags, attr);
  const Forward::primitive_desc evaluation(impl.engine, prop_kind::forward_inference, images, images, eps,
                                           plain | Flags::use_global_stats, attr);
  const Backward::primitive_desc backward(impl.engine, prop_kind::backward, images, images, images, eps, flags,
                                          training, attr);
#else
  const Forward::primitive_desc training({prop_kind::forward_training, images, eps, flags}, attr, impl.engine);
  const Forward::primitive_desc evaluation({prop_kind::forward_inference, images, eps, plain | Flags::use_global_stats},
                                           attr, impl.engine);
  const Backward::primitive_desc backward({prop_kind::backward, images, images, eps, flags}, attr, impl.engine,
                                          training);
#endif
  const memory::desc channels = Vector(shape.channels);
  plan.training = Operation(Forward(training), training, impl);
  plan.evaluation = Operation(Forward(evaluation), evaluation, impl);
  plan.backward = Operation(Backward(backward), backward, impl);
  for (Operation* operation : {&plan.training, &plan.evaluation, &plan.backward}) {
    operation->Operand(DNNL_ARG_SRC, images);
    for (const int key : {DNNL_ARG_SCALE, DNNL_ARG_MEAN, DNNL_ARG_VARIANCE}) operation->Operand(key, channels);
    if (operation != &plan.backward || kBackwardTakesShift) operation->Operand(DNNL_ARG_SHIFT, channels);
  }
  plan.training.Operand(DNNL_ARG_DST, images);
  plan.evaluation.Operand(DNNL_ARG_DST, images);
  plan.backward.Operand(DNNL_ARG_DIFF_DST, images);
  plan.backward.Operand(DNNL_ARG_DIFF_SRC, images);
  plan.backward.Operand(DNNL_ARG_DIFF_SCALE, channels);
  plan.backward.Operand(DNNL_ARG_DIFF_SHIFT, channels);
  ShareWorkspace(training.workspace_desc(), plan.training, plan.backward, plan.workspace);
}

BatchNormalization::~BatchNormalization() = default;

void BatchNormalization::ForwardTraining(const float* x, const float* scale, const float* shift, float* mean,
                                         float* variance, float* y) {
  plan_->training.Run({{DNNL_ARG_SRC, x},
                       {DNNL_ARG_SCALE, scale},
                       {DNNL_ARG_SHIFT, shift},
                       {DNNL_ARG_MEAN, mean},
                       {DNNL_ARG_VARIANCE, variance},
                       {DNNL_ARG_DST, y}});
}

void BatchNormalization::ForwardEvaluation(const float* x, const float* scale, const float* shift, const float* mean,
                                           const float* variance, float* y) {
  plan_->evaluation.Run({{DNNL_ARG_SRC, x},
                         {DNNL_ARG_SCALE, scale},
                         {DNNL_ARG_SHIFT, shift},
                         {DNNL_ARG_MEAN, mean},
                         {DNNL_ARG_VARIANCE, variance},
                         {DNNL_ARG_DST, y}});
}

void BatchNormalization::Backward(const float* x, const float* dy, const float* scale, const float* shift,
                                  const float* mean, const float* variance, float* dscale, float* dshift, float* dx) {
  if (kBackwardTakesShift) plan_->backward.Set(DNNL_ARG_SHIFT, shift);
  plan_->backward.Run({{DNNL_ARG_SRC, x},
                       {DNNL_ARG_SCALE, scale},
                       {DNNL_ARG_MEAN, mean},
                       {DNNL_ARG_VARIANCE, variance},
                       {DNNL_ARG_DIFF_DST, dy},
                       {DNNL_ARG_DIFF_SRC, dx},
                       {DNNL_ARG_DIFF_SCALE, dscale},
                       {DNNL_ARG_DIFF_SHIFT, dshift}});
}

struct AveragePooling::Plan {
  SessionPtr session;
  Operation forward, backward;
};

AveragePooling::AveragePooling(SessionPtr session, const ImageShape& shape, int kernel_height, int kernel_width,
                               int rows)
    : plan_(std::make_unique<Plan>()) {
  Plan& plan = *plan_;
  plan.session = std::move(session);
  Session::Impl& impl = plan.session->impl();
  const ImageShape out_shape = {shape.channels, shape.height / kernel_height, shape.width / kernel_width};
  const memory::desc in = impl.Describe(rows, shape, Layout::kNative);
  const memory::desc out = impl.Describe(rows, out_shape, Layout::kNative);
  const memory::dims kernel = {kernel_height, kernel_width}, none = {0, 0};
  constexpr auto algorithm = dnnl::algorithm::pooling_avg_exclude_padding;
  using Forward = dnnl::pooling_forward;
  using Backward = dnnl::pooling_backward;
  const dnnl::primitive_attr attr = UserScratchpad();
#if DNNL_VERSION_MAJOR >= 3
  const Forward::primitive_desc forward(impl.engine, prop_kind::forward_training, algorithm, in, out, kernel, kernel,
                                        none, none, none, attr);
  const Backward::primitive_desc backward(impl.engine, algorithm, in, out, kernel, kernel, none, none, none, forward,
                                          attr);
#else
  const Forward::primitive_desc forward({prop_kind::forward_training, algorithm, in, out, kernel, kernel, none, none},
                                        attr, impl.engine);
  const Backward::primitive_desc backward({algorithm, in, out, kernel, kernel, none, none}, attr, impl.engine, forward);
#endif
  plan.forward = Operation(Forward(forward), forward, impl);
  plan.forward.Operand(DNNL_ARG_SRC, in);
  plan.forward.Operand(DNNL_ARG_DST, out);
  plan.backward = Operation(Backward(backward), backward, impl);
  plan.backward.Operand(DNNL_ARG_DIFF_DST, out);
  plan.backward.Operand(DNNL_ARG_DIFF_SRC, in);
}

AveragePooling::~AveragePooling() = default;

void AveragePooling::Forward(const float* x, float* y) { plan_->forward.Run({{DNNL_ARG_SRC, x}, {DNNL_ARG_DST, y}}); }

void AveragePooling::Backward(const float* dy, float* dx) {
  plan_->backward.Run({{DNNL_ARG_DIFF_DST, dy}, {DNNL_ARG_DIFF_SRC, dx}});
}

struct Relayout::Plan {
  SessionPtr session;
  Operation reorder;
};

Relayout::Relayout(SessionPtr session, const ImageShape& shape, int rows, Layout from, Layout to)
    : plan_(std::make_unique<Plan>()) {
  plan_->session = std::move(session);
  Session::Impl& impl = plan_->session->impl();
  plan_->reorder = MakeReorder(impl, impl.Describe(rows, shape, from), impl.Describe(rows, shape, to), false);
}

Relayout::~Relayout() = default;

void Relayout::Run(const float* x, float* y) { RunReorder(plan_->reorder, x, y); }

}  // namespace nn::onednn
