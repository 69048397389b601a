// SPDX-License-Identifier: Apache-2.0
// DistributedDataParallel with the PowerSGD hook.
#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ddp/comm_hook.h"
#include "ddp/distributed_data_parallel.h"
#include "tests/support/catch.h"
#include "tests/support/ddp_model.h"

namespace ddp::testing {
namespace {

constexpr size_t kRows = 24, kColumns = 20;

std::vector<Parameter> MatrixAndBias(DType dtype = DType::kFloat32) {
  return {{"fc.weight", {kRows, kColumns}, {nullptr, kRows * kColumns, dtype, {}}, {}},
          {"fc.bias", {kRows}, {nullptr, kRows, dtype, {}}, {}}};
}

// A pseudo-random number from -0.5 to 0.5.
double Noise(size_t i, int seed) {
  uint64_t bits = (i + 1) * 0x9e3779b97f4a7c15u + static_cast<uint64_t>(seed) * 0xd1b54a32d192ed03u;
  bits = (bits ^ (bits >> 29)) * 0xbf58476d1ce4e5b9u;
  return static_cast<double>(bits >> 11) * 0x1p-53 - 0.5;
}

using Entry = std::function<double(int rank, size_t i, size_t j)>;

// One step with the matrix of `entry`; the result.
std::vector<double> PowerStep(Rank& rank, DistributedDataParallel& model, const Entry& entry) {
  const Buffer g = model.grad(0), bias = model.grad(1);
  for (size_t i = 0; i < g.count; ++i) SetElement(g.dtype, g.data, i, entry(rank.rank(), i / kColumns, i % kColumns));
  for (size_t i = 0; i < bias.count; ++i) SetElement(bias.dtype, bias.data, i, Gradient(rank.rank(), 1, i, 0));
  model.GradReady(1);
  model.GradReady(0);
  RANK_CHECK_OK(model.FinishBackward());
  CheckGradient(rank, model, 1, [&](size_t p, size_t i) { return Average(rank.size(), p, i, 0); });
  std::vector<double> result;
  for (size_t i = 0; i < g.count; ++i) result.push_back(GetElement(g.dtype, g.data, i));
  return result;
}

double Mean(int size, const Entry& entry, size_t k) {
  double sum = 0;
  for (int r = 0; r < size; ++r) sum += entry(r, k / kColumns, k % kColumns);
  return sum / size;
}

// How far `result` is from the mean of the ranks' matrices, relative to that.
double Distance(Rank& rank, const std::vector<double>& result, const Entry& entry) {
  double difference = 0, size = 0;
  for (size_t k = 0; k < result.size(); ++k) {
    const double mean = Mean(rank.size(), entry, k);
    difference += (result[k] - mean) * (result[k] - mean);
    size += mean * mean;
  }
  return std::sqrt(difference / size);
}

// Each rank's matrix is of rank 1, and so is their mean.
double LowRank(int rank, size_t i, size_t j) { return Noise(i + 100 * static_cast<size_t>(rank), 3) * Noise(j, 4); }
// Of rank 2.
double TwoRank(int rank, size_t i, size_t j) { return LowRank(rank, i, j) + Noise(i + 100, 6) * Noise(j + 100, 7); }
double FullRank(int rank, size_t i, size_t j) {
  return Noise(i * kColumns + j, 5 + rank) + Noise(i * kColumns + j, 17);
}

Model MakePower(Rank& rank, const PowerSgdOptions& power, std::function<void(DdpOptions&)> change = nullptr) {
  DdpOptions options;
  options.hook = CreatePowerSgdHook(power);
  if (change != nullptr) change(options);
  return Make(rank, MatrixAndBias(), options);
}

TEST_CASE("PowerSGD gives a matrix of low rank back, and one-dimensional gradients in full") {
  RunOnRanks([](Rank& rank) {
    for (const int power_rank : {1, 2, 4}) {
      for (const bool warm_start : {true, false}) {
        const Model model = MakePower(rank, {.rank = power_rank, .start_step = 0, .warm_start = warm_start});
        for (int step = 0; step < 3; ++step) {
          const double distance = Distance(rank, PowerStep(rank, *model, LowRank), LowRank);
          RANK_CHECK(distance < 1e-5, distance);
        }
        // A matrix of zeros is no trap for the steps that follow.
        PowerStep(rank, *model, [](int, size_t, size_t) { return 0.0; });
        const double distance = Distance(rank, PowerStep(rank, *model, LowRank), LowRank);
        RANK_CHECK(distance < 1e-4, distance);
      }
    }
  });
}

TEST_CASE("PowerSGD keeps as many directions as its rank, of what shrinks by its ratio") {
  RunOnRanks([](Rank& rank) {
    for (const int power_rank : {1, 2}) {
      const Model model = MakePower(rank, {.rank = power_rank, .start_step = 0});
      const double distance = Distance(rank, PowerStep(rank, *model, TwoRank), TwoRank);
      RANK_CHECK(power_rank == 2 ? distance < 1e-5 : distance > 0.05, distance);
    }
    // 24 x 20 numbers would be 24 + 20: 10.9 times fewer.
    for (const double ratio : {10.0, 11.0}) {
      const Model model = MakePower(rank, {.start_step = 0, .min_ratio = ratio});
      const double distance = Distance(rank, PowerStep(rank, *model, FullRank), FullRank);
      RANK_CHECK(ratio == 11.0 ? distance < 1e-6 : distance > 0.3, distance);
    }
  });
}

// Singular values 2 and 1.
double TwoToOne(int, size_t i, size_t j) { return i == 0 && j == 0 ? 2 : i == 1 && j == 1 ? 1 : 0; }

TEST_CASE("a warm start makes of PowerSGD's steps one power iteration") {
  RunOnRanks([](Rank& rank) {
    // The best that rank 1 can do loses the smaller one.
    const double best = 1 / std::sqrt(5.0);
    for (const bool warm_start : {true, false}) {
      const Model model = MakePower(rank, {.start_step = 0, .warm_start = warm_start, .error_feedback = false});
      double worst = 0;  // of the last steps
      for (int step = 0; step < 24; ++step) {
        const double distance = Distance(rank, PowerStep(rank, *model, TwoToOne), TwoToOne);
        if (step >= 12) worst = std::max(worst, distance);
      }
      RANK_CHECK(warm_start ? worst < best + 1e-4 : worst > best + 1e-2, worst);
    }
  });
}

TEST_CASE("PowerSGD begins at its step, and loses something from then on") {
  RunOnRanks([](Rank& rank) {
    const Model model = MakePower(rank, {.rank = 2, .start_step = 3});
    for (int step = 0; step < 5; ++step) {
      const double distance = Distance(rank, PowerStep(rank, *model, FullRank), FullRank);
      RANK_CHECK(step < 3 ? distance < 1e-6 : distance > 0.3, step, ": ", distance);
    }
  });
}

TEST_CASE("PowerSGD's first directions come from its seed, on all ranks the same") {
  RunOnRanks([](Rank& rank) {
    const auto first_step = [&](uint64_t seed) {
      return PowerStep(rank, *MakePower(rank, {.start_step = 0, .seed = seed}), FullRank);
    };
    const std::vector<double> one = first_step(1);
    RANK_CHECK(first_step(1) == one);
    RANK_CHECK(first_step(2) != one);
  });
}

TEST_CASE("error feedback makes up over the steps for what PowerSGD loses in each") {
  RunOnRanks([](Rank& rank) {
    for (const ReduceOp op : {ReduceOp::kAvg, ReduceOp::kSum}) {
      double distances[2];
      for (const bool feedback : {false, true}) {
        const Model model = MakePower(rank, {.rank = 2, .start_step = 0, .error_feedback = feedback},
                                      [&](DdpOptions& options) { options.op = op; });
        constexpr int kSteps = 60;
        std::vector<double> mean(kRows * kColumns);
        const double n = op == ReduceOp::kSum ? rank.size() : 1;
        for (int step = 0; step < kSteps; ++step) {
          const Buffer g = model->grad(0);
          for (size_t i = 0; i < g.count; ++i) {
            SetElement(g.dtype, g.data, i, FullRank(rank.rank(), i / kColumns, i % kColumns));
          }
          model->GradReady(1);
          model->GradReady(0);
          RANK_CHECK_OK(model->FinishBackward());
          for (size_t k = 0; k < mean.size(); ++k) mean[k] += GetElement(g.dtype, g.data, k) / kSteps / n;
        }
        distances[feedback] = Distance(rank, mean, FullRank);
      }
      RANK_CHECK(distances[0] > 0.5, distances[0]);
      RANK_CHECK(distances[1] < 0.25, distances[1]);
    }
  });
}

TEST_CASE("PowerSGD's state belongs to parameters, not to buckets") {
  RunOnRanks([](Rank& rank) {
    std::vector<std::vector<double>> results;
    for (const bool replan : {false, true}) {
      DdpOptions options;
      options.hook = CreatePowerSgdHook({.rank = 2, .start_step = 0});
      options.bucket_bytes = 2000;
      options.replan = replan;
      std::vector<Parameter> parameters = MatrixAndBias();
      parameters.push_back({"head.weight", {20, 30}, {nullptr, 600, DType::kFloat32, {}}, {}});
      const Model model = Make(rank, parameters, options);
      std::vector<double> result;
      for (int step = 0; step < 4; ++step) {
        for (const size_t p : {size_t{0}, size_t{1}, size_t{2}}) {
          const Buffer g = model->grad(p);
          for (size_t i = 0; i < g.count; ++i) {
            SetElement(g.dtype, g.data, i, Noise(i, static_cast<int>(p) + 10 * rank.rank() + 100 * step));
          }
          model->GradReady(p);
        }
        RANK_CHECK_OK(model->FinishBackward());
        for (const size_t p : {size_t{0}, size_t{2}}) {
          for (size_t i = 0; i < model->grad(p).count; ++i) {
            result.push_back(GetElement(DType::kFloat32, model->grad(p).data, i));
          }
        }
      }
      RANK_CHECK_EQ(model->statistics().plans, int64_t{replan ? 2 : 1});
      results.push_back(std::move(result));
    }
    RANK_CHECK(results[0] == results[1]);
    // All ranks have the same bits.
    std::vector<double> rank0 = results[0];
    const Buffer bytes{rank0.data(), rank0.size() * 8, DType::kUInt8, {}};
    RANK_CHECK_OK(rank.group().Broadcast(bytes, 0).Wait());
    RANK_CHECK(rank0 == results[0]);
  });
}

TEST_CASE("hooks compose: 16 bits around PowerSGD") {
  RunOnRanks([](Rank& rank) {
    for (const DType wire : {DType::kFloat16, DType::kBFloat16}) {
      DdpOptions options;
      options.hook = CreateCompressionHook(wire, CreatePowerSgdHook({.rank = 2, .start_step = 1}));
      const Model model = Make(rank, MatrixAndBias(), options);
      for (int step = 0; step < 4; ++step) {
        const double distance = Distance(rank, PowerStep(rank, *model, LowRank), LowRank);
        RANK_CHECK(distance < (wire == DType::kFloat16 ? 4e-3 : 3e-2), step, ": ", distance);
        RANK_CHECK(distance > 1e-6, "nothing was rounded");
      }
    }
  });
}

// A matrix of rank 1, the same on all ranks: PowerSGD loses nothing of it, whatever it is multiplied by.
double WholeMatrix(int, size_t i, size_t j) { return static_cast<double>((i + 1) * (j + 1)); }

TEST_CASE("PowerSGD gives every step of a Join what it gives, and nothing of it to later ones") {
  if (RankCount() == 1) return;
  RunOnRanks([](Rank& rank) {
    for (int variant = 0; variant < 8; ++variant) {
      JoinOptions join_options;
      join_options.divide_by_active = (variant & 1) != 0;
      const bool sum = (variant & 2) != 0, weighted = (variant & 4) != 0;
      const Model model = MakePower(rank, {.start_step = 0}, [&](DdpOptions& options) {
        options.op = sum ? ReduceOp::kSum : ReduceOp::kAvg;
        options.weighted = weighted;
      });
      const auto weight = [&](int r) { return weighted ? 1.0 + r : 1.0; };
      model->SetWeight(weight(rank.rank()));
      const auto step = [&] {
        const Buffer g = model->grad(0);
        for (size_t k = 0; k < g.count; ++k) SetElement(g.dtype, g.data, k, WholeMatrix(0, k / kColumns, k % kColumns));
        model->GradReady(1);
        model->GradReady(0);
        RANK_CHECK_OK(model->FinishBackward());
      };
      // Of the result what `active` ranks, the first ones, contribute.
      const auto check = [&](int active) {
        double weights = 0;
        for (int r = 0; r < active; ++r) weights += weight(r);
        const double mean = weighted || join_options.divide_by_active ? 1 : 1.0 * active / rank.size();
        const double factor = sum ? weights : mean;
        for (size_t k = 0; k < kRows * kColumns; ++k) {
          const double want = factor * WholeMatrix(0, k / kColumns, k % kColumns);
          const double got = GetElement(DType::kFloat32, model->grad(0).data, k);
          RANK_CHECK(std::abs(got - want) < 1e-3 * want, "variant ", variant, ", ", active, " active: ", got, " not ",
                     want);
        }
      };
      // Rank 0 has 4 steps, the others one.
      join_options.on_shadowed_step = [&] {
        check(1);
        return absl::OkStatus();
      };
      {
        DistributedDataParallel::Join join(*model, join_options);
        for (int k = 0; k < (rank.rank() == 0 ? 4 : 1); ++k) {
          step();
          check(k == 0 ? rank.size() : 1);
        }
        RANK_CHECK_OK(join.Finish());
      }
      for (int k = 0; k < 2; ++k) {
        step();
        check(rank.size());
      }
    }
  });
}

// --- what the hook keeps --------------------------------------------------------------------------------------------

// Three matrices of full rank, each in a bucket of its own, and a bias. In step `bad` the last rank's parameter
// `poisoned` has `poison` in one element.
std::vector<double> StepsWithout(Rank& rank, std::shared_ptr<CommHook> hook, int bad, size_t poisoned, double poison) {
  DdpOptions options;
  options.bucket_bytes = 1;
  options.hook = std::move(hook);
  std::vector<Parameter> parameters = MatrixAndBias();
  for (const char* name : {"second.weight", "third.weight"}) {
    parameters.push_back({name, {kRows, kColumns}, {nullptr, kRows * kColumns, DType::kFloat32, {}}, {}});
  }
  const Model model = Make(rank, parameters, options);
  std::vector<double> results;
  for (int step = 0; step < 4; ++step) {
    for (const bool skipped : {true, false}) {
      if (skipped && step != bad) continue;
      for (size_t p = model->size(); p-- > 0;) {
        const Buffer g = model->grad(p);
        for (size_t i = 0; i < g.count; ++i) {
          const int seed = 10 * rank.rank() + 100 * step + static_cast<int>(p) + (skipped ? 1000 : 0);
          SetElement(g.dtype, g.data, i, Noise(i, seed));
        }
        const bool here = skipped && p == poisoned && rank.rank() == rank.size() - 1;
        if (here) SetElement(g.dtype, g.data, g.count / 2, poison);
        model->GradReady(p);
      }
      RANK_CHECK_OK(model->FinishBackward());
      if (skipped) RANK_CHECK(!std::isfinite(RANK_VALUE(model->GradNorm(HUGE_VAL))));
    }
    for (size_t p = 0; p < model->size(); ++p) {
      const Buffer g = model->grad(p);
      for (size_t i = 0; i < g.count; ++i) results.push_back(GetElement(g.dtype, g.data, i));
    }
  }
  RANK_CHECK(std::all_of(results.begin(), results.end(), [](double x) { return std::isfinite(x); }));
  return results;
}

TEST_CASE("a step that is not finite leaves no trace in PowerSGD") {
  RunOnRanks([](Rank& rank) {
    const auto plain = [] { return CreatePowerSgdHook({.rank = 2, .start_step = 0}); };
    const auto half = [&] { return CreateCompressionHook(DType::kFloat16, plain()); };
    constexpr int kNever = -1;
    const std::vector<double> expected = StepsWithout(rank, plain(), kNever, 0, 0);
    const std::vector<double> expected_half = StepsWithout(rank, half(), kNever, 0, 0);
    for (const int bad : {1, 3}) {
      for (const size_t poisoned : {size_t{0}, size_t{1}, size_t{2}, size_t{3}}) {
        for (const double poison : {HUGE_VAL, static_cast<double>(NAN)}) {
          RANK_CHECK(StepsWithout(rank, plain(), bad, poisoned, poison) == expected, poisoned);
        }
      }
      RANK_CHECK(StepsWithout(rank, half(), bad, 2, 1e30) == expected_half);  // finite, but not as float16
    }
  });
}

TEST_CASE("what 16 bits cannot hold on its way through PowerSGD comes out as not finite") {
  RunOnRanks([](Rank& rank) {
    DdpOptions options;
    options.hook = CreateCompressionHook(DType::kFloat16, CreatePowerSgdHook({.start_step = 0}));
    const Model model = Make(rank, MatrixAndBias(), options);
    // Each element fits, P does not.
    PowerStep(rank, *model, [](int, size_t, size_t) { return 60'000.0; });
    RANK_CHECK(!std::isfinite(RANK_VALUE(model->GradNorm())));
    const double distance = Distance(rank, PowerStep(rank, *model, LowRank), LowRank);
    RANK_CHECK(distance < 4e-3, distance);
  });
}

TEST_CASE("PowerSGD begins anew for parameters that come back") {
  RunOnRanks([](Rank& rank) {
    enum class Change { kNone, kFrozen, kRemoved };
    for (const Change change : {Change::kNone, Change::kFrozen, Change::kRemoved}) {
      const Model model = MakePower(rank, {.start_step = 0});
      for (int step = 0; step < 2; ++step) PowerStep(rank, *model, FullRank);
      std::vector<Parameter> other = MatrixAndBias();
      if (change == Change::kFrozen) other[0].frozen = true;
      if (change == Change::kRemoved) other.erase(other.begin());
      RANK_CHECK_OK(model->SetParameters(other));
      RANK_CHECK_OK(model->SetParameters(MatrixAndBias()));
      const std::vector<double> result = PowerStep(rank, *model, [](int, size_t, size_t) { return 0.0; });
      const bool zeros = std::all_of(result.begin(), result.end(), [](double x) { return x == 0; });
      RANK_CHECK_EQ(zeros, change != Change::kNone);  // what steps have lost is made up for, or forgotten
    }
  });
}

TEST_CASE("PowerSGD refuses float64 in another list of parameters, and goes on with what it had") {
  RunOnRanks([](Rank& rank) {
    std::vector<double> results[2];
    for (const bool tries : {false, true}) {
      const Model model = MakePower(rank, {.start_step = 0});
      PowerStep(rank, *model, FullRank);
      if (tries) {
        std::vector<Parameter> other = MatrixAndBias();
        other.insert(other.begin(), {"wide", {8, 8}, {nullptr, 64, DType::kFloat64, {}}, {}});
        const absl::Status refused = model->SetParameters(other);
        RANK_CHECK_STATUS(refused, absl::StatusCode::kInvalidArgument, "'wide' is float64");
        RANK_CHECK(!absl::StrContains(refused.message(), "rank 0: rank 0"), refused.ToString());
        RANK_CHECK_EQ(model->size(), MatrixAndBias().size());
      }
      results[tries] = PowerStep(rank, *model, FullRank);
    }
    RANK_CHECK(results[0] == results[1]);
  });
}

TEST_CASE("PowerSGD takes gradients as large and as small as float32 has") {
  RunOnRanks([](Rank& rank) {
    for (const double size : {1e-30, 1e-18, 1e18, 1e30}) {
      const Model model = MakePower(rank, {.start_step = 0});
      const auto entry = [&](int r, size_t i, size_t j) { return size * LowRank(r, i, j); };
      for (int step = 0; step < 2; ++step) {
        const std::vector<double> result = PowerStep(rank, *model, entry);
        const double distance = Distance(rank, result, entry);
        RANK_CHECK(distance < 1e-5, size, ": ", distance);
      }
    }
  });
}

}  // namespace
}  // namespace ddp::testing
