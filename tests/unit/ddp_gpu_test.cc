// SPDX-License-Identifier: Apache-2.0
// DistributedDataParallel on GPUs that are simulated.
#include <algorithm>
#include <atomic>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "ddp/autocast.h"
#include "ddp/comm_hook.h"
#include "ddp/distributed_data_parallel.h"
#include "ddp/grad_scaler.h"
#include "ddp/sync_state.h"
#include "tests/support/ddp_gpu_cases.h"
#include "tests/support/forwarding_group.h"
#include "tests/support/logged.h"
#include "tests/support/nccl_job.h"

namespace ddp::testing::simulated {
namespace {

void RunCase(
    const std::function<void(GpuRank&)>& body, std::initializer_list<int> sizes = {1, 2, 3, 4},
    const std::function<void(FakeDevices&)>& prepare = [](FakeDevices&) {}) {
  // What is unordered shows where one of two streams runs at once and the other late, whichever is which.
  const std::function<bool(int, int)> late[] = {[](int, int) { return true; },
                                                [](int, int number) { return number % 2 == 0; },
                                                [](int, int number) { return number % 2 == 1; }};
  for (const int size : sizes) {
    for (const auto& is_late : late) {
      if (size > 2 && &is_late != late) continue;
      Job job(size);
      job.gpus.late = is_late;
      prepare(job.gpus);
      const ScopedDevices devices(job.gpus);
      job.Run([&](Rank&, ProcessGroup& group) {
        GpuRank rank{group};
        body(rank);
      });
    }
  }
}

TEST_CASE("gradients on GPUs are averaged in the order of their streams") { RunCase(gpu_cases::Averages); }
TEST_CASE("what a model does by itself is ordered behind the program's work on GPUs") { RunCase(gpu_cases::Order); }
TEST_CASE("a reduced step on GPUs comes behind the streams of the passes before") {
  RunCase(gpu_cases::OrderWithoutReduction);
}
TEST_CASE("calls between steps that are given no stream are ordered on GPUs") { RunCase(gpu_cases::OrderBetweenSteps); }
TEST_CASE("every option works on GPUs") { RunCase(gpu_cases::Options); }
TEST_CASE("gradients in 8-bit blocks on GPUs have the CPU's bits") { RunCase(gpu_cases::Blocks); }
TEST_CASE("PowerSGD on GPUs gives what it gives on the CPU") { RunCase(gpu_cases::PowerSgd); }
TEST_CASE("gradients inside an allocation on GPUs are reduced where they lie") { RunCase(gpu_cases::InPlace); }
TEST_CASE("values on GPUs that differ between ranks are found") { RunCase(gpu_cases::Replicas); }
TEST_CASE("a hook runs kernels of its own on a stream of its own") { RunCase(gpu_cases::OwnKernels); }
TEST_CASE("a NaN on a GPU is reported with its rank and parameter") { RunCase(gpu_cases::Nan); }
TEST_CASE("norms, clipping and what is not finite on GPUs") { RunCase(gpu_cases::NormAndClipping); }
TEST_CASE("gradients of every type are clipped in a GPU's order") { RunCase(gpu_cases::ClippingAsync); }
TEST_CASE("accumulation, uneven steps, buffers and frozen parameters on GPUs") { RunCase(gpu_cases::Accumulation); }
TEST_CASE("a model on GPUs goes on in another group") { RunCase(gpu_cases::GoesOn); }
TEST_CASE("models that do not lie where the group works are refused") { RunCase(gpu_cases::Misuse); }
TEST_CASE("GradScaler works on GPUs") { RunCase(gpu_cases::Scaler); }
TEST_CASE("a GPU's steps are measured without waiting") {
  RunCase(gpu_cases::Statistics, {1, 2}, [](FakeDevices& gpus) {
    const auto clock = std::make_shared<std::atomic<int>>(0);
    gpus.elapsed_us = [clock] { return ++*clock; };
  });
}
TEST_CASE("no step consumes what a reduction left that failed later") {
  RunCase(gpu_cases::FailsAfterReturn, {2, 3, 4});
}

// A model of one tensor, "w".
std::unique_ptr<DistributedDataParallel> MakeModelOfOne(const Rank& rank, ProcessGroup& group) {
  return RANK_VALUE(
      DistributedDataParallel::Create(group, {{"w", {}, {nullptr, 1000, DType::kFloat32, rank.device()}, {}}}));
}

TEST_CASE("a model for which one rank has no memory fails on all ranks") {
  // Of the model's words, then of its values.
  for (const size_t least : {size_t{1}, size_t{1000}}) {
    INFO("no " << least << " bytes");
    Job job(3);
    const ScopedDevices devices(job.gpus);
    job.Run([&](Rank& rank, ProcessGroup& group) {
      if (rank.rank == 1) {
        job.gpus.allow = [&](Device device, size_t bytes) {
          return device == rank.device() && bytes >= least ? absl::ResourceExhaustedError("nothing left")
                                                           : absl::OkStatus();
        };
      }
      RANK_CHECK_OK(group.Barrier().Wait());
      RANK_CHECK_STATUS(
          DistributedDataParallel::Create(group, {{"w", {}, {nullptr, 1000, DType::kFloat32, rank.device()}, {}}})
              .status(),
          absl::StatusCode::kResourceExhausted, "rank 1", "nothing left");
      RANK_CHECK_OK(group.Barrier().Wait());
      if (rank.rank == 1) job.gpus.allow = [](Device, size_t) { return absl::OkStatus(); };
    });
  }
}

TEST_CASE("a gradient announced with a stream of another GPU is named") {
  Job job(1);
  const ScopedDevices devices(job.gpus);
  job.Run([&](Rank& rank, ProcessGroup& group) {
    const auto model = MakeModelOfOne(rank, group);
    const OwnedStream owned = rank.MakeStream();
    const Stream own{rank.device(), owned.get()};
    Stream other = own;
    ++other.device.index;
    model->GradReady(0, other);
    RANK_CHECK_STATUS(model->FinishBackward(own), absl::StatusCode::kInvalidArgument, "'w'", "the stream is of GPU 1",
                      "is on GPU 0");
  });
}

TEST_CASE("FinishBackward does not wait for the GPU") {
  Job job(2);
  const ScopedDevices devices(job.gpus);
  job.Run([&](Rank& rank, ProcessGroup& group) {
    const auto model = MakeModelOfOne(rank, group);
    const OwnedStream owned = rank.MakeStream();
    const Stream stream{rank.device(), owned.get()};
    std::atomic<bool> open{false};
    HoldUntil(open, stream.native);
    float* const grad = static_cast<float*>(model->grad(0).data);
    FakeDevices::Enqueue(stream.native, [&] {
      for (size_t i = 0; i < 1000; ++i) grad[i] = static_cast<float>(rank.rank + 1);
    });
    model->GradReady(0, stream);
    RANK_CHECK_OK(model->FinishBackward(stream));
    float seen = 0;
    FakeDevices::Enqueue(stream.native, [&] { seen = grad[999]; });
    open = true;
    FakeDevices::Synchronize(stream.native);
    RANK_CHECK_EQ(seen, 1.5f);
  });
}

// What the calling thread asks of the simulated GPUs, while it is set.
thread_local int* records = nullptr;

TEST_CASE("a bucket's end is marked when it is launched, not when the host ends the step") {
  Job job(2);
  const ScopedDevices devices(job.gpus);
  job.gpus.fail = [](absl::string_view call, int) {
    if (records != nullptr && call == "Record") ++*records;
    return absl::OkStatus();
  };
  job.Run([&](Rank& rank, ProcessGroup& group) {
    constexpr size_t kBuckets = 3;
    std::vector<Parameter> parameters;
    for (size_t i = 0; i < kBuckets; ++i) {
      parameters.push_back({"w" + std::to_string(i), {}, {nullptr, 1000, DType::kFloat32, rank.device()}, {}});
    }
    const auto model = RANK_VALUE(DistributedDataParallel::Create(group, std::move(parameters), {.bucket_bytes = 1}));
    const OwnedStream owned = rank.MakeStream();
    const Stream stream{rank.device(), owned.get()};
    // The first step is measured.
    for (size_t i = kBuckets; i-- > 0;) model->GradReady(i, stream);
    int of_the_end = 0;
    records = &of_the_end;
    const absl::Status finished = model->FinishBackward(stream);
    records = nullptr;
    RANK_CHECK_OK(finished);
    RANK_CHECK_EQ(of_the_end, 2);  // around the wait
    FakeDevices::Synchronize(stream.native);
  });
}

TEST_CASE("no step is used for which another group has failed after FinishBackward") {
  std::barrier<> both(2);
  Job job(2);
  const ScopedDevices devices(job.gpus);
  job.Run([&](Rank& rank, ProcessGroup& group) {
    const std::unique_ptr<ProcessGroup> first = RANK_VALUE(group.Split(0, rank.rank));
    const std::unique_ptr<ProcessGroup> second = RANK_VALUE(group.Split(0, rank.rank));
    const auto model = MakeModelOfOne(rank, group);
    model->Watch(*first);
    model->Watch(*second);
    const OwnedStream owned = rank.MakeStream();
    const Stream stream{rank.device(), owned.get()};
    const Allocation sums = RANK_VALUE(first->Allocate(sizeof(float), rank.device()));
    const Buffer sum = sums.View(DType::kFloat32, 0, 1);
    const auto backward = [&] {
      RANK_CHECK_OK(first->AllReduce(sum, sum, {}, stream).BlockStream(stream));
      model->GradReady(0, stream);
    };
    backward();
    RANK_CHECK_OK(model->FinishBackward(stream));
    FakeDevices::Synchronize(stream.native);
    RANK_CHECK_EQ(*model->skip_step(), 0u);

    std::atomic<bool> open{false};
    HoldUntil(open, stream.native);
    backward();
    RANK_CHECK_OK(model->FinishBackward(stream));
    both.arrive_and_wait();
    if (rank.rank == 1) first->Abort(absl::AbortedError("no statistics"));
    while (first->status().ok()) std::this_thread::yield();
    open = true;
    FakeDevices::Synchronize(stream.native);
    RANK_CHECK_EQ(*model->skip_step(), 1u);
    RANK_CHECK_OK(group.status());
    both.arrive_and_wait();
    model->GradReady(0, stream);
    RANK_CHECK_STATUS(model->FinishBackward(stream), absl::StatusCode::kAborted, "no statistics");
    RANK_CHECK_STATUS(group.status(), absl::StatusCode::kAborted, "no statistics");
  });
}

TEST_CASE("a GPU that was receiving a state when its group failed gives none") {
  std::barrier<> both(2);
  Job job(2);
  const ScopedDevices devices(job.gpus);
  job.Run([&](Rank& rank, ProcessGroup& group) {
    const std::unique_ptr<ProcessGroup> first = RANK_VALUE(group.Split(0, rank.rank));
    const Allocation memory = RANK_VALUE(group.Allocate(64, rank.device()));
    int64_t number = 1, step = 7;
    const std::vector<Buffer> state = {memory.View(DType::kFloat32, 0, 16), {&number, 1, DType::kInt64, {}}};
    int left = 2;
    FailingGroup failing(
        *first, [&](const Call&) { return left-- == 0; }, [&] { both.arrive_and_wait(); });
    RANK_CHECK_STATUS(SyncState(failing, step, state).status(), absl::StatusCode::kAborted, "a rank is gone");
    RANK_CHECK_EQ(step, rank.rank == 0 ? 7 : INT64_MAX);
    RANK_CHECK_EQ(RANK_VALUE(SyncState(group, step, state)), 7);
  });
}

TEST_CASE("ClipGradNormAsync does not wait for the GPU, and can be captured") {
  Job job(1);
  const ScopedDevices devices(job.gpus);
  job.Run([&](Rank& rank, ProcessGroup& group) {
    const auto model = MakeModelOfOne(rank, group);
    const OwnedStream owned = rank.MakeStream();
    const Stream stream{rank.device(), owned.get()};
    std::atomic<bool> open{false};
    std::atomic<float> value{0};
    float* const grad = static_cast<float*>(model->grad(0).data);
    HoldUntil(open, stream.native);
    const auto step = [&] {
      FakeDevices::Enqueue(stream.native, [&] { std::fill_n(grad, 1000, value.load()); });
      model->GradReady(0, stream);
      RANK_CHECK_OK(model->FinishBackward(stream));
      return RANK_VALUE(model->ClipGradNormAsync(1, HUGE_VAL, stream));
    };
    value = 4;
    const double* const norm = step();
    open = true;
    FakeDevices::Synchronize(stream.native);
    RANK_CHECK_EQ(*norm, 4.0);
    RANK_CHECK_EQ(grad[999], 4 * static_cast<float>(1 / (4 + 1e-6)));
    RANK_CHECK_OK(FakeDevices::BeginCapture(stream.native));
    RANK_CHECK(step() == norm);
    const auto graph = RANK_VALUE(FakeDevices::EndCapture(stream.native));
    for (const float next : {0.5f, 8.0f}) {
      value = next;
      FakeDevices::Launch(graph, stream.native);
      FakeDevices::Synchronize(stream.native);
      RANK_CHECK_EQ(*norm, static_cast<double>(next));
      RANK_CHECK_EQ(grad[0], next < 1 ? next : next * static_cast<float>(1 / (next + 1e-6)));
    }
  });
}

TEST_CASE("PowerSGD does not wait for the GPU, and can be captured") {
  Job job(2);
  const ScopedDevices devices(job.gpus);
  job.Run([&](Rank& rank, ProcessGroup& group) {
    constexpr size_t kRows = 12, kColumns = 10;
    const Buffer memory{nullptr, kRows * kColumns, DType::kFloat32, rank.device()};
    const auto model = RANK_VALUE(DistributedDataParallel::Create(group, {{"w", {kRows, kColumns}, memory, memory}},
                                                                  {.hook = CreatePowerSgdHook({.start_step = 0})}));
    const OwnedStream owned = rank.MakeStream();
    const Stream stream{rank.device(), owned.get()};
    std::atomic<bool> open{false};
    std::atomic<float> scale{1};
    float* const grad = static_cast<float*>(model->grad(0).data);
    // Of rank 1, so that nothing is lost; the mean over the ranks is 1.5 times rank 0's.
    const auto entry = [](size_t k) { return static_cast<float>((k / kColumns + 1) * (k % kColumns + 1)); };
    const auto step = [&] {
      FakeDevices::Enqueue(stream.native, [&] {
        for (size_t k = 0; k < kRows * kColumns; ++k) grad[k] = static_cast<float>(rank.rank + 1) * scale * entry(k);
      });
      model->GradReady(0, stream);
      RANK_CHECK_OK(model->FinishBackward(stream));
    };
    const auto check = [&] {
      FakeDevices::Synchronize(stream.native);
      for (size_t k = 0; k < kRows * kColumns; ++k) {
        const float want = 1.5f * scale * entry(k);
        RANK_CHECK(std::abs(grad[k] - want) <= 1e-4f * std::abs(want), k, ": ", grad[k], " is not ", want);
      }
    };
    HoldUntil(open, stream.native);
    step();
    step();
    open = true;
    check();
    RANK_CHECK_OK(FakeDevices::BeginCapture(stream.native));
    step();
    const auto graph = RANK_VALUE(FakeDevices::EndCapture(stream.native));
    for (const float next : {0.5f, 8.0f}) {
      scale = next;
      FakeDevices::Launch(graph, stream.native);
      check();
    }
  });
}

TEST_CASE("a captured step can be replayed, and others may follow it") {
  for (const std::shared_ptr<CommHook>& hook : {std::shared_ptr<CommHook>(), CreateAllReduceHook()}) {
    Job job(2);
    const ScopedDevices devices(job.gpus);
    job.Run([&](Rank& rank, ProcessGroup& group) {
      const Device gpu = rank.device();
      std::vector<Parameter> parameters;
      for (const char* name : {"a", "b", "c"})
        parameters.push_back({name, {}, {nullptr, 64, DType::kFloat32, gpu}, {}});
      const auto model = RANK_VALUE(
          DistributedDataParallel::Create(group, parameters, {.bucket_bytes = 1, .check_replicas = 1, .hook = hook}));
      const OwnedStream owned = rank.MakeStream();
      const Stream stream{gpu, owned.get()};
      const auto backward = [&](bool reversed) {
        for (size_t k = 0; k < 3; ++k) {
          const size_t p = reversed ? k : 2 - k;
          auto* const grad = static_cast<float*>(model->grad(p).data);
          FakeDevices::Enqueue(owned.get(), [grad, p, &rank] {
            std::fill_n(grad, 64, static_cast<float>(2 * rank.rank) + static_cast<float>(p));
          });
          model->GradReady(p, stream);
        }
        RANK_CHECK_OK(model->FinishBackward(stream));
      };
      const auto check = [&] {
        FakeDevices::Synchronize(owned.get());
        for (size_t p = 0; p < 3; ++p) {
          auto* const grad = static_cast<float*>(model->grad(p).data);
          RANK_CHECK_EQ(grad[63], 1 + static_cast<float>(p));
          std::fill_n(grad, 64, 99.0f);
        }
      };
      for (int step = 1; step < 10; ++step) backward(false), check();
      RANK_CHECK_OK(FakeDevices::BeginCapture(owned.get()));
      backward(false);
      const auto graph = RANK_VALUE(FakeDevices::EndCapture(owned.get()));
      RANK_CHECK_EQ(model->statistics().steps, 9);  // until it is replayed
      backward(true);                               // the tenth step, whose order the buckets take over
      check();
      RANK_CHECK_EQ(model->statistics().plans, 2);
      for (int replay = 0; replay < 3; ++replay) FakeDevices::Launch(graph, owned.get()), check();
      RANK_CHECK_OK(FakeDevices::BeginCapture(owned.get()));
      backward(false);
      RANK_CHECK_OK(FakeDevices::EndCapture(owned.get()));
      parameters[1].frozen = true;
      RANK_CHECK_OK(model->SetParameters(parameters));
    });
  }
}

TEST_CASE("a captured step is not looked through for NaN, and the next one is") {
  Job job(2);
  const ScopedDevices devices(job.gpus);
  job.Run([&](Rank& rank, ProcessGroup& group) {
    const auto model = RANK_VALUE(DistributedDataParallel::Create(
        group, {{"w", {}, {nullptr, 64, DType::kFloat32, rank.device()}, {}}}, {.check_nan = true}));
    const OwnedStream owned = rank.MakeStream();
    const Stream stream{rank.device(), owned.get()};
    const auto backward = [&](float value) {
      float* const grad = static_cast<float*>(model->grad(0).data);
      FakeDevices::Enqueue(owned.get(), [=] { std::fill_n(grad, 64, value); });
      model->GradReady(0, stream);
      return model->FinishBackward(stream);
    };
    RANK_CHECK_OK(backward(1));
    RANK_CHECK_OK(FakeDevices::BeginCapture(owned.get()));
    RANK_CHECK_OK(backward(NAN));
    const auto graph = RANK_VALUE(FakeDevices::EndCapture(owned.get()));
    FakeDevices::Launch(graph, owned.get());
    RANK_CHECK_OK(backward(2));
    RANK_CHECK_STATUS(backward(NAN), absl::StatusCode::kDataLoss, "rank 0 has", "rank 1 in that of 'w', in step 4");
  });
}

TEST_CASE("a model whose GPU does not come free can be destroyed") {
  Job job(2);
  std::barrier all_have_finished(2);
  const ScopedDevices devices(job.gpus);
  job.Run([&](Rank& rank, ProcessGroup& group) {
    std::vector<Parameter> parameters;
    for (const char* name : {"a", "b"}) {
      parameters.push_back({name, {}, {nullptr, 64, DType::kFloat32, rank.device()}, {}});
    }
    auto model = RANK_VALUE(DistributedDataParallel::Create(group, parameters));
    const OwnedStream owned = rank.MakeStream(), other = rank.MakeStream();
    std::atomic<bool> open{false};
    HoldUntil(open, owned.get());
    // Gradients of two streams: the model's own waits for both.
    model->GradReady(1, {rank.device(), owned.get()});
    model->GradReady(0, {rank.device(), other.get()});
    RANK_CHECK_OK(model->FinishBackward({rank.device(), other.get()}));
    all_have_finished.arrive_and_wait();
    group.Abort(absl::InternalError("enough"));
    const void* const grad = model->grad(0).data;
    model.reset();
    std::atomic<bool> there{false};
    FakeDevices::Enqueue(owned.get(), [&] { there = IsGpu(RANK_VALUE(rank.gpus.DeviceOf(grad))); });
    open = true;
    FakeDevices::Synchronize(owned.get());
    FakeDevices::Synchronize(other.get());
    RANK_CHECK(there, "its gradients have been freed");
  });
}

// Its kernel on the model's own stream, behind each reduction, hangs until it is let go.
class StuckHook final : public CommHook {
 public:
  StuckHook(const std::atomic<bool>& open, float last) : open_(open), last_(last) {}
  std::string name() const override { return "stuck"; }
  Work Start(ProcessGroup& group, const GradBucket& bucket, int) override {
    Work sum = group.AllReduce(bucket.buffer, bucket.buffer, bucket.reduce, bucket.stream);
    if (absl::Status status = sum.BlockStream(bucket.stream); !status.ok()) return status;
    HoldUntil(open_, bucket.stream.native);
    float* const grad = static_cast<float*>(bucket.buffer.data);
    FakeDevices::Enqueue(bucket.stream.native, [grad, last = last_] { grad[0] = last; });
    return sum;
  }

 private:
  const std::atomic<bool>& open_;
  const float last_;
};

TEST_CASE("a model whose own stream hangs in a group that works is given up in time, and its memory stays") {
  for (const bool cannot_wait : {false, true}) {
    Logged logged;
    Job job(2);
    std::atomic<bool> open{false}, broken{false};
    job.gpus.fail = [&](absl::string_view call, int) {
      return broken && call == "Record" ? absl::InternalError("injected") : absl::OkStatus();
    };
    std::barrier all(2);
    const ScopedDevices devices(job.gpus);
    job.Run([&](Rank& rank, ProcessGroup& group) {
      auto model = RANK_VALUE(
          DistributedDataParallel::Create(group, {{"a", {}, {nullptr, 64, DType::kFloat32, rank.device()}, {}}},
                                          {.hook = std::make_shared<StuckHook>(open, 42.0f)}));
      const OwnedStream owned = rank.MakeStream();
      const Stream stream{rank.device(), owned.get()};
      float* const grad = static_cast<float*>(model->grad(0).data);
      FakeDevices::Enqueue(owned.get(), [=] { std::fill_n(grad, 64, 1.0f); });
      model->GradReady(0, stream);
      RANK_CHECK_OK(model->FinishBackward(stream));
      RANK_CHECK_OK(group.Barrier().Wait());
      RANK_CHECK_OK(group.SetTimeout(absl::Milliseconds(300)));
      all.arrive_and_wait();
      const FakeDevices::Held before = FakeDevices::held();
      if (rank.rank == 0) broken = cannot_wait;
      all.arrive_and_wait();
      const absl::Time began = absl::Now();
      model.reset();
      const absl::Duration took = absl::Now() - began;
      all.arrive_and_wait();
      const FakeDevices::Held after = FakeDevices::held();
      const absl::Status status = group.status();
      if (rank.rank == 0) broken = false;
      all.arrive_and_wait();
      open = true;  // whatever has been found
      FakeDevices::Synchronize(owned.get());
      // All but the counter of the captured steps, of which there are none.
      RANK_CHECK_EQ(after.memory, before.memory - rank.size);
      RANK_CHECK_EQ(after.streams, before.streams);
      RANK_CHECK(cannot_wait || took >= absl::Milliseconds(300), "after ", absl::FormatDuration(took));
      RANK_CHECK(took < absl::Seconds(20), "after ", absl::FormatDuration(took));
      RANK_CHECK_OK(status);
      RANK_CHECK_EQ(grad[0], 42.0f);
      RANK_CHECK_EQ(grad[63], 1.0f);
    });
    for (const char* const rank : {"rank 0", "rank 1"}) {
      CHECK(logged.Count({rank, "a DistributedDataParallel was destroyed while GPU", "its memory is kept"}) == 1);
    }
  }
}

}  // namespace
}  // namespace ddp::testing::simulated
