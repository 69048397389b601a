// A training program on simulated GPUs in which one operation of a GPU or one call of NCCL fails: each in turn.
#include <algorithm>
#include <atomic>
#include <barrier>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ddp/distributed_data_parallel.h"
#include "tests/support/nccl_job.h"

namespace ddp::testing::simulated {
namespace {

constexpr size_t kCount = 64;

// One rank's training: two buckets, and value -= gradient in the stream's order unless the step is not to be used.
class Training {
 public:
  Training(Rank& rank, ProcessGroup& group) : rank_(rank), group_(group), owned_(rank.MakeStream()) {}

  absl::Status Create() {
    std::vector<Parameter> parameters;
    for (const char* name : {"a", "b"}) {
      parameters.push_back({name, {}, {nullptr, kCount, DType::kFloat32, rank_.device()}, {}});
    }
    absl::StatusOr<std::unique_ptr<DistributedDataParallel>> model =
        DistributedDataParallel::Create(group_, parameters, {.bucket_bytes = 1, .check_replicas = 2});
    if (!model.ok()) return model.status();
    model_ = *std::move(model);
    return absl::OkStatus();
  }
  absl::Status Step() {
    if (absl::Status s = Backward(); !s.ok()) return s;
    if (absl::Status s = model_->ClipGradNorm(1e9, 2, stream()).status(); !s.ok()) return s;
    if (absl::Status s = model_->ClipGradNormAsync(1e9, 2, stream()).status(); !s.ok()) return s;
    Descend();
    ++steps_;
    return absl::OkStatus();
  }
  // A step as a graph, launched twice.
  absl::Status CapturedStep() {
    RANK_CHECK_OK(FakeDevices::BeginCapture(owned_.get()));
    absl::Status status = Backward();
    if (status.ok()) status = model_->ClipGradNormAsync(1e9, 2, stream()).status();
    Descend();
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
      RANK_CHECK_EQ(static_cast<const float*>(model_->value(p).data)[kCount - 1],
                    -static_cast<float>(steps_) * (1 + static_cast<float>(p)));
    }
    return absl::OkStatus();
  }

 private:
  Stream stream() const { return {rank_.device(), owned_.get()}; }
  absl::Status Backward() {
    model_->ZeroGrad(stream());
    for (size_t p = model_->size(); p-- > 0;) {
      FakeDevices::Enqueue(owned_.get(), [grad = static_cast<float*>(model_->grad(p).data), p, r = rank_.rank] {
        std::fill_n(grad, kCount, static_cast<float>(2 * r) + static_cast<float>(p));
      });
      model_->GradReady(p, stream());
    }
    return model_->FinishBackward(stream());
  }
  void Descend() {
    for (size_t p = 0; p < model_->size(); ++p) {
      FakeDevices::Enqueue(owned_.get(),
                           [value = static_cast<float*>(model_->value(p).data),
                            grad = static_cast<const float*>(model_->grad(p).data), skip = model_->skip_step()] {
                             for (size_t i = 0; i < kCount && *skip == 0; ++i) value[i] -= grad[i];
                           });
    }
  }

  Rank& rank_;
  ProcessGroup& group_;
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
  std::atomic<int> calls{0};
  std::string name = {};
  std::barrier<> all_are_ready{2};

  void Count(const Rank& rank, bool on) {
    if (rank.rank == 1) counting = on;
  }
  bool Strikes(absl::string_view call, int device) {
    if (!counting || device != 1 || call == "Finished" || call == "FreeOnStream") return false;
    if (calls++ != chosen) return false;
    name = std::string(call);
    return true;
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
};

// OK: the values are those of all steps. Gives up at the first error.
absl::Status TrainAll(Rank& rank, std::unique_ptr<ProcessGroup> control, Faults& faults) {
  faults.Count(rank, true);
  const absl::StatusOr<std::unique_ptr<ProcessGroup>> group = CreateGpuGroup(std::move(control), rank.Options());
  if (!group.ok()) return group.status();
  const absl::StatusOr<Allocation> memory = (*group)->Allocate(kCount * sizeof(float), rank.device());
  if (!memory.ok()) return memory.status();
  const Buffer sum = memory->View(DType::kFloat32, 0, kCount);
  if (absl::Status s = (*group)->AllReduce(sum, sum, {}, kNoStream).Wait(); !s.ok()) return s;
  faults.Count(rank, false);  // the stream is the program's
  Training training(rank, **group);
  faults.Count(rank, true);
  absl::Status status = training.Create();
  if (status.ok()) status = training.Step();
  return status.ok() ? training.Finish() : status;
}

// The same with the graph alone under fault.
absl::Status TrainCaptured(Rank& rank, std::unique_ptr<ProcessGroup> control, Faults& faults) {
  const std::unique_ptr<ProcessGroup> group = RANK_VALUE(CreateGpuGroup(std::move(control), rank.Options()));
  Training training(rank, *group);
  RANK_CHECK_OK(training.Create());
  RANK_CHECK_OK(training.Step());
  RANK_CHECK_OK(group->Barrier().Wait());
  faults.all_are_ready.arrive_and_wait();
  faults.Count(rank, true);
  const absl::Status status = training.CapturedStep();
  return status.ok() ? training.Finish() : status;
}

using Program = absl::Status (*)(Rank&, std::unique_ptr<ProcessGroup>, Faults&);

// Returns how many calls there were.
int RunWithFault(Program program, void (Faults::*kind)(), int chosen, absl::string_view wanted) {
  Job job(2);
  job.timeout = absl::Seconds(20);  // none is to take that long
  Faults faults{job, chosen};
  (faults.*kind)();
  absl::Status outcome[2];
  {
    const ScopedDevices devices(job.gpus);
    job.RunOver([&](Rank& rank, std::unique_ptr<ProcessGroup> control) {
      outcome[rank.rank] = program(rank, std::move(control), faults);
    });
  }
  INFO("call " << chosen << ", " << faults.name);
  const absl::Status& mine = outcome[1];
  CHECK((mine.ok() || absl::StrContains(mine.message(), "rank 1: ")));
  CHECK((mine.ok() || absl::StrContains(mine.message(), wanted)));
  for (const absl::Status& status : outcome) {
    INFO(status.ToString());
    CHECK((status.ok() || absl::StrContains(status.message(), "rank 1")));
    CHECK(!absl::IsDeadlineExceeded(status));
    CHECK((chosen >= 0 || status.ok()));
  }
  CHECK(job.nccl.live_comms() == 0);
  CHECK(job.nccl.live_memory() == 0);
  return faults.calls;
}

FakeDevices::Held operator-(const FakeDevices::Held& a, const FakeDevices::Held& b) {
  return {a.streams - b.streams, a.events - b.events, a.memory - b.memory};
}

void FailEachCall(Program program, void (Faults::*kind)(), absl::string_view wanted) {
  const FakeDevices::Held none = FakeDevices::held();
  const int calls = RunWithFault(program, kind, -1, wanted);
  const FakeDevices::Held kept = FakeDevices::held() - none;  // what a graph may still use is kept for ever
  CHECK(calls > 3);
  for (int k = 0; k < calls; ++k) {
    const FakeDevices::Held before = FakeDevices::held();
    RunWithFault(program, kind, k, wanted);
    INFO("call " << k);
    const auto more = [&] {
      const FakeDevices::Held held = FakeDevices::held() - before;
      return held.streams > kept.streams || held.events > kept.events || held.memory > kept.memory;
    };
    // A thread that aborts has its part a little longer.
    for (int nap = 0; nap < 2000 && more(); ++nap) absl::SleepFor(absl::Milliseconds(1));
    CHECK(!more());
  }
}

TEST_CASE("whichever operation of a GPU fails, an error names it or nothing is lost, and nothing is kept") {
  FailEachCall(TrainAll, &Faults::OfGpus, "injected");
}
TEST_CASE("whichever operation of a GPU fails in a captured step, an error names it, and nothing is kept") {
  FailEachCall(TrainCaptured, &Faults::OfGpus, "injected");
}
TEST_CASE("whichever call of NCCL fails, an error names it or nothing is lost, and nothing is kept", "[nccl]") {
  FailEachCall(TrainAll, &Faults::OfNccl, "some error");
}

}  // namespace
}  // namespace ddp::testing::simulated
