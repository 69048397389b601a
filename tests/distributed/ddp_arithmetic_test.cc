// SPDX-License-Identifier: Apache-2.0
// DistributedDataParallel: what gradients count, and their norm.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <memory>
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

// --- what a gradient counts -----------------------------------------------------------------------------------------

TEST_CASE("ranks count by their weights") {
  RunOnRanks([](Rank& rank) {
    for (const ReduceOp op : {ReduceOp::kAvg, ReduceOp::kSum}) {
      DdpOptions options;
      options.op = op;
      options.weighted = true;
      options.bucket_bytes = 400;
      const Model model = Make(rank, MakeParameters({100, 30}), options);
      for (int step = 0; step < 3; ++step) {
        // Step 0: all the same. Then other ones; rank 0's is 0 in step 2 unless it is alone.
        const auto weight = [&](int r) { return step == 0 ? 8.0 : step == 2 && rank.size() > 1 ? 4.0 * r : 1.0 + r; };
        model->SetWeight(weight(rank.rank()));
        Announce(rank, *model, {1, 0}, step);
        RANK_CHECK_OK(model->FinishBackward());
        double sum = 0;
        for (int r = 0; r < rank.size(); ++r) sum += weight(r);
        for (size_t p = 0; p < 2; ++p) {
          for (size_t i = 0; i < model->grad(p).count; ++i) {
            double expected = 0;
            for (int r = 0; r < rank.size(); ++r) expected += weight(r) * Gradient(r, p, i, step);
            if (op == ReduceOp::kAvg) expected /= sum;
            const double got = GetElement(DType::kFloat32, model->grad(p).data, i);
            // Relative weights and their sum are rounded.
            const double tolerance = op == ReduceOp::kSum || step == 0 ? 0 : 1e-5;
            RANK_CHECK(std::abs(got - expected) <= tolerance, got, " is not ", expected);
          }
        }
      }
    }
  });
}

TEST_CASE("large weights of a sum in 16 bits stay in range with a predivide factor") {
  if (RankCount() == 1) return;
  RunOnRanks([](Rank& rank) {
    uint32_t nonfinite = 0;
    DdpOptions options;
    options.op = ReduceOp::kSum;
    options.weighted = true;
    options.gradient_predivide_factor = 1024;
    options.nonfinite = &nonfinite;
    const Model model = Make(rank, MakeParameters({40}, DType::kFloat16), options);
    model->SetWeight(rank.rank() == 0 ? 64 : 62);
    Fill(model->grad(0), rank.rank() == 0 ? 2048 : rank.rank() == 1 ? -2048 : 0);
    model->GradReady(0);
    RANK_CHECK_OK(model->FinishBackward());
    CheckGradient(rank, *model, 0, [&](size_t, size_t) { return 2.0 * 2048; });
    RANK_CHECK_EQ(nonfinite, 0u);
  });
}

TEST_CASE("a weight that is none is told on every rank") {
  RunOnRanks([](Rank& rank) {
    DdpOptions options;
    options.weighted = true;
    const Model model = Make(rank, MakeParameters({100}), options);
    const int last = rank.size() - 1;
    model->SetWeight(rank.rank() == last ? -1.0 : 1.0);
    model->GradReady(0);
    RANK_CHECK_STATUS(model->FinishBackward(), StatusCode::kFailedPrecondition, absl::StrCat("rank ", last),
                      "SetWeight(-1)");
    model->SetWeight(0);
    model->GradReady(0);
    RANK_CHECK_STATUS(model->FinishBackward(), StatusCode::kFailedPrecondition, "every rank is 0");
    model->SetWeight(2);  // all ranks knew: the group has not failed
    CheckStep(rank, *model, {0}, 0);
  });
}

TEST_CASE("a rank of weight 0 contributes zeros, whatever its gradients are") {
  if (RankCount() == 1) return;
  RunOnRanks([](Rank& rank) {
    for (int variant = 0; variant < 8; ++variant) {
      const bool mean = (variant & 1) != 0, hook = (variant & 2) != 0, copied = (variant & 4) != 0;
      uint32_t nonfinite = 0;
      DdpOptions options;
      options.op = mean ? ReduceOp::kAvg : ReduceOp::kSum;
      options.weighted = true;
      options.nonfinite = &nonfinite;
      if (hook) options.hook = CreateAllReduceHook();
      std::vector<float> own(100);
      std::vector<Parameter> parameters = MakeParameters({100, 30});
      if (copied) parameters[0].grad = {own.data(), own.size(), DType::kFloat32, {}};
      const Model model = Make(rank, parameters, options);
      model->SetWeight(rank.rank() == 0 ? 0 : 2);
      for (const size_t p : {size_t{1}, size_t{0}}) {
        WriteGradient(rank, *model, p, 0);
        // The mean over an empty batch.
        for (size_t i = 0; rank.rank() == 0 && i < model->grad(p).count; ++i) {
          SetElement(DType::kFloat32, model->grad(p).data, i, i % 2 == 0 ? NAN : HUGE_VAL);
        }
        model->GradReady(p);
      }
      RANK_CHECK_OK(model->FinishBackward());
      RANK_CHECK_EQ(nonfinite, 0u);
      for (size_t p = 0; p < 2; ++p) {
        for (size_t i = 0; i < model->grad(p).count; ++i) {
          double expected = 0;
          for (int r = 1; r < rank.size(); ++r) expected += Gradient(r, p, i, 0);
          expected *= mean ? 1.0 / (rank.size() - 1) : 2;
          const double got = GetElement(DType::kFloat32, model->grad(p).data, i);
          RANK_CHECK(std::abs(got - expected) <= (mean ? 1e-5 : 0), got, " is not ", expected);
        }
      }
    }
  });
}

// Forms sums in the inputs' own type after each addition, as a ring on a GPU does.
class RoundingGroup final : public ForwardingGroup {
 public:
  using ForwardingGroup::ForwardingGroup;
  absl::string_view backend() const override { return "rounding"; }
  Work Start(const Call& call) override {
    if (call.kind != Call::Kind::kAllReduce) return ForwardingGroup::Start(call);
    const ReduceOptions& options = call.reduce;
    const Buffer mine = call.in[0];
    const size_t bytes = mine.count * SizeOf(mine.dtype);
    std::vector<char> all(bytes * static_cast<size_t>(size()));
    const Buffer from{mine.data, bytes, DType::kUInt8, {}}, to{all.data(), all.size(), DType::kUInt8, {}};
    if (absl::Status s = AllGather(from, to).Wait(); !s.ok()) return s;
    const double post = options.postscale / (options.op == ReduceOp::kAvg ? size() : 1);
    std::vector<char> sum(SizeOf(mine.dtype));
    for (size_t i = 0; i < mine.count; ++i) {
      SetElement(mine.dtype, sum.data(), 0, 0);
      for (size_t r = 0; r < static_cast<size_t>(size()); ++r) {
        const double x = GetElement(mine.dtype, all.data() + r * bytes, i) * options.prescale;
        SetElement(mine.dtype, sum.data(), 0, GetElement(mine.dtype, sum.data(), 0) + x);
      }
      SetElement(call.out[0].dtype, call.out[0].data, i, GetElement(mine.dtype, sum.data(), 0) * post);
    }
    return Work();
  }
};

TEST_CASE("16-bit gradients may be summed in float32 on any backend") {
  RunOnRanks([](Rank& rank) {
    // 256 + 1 + 1 + 1: bfloat16 has eight bits, so one by one the ones are lost.
    const auto reduce = [&](ProcessGroup& group, bool in_float32) {
      DdpOptions options;
      options.op = ReduceOp::kSum;
      options.reduce_in_float32 = in_float32;
      const Model model =
          RANK_VALUE(DistributedDataParallel::Create(group, MakeParameters({100}, DType::kBFloat16), options));
      for (size_t i = 0; i < 100; ++i) {
        SetElement(DType::kBFloat16, model->grad(0).data, i, rank.rank() == 0 ? 256 : 1);
      }
      model->GradReady(0);
      RANK_CHECK_OK(model->FinishBackward());
      return GetElement(DType::kBFloat16, model->grad(0).data, 99);
    };
    const double best = std::array{256, 256, 258, 260}[static_cast<size_t>(rank.size() - 1)];  // ties go to even
    RoundingGroup rounding(rank.group());
    RANK_CHECK_EQ(reduce(rounding, false), 256.0);
    RANK_CHECK_EQ(reduce(rounding, true), best);
    RANK_CHECK_EQ(reduce(rank.group(), false), best);  // this backend does so anyway
    RANK_CHECK_EQ(reduce(rank.group(), true), best);
  });
}

TEST_CASE("dividing before the sum keeps 16 bits in range") {
  RunOnRanks([](Rank& rank) {
    RoundingGroup rounding(rank.group());
    for (const double factor : {1.0, 4.0}) {
      DdpOptions options;
      options.gradient_predivide_factor = factor;
      const Model model =
          RANK_VALUE(DistributedDataParallel::Create(rounding, MakeParameters({8}, DType::kFloat16), options));
      for (size_t i = 0; i < 8; ++i) SetElement(DType::kFloat16, model->grad(0).data, i, 40'960);
      model->GradReady(0);
      RANK_CHECK_OK(model->FinishBackward());
      const double got = GetElement(DType::kFloat16, model->grad(0).data, 3);
      const bool overflows = factor == 1 && rank.size() > 1;  // 81920 is no float16
      RANK_CHECK(overflows ? std::isinf(got) : got == (rank.size() == 3 ? got : 40'960), got);
      if (!overflows) RANK_CHECK(std::abs(got - 40'960) <= 32, got);
    }
  });
}

TEST_CASE("predividing changes no bits of whole numbers") {
  RunOnRanks([](Rank& rank) {
    for (const ReduceOp op : {ReduceOp::kAvg, ReduceOp::kSum}) {
      DdpOptions options;
      options.gradient_predivide_factor = 8;
      options.op = op;
      const Model model = Make(rank, MakeParameters({5000, 20}), options);
      Announce(rank, *model, {1, 0}, 0);
      RANK_CHECK_OK(model->FinishBackward());
      const int n = op == ReduceOp::kSum ? rank.size() : 1;
      for (size_t p = 0; p < 2; ++p) {
        for (size_t i = 0; i < model->grad(p).count; ++i) {
          const double got = GetElement(DType::kFloat32, model->grad(p).data, i);
          const double expected = n * Average(rank.size(), p, i, 0);
          // 8/3 is rounded.
          RANK_CHECK(std::abs(got - expected) <= (rank.size() == 3 ? 1e-5 : 0), got, " is not ", expected);
        }
      }
    }
  });
}

// --- the norm -------------------------------------------------------------------------------------------------------

TEST_CASE("gradients are measured and clipped together, alike on all ranks") {
  RunOnRanks([](Rank& rank) {
    std::vector<float> own(30);
    std::vector<Parameter> parameters = MakeParameters({1000, 30, 0, 77, 40});
    parameters[1].grad = {own.data(), 30, DType::kFloat32, {}};
    parameters[3].value.dtype = DType::kFloat64;
    parameters[4].frozen = true;
    const Model model = Make(rank, parameters);
    Announce(rank, *model, {3, 2, 1, 0}, 0);
    RANK_CHECK_OK(model->FinishBackward());
    double squares = 0, sum = 0, most = 0;
    for (const size_t p : {size_t{0}, size_t{1}, size_t{3}}) {
      for (size_t i = 0; i < model->grad(p).count; ++i) {
        const double x = std::abs(Average(rank.size(), p, i, 0));
        squares += x * x;
        sum += x;
        most = std::max(most, x);
      }
    }
    RANK_CHECK_EQ(RANK_VALUE(model->GradNorm()), std::sqrt(squares));
    RANK_CHECK_EQ(RANK_VALUE(model->GradNorm(1)), sum);
    RANK_CHECK_EQ(RANK_VALUE(model->GradNorm(HUGE_VAL)), most);
    RANK_CHECK_STATUS(model->GradNorm(3), StatusCode::kInvalidArgument, "order 3");
    RANK_CHECK_STATUS(model->ClipGradNorm(0), StatusCode::kInvalidArgument, "max_norm");
    RANK_CHECK_STATUS(model->ClipGradNormAsync(0), StatusCode::kInvalidArgument, "max_norm");

    // Above the norm nothing happens; below, everything is scaled.
    RANK_CHECK_EQ(RANK_VALUE(model->ClipGradNorm(2 * std::sqrt(squares))), std::sqrt(squares));
    RANK_CHECK_EQ(*RANK_VALUE(model->ClipGradNormAsync(2 * std::sqrt(squares))), std::sqrt(squares));
    CheckGradient(rank, *model, 0, [&](size_t p, size_t i) { return Average(rank.size(), p, i, 0); });
    RANK_CHECK_EQ(RANK_VALUE(model->ClipGradNorm(10)), std::sqrt(squares));
    const double scale = 10 / (std::sqrt(squares) + 1e-6);
    for (const size_t p : {size_t{0}, size_t{1}, size_t{3}}) {
      for (size_t i = 0; i < model->grad(p).count; ++i) {
        const double got = GetElement(model->grad(p).dtype, model->grad(p).data, i);
        RANK_CHECK(std::abs(got - scale * Average(rank.size(), p, i, 0)) < 1e-6, got);
      }
    }
    double norm = RANK_VALUE(model->GradNorm()), rank0 = norm;
    RANK_CHECK(std::abs(norm - 10) < 1e-4, norm);
    const Buffer bits{&rank0, sizeof rank0, DType::kUInt8, {}};
    RANK_CHECK_OK(rank.group().Broadcast(bits, 0).Wait());
    RANK_CHECK(std::memcmp(&norm, &rank0, sizeof norm) == 0);

    RANK_CHECK_EQ(*RANK_VALUE(model->ClipGradNormAsync(1)), norm);
    RANK_CHECK(std::abs(RANK_VALUE(model->GradNorm()) - 1) < 1e-4, RANK_VALUE(model->GradNorm()));

    // What is not finite is told, and not made worse.
    SetElement(DType::kFloat32, model->grad(0).data, 5, HUGE_VAL);
    RANK_CHECK(std::isinf(RANK_VALUE(model->ClipGradNorm(1))));
    SetElement(DType::kFloat32, model->grad(0).data, 6, NAN);
    RANK_CHECK(std::isnan(RANK_VALUE(model->GradNorm(HUGE_VAL))) && std::isnan(RANK_VALUE(model->ClipGradNorm(1))));
    RANK_CHECK(GetElement(DType::kFloat32, model->grad(0).data, 7) != 0 || Average(rank.size(), 0, 7, 0) == 0);
  });
}

}  // namespace
}  // namespace ddp::testing
