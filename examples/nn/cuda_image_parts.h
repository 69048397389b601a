// SPDX-License-Identifier: Apache-2.0
// The layers with weights of the GPU's convolutional models, of which blocks consist.
#ifndef EXAMPLES_NN_CUDA_IMAGE_PARTS_H_
#define EXAMPLES_NN_CUDA_IMAGE_PARTS_H_

#include <cstddef>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "examples/nn/check.h"
#include "examples/nn/cuda_image_kernels.h"
#include "examples/nn/cuda_memory.h"
#include "examples/nn/cudnn.h"
#include "examples/nn/cudnn_convolution.h"
#include "examples/nn/device.h"
#include "examples/nn/image_layers.h"
#include "examples/nn/moments.h"
#include "examples/nn/per_rows.h"
#include "examples/nn/sync_group.h"
#include "examples/nn/weighted_layer.h"

namespace nn::cuda {

inline void Launched(cudaError_t error) { Check(error, "a kernel"); }

// What the layers of one model share, since they run one after the other.
class Session {
 public:
  Session(cudnn::Context& context, int most_processors)
      : cudnn(context), stream(context.stream), element(context.options.element), processors(most_processors) {
    tickets_ = AllocateBytes<unsigned>(kColumnTickets * sizeof(unsigned), stream);
  }

  // Of one image's numbers.
  size_t Elements(const ImageShape& shape) const {
    return static_cast<size_t>(shape.channels) * static_cast<size_t>(shape.height * shape.width);
  }
  int Floats(size_t elements) const { return static_cast<int>((elements * SizeOf(element) + 3) / 4); }
  std::shared_ptr<void> Allocate(size_t elements) const { return AllocateBytes(elements * SizeOf(element), stream); }
  std::shared_ptr<ReluBits> AllocateRelu(size_t elements) const {
    return AllocateBytes<ReluBits>(elements * SizeOf(element) / 16, stream);
  }
  // The number of channels that fills vectors of 16 bytes.
  int Padded(int channels) const {
    const int vector = 16 / static_cast<int>(SizeOf(element));
    return (channels + vector - 1) / vector * vector;
  }

  // That take these activations without more being lost than the user allows.
  bool HasTensorCores() const { return element != Element::kFloat32 || cudnn.options.tf32; }

  // Before the first step, by every layer that needs them: what Scratch and Temporary hand out.
  void ReserveScratch(int channels) { ReserveSums(ColumnScratchFloats(channels)); }
  void ReserveSums(size_t floats) {
    if (floats <= sums_floats_) return;
    sums_floats_ = floats;
    sums_ = AllocateFloats(floats, stream);
  }
  ColumnScratch Scratch() const { return {sums_.get(), tickets_.get()}; }
  static constexpr int kTemporaries = 4;
  void ReserveTemporary(int which, size_t elements) {
    if (elements <= temporary_elements_[which]) return;
    temporary_elements_[which] = elements;
    temporaries_[which] = Allocate(elements);
  }
  void* Temporary(int which) const { return temporaries_[which].get(); }

  cudnn::Context& cudnn;
  const cudaStream_t stream;
  const Element element;
  const int processors;  // of the GPU, as MakeImageLayers has it

 private:
  std::shared_ptr<unsigned> tickets_;
  std::shared_ptr<float> sums_;
  size_t sums_floats_ = 0;
  std::shared_ptr<void> temporaries_[kTemporaries];
  size_t temporary_elements_[kTemporaries] = {};
};

using SessionPtr = std::shared_ptr<Session>;

// Not every plan of cuDNN's serves every shape and demand.
inline void Planned(bool has_plan) {
  if (has_plan) return;
  throw DeviceError(
      "cuDNN has no plan for a convolution of this model; give a smaller --batch, leave out --deterministic, or give "
      "--tf32");
}

inline constexpr int kBlockTemporary = 0;  // and the next one
inline constexpr int kWeightGradTemporary = 2;
inline constexpr int kShortcutTemporary = 3;

class GpuConv2d final : public WeightedLayer {
 public:
  GpuConv2d(SessionPtr session, const Conv2dOptions& o, int max_batch)
      : WeightedLayer({o.outputs, o.in.channels, o.kernel, o.kernel}, int64_t{o.in.channels} * o.kernel * o.kernel,
                      o.bias, static_cast<int64_t>(Pixels(1, o.out()))),
        session_(std::move(session)),
        options_(o),
        max_batch_(max_batch),
        fold_(o.in_layout == Layout::kPlain && o.kernel >= o.stride ? o.stride : 1),
        weight_shape_{o.outputs, o.in.channels, o.kernel, fold_, session_->Padded(o.in.channels * fold_ * fold_)},
        small_(o.in_layout == Layout::kPlain && o.stride == 1 && session_->processors > 0 &&
               o.in.channels < weight_shape_.padded && IsSmallConvolution(Small())),
        narrow_forward_(HasNarrow(HasNarrowForward)),
        narrow_input_grad_(HasNarrow(HasNarrowInputGrad)),
        narrow_weight_grad_(HasNarrow(HasNarrowWeightGrad)) {
    NN_CHECK(o.in_layout == Layout::kPlain || weight_shape_.padded == o.in.channels);
    NN_CHECK(session_->Padded(o.outputs) == o.outputs);
    packed_weight_ = session_->Allocate(weight_shape_.packed_count());
    session_->ReserveTemporary(kWeightGradTemporary, weight_shape_.packed_count());
    session_->ReserveScratch(o.outputs);
    if (narrow_weight_grad_) session_->ReserveSums(NarrowWeightGradFloats(Narrow()));
    if (small_) session_->ReserveSums(SmallConvolutionFloats(Small()));
    if (o.in_layout == Layout::kPlain) {
      packed_x_ = session_->Allocate(static_cast<size_t>(max_batch) * Packing().count());
    }
  }

  int input_size() const override {
    const size_t elements = session_->Elements(options_.in);
    return options_.in_layout == Layout::kPlain ? static_cast<int>(elements) : session_->Floats(elements);
  }
  int output_size() const override { return session_->Floats(session_->Elements(options_.out())); }

  void Forward(const float* x, float* y, int rows) override {
    NN_CHECK(weight_ != nullptr);
    if (packed_x_ != nullptr) {
      Launched(PackImages(session_->element, x, rows, Packing(), packed_x_.get(), session_->stream));
    }
    if (small_) {
      Launched(SmallConvolutionForward(session_->element, Small(), packed_x_.get(), weight_,
                                       options_.bias ? bias_ : nullptr, options_.activation == Activation::kRelu, rows,
                                       y, session_->stream));
      return;
    }
    if (!narrow_forward_ || !narrow_input_grad_) {
      Launched(PackWeight(session_->element, weight_, weight_shape_, packed_weight_.get(), session_->stream));
    }
    if (narrow_forward_) {
      Launched(NarrowForward(session_->element, Narrow(), x, weight_, options_.bias ? bias_ : nullptr,
                             options_.activation == Activation::kRelu, rows, y, session_->stream));
      return;
    }
    Passes& passes = PassesFor(rows);
    const cudnn::Tensors tensors = {Input(x), packed_weight_.get(), y};
    if (!options_.bias) {
      Planned(passes.forward.Run(tensors));
    } else if (cudnn::Tensors with_bias = tensors; with_bias.added = bias_, !passes.fused.Run(with_bias)) {
      Planned(passes.forward.Run(tensors));
      Launched(AddBias(session_->element, y, Pixels(rows, options_.out()), options_.outputs, bias_,
                       options_.activation == Activation::kRelu, session_->stream));
    }
  }

  // Without a bias. Returns whether it has also written `sums` [2, outputs], of y and of its square. It does so where
  // that makes it faster together with normalise(sums), which without them gets null. Only trials call it.
  bool Forward(const float* x, float* y, int rows, float* sums, absl::FunctionRef<void(const float*)> normalise) {
    NN_CHECK(!options_.bias && packed_x_ == nullptr);
    if (narrow_forward_) {
      Forward(x, y, rows);
      return false;
    }
    Launched(PackWeight(session_->element, weight_, weight_shape_, packed_weight_.get(), session_->stream));
    Passes& passes = PassesFor(rows);
    const void* const w = packed_weight_.get();
    const auto with_sums = [&] {
      return passes.forward_sums.Run({.x = x, .w = w, .y = y, .sums = sums, .squares = sums + options_.outputs});
    };
    const auto plain = [&] { Planned(passes.forward.Run({x, w, y})); };
    if (!passes.sums_at_once.has_value()) {
      const auto together = [&] {
        if (!with_sums()) return false;
        normalise(sums);
        return true;
      };
      const auto apart = [&] {
        plain();
        normalise(nullptr);
      };
      passes.sums_at_once = session_->cudnn.IsFaster(cudnn::Pass::kForwardSums, passes.shape, together, apart);
    }
    if (*passes.sums_at_once && with_sums()) return true;
    plain();
    return false;
  }

  void Backward(const float* x, const float* y, float* dy, float* dx, int rows, bool accumulate,
                GradReadyFn grad_ready) override {
    Backward(x, y, dy, nullptr, dx, rows, accumulate, grad_ready);
  }
  // With `added` [rows, input_size()] added to dx, unless it is null.
  void Backward(const float* x, const float* y, float* dy, const float* added, float* dx, int rows, bool accumulate,
                GradReadyFn grad_ready) {
    if (options_.bias) {
      Launched(BiasGrad(session_->element, options_.activation == Activation::kRelu ? y : nullptr, dy,
                        Pixels(rows, options_.out()), options_.outputs, accumulate, bias_grad_, session_->Scratch(),
                        session_->stream));
      grad_ready(1);
    }
    NN_CHECK(dx == nullptr || packed_x_ == nullptr);  // not of a model's input
    if (small_) {
      Launched(SmallConvolutionWeightGrad(session_->element, Small(), packed_x_.get(), dy, rows, accumulate,
                                          weight_grad_, session_->processors, session_->Scratch().sums,
                                          session_->stream));
      grad_ready(0);
      return;
    }
    WeightGrad(x, dy, rows, accumulate);
    grad_ready(0);
    if (dx != nullptr) InputGrad(dy, added, dx, rows);
  }

 private:
  struct Passes {
    Passes(cudnn::Context& context, const cudnn::ConvolutionShape& of, bool relu)
        : shape(of),
          forward(context, cudnn::Pass::kForward, shape),
          fused(context, relu ? cudnn::Pass::kForwardBiasRelu : cudnn::Pass::kForwardBias, shape),
          input_grad(context, cudnn::Pass::kInputGrad, shape),
          input_grad_added(context, cudnn::Pass::kInputGradAdded, shape),
          weight_grad(context, cudnn::Pass::kWeightGrad, shape),
          forward_sums(context, cudnn::Pass::kForwardSums, shape) {}

    const cudnn::ConvolutionShape shape;
    cudnn::Convolution forward, fused, input_grad, input_grad_added, weight_grad, forward_sums;
    std::optional<bool> sums_at_once, added_at_once;  // whether one launch is faster, once it is known
  };

  Passes& PassesFor(int rows) {
    NN_CHECK(rows > 0 && rows <= max_batch_);
    return passes_.Get(rows, [&] {
      const Conv2dOptions& o = options_;
      // A ReLU without a bias is none of these layers'.
      NN_CHECK(o.bias || o.activation == Activation::kNone);
      const ImagePacking x = Packing();
      const cudnn::ConvolutionShape shape = {
          rows, x.padded, x.height, x.width, o.outputs, weight_shape_.taps(), o.stride / fold_, o.padding - x.padding};
      return std::make_unique<Passes>(session_->cudnn, shape, o.activation == Activation::kRelu);
    });
  }
  void InputGrad(const float* dy, const float* added, float* dx, int rows) {
    if (narrow_input_grad_) {
      Launched(NarrowInputGrad(session_->element, Narrow(), dy, weight_, added, rows, dx, session_->stream));
      return;
    }
    Passes& passes = PassesFor(rows);
    const auto plain = [&] { Planned(passes.input_grad.Run({dx, packed_weight_.get(), dy})); };
    if (added == nullptr) {
      plain();
      return;
    }
    const auto together = [&] { return passes.input_grad_added.Run({dx, packed_weight_.get(), dy, added}); };
    const auto apart = [&] {
      plain();
      Launched(Add(session_->element, added, static_cast<size_t>(rows) * session_->Elements(options_.in), dx,
                   session_->stream));
    };
    if (!passes.added_at_once.has_value()) {
      passes.added_at_once = session_->cudnn.IsFaster(cudnn::Pass::kInputGradAdded, passes.shape, together, apart);
    }
    if (!*passes.added_at_once || !together()) apart();
  }
  void WeightGrad(const float* x, const float* dy, int rows, bool accumulate) {
    if (narrow_weight_grad_) {
      Launched(NarrowWeightGrad(session_->element, Narrow(), x, dy, rows, accumulate, weight_grad_,
                                session_->Scratch().sums, session_->stream));
      return;
    }
    void* const packed_grad = session_->Temporary(kWeightGradTemporary);
    Planned(PassesFor(rows).weight_grad.Run({Input(x), packed_grad, dy}));
    Launched(UnpackGrad(session_->element, packed_grad, weight_shape_, accumulate, weight_grad_, session_->stream));
  }

  ImagePacking Packing() const {
    const ImageShape in = options_.in, out = options_.out();
    if (fold_ == 1) return {in, 1, 0, in.height, in.width, weight_shape_.padded};
    const int more = weight_shape_.taps() - 1;
    return {in, fold_, options_.padding, out.height + more, out.width + more, weight_shape_.padded};
  }
  SmallConvolution Small() const { return {options_.in, options_.out(), options_.kernel, options_.padding}; }
  bool HasNarrow(bool (*has)(Element, const NarrowConvolution&)) const {
    return options_.kernel == 3 && options_.in_layout == Layout::kNative && session_->HasTensorCores() &&
           has(session_->element, Narrow());
  }
  NarrowConvolution Narrow() const { return {options_.in, options_.out(), options_.stride, options_.padding}; }
  const void* Input(const float* x) const { return packed_x_ != nullptr ? packed_x_.get() : x; }

  SessionPtr session_;
  const Conv2dOptions options_;
  const int max_batch_;
  const int fold_;
  const WeightShape weight_shape_;
  const bool small_;                                                    // a SmallConvolution
  const bool narrow_forward_, narrow_input_grad_, narrow_weight_grad_;  // passes of a NarrowConvolution
  std::shared_ptr<void> packed_weight_;
  std::shared_ptr<void> packed_x_;  // of a plain input
  PerRows<Passes> passes_;
};

class GpuBatchNorm2d final : public WeightedLayer {
 public:
  GpuBatchNorm2d(SessionPtr session, const ImageShape& shape, Activation activation)
      : WeightedLayer(shape.channels),
        session_(std::move(session)),
        shape_(shape),
        relu_(activation == Activation::kRelu) {
    NN_CHECK(session_->Padded(shape.channels) == shape.channels);
    session_->ReserveScratch(shape.channels);
    numbers_ = AllocateFloats(6 * channels(), session_->stream);
    const std::vector<float> ones(channels(), 1.0f);
    Check(cudaMemcpyAsync(running_var(), ones.data(), ones.size() * sizeof(float), cudaMemcpyHostToDevice,
                          session_->stream),
          "cudaMemcpyAsync");
    Check(cudaStreamSynchronize(session_->stream), "cudaStreamSynchronize");
  }

  int input_size() const override { return session_->Floats(session_->Elements(shape_)); }
  int output_size() const override { return input_size(); }
  std::vector<LayerBuffer> buffers() override {
    return {{"running_mean", {shape_.channels}, {running_mean(), channels()}},
            {"running_var", {shape_.channels}, {running_var(), channels()}}};
  }
  void SetTraining(bool training) override { training_ = training; }
  void Synchronize(SyncGroup* group) override {
    group_ = group != nullptr && group->size() > 1 ? group : nullptr;
    if (group_ == nullptr) return;
    told_ = AllocateFloats((1 + static_cast<size_t>(group->size())) * MomentFloats(channels()) + 1, session_->stream);
  }

  void Forward(const float* x, float* y, int rows) override { Forward(x, nullptr, nullptr, y, nullptr, rows); }
  // `given_sums`: as in BatchNormMoments. `shortcut`, `passed`: as in BatchNormForward. A ReLU follows a shortcut.
  void Forward(const void* x, const float* given_sums, const Shortcut* shortcut, void* y, ReluBits* passed, int rows) {
    NN_CHECK(weight_ != nullptr);
    const BatchNormApply apply = Apply(relu_ || shortcut != nullptr);
    if (training_ && group_ == nullptr) CheckBatchNormCanTrain(rows, shape_);
    if (training_ && AtOnce(rows)) {
      Launched(BatchNormForwardOnce(session_->element, x, Pixels(rows, shape_), shape_.channels, kBatchNormEpsilon,
                                    kBatchNormMomentum, moments(), {running_mean(), running_var()}, apply, shortcut, y,
                                    passed, session_->processors, session_->Scratch(), session_->stream));
      return;
    }
    if (training_ && group_ != nullptr) {
      MomentsTogether(x, rows);
    } else if (training_) {
      SetMoments(x, given_sums, rows, kBatchNormMomentum);
    }
    Launched(BatchNormForward(session_->element, x, Pixels(rows, shape_), shape_.channels, apply, shortcut, y,
                              training_ ? passed : nullptr, session_->stream));
  }

  void Backward(const float* x, const float*, float* dy, float* dx, int rows, bool accumulate,
                GradReadyFn grad_ready) override {
    Backward(relu_ ? ReluMask::kOwn : ReluMask::kNone, x, nullptr, dy, dx, rows, accumulate, grad_ready);
  }
  // `passed`: as `mask` needs it.
  void Backward(ReluMask mask, const void* x, const ReluBits* passed, void* dy, void* dx, int rows, bool accumulate,
                GradReadyFn grad_ready) {
    NN_CHECK(training_);
    const size_t pixels = Pixels(rows, shape_);
    const BatchNormApply apply = Apply(relu_);
    if (dx != nullptr && AtOnce(rows)) {
      Launched(BatchNormBackwardOnce(session_->element, x, mask, passed, dy, pixels, shape_.channels, apply, accumulate,
                                     weight_grad_, bias_grad_, dx, session_->processors, session_->Scratch(),
                                     session_->stream));
      grad_ready(1);
      grad_ready(0);
      return;
    }
    Launched(BatchNormGrads(session_->element, x, mask, passed, dy, pixels, shape_.channels, apply, accumulate,
                            weight_grad_, bias_grad_, sums(), session_->Scratch(), session_->stream));
    grad_ready(1);
    grad_ready(0);
    if (dx == nullptr) return;
    if (group_ != nullptr) group_->Sum(sums(), 2 * channels());
    Launched(BatchNormBackward(session_->element, x, mask, dy, pixels, shape_.channels, apply, sums(),
                               group_ != nullptr ? Count() : nullptr, dx, session_->stream));
  }

  // Whether Forward wants sums of x and of its square.
  bool WantsSums(int rows) const { return training_ && group_ == nullptr && !AtOnce(rows); }
  // Takes as long as what Forward does with these sums, or without them, and changes nothing that lasts.
  void TryMoments(const void* x, const float* given_sums, int rows) { SetMoments(x, given_sums, rows, 0); }
  // Memory for them.
  float* sums() const { return numbers_.get() + 4 * channels(); }

 private:
  void SetMoments(const void* x, const float* given_sums, int rows, float momentum) {
    Launched(BatchNormMoments(session_->element, x, given_sums, Pixels(rows, shape_), shape_.channels,
                              kBatchNormEpsilon, momentum, moments(), {running_mean(), running_var()},
                              session_->Scratch(), session_->stream));
  }
  BatchNormApply Apply(bool relu) const {
    return {.mean = training_ ? moments().mean : running_mean(),
            .rstd = training_ ? moments().rstd : running_var(),
            .eps = training_ ? 0 : kBatchNormEpsilon,
            .weight = weight_,
            .bias = bias_,
            .relu = relu};
  }
  // Whether each direction is one launch.
  bool AtOnce(int rows) const {
    return group_ == nullptr &&
           BatchNormFits(session_->element, Pixels(rows, shape_), shape_.channels, session_->processors);
  }
  // Of the batches of all ranks.
  void MomentsTogether(const void* x, int rows) {
    const size_t floats = MomentFloats(channels());
    float* const mine = told_.get();
    float* const all = mine + floats;
    Launched(BatchNormTell(session_->element, x, Pixels(rows, shape_), shape_.channels, mine, session_->Scratch(),
                           session_->stream));
    group_->Gather(mine, floats, all);
    Launched(BatchNormMerge(all, group_->size(), shape_.channels, kBatchNormEpsilon, kBatchNormMomentum, moments(),
                            {running_mean(), running_var()}, Count(), session_->stream));
  }

  size_t channels() const { return static_cast<size_t>(shape_.channels); }
  // Of a channel's values in the batches of all ranks.
  float* Count() const { return told_.get() + (1 + static_cast<size_t>(group_->size())) * MomentFloats(channels()); }
  float* running_mean() const { return numbers_.get(); }
  float* running_var() const { return numbers_.get() + channels(); }
  BatchMoments moments() const { return {numbers_.get() + 2 * channels(), numbers_.get() + 3 * channels()}; }

  SessionPtr session_;
  const ImageShape shape_;
  const bool relu_;
  bool training_ = true;
  std::shared_ptr<float> numbers_;  // the running statistics, the batch's, and sums of either pass
  SyncGroup* group_ = nullptr;      // if it is synchronised
  std::shared_ptr<float> told_;     // what this rank tells of its batch, what all ranks do, and their count of values
};

// The blocks of residual networks; see the CPU classes of the same names.
std::unique_ptr<Layer> MakeBasicBlock(const SessionPtr& session, const BasicBlockOptions& options, int max_batch);
std::unique_ptr<Layer> MakeBottleneck(const SessionPtr& session, const BottleneckOptions& options, int max_batch);

}  // namespace nn::cuda

#endif  // EXAMPLES_NN_CUDA_IMAGE_PARTS_H_
