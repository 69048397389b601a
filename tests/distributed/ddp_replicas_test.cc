// SPDX-License-Identifier: Apache-2.0
// DistributedDataParallel: ranks whose values are no longer equal find out, and misuse that would take them apart is
// logged when it happens.
#include <cstdlib>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ddp/distributed_data_parallel.h"
#include "tests/support/catch.h"
#include "tests/support/ddp_model.h"
#include "tests/support/logged.h"

namespace ddp::testing {
namespace {

using absl::StatusCode;

DdpOptions Checked(int64_t every) {
  DdpOptions options;
  options.check_replicas = every;
  return options;
}

int LastRank(const Rank& rank) { return rank.size() - 1; }
bool IsLast(const Rank& rank) { return rank.rank() == LastRank(rank); }

absl::Status Step(Rank& rank, DistributedDataParallel& model, int step) {
  Announce(rank, model, Backwards(model.size()), step);
  return model.FinishBackward();
}

// value -= grad, as an optimizer does.
void Descend(DistributedDataParallel& model) {
  for (size_t p = 0; p < model.size(); ++p) {
    const Buffer value = model.value(p), grad = model.grad(p);
    for (size_t i = 0; i < value.count; ++i) {
      SetElement(value.dtype, value.data, i,
                 GetElement(value.dtype, value.data, i) - GetElement(grad.dtype, grad.data, i));
    }
  }
}

void FlipLowestBit(const Buffer& b, size_t element) { static_cast<char*>(b.data)[element * SizeOf(b.dtype)] ^= 1; }

TEST_CASE("values that are equal pass every check") {
  RunOnRanks([](Rank& rank) {
    for (const int64_t every : {1, 2}) {
      PowerSgdOptions power;
      power.start_step = 1;
      std::vector<DdpOptions> cases = Variants(Checked(every));
      cases.push_back(Checked(every));
      cases.back().hook = CreatePowerSgdHook(power);
      for (const DdpOptions& options : cases) {
        std::vector<Parameter> parameters = MakeParameters({7, 300, 0, 4000});
        parameters[1].frozen = true;
        const Model model = Make(rank, parameters, options);
        for (int step = 0; step < 4; ++step) {
          Announce(rank, *model, {3, 2, 0}, step);
          RANK_CHECK_OK(model->FinishBackward());
          for (const size_t p : {size_t{0}, size_t{3}}) {
            SetElement(DType::kFloat32, model->value(p).data, 0, GetElement(DType::kFloat32, model->grad(p).data, 0));
          }
        }
      }
    }
  });
}

TEST_CASE("one bit that differs is found on every rank, and the model can go on") {
  const Logged logged;
  RunOnRanks([](Rank& rank) {
    if (rank.size() == 1) return;
    const std::vector<size_t> counts = {7, 300, 1, 4001};
    for (size_t victim = 0; victim < counts.size(); ++victim) {
      std::vector<Parameter> parameters = MakeParameters(counts, victim == 2 ? DType::kBFloat16 : DType::kFloat32);
      parameters[1].frozen = true;
      const Model model = Make(rank, parameters, Checked(3));
      const auto step = [&](int number) {
        Announce(rank, *model, {3, 2, 0}, number);
        return model->FinishBackward();
      };
      RANK_CHECK_OK(step(0));
      if (IsLast(rank)) FlipLowestBit(model->value(victim), counts[victim] - 1);
      for (int i = 1; i < 4; ++i) RANK_CHECK_OK(step(i));  // the fourth step is checked
      const absl::Status status = step(4);
      RANK_CHECK_STATUS(status, StatusCode::kFailedPrecondition, absl::StrCat("parameter 'layer", victim, ".weight'"),
                        absl::StrCat("rank ", LastRank(rank), " has other values"),
                        rank.size() == 2   ? "than rank 0 "
                        : rank.size() == 3 ? "than ranks 0, 1 "
                                           : "than ranks 0, 1, 2 ",
                        "1 of 4 differ", "step 4", "all were equal in step 1");
      // The step itself was made, and the group works.
      for (const size_t p : {size_t{0}, size_t{3}}) {
        if (victim == 2) break;
        CheckGradient(rank, *model, p, [&](size_t q, size_t i) { return Average(rank.size(), q, i, 4); });
      }
      RANK_CHECK_OK(rank.group().status());
      RANK_CHECK_OK(model->BroadcastValues(LastRank(rank)));
      for (int i = 5; i < 12; ++i) RANK_CHECK_OK(step(i));
    }
  });
}

TEST_CASE("a check names the ranks that differ from most of the others") {
  const Logged logged;
  RunOnRanks([](Rank& rank) {
    if (rank.size() < 3) return;
    const Model model = Make(rank, MakeParameters({10, 20, 30}), Checked(1));
    if (rank.rank() == 0) FlipLowestBit(model->value(1), 3);
    if (rank.rank() == 1) FlipLowestBit(model->value(2), 0);
    RANK_CHECK_OK(Step(rank, *model, 0));
    RANK_CHECK_STATUS(Step(rank, *model, 1), StatusCode::kFailedPrecondition,
                      "rank 0 has other values of parameter 'layer1.weight'", "than ranks 1, 2", "2 of 3 differ");
  });
}

TEST_CASE("values filled after Create differ until they are broadcast") {
  const Logged logged;
  RunOnRanks([](Rank& rank) {
    for (const bool broadcast : {false, true}) {
      double counter = rank.rank() + 1.0;
      DdpOptions options = Checked(100);
      options.buffers = {{"counter", {&counter, 1, DType::kFloat64, {}}}};
      std::vector<Parameter> parameters = MakeParameters({50, 60});
      parameters[1].frozen = true;
      const Model model = Make(rank, parameters, options);
      for (size_t p = 0; p < 2; ++p) {
        for (size_t i = 0; i < model->value(p).count; ++i) {
          SetElement(DType::kFloat32, model->value(p).data, i, rank.rank() + 3.0);
        }
      }
      counter = rank.rank() + 7.0;
      if (broadcast) {
        RANK_CHECK_OK(model->BroadcastValues(LastRank(rank)));
        RANK_CHECK_EQ(GetElement(DType::kFloat32, model->value(0).data, 49), LastRank(rank) + 3.0);
        RANK_CHECK_EQ(GetElement(DType::kFloat32, model->value(1).data, 59), LastRank(rank) + 3.0);
        RANK_CHECK_EQ(counter, LastRank(rank) + 7.0);
      }
      Announce(rank, *model, {0}, 0);
      RANK_CHECK_OK(model->FinishBackward());
      Announce(rank, *model, {0}, 1);
      const absl::Status status = model->FinishBackward();
      if (broadcast || rank.size() == 1) {
        RANK_CHECK_OK(status);
      } else {
        RANK_CHECK_STATUS(status, StatusCode::kFailedPrecondition, "'layer0.weight'", "BroadcastValues",
                          "no check before");
      }
    }
  });
}

TEST_CASE("BroadcastValues is refused where not all ranks can take part") {
  RunOnRanks([](Rank& rank) {
    const Model model = Make(rank, MakeParameters({50}));
    const std::string me = absl::StrCat("rank ", rank.rank());
    WriteGradient(rank, *model, 0, 0);
    model->GradReady(0);
    RANK_CHECK_STATUS(model->BroadcastValues(), StatusCode::kFailedPrecondition, me, "in the middle of a step");
    RANK_CHECK_OK(model->FinishBackward());
    DistributedDataParallel::Join join(*model);
    RANK_CHECK_STATUS(model->BroadcastValues(), StatusCode::kFailedPrecondition, me, "inside a Join");
    RANK_CHECK_OK(join.Finish());
    RANK_CHECK_OK(model->BroadcastValues());
    RANK_CHECK_STATUS(model->BroadcastValues(rank.size()), StatusCode::kInvalidArgument, me);
  });
}

// --- what takes ranks apart -----------------------------------------------------------------------------------------

// Steps until a check finds that parameter 0 differs; `step` makes them, wrongly.
void CheckFound(Rank& rank, DdpOptions options,
                const std::function<absl::Status(DistributedDataParallel&, int)>& step) {
  options.check_replicas = 2;
  const Model model = Make(rank, MakeParameters({40, 30}), options);
  absl::Status status;
  for (int number = 0; number < 5 && status.ok(); ++number) {
    status = step(*model, number);
    if (status.ok()) Descend(*model);
  }
  if (rank.size() == 1) return RANK_CHECK_OK(status);
  RANK_CHECK_STATUS(status, StatusCode::kFailedPrecondition, "'layer0.weight'", "step 3", "all were equal in step 1");
}

TEST_CASE("a gradient that kDetect takes for unused on all ranks is found by its values, and told of") {
  Logged logged;
  RunOnRanks([](Rank& rank) {
    DdpOptions options;
    options.unused = UnusedParameters::kDetect;
    CheckFound(rank, options, [&](DistributedDataParallel& model, int step) {
      for (size_t p = 0; p < 2; ++p) WriteGradient(rank, model, p, step);
      model.GradReady(1);  // and 0 is forgotten
      return model.FinishBackward();
    });
  });
  if (RanksAreThreads()) CHECK(logged.Count({"no rank", "'layer0.weight'", "kDetect"}) == 1);
}

TEST_CASE("a gradient that changes after it was reduced is found by its values") {
  const Logged logged;
  RunOnRanks([](Rank& rank) {
    CheckFound(rank, {}, [&](DistributedDataParallel& model, int step) {
      absl::Status status = Step(rank, model, step);
      WriteGradient(rank, model, 0, step, /*add=*/true);  // a tied weight's last contribution, too late
      return status;
    });
  });
}

TEST_CASE("a gradient announced twice is logged at once, as FinishBackward may never come") {
  Logged logged;
  RunOnRanks([](Rank& rank) {
    const Model model = Make(rank, MakeParameters({40}));
    rank.Meet();  // a model that goes in the middle of a step ends the group
    for (int i = 0; i < 3; ++i) model->GradReady(0);
    rank.Meet();
  });
  if (RanksAreThreads()) CHECK(logged.Count({"rank ", "'layer0.weight'", "announced twice"}) == RankCount());
}

TEST_CASE("a model that goes with accumulated gradients says so") {
  Logged logged;
  RunOnRanks([](Rank& rank) {
    const Model model = Make(rank, MakeParameters({40, 50}));
    RANK_CHECK_OK(Step(rank, *model, 0));
    const DistributedDataParallel::NoSync local(*model);
    model->GradReady(1);
    RANK_CHECK_OK(model->FinishBackward());
  });
  if (RanksAreThreads())
    CHECK(logged.Count({"destroyed with accumulated gradients", ": 'layer1.weight'."}) == RankCount());
  Logged silent;
  RunOnRanks([](Rank& rank) {
    const Model model = Make(rank, MakeParameters({40, 50}));
    {
      const DistributedDataParallel::NoSync local(*model);
      model->GradReady(1);
      RANK_CHECK_OK(model->FinishBackward());
    }
    RANK_CHECK_OK(Step(rank, *model, 0));
    const DistributedDataParallel::NoSync local(*model);
    model->GradReady(0);
    RANK_CHECK_OK(model->FinishBackward());
    model->ZeroGrad();
  });
  CHECK(silent.Count({}) == 0);
}

TEST_CASE("what the last check has found is logged when the model goes") {
  Logged logged;
  RunOnRanks([](Rank& rank) {
    const Model model = Make(rank, MakeParameters({40, 50}), Checked(1));
    if (IsLast(rank)) FlipLowestBit(model->value(1), 2);
    RANK_CHECK_OK(Step(rank, *model, 0));
  });
  if (RanksAreThreads() && RankCount() > 1) CHECK(logged.Count({"'layer1.weight'", "step 1"}) == 1);
}

// --- together with other parts --------------------------------------------------------------------------------------

TEST_CASE("buffers are compared if they are said to be replicated") {
  const Logged logged;
  RunOnRanks([](Rank& rank) {
    for (const bool replicated : {false, true}) {
      float statistics[3] = {};
      DdpOptions options = Checked(1);
      options.broadcast_buffers = false;
      options.buffers = {{"running", {statistics, 3, DType::kFloat32, {}}, replicated}};
      const Model model = Make(rank, MakeParameters({100}), options);
      RANK_CHECK_OK(Step(rank, *model, 0));
      statistics[2] = static_cast<float>(rank.rank());
      RANK_CHECK_OK(Step(rank, *model, 1));
      const absl::Status status = Step(rank, *model, 2);
      if (replicated && rank.size() > 1) {
        RANK_CHECK_STATUS(status, StatusCode::kFailedPrecondition, "buffer 'running'", "step 2");
      } else {
        RANK_CHECK_OK(status);
      }
    }
  });
}

TEST_CASE("passes that are not reduced neither check nor tell") {
  const Logged logged;
  RunOnRanks([](Rank& rank) {
    const Model model = Make(rank, MakeParameters({100, 3}), Checked(1));
    if (IsLast(rank)) FlipLowestBit(model->value(1), 1);
    const auto accumulate = [&](int step) {
      const DistributedDataParallel::NoSync local(*model);
      RANK_CHECK_OK(Step(rank, *model, step));
    };
    accumulate(0);
    RANK_CHECK_OK(Step(rank, *model, 1));  // the first reduced step
    accumulate(2);
    const absl::Status status = Step(rank, *model, 3);
    if (rank.size() > 1) {
      RANK_CHECK_STATUS(status, StatusCode::kFailedPrecondition, "'layer1.weight'", "step 1");
    } else {
      RANK_CHECK_OK(status);
    }
  });
}

TEST_CASE("in a Join only ranks that still train are compared") {
  const Logged logged;
  RunOnRanks([](Rank& rank) {
    for (const bool apart : {false, true}) {
      const Model model = Make(rank, MakeParameters({100, 3}), Checked(1));
      DistributedDataParallel::Join join(*model);
      const int steps = rank.rank() == 0 ? 2 : 5;
      absl::Status status;
      for (int step = 0; step < steps && status.ok(); ++step) {
        status = Step(rank, *model, step);
        if (status.ok()) Descend(*model);
        if (apart && IsLast(rank) && step == 2) FlipLowestBit(model->value(1), 1);
      }
      if (apart && rank.size() > 2) {  // at least two go on
        if (rank.rank() == 0) status = join.Finish();
        RANK_CHECK_STATUS(status, StatusCode::kFailedPrecondition, "'layer1.weight'", "step 3");
      } else {
        RANK_CHECK_OK(status);
        RANK_CHECK_OK(join.Finish());
        // All have equal values again.
        for (int step = 0; step < 3; ++step) RANK_CHECK_OK(Step(rank, *model, step));
      }
      RANK_CHECK_OK(rank.group().status());
    }
  });
}

TEST_CASE("a check survives other parameters, and tells what it has found before they change") {
  const Logged logged;
  RunOnRanks([](Rank& rank) {
    if (rank.size() == 1) return;
    const Model model = Make(rank, MakeParameters({100, 3}), Checked(2));
    RANK_CHECK_OK(Step(rank, *model, 0));
    RANK_CHECK_OK(model->SetParameters(MakeParameters({100, 3, 50})));
    if (IsLast(rank)) FlipLowestBit(model->value(2), 1);
    RANK_CHECK_OK(Step(rank, *model, 1));
    RANK_CHECK_OK(Step(rank, *model, 2));
    RANK_CHECK_STATUS(model->SetParameters(MakeParameters({100, 3})), StatusCode::kFailedPrecondition,
                      "'layer2.weight'", "step 3", "1 of 3");
    RANK_CHECK_EQ(model->size(), size_t{3});
    RANK_CHECK_OK(model->SetParameters(MakeParameters({100, 3})));
    for (int step = 3; step < 7; ++step) RANK_CHECK_OK(Step(rank, *model, step));
  });
}

TEST_CASE("checks go on at the same steps in another group") {
  const Logged logged;
  RunOnRanks([](Rank& rank) {
    if (rank.size() == 1) return;
    const std::unique_ptr<ProcessGroup> alone = RANK_VALUE(rank.group().Split(rank.rank(), 0));
    const std::unique_ptr<ProcessGroup> together = RANK_VALUE(rank.group().Split(0, rank.rank()));
    const Model model = Make(rank, MakeParameters({100, 3}), Checked(2));
    RANK_CHECK_OK(Step(rank, *model, 0));
    RANK_CHECK_OK(model->Rebind(*alone));
    for (int i = 0; i < 1 + 2 * rank.rank(); ++i) {  // different numbers of steps, then 2 on all ranks
      model->GradReady(0);
      model->GradReady(1);
      RANK_CHECK_OK(model->FinishBackward());
    }
    RANK_CHECK_OK(model->Rebind(*together));
    if (IsLast(rank)) FlipLowestBit(model->value(0), 1);
    RANK_CHECK_OK(Step(rank, *model, 2));
    RANK_CHECK_STATUS(Step(rank, *model, 3), StatusCode::kFailedPrecondition, "'layer0.weight'", "step 3",
                      "no check before");
  });
}

// --- the variable ---------------------------------------------------------------------------------------------------

class Variable {
 public:
  explicit Variable(const char* value) { setenv("DDP_CHECK_REPLICAS", value, 1); }
  ~Variable() { unsetenv("DDP_CHECK_REPLICAS"); }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;
};

TEST_CASE("DDP_CHECK_REPLICAS checks where the program does not say") {
  const Logged logged;
  const Variable variable("2");
  RunOnRanks([](Rank& rank) {
    for (const bool said : {false, true}) {
      const Model model = Make(rank, MakeParameters({100}), said ? Checked(0) : DdpOptions());
      if (IsLast(rank)) FlipLowestBit(model->value(0), 1);
      RANK_CHECK_OK(Step(rank, *model, 0));
      const absl::Status status = Step(rank, *model, 1);
      if (said || rank.size() == 1) {
        RANK_CHECK_OK(status);
      } else {
        RANK_CHECK_STATUS(status, StatusCode::kFailedPrecondition, "'layer0.weight'");
      }
    }
  });
}

TEST_CASE("a bad interval of checks is refused, and one that is not the same on all ranks") {
  const auto refused = [](const char* text) {
    const Variable variable(text);
    RunOnRanks([&](Rank& rank) {
      RANK_CHECK_STATUS(DistributedDataParallel::Create(rank.group(), MakeParameters({100})),
                        StatusCode::kInvalidArgument, absl::StrCat("rank ", rank.rank()), "DDP_CHECK_REPLICAS", text);
    });
  };
  refused("-1");
  refused("often");
  RunOnRanks([](Rank& rank) {
    RANK_CHECK_STATUS(DistributedDataParallel::Create(rank.group(), MakeParameters({100}), Checked(-5)),
                      StatusCode::kInvalidArgument, "check_replicas is -5");
    if (rank.size() == 1) return;
    RANK_CHECK_STATUS(
        DistributedDataParallel::Create(rank.group(), MakeParameters({100}), Checked(IsLast(rank) ? 7 : 8)),
        StatusCode::kFailedPrecondition, "check_replicas=7", "check_replicas=8");
  });
}

}  // namespace
}  // namespace ddp::testing
