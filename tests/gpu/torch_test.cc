// SPDX-License-Identifier: Apache-2.0
// ddp/torch.h on real GPUs, one a rank; ranks are threads or processes.
#include "ddp/torch.h"

// LibTorch has one too.
#undef CHECK

#include <functional>
#include <memory>
#include <optional>

#include "ddp/context.h"
#include "tests/support/catch.h"
#include "tests/support/gpu.h"
#include "tests/support/ranks.h"
#include "tests/support/torch_norm_cases.h"

namespace ddp::testing {
namespace {

void RunOnTorchGpus(const std::function<void(Rank&, torch::Device)>& body) {
  ContextOptions options;
  options.backend = RankCount() > 1 ? GpuBackend() : "local";
  options.device = {Device::Kind::kCuda, -1};
  RunOnRanks(
      [&](Rank& rank) {
        const torch::Device device(torch::kCUDA, static_cast<c10::DeviceIndex>(rank.context().device().index));
        const c10::DeviceGuard guard(device);
        body(rank, device);
      },
      options);
}

// The gradient of `weight` is x times the rank + 1, and that of `frozen` is not wanted.
struct Net : torch::nn::Module {
  explicit Net(const torch::Tensor& values) {
    weight = register_parameter("weight", values.clone());
    register_parameter("again", weight);
    frozen = register_parameter("frozen", torch::ones({3}, values.options()), /*requires_grad=*/false);
    count = register_buffer("count", torch::zeros({}, values.options().dtype(torch::kInt64)));
  }
  torch::Tensor weight, frozen, count;
};

TEST_CASE("autograd's gradients on GPUs are reduced where they lie, in the order of its streams") {
  RunOnTorchGpus([](Rank& rank, torch::Device device) {
    // 16 MiB, channels-last, of numbers that are added exactly.
    const torch::Tensor values =
        (torch::arange(1 << 22, torch::dtype(torch::kFloat32).device(device)).remainder(1000) + rank.rank())
            .view({64, 64, 32, 32})
            .contiguous(torch::MemoryFormat::ChannelsLast);
    Net net(values);
    net.count.fill_(rank.rank() + 5);
    auto module = RANK_VALUE(DdpModule::Create(rank.group(), net));
    RANK_CHECK(torch::equal(net.weight, values - rank.rank()));
    const double mean = (rank.size() + 1) / 2.0;
    for (int step = 0; step < 6; ++step) {
      // Every other step on a stream of its own, which is still busy when the gradient is announced.
      std::optional<c10::StreamGuard> side;
      if (step % 2 == 1) side.emplace(c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device));
      RANK_CHECK_OK(module->BeginForward());
      RANK_CHECK_EQ(net.count.item<int64_t>(), 5);
      torch::Tensor x = torch::zeros_like(net.weight.detach());
      for (int i = 0; i <= 20 + step; ++i) x += (values - rank.rank()).remainder(64);
      if (step < 4) {
        module->ZeroGrad();
      } else {
        net.zero_grad();
      }
      (net.weight * x * (rank.rank() + 1)).sum().backward();
      RANK_CHECK_OK(module->FinishBackward());
      const torch::Tensor sum = net.weight.grad() - x * mean;
      RANK_CHECK_EQ(sum.abs().max().item<float>(), 0.0f);
      RANK_CHECK(net.weight.grad().data_ptr() == module->ddp().grad(0).data);
      RANK_CHECK(net.weight.grad().strides() == net.weight.strides() && !net.frozen.grad().defined());
    }
  });
}

TEST_CASE("batches of all GPUs are normalised as one") {
  RunOnTorchGpus([](Rank& rank, torch::Device device) {
    const torch::nn::BatchNormOptions options(kChannels);
    const torch::TensorOptions tensors = torch::TensorOptions(device).dtype(torch::kFloat32);
    CompareNorms<torch::nn::BatchNorm2d>(rank, {kChannels, 4, 5}, tensors, options);
    CompareNorms<torch::nn::BatchNorm2d>(rank, {kChannels, 16, 16}, tensors.dtype(torch::kFloat16), options);
    CompareNorms<torch::nn::BatchNorm1d>(rank, {kChannels}, tensors.dtype(torch::kFloat64), options);
    CompareNorms<torch::nn::BatchNorm3d>(rank, {kChannels, 2, 2, 3}, tensors,
                                         torch::nn::BatchNormOptions(kChannels).affine(false).momentum(std::nullopt));
  });
}

}  // namespace
}  // namespace ddp::testing
