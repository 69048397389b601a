// SPDX-License-Identifier: Apache-2.0
// DistributedDataParallel: what goes wrong in a Join.
#include <cmath>
#include <memory>
#include <utility>
#include <vector>

#include "ddp/distributed_data_parallel.h"
#include "libddp/base/failed_ranks.h"
#include "tests/support/catch.h"
#include "tests/support/ddp_model.h"
#include "tests/support/forwarding_group.h"

namespace ddp::testing {
namespace {

using absl::StatusCode;
using Join = DistributedDataParallel::Join;

TEST_CASE("throw_on_early ends every rank's loop when the first one is through, and the group lives") {
  if (RankCount() == 1) return;
  RunOnRanks([](Rank& rank) {
    const Model model = Make(rank, MakeParameters({100, 30}));
    {
      JoinOptions options;
      options.throw_on_early = true;
      Join join(*model, options);
      const bool early = rank.rank() == 1;
      absl::Status status;
      int steps = 0;
      while (status.ok() && !(early && steps == 2)) {
        Announce(rank, *model, {1, 0}, steps);
        status = model->FinishBackward();
        steps += status.ok();
      }
      if (early) status = join.Finish();
      RANK_CHECK_EQ(steps, 2);
      RANK_CHECK_STATUS(status, StatusCode::kOutOfRange, "rank 1 has no more inputs", "throw_on_early");
    }
    CheckStep(rank, *model, {1, 0}, 5);
  });
}

TEST_CASE("an error that all ranks have had ends a Join, and a step in it is refused") {
  RunOnRanks([](Rank& rank) {
    float mean = 0;
    DdpOptions options;
    options.check_nan = true;
    options.buffers = {{"mean", {&mean, 1, DType::kFloat32, {}}, false}};
    const Model model = Make(rank, MakeParameters({4}), options);
    {
      Join join(*model);
      const auto step = [&](float gradient) {
        Fill(model->grad(0), gradient);
        model->GradReady(0);
        return model->FinishBackward();
      };
      RANK_CHECK_OK(step(1));
      const bool through = rank.size() > 1 && rank.rank() == rank.size() - 1;
      RANK_CHECK_STATUS(through ? join.Finish() : step(rank.rank() == 0 ? NAN : 1), StatusCode::kDataLoss,
                        "rank 0 has an infinity or a NaN");
      for (const absl::Status& refused : {step(1), model->BeginForward(), join.Finish()}) {
        RANK_CHECK_STATUS(refused, StatusCode::kFailedPrecondition, absl::StrCat("rank ", rank.rank()),
                          "this Join is over");
      }
    }
    RANK_CHECK_OK(rank.group().status());
    RANK_CHECK_OK(model->BeginForward());
    CheckStep(rank, *model, {0}, 0);
  });
}

TEST_CASE("an error in a shadowed step ends every rank's training") {
  if (RankCount() == 1) return;
  RunOnRanks([](Rank& rank) {
    const Model model = Make(rank, MakeParameters({100}));
    JoinOptions options;
    options.on_shadowed_step = [] {  // of another group, where rank 0 may be another one
      return WithFailedRanks(absl::DataLossError("the scale is gone"), {0});
    };
    Join join(*model, options);
    absl::Status status;
    for (int step = 0; status.ok() && (rank.rank() == 0 ? step < 1 : step < 100); ++step) {
      Announce(rank, *model, {0}, step);
      status = model->FinishBackward();
    }
    if (rank.rank() == 0) status = join.Finish();
    RANK_CHECK(absl::StrContains(status.message(), "on_shadowed_step: the scale is gone"), status.ToString());
    RANK_CHECK(FailedRanks(status).empty());
  });
}

TEST_CASE("a Join that is left without Finish ends the others with a reason") {
  if (RankCount() == 1) return;
  RunOnRanks([](Rank& rank) {
    const Model model = Make(rank, MakeParameters({100}));
    absl::Status status;
    {
      Join join(*model);
      Announce(rank, *model, {0}, 0);
      RANK_CHECK_OK(model->FinishBackward());
      rank.Meet();
      if (rank.rank() != 1) status = join.Finish();
    }
    if (rank.rank() != 1) RANK_CHECK_STATUS(status, StatusCode::kAborted, "rank 1 left a Join without Finish");
  });
}

TEST_CASE("a Join begun in the middle of a step is refused, also if only one rank does that") {
  for (const bool all : {true, false}) {
    INFO(all);
    RunOnRanks([all](Rank& rank) {
      const Model model = Make(rank, MakeParameters({100, 30}));
      {  // leaves notes that are not of the next step
        Join join(*model);
        CheckStep(rank, *model, {1, 0}, 0);
        RANK_CHECK_OK(join.Finish());
      }
      rank.Meet();
      const bool early = all || rank.rank() == 0;
      if (early) Announce(rank, *model, {1}, 0);
      Join join(*model);
      Announce(rank, *model, early ? std::vector<size_t>{0} : std::vector<size_t>{1, 0}, 0);
      const absl::Status status = model->FinishBackward();
      const bool own = all || rank.rank() == 0;
      RANK_CHECK_STATUS(status, own ? StatusCode::kFailedPrecondition : StatusCode::kAborted,
                        "a Join begun in the middle of a step");
    });
  }
}

TEST_CASE("a Join that is over may go when the next one has begun") {
  RunOnRanks([](Rank& rank) {
    const Model model = Make(rank, MakeParameters({100}));
    std::unique_ptr<Join> join;
    for (int epoch = 0; epoch < 3; ++epoch) {
      auto next = std::make_unique<Join>(*model);
      if (join != nullptr) RANK_CHECK_STATUS(join->Finish(), StatusCode::kFailedPrecondition, "this Join is over");
      join = std::move(next);  // destroys the last one
      for (int step = 0; step < 1 + rank.rank(); ++step) {
        Announce(rank, *model, {0}, step);
        RANK_CHECK_OK(model->FinishBackward());
      }
      RANK_CHECK_OK(join->Finish());
    }
    CheckStep(rank, *model, {0}, 0);
  });
}

TEST_CASE("a Join inside of another one is refused") {
  RunOnRanks([](Rank& rank) {
    const Model model = Make(rank, MakeParameters({100}));
    Join join(*model);
    Announce(rank, *model, {0}, 0);
    RANK_CHECK_OK(model->FinishBackward());
    rank.Meet();
    {
      Join inner(*model);
      RANK_CHECK_STATUS(inner.Finish(), StatusCode::kFailedPrecondition, "this Join was refused");
    }
    RANK_CHECK_OK(rank.group().status());
    rank.Meet();
    Announce(rank, *model, {0}, 1);
    const absl::Status status = model->FinishBackward();
    RANK_CHECK(absl::StrContains(status.message(), "a Join begun inside of another one"), status.ToString());
  });
}

TEST_CASE("different options of a Join, or different steps in one, are told") {
  if (RankCount() == 1) return;
  RunOnRanks([](Rank& rank) {
    const Model model = Make(rank, MakeParameters({100}));
    {
      JoinOptions options;
      options.divide_by_active = rank.rank() == 1;
      Join join(*model, options);
      Announce(rank, *model, {0}, 0);
      RANK_CHECK_STATUS(model->FinishBackward(), StatusCode::kFailedPrecondition, "rank 1", "divide_by_active=1",
                        "divide_by_active=0");
    }
    float mean = 0;
    DdpOptions ddp;
    ddp.buffers = {{"mean", {&mean, 1, DType::kFloat32, {}}}};
    const Model other = Make(rank, MakeParameters({100}), ddp);
    Join join(*other);
    absl::Status status = rank.rank() == 1 ? other->BeginForward() : absl::OkStatus();
    if (rank.rank() != 1) {
      other->GradReady(0);
      status = other->FinishBackward();
    }
    RANK_CHECK_STATUS(status, StatusCode::kFailedPrecondition, "rank 1 begins a forward pass",
                      "rank 0 begins a reduced step");
  });
}

TEST_CASE("a rank that is through goes on after Rebind, too") {
  if (RankCount() == 1) return;
  RunOnRanks([](Rank& rank) {
    const auto first = RANK_VALUE(rank.group().Split(0, rank.rank())),
               second = RANK_VALUE(rank.group().Split(0, rank.rank()));
    Model model = RANK_VALUE(DistributedDataParallel::Create(*first, MakeParameters({4}), {}));
    {
      Join join(*model);
      const auto step = [&] {
        Fill(model->grad(0), 1);
        model->GradReady(0);
        return model->FinishBackward();
      };
      RANK_CHECK_OK(step());
      rank.Meet();  // all have taken it
      const bool goes_on = rank.rank() == 0;
      if (goes_on) first->Abort(absl::AbortedError("the link is down"));
      RANK_CHECK_STATUS(goes_on ? step() : join.Finish(), StatusCode::kAborted, "the link is down");
      RANK_CHECK_OK(model->Rebind(*second));
      if (goes_on) RANK_CHECK_OK(step());
      RANK_CHECK_OK(join.Finish());
      RANK_CHECK_STATUS(join.Finish(), StatusCode::kFailedPrecondition, "over");
      rank.Meet();
    }
    model.reset();
  });
}

TEST_CASE("a failure while the last model is copied: the next group has it, or says that nobody does") {
  for (const bool lost : {false, true}) {  // the rank that has it
    INFO(lost);
    RunOnRanks([lost](Rank& rank) {
      if (rank.size() == 1) return;
      const bool last = rank.rank() == rank.size() - 1;
      const auto first = RANK_VALUE(rank.group().Split(0, rank.rank()));
      const auto second = RANK_VALUE(rank.group().Split(lost && last ? -1 : 0, rank.rank()));
      bool copying = false;
      FailingGroup failing(
          *first, [&](const Call& call) { return copying && call.kind == Call::Kind::kBroadcast; },
          [&] { rank.Meet(); });
      Model model = RANK_VALUE(DistributedDataParallel::Create(failing, MakeParameters({4}), {.replan = false}));
      copying = true;
      {
        Join join(*model);
        Fill(model->value(0), rank.rank());
        if (last) {
          model->GradReady(0);
          RANK_CHECK_OK(model->FinishBackward());
        }
        RANK_CHECK_STATUS(join.Finish(), StatusCode::kAborted, "a rank is gone");
        if (second != nullptr) {
          RANK_CHECK_OK(model->Rebind(*second));
          const absl::Status status = join.Finish();
          if (lost) RANK_CHECK_STATUS(status, StatusCode::kDataLoss, "start from a checkpoint");
          if (!lost) RANK_CHECK_OK(status);
          if (!lost) RANK_CHECK_EQ(GetElement(DType::kFloat32, model->value(0).data, 3), rank.size() - 1.0);
        }
        rank.Meet();
      }
      model.reset();
    });
  }
}

}  // namespace
}  // namespace ddp::testing
