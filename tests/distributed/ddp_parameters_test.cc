// SPDX-License-Identifier: Apache-2.0
// DistributedDataParallel: other parameters in the course of a training, and frozen ones.
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ddp/distributed_data_parallel.h"
#include "tests/support/catch.h"
#include "tests/support/ddp_model.h"
#include "tests/support/forwarding_group.h"

namespace ddp::testing {
namespace {

using absl::StatusCode;

TEST_CASE("parameters are frozen, added and removed; those that stay keep their addresses") {
  RunOnRanks([](Rank& rank) {
    DdpOptions options;
    options.bucket_bytes = 5000;
    const Model model = Make(rank, MakeParameters({1000, 300, 2000}), options);
    CheckStep(rank, *model, {2, 1, 0}, 0);
    const Buffer kept = model->grad(0), kept_value = model->value(2), frozen = model->grad(2);

    // layer1 goes, layer2 is frozen, two come: one with memory of the caller's.
    std::vector<float> head(70, static_cast<float>(rank.rank() + 5)), head_grad(70);
    std::vector<Parameter> next = MakeParameters({1000, 300, 2000});
    next[2].frozen = true;
    next.erase(next.begin() + 1);
    next.push_back(
        {"head.weight", {7, 10}, {head.data(), 70, DType::kFloat32, {}}, {head_grad.data(), 70, DType::kFloat32, {}}});
    next.push_back({"head.bias", {}, {nullptr, 3, DType::kFloat32, {}}, {}});
    SetElement(DType::kFloat32, model->value(0).data, 5, rank.rank() + 1);
    RANK_CHECK_OK(model->SetParameters(next));
    RANK_CHECK_EQ(model->size(), size_t{4});
    RANK_CHECK_EQ(GetElement(DType::kFloat32, model->value(0).data, 5), rank.rank() + 1.0);  // left as it was
    RANK_CHECK(model->grad(0).data == kept.data && model->value(1).data == kept_value.data);
    RANK_CHECK_EQ(head[69], 5.0f);  // rank 0's
    RANK_CHECK_EQ(GetElement(DType::kFloat32, frozen.data, 3), 0.0);
    for (int step = 1; step < 4; ++step) {
      Announce(rank, *model, {3, 2, 0}, step);
      RANK_CHECK_OK(model->FinishBackward());
      for (const size_t p : {size_t{0}, size_t{2}, size_t{3}}) {
        CheckGradient(rank, *model, p, [&](size_t q, size_t i) { return Average(rank.size(), q, i, step); });
      }
    }
    size_t seen = 0;
    model->ForEachGrad([&](size_t p, const Parameter& parameter) {
      seen += p;
      RANK_CHECK(!parameter.frozen && parameter.grad.data != nullptr);
    });
    RANK_CHECK_EQ(seen, size_t{5});

    // Back to the first list: layer2 trains again where it did, layer1 is new.
    RANK_CHECK_OK(model->SetParameters(MakeParameters({1000, 300, 2000})));
    RANK_CHECK(model->grad(0).data == kept.data && model->grad(2).data == frozen.data);
    CheckStep(rank, *model, {2, 1, 0}, 5);
    CheckStep(rank, *model, {0, 1, 2}, 6);
  });
}

TEST_CASE("what an accumulation has announced stays announced when parameters change") {
  RunOnRanks([](Rank& rank) {
    for (const UnusedParameters unused : {UnusedParameters::kError, UnusedParameters::kDetect}) {
      for (const bool copied : {false, true}) {
        DdpOptions options;
        options.unused = unused;
        options.bucket_bytes = 400;
        std::vector<Parameter> parameters = MakeParameters({100, 30, 200, 50});
        std::vector<float> own(100);
        if (copied) parameters[0].grad = {own.data(), own.size(), DType::kFloat32, {}};
        const Model model = Make(rank, parameters, options);
        CheckStep(rank, *model, {3, 2, 1, 0}, 0);
        auto local = std::make_unique<DistributedDataParallel::NoSync>(*model);
        Announce(rank, *model, {3, 2, 1, 0}, 1);
        RANK_CHECK_OK(model->FinishBackward());
        // "head" comes, layer1 goes, layer2 is frozen: layer0 is now number 1, layer2 number 2, layer3 number 3.
        std::vector<Parameter> next = {{"head", {}, {nullptr, 70, DType::kFloat32, {}}, {}}};
        for (const size_t p : {size_t{0}, size_t{2}, size_t{3}}) next.push_back(parameters[p]);
        next[2].frozen = true;
        RANK_CHECK_OK(model->SetParameters(next));
        RANK_CHECK_OK(model->BeginForward());
        local.reset();
        // The last micro-batch has nothing to add to layer0 (number 1); on rank 0 nothing to layer3 either.
        WriteGradient(rank, *model, 0, 2);
        model->GradReady(0);
        if (rank.rank() != 0) model->GradReady(3);
        RANK_CHECK_OK(model->FinishBackward());
        CheckGradient(rank, *model, 0, [&](size_t p, size_t i) { return Average(rank.size(), p, i, 2); });
        CheckGradient(rank, *model, 1, [&](size_t, size_t i) { return Average(rank.size(), 0, i, 1); });
        CheckGradient(rank, *model, 3, [&](size_t, size_t i) { return Average(rank.size(), 3, i, 1); });
        // Announced once, reduced once.
        if (unused == UnusedParameters::kDetect) {
          Announce(rank, *model, {0}, 3);
          RANK_CHECK_OK(model->FinishBackward());
          CheckGradient(rank, *model, 1, [&](size_t, size_t i) { return Average(rank.size(), 0, i, 1); });
        }
        // Thawed, layer2 needs a new gradient: SetParameters has dropped the one it had.
        next[2].frozen = false;
        RANK_CHECK_OK(model->SetParameters(next));
        CheckStep(rank, *model, {3, 2, 1, 0}, 4);
      }
    }
  });
}

TEST_CASE("a parameter that is frozen within an accumulation has nothing announced when it is thawed") {
  RunOnRanks([](Rank& rank) {
    const Model model = Make(rank, MakeParameters({100, 200}));
    auto local = std::make_unique<DistributedDataParallel::NoSync>(*model);
    Announce(rank, *model, {1, 0}, 0);
    RANK_CHECK_OK(model->FinishBackward());
    std::vector<Parameter> next = MakeParameters({100, 200});
    for (const bool frozen : {true, false}) {
      next[1].frozen = frozen;
      RANK_CHECK_OK(model->SetParameters(next));
    }
    local.reset();
    rank.Meet();
    const absl::Status status = model->FinishBackward();
    RANK_CHECK(absl::StrContains(status.message(), "without a gradient for 'layer1.weight';"), status.ToString());
  });
}

TEST_CASE("a bad list of parameters is refused on every rank, and the model goes on") {
  RunOnRanks([](Rank& rank) {
    DdpOptions options;
    options.check_nan = true;
    const Model model = Make(rank, MakeParameters({100, 200}), options);
    std::vector<Parameter> next = MakeParameters({100, 200});
    const int last = rank.size() - 1;
    if (rank.rank() == last) next[1].value.count = 201;
    RANK_CHECK_STATUS(model->SetParameters(next), StatusCode::kInvalidArgument, absl::StrCat("rank ", last),
                      "layer1.weight", "200", "201");
    next = MakeParameters({100, 200});
    if (rank.rank() == last) next.pop_back();
    if (rank.size() > 1) {
      RANK_CHECK_STATUS(model->SetParameters(next), StatusCode::kFailedPrecondition, "layer1.weight");
    }
    CheckStep(rank, *model, {1, 0}, 0);
    // Memory that is not to be had; the gradient of what was to be frozen is as it was.
    next = MakeParameters({100, 200, size_t{1} << 50});
    next[1].frozen = true;
    RANK_CHECK_STATUS(model->SetParameters(next), StatusCode::kResourceExhausted);
    RANK_CHECK_EQ(model->size(), size_t{2});
    CheckGradients(rank, *model, [&](size_t p, size_t i) { return Average(rank.size(), p, i, 0); });
    CheckStep(rank, *model, {1, 0}, 1);
  });
}

TEST_CASE("a hook that refuses other parameters leaves the model as it was") {
  class Refusing final : public CommHook {
   public:
    std::string name() const override { return "refusing"; }
    absl::Status Prepare(ProcessGroup&, absl::Span<const GradBucket> buckets) override {
      size_t gradients = 0;
      for (const GradBucket& bucket : buckets) gradients += bucket.gradients.size();
      return gradients == 2 ? absl::OkStatus() : absl::InvalidArgumentError("only two");
    }
    Work Start(ProcessGroup& group, const GradBucket& bucket, int) override {
      return group.AllReduce(bucket.buffer, bucket.buffer, bucket.reduce, bucket.stream);
    }
  };
  RunOnRanks([](Rank& rank) {
    DdpOptions options;
    options.hook = std::make_shared<Refusing>();
    options.check_nan = true;
    options.bucket_bytes = 400;
    const Model model = Make(rank, MakeParameters({100, 200}), options);
    CheckStep(rank, *model, {0, 1}, 0);
    const size_t spans = model->grad_spans().size();
    for (std::vector<Parameter> next : {MakeParameters({100, 200, 7}), MakeParameters({100, 200})}) {
      next[1].frozen = true;
      if (next.size() == 3) next[0].frozen = true;  // one gradient is left
      RANK_CHECK_STATUS(model->SetParameters(next), StatusCode::kInvalidArgument, "rank 0", "only two");
      RANK_CHECK_EQ(model->size(), size_t{2});
      RANK_CHECK(!model->parameter(0).frozen && !model->parameter(1).frozen);
      RANK_CHECK_EQ(model->grad_spans().size(), spans);
      CheckGradients(rank, *model, [&](size_t p, size_t i) { return Average(rank.size(), p, i, 0); });
    }
    CheckStep(rank, *model, {0, 1}, 1);
  });
}

TEST_CASE("a shape that SetParameters gives for a known parameter counts") {
  RunOnRanks([](Rank& rank) {
    const Model model = Make(rank, MakeParameters({100, 200}));
    std::vector<Parameter> next = MakeParameters({100, 200});
    next[1].shape = {10, 20};
    RANK_CHECK_OK(model->SetParameters(next));
    RANK_CHECK(model->parameter(1).shape == std::vector<int64_t>({10, 20}));
    RANK_CHECK_OK(model->SetParameters(MakeParameters({100, 200})));
    RANK_CHECK(model->parameter(1).shape == std::vector<int64_t>({10, 20}));
  });
}

TEST_CASE("a frozen parameter has no gradient to announce") {
  RunOnRanks([](Rank& rank) {
    std::vector<Parameter> parameters = MakeParameters({100, 200, 300});
    parameters[1].frozen = true;
    const Model model = Make(rank, parameters);
    for (size_t i = 0; i < 200; ++i) RANK_CHECK_EQ(GetElement(DType::kFloat32, model->grad(1).data, i), 0.0);
    RANK_CHECK(model->value(1).data != nullptr);
    Announce(rank, *model, {2, 0}, 0);
    RANK_CHECK_OK(model->FinishBackward());
    rank.Meet();
    model->GradReady(1);
    const absl::Status status = model->FinishBackward();
    RANK_CHECK(absl::StrContains(status.message(), "layer1.weight") && absl::StrContains(status.message(), "frozen"),
               status.ToString());
  });
}

TEST_CASE("a model whose parameters are all frozen makes steps, and trains on when they are thawed") {
  RunOnRanks([](Rank& rank) {
    for (int variant = 0; variant < 5; ++variant) {
      DdpOptions options;
      if (variant == 1) options.hook = CreatePowerSgdHook({.start_step = 0});
      if (variant == 2) options.unused = UnusedParameters::kDetect;
      if (variant == 3) options.static_graph = true;
      if (variant == 4) options.weighted = true;
      std::vector<Parameter> frozen = MakeParameters({100, 30});
      for (Parameter& p : frozen) p.frozen = true;
      const Model model = Make(rank, frozen, options);
      const auto frozen_steps = [&] {
        for (int step = 0; step < 2; ++step) {
          RANK_CHECK_OK(model->BeginForward());
          RANK_CHECK_OK(model->FinishBackward());
          RANK_CHECK_EQ(RANK_VALUE(model->ClipGradNorm(1)), 0.0);
          model->ZeroGrad();
        }
        RANK_CHECK(model->statistics().buckets.empty());
      };
      frozen_steps();
      RANK_CHECK_OK(model->SetParameters(MakeParameters({100, 30})));
      for (int step = 2; step < 4; ++step) CheckStep(rank, *model, {1, 0}, step);
      RANK_CHECK_OK(model->SetParameters(frozen));
      frozen_steps();
      DistributedDataParallel::Join join(*model);
      for (int step = 0; step < rank.rank(); ++step) RANK_CHECK_OK(model->FinishBackward());
      RANK_CHECK_OK(join.Finish());
      RANK_CHECK_EQ(model->statistics().steps, int64_t{6 + rank.size() - 1});
    }
  });
}

// For optimizers of flat ranges.
TEST_CASE("gradients and values have the same layout, also if a parameter is frozen from the start") {
  RunOnRanks([](Rank& rank) {
    std::vector<Parameter> parameters = MakeParameters({64, 65, 66});
    parameters[2].frozen = true;
    const Model model = Make(rank, parameters, {});
    const auto offset = [](absl::Span<const Buffer> spans, const Buffer& b) {
      return static_cast<const char*>(b.data) - static_cast<const char*>(spans[0].data);
    };
    for (const bool thawed : {false, true}) {
      if (thawed) {
        parameters[2].frozen = false;
        RANK_CHECK_OK(model->SetParameters(parameters));
      }
      RANK_CHECK_EQ(model->grad_spans().size(), size_t{1});
      RANK_CHECK_EQ(model->grad_spans()[0].count, model->value_spans()[0].count);
      for (size_t p = 0; p < model->size(); ++p) {
        const Buffer& grad = model->parameter(p).grad;
        RANK_CHECK_EQ(offset(model->grad_spans(), grad), offset(model->value_spans(), model->value(p)));
      }
      for (size_t p = thawed ? 3 : 2; p-- > 0;) {
        Fill(model->grad(p), static_cast<double>(p + 1));
        model->GradReady(p);
      }
      RANK_CHECK_OK(model->FinishBackward());
      RANK_CHECK_EQ(static_cast<const float*>(model->parameter(2).grad.data)[65], thawed ? 3.0F : 0.0F);
    }
  });
}

}  // namespace
}  // namespace ddp::testing
