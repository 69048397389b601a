// SPDX-License-Identifier: Apache-2.0
// DistributedDataParallel for a torch::nn::Module.
#ifndef DDP_TORCH_DDP_MODULE_H_
#define DDP_TORCH_DDP_MODULE_H_

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "ddp/collectives.h"
#include "ddp/distributed_data_parallel.h"
#include "ddp/process_group.h"
#include "ddp/torch/tensor.h"
#include "ddp/types.h"

namespace ddp {

// Trains a torch::nn::Module on all ranks of a group, on CPUs or GPUs. Parameters and buffers stay in LibTorch's memory
// and start with rank 0's values on all ranks. Gradients become views of memory that the group reduces in place;
// autograd accumulates into them. When it has accumulated one, its reduction may start, while the backward pass goes
// on.
//
//   net->to(device);  // first: the module must not move afterwards
//   auto model = ddp::DdpModule::Create((*context)->world(), *net);
//   if (!model.ok()) return model.status();
//   torch::optim::SGD optimizer(net->parameters(), 0.1);
//   for (...) {
//     if (absl::Status s = (*model)->BeginForward(); !s.ok()) return s;  // rank 0's buffers
//     torch::Tensor loss = Loss(net->forward(images), labels);
//     (*model)->ZeroGrad();
//     loss.backward();                                                      // gradients are reduced meanwhile
//     if (absl::Status s = (*model)->FinishBackward(); !s.ok()) return s;  // and are averages now
//     optimizer.step();
//   }
//
//   - Tied weights, which the module has under several names, are one parameter, of the first name.
//   - Parameters that do not require gradients are frozen: copied from rank 0, not reduced. See UpdateFrozen.
//   - Any memory format whose elements lie densely (channels-last), the same on all ranks. Gradients get that of their
//     parameter.
//   - optimizer.zero_grad() releases the gradients; autograd then makes new ones, which are copied into the library's
//     memory in each step. It may be used where every parameter gets a gradient in every step.
//   - Sparse gradients (of an embedding) are reduced densely. Gradients have no graph of their own: no double backward.
//
// On a GPU, everything is submitted to the stream that is LibTorch's current one in the calling thread, and hooks to
// autograd's. The host does not wait: as FinishBackward of DistributedDataParallel says, a reduction that fails after
// the return is reported by the next call. Use ddp().FinishBackward(ddp::kNoStream) to wait for it.
//
// The group and the module must outlive this object. When it is destroyed, the parameters have no gradients.
// Thread-safety: one thread at a time; backward() may run hooks in autograd's threads.
class DdpModule {
 public:
  // Collective. `options.buffers` may name state besides the module's own buffers, which are added. Errors, on all
  // ranks: InvalidArgument names a parameter or buffer whose elements overlap or leave gaps in memory, or that is
  // neither on a CPU nor on a CUDA device, and a complex parameter that requires a gradient; FailedPrecondition if
  // ranks differ (in the memory format, too); and those of DistributedDataParallel::Create.
  static absl::StatusOr<std::unique_ptr<DdpModule>> Create(ProcessGroup& group, torch::nn::Module& module,
                                                           DdpOptions options = {}) {
    std::unique_ptr<DdpModule> result(new DdpModule());
    absl::Status mine = result->Collect(module, options);
    if (absl::Status s = result->AgreeOnFormats(group, mine); !s.ok()) return s;
    auto model = DistributedDataParallel::Create(group, result->Parameters(), options);
    if (!model.ok()) return model.status();
    result->model_ = *std::move(model);
    result->Attach();
    return result;
  }

  ~DdpModule() { Detach(); }
  DdpModule(const DdpModule&) = delete;
  DdpModule& operator=(const DdpModule&) = delete;

  // Call it before the forward pass. Copies rank 0's buffers, such as running statistics, to all ranks
  // (DdpOptions::broadcast_buffers). FailedPrecondition names a parameter or buffer that lies elsewhere than in Create.
  absl::Status BeginForward() {
    const absl::Status status = model_->BeginForward(stream());
    return status.ok() ? CheckPlaces() : status;
  }

  // Sets all gradients to zero.
  void ZeroGrad() { model_->ZeroGrad(stream()); }

  // Call it after backward(). Afterwards, on a GPU in the order of the current stream, gradients are reduced.
  // Errors: those of DistributedDataParallel::FinishBackward and of BeginForward. FailedPrecondition names a parameter
  // that has no gradient because zero_grad() has released it and this backward pass did not use it.
  absl::Status FinishBackward() {
    if (absl::Status s = model_->FinishBackward(stream()); !s.ok()) return s;
    for (const Tensor& t : tensors_) {
      if (!t.grad.defined() || t.value.grad().defined()) continue;
      return absl::FailedPreconditionError(
          absl::StrCat("parameter '", t.name,
                       "' has no gradient: zero_grad() has released it, and this backward pass did not use it; where "
                       "parameters may be unused, call DdpModule::ZeroGrad()"));
    }
    return CheckPlaces();
  }

  // Collective, between steps: call it when requires_grad of parameters has changed. Those that do not require
  // gradients are frozen from now on, the others are trained. Errors: InvalidArgument names a complex parameter that
  // requires a gradient; those of DistributedDataParallel::SetParameters.
  absl::Status UpdateFrozen() {
    if (absl::Status s = CheckUntrained(); !s.ok()) return s;
    if (absl::Status s = model_->SetParameters(Parameters()); !s.ok()) return s;
    Attach();
    return absl::OkStatus();
  }

  // For everything else: NoSync, Join, ClipGradNorm, statistics ... What takes a stream wants stream(). Parameters have
  // the order of module.named_parameters(), frozen ones included.
  DistributedDataParallel& ddp() { return *model_; }

  // LibTorch's current stream on the module's device, in the calling thread.
  Stream stream() const { return CurrentStream(tensors_.front().value.device()); }

 private:
  struct Tensor {
    std::string name;
    torch::Tensor value;
    Buffer buffer;
    torch::Tensor grad;  // the view; undefined if frozen
  };

  // What the library knows the memory of, which is kept until this object goes.
  struct Place {
    std::string name;
    torch::Tensor tensor;
    const void* data;
    c10::Storage storage;
  };

  // Called by autograd when it has accumulated all contributions to a parameter's gradient, in the thread and with the
  // current stream that accumulated it. (A tensor hook from register_hook would be called earlier.)
  struct Announce final : torch::autograd::PostAccumulateGradHook {
    Announce(DistributedDataParallel* m, size_t i, torch::Tensor g) : model(m), index(i), view(std::move(g)) {}
    void operator()(const torch::Tensor& parameter) override {
      if (!parameter.grad().is_same(view)) {
        const torch::NoGradGuard no_grad;
        const torch::Tensor made = parameter.grad();
        view.copy_(made.is_sparse() ? made.to_dense() : made);
        parameter.mutable_grad() = view;
      }
      model->GradReady(index, CurrentStream(view.device()));
    }
    DistributedDataParallel* model;
    size_t index;
    torch::Tensor view;
  };

  DdpModule() = default;

  absl::Status Collect(torch::nn::Module& module, DdpOptions& options) {
    if (options.copy_gradients) {
      return absl::InvalidArgumentError("DdpModule keeps gradients in the library's memory; unset copy_gradients");
    }
    std::unordered_set<const void*> seen;
    for (const auto& named : module.named_parameters()) {
      if (!seen.insert(named.value().unsafeGetTensorImpl()).second) continue;
      if (!named.value().is_floating_point()) {  // of a quantised layer, or complex: always frozen
        untrained_.emplace_back(named.key(), named.value());
        if (absl::Status s = CollectBuffer(named.key(), named.value(), options); !s.ok()) return s;
        continue;
      }
      const auto buffer = internal::BufferOf(named.value(), false);
      if (!buffer.ok()) return About("parameter", named.key(), buffer.status());
      tensors_.push_back({named.key(), named.value(), *buffer, {}});
      Keep(named.key(), named.value());
    }
    for (const auto& named : module.named_buffers()) {
      if (!named.value().defined() || !seen.insert(named.value().unsafeGetTensorImpl()).second) continue;
      if (absl::Status s = CollectBuffer(named.key(), named.value(), options); !s.ok()) return s;
    }
    if (absl::Status s = CheckUntrained(); !s.ok()) return s;
    if (tensors_.empty()) return absl::InvalidArgumentError("the module has no parameters");
    return absl::OkStatus();
  }

  absl::Status CheckUntrained() const {
    for (const auto& [name, value] : untrained_) {
      if (!value.requires_grad()) continue;
      return absl::InvalidArgumentError(
          absl::StrCat("parameter '", name,
                       "' is complex, and its gradient is not reduced; make its real and imaginary parts the "
                       "parameter (torch::view_as_real), or freeze it (requires_grad_(false))"));
    }
    return absl::OkStatus();
  }

  absl::Status CollectBuffer(const std::string& name, const torch::Tensor& t, DdpOptions& options) {
    const auto buffer = internal::BufferOf(t, true);
    if (!buffer.ok()) return About("buffer", name, buffer.status());
    options.buffers.push_back({name, *buffer});
    Keep(name, t);
    return absl::OkStatus();
  }

  absl::Status CheckPlaces() const {
    for (const Place& p : places_) {
      if (p.tensor.data_ptr() == p.data) continue;
      return absl::FailedPreconditionError(
          absl::StrCat("'", p.name, "' lies elsewhere than in DdpModule::Create; move or convert a module before it"));
    }
    return absl::OkStatus();
  }

  // Its format is one line. The stride of a dimension of one element means nothing.
  void Keep(const std::string& name, const torch::Tensor& t) {
    places_.push_back({name, t, t.data_ptr(), t.storage()});
    std::vector<int64_t> strides = t.strides().vec();
    for (size_t d = 0; d < strides.size(); ++d) {
      if (t.sizes()[d] == 1) strides[d] = 0;
    }
    formats_ += absl::StrCat(name, " [", absl::StrJoin(t.sizes(), ", "), "] with strides [",
                             absl::StrJoin(strides, ", "), "]\n");
  }

  static absl::Status About(absl::string_view kind, absl::string_view name, const absl::Status& status) {
    return absl::Status(status.code(), absl::StrCat(kind, " '", name, "': ", status.message()));
  }

  // Gradients are reduced in the order of memory, which DistributedDataParallel does not know. A rank with a mistake of
  // its own tells the others, so that they do not wait for it.
  absl::Status AgreeOnFormats(ProcessGroup& group, const absl::Status& mine) {
    const auto all = GatherStrings(group, mine.ok() ? formats_ : absl::StrCat("!", mine.message()));
    if (!mine.ok()) return absl::Status(mine.code(), absl::StrCat("rank ", group.rank(), ": ", mine.message()));
    if (!all.ok()) return all.status();
    const std::vector<absl::string_view> zero = absl::StrSplit((*all)[0], '\n');
    for (size_t r = 0; r < all->size(); ++r) {
      const std::string& text = (*all)[r];
      if (text[0] == '!') return absl::InvalidArgumentError(absl::StrCat("rank ", r, ": ", text.substr(1)));
      if (text == (*all)[0]) continue;
      const std::vector<absl::string_view> other = absl::StrSplit(text, '\n');
      size_t i = 0;
      while (zero[i] == other[i]) ++i;  // texts that differ do so in a line: each ends with an empty one
      return absl::FailedPreconditionError(
          absl::StrCat("ranks have different modules: rank 0 has ", zero[i].empty() ? "nothing more" : zero[i],
                       ", rank ", r, " has ", other[i].empty() ? "nothing more" : other[i],
                       "; build the same module, in the same memory format, on all ranks"));
    }
    return absl::OkStatus();
  }

  std::vector<Parameter> Parameters() const {
    std::vector<Parameter> parameters;
    for (const Tensor& t : tensors_) {
      parameters.push_back({t.name, t.value.sizes().vec(), t.buffer, {}, !t.value.requires_grad()});
    }
    return parameters;
  }

  // Makes the gradients of trained parameters views, and has autograd announce them.
  void Attach() {
    for (size_t i = 0; i < tensors_.size(); ++i) {
      Tensor& t = tensors_[i];
      if (t.grad.defined() == !model_->parameter(i).frozen) continue;
      t.grad.reset();
      std::unique_ptr<Announce> hook;
      if (!model_->parameter(i).frozen) {
        t.grad = at::for_blob(model_->grad(i).data, t.value.sizes())
                     .strides(t.value.strides())
                     .options(t.value.options())
                     .target_device(t.value.device())
                     .make_tensor();
        hook = std::make_unique<Announce>(model_.get(), i, t.grad);
      }
      t.value.mutable_grad() = t.grad;
      torch::autograd::impl::set_post_acc_grad_hooks(t.value, std::move(hook));
    }
  }

  void Detach() {
    for (Tensor& t : tensors_) {
      if (!t.grad.defined()) continue;
      torch::autograd::impl::set_post_acc_grad_hooks(t.value, nullptr);
      t.value.mutable_grad().reset();
    }
  }

  std::vector<Tensor> tensors_;                                   // each once
  std::vector<std::pair<std::string, torch::Tensor>> untrained_;  // parameters that are copied as buffers are
  std::vector<Place> places_;
  std::string formats_;
  std::unique_ptr<DistributedDataParallel> model_;
};

}  // namespace ddp

#endif  // DDP_TORCH_DDP_MODULE_H_
