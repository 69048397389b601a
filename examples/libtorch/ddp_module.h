// DistributedDataParallel for a torch::nn::Module. LibTorch itself has none for C++.
#ifndef EXAMPLES_LIBTORCH_DDP_MODULE_H_
#define EXAMPLES_LIBTORCH_DDP_MODULE_H_

#include <memory>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "ddp/ddp.h"
#include "torch/torch.h"

namespace examples {

// Trains the parameters of `module` that require gradients on all ranks of `group`. Parameters stay in LibTorch's
// memory, and start with rank 0's values on all ranks. Gradients become views of memory that the group reduces in
// place. Autograd accumulates into them; when it has accumulated a gradient, the reduction may start.
//
// Zero the gradients with ddp().ZeroGrad() or optimizer.zero_grad(false). zero_grad() releases them; autograd then
// allocates new tensors, which are copied. This is correct, but slower. The group and the module must outlive this
// object. Thread-safety: one thread at a time.
class DdpModule {
 public:
  static absl::StatusOr<std::unique_ptr<DdpModule>> Create(ddp::ProcessGroup& group, torch::nn::Module& module,
                                                           const ddp::DdpOptions& options = {}) {
    std::vector<torch::Tensor> tensors;
    std::vector<ddp::Parameter> parameters;
    for (const auto& named : module.named_parameters()) {
      const torch::Tensor& t = named.value();
      if (!t.requires_grad()) continue;
      ddp::Buffer value = {t.data_ptr(), static_cast<size_t>(t.numel()), ddp::DType::kFloat32, {}};
      if (t.scalar_type() == torch::kFloat64) value.dtype = ddp::DType::kFloat64;
      if (t.scalar_type() == torch::kFloat16) value.dtype = ddp::DType::kFloat16;
      if (t.scalar_type() == torch::kBFloat16) value.dtype = ddp::DType::kBFloat16;
      if (!t.device().is_cpu() || !t.is_contiguous() || size_t(t.element_size()) != ddp::SizeOf(value.dtype)) {
        return absl::InvalidArgumentError("parameter '" + named.key() + "' must be contiguous floats on the CPU");
      }
      parameters.push_back({named.key(), t.sizes().vec(), value, {}});
      tensors.push_back(t);
    }
    auto model = ddp::DistributedDataParallel::Create(group, parameters, options);
    if (!model.ok()) return model.status();
    return std::unique_ptr<DdpModule>(new DdpModule(*std::move(model), std::move(tensors)));
  }

  ~DdpModule() {
    for (torch::Tensor& t : tensors_) {
      torch::autograd::impl::set_post_acc_grad_hooks(t, nullptr);
      t.mutable_grad().reset();
    }
  }
  DdpModule(const DdpModule&) = delete;
  DdpModule& operator=(const DdpModule&) = delete;

  // Call FinishBackward after loss.backward().
  ddp::DistributedDataParallel& ddp() { return *model_; }

 private:
  // Called by autograd when it has accumulated all contributions to a parameter's gradient. (A tensor hook from
  // register_hook would be called earlier.)
  struct Announce final : torch::autograd::PostAccumulateGradHook {
    Announce(ddp::DistributedDataParallel* m, size_t i, torch::Tensor g) : model(m), index(i), view(std::move(g)) {}
    void operator()(const torch::Tensor& parameter) override {
      if (parameter.grad().data_ptr() != view.data_ptr()) {
        torch::NoGradGuard no_grad;
        view.copy_(parameter.grad());
        parameter.mutable_grad() = view;
      }
      model->GradReady(index);
    }
    ddp::DistributedDataParallel* model;
    size_t index;
    torch::Tensor view;
  };

  DdpModule(std::unique_ptr<ddp::DistributedDataParallel> model, std::vector<torch::Tensor> tensors)
      : model_(std::move(model)), tensors_(std::move(tensors)) {
    for (size_t i = 0; i < tensors_.size(); ++i) {
      torch::Tensor view = torch::from_blob(model_->grad(i).data, tensors_[i].sizes(), tensors_[i].options());
      tensors_[i].mutable_grad() = view;
      torch::autograd::impl::set_post_acc_grad_hooks(tensors_[i], std::make_unique<Announce>(model_.get(), i, view));
    }
  }

  std::unique_ptr<ddp::DistributedDataParallel> model_;
  std::vector<torch::Tensor> tensors_;
};

}  // namespace examples

#endif  // EXAMPLES_LIBTORCH_DDP_MODULE_H_
