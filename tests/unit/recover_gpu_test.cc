// SPDX-License-Identifier: Apache-2.0
// Context::Recover on simulated GPUs: NCCL fails on one rank in the middle of a training, and all ranks go on through
// host memory.
#include <atomic>
#include <barrier>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ddp/distributed_data_parallel.h"
#include "ddp/sync_state.h"
#include "libddp/comm/auto_group.h"
#include "tests/support/auto_world.h"

namespace ddp::testing::simulated {
namespace {

using Mishap = FakeNccl::Mishap;

constexpr size_t kTensors = 3, kElements = 2000;
constexpr int64_t kSteps = 12;

// A training whose sums are exact, as a program writes it: the GPU's stream does the steps, and counts those that were
// not skipped.
class Training {
 public:
  Training(Context& context, FakeDevices& gpus) : context_(context), guard_(gpus, context.device()) {
    stream_ = RANK_VALUE(MakeStream(gpus));
    momenta_ = RANK_VALUE(gpus.Allocate(context.device(), kTensors * kElements * sizeof(float)));
    std::vector<Parameter> parameters;
    for (size_t t = 0; t < kTensors; ++t) {
      parameters.push_back({absl::StrCat("t", t), {}, {nullptr, kElements, DType::kFloat32, context.device()}, {}});
    }
    model_ = RANK_VALUE(DistributedDataParallel::Create(
        context.world(), parameters, {.bucket_bytes = kElements * sizeof(float), .op = ReduceOp::kSum}));
  }

  // To the end, whatever fails before.
  void Run() {
    for (int64_t step = 0; step < kSteps || !Sound(); ++step) {
      const absl::Status status = step < kSteps ? Step(step) : context_.world().status();
      if (!status.ok()) step = Recover(status) - 1;
    }
  }
  // Of all values and momenta.
  std::vector<float> State() {
    std::vector<float> state(momenta(), momenta() + kTensors * kElements);
    for (size_t t = 0; t < kTensors; ++t) state.insert(state.end(), value(t), value(t) + kElements);
    return state;
  }
  const absl::Status& failure() const { return failure_; }
  int recoveries() const { return recoveries_; }

 private:
  Stream stream() const { return {context_.device(), stream_.get()}; }
  float* value(size_t t) const { return static_cast<float*>(model_->value(t).data); }
  float* momenta() const { return static_cast<float*>(momenta_.get()); }

  // The last steps are through, and well.
  bool Sound() {
    FakeDevices::Synchronize(stream_.get());
    return context_.world().status().ok() && *committed_ == kSteps;
  }
  absl::Status Step(int64_t step) {
    for (size_t t = kTensors; t-- > 0;) {
      FakeDevices::Enqueue(stream_.get(), [=, rank = context_.rank(), grad = static_cast<float*>(model_->grad(t).data),
                                           value = value(t)] {
        for (size_t i = 0; i < kElements; ++i) {
          const auto odd = static_cast<float>(static_cast<int64_t>(value[i]) % 2);
          grad[i] = static_cast<float>((rank + 1) * (step + 1) + static_cast<int64_t>((i + t) % 5)) + odd;
        }
      });
      model_->GradReady(t, stream());
    }
    if (absl::Status s = model_->FinishBackward(stream()); !s.ok()) return s;
    FakeDevices::Enqueue(stream_.get(), [this, skip = model_->skip_step()] {
      if (*skip != 0) return;
      for (size_t t = 0; t < kTensors; ++t) {
        const auto* const grad = static_cast<const float*>(model_->grad(t).data);
        for (size_t i = 0; i < kElements; ++i) value(t)[i] += momenta()[t * kElements + i] += grad[i];
      }
      ++*committed_;
    });
    return absl::OkStatus();
  }
  int64_t Recover(const absl::Status& status) {
    failure_ = status;
    ++recoveries_;
    RANK_CHECK_OK(context_.Recover());
    FakeDevices::Synchronize(stream_.get());
    RANK_CHECK_OK(model_->Rebind(context_.world()));
    std::vector<Buffer> state = {{momenta(), kTensors * kElements, DType::kFloat32, context_.device()}};
    for (size_t t = 0; t < kTensors; ++t) state.push_back(model_->value(t));
    return *committed_ = RANK_VALUE(SyncState(context_.world(), *committed_, state));
  }

  Context& context_;
  const DeviceGuard guard_;
  OwnedStream stream_;
  std::shared_ptr<void> momenta_;
  const std::unique_ptr<int64_t> committed_ = std::make_unique<int64_t>(0);
  std::unique_ptr<DistributedDataParallel> model_;
  absl::Status failure_;
  int recoveries_ = 0;
};

// The final state, the same on all ranks. `plant`, by the last rank, breaks NCCL in a step; `words` are in the cause.
std::vector<float> Train(int size, const std::function<void(FakeNccl&, int rank)>& plant = nullptr,
                         const std::string& words = "", double timeout_s = 60) {
  World world(size);
  Logged log;
  std::vector<std::vector<float>> states(static_cast<size_t>(size));
  std::barrier all_are_made(size);
  const auto body = [&](Context& context) {
    RANK_CHECK_EQ(context.world().backend(), "nccl");
    Training training(context, world.gpus());
    all_are_made.arrive_and_wait();  // what is planted would reach who is still at it
    RANK_CHECK_OK(context.world().SetTimeout(TimeFor(absl::Seconds(timeout_s))));
    if (plant && context.rank() == size - 1) plant(world.nccl(), size - 1);
    training.Run();
    states[static_cast<size_t>(context.rank())] = training.State();
    const BackendChoice& choice = context.backend_choice();
    RANK_CHECK_EQ(training.recoveries(), plant ? 1 : 0);
    RANK_CHECK_EQ(choice.backend, context.world().backend());
    RANK_CHECK_EQ(choice.backend, plant ? "hierarchical" : "nccl");
    if (!plant) return;
    RANK_CHECK(absl::StrContains(training.failure().message(), words), training.failure().message());
    RANK_CHECK_EQ(context.world().size(), size);
    RANK_CHECK(absl::StrContains(choice.failure, words), choice.failure);
    RANK_CHECK(absl::StrContains(choice.text, absl::StrCat("with all ", size, " ranks, since")), choice.text);
  };
  for (const absl::Status& status : world.Create(body)) CHECK(status == absl::OkStatus());
  CHECK(log.Count({"goes on: backend hierarchical"}) == (plant ? 1 : 0));
  CHECK(world.nccl().live_comms() == 0);
  for (const std::vector<float>& state : states) CHECK(state == states[0]);
  return states[0];
}

TEST_CASE("NCCL that fails on one rank in a step: all ranks go on through host memory, with the same result") {
  struct Case {
    const char* words;
    std::function<void(FakeNccl&, int rank)> plant;
    double timeout_s;
  };
  const Case cases[] = {
      {"failed",
       [](FakeNccl& nccl, int rank) { nccl.Plan("AllReduce", rank, Mishap::kFail, nccl::kUnhandledCudaError, 11); },
       60},
      {"timed out", [](FakeNccl& nccl, int rank) { nccl.Plan("AllReduce", rank, Mishap::kStuck, {}, 13); }, 2},
      {"timed out",
       [](FakeNccl& nccl, int rank) { nccl.Plan("AllReduce", rank, Mishap::kHang, nccl::kInternalError, 8); }, 2},
      {"failed",
       [](FakeNccl& nccl, int rank) {
         nccl.Plan("AllReduce", rank, Mishap::kStuck, {}, 14);
         nccl.SetAsyncError(rank, nccl::kSystemError);
       },
       60},
  };
  for (const int size : {2, 3, 4}) {
    const std::vector<float> expected = Train(size);
    for (const Case& c : cases) {
      if (size > 2 && &c != cases) continue;
      CAPTURE(size, c.words, c.timeout_s);
      CHECK(Train(size, c.plant, c.words, c.timeout_s) == expected);
    }
  }
}

TEST_CASE("auto registers memory with NCCL only where sums on it can be aborted") {
  struct Case {
    int version;
    bool chosen, registers;
  };
  for (const Case& c : {Case{22809, true, false}, Case{22809, false, true}, Case{22902, true, true}}) {
    CAPTURE(c.version, c.chosen);
    Job job(2, c.version);
    const FakeHelpers helpers;
    job.RunOver([&](Rank& rank, std::unique_ptr<ProcessGroup> control) {
      AutoGroupOptions options;
      static_cast<NcclGroupOptions&>(options) = rank.Options();
      options.probe.helper = DDP_FAKE_PROBE;
      options.probe.cache = "";
      const std::unique_ptr<ProcessGroup> group =
          c.chosen ? std::move(RANK_VALUE(CreateAutoGroup(std::move(control), options)).group)
                   : RANK_VALUE(CreateNcclGroup(std::move(control), options));
      const std::unique_ptr<ProcessGroup> part = RANK_VALUE(group->Split(0, rank.rank));
      for (ProcessGroup* const each : {group.get(), part.get()}) {
        RANK_CHECK_EQ(each->backend(), "nccl");
        const int before = rank.nccl.live_windows();
        RANK_CHECK_OK(each->Barrier().Wait());
        const Allocation memory = RANK_VALUE(each->Allocate(4096, rank.device()));
        RANK_CHECK_OK(each->Barrier().Wait());
        RANK_CHECK_EQ(rank.nccl.live_windows() > before, c.registers);
        RANK_CHECK_OK(each->Barrier().Wait());
      }
    });
  }
}

TEST_CASE("NCCL that has failed in a training is checked again at the next start") {
  World world(2);
  CHECK(world.Choice().backend == "nccl");
  CHECK(world.Choice().from_cache);
  std::barrier all_created(2);
  const auto body = [&](Context& context) {
    all_created.arrive_and_wait();  // an abort ends a Create that another rank is still in
    context.world().Abort(absl::AbortedError("as if NCCL had failed"));
    while (context.world().status().ok()) continue;
    RANK_CHECK_OK(context.Recover());
  };
  {
    Logged log;
    for (const absl::Status& status : world.Create(body)) CHECK(status == absl::OkStatus());
  }
  CHECK_FALSE(world.Choice().from_cache);
}

TEST_CASE("ranks of which some have gone on without NCCL make groups without it") {
  World world(2);
  std::barrier both(2);
  const auto body = [&](Context& context) {
    RANK_CHECK_EQ(context.world().backend(), "nccl");
    both.arrive_and_wait();
    context.world().Abort(absl::AbortedError("as if NCCL had failed"));
    while (context.world().status().ok()) continue;
    if (context.rank() == 0) {
      RANK_CHECK_OK(context.Recover(absl::Milliseconds(300)));  // without rank 1
      RANK_CHECK_EQ(context.world().size(), 1);
      context.world().Abort(absl::AbortedError("again"));
      RANK_CHECK_OK(context.Recover());  // all who are left
    }
    both.arrive_and_wait();
    const auto group = RANK_VALUE(context.NewGroup({0, 1}, absl::Now() + absl::Seconds(20)));
    RANK_CHECK_EQ(group->backend(), "hierarchical");
    RANK_CHECK_OK(group->Barrier().Wait());
    both.arrive_and_wait();
  };
  Logged log;
  for (const absl::Status& status : world.Create(body)) CHECK(status == absl::OkStatus());
}

TEST_CASE("a GPU that does not come free is named on all ranks, and none goes on") {
  Job job(2);
  std::barrier all_launched(2);
  job.RunOver([&](Rank& rank, std::unique_ptr<ProcessGroup> control) {
    NcclGroupOptions options = rank.Options();
    options.abort_grace = absl::Milliseconds(300);
    const std::unique_ptr<ProcessGroup> group = RANK_VALUE(CreateNcclGroup(std::move(control), options));
    const OwnedStream stream = rank.MakeStream();
    const auto open = std::make_shared<std::atomic<bool>>(false);
    FakeDevices::Enqueue(stream.get(), [open] {
      while (!*open) std::this_thread::yield();
    });
    Array x(rank, *group, DType::kFloat32, 10, false);
    Work work = group->AllReduce(x.whole(), x.whole(), {}, {rank.device(), stream.get()});
    all_launched.arrive_and_wait();
    group->Abort(absl::AbortedError("enough"));
    RANK_CHECK_STATUS(AwaitFree(*group), absl::StatusCode::kInternal, absl::StrCat("rank ", rank.rank),
                      absl::StrCat("GPU ", rank.rank, " has not come free"), "end this process");
    *open = true;
    RANK_CHECK_OK(AwaitFree(*group));
    RANK_CHECK_STATUS(work.Wait(), absl::StatusCode::kAborted, "enough");
  });
}

}  // namespace
}  // namespace ddp::testing::simulated
