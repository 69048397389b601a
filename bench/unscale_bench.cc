// SPDX-License-Identifier: Apache-2.0
// Times GradScaler::Unscale, which multiplies every gradient and looks whether all are finite, on one thread. The bound
// is the plainest pass over the same memory: read, multiply, write, and nothing else. Beside it a copy of as many bytes
// (memcpy), and the check alone, as a fused step runs it, with its bound, a pass that only reads.
//
//   unscale_bench [rounds]
//   unscale_bench host cpu|cuda      what mixed precision costs the host in a step
//
// They take turns in each round; a figure is the median over the rounds, a ratio is taken within a round.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "bench/arguments.h"
#include "bench/percentile.h"
#include "ddp/autocast.h"
#include "ddp/context.h"
#include "ddp/grad_scaler.h"
#include "ddp/store.h"
#include "hwy/aligned_allocator.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "bench/unscale_bench.cc"
#include "hwy/foreach_target.h"
// foreach_target.h comes first.
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace bench {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

void ReadWrite(float* data, size_t count, float factor) {
  const hn::ScalableTag<float> d;
  const size_t lanes = hn::Lanes(d);
  const auto f = hn::Set(d, factor);
  for (size_t i = 0; i < count; i += 4 * lanes) {
    for (size_t k = 0; k < 4; ++k) {
      float* p = data + i + k * lanes;
      hn::Store(hn::Mul(hn::Load(d, p), f), d, p);
    }
  }
}

float Read(const float* data, size_t count) {
  const hn::ScalableTag<float> d;
  const size_t lanes = hn::Lanes(d);
  auto a = hn::Zero(d), b = a, c = a, e = a;
  for (size_t i = 0; i < count; i += 4 * lanes) {
    a = hn::Or(a, hn::Load(d, data + i));
    b = hn::Or(b, hn::Load(d, data + i + lanes));
    c = hn::Or(c, hn::Load(d, data + i + 2 * lanes));
    e = hn::Or(e, hn::Load(d, data + i + 3 * lanes));
  }
  return hn::GetLane(hn::Or(hn::Or(a, b), hn::Or(c, e)));
}

}  // namespace HWY_NAMESPACE
}  // namespace bench
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace bench {
namespace {

HWY_EXPORT(ReadWrite);
HWY_EXPORT(Read);

using Clock = std::chrono::steady_clock;

// Has gradients, and steps without doing anything: what is timed is the scaler.
class NoOptimizer final : public ddp::Optimizer {
 public:
  NoOptimizer(float* grads, size_t count, ddp::Device device = {})
      : buffer_{grads, count, ddp::DType::kFloat32, device} {}
  ddp::Buffers grads() const override { return {&buffer_, 1}; }
  bool fused() const override { return true; }
  absl::Status Step(const ddp::StepOptions&) override { return absl::OkStatus(); }

 private:
  ddp::Buffer buffer_;
};

void Check(const absl::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "unscale_bench: %s\n", status.ToString().c_str());
  std::exit(1);
}

// Nanoseconds of one call, from so many that a millisecond passes, after one that leaves the caches as the others will
// find them.
template <typename Body>
double Time(const Body& body) {
  body();
  for (int calls = 1;; calls *= 2) {
    const Clock::time_point begin = Clock::now();
    for (int i = 0; i < calls; ++i) body();
    const double ns = std::chrono::duration<double, std::nano>(Clock::now() - begin).count();
    if (ns > 1e6) return ns / calls;
  }
}

void Measure(size_t bytes, int rounds) {
  const size_t count = bytes / sizeof(float);
  const auto grads = hwy::AllocateAligned<float>(count);
  const auto copy = hwy::AllocateAligned<float>(count);
  std::fill_n(grads.get(), count, 1.0f);
  std::fill_n(copy.get(), count, 1.0f);
  const std::unique_ptr<ddp::GradScaler> scaler = *ddp::GradScaler::Create({.initial_scale = 1});
  NoOptimizer optimizer(grads.get(), count);
  scaler->scale_data();
  volatile float sink = 0;
  const auto unscale = [&] {
    Check(scaler->Unscale(optimizer));
    Check(scaler->Update(1.0f));
  };
  const auto check = [&] {
    Check(scaler->Step(optimizer));
    Check(scaler->Update(1.0f));
  };
  std::vector<double> times[5], write_ratio, read_ratio, copy_ratio;
  for (int round = 0; round < rounds; ++round) {
    const double t[] = {Time(unscale), Time([&] {
                          HWY_DYNAMIC_DISPATCH(ReadWrite)
                          (grads.get(), count, 1.0f);
                        }),
                        Time(check), Time([&] { sink = HWY_DYNAMIC_DISPATCH(Read)(grads.get(), count); }),
                        Time([&] { std::memcpy(copy.get(), grads.get(), bytes); })};
    for (size_t i = 0; i < 5; ++i) times[i].push_back(t[i]);
    write_ratio.push_back(t[0] / t[1]);
    read_ratio.push_back(t[2] / t[3]);
    copy_ratio.push_back(t[0] / t[4]);
  }
  const auto [least, most] = std::minmax_element(write_ratio.begin(), write_ratio.end());
  std::printf("%8.2f %12.2f %12.2f %8.2f (%.2f-%.2f) %8.1f %12.2f %8.2f %12.2f %12.2f %8.2f\n",
              static_cast<double>(bytes) / (1 << 20), Median(times[0]) / 1e3, Median(times[1]) / 1e3,
              Median(write_ratio), *least, *most, 2 * static_cast<double>(bytes) / Median(times[0]),
              Median(times[4]) / 1e3, Median(copy_ratio), Median(times[2]) / 1e3, Median(times[3]) / 1e3,
              Median(read_ratio));
  // Right as well as fast.
  grads[count - 1] = std::nanf("");
  Check(scaler->Unscale(optimizer));
  if (!*scaler->FoundInf(optimizer)) {
    std::fprintf(stderr, "unscale_bench: a NaN was not found\n");
    std::exit(1);
  }
}

// What mixed precision costs the host in a step, beside the layers and the optimizer: the scopes of `kLayers` layers
// that ask for their type, and a scaler whose gradients are so few that nothing is computed. On a GPU it submits, and
// does not wait.
int HostCost(bool cuda) {
  constexpr int kLayers = 50, kSteps = 100, kRounds = 31;
  ddp::ContextOptions options;
  options.rank = 0;
  options.world_size = 1;
  options.store = ddp::CreateMemoryStore();
  if (cuda) options.device = {ddp::Device::Kind::kCuda, -1};
  const absl::StatusOr<std::unique_ptr<ddp::Context>> context = ddp::Context::Create(options);
  Check(context.status());
  const ddp::Device device = (*context)->device();
  const absl::StatusOr<ddp::Allocation> memory = (*context)->world().Allocate(16 * sizeof(float), device);
  Check(memory.status());
  NoOptimizer optimizer(static_cast<float*>(memory->data()), 16, device);
  const auto time_step = [&](const char* name, const auto& step) {
    absl::StatusOr<std::unique_ptr<ddp::GradScaler>> scaler = ddp::GradScaler::Create({.device = device});
    Check(scaler.status());
    const absl::StatusOr<uint32_t*> word = (*scaler)->AddFoundInf();
    Check(word.status());
    std::vector<double> times;
    for (int round = -1; round < kRounds; ++round) {
      const Clock::time_point begin = Clock::now();
      for (int i = 0; i < kSteps; ++i) step(**scaler, *word);
      const double us = std::chrono::duration<double, std::micro>(Clock::now() - begin).count() / kSteps;
      Check((*scaler)->scale().status());  // waits
      if (round >= 0) times.push_back(us);
    }
    const auto [least, most] = std::minmax_element(times.begin(), times.end());
    std::printf("%-60s %8.3f us (%.3f-%.3f)\n", name, Median(times), *least, *most);
  };
  const auto forward = [&](ddp::GradScaler& scaler) {
    const ddp::Autocast autocast(device.kind);
    for (int i = 0; i < kLayers; ++i) {
      ddp::Autocast::TypeFor(ddp::AutocastOp::kLinear, device.kind, {ddp::DType::kFloat32});
    }
    scaler.scale_data();
  };
  time_step("autocast, 50 layers", [&](ddp::GradScaler& scaler, uint32_t*) { forward(scaler); });
  time_step("the same, fused step, update", [&](ddp::GradScaler& scaler, uint32_t*) {
    forward(scaler);
    Check(scaler.Step(optimizer));
    Check(scaler.Update());
  });
  time_step("the same, checked by the reduction", [&](ddp::GradScaler& scaler, uint32_t* word) {
    forward(scaler);
    Check(scaler.Step(optimizer, {.found_inf = word}));
    Check(scaler.Update());
  });
  time_step("the same, unscaled by a pass of its own", [&](ddp::GradScaler& scaler, uint32_t*) {
    forward(scaler);
    Check(scaler.Unscale(optimizer));
    Check(scaler.Step(optimizer));
    Check(scaler.Update());
  });
  return 0;
}

}  // namespace
}  // namespace bench

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "", device = argc > 2 ? argv[2] : "";
  if (mode == "host" && (device == "cpu" || device == "cuda")) return bench::HostCost(device == "cuda");
  int64_t rounds = 31;
  const char* const what =
      "Times GradScaler::Unscale on one thread, beside a copy and a bare pass over the same memory.";
  const char* const usage =
      "  unscale_bench [ROUNDS]          how often everything is timed (default 31)\n"
      "  unscale_bench host cpu|cuda     what mixed precision costs the host in a step";
  if (const std::optional<int> code = bench::ReadNumbers(argc, argv, what, usage, {{&rounds, 1, 1'000'000}})) {
    return *code;
  }
  std::printf(
      "#    MiB  unscale (us)   bound (us)  x bound (range)      GB/s    copy (us)   x copy   check (us)   bound (us)  "
      "x bound\n");
  for (const double mib : {0.0625, 0.5, 4.0, 16.0, 100.0})
    bench::Measure(static_cast<size_t>(mib * (1 << 20)), static_cast<int>(rounds));
  return 0;
}
#endif  // HWY_ONCE
