// SPDX-License-Identifier: Apache-2.0
#include "tests/support/ddp_gpu_cases.h"

#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include <time.h>

#include "absl/strings/str_cat.h"
#include "ddp/distributed_data_parallel.h"
#include "ddp/grad_scaler.h"
#include "libddp/comm/base/exchange.h"
#include "libddp/device/buffer_ops.h"
#include "tests/support/block_reference.h"
#include "tests/support/check.h"
#include "tests/support/ddp_gpu_steps.h"
#include "tests/support/numbers.h"

// g++ takes members of class type that are left out of designated initializers for forgotten.
#pragma GCC diagnostic ignored "-Wmissing-field-initializers"

namespace ddp::testing::gpu_cases {

void Averages(GpuRank& rank) {
  const TestStream a(rank), b(rank);
  for (const std::vector<const TestStream*>& streams : {std::vector<const TestStream*>{&a}, {&a, &b}}) {
    for (const size_t bucket : {size_t{1}, size_t{64} << 10, DdpOptions::kDefaultBucketBytes}) {
      const Model model = Make(rank, DType::kFloat32, {.bucket_bytes = bucket});
      for (int step = 0; step < 3; ++step) {
        Backward(rank, *model, {.number = step}, streams);
        RANK_CHECK_OK(model->FinishBackward(b.get()));
        CheckGradients(rank, *model, {.number = step}, b.get());
        RANK_CHECK_EQ(ReadWord(model->skip_step(), b.get()), 0u);
      }
      // Without a stream: what is written is written, and when FinishBackward returns all is done.
      Backward(rank, *model, {.number = 3}, streams);
      a.Wait();
      b.Wait();
      RANK_CHECK_OK(model->FinishBackward(kNoStream));
      CheckGradients(rank, *model, {.number = 3}, a.get());
      model->ZeroGrad(a.get());
      CheckGradients(rank, *model, {.expected = [](size_t, size_t) { return 0.0; }}, a.get());
    }
  }
  const Model measured = Make(rank, DType::kFloat32, {.bucket_bytes = DdpOptions::kAutoBucketBytes});
  Backward(rank, *measured, {}, {&a});
  RANK_CHECK_OK(measured->FinishBackward(a.get()));
  CheckGradients(rank, *measured, {}, a.get());
}

void Options(GpuRank& rank) {
  const TestStream a(rank), b(rank);
  struct Case {
    DType dtype;
    DdpOptions options;
    double tolerance = 0;
  };
  const DType kF32 = DType::kFloat32, kBf16 = DType::kBFloat16;
  const std::vector<Case> cases = {
      {kF32, {.copy_gradients = true}},
      {kBf16, {.reduce_in_float32 = true}},
      {kBf16, {.reduce_in_float32 = true, .copy_gradients = true}},
      {kF32, {.piece_bytes = 4096}},
      {kF32, {.gradient_predivide_factor = 2}},
      {kF32, {.bucket_bytes = 4096, .hook = CreateAllReduceHook()}},
      {kF32, {.copy_gradients = true, .hook = CreateAllReduceHook()}},
      {kF32, {.hook = CreateCompressionHook(kBf16)}, 0.02},
      {kF32, {.hook = CreateCompressionHook(DType::kFloat16, CreateAllReduceHook())}, 0.01},
      {kF32, {.weighted = true}, 1e-6},
      {kF32, {.weighted = true, .copy_gradients = true}, 1e-6},
      {kF32, {.unused = UnusedParameters::kDetect}},
      {kF32, {.static_graph = true}},
  };
  for (const Case& c : cases) {
    const Model model = Make(rank, c.dtype, c.options);
    OwnGradients own;
    for (int number = 0; number < 3; ++number) {
      if (c.options.copy_gradients) own.Give(rank, *model, c.dtype);
      const Step step{.dtype = c.dtype, .number = number, .tolerance = c.tolerance};
      Backward(rank, *model, step, {&a, &b});
      RANK_CHECK_OK(model->FinishBackward(a.get()));
      CheckGradients(rank, *model, step, a.get());
    }
  }
  // The last rank has weight 0, and gradients that are not finite.
  if (rank.size() > 1) {
    const Model weighted = Make(rank, kF32, {.op = ReduceOp::kSum, .weighted = true});
    const bool empty = rank.rank() == rank.size() - 1;
    weighted->SetWeight(empty ? 0 : 1);
    for (size_t p = weighted->size(); p-- > 0;) {
      Write(
          weighted->grad(p), [&](size_t) { return empty ? NAN : 2.0; }, a.get());
      weighted->GradReady(p, a.get());
    }
    RANK_CHECK_OK(weighted->FinishBackward(a.get()));
    CheckGradients(rank, *weighted, {.expected = [&](size_t, size_t) { return 2.0 * (rank.size() - 1); }}, a.get());
  }
  // Nobody uses parameter 1, rank 0 alone parameter 2.
  const Model detect = Make(rank, kF32, {.unused = UnusedParameters::kDetect});
  for (size_t p = 0; p < detect->size(); ++p)
    Write(
        detect->grad(p), [](size_t) { return 5.0; }, a.get());
  const auto used = [&](size_t p) { return p != 1 && (p != 2 || rank.rank() == 0); };
  Backward(rank, *detect, {.number = 1, .used = used}, {&a, &b});
  RANK_CHECK_OK(detect->FinishBackward(a.get()));
  const auto expected = [&](size_t p, size_t i) {
    if (p == 1) return 5.0;
    return p == 2 ? Gradient(kF32, 0, p, i, 1) / rank.size() : Average(kF32, rank.size(), p, i, 1);
  };
  CheckGradients(rank, *detect, {.tolerance = 1e-6, .expected = expected}, a.get());
}

// From large blocks down to those that become zero; on rank 0 a NaN in one.
double BlockValue(int rank, size_t i) {
  if (rank == 0 && i == 800) return NAN;
  return std::ldexp(Awkward(rank, i), -static_cast<int>(i / 128 % 20) * 6);
}

void Blocks(GpuRank& rank) {
  const TestStream a(rank);
  for (const BlockFormat format : {BlockFormat::kInt8, BlockFormat::kFloat8E4M3}) {
    for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
      for (const size_t count : {size_t{1}, size_t{3001}, size_t{70'000}}) {
        const Model model = RANK_VALUE(DistributedDataParallel::Create(
            rank.group, {{"w", {}, {nullptr, count, dtype, rank.device()}, {}}},
            {.op = ReduceOp::kSum, .gradient_predivide_factor = 2, .hook = CreateBlockCompressionHook(format)}));
        const BlockSum sum{.format = static_cast<blocks::Format>(format),
                           .dtype = dtype,
                           .count = count,
                           .prescale = 0.5F,
                           .postscale = 2};
        const std::vector<char> expected = ReduceInBlocks(sum, rank.size(), BlockValue);
        for (int step = 0; step < 2; ++step) {
          Write(
              model->grad(0), [&](size_t i) { return BlockValue(rank.rank(), i); }, a.get());
          model->GradReady(0, a.get());
          RANK_CHECK_OK(model->FinishBackward(a.get()));
          const std::vector<double> got = Read(model->grad(0), a.get());
          for (size_t i = 0; i < count && rank.size() > 1; ++i) {
            const double wanted = GetElement(dtype, expected.data(), i);
            RANK_CHECK(got[i] == wanted || (std::isnan(got[i]) && std::isnan(wanted)), count, " elements, at ", i, ": ",
                       got[i], " not ", wanted);
          }
        }
      }
    }
  }
}

void NormAndClipping(GpuRank& rank) {
  const TestStream a(rank);
  const std::shared_ptr<void> word = RANK_VALUE(AllocateOn(rank.device(), sizeof(uint32_t)));
  const Model model = Make(rank, DType::kFloat32, {.nonfinite = static_cast<uint32_t*>(word.get())});
  Backward(rank, *model, {.number = 2}, {&a});
  RANK_CHECK_OK(model->FinishBackward(a.get()));
  double squares = 0, sum = 0, most = 0;
  for (size_t p = 0; p < kCounts.size(); ++p) {
    for (size_t i = 0; i < kCounts[p]; ++i) {
      const double g = std::fabs(Average(DType::kFloat32, rank.size(), p, i, 2));
      squares += g * g;
      sum += g;
      most = std::max(most, g);
    }
  }
  const auto check = [&](double got, double want) {
    RANK_CHECK(std::fabs(got - want) <= (rank.size() == 3 ? 1e-6 : 1e-15) * want, got, " not ", want);
  };
  check(RANK_VALUE(model->GradNorm(2, a.get())), std::sqrt(squares));
  check(RANK_VALUE(model->GradNorm(1, a.get())), sum);
  check(RANK_VALUE(model->GradNorm(HUGE_VAL, a.get())), most);
  check(RANK_VALUE(model->ClipGradNorm(1, 2, a.get())), std::sqrt(squares));
  RANK_CHECK(std::fabs(RANK_VALUE(model->GradNorm(2, a.get())) - 1) < 1e-4);
  RANK_CHECK_EQ(ReadWord(model->skip_step(), a.get()), 0u);

  // One element of one rank.
  Backward(rank, *model, {.number = 1}, {&a});
  RANK_CHECK_OK(model->FinishBackward(a.get()));
  for (size_t p = model->size(); p-- > 0;) {
    const bool bad = p == 4 && rank.rank() == rank.size() - 1;
    Write(
        model->grad(p), [&](size_t i) { return bad && i == 40'000 ? HUGE_VAL : 1.0; }, a.get());
    model->GradReady(p, a.get());
  }
  RANK_CHECK_OK(model->FinishBackward(a.get()));
  RANK_CHECK_EQ(ReadWord(model->skip_step(), a.get()), 1u);
  RANK_CHECK(std::isinf(RANK_VALUE(model->GradNorm(2, a.get()))));
}

void ClippingAsync(GpuRank& rank) {
  const TestStream a(rank);
  std::vector<Parameter> parameters;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat64, DType::kFloat16}) {
    parameters.push_back({absl::StrCat(Name(dtype)), {}, {nullptr, 1000, dtype, rank.device()}, {}});
  }
  const Model model = RANK_VALUE(DistributedDataParallel::Create(rank.group, parameters));
  std::vector<std::vector<double>> before(model->size());
  const auto backward = [&](double last) {
    for (size_t p = model->size(); p-- > 0;) {
      const auto value = [&](size_t i) { return static_cast<double>((i + p) % 7) - 3; };
      Write(
          model->grad(p), [&](size_t i) { return p == 1 && i == 999 ? last : value(i); }, a.get());
      model->GradReady(p, a.get());
    }
    RANK_CHECK_OK(model->FinishBackward(a.get()));
    for (size_t p = 0; p < model->size(); ++p) before[p] = Read(model->grad(p), a.get());
  };
  const auto check = [&](double factor) {
    for (size_t p = 0; p < model->size(); ++p) {
      const DType dtype = model->grad(p).dtype;
      const double rounding = dtype == DType::kBFloat16 ? 1.0 / 256 : dtype == DType::kFloat16 ? 1.0 / 2048 : 2e-7;
      const std::vector<double> got = Read(model->grad(p), a.get());
      for (size_t i = 0; i < 999; ++i) {
        const double want = factor * before[p][i];
        RANK_CHECK(std::fabs(got[i] - want) <= (factor == 1 ? 0 : rounding * std::fabs(want)), Name(dtype), " at ", i,
                   ": ", got[i], " not ", want);
      }
    }
  };
  for (const double order : {1.0, 2.0, double{HUGE_VAL}}) {
    for (const double last : {0.0, double{HUGE_VAL}, double{NAN}}) {
      backward(last);
      const double norm = RANK_VALUE(model->GradNorm(order, a.get()));
      RANK_CHECK(std::isfinite(last) ? norm > 2 && norm < 1e5 : !std::isfinite(norm), norm);
      for (const double max_norm : {1e6, 0.5}) {
        const double* const where = RANK_VALUE(model->ClipGradNormAsync(max_norm, order, a.get()));
        const Buffer number{const_cast<double*>(where), 1, DType::kFloat64, rank.device()};
        const double got = Read(number, a.get())[0];
        RANK_CHECK(got == norm || std::isnan(last), got, " not ", norm);
        RANK_CHECK_EQ(std::isnan(got), std::isnan(norm));
        check(std::isfinite(last) && max_norm < norm ? max_norm / (norm + 1e-6) : 1);
      }
    }
  }
  RANK_CHECK_STATUS(model->ClipGradNormAsync(0, 2, a.get()).status(), StatusCode::kInvalidArgument, "max_norm");
  RANK_CHECK_STATUS(model->ClipGradNormAsync(1, 3, a.get()).status(), StatusCode::kInvalidArgument, "order 3");
}

void Accumulation(GpuRank& rank) {
  const TestStream a(rank);
  const std::shared_ptr<void> statistics = RANK_VALUE(AllocateOn(rank.device(), 4 * sizeof(float)));
  const Buffer running{statistics.get(), 4, DType::kFloat32, rank.device()};
  Write(
      running, [&](size_t) { return rank.rank() + 7.0; }, a.get());
  double on_host = rank.rank() + 9.0;
  const Model model =
      Make(rank, DType::kFloat32, {.buffers = {{"running", running}, {"host", {&on_host, 1, DType::kFloat64, {}}}}});
  RANK_CHECK_EQ(Read(running, a.get())[3], 7.0);
  RANK_CHECK_EQ(on_host, 9.0);
  Write(
      running, [&](size_t) { return rank.rank() + 3.0; }, a.get());
  RANK_CHECK_OK(model->BeginForward(a.get()));
  RANK_CHECK_EQ(Read(running, a.get())[0], 3.0);
  {
    const DistributedDataParallel::NoSync local(*model);
    Backward(rank, *model, {.number = 1}, {&a});
    RANK_CHECK_OK(model->FinishBackward(a.get()));
    CheckGradients(rank, *model,
                   {.expected = [&](size_t p, size_t i) { return Gradient(DType::kFloat32, rank.rank(), p, i, 1); }},
                   a.get());
  }
  // Parameter 0 is not announced again: its gradient of the step before is complete.
  Backward(rank, *model, {.number = 1, .used = [](size_t p) { return p != 0; }}, {&a});
  RANK_CHECK_OK(model->FinishBackward(a.get()));
  CheckGradients(rank, *model, {.number = 1}, a.get());

  // Rank 0 has one step more than the others.
  {
    DistributedDataParallel::Join join(*model, {.divide_by_active = true});
    for (int step = 0; step < (rank.rank() == 0 ? 2 : 1); ++step) {
      RANK_CHECK_OK(model->BeginForward(a.get()));
      Backward(rank, *model, {.number = step}, {&a});
      RANK_CHECK_OK(model->FinishBackward(a.get()));
      const Step alone{.tolerance = 1e-6,
                       .expected = [](size_t p, size_t i) { return Gradient(DType::kFloat32, 0, p, i, 1); }};
      CheckGradients(rank, *model, step == 0 ? Step{.tolerance = 1e-6} : alone, a.get());
    }
    RANK_CHECK_OK(join.Finish());
  }

  // Frozen, and thawed.
  std::vector<Parameter> fewer = MakeParameters(rank, DType::kFloat32);
  fewer[4].frozen = true;
  RANK_CHECK_OK(model->SetParameters(fewer));
  Backward(rank, *model, {.number = 3, .used = [](size_t p) { return p != 4; }}, {&a});
  RANK_CHECK_OK(model->FinishBackward(a.get()));
  const auto expected = [&](size_t p, size_t i) { return p == 4 ? 0 : Average(DType::kFloat32, rank.size(), p, i, 3); };
  CheckGradients(rank, *model, {.expected = expected}, a.get());
}

void GoesOn(GpuRank& rank) {
  const TestStream stream(rank);
  const auto step = [&](const GpuRank& in, DistributedDataParallel& model, int number) {
    Backward(in, model, {.number = number}, {&stream});
    RANK_CHECK_OK(model.FinishBackward(stream.get()));
    CheckGradients(in, model, {.number = number}, stream.get());
  };
  for (const std::shared_ptr<CommHook>& hook : {std::shared_ptr<CommHook>(), CreateAllReduceHook()}) {
    const std::unique_ptr<ProcessGroup> single = RANK_VALUE(rank.group.Split(rank.rank(), 0));
    const std::unique_ptr<ProcessGroup> all = RANK_VALUE(rank.group.Split(0, rank.rank()));
    const GpuRank alone{*single}, together{*all};
    const Model model = Make(rank, DType::kFloat32, {.bucket_bytes = size_t{64} << 10, .hook = hook});
    step(rank, *model, 0);
    RANK_CHECK_OK(model->Rebind(*single));
    for (int i = 0; i < rank.rank() + 1; ++i) step(alone, *model, 1 + i);
    RANK_CHECK_OK(model->Rebind(*all));
    for (int i = 0; i < 11; ++i) step(together, *model, i);
    RANK_CHECK_EQ(model->statistics().steps, 13);
    stream.Wait();
  }
}

void Misuse(GpuRank& rank) {
  std::vector<Parameter> parameters = MakeParameters(rank, DType::kFloat32);
  parameters[2].value.device = {Device::Kind::kCuda, static_cast<int16_t>(rank.device().index + 1)};
  RANK_CHECK_STATUS(DistributedDataParallel::Create(rank.group, parameters, {}), StatusCode::kInvalidArgument,
                    "layer2.weight", absl::StrCat("GPU ", rank.device().index + 1));
  parameters[2].value.device = {};
  RANK_CHECK_STATUS(DistributedDataParallel::Create(rank.group, parameters, {}), StatusCode::kInvalidArgument,
                    "layer2.weight", "one device");
  parameters.resize(1);
  parameters[0].value.device = {};
  if (rank.size() > 1) {
    if (rank.rank() == 0) parameters[0].value.device = rank.device();
    RANK_CHECK_STATUS(DistributedDataParallel::Create(rank.group, parameters, {}), StatusCode::kFailedPrecondition,
                      "parameter 0", "on a GPU");
    const std::shared_ptr<void> memory = RANK_VALUE(AllocateOn(rank.device(), sizeof(float)));
    float mine = 0;
    const Buffer on_gpu = {memory.get(), 1, DType::kFloat32, rank.device()}, on_cpu = {&mine, 1, DType::kFloat32, {}};
    const DdpOptions options{.buffers = {{"mean", rank.rank() == 0 ? on_gpu : on_cpu}}};
    RANK_CHECK_STATUS(DistributedDataParallel::Create(rank.group, MakeParameters(rank, DType::kFloat32), options),
                      StatusCode::kFailedPrecondition, "buffer 0", "on a GPU");
  }
  // A model on the CPU in a GPU's group.
  parameters[0].value = {nullptr, 10, DType::kFloat32, {}};
  const Model model = RANK_VALUE(DistributedDataParallel::Create(rank.group, parameters, {}));
  for (size_t i = 0; i < 10; ++i) static_cast<float*>(model->grad(0).data)[i] = static_cast<float>(rank.rank() + 1);
  model->GradReady(0);
  RANK_CHECK_OK(model->FinishBackward());
  RANK_CHECK_EQ(static_cast<float*>(model->grad(0).data)[9], static_cast<float>(rank.size() + 1) / 2);
  RANK_CHECK(model->skip_step() == nullptr);
  // A forgotten stream would be a race.
  const TestStream a(rank);
  const std::unique_ptr<ProcessGroup> part = RANK_VALUE(rank.group.Split(0, rank.rank()));
  const Model forgetful = RANK_VALUE(DistributedDataParallel::Create(*part, MakeParameters(rank, DType::kFloat32), {}));
  for (const absl::Status& status : {forgetful->GradNorm().status(), forgetful->ClipGradNorm(1).status(),
                                     forgetful->BroadcastValues(), forgetful->BeginForward()}) {
    RANK_CHECK_STATUS(status, StatusCode::kInvalidArgument, "no stream given", "kNoStream");
  }
  RANK_CHECK_OK(Exchange(rank.group, 0));  // all have made their model before the first one aborts the group
  forgetful->GradReady(0);
  RANK_CHECK_STATUS(forgetful->FinishBackward(a.get()), StatusCode::kInvalidArgument, "GradReady", "kNoStream");
}

namespace {

// value -= grad, as one that heeds what it is given. `value` in a GPU's memory; the host does the sums, after waiting.
class HostOptimizer final : public Optimizer {
 public:
  explicit HostOptimizer(DistributedDataParallel& model) : model_(model) {}
  Buffers grads() const override { return model_.grad_spans(); }
  bool fused() const override { return true; }
  absl::Status Step(const StepOptions& options) override {
    const auto set = [&](const uint32_t* word) { return word != nullptr && ReadWord(word, options.stream) != 0; };
    skipped = set(options.skip_step) || set(options.found_inf);
    if (options.inv_scale != nullptr) {
      inv_scale =
          Read({const_cast<float*>(options.inv_scale), 1, DType::kFloat32, options.stream.device}, options.stream)[0];
    }
    if (skipped) return absl::OkStatus();
    ++steps;
    return absl::OkStatus();
  }
  int steps = 0;
  bool skipped = false;
  double inv_scale = 1;

 private:
  DistributedDataParallel& model_;
};

}  // namespace

void Scaler(GpuRank& rank) {
  const TestStream a(rank);
  const std::unique_ptr<GradScaler> scaler =
      RANK_VALUE(GradScaler::Create({.initial_scale = 8, .growth_interval = 1, .device = rank.device()}));
  const Model model = Make(rank, DType::kFloat32, {.nonfinite = RANK_VALUE(scaler->AddFoundInf())});
  HostOptimizer optimizer(*model);
  for (const bool bad : {false, true}) {
    const std::shared_ptr<void> loss = RANK_VALUE(AllocateOn(rank.device(), sizeof(float)));
    const Buffer one{loss.get(), 1, DType::kFloat32, rank.device()};
    Write(
        one, [](size_t) { return 3.0; }, a.get());
    RANK_CHECK_OK(scaler->Scale({&one, 1}, a.get()));
    RANK_CHECK_EQ(Read(one, a.get())[0], bad ? 48.0 : 24.0);
    for (size_t p = model->size(); p-- > 0;) {
      Write(
          model->grad(p), [&](size_t) { return bad && rank.rank() == 0 ? HUGE_VAL : 1.0; }, a.get());
      model->GradReady(p, a.get());
    }
    RANK_CHECK_OK(model->FinishBackward(a.get()));
    RANK_CHECK_OK(scaler->Step(optimizer, {.stream = a.get(), .skip_step = model->skip_step()}));
    RANK_CHECK_EQ(optimizer.skipped, bad);
    RANK_CHECK_EQ(optimizer.inv_scale, bad ? 1.0 / 16 : 1.0 / 8);
    RANK_CHECK_OK(scaler->Update(a.get()));
    RANK_CHECK_EQ(RANK_VALUE(scaler->scale()), bad ? 8.0f : 16.0f);
  }
  RANK_CHECK_EQ(optimizer.steps, 1);
  // Unscaling is a pass of its own for those who want the gradients as they are.
  const Buffer one = model->grad_spans()[0];
  RANK_CHECK_OK(Zero({&one, 1}, a.get()));
  Write(
      model->grad(4), [](size_t) { return 16.0; }, a.get());
  RANK_CHECK_OK(scaler->Scale({}, a.get()));
  RANK_CHECK_OK(scaler->Unscale(optimizer, a.get()));
  RANK_CHECK_EQ(Read(model->grad(4), a.get())[40'000], 2.0);
  RANK_CHECK(!RANK_VALUE(scaler->FoundInf(optimizer)));
}

void Statistics(GpuRank& rank) {
  const TestStream a(rank);
  const Model model = Make(rank, DType::kFloat32, {.bucket_bytes = 4096});
  for (int step = 0; step < 3; ++step) {
    Backward(rank, *model, {.number = step}, {&a});
    RANK_CHECK_OK(model->FinishBackward(a.get()));
    a.Wait();
  }
  DdpStatistics statistics = model->statistics();
  // The timer's own stream may be a little behind.
  for (int k = 0; k < 10'000 && statistics.communication_ns == 0; ++k) {
    const timespec nap{0, 1'000'000};
    nanosleep(&nap, nullptr);
    statistics = model->statistics();
  }
  RANK_CHECK_EQ(statistics.steps, 3);
  RANK_CHECK(statistics.buckets.size() > 1);
  RANK_CHECK(statistics.communication_ns > 0 && statistics.exposed_ns >= 0);
}

// Rank 0 does not come to a step, so that the others' FinishBackward has certainly returned before it can end.
void FailsAfterReturn(GpuRank& rank) {
  const TestStream a(rank);
  const Model model = Make(rank, DType::kFloat32, {});
  HostOptimizer optimizer(*model);
  Backward(rank, *model, {}, {&a});
  RANK_CHECK_OK(model->FinishBackward(a.get()));
  RANK_CHECK_OK(optimizer.Step({.stream = a.get(), .skip_step = model->skip_step()}));
  RANK_CHECK_EQ(optimizer.steps, 1);
  if (rank.rank() != 0) {
    Backward(rank, *model, {.number = 1}, {&a});
    RANK_CHECK_OK(model->FinishBackward(a.get()));
  }
  Exchange(rank.group, 0).status().IgnoreError();  // the abort may overtake it, but only when all have come
  if (rank.rank() == 0) rank.group.Abort(absl::AbortedError("the test says so"));
  if (rank.rank() != 0) {
    RANK_CHECK_OK(optimizer.Step({.stream = a.get(), .skip_step = model->skip_step()}));
    RANK_CHECK(optimizer.skipped);
    RANK_CHECK_EQ(optimizer.steps, 1);
  }
  Backward(rank, *model, {.number = 2}, {&a});
  RANK_CHECK_STATUS(model->FinishBackward(a.get()), StatusCode::kAborted, "the test says so");
}

}  // namespace ddp::testing::gpu_cases
