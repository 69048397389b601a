// SPDX-License-Identifier: Apache-2.0
// DdpOptions::check_nan: an infinity or a NaN is reported with its rank and parameter, on all ranks alike.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ddp/distributed_data_parallel.h"
#include "tests/support/catch.h"
#include "tests/support/ddp_model.h"
#include "tests/support/logged.h"

namespace ddp::testing {
namespace {

using absl::StatusCode;

DdpOptions Checked() {
  DdpOptions options;
  options.check_nan = true;
  return options;
}

// Backward with `bad` as the last element of the gradients in `where`.
void Spoiled(Rank& rank, DistributedDataParallel& model, const std::vector<size_t>& where, double bad = NAN) {
  for (const size_t p : Backwards(model.size())) {
    WriteGradient(rank, model, p, 0);
    const Buffer grad = model.grad(p);
    if (std::find(where.begin(), where.end(), p) != where.end()) SetElement(grad.dtype, grad.data, grad.count - 1, bad);
    model.GradReady(p);
  }
}
absl::Status Step(Rank& rank, DistributedDataParallel& model, const std::vector<size_t>& where, double bad = NAN) {
  Spoiled(rank, model, where, bad);
  return model.FinishBackward();
}

TEST_CASE("a NaN or an infinity is reported on all ranks with the rank, the parameter and the step") {
  Logged logged;
  RunOnRanks([](Rank& rank) {
    const int last = rank.size() - 1;
    std::vector<DdpOptions> cases = Variants(Checked());
    cases.resize(9, Checked());
    cases[7].bucket_bytes = 1;
    cases[8].check_replicas = 1;
    for (const DdpOptions& options : cases) {
      for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
        if (options.hook != nullptr && dtype != DType::kFloat32) continue;
        const Model model = Make(rank, MakeParameters(kCounts, dtype), options);
        RANK_CHECK_OK(Step(rank, *model, {}));
        for (const double bad : {double{NAN}, HUGE_VAL, -HUGE_VAL}) {
          const int64_t step = model->statistics().steps + 1;
          const std::vector<size_t> where = rank.rank() == last ? std::vector<size_t>{4} : std::vector<size_t>();
          RANK_CHECK_STATUS(Step(rank, *model, where, bad), StatusCode::kDataLoss,
                            absl::StrCat("rank ", last, " has an infinity or a NaN in the gradient of 'layer4.weight'"),
                            absl::StrCat(", in step ", step, " before the sum"));
          RANK_CHECK_OK(rank.group().status());
          RANK_CHECK_EQ(model->statistics().steps, step);
        }
        RANK_CHECK_OK(Step(rank, *model, {}));
      }
    }
  });
  if (RanksAreThreads()) CHECK(logged.Count({"infinity or a NaN"}) == 9 * 2 * 3 - 3);
}

TEST_CASE("of several ranks and parameters, each rank's first gradient is named") {
  const Logged logged;
  RunOnRanks([](Rank& rank) {
    const Model model = Make(rank, MakeParameters(kCounts), Checked());
    // Rank 0: 6 and 2; every other one: 1.
    const absl::Status status =
        Step(rank, *model, rank.rank() == 0 ? std::vector<size_t>{2, 6} : std::vector<size_t>{1});
    RANK_CHECK_STATUS(status, StatusCode::kDataLoss, "rank 0 has", "'layer6.weight' (the first of 2)");
    for (int r = 1; r < rank.size(); ++r) {
      RANK_CHECK_STATUS(status, StatusCode::kDataLoss, absl::StrCat("rank ", r, " in that of 'layer1.weight'"));
    }
    // The first one is the first to be ready in this step, whatever the plan expects.
    DdpOptions fixed = Checked();
    fixed.replan = false;
    const Model forwards = Make(rank, MakeParameters(kCounts), fixed);
    for (size_t p = 0; p < model->size(); ++p) {
      WriteGradient(rank, *forwards, p, 0);
      if (p == 2 || p == 6) SetElement(DType::kFloat32, forwards->grad(p).data, 0, NAN);
      forwards->GradReady(p);
    }
    RANK_CHECK_STATUS(forwards->FinishBackward(), StatusCode::kDataLoss, "rank 0 has",
                      "'layer2.weight' (the first of 2)");
    RANK_CHECK_STATUS(Step(rank, *forwards, {2, 6}), StatusCode::kDataLoss, "rank 0 has",
                      "'layer6.weight' (the first of 2)");
  });
}

TEST_CASE("a NaN from a backward pass without reduction is reported by the step that reduces it") {
  const Logged logged;
  RunOnRanks([](Rank& rank) {
    const Model model = Make(rank, MakeParameters({40, 30}), Checked());
    for (const bool zero_after : {true, false}) {
      {
        const DistributedDataParallel::NoSync no_sync(*model);
        RANK_CHECK_OK(Step(rank, *model, rank.rank() == 0 ? std::vector<size_t>{1} : std::vector<size_t>()));
      }
      if (zero_after) model->ZeroGrad();
      for (const size_t p : {1, 0}) {
        WriteGradient(rank, *model, p, 1, /*add=*/true);
        model->GradReady(p);
      }
      const absl::Status status = model->FinishBackward();
      if (zero_after) {
        RANK_CHECK_OK(status);
      } else {
        RANK_CHECK_STATUS(status, StatusCode::kDataLoss, "rank 0 has", "'layer1.weight'");
      }
    }
  });
}

TEST_CASE("a rank that has no more inputs learns of another's NaN, and a rank of weight 0 has none") {
  const Logged logged;
  RunOnRanks([](Rank& rank) {
    const int last = rank.size() - 1;
    const Model model = Make(rank, MakeParameters({40, 30}), Checked());
    absl::Status status;
    {
      DistributedDataParallel::Join join(*model);
      for (int step = 0; step < (rank.rank() == last ? 3 : 1) && status.ok(); ++step) {
        status = Step(rank, *model, step == 2 ? std::vector<size_t>{0} : std::vector<size_t>());
      }
      if (status.ok()) status = join.Finish();
    }
    RANK_CHECK_STATUS(status, StatusCode::kDataLoss, absl::StrCat("rank ", last, " has"), "'layer0.weight'", "step 3");
    RANK_CHECK_OK(rank.group().status());
    if (rank.size() == 1) return;
    DdpOptions weighted = Checked();
    weighted.weighted = true;
    const Model other = Make(rank, MakeParameters({40, 30}), weighted);
    other->SetWeight(rank.rank() == last ? 0 : 1);
    RANK_CHECK_OK(Step(rank, *other, rank.rank() == last ? std::vector<size_t>{0} : std::vector<size_t>()));
  });
}

TEST_CASE("with a word for what is not finite, a NaN is logged and no error") {
  Logged logged;
  RunOnRanks([](Rank& rank) {
    uint32_t found = 0;
    DdpOptions options = Checked();
    options.nonfinite = &found;
    const Model model = Make(rank, MakeParameters({40, 30}), options);
    RANK_CHECK_OK(Step(rank, *model, {}));
    RANK_CHECK_EQ(found, 0u);
    RANK_CHECK_OK(Step(rank, *model, rank.rank() == 0 ? std::vector<size_t>{1} : std::vector<size_t>()));
    RANK_CHECK_EQ(found, 1u);
  });
  if (RanksAreThreads()) CHECK(logged.Count({"rank 0 has an infinity", "'layer1.weight'", "step 2"}) == 1);
}

TEST_CASE("without check_nan a NaN is nobody's error, and ranks agree on the option") {
  RunOnRanks([](Rank& rank) {
    const Model model = Make(rank, MakeParameters({40, 30}));
    RANK_CHECK_OK(Step(rank, *model, {1}));
    if (rank.size() == 1) return;
    RANK_CHECK_STATUS(
        DistributedDataParallel::Create(rank.group(), MakeParameters({4}), rank.rank() == 0 ? Checked() : DdpOptions())
            .status(),
        StatusCode::kFailedPrecondition, "check_nan=1", "check_nan=0");
  });
}

}  // namespace
}  // namespace ddp::testing
