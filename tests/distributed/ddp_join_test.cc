// SPDX-License-Identifier: Apache-2.0
// DistributedDataParallel: ranks with unequal numbers of steps.
#include <algorithm>
#include <cmath>
#include <optional>
#include <vector>

#include "ddp/distributed_data_parallel.h"
#include "tests/support/catch.h"
#include "tests/support/ddp_model.h"

namespace ddp::testing {
namespace {

using absl::StatusCode;
using Join = DistributedDataParallel::Join;

// Rank r takes so many steps: none, some, and most on a rank in the middle.
int Steps(int rank, int size) { return size == 1 ? 3 : rank == 0 ? 2 : rank == 1 ? 5 : 2 * (rank - 2); }

int Active(int size, int step) {
  int n = 0;
  for (int r = 0; r < size; ++r) n += step < Steps(r, size);
  return n;
}

int LastActive(int size) {
  int most = 0, last = 0;
  for (int r = 0; r < size; ++r) {
    if (Steps(r, size) >= most) most = Steps(r, size), last = r;
  }
  return last;
}

// The mean, or what it is while some are through.
double Expected(int size, size_t p, size_t i, int step, bool by_active) {
  double sum = 0;
  for (int r = 0; r < size; ++r) {
    if (step < Steps(r, size)) sum += Gradient(r, p, i, step);
  }
  return sum / (by_active ? Active(size, step) : size);
}

void CheckJoin(Rank& rank, DistributedDataParallel& model, bool by_active) {
  const int size = rank.size(), mine = Steps(rank.rank(), size);
  int shadowed = 0;
  JoinOptions join_options;
  join_options.divide_by_active = by_active;
  join_options.on_shadowed_step = [&] {
    const int step = mine + shadowed++;
    CheckGradients(rank, model, [&](size_t p, size_t i) { return Expected(size, p, i, step, by_active); });
    return absl::OkStatus();
  };
  Join join(model, join_options);
  std::vector<size_t> order = Backwards(model.size());
  for (int step = 0; step < mine; ++step) {
    std::rotate(order.begin(), order.begin() + 1 + rank.rank() % 2, order.end());
    RANK_CHECK_OK(model.BeginForward());
    Announce(rank, model, order, step);
    RANK_CHECK_OK(model.FinishBackward());
    CheckGradients(rank, model, [&](size_t p, size_t i) { return Expected(size, p, i, step, by_active); });
    SetElement(DType::kFloat32, model.value(0).data, 0, 100 * rank.rank() + step);
  }
  RANK_CHECK_OK(join.Finish());
  int most = 0;
  for (int r = 0; r < size; ++r) most = std::max(most, Steps(r, size));
  RANK_CHECK_EQ(shadowed, most - mine);
  // Everybody has the model of the rank that went on longest.
  RANK_CHECK_EQ(GetElement(DType::kFloat32, model.value(0).data, 0), 100.0 * LastActive(size) + most - 1);
}

TEST_CASE("ranks that are through take part until all are") {
  RunOnRanks([](Rank& rank) {
    for (const bool by_active : {false, true}) {
      for (const UnusedParameters unused : {UnusedParameters::kError, UnusedParameters::kDetect}) {
        float mean = 0;
        DdpOptions options;
        options.bucket_bytes = 20'000;
        options.unused = unused;
        options.buffers = {{"bn.mean", {&mean, 1, DType::kFloat32, {}}}};
        const Model model = Make(rank, MakeParameters({100, 3000, 1, 9000}), options);
        CheckStep(rank, *model, Backwards(4), 0);  // before
        CheckJoin(rank, *model, by_active);
        CheckStep(rank, *model, Backwards(4), 1);  // after
        CheckJoin(rank, *model, !by_active);       // and again
      }
    }
  });
}

TEST_CASE("joining goes with copied gradients, hooks, a static graph and micro-batches") {
  RunOnRanks([](Rank& rank) {
    for (int variant = 0; variant < 4; ++variant) {
      std::vector<Parameter> parameters = MakeParameters({100, 3000, 1, 9000});
      std::vector<float> own(9000);
      DdpOptions options;
      options.bucket_bytes = 2000;
      if (variant == 0) parameters[3].grad = {own.data(), own.size(), DType::kFloat32, {}};
      if (variant == 1) options.hook = CreateCompressionHook(DType::kFloat16);
      if (variant == 2) options.static_graph = true;
      const Model model = Make(rank, parameters, options);
      if (variant == 3) {
        const DistributedDataParallel::NoSync local(*model);
        Announce(rank, *model, Backwards(4), 7);
        RANK_CHECK_OK(model->FinishBackward());
      }
      CheckJoin(rank, *model, variant % 2 == 0);
      CheckStep(rank, *model, Backwards(4), 1);
      CheckStep(rank, *model, Backwards(4), 2);
    }
  });
}

TEST_CASE("the callback for a shadowed step may use the model") {
  RunOnRanks([](Rank& rank) {
    const Model model = Make(rank, MakeParameters({100, 30}));
    JoinOptions options;
    int shadowed = 0;
    options.on_shadowed_step = [&] {
      const int step = 1 + rank.rank() + shadowed++;
      RANK_CHECK_EQ(model->statistics().steps, int64_t{step + 1});
      RANK_CHECK(RANK_VALUE(model->GradNorm()) > 0);
      model->ZeroGrad();
      return absl::OkStatus();
    };
    Join join(*model, options);
    for (int step = 0; step < 1 + rank.rank(); ++step) {
      Announce(rank, *model, {1, 0}, step);
      RANK_CHECK_OK(model->FinishBackward());
    }
    RANK_CHECK_OK(join.Finish());
    RANK_CHECK_EQ(shadowed, rank.size() - 1 - rank.rank());
  });
}

TEST_CASE("ranks that are through tell nothing about the order of gradients, nor that they are used") {
  if (RankCount() == 1) return;
  RunOnRanks([](Rank& rank) {
    DdpOptions options;
    options.unused = UnusedParameters::kDetect;
    options.bucket_bytes = 400;
    const Model model = Make(rank, MakeParameters({100, 100, 100}), options);
    Join join(*model);
    for (int step = 0; step < (rank.rank() == 0 ? 0 : 2); ++step) {
      WriteGradient(rank, *model, 1, 7);
      Announce(rank, *model, {0, 2}, step);  // not in the order planned, and without 1
      RANK_CHECK_OK(model->FinishBackward());
      CheckGradient(rank, *model, 1, [&](size_t p, size_t i) { return Gradient(rank.rank(), p, i, 7); });
    }
    RANK_CHECK_OK(join.Finish());
    RANK_CHECK_EQ(model->statistics().plans, int64_t{2});  // as the first rank with inputs saw it
  });
}

TEST_CASE("steps that are not reduced are nobody else's business") {
  RunOnRanks([](Rank& rank) {
    const Model model = Make(rank, MakeParameters({100, 30}));
    Join join(*model);
    for (int step = 0; step < Steps(rank.rank(), rank.size()); ++step) {
      model->ZeroGrad();
      for (int part = 0; part <= rank.rank(); ++part) {  // as many micro-batches as the rank likes
        std::optional<DistributedDataParallel::NoSync> local;
        if (part != rank.rank()) local.emplace(*model);
        for (const size_t p : Backwards(2)) {
          WriteGradient(rank, *model, p, step, /*add=*/true);
          model->GradReady(p);
        }
        RANK_CHECK_OK(model->FinishBackward());
      }
      CheckGradients(rank, *model, [&](size_t p, size_t i) {
        double sum = 0;
        for (int r = 0; r < rank.size(); ++r) {
          if (step < Steps(r, rank.size())) sum += (r + 1) * Gradient(r, p, i, step);
        }
        return sum / rank.size();
      });
    }
    RANK_CHECK_OK(join.Finish());
  });
}

TEST_CASE("weights and joining") {
  RunOnRanks([](Rank& rank) {
    DdpOptions options;
    options.weighted = true;
    const Model model = Make(rank, MakeParameters({100}), options);
    Join join(*model);
    RANK_CHECK_STATUS(model->SetParameters(MakeParameters({100})), StatusCode::kFailedPrecondition, "inside of a Join");
    const auto weight = [](int r) { return r % 2 == 0 ? 2.0 : 4.0; };
    model->SetWeight(weight(rank.rank()));
    for (int step = 0; step < Steps(rank.rank(), rank.size()); ++step) {
      Announce(rank, *model, {0}, step);
      RANK_CHECK_OK(model->FinishBackward());
      double weights = 0;
      for (int r = 0; r < rank.size(); ++r) weights += step < Steps(r, rank.size()) ? weight(r) : 0;
      for (size_t i = 0; i < 100; ++i) {
        double sum = 0;
        for (int r = 0; r < rank.size(); ++r) {
          if (step < Steps(r, rank.size())) sum += weight(r) * Gradient(r, 0, i, step);
        }
        const double got = GetElement(DType::kFloat32, model->grad(0).data, i);
        RANK_CHECK(std::abs(got - sum / weights) < 1e-5, got);
      }
    }
    RANK_CHECK_OK(join.Finish());
  });
}

TEST_CASE("an accumulation that a Join cut off does not reach into the next one") {
  RunOnRanks([](Rank& rank) {
    float statistics[4] = {};
    DdpOptions options;
    options.buffers = {{"statistics", {statistics, 4, DType::kFloat32, {}}, false}};
    const Model model = Make(rank, MakeParameters({4}), options);
    for (int epoch = 0; epoch < 2; ++epoch) {
      Join join(*model);
      for (int micro = 0; micro < (rank.rank() == 0 ? 3 : 2); ++micro) {
        std::optional<DistributedDataParallel::NoSync> local;
        if (micro % 2 == 0) local.emplace(*model);
        RANK_CHECK_OK(model->BeginForward());
        Fill(model->grad(0), 1);
        model->GradReady(0);
        RANK_CHECK_OK(model->FinishBackward());
      }
      RANK_CHECK_OK(join.Finish());
    }
  });
}

// Rank 0 ends its first Join in the middle of an accumulation, behind the others' last step or by an error of all.
TEST_CASE("what was announced before a Join cut an accumulation off is not announced in the next one") {
  for (const bool early : {false, true}) {
    INFO(early);
    RunOnRanks([early](Rank& rank) {
      if (early && rank.size() == 1) return;
      DdpOptions options;
      options.unused = UnusedParameters::kDetect;
      const Model model = Make(rank, MakeParameters({4, 4}), options);
      {
        JoinOptions join_options;
        join_options.throw_on_early = early;
        Join join(*model, join_options);
        CheckStep(rank, *model, {1, 0}, 0);
        if (rank.rank() == 0) {
          const DistributedDataParallel::NoSync local(*model);
          Announce(rank, *model, {1, 0}, 7);
          RANK_CHECK_OK(model->FinishBackward());
        }
        const bool goes_on = early && rank.rank() != 0;
        if (goes_on) Announce(rank, *model, {1, 0}, 1);
        const absl::Status status = goes_on ? model->FinishBackward() : join.Finish();
        RANK_CHECK(status.code() == (early ? StatusCode::kOutOfRange : StatusCode::kOk), status.ToString());
      }
      Join join(*model);
      Announce(rank, *model, {1}, 1);
      Fill(model->grad(0), 5);
      RANK_CHECK_OK(model->FinishBackward());
      CheckGradient(rank, *model, 1, [&](size_t p, size_t i) { return Average(rank.size(), p, i, 1); });
      CheckGradient(rank, *model, 0, [](size_t, size_t) { return 5; });  // nobody used it
      RANK_CHECK_OK(join.Finish());
    });
  }
}

}  // namespace
}  // namespace ddp::testing
