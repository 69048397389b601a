// SPDX-License-Identifier: Apache-2.0
// DistributedDataParallel with gradients in block-scaled 8 bits.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "ddp/comm_hook.h"
#include "ddp/distributed_data_parallel.h"
#include "tests/support/block_reference.h"
#include "tests/support/catch.h"
#include "tests/support/ddp_model.h"

namespace ddp::testing {
namespace {

constexpr BlockFormat kFormats[] = {BlockFormat::kInt8, BlockFormat::kFloat8E4M3};

DdpOptions WithBlocks(BlockFormat format) {
  DdpOptions options;
  options.hook = CreateBlockCompressionHook(format);
  return options;
}

// The same expectation on every rank, so that all have the same bits.
TEST_CASE("gradients in 8-bit blocks are rounded, added in rank order and rounded again, the same on all ranks") {
  RunOnRanks([](Rank& rank) {
    for (const BlockFormat format : kFormats) {
      for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
        for (const size_t count : {size_t{1}, size_t{513}, size_t{5000}}) {
          for (const bool sums : {false, true}) {
            DdpOptions options = WithBlocks(format);
            options.gradient_predivide_factor = sums ? 3 : 1;
            if (sums) options.op = ReduceOp::kSum;
            const Model model = Make(rank, MakeParameters({count}, dtype), options);
            const auto value = [&](int r, size_t i) { return Awkward(r, i); };
            const Buffer grad = model->grad(0);
            for (size_t i = 0; i < count; ++i) SetElement(dtype, grad.data, i, value(rank.rank(), i));
            std::vector<char> before(count * SizeOf(dtype));
            std::memcpy(before.data(), grad.data, before.size());
            model->GradReady(0);
            RANK_CHECK_OK(model->FinishBackward());
            const double n = rank.size();
            const BlockSum sum{.format = static_cast<blocks::Format>(format),
                               .dtype = dtype,
                               .count = count,
                               .prescale = sums ? static_cast<float>(1.0 / 3) : 1,
                               .postscale = static_cast<float>(sums ? 3 : 1 / n)};
            const std::vector<char> expected = ReduceInBlocks(sum, rank.size(), value);
            // A rank alone has nothing to send.
            if (rank.size() > 1 || !sums) {
              RANK_CHECK(std::memcmp(grad.data, (rank.size() == 1 ? before : expected).data(), before.size()) == 0,
                         count, " elements");
            }
          }
        }
      }
    }
  });
}

// Several buckets, some packed, over several plans.
TEST_CASE("every gradient in 8-bit blocks is near the average") {
  RunOnRanks([](Rank& rank) {
    for (const BlockFormat format : kFormats) {
      for (const size_t bucket_bytes : {size_t{1}, size_t{30'000}, size_t{25} << 20}) {
        DdpOptions options = WithBlocks(format);
        options.bucket_bytes = bucket_bytes;
        std::vector<Parameter> parameters = MakeParameters(kCounts);
        std::vector<float> own(kCounts[1]);
        parameters[1].grad = {own.data(), kCounts[1], DType::kFloat32, {}};
        const Model model = Make(rank, parameters, options);
        std::vector<size_t> order = Backwards(kCounts.size());
        for (int step = 0; step < 2; ++step) {
          std::rotate(order.begin(), order.begin() + 3, order.end());
          Announce(rank, *model, order, step);
          RANK_CHECK_OK(model->FinishBackward());
          for (size_t p = 0; p < model->size(); ++p) {
            const Buffer g = model->grad(p);
            for (size_t i = 0; i < g.count; ++i) {
              const double expected = Average(rank.size(), p, i, step), got = GetElement(g.dtype, g.data, i);
              // Contributions are below 2^10; two roundings, of at most 1/16 each.
              RANK_CHECK(std::abs(got - expected) <= 1024 / 8.0, "parameter ", p, " at ", i, ": ", got, " not ",
                         expected);
            }
          }
        }
      }
    }
  });
}

TEST_CASE("zeros stay zero in 8-bit blocks, and equal numbers what they are") {
  RunOnRanks([](Rank& rank) {
    for (const BlockFormat format : kFormats) {
      const Model model = Make(rank, MakeParameters({1000}), WithBlocks(format));
      const auto check = [&](double value) {
        for (size_t i = 0; i < 1000; ++i) SetElement(DType::kFloat32, model->grad(0).data, i, i % 2 == 0 ? value : 0);
        model->GradReady(0);
        RANK_CHECK_OK(model->FinishBackward());
        for (size_t i = 0; i < 1000; ++i) {
          const double got = GetElement(DType::kFloat32, model->grad(0).data, i);
          RANK_CHECK(std::abs(got - (i % 2 == 0 ? value : 0)) <= value * 1e-6, "at ", i, ": ", got);
        }
      };
      check(0);
      check(1.1);
      check(1e-20);
    }
  });
}

TEST_CASE("an infinity or a NaN of one rank is told on all ranks, and only its block is lost") {
  RunOnRanks([](Rank& rank) {
    for (const BlockFormat format : kFormats) {
      for (const double bad : {std::numeric_limits<double>::infinity(), std::nan("")}) {
        uint32_t nonfinite = 0;
        DdpOptions options = WithBlocks(format);
        options.nonfinite = &nonfinite;
        const Model model = Make(rank, MakeParameters({1000}), options);
        for (const int step : {0, 1, 2}) {
          nonfinite = 0;
          for (size_t i = 0; i < 1000; ++i) SetElement(DType::kFloat32, model->grad(0).data, i, 2);
          if (step == 1 && rank.rank() == rank.size() - 1) SetElement(DType::kFloat32, model->grad(0).data, 300, bad);
          model->GradReady(0);
          RANK_CHECK_OK(model->FinishBackward());
          RANK_CHECK_EQ(nonfinite, step == 1 ? 1u : 0u);
          for (size_t i = 0; i < 1000; ++i) {
            const double got = GetElement(DType::kFloat32, model->grad(0).data, i);
            if (step == 1 && rank.size() > 1 && i / blocks::kBlock == 300 / blocks::kBlock) {
              RANK_CHECK(std::isnan(got), "at ", i, ": ", got);
            } else if (i != 300 || step != 1) {
              RANK_CHECK(std::abs(got - 2) < 1e-6, "at ", i, ": ", got);
            }
          }
        }
      }
    }
  });
}

TEST_CASE("a sum of 8-bit blocks that overflows is told") {
  RunOnRanks([](Rank& rank) {
    uint32_t nonfinite = 0;
    DdpOptions options = WithBlocks(BlockFormat::kInt8);
    options.op = ReduceOp::kSum;
    options.nonfinite = &nonfinite;
    const Model model = Make(rank, MakeParameters({100}), options);
    for (size_t i = 0; i < 100; ++i) SetElement(DType::kFloat32, model->grad(0).data, i, 3e38);
    model->GradReady(0);
    RANK_CHECK_OK(model->FinishBackward());
    RANK_CHECK_EQ(nonfinite, rank.size() > 1 ? 1u : 0u);
  });
}

TEST_CASE("float64 gradients are not sent in 8-bit blocks") {
  RunOnRanks([](Rank& rank) {
    const Model model = Make(rank, MakeParameters({1000, 3}, DType::kFloat64), WithBlocks(BlockFormat::kInt8));
    CheckStep(rank, *model, {1, 0}, 0);
  });
}

TEST_CASE("ranks that send blocks of different formats are told at Create") {
  RunOnRanks([](Rank& rank) {
    if (rank.size() == 1) return;
    const DdpOptions options = WithBlocks(rank.rank() == 1 ? BlockFormat::kFloat8E4M3 : BlockFormat::kInt8);
    const auto model = DistributedDataParallel::Create(rank.group(), MakeParameters({100}), options);
    RANK_CHECK_STATUS(model.status(), absl::StatusCode::kFailedPrecondition, "block_compression(int8)",
                      "block_compression(float8_e4m3)");
  });
}

// Whoever is through contributes zeros; equal gradients average exactly.
TEST_CASE("8-bit blocks go with a Join") {
  RunOnRanks([](Rank& rank) {
    const Model model = Make(rank, MakeParameters({300}), WithBlocks(BlockFormat::kInt8));
    JoinOptions options;
    options.divide_by_active = true;
    DistributedDataParallel::Join join(*model, options);
    for (int step = 0; step <= rank.rank(); ++step) {
      for (size_t i = 0; i < 300; ++i) SetElement(DType::kFloat32, model->grad(0).data, i, 5);
      model->GradReady(0);
      RANK_CHECK_OK(model->FinishBackward());
      RANK_CHECK(std::abs(GetElement(DType::kFloat32, model->grad(0).data, 299) - 5) < 1e-5);
    }
    RANK_CHECK_OK(join.Finish());
  });
}

}  // namespace
}  // namespace ddp::testing
