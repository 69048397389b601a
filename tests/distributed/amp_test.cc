// SPDX-License-Identifier: Apache-2.0
// GradScaler on several ranks: all of them skip the same steps and keep the same scale.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "ddp/distributed_data_parallel.h"
#include "ddp/grad_scaler.h"
#include "examples/nn/optimizer.h"
#include "tests/support/catch.h"
#include "tests/support/check.h"
#include "tests/support/ranks.h"

namespace ddp {
namespace {

using testing::Rank;
using testing::RunOnRanks;

constexpr float kInf = std::numeric_limits<float>::infinity();

// One of the example's optimizers over flat memory. fused: it unscales as it reads, and decides for itself.
class FlatOptimizer final : public Optimizer {
 public:
  FlatOptimizer(std::unique_ptr<nn::Optimizer> optimizer, absl::Span<float> values, absl::Span<float> grads, bool fused)
      : optimizer_(std::move(optimizer)), values_(values), grads_(grads), fused_(fused) {
    if (!grads.empty()) buffer_ = {{grads.data(), grads.size(), DType::kFloat32, {}}};
  }

  Buffers grads() const override { return buffer_; }
  bool fused() const override { return fused_; }
  absl::Status Step(const StepOptions& options) override {
    for (const uint32_t* skip : {options.found_inf, options.skip_step}) {
      if (skip != nullptr && *skip != 0) return absl::OkStatus();
    }
    optimizer_->set_grad_scale(options.inv_scale == nullptr ? 1 : *options.inv_scale);
    optimizer_->Step(values_, grads_);
    return absl::OkStatus();
  }

  int64_t steps() const { return optimizer_->steps(); }

 private:
  std::unique_ptr<nn::Optimizer> optimizer_;
  absl::Span<float> values_, grads_;
  std::vector<Buffer> buffer_;
  bool fused_;
};

absl::Span<float> Floats(const Buffer& buffer) { return {static_cast<float*>(buffer.data), buffer.count}; }

// That `mine` is the same on all ranks.
void CheckEqualOnAllRanks(Rank& rank, double mine) {
  std::vector<double> all(static_cast<size_t>(rank.size()));
  const Buffer in = {&mine, 1, DType::kFloat64, {}}, out = {all.data(), all.size(), DType::kFloat64, {}};
  RANK_CHECK_OK(rank.group().AllGather(in, out).Wait());
  for (const double other : all) RANK_CHECK_EQ(other, mine);
}

void ScaleSomething(GradScaler& scaler) {
  float loss = 1;
  RANK_CHECK_OK(scaler.Scale({{&loss, 1, DType::kFloat32, {}}}));
}

enum class How { kPlain, kFused, kReduction };

using MakeOptimizer = std::function<std::unique_ptr<nn::Optimizer>(size_t count)>;

// Two parameters that are trained with DistributedDataParallel.
class Training {
 public:
  Training(Rank& rank, How how, const GradScalerOptions& scaler_options, const MakeOptimizer& make) : rank_(rank) {
    scaler_ = RANK_VALUE(GradScaler::Create(scaler_options));
    DdpOptions options;
    if (how == How::kReduction) options.nonfinite = RANK_VALUE(scaler_->AddFoundInf());
    options.bucket_bytes = 1024;
    step_options_.found_inf = options.nonfinite;
    const auto parameter = [](const char* name, size_t count) {
      const Buffer buffer = {nullptr, count, DType::kFloat32, {}};
      return Parameter{name, {static_cast<int64_t>(count)}, buffer, buffer};
    };
    model_ =
        RANK_VALUE(DistributedDataParallel::Create(rank.group(), {parameter("a", 1000), parameter("b", 37)}, options));
    const absl::Span<float> all = values();
    optimizer_ =
        std::make_unique<FlatOptimizer>(make(all.size()), all, Floats(model_->grad_spans()[0]), how != How::kPlain);
    for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<float>(i % 7);
  }

  // In which rank `culprit` has an infinity (-1: none has).
  void Step(int step, int culprit) {
    for (size_t p = model_->size(); p-- > 0;) {
      const absl::Span<float> grad = Floats(model_->grad(p));
      for (size_t i = 0; i < grad.size(); ++i) {
        grad[i] = static_cast<float>((i + static_cast<size_t>(step + rank_.rank())) % 11);
      }
      RANK_CHECK_OK(scaler_->Scale({model_->grad(p)}));
      if (culprit == rank_.rank()) grad[grad.size() / 2] = kInf;
      model_->GradReady(p);
    }
    RANK_CHECK_OK(model_->FinishBackward());
    RANK_CHECK_OK(scaler_->Step(*optimizer_, step_options_));
    RANK_CHECK_EQ(RANK_VALUE(scaler_->FoundInf(*optimizer_)), culprit >= 0);
    RANK_CHECK_OK(scaler_->Update());
  }

  // Gradients are unscaled, then changed by the program, as clipping does; `spoil`: into something that is not finite.
  void ChangedStep(bool spoil) {
    for (size_t p = model_->size(); p-- > 0;) {
      const absl::Span<float> grad = Floats(model_->grad(p));
      for (size_t i = 0; i < grad.size(); ++i) grad[i] = static_cast<float>((i + p) % 5 * (rank_.rank() + 1));
      RANK_CHECK_OK(scaler_->Scale({model_->grad(p)}));
      model_->GradReady(p);
    }
    RANK_CHECK_OK(model_->FinishBackward());
    RANK_CHECK_OK(scaler_->Unscale(*optimizer_));
    const double norm = RANK_VALUE(model_->ClipGradNorm(1));
    RANK_CHECK(norm > 1 && std::abs(RANK_VALUE(model_->GradNorm()) - 1) < 1e-5, norm);
    const absl::Span<float> grads = Floats(model_->grad_spans()[0]), all = values();
    if (spoil) grads[3] = kInf;
    const std::vector<float> before(all.begin(), all.end());
    RANK_CHECK_OK(scaler_->Step(*optimizer_, step_options_));
    RANK_CHECK_OK(scaler_->Update());
    for (size_t i = 0; i < all.size(); ++i) RANK_CHECK_EQ(all[i], before[i] - 0.5f * grads[i]);
  }

  void CheckEqualValues() {
    const absl::Span<float> all = values();
    for (const size_t i : {size_t{0}, all.size() / 2, all.size() - 1}) CheckEqualOnAllRanks(rank_, all[i]);
  }

  absl::Span<float> values() { return Floats(model_->value_spans()[0]); }
  int64_t steps() const { return optimizer_->steps(); }
  GradScaler& scaler() { return *scaler_; }
  DistributedDataParallel& model() { return *model_; }

 private:
  Rank& rank_;
  std::unique_ptr<GradScaler> scaler_;
  std::unique_ptr<DistributedDataParallel> model_;
  std::unique_ptr<FlatOptimizer> optimizer_;
  StepOptions step_options_;
};

// Trains over `steps` steps; in step s rank `culprit(s)` has an infinity. Returns the values in the end, and the steps
// made.
std::pair<std::vector<float>, int64_t> Train(Rank& rank, How how, bool adam, float scale, int steps,
                                             const std::function<int(int)>& culprit) {
  const auto make = [&](size_t count) -> std::unique_ptr<nn::Optimizer> {
    if (adam) return std::make_unique<nn::Adam>(count, nn::AdamOptions{.lr = 0.01, .weight_decay = 0.1});
    return std::make_unique<nn::Sgd>(count, nn::SgdOptions{.lr = 0.1, .momentum = 0.9, .weight_decay = 0.1});
  };
  Training training(rank, how, {.initial_scale = scale, .growth_interval = 4}, make);
  for (int step = 0; step < steps; ++step) {
    training.Step(step, culprit(step));
    CheckEqualOnAllRanks(rank, RANK_VALUE(training.scaler().scale()));
  }
  training.CheckEqualValues();
  const absl::Span<float> values = training.values();
  return {{values.begin(), values.end()}, training.steps()};
}

// A rank's part where ranks share the optimizer's work: rank 0 has none.
struct Part {
  explicit Part(const Rank& rank, bool fused)
      : values(rank.rank() * 10, 1.0f),
        grads(values.size(), 64.0f),
        optimizer(std::make_unique<nn::Sgd>(values.size(), nn::SgdOptions{.lr = 1}), absl::MakeSpan(values),
                  absl::MakeSpan(grads), fused) {}
  std::vector<float> values, grads;
  FlatOptimizer optimizer;
};

}  // namespace

TEST_CASE("an infinity on one rank stops the step on all, and the scale stays equal") {
  RunOnRanks([](Rank& rank) {
    const auto culprit = [&](int step) { return step % 5 == 3 ? step % rank.size() : -1; };
    for (const bool adam : {false, true}) {
      const auto [plain, plain_steps] = Train(rank, How::kPlain, adam, 1024, 20, culprit);
      RANK_CHECK_EQ(plain_steps, 16);
      // Unscaled by the optimizer as it goes, and checked by a pass of its own or by the reduction: the same bits.
      for (const How how : {How::kFused, How::kReduction}) {
        const auto [fused, fused_steps] = Train(rank, how, adam, 1024, 20, culprit);
        RANK_CHECK_EQ(fused_steps, 16);
        RANK_CHECK(fused == plain);
      }
    }
  });
}

TEST_CASE("a scale that is a power of two changes no bit of the training") {
  RunOnRanks([](Rank& rank) {
    const auto nobody = [](int) { return -1; };
    const auto small = Train(rank, How::kFused, true, 1, 12, nobody);
    RANK_CHECK(Train(rank, How::kFused, true, 4096, 12, nobody).first == small.first);
    RANK_CHECK(Train(rank, How::kPlain, true, 4096, 12, nobody).first == small.first);
  });
}

TEST_CASE("a step takes gradients as the program has left them after Unscale, and does not look at them again") {
  RunOnRanks([](Rank& rank) {
    const auto make = [](size_t count) { return std::make_unique<nn::Sgd>(count, nn::SgdOptions{.lr = 0.5}); };
    for (const How how : {How::kPlain, How::kFused, How::kReduction}) {
      Training training(rank, how, {.initial_scale = 1024, .growth_interval = 3}, make);
      for (const bool spoil : {false, false, true}) training.ChangedStep(spoil);
      RANK_CHECK_EQ(training.steps(), 3);
      RANK_CHECK_EQ(RANK_VALUE(training.scaler().scale()), 2048.0f);  // three good steps
    }
  });
}

TEST_CASE("where ranks share out the gradients, what one finds all learn") {
  RunOnRanks([](Rank& rank) {
    for (const bool fused : {false, true}) {
      const auto scaler =
          RANK_VALUE(GradScaler::Create({.initial_scale = 64, .growth_interval = 3, .sharded_over = &rank.group()}));
      Part part(rank, fused);
      int64_t made = 0;
      for (int step = 0; step < 12; ++step) {
        const int culprit = step % 3 == 2 ? 1 + step % 2 : 0;  // rank 0 has nothing that could be infinite
        const bool bad = culprit > 0 && culprit < rank.size();
        std::fill(part.grads.begin(), part.grads.end(), 64.0f);
        if (culprit == rank.rank() && culprit > 0) part.grads.back() = step % 2 == 0 ? kInf : -kInf;
        ScaleSomething(*scaler);
        if (step % 4 == 1) RANK_CHECK_OK(scaler->Unscale(part.optimizer));
        RANK_CHECK_OK(scaler->Step(part.optimizer));
        RANK_CHECK_EQ(RANK_VALUE(scaler->FoundInf(part.optimizer)), bad);
        RANK_CHECK_OK(scaler->Update());
        made += bad ? 0 : 1;
        RANK_CHECK_EQ(part.optimizer.steps(), made);
        CheckEqualOnAllRanks(rank, RANK_VALUE(scaler->scale()));
        CheckEqualOnAllRanks(rank, RANK_VALUE(scaler->State()).growth_tracker);
      }
    }
  });
}

TEST_CASE("ranks with different numbers of steps have one scale again after Broadcast") {
  RunOnRanks([](Rank& rank) {
    const auto scaler = RANK_VALUE(GradScaler::Create({.initial_scale = 4, .growth_interval = 2}));
    Part part(rank, true);
    std::vector<float> value(4), grad(4);
    FlatOptimizer optimizer(std::make_unique<nn::Sgd>(4, nn::SgdOptions{}), absl::MakeSpan(value), absl::MakeSpan(grad),
                            true);
    for (int step = 0; step < 3 + 2 * rank.rank(); ++step) {
      ScaleSomething(*scaler);
      RANK_CHECK_OK(scaler->Step(optimizer));
      RANK_CHECK_OK(scaler->Update());
    }
    // The last to run out of inputs has made the steps that count.
    RANK_CHECK_OK(scaler->Broadcast(rank.group(), rank.size() - 1));
    const int steps = 3 + 2 * (rank.size() - 1);
    RANK_CHECK_EQ(RANK_VALUE(scaler->scale()), static_cast<float>(4 << (steps / 2)));
    RANK_CHECK_EQ(RANK_VALUE(scaler->State()).growth_tracker, steps % 2);
    // The inverse has come with it.
    ScaleSomething(*scaler);
    grad.assign(4, RANK_VALUE(scaler->scale()));
    RANK_CHECK_OK(scaler->Unscale(optimizer));
    RANK_CHECK_EQ(grad[3], 1.0f);
  });
}

// What so many steps make of a scaler, those in `bad` having an infinity.
GradScalerState AfterSteps(const GradScalerOptions& options, int steps, const std::vector<int>& bad) {
  const auto scaler = RANK_VALUE(GradScaler::Create(options));
  std::vector<float> value(1), grad(1);
  FlatOptimizer optimizer(std::make_unique<nn::Sgd>(1, nn::SgdOptions{}), absl::MakeSpan(value), absl::MakeSpan(grad),
                          true);
  for (int step = 0; step < steps; ++step) {
    grad[0] = std::find(bad.begin(), bad.end(), step) == bad.end() ? 1 : kInf;
    ScaleSomething(*scaler);
    RANK_CHECK_OK(scaler->Step(optimizer));
    RANK_CHECK_OK(scaler->Update());
  }
  return RANK_VALUE(scaler->State());
}

TEST_CASE("ranks that run out of inputs have the others' scale after a Join") {
  RunOnRanks([](Rank& rank) {
    const auto inputs = [](int r) { return std::vector<int>{4, 9, 0, 6}[static_cast<size_t>(r)]; };
    const int most = rank.size() == 1 ? 4 : 9, longest = rank.size() == 1 ? 0 : 1;
    const std::vector<int> bad = {2, most - 1};  // when all but one or two ranks go on, and in the very last step
    const GradScalerOptions options = {.initial_scale = 1024, .growth_interval = 2, .hysteresis = 2};
    for (const How how : {How::kPlain, How::kFused, How::kReduction}) {
      Training training(rank, how, options,
                        [](size_t count) { return std::make_unique<nn::Sgd>(count, nn::SgdOptions{.lr = 0.1}); });
      {
        JoinOptions join_options;
        join_options.scaler = &training.scaler();
        DistributedDataParallel::Join join(training.model(), join_options);
        for (int step = 0; step < inputs(rank.rank()); ++step) {
          training.Step(step, std::find(bad.begin(), bad.end(), step) == bad.end() ? -1 : longest);
        }
        RANK_CHECK_OK(join.Finish());
      }
      RANK_CHECK(RANK_VALUE(training.scaler().State()) == AfterSteps(options, most, bad), "rank ", rank.rank());
      training.CheckEqualValues();

      // And what the ranks that were through have seen of others' infinities is forgotten.
      for (const int step : {0, 1, 2}) {
        training.Step(step, -1);
        CheckEqualOnAllRanks(rank, RANK_VALUE(training.scaler().scale()));
        CheckEqualOnAllRanks(rank, RANK_VALUE(training.scaler().State()).growth_tracker);
      }
      training.CheckEqualValues();
    }
  });
}

}  // namespace ddp
