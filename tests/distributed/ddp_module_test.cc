// The adapter of examples/libtorch.
#include "examples/libtorch/ddp_module.h"

// LibTorch has one too.
#undef CHECK

#include <memory>

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
    auto module = RANK_VALUE(examples::DdpModule::Create(rank.group(), net));
    RANK_CHECK_EQ(module->ddp().size(), 1u);  // not the frozen one
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
    auto module = RANK_VALUE(examples::DdpModule::Create(rank.group(), net));
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

TEST_CASE("a parameter that cannot be reduced is named") {
  RunOnRanks([](Rank& rank) {
    torch::nn::Module net;
    net.register_parameter("twisted", torch::ones({3, 4}).t());
    RANK_CHECK_STATUS(examples::DdpModule::Create(rank.group(), net), absl::StatusCode::kInvalidArgument, "twisted");
  });
}

}  // namespace
}  // namespace ddp::testing
