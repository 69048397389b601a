#include "examples/nn/onednn_image.h"

#include <dnnl.hpp>
#include <initializer_list>
#include <unordered_map>
#include <utility>
#include <vector>

#include "examples/nn/check.h"
#include "hwy/aligned_allocator.h"

namespace nn::onednn {
namespace {

using dnnl::memory;
using dnnl::prop_kind;

using FloatArray = hwy::AlignedFreeUniquePtr<float[]>;

memory::desc Images(int rows, const ImageShape& s, memory::format_tag tag) {
  return memory::desc({rows, s.channels, s.height, s.width}, memory::data_type::f32, tag);
}

memory::desc Vector(int count) { return memory::desc({count}, memory::data_type::f32, memory::format_tag::a); }

dnnl::primitive_attr UserScratchpad() {
  dnnl::primitive_attr attributes;
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  return attributes;
}

dnnl::primitive_attr WithRelu(bool relu) {
  dnnl::primitive_attr attributes = UserScratchpad();
  if (!relu) return attributes;
  dnnl::post_ops ops;
#if DNNL_VERSION_MAJOR >= 3
  ops.append_eltwise(dnnl::algorithm::eltwise_relu, 0.0f, 0.0f);
#else
  ops.append_eltwise(1.0f, dnnl::algorithm::eltwise_relu, 0.0f, 0.0f);
#endif
  attributes.set_post_ops(ops);
  return attributes;
}

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

}  // namespace

struct Session::Impl {
  dnnl::engine engine{dnnl::engine::kind::cpu, 0};
  dnnl::stream stream{engine};
  memory::format_tag native = memory::format_tag::nchw;
  int block = 1;  // 0: all channels
  // What outgrows them is replaced; scratchpads come last.
  FloatArray memory_of[3];
  size_t floats_of[3] = {};

  float* AtLeast(int which, size_t floats) {
    if (floats_of[which] < floats) {
      memory_of[which].reset();
      memory_of[which] = hwy::AllocateAligned<float>(floats);
      NN_CHECK(memory_of[which] != nullptr);
      floats_of[which] = floats;
    }
    return memory_of[which].get();
  }

  memory::desc Describe(int rows, const ImageShape& shape, Layout layout) const {
    return Images(rows, shape, layout == Layout::kPlain ? memory::format_tag::nchw : native);
  }
};

namespace {

constexpr int kScratchpad = 2;

// A primitive with its operands, whose addresses change from call to call.
class Operation {
 public:
  Operation() = default;
  template <class Description>
  Operation(dnnl::primitive primitive, const Description& description, Session::Impl& session)
      : primitive_(std::move(primitive)),
        session_(&session),
        scratchpad_bytes_(description.scratchpad_desc().get_size()) {
    Operand(DNNL_ARG_SCRATCHPAD, description.scratchpad_desc());
  }

  void Operand(int key, const memory::desc& desc) {
    arguments_.insert_or_assign(key, memory(desc, session_->engine, DNNL_MEMORY_NONE));
  }

  // oneDNN's handles are not const, though an operation only reads its sources.
  void Set(int key, const float* data) { arguments_.at(key).set_data_handle(const_cast<float*>(data)); }

  void Run(std::initializer_list<std::pair<int, const float*>> operands = {}) {
    for (const auto& [key, data] : operands) Set(key, data);
    Set(DNNL_ARG_SCRATCHPAD, session_->AtLeast(kScratchpad, scratchpad_bytes_ / sizeof(float) + 1));
    primitive_.execute(session_->stream, arguments_);
  }

 private:
  dnnl::primitive primitive_;
  Session::Impl* session_ = nullptr;
  size_t scratchpad_bytes_ = 0;
  std::unordered_map<int, memory> arguments_;
};

Operation MakeReorder(Session::Impl& session, const memory::desc& from, const memory::desc& to, bool accumulate) {
  dnnl::primitive_attr attributes = UserScratchpad();
  if (accumulate) {
    dnnl::post_ops ops;
    ops.append_sum(1.0f);
    attributes.set_post_ops(ops);
  }
  const dnnl::reorder::primitive_desc description(session.engine, from, session.engine, to, attributes);
  Operation reorder(dnnl::reorder(description), description, session);
  reorder.Operand(DNNL_ARG_FROM, from);
  reorder.Operand(DNNL_ARG_TO, to);
  return reorder;
}

void RunReorder(Operation& reorder, const float* from, float* to) {
  reorder.Run({{DNNL_ARG_FROM, from}, {DNNL_ARG_TO, to}});
}

FloatArray FloatsFor(const memory::desc& desc) {
  FloatArray floats = hwy::AllocateAligned<float>(desc.get_size() / sizeof(float) + 1);
  NN_CHECK(floats != nullptr);
  return floats;
}

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

// Weights are rearranged for each direction as it likes them: 0.6 ms of a step of ResNet-20 at batch 64, and several
// times that saved.
struct Convolution::Plan {
  SessionPtr session;
  Operation forward, backward_weight, backward_input;
  Operation order_forward, order_input, store_weight, add_weight;
  FloatArray weight;  // as a direction likes it
  FloatArray input_weight, dweight;
  std::vector<float> dbias;
};

Convolution::Convolution(SessionPtr session, const ConvolutionShape& shape, int rows, bool bias, bool relu)
    : plan_(std::make_unique<Plan>()) {
  Plan& plan = *plan_;
  plan.session = std::move(session);
  Session::Impl& impl = plan.session->impl();
  const memory::dims dims = {shape.outputs, shape.in.channels, shape.kernel, shape.kernel};
  const memory::desc plain(dims, memory::data_type::f32, memory::format_tag::oihw);
  const Problem problem = {impl.Describe(rows, shape.in, shape.in_layout),
                           memory::desc(dims, memory::data_type::f32, memory::format_tag::any),
                           bias ? Vector(shape.outputs) : memory::desc(),
                           impl.Describe(rows, shape.out(), Layout::kNative),
                           {shape.stride, shape.stride},
                           {shape.padding, shape.padding}};
  // Measured: it loses with fewer channels.
  const bool winograd = shape.kernel == 3 && shape.stride == 1 && shape.in.channels >= 32;

  const auto forward = Choose(winograd, [&](dnnl::algorithm algorithm, bool allow_empty) {
    return DescribeForward(problem, algorithm, WithRelu(relu), impl.engine, allow_empty);
  });
  const auto weights = Choose(winograd, [&](dnnl::algorithm algorithm, bool allow_empty) {
    return DescribeWeights(problem, algorithm, forward, impl.engine, allow_empty);
  });
  const auto data = Choose(winograd, [&](dnnl::algorithm algorithm, bool allow_empty) {
    return DescribeData(problem, algorithm, forward, impl.engine, allow_empty);
  });

  plan.forward = Operation(dnnl::convolution_forward(forward), forward, impl);
  plan.forward.Operand(DNNL_ARG_SRC, problem.src);
  plan.forward.Operand(DNNL_ARG_WEIGHTS, forward.weights_desc());
  if (bias) plan.forward.Operand(DNNL_ARG_BIAS, problem.bias);
  plan.forward.Operand(DNNL_ARG_DST, problem.dst);
  plan.order_forward = MakeReorder(impl, plain, forward.weights_desc(), false);
  plan.weight = FloatsFor(forward.weights_desc());

  plan.backward_weight = Operation(dnnl::convolution_backward_weights(weights), weights, impl);
  plan.backward_weight.Operand(DNNL_ARG_SRC, problem.src);
  plan.backward_weight.Operand(DNNL_ARG_DIFF_DST, problem.dst);
  plan.backward_weight.Operand(DNNL_ARG_DIFF_WEIGHTS, weights.diff_weights_desc());
  if (bias) plan.backward_weight.Operand(DNNL_ARG_DIFF_BIAS, problem.bias);
  plan.store_weight = MakeReorder(impl, weights.diff_weights_desc(), plain, false);
  plan.add_weight = MakeReorder(impl, weights.diff_weights_desc(), plain, true);
  plan.dweight = FloatsFor(weights.diff_weights_desc());
  if (bias) plan.dbias.resize(static_cast<size_t>(shape.outputs));

  plan.backward_input = Operation(dnnl::convolution_backward_data(data), data, impl);
  plan.backward_input.Operand(DNNL_ARG_DIFF_DST, problem.dst);
  plan.backward_input.Operand(DNNL_ARG_WEIGHTS, data.weights_desc());
  plan.backward_input.Operand(DNNL_ARG_DIFF_SRC, problem.src);
  plan.order_input = MakeReorder(impl, plain, data.weights_desc(), false);
  plan.input_weight = FloatsFor(data.weights_desc());
}

Convolution::~Convolution() = default;

void Convolution::Forward(const float* x, const float* weight, const float* bias, float* y) {
  RunReorder(plan_->order_forward, weight, plan_->weight.get());
  if (bias != nullptr) plan_->forward.Set(DNNL_ARG_BIAS, bias);
  plan_->forward.Run({{DNNL_ARG_SRC, x}, {DNNL_ARG_WEIGHTS, plan_->weight.get()}, {DNNL_ARG_DST, y}});
}

void Convolution::BackwardWeight(const float* x, const float* dy, float* dweight, float* dbias, bool accumulate) {
  Operation& backward = plan_->backward_weight;
  if (dbias != nullptr) backward.Set(DNNL_ARG_DIFF_BIAS, plan_->dbias.data());
  backward.Run({{DNNL_ARG_SRC, x}, {DNNL_ARG_DIFF_DST, dy}, {DNNL_ARG_DIFF_WEIGHTS, plan_->dweight.get()}});
  RunReorder(accumulate ? plan_->add_weight : plan_->store_weight, plan_->dweight.get(), dweight);
  if (dbias == nullptr) return;
  for (size_t i = 0; i < plan_->dbias.size(); ++i) dbias[i] = plan_->dbias[i] + (accumulate ? dbias[i] : 0);
}

void Convolution::BackwardInput(const float* dy, const float* weight, float* dx) {
  RunReorder(plan_->order_input, weight, plan_->input_weight.get());
  plan_->backward_input.Run(
      {{DNNL_ARG_DIFF_DST, dy}, {DNNL_ARG_WEIGHTS, plan_->input_weight.get()}, {DNNL_ARG_DIFF_SRC, dx}});
}

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
  Flags flags = Flags::use_scale | Flags::use_shift;
  if (relu) flags |= Flags::fuse_norm_relu;
  using Forward = dnnl::batch_normalization_forward;
  using Backward = dnnl::batch_normalization_backward;
  const dnnl::primitive_attr attr = UserScratchpad();
#if DNNL_VERSION_MAJOR >= 3
  const Forward::primitive_desc training(impl.engine, prop_kind::forward_training, images, images, eps, flags, attr);
  const Forward::primitive_desc evaluation(impl.engine, prop_kind::forward_inference, images, images, eps,
                                           flags | Flags::use_global_stats, attr);
  const Backward::primitive_desc backward(impl.engine, prop_kind::backward, images, images, images, eps, flags,
                                          training, attr);
#else
  const Forward::primitive_desc training({prop_kind::forward_training, images, eps, flags}, attr, impl.engine);
  const Forward::primitive_desc evaluation({prop_kind::forward_inference, images, eps, flags | Flags::use_global_stats},
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
    for (const int key : {DNNL_ARG_SCALE, DNNL_ARG_SHIFT, DNNL_ARG_MEAN, DNNL_ARG_VARIANCE}) {
      operation->Operand(key, channels);
    }
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
  plan_->backward.Run({{DNNL_ARG_SRC, x},
                       {DNNL_ARG_SCALE, scale},
                       {DNNL_ARG_SHIFT, shift},
                       {DNNL_ARG_MEAN, mean},
                       {DNNL_ARG_VARIANCE, variance},
                       {DNNL_ARG_DIFF_DST, dy},
                       {DNNL_ARG_DIFF_SRC, dx},
                       {DNNL_ARG_DIFF_SCALE, dscale},
                       {DNNL_ARG_DIFF_SHIFT, dshift}});
}

struct Pooling::Plan {
  SessionPtr session;
  Operation forward, backward;
  std::vector<float> workspace;  // which pixel of a window was the largest
};

Pooling::Pooling(SessionPtr session, PoolKind kind, const ImageShape& shape, int kernel_height, int kernel_width,
                 int rows)
    : plan_(std::make_unique<Plan>()) {
  Plan& plan = *plan_;
  plan.session = std::move(session);
  Session::Impl& impl = plan.session->impl();
  const ImageShape out_shape = {shape.channels, shape.height / kernel_height, shape.width / kernel_width};
  const memory::desc in = impl.Describe(rows, shape, Layout::kNative);
  const memory::desc out = impl.Describe(rows, out_shape, Layout::kNative);
  const memory::dims kernel = {kernel_height, kernel_width}, none = {0, 0};
  const auto algorithm =
      kind == PoolKind::kMax ? dnnl::algorithm::pooling_max : dnnl::algorithm::pooling_avg_exclude_padding;
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
  ShareWorkspace(forward.workspace_desc(), plan.forward, plan.backward, plan.workspace);
}

Pooling::~Pooling() = default;

void Pooling::Forward(const float* x, float* y) { plan_->forward.Run({{DNNL_ARG_SRC, x}, {DNNL_ARG_DST, y}}); }

void Pooling::Backward(const float* dy, float* dx) {
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
