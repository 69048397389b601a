// SPDX-License-Identifier: Apache-2.0
// A training program on simulated GPUs in which one operation of a GPU or one call of NCCL fails: each in turn, in
// several configurations of the model. Of some of them some calls alone unless the slow cases are asked for.
#include <algorithm>
#include <atomic>
#include <barrier>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ddp/comm_hook.h"
#include "ddp/distributed_data_parallel.h"
#include "ddp/grad_scaler.h"
#include "tests/support/nccl_job.h"

// g++ takes members of class type that are left out of designated initializers for forgotten.
#pragma GCC diagnostic ignored "-Wmissing-field-initializers"

namespace ddp::testing::simulated {
namespace {

constexpr size_t kCount = 64;
constexpr double kScale = 8;

// How a model trains.
struct Config {
  const char* name;
  std::function<DdpOptions()> options = [] { return DdpOptions(); };  // hooks have a state
  DType dtype = DType::kFloat32;
  bool registered = true;    // the group's memory is, with NCCL
  bool given = false;        // the gradients are the program's memory
  bool idle = false;         // rank 1 does not use the second parameter
  bool accumulates = false;  // two backward passes to a step
  bool scales = false;       // with a GradScaler
  bool captured = false;     // the last step is a graph
};

// One rank's training: two buckets, and value -= gradient in the stream's order unless the step is not to be used.
class Training final : public Optimizer {
 public:
  Training(Rank& rank, ProcessGroup& group, const Config& config)
      : rank_(rank), group_(group), config_(config), owned_(rank.MakeStream()) {
    for (size_t p = 0; p < 2 && config.given; ++p) {
      given_.push_back(RANK_VALUE(rank.gpus.Allocate(rank.device(), kCount * SizeOf(config.dtype))));
    }
  }

  absl::Status Create() {
    std::vector<Parameter> parameters;
    for (const char* name : {"a", "b"}) {
      const Buffer empty{nullptr, kCount, config_.dtype, rank_.device()};
      Buffer grad;
      if (config_.given) grad = {given_[parameters.size()].get(), kCount, config_.dtype, rank_.device()};
      parameters.push_back({name, {8, kCount / 8}, empty, grad});
    }
    DdpOptions options = config_.options();
    options.bucket_bytes = 1;
    options.check_replicas = 2;
    if (config_.scales) {
      absl::StatusOr<std::unique_ptr<GradScaler>> scaler =
          GradScaler::Create({.initial_scale = kScale, .device = rank_.device()});
      if (!scaler.ok()) return Named(scaler.status());
      scaler_ = *std::move(scaler);
      const absl::StatusOr<uint32_t*> word = scaler_->AddFoundInf();
      if (!word.ok()) return Named(word.status());
      options.nonfinite = *word;
    }
    absl::StatusOr<std::unique_ptr<DistributedDataParallel>> model =
        DistributedDataParallel::Create(group_, parameters, options);
    if (!model.ok()) return model.status();
    model_ = *std::move(model);
    return absl::OkStatus();
  }
  absl::Status Step() {
    if (absl::Status s = Backward(); !s.ok()) return s;
    if (absl::Status s = model_->ClipGradNorm(1e9, 2, stream()).status(); !s.ok()) return s;
    if (absl::Status s = Descend(); !s.ok()) return s;
    ++steps_;
    return absl::OkStatus();
  }
  // A step as a graph, launched twice.
  absl::Status CapturedStep() {
    RANK_CHECK_OK(FakeDevices::BeginCapture(owned_.get()));
    absl::Status status = Backward();
    if (status.ok()) status = Descend();
    const auto graph = FakeDevices::EndCapture(owned_.get());
    if (!status.ok()) return status;
    for (int launch = 0; launch < 2; ++launch, ++steps_) FakeDevices::Launch(RANK_VALUE(graph), owned_.get());
    return absl::OkStatus();
  }
  absl::Status Finish() {
    if (absl::Status s = model_->BroadcastValues(0, stream()); !s.ok()) return s;
    if (absl::Status s = group_.Barrier().Wait(); !s.ok()) return s;
    FakeDevices::Synchronize(owned_.get());
    for (size_t p = 0; p < model_->size(); ++p) {
      const double want = -static_cast<double>(steps_) * Average(p);
      const double got = GetElement(config_.dtype, model_->value(p).data, kCount - 1);
      RANK_CHECK(std::fabs(got - want) <= 1e-3 * std::fabs(want), config_.name, ": ", got, " is not ", want);
    }
    return absl::OkStatus();
  }

  Buffers grads() const override { return model_->grad_spans(); }
  bool fused() const override { return true; }
  absl::Status Step(const StepOptions& options) override {
    Subtract(options.inv_scale, options.found_inf);
    return absl::OkStatus();
  }

 private:
  Stream stream() const { return {rank_.device(), owned_.get()}; }
  // A scaler belongs to no group.
  absl::Status Named(const absl::Status& error) const {
    return absl::Status(error.code(), absl::StrCat("rank ", rank_.rank, ": ", error.message()));
  }
  int passes() const { return config_.accumulates ? 2 : 1; }
  double Average(size_t p) const {
    const double sum = config_.idle && p == 1 ? 1 : 2 * (1 + static_cast<double>(p));
    return sum / 2 * passes();
  }
  absl::Status Backward() {
    model_->ZeroGrad(stream());
    for (int pass = 1; pass < passes(); ++pass) {
      const DistributedDataParallel::NoSync no_sync(*model_);
      if (absl::Status s = Pass(); !s.ok()) return s;
    }
    return Pass();
  }
  absl::Status Pass() {
    for (size_t p = model_->size(); p-- > 0;) {
      if (config_.idle && p == 1 && rank_.rank == 1) continue;
      const double add = (2 * rank_.rank + static_cast<double>(p)) * (config_.scales ? kScale : 1);
      FakeDevices::Enqueue(owned_.get(), [grad = model_->grad(p).data, add, dtype = config_.dtype] {
        for (size_t i = 0; i < kCount; ++i) SetElement(dtype, grad, i, GetElement(dtype, grad, i) + add);
      });
      model_->GradReady(p, stream());
    }
    return model_->FinishBackward(stream());
  }
  absl::Status Descend() {
    if (absl::Status s = model_->ClipGradNormAsync(1e9, 2, stream()).status(); !s.ok()) return s;
    if (!config_.scales) {
      Subtract(nullptr, model_->skip_step());
      return absl::OkStatus();
    }
    absl::Status status = scaler_->Scale({}, stream());
    if (status.ok()) status = scaler_->Step(*this, {.stream = stream(), .skip_step = model_->skip_step()});
    if (status.ok()) status = scaler_->Update(stream());
    return status.ok() ? status : Named(status);
  }
  void Subtract(const float* factor, const uint32_t* skip) {
    for (size_t p = 0; p < model_->size(); ++p) {
      FakeDevices::Enqueue(owned_.get(), [value = model_->value(p).data, grad = model_->grad(p).data, factor, skip,
                                          dtype = config_.dtype] {
        const double by = factor == nullptr ? 1 : static_cast<double>(*factor);
        for (size_t i = 0; i < kCount && *skip == 0; ++i) {
          SetElement(dtype, value, i, GetElement(dtype, value, i) - by * GetElement(dtype, grad, i));
        }
      });
    }
  }

  Rank& rank_;
  ProcessGroup& group_;
  const Config& config_;
  std::vector<std::shared_ptr<void>> given_;
  std::unique_ptr<GradScaler> scaler_;
  std::unique_ptr<DistributedDataParallel> model_;
  const OwnedStream owned_;  // after the model: it is waited for first
  int steps_ = 0;
};

// What the faults are counted in: calls by the thread whose current device is GPU 1. How often the ones left out are
// made is the clock's affair; a stream's memory that is not given back is missing.
struct Faults {
  Job& job;
  int chosen;
  std::atomic<bool> counting{false};
  std::string name = {};
  std::barrier<> all_are_ready{2};

  void Count(const Rank& rank, bool on) {
    if (rank.rank == 1) counting = on;
  }
  bool Strikes(absl::string_view call, int device) {
    if (!counting || device != 1 || call == "Finished" || call == "FreeOnStream") return false;
    const std::lock_guard<std::mutex> lock(mutex);
    calls.emplace_back(call);
    if (static_cast<int>(calls.size()) != chosen + 1) return false;
    name = std::string(call);
    return true;
  }
  std::vector<std::string> names() {
    const std::lock_guard<std::mutex> lock(mutex);
    return calls;
  }
  void OfGpus() {
    job.gpus.fail = [this](absl::string_view call, int device) {
      return Strikes(call, device) ? absl::InternalError(absl::StrCat("cuda", call, ": injected")) : absl::OkStatus();
    };
  }
  void OfNccl() {
    job.nccl.fail = [this](const std::string& call, int device) {
      return Strikes(call, device) ? nccl::kInternalError : nccl::kSuccess;
    };
  }

  std::mutex mutex = {};
  std::vector<std::string> calls = {};  // guarded by it
};

NcclGroupOptions OptionsOf(Rank& rank, const Config& config) {
  NcclGroupOptions options = rank.Options();
  options.always_abortable = !config.registered;
  options.warm_up_limit = 4 * kCount;
  // A group whose operations a graph has is kept for ever: hundreds of them without the copy engines' memory.
  if (config.captured) options.staged_limits = "copies=never";
  return options;
}

// OK: the values are those of all steps. Gives up at the first error.
absl::Status TrainAll(Rank& rank, std::unique_ptr<ProcessGroup> control, Faults& faults, const Config& config) {
  faults.Count(rank, true);
  const absl::StatusOr<std::unique_ptr<ProcessGroup>> group =
      CreateGpuGroup(std::move(control), OptionsOf(rank, config));
  if (!group.ok()) return group.status();
  const absl::StatusOr<Allocation> memory = (*group)->Allocate(kCount * sizeof(float), rank.device());
  if (!memory.ok()) return memory.status();
  const Buffer sum = memory->View(DType::kFloat32, 0, kCount);
  if (absl::Status s = (*group)->AllReduce(sum, sum, {}, kNoStream).Wait(); !s.ok()) return s;
  faults.Count(rank, false);  // the stream is the program's
  Training training(rank, **group, config);
  faults.Count(rank, true);
  absl::Status status = training.Create();
  if (status.ok()) status = training.Step();
  return status.ok() ? training.Finish() : status;
}

// The same with the model alone under fault or, where the configuration says so, a graph of it alone.
absl::Status TrainModel(Rank& rank, std::unique_ptr<ProcessGroup> control, Faults& faults, const Config& config) {
  const std::unique_ptr<ProcessGroup> group = RANK_VALUE(CreateGpuGroup(std::move(control), OptionsOf(rank, config)));
  Training training(rank, *group, config);
  if (config.captured) {
    RANK_CHECK_OK(training.Create());
    RANK_CHECK_OK(training.Step());
    RANK_CHECK_OK(group->Barrier().Wait());
    faults.all_are_ready.arrive_and_wait();
  }
  faults.Count(rank, true);
  absl::Status status;
  if (config.captured) {
    status = training.CapturedStep();
  } else {
    status = training.Create();
    for (int step = 0; step < 2 && status.ok(); ++step) status = training.Step();
  }
  return status.ok() ? training.Finish() : status;
}

using Program = absl::Status (*)(Rank&, std::unique_ptr<ProcessGroup>, Faults&, const Config&);

struct Sweep {
  Program program;
  void (Faults::*kind)();
  absl::string_view wanted;
  const Config& config;
};

// Returns the calls that there were.
std::vector<std::string> RunWithFault(const Sweep& sweep, int chosen) {
  Job job(2);
  job.timeout = absl::Seconds(20);  // none is to take that long
  Faults faults{job, chosen};
  (faults.*sweep.kind)();
  absl::Status outcome[2];
  {
    const ScopedDevices devices(job.gpus);
    job.RunOver([&](Rank& rank, std::unique_ptr<ProcessGroup> control) {
      outcome[rank.rank] = sweep.program(rank, std::move(control), faults, sweep.config);
    });
  }
  const std::vector<std::string> calls = faults.names();
  INFO(sweep.config.name << ", call " << chosen << ", " << faults.name);
  const absl::Status& mine = outcome[1];
  CHECK((mine.ok() || absl::StrContains(mine.message(), "rank 1: ")));
  CHECK((mine.ok() || absl::StrContains(mine.message(), sweep.wanted)));
  for (const absl::Status& status : outcome) {
    INFO(status.ToString());
    CHECK((status.ok() || absl::StrContains(status.message(), "rank 1")));
    CHECK(!absl::IsDeadlineExceeded(status));
    CHECK((chosen >= 0 || status.ok()));
  }
  CHECK(job.nccl.live_comms() == 0);
  CHECK(job.nccl.live_memory() == 0);
  return calls;
}

FakeDevices::Held operator-(const FakeDevices::Held& a, const FakeDevices::Held& b) {
  return {a.streams - b.streams, a.events - b.events, a.memory - b.memory};
}

// So many of the calls, evenly spread; of each configuration others.
std::vector<size_t> Choose(size_t calls, size_t most) {
  static size_t shift = 0;
  std::vector<size_t> chosen;
  const size_t wanted = std::min(calls, most);
  for (size_t k = 0; k < wanted; ++k) chosen.push_back((k * calls + shift) / wanted % calls);
  shift += calls / 7;
  return chosen;
}

void FailCalls(const Sweep& sweep, size_t most = SIZE_MAX) {
  const FakeDevices::Held none = FakeDevices::held();
  const std::vector<std::string> calls = RunWithFault(sweep, -1);
  const FakeDevices::Held kept = FakeDevices::held() - none;  // what a graph may still use is kept for ever
  CHECK(calls.size() > 3);
  for (const size_t k : Choose(calls.size(), most)) {
    const FakeDevices::Held before = FakeDevices::held();
    RunWithFault(sweep, static_cast<int>(k));
    INFO(sweep.config.name << ", call " << k << ", " << calls[k]);
    const auto more = [&] {
      const FakeDevices::Held held = FakeDevices::held() - before;
      return held.streams > kept.streams || held.events > kept.events || held.memory > kept.memory;
    };
    // A thread that aborts has its part a little longer.
    for (int nap = 0; nap < 2000 && more(); ++nap) absl::SleepFor(absl::Milliseconds(1));
    CHECK(!more());
  }
}

DdpOptions WithHook(std::shared_ptr<CommHook> hook) { return {.hook = std::move(hook)}; }
const Config kPlainConfig{.name = "as it is"};
const Config kCapturedConfig{.name = "captured", .captured = true};
const Config kConfigs[] = {
    {.name = "plain memory", .registered = false},
    {.name = "gradients of the program's", .given = true},
    {.name = "copied gradients", .options = [] { return DdpOptions{.copy_gradients = true}; }, .given = true},
    {.name = "static graph", .options = [] { return DdpOptions{.static_graph = true}; }, .idle = true},
    {.name = "unused parameters",
     .options = [] { return DdpOptions{.unused = UnusedParameters::kDetect}; },
     .idle = true},
    {.name = "accumulation", .accumulates = true},
    {.name = "accumulation of the program's gradients", .given = true, .accumulates = true},
    {.name = "mixed precision", .dtype = DType::kFloat16, .scales = true},
    {.name = "mixed precision, summed in float32",
     .options = [] { return DdpOptions{.reduce_in_float32 = true}; },
     .dtype = DType::kFloat16,
     .scales = true},
    {.name = "16-bit hook", .options = [] { return WithHook(CreateCompressionHook(DType::kBFloat16)); }},
    {.name = "8-bit hook", .options = [] { return WithHook(CreateBlockCompressionHook()); }},
    {.name = "PowerSGD", .options = [] { return WithHook(CreatePowerSgdHook({.start_step = 0})); }},
    {.name = "check_nan", .options = [] { return DdpOptions{.check_nan = true}; }},
    {.name = "captured, plain memory", .registered = false, .captured = true},
    {.name = "captured, mixed precision",
     .options = [] { return DdpOptions{.reduce_in_float32 = true}; },
     .dtype = DType::kFloat16,
     .scales = true,
     .captured = true},
    {.name = "captured, static graph",
     .options = [] { return DdpOptions{.static_graph = true}; },
     .idle = true,
     .captured = true},
    {.name = "captured, PowerSGD",
     .options = [] { return WithHook(CreatePowerSgdHook({.start_step = 0})); },
     .captured = true},
    {.name = "captured, 16-bit hook",
     .options = [] { return WithHook(CreateCompressionHook(DType::kBFloat16)); },
     .captured = true},
    {.name = "captured, accumulation", .accumulates = true, .captured = true},
};

// In every configuration that the backend has.
void FailCallsOfAll(void (Faults::*kind)(), absl::string_view wanted, size_t most = SIZE_MAX) {
  const bool captures =
      !Staged() || (std::getenv("DDP_NODE_SIZE") == nullptr && std::getenv("DDP_STAGED_REDUCE") == nullptr);
  for (const Config& config : kConfigs) {
    if (captures || !config.captured) FailCalls({TrainModel, kind, wanted, config}, most);
  }
}

TEST_CASE("whichever operation of a GPU fails, an error names it or nothing is lost, and nothing is kept") {
  FailCalls({TrainAll, &Faults::OfGpus, "injected", kPlainConfig});
}
TEST_CASE("whichever operation of a GPU fails in a captured step, an error names it, and nothing is kept") {
  FailCalls({TrainModel, &Faults::OfGpus, "injected", kCapturedConfig});
}
TEST_CASE("whichever call of NCCL fails, an error names it or nothing is lost, and nothing is kept", "[nccl]") {
  FailCalls({TrainAll, &Faults::OfNccl, "some error", kPlainConfig});
}
TEST_CASE("whatever a model is asked to do, an operation of a GPU that fails is named, and nothing is kept") {
  FailCallsOfAll(&Faults::OfGpus, "injected", 6);
}
TEST_CASE("whatever a model is asked to do, a call of NCCL that fails is named, and nothing is kept", "[nccl]") {
  FailCallsOfAll(&Faults::OfNccl, "some error", 2);
}
// Minutes.
TEST_CASE("whatever a model is asked to do, each operation of a GPU that fails is named", "[.each]") {
  FailCallsOfAll(&Faults::OfGpus, "injected");
}
TEST_CASE("whatever a model is asked to do, each call of NCCL that fails is named", "[.each_nccl]") {
  FailCallsOfAll(&Faults::OfNccl, "some error");
}

}  // namespace
}  // namespace ddp::testing::simulated
