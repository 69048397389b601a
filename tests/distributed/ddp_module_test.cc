// SPDX-License-Identifier: Apache-2.0
// ddp/torch.h on the CPU.
#include "ddp/torch/ddp_module.h"

#include <torch/nn/modules/embedding.h>

// LibTorch has one too.
#undef CHECK

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/catch.h"
#include "tests/support/ranks.h"

namespace ddp::testing {
namespace {

// y = sum(w * x): the gradient of w is x.
struct Dot : torch::nn::Module {
  explicit Dot(int64_t n) {
    weight = register_parameter("weight", torch::ones({n}));
    frozen = register_parameter("frozen", torch::ones({3}), /*requires_grad=*/false);
  }
  torch::Tensor weight, frozen;
};

constexpr int64_t kCount = 1000;

// On every rank the gradient is x times the rank + 1.
void Backward(Rank& rank, Dot& net) {
  const torch::Tensor x = torch::arange(kCount, torch::kFloat32) * (rank.rank() + 1);
  (net.weight * x).sum().backward();
}

void CheckGrad(Rank& rank, const Dot& net, float times) {
  const float mean = static_cast<float>(rank.size() + 1) / 2;
  RANK_CHECK(torch::equal(net.weight.grad(), torch::arange(kCount, torch::kFloat32) * mean * times));
}

TEST_CASE("autograd writes into the memory that is reduced, and accumulates there") {
  RunOnRanks([](Rank& rank) {
    Dot net(kCount);
    {
      torch::NoGradGuard no_grad;
      net.weight.fill_(1.0f + static_cast<float>(rank.rank()));
    }
    auto module = RANK_VALUE(DdpModule::Create(rank.group(), net));
    RANK_CHECK(module->ddp().size() == 2 && module->ddp().parameter(1).frozen);
    RANK_CHECK(torch::equal(net.weight, torch::ones({kCount})));
    const void* const arena = module->ddp().grad(0).data;
    for (int step = 0; step < 3; ++step) {
      module->ddp().ZeroGrad();
      {
        const DistributedDataParallel::NoSync local(module->ddp());
        Backward(rank, net);
        RANK_CHECK_OK(module->ddp().FinishBackward());
      }
      Backward(rank, net);
      RANK_CHECK_OK(module->ddp().FinishBackward());
      CheckGrad(rank, net, 2);
      RANK_CHECK(net.weight.grad().data_ptr() == arena);
    }
  });
}

TEST_CASE("gradients that LibTorch has dropped are taken over again") {
  RunOnRanks([](Rank& rank) {
    Dot net(kCount);
    auto module = RANK_VALUE(DdpModule::Create(rank.group(), net));
    for (int step = 0; step < 3; ++step) {
      net.zero_grad();  // sets them to none
      Backward(rank, net);
      RANK_CHECK_OK(module->ddp().FinishBackward());
      CheckGrad(rank, net, 1);
      RANK_CHECK(net.weight.grad().data_ptr() == module->ddp().grad(0).data);
    }
    module.reset();
    RANK_CHECK(!net.weight.grad().defined());  // its memory is gone
    Backward(rank, net);                       // and the module is LibTorch's alone
    RANK_CHECK(torch::equal(net.weight.grad(), torch::arange(kCount, torch::kFloat32) * (rank.rank() + 1)));
  });
}

TEST_CASE("a parameter that cannot be reduced is named on all ranks") {
  RunOnRanks([](Rank& rank) {
    torch::nn::Module net;
    const bool last = rank.rank() == rank.size() - 1;
    net.register_parameter("gaps", last ? torch::ones({3, 8}).slice(1, 0, 8, 2) : torch::ones({3, 4}));
    RANK_CHECK_STATUS(DdpModule::Create(rank.group(), net), absl::StatusCode::kInvalidArgument, "parameter 'gaps'",
                      "rank " + std::to_string(rank.size() - 1));
    torch::nn::Module empty;
    RANK_CHECK_STATUS(DdpModule::Create(rank.group(), empty), absl::StatusCode::kInvalidArgument, "no parameters");
  });
}

// Its gradient would not be reduced.
TEST_CASE("a complex parameter is copied while it is frozen, and refused if it is to be trained") {
  RunOnRanks([](Rank& rank) {
    torch::nn::Module net;
    net.register_parameter("a", torch::ones({2}));
    const torch::Tensor wave = net.register_parameter("wave", torch::full({2}, rank.rank(), torch::kComplexFloat));
    RANK_CHECK_STATUS(DdpModule::Create(rank.group(), net), absl::StatusCode::kInvalidArgument,
                      "parameter 'wave' is complex", "view_as_real");
    wave.requires_grad_(false);
    auto module = RANK_VALUE(DdpModule::Create(rank.group(), net));
    RANK_CHECK(wave.abs().sum().item<float>() == 0);
    wave.requires_grad_(true);
    RANK_CHECK_STATUS(module->UpdateFrozen(), absl::StatusCode::kInvalidArgument, "parameter 'wave' is complex");
  });
}

TEST_CASE("tied weights are reduced once, with all contributions") {
  RunOnRanks([](Rank& rank) {
    torch::nn::Module net;
    const torch::Tensor weight = net.register_parameter("weight", torch::ones({8}));
    net.register_parameter("again", weight);
    auto module = RANK_VALUE(DdpModule::Create(rank.group(), net));
    RANK_CHECK_EQ(module->ddp().size(), 1u);
    for (int step = 0; step < 2; ++step) {
      module->ZeroGrad();
      // The gradient is 2 w + 3, times the rank + 1.
      ((weight * weight).sum() + 3 * weight.sum()).mul(rank.rank() + 1).backward();
      RANK_CHECK_OK(module->FinishBackward());
      RANK_CHECK(torch::equal(weight.grad(), torch::full({8}, 2.5 * (rank.size() + 1))));
    }
  });
}

TEST_CASE("frozen parameters and buffers are rank 0's, and parameters can be frozen later") {
  RunOnRanks([](Rank& rank) {
    torch::nn::Module net;
    const torch::Tensor a = net.register_parameter("a", torch::full({5}, 1.5 * rank.rank()));
    const torch::Tensor b = net.register_parameter("b", torch::full({5}, 1.5 * rank.rank()), /*requires_grad=*/false);
    const torch::Tensor table = net.register_parameter("table", torch::full({3}, rank.rank(), torch::kInt8), false);
    const torch::Tensor mask = net.register_buffer("mask", torch::full({7}, rank.rank() % 2 == 0, torch::kBool));
    const torch::Tensor count = net.register_buffer("count", torch::full({}, rank.rank(), torch::kInt16));
    const torch::Tensor wave = net.register_buffer("wave", torch::full({2, 2}, rank.rank(), torch::kComplexFloat));
    net.register_buffer("none", torch::Tensor());
    auto module = RANK_VALUE(DdpModule::Create(rank.group(), net));
    RANK_CHECK(a.sum().item<float>() == 0 && b.sum().item<float>() == 0 && table.sum().item<int>() == 0);
    RANK_CHECK(mask.all().item<bool>() && count.item<int>() == 0 && wave.abs().sum().item<float>() == 0);

    const auto step = [&](float grad_of_a, float grad_of_b) {
      count.fill_(10 + rank.rank());
      RANK_CHECK_OK(module->BeginForward());
      RANK_CHECK_EQ(count.item<int>(), 10);
      module->ZeroGrad();
      (a.sum() * (rank.rank() + 1) + 2 * b.sum() * (rank.rank() + 1)).backward();
      RANK_CHECK_OK(module->FinishBackward());
      const float mean = static_cast<float>(rank.size() + 1) / 2;
      RANK_CHECK(a.grad().defined() == (grad_of_a != 0) && b.grad().defined() == (grad_of_b != 0));
      if (grad_of_a != 0) RANK_CHECK(torch::equal(a.grad(), torch::full({5}, grad_of_a * mean)));
      if (grad_of_b != 0) RANK_CHECK(torch::equal(b.grad(), torch::full({5}, grad_of_b * mean)));
    };
    step(1, 0);
    b.requires_grad_(true);
    RANK_CHECK_OK(module->UpdateFrozen());
    step(1, 2);
    a.requires_grad_(false);
    RANK_CHECK_OK(module->UpdateFrozen());
    step(0, 2);
  });
}

TEST_CASE("channels-last parameters keep their format, which ranks share") {
  RunOnRanks([](Rank& rank) {
    torch::nn::Module net;
    const auto format = [](bool last) {
      return last ? torch::MemoryFormat::ChannelsLast : torch::MemoryFormat::Contiguous;
    };
    const torch::Tensor values = torch::arange(2 * 3 * 4 * 5, torch::kFloat32).view({2, 3, 4, 5});
    const torch::Tensor weight = net.register_parameter("weight", values.contiguous(format(true)));
    auto module = RANK_VALUE(DdpModule::Create(rank.group(), net));
    RANK_CHECK(torch::equal(weight, values));
    (weight * values * (rank.rank() + 1)).sum().backward();
    RANK_CHECK_OK(module->FinishBackward());
    RANK_CHECK(torch::equal(weight.grad(), values * (rank.size() + 1) / 2));
    RANK_CHECK(weight.grad().strides() == weight.strides());
    RANK_CHECK(weight.grad().data_ptr() == module->ddp().grad(0).data);
    module.reset();

    if (rank.size() == 1) return;
    torch::nn::Module other;
    other.register_parameter("weight", values.contiguous(format(rank.rank() == 1)));
    RANK_CHECK_STATUS(DdpModule::Create(rank.group(), other), absl::StatusCode::kFailedPrecondition,
                      "weight [2, 3, 4, 5] with strides [60, 20, 5, 1]", "rank 1 has", "[60, 1, 15, 3]");
    torch::nn::Module more;
    more.register_parameter("first", torch::ones({1, 2}));
    if (rank.rank() == 1) more.register_parameter("second", torch::ones({2}));
    RANK_CHECK_STATUS(DdpModule::Create(rank.group(), more), absl::StatusCode::kFailedPrecondition, "nothing more",
                      "second [2]");
  });
}

TEST_CASE("a sparse gradient is reduced") {
  RunOnRanks([](Rank& rank) {
    torch::nn::Embedding table(torch::nn::EmbeddingOptions(6, 2).sparse(true));
    auto module = RANK_VALUE(DdpModule::Create(rank.group(), *table));
    for (const bool released : {false, true}) {
      module->ZeroGrad();
      if (released) table->zero_grad();
      table->forward(torch::full({3}, rank.rank(), torch::kInt64)).sum().backward();
      RANK_CHECK_OK(module->FinishBackward());
      torch::Tensor expected = torch::zeros({6, 2});
      expected.narrow(0, 0, rank.size()).fill_(3);
      RANK_CHECK(torch::equal(table->weight.grad() * rank.size(), expected));
    }
  });
}

TEST_CASE("a parameter that has moved or has lost its gradient is named") {
  RunOnRanks([](Rank& rank) {
    torch::nn::Module net;
    const torch::Tensor a = net.register_parameter("a", torch::ones({2}));
    const torch::Tensor b = net.register_parameter("b", torch::ones({2}));
    DdpOptions options;
    options.unused = UnusedParameters::kDetect;
    auto module = RANK_VALUE(DdpModule::Create(rank.group(), net, options));
    net.zero_grad();
    a.sum().backward();
    RANK_CHECK_STATUS(module->FinishBackward(), absl::StatusCode::kFailedPrecondition, "'b' has no gradient");
    module->ZeroGrad();
    b.mutable_grad() = torch::zeros({2});
    (a + b).sum().backward();
    RANK_CHECK_OK(module->FinishBackward());
    for (const torch::ScalarType type : {torch::kFloat64, torch::kFloat32}) net.to(type);
    RANK_CHECK_STATUS(module->BeginForward(), absl::StatusCode::kFailedPrecondition, "'a' lies elsewhere");
    module->ZeroGrad();
    (a + b).sum().backward();
    RANK_CHECK_STATUS(module->FinishBackward(), absl::StatusCode::kFailedPrecondition, "'a' lies elsewhere");

    options.copy_gradients = true;
    RANK_CHECK_STATUS(DdpModule::Create(rank.group(), net, options), absl::StatusCode::kInvalidArgument,
                      "copy_gradients");
  });
}

TEST_CASE("a tensor that no operation takes is refused") {
  REQUIRE(BufferOf(torch::ones({2, 3}))->count == 6);
  REQUIRE(BufferOf(torch::ones({2}, torch::kBFloat16))->dtype == DType::kBFloat16);
  for (const torch::Tensor& bad :
       {torch::ones({2, 3}).expand({4, 2, 3}), torch::ones({2}, torch::kComplexFloat), torch::ones({2}, torch::kBool),
        torch::eye(2).to_sparse(), torch::ones({2}, torch::TensorOptions(torch::kMeta))}) {
    REQUIRE(BufferOf(bad).status().code() == absl::StatusCode::kInvalidArgument);
  }
}

}  // namespace
}  // namespace ddp::testing
