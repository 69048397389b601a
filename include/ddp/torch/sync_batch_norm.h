// SPDX-License-Identifier: Apache-2.0
// Batch normalisation over the batches of all ranks.
#ifndef DDP_TORCH_SYNC_BATCH_NORM_H_
#define DDP_TORCH_SYNC_BATCH_NORM_H_

#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/functional/batchnorm.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/pimpl.h>
#include <torch/types.h>

#include <cstdint>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "ddp/process_group.h"
#include "ddp/torch/tensor.h"
#include "ddp/types.h"

namespace ddp {

namespace internal {

// The statistics are float32, or float64 for inputs of float64. On CUDA the passes over the data are LibTorch's own
// kernels for this purpose, which exist there only; on the CPU they are composed of other operations.
class SyncBatchNormFunction : public torch::autograd::Function<SyncBatchNormFunction> {
 public:
  using Tensor = torch::Tensor;
  using Context = torch::autograd::AutogradContext;

  // A tensor that is not defined is none for autograd only so.
  static std::optional<Tensor> Optional(const Tensor& t) {
    return t.defined() ? std::optional<Tensor>(t) : std::optional<Tensor>();
  }

  // input: [N, C, ...], N may be 0 on some ranks. The other tensors: [C]. Throws what the group returns.
  static Tensor forward(Context* context, const Tensor& input, const std::optional<Tensor>& weight_or_none,
                        const std::optional<Tensor>& bias, const std::optional<Tensor>& running_mean,
                        const std::optional<Tensor>& running_var, double eps, double factor, ProcessGroup* group) {
    const Tensor weight = weight_or_none.value_or(Tensor());
    const Tensor x = Dense(input);
    const int64_t channels = x.size(1);
    const Tensor mine = LocalMoments(x, eps);
    const Tensor all = torch::empty({group->size(), 2 * channels + 1}, mine.options());
    Finish(*group, group->AllGather(Memory(mine), Memory(all), CurrentStream(x.device())), x.device());

    // Of means m_r and variances v_r over n_r elements: m = sum(n_r m_r) / n, v = sum(n_r (v_r + (m_r - m)^2)) / n.
    const Tensor means = all.narrow(1, 0, channels), variances = all.narrow(1, channels, channels);
    const Tensor counts = all.narrow(1, 2 * channels, 1), total = counts.sum();
    const Tensor mean = (counts * means).sum(0) / total;
    const Tensor variance = (counts * (variances + (means - mean).square())).sum(0) / total;
    const Tensor invstd = (variance + eps).rsqrt();
    if (running_mean.has_value()) {
      running_mean->lerp_(mean.to(running_mean->scalar_type()), factor);
      const Tensor unbiased = variance * (total / (total - 1).clamp_min(1));
      running_var->lerp_(unbiased.to(running_var->scalar_type()), factor);
    }
    context->save_for_backward({x, weight, mean, invstd, counts.flatten()});
    context->saved_data["group"] = reinterpret_cast<int64_t>(group);
    return Normalize(x, weight, bias.value_or(Tensor()), mean, invstd, eps);
  }

  static torch::autograd::variable_list backward(Context* context, torch::autograd::variable_list grads) {
    const auto saved = context->get_saved_variables();
    const Tensor &x = saved[0], &weight = saved[1], &mean = saved[2], &invstd = saved[3], &counts = saved[4];
    auto& group = *reinterpret_cast<ProcessGroup*>(context->saved_data["group"].toInt());
    const Tensor dy = Dense(grads[0]);
    const Sums sums = LocalSums(dy, x, mean, invstd, weight);
    const Tensor both = torch::cat({sums.dy, sums.dy_xmu});  // xmu: x minus its mean
    Finish(group, group.AllReduce(Memory(both), Memory(both), {}, CurrentStream(x.device())), x.device());
    const int64_t channels = x.size(1);
    const Tensor dx =
        InputGrad(dy, x, mean, invstd, weight, both.narrow(0, 0, channels), both.narrow(0, channels, channels), counts);
    // Those of weight and bias are this rank's: DistributedDataParallel reduces them.
    const Tensor weight_grad = weight.defined() ? sums.weight.to(weight.scalar_type()) : Tensor();
    const Tensor bias_grad = weight.defined() ? sums.dy.to(weight.scalar_type()) : Tensor();
    return {dx, weight_grad, bias_grad, {}, {}, {}, {}, {}};
  }

 private:
  struct Sums {
    Tensor dy, dy_xmu, weight;
  };

  static Buffer Memory(const Tensor& t) { return ddp::BufferOf(t).value(); }

  static void Finish(const ProcessGroup& group, Work work, const torch::Device& device) {
    const absl::Status status = work.BlockStream(CurrentStream(device));
    TORCH_CHECK(status.ok(), "ddp::SyncBatchNorm on rank ", group.rank(), ": ", std::string(status.message()));
  }

  static Tensor Dense(const Tensor& t) { return t.contiguous(t.suggest_memory_format()); }
  static torch::ScalarType StatisticsType(const Tensor& x) {
    return x.scalar_type() == torch::kFloat64 ? torch::kFloat64 : torch::kFloat32;
  }
  static Tensor Wide(const Tensor& x) { return x.to(StatisticsType(x)); }
  static std::vector<int64_t> AllButChannels(const Tensor& x) {
    std::vector<int64_t> dimensions = {0};
    for (int64_t d = 2; d < x.dim(); ++d) dimensions.push_back(d);
    return dimensions;
  }
  // [C] as [1, C, 1, ...].
  static Tensor AsChannels(const Tensor& t, const Tensor& x) {
    std::vector<int64_t> shape(static_cast<size_t>(x.dim()), 1);
    shape[1] = t.numel();
    return t.view(shape);
  }

  // [2 C + 1]: the mean and the variance of each channel, and the number of elements of one.
  static Tensor LocalMoments(const Tensor& x, double eps) {
    const int64_t channels = x.size(1), count = channels == 0 ? 0 : x.numel() / channels;
    const auto options = x.options().dtype(StatisticsType(x));
    if (count == 0) return torch::zeros({2 * channels + 1}, options);
    const Tensor number = torch::full({1}, static_cast<double>(count), options);
    if (x.is_cuda()) {
      const auto [mean, invstd] = torch::batch_norm_stats(x, eps);
      return torch::cat({mean, invstd.square().reciprocal() - eps, number});
    }
    const auto [variance, mean] = torch::var_mean(Wide(x), AllButChannels(x), /*unbiased=*/false);
    return torch::cat({mean, variance, number});
  }

  static Tensor Normalize(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& mean,
                          const Tensor& invstd, double eps) {
    if (x.numel() == 0) return torch::empty_like(x);
    if (x.is_cuda()) return torch::batch_norm_elemt(x, weight, bias, mean, invstd, eps);
    Tensor scale = invstd, shift = -mean * invstd;
    if (weight.defined()) {
      scale = scale * weight;
      shift = shift * weight + bias;
    }
    return torch::addcmul(AsChannels(shift, x), Wide(x), AsChannels(scale, x)).to(x.scalar_type());
  }

  static Sums LocalSums(const Tensor& dy, const Tensor& x, const Tensor& mean, const Tensor& invstd,
                        const Tensor& weight) {
    if (x.numel() == 0) return {torch::zeros_like(mean), torch::zeros_like(mean), torch::zeros_like(mean)};
    if (x.is_cuda()) {
      const auto [sum_dy, sum_dy_xmu, weight_grad, bias_grad] = torch::batch_norm_backward_reduce(
          dy, x, mean, invstd, weight, /*input_g=*/true, /*weight_g=*/weight.defined(), /*bias_g=*/false);
      return {sum_dy, sum_dy_xmu, weight_grad};
    }
    const Tensor sum_dy = Wide(dy).sum(AllButChannels(x));
    const Tensor sum_dy_xmu = (Wide(dy) * (Wide(x) - AsChannels(mean, x))).sum(AllButChannels(x));
    return {sum_dy, sum_dy_xmu, sum_dy_xmu * invstd};
  }

  // dx = weight * invstd * (dy - sum_dy / n - (x - mean) * invstd^2 * sum_dy_xmu / n), with sums over all ranks.
  static Tensor InputGrad(const Tensor& dy, const Tensor& x, const Tensor& mean, const Tensor& invstd,
                          const Tensor& weight, const Tensor& sum_dy, const Tensor& sum_dy_xmu, const Tensor& counts) {
    if (x.numel() == 0) return torch::empty_like(x);
    if (x.is_cuda()) {
      return torch::batch_norm_backward_elemt(dy, x, mean, invstd, weight, sum_dy, sum_dy_xmu,
                                              counts.to(torch::kInt32));
    }
    const Tensor total = counts.sum();
    const Tensor slope = invstd.square() * sum_dy_xmu / total;
    const Tensor centred =
        Wide(dy) - AsChannels(sum_dy / total, x) - (Wide(x) - AsChannels(mean, x)) * AsChannels(slope, x);
    return (centred * AsChannels(weight.defined() ? invstd * weight : invstd, x)).to(x.scalar_type());
  }
};

}  // namespace internal

// torch::nn::BatchNorm1d, 2d and 3d with the mean and variance of the batches of all ranks together, for batches that
// are too small alone. In training, each forward pass is an all-gather of 2 C + 1 numbers and each backward pass an
// all-reduce of 2 C, for C channels: all ranks run them in the same order. Gradients and running statistics are the
// same as with one batch on one rank, to rounding. A rank's batch may have another size, or be empty. In evaluation,
// and in a world of one, it is LibTorch's batch norm: without running statistics it takes those of the rank's batch.
// Names and state are those of BatchNorm2d: each loads the other's.
//
//   struct Net : torch::nn::Module {
//     explicit Net(ddp::ProcessGroup& group) : norm(torch::nn::BatchNormOptions(64), group) {
//       register_module("norm", norm);
//     }
//     ddp::SyncBatchNorm norm;
//   };
//
// Input: [N, C, ...] on the CPU, or on the group's GPU. The group is the model's, or another one of the same ranks,
// which the model is told to watch (DistributedDataParallel::Watch); it must outlive the module and the graphs of its
// outputs. As LibTorch's modules do, forward and backward throw c10::Error; a failed operation of the group is one,
// whose text says why. Thread-safety: one thread at a time.
class SyncBatchNormImpl : public torch::nn::NormImplBase<2, SyncBatchNormImpl, torch::nn::BatchNormOptions> {
 public:
  // Exchanges statistics in `group`.
  SyncBatchNormImpl(const torch::nn::BatchNormOptions& batch_norm_options, ProcessGroup& group)
      : NormImplBase(batch_norm_options), group_(&group) {}

  // Normalises the batch. Collective in training.
  torch::Tensor forward(const torch::Tensor& input) {
    _check_input_dim(input);
    const bool batch_statistics = is_training() || !options.track_running_stats();
    double factor = options.momentum().value_or(0);
    if (is_training() && options.track_running_stats()) {
      num_batches_tracked += 1;
      if (!options.momentum().has_value()) factor = 1 / num_batches_tracked.item<double>();  // of all batches so far
    }
    if (is_training() && group_->size() > 1) {
      using Function = internal::SyncBatchNormFunction;
      return Function::apply(input, Function::Optional(weight), Function::Optional(bias),
                             Function::Optional(running_mean), Function::Optional(running_var), options.eps(), factor,
                             group_);
    }
    return torch::nn::functional::detail::batch_norm(input, running_mean, running_var, weight, bias, batch_statistics,
                                                     factor, options.eps());
  }

  // The line of this module in a printed model.
  void pretty_print(std::ostream& stream) const override {
    stream << "ddp::SyncBatchNorm(" << options.num_features() << ", ranks=" << group_->size() << ")";
  }

 protected:
  // Throws unless the input has the right number of channels.
  void _check_input_dim(const torch::Tensor& input) override {
    TORCH_CHECK(input.dim() >= 2 && input.size(1) == options.num_features(), "ddp::SyncBatchNorm: expected [N, ",
                options.num_features(), ", ...], got ", input.sizes());
  }

 private:
  ProcessGroup* group_;
};
TORCH_MODULE(SyncBatchNorm);

}  // namespace ddp

#endif  // DDP_TORCH_SYNC_BATCH_NORM_H_
