// SPDX-License-Identifier: Apache-2.0
// ddp::SyncBatchNorm on the CPU.
#include "ddp/torch/sync_batch_norm.h"

#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/optim/sgd.h>

// LibTorch has one too.
#undef CHECK

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "ddp/torch/ddp_module.h"
#include "tests/support/catch.h"
#include "tests/support/ranks.h"
#include "tests/support/torch_norm_cases.h"

namespace ddp::testing {
namespace {

TEST_CASE("batches of all ranks are normalised as one") {
  RunOnRanks([](Rank& rank) {
    const torch::nn::BatchNormOptions options(kChannels);
    CompareNorms<torch::nn::BatchNorm2d>(rank, {kChannels, 4, 5}, torch::kFloat32, options);
    CompareNorms<torch::nn::BatchNorm1d>(rank, {kChannels}, torch::kFloat64, options);
    CompareNorms<torch::nn::BatchNorm3d>(rank, {kChannels, 2, 2, 3}, torch::kFloat32,
                                         torch::nn::BatchNormOptions(kChannels).affine(false).momentum(std::nullopt));
    CompareNorms<torch::nn::BatchNorm1d>(rank, {kChannels, 7}, torch::kFloat32,
                                         torch::nn::BatchNormOptions(kChannels).track_running_stats(false));
  });
}

TEST_CASE("evaluation is each rank's own, also without running statistics") {
  RunOnRanks([](Rank& rank) {
    const auto options = torch::nn::BatchNormOptions(kChannels).track_running_stats(false);
    SyncBatchNorm norm(options, rank.group());
    torch::nn::BatchNorm1d plain(options);
    norm->eval();
    plain->eval();
    // Of unequal numbers, and the last rank evaluates none.
    for (int batch = 0; batch < rank.size() - rank.rank() - 1 + (rank.size() == 1); ++batch) {
      const torch::Tensor x = torch::randn({4, kChannels}) + 10.0f * rank.rank();
      RANK_CHECK(torch::equal(norm->forward(x), plain->forward(x)));
    }
  });
}

TEST_CASE("a model with synchronised batch norm trains as on one rank") {
  RunOnRanks([](Rank& rank) {
    const Batches batches(rank.size(), {2, 4, 4}, torch::kFloat32);
    const auto make = [](auto norm) {
      torch::manual_seed(1);
      const auto convolution = [](int64_t in, int64_t out) {
        return torch::nn::Conv2d(torch::nn::Conv2dOptions(in, out, 3).padding(1));
      };
      return torch::nn::Sequential(convolution(2, kChannels), norm, torch::nn::ReLU(), convolution(kChannels, 2));
    };
    const torch::nn::BatchNormOptions options(kChannels);
    torch::nn::Sequential whole = make(torch::nn::BatchNorm2d(options));
    torch::nn::Sequential mine = make(SyncBatchNorm(options, rank.group()));
    DdpOptions sum;  // of losses that are sums
    sum.op = ReduceOp::kSum;
    auto model = RANK_VALUE(DdpModule::Create(rank.group(), *mine, sum));
    torch::optim::SGD reference(whole->parameters(), 0.01), optimizer(mine->parameters(), 0.01);
    for (int step = 0; step < 3; ++step) {
      reference.zero_grad();
      (whole->forward(batches.x) - batches.target).square().sum().backward();
      reference.step();
      RANK_CHECK_OK(model->BeginForward());
      model->ZeroGrad();
      const torch::Tensor x = batches.Mine(batches.x, rank.rank());
      (mine->forward(x) - batches.Mine(batches.target, rank.rank())).square().sum().backward();
      RANK_CHECK_OK(model->FinishBackward());
      optimizer.step();
    }
    for (size_t i = 0; i < whole->parameters().size(); ++i) {
      RANK_CHECK(Near(mine->parameters()[i], whole->parameters()[i], torch::kFloat32), i);
    }
  });
}

TEST_CASE("a failed group is an exception, and so is a wrong shape") {
  RunOnRanks([](Rank& rank) {
    SyncBatchNorm norm(torch::nn::BatchNormOptions(kChannels), rank.group());
    const auto thrown = [&](const torch::Tensor& x) -> std::string {
      try {
        norm->forward(x);
      } catch (const c10::Error& e) {
        return e.what();
      }
      return "";
    };
    RANK_CHECK(absl::StrContains(thrown(torch::ones({4, 2})), "expected [N, 3"));
    rank.Meet();
    rank.group().Abort(absl::CancelledError("enough of it"));
    if (rank.size() > 1) RANK_CHECK(absl::StrContains(thrown(torch::ones({4, kChannels})), "enough of it"));
  });
}

}  // namespace
}  // namespace ddp::testing
