// SPDX-License-Identifier: Apache-2.0
// Steps of DistributedDataParallel in graphs of simulated GPUs.
#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ddp/comm_hook.h"
#include "ddp/distributed_data_parallel.h"
#include "tests/support/catch.h"
#include "tests/support/nccl_job.h"
#include "tests/support/variable.h"

// g++ takes members of class type that are left out of designated initializers for forgotten.
#pragma GCC diagnostic ignored "-Wmissing-field-initializers"

namespace ddp::testing::simulated {
namespace {

constexpr size_t kCount = 64;

// Two gradients, in buckets of their own; `value` is that of the next step on this rank.
class Training {
 public:
  Training(Rank& rank, ProcessGroup& group, DdpOptions options = {}) : owned_(rank.MakeStream()) {
    options.bucket_bytes = 1;
    std::vector<Parameter> parameters;
    for (const char* name : {"a", "b"}) {
      parameters.push_back({name, {4, kCount / 4}, {nullptr, kCount, DType::kFloat32, rank.device()}, {}});
    }
    model_ = RANK_VALUE(DistributedDataParallel::Create(group, parameters, options));
    stream_ = {rank.device(), owned_.get()};
  }
  DistributedDataParallel& model() { return *model_; }
  void DestroyModel() { model_.reset(); }
  Stream stream() const { return stream_; }
  void Set(float value) {
    FakeDevices::Synchronize(owned_.get());
    *value_ = value;
  }

  absl::Status Backward() {
    for (size_t p = 2; p-- > 0;) {
      FakeDevices::Enqueue(owned_.get(), [value = value_, grad = static_cast<float*>(model_->grad(p).data)] {
        std::fill_n(grad, kCount, *value);
      });
      model_->GradReady(p, stream_);
    }
    return model_->FinishBackward(stream_);
  }
  std::shared_ptr<FakeGraph> Capture() {
    RANK_CHECK_OK(FakeDevices::BeginCapture(owned_.get()));
    RANK_CHECK_OK(Backward());
    return RANK_VALUE(FakeDevices::EndCapture(owned_.get()));
  }
  void Launch(const std::shared_ptr<FakeGraph>& graph) { FakeDevices::Launch(graph, owned_.get()); }
  void Expect(float average) {
    FakeDevices::Synchronize(owned_.get());
    for (size_t p = 0; p < 2; ++p) RANK_CHECK_EQ(static_cast<const float*>(model_->grad(p).data)[kCount - 1], average);
  }

 private:
  const std::shared_ptr<float> value_ = std::make_shared<float>(0.0f);
  std::unique_ptr<DistributedDataParallel> model_;
  const OwnedStream owned_;  // after the model: it is waited for first
  Stream stream_;
};

TEST_CASE("replays are counted as steps, and timed on request") {
  const struct {
    int size;
    bool timed;
  } cases[] = {{1, true}, {2, true}, {2, false}};
  for (const auto& c : cases) {
    const int size = c.size;
    const bool timed = c.timed;
    Job job(size);
    std::atomic<int> clock{0};
    job.gpus.elapsed_us = [&] { return ++clock; };
    const ScopedDevices devices(job.gpus);
    job.Run([&](Rank& rank, ProcessGroup& group) {
      DdpOptions options;
      options.time_replays = timed;
      Training training(rank, group, options);
      DistributedDataParallel& model = training.model();
      const auto wait = [&] {
        FakeDevices::Synchronize(training.stream().native);
        RANK_CHECK_OK(group.Barrier().Wait());
      };
      for (int step = 0; step < 2; ++step) RANK_CHECK_OK(training.Backward());
      RANK_CHECK_OK(model.CanCapture());
      const auto graph = training.Capture(), other = training.Capture();
      wait();
      RANK_CHECK_EQ(model.statistics().steps, 2);
      // Until the times of a step are there, and read.
      while (model.statistics().buckets.empty()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      wait();
      if (rank.rank == 0) clock = 1'000'000;  // later than what the first steps show
      wait();
      for (int replay = 0; replay < 3; ++replay) {
        training.Set(static_cast<float>(2 * rank.rank + replay));
        training.Launch(replay < 2 ? graph : other);
        training.Expect(static_cast<float>(size - 1 + replay));
        // The graph that was captured last has not run at first: then it is not what is told.
        for (const BucketTimes& times : model.statistics().buckets) {
          RANK_CHECK_EQ(times.launched_ns > 1'000'000'000, size == 2 && timed);
        }
      }
      const DdpStatistics after = model.statistics();
      RANK_CHECK_EQ(after.steps, 5);
      RANK_CHECK_EQ(after.plans, 1);
      RANK_CHECK_EQ(after.buckets.size(), size_t{2});
      // Alone there is nothing to measure.
      for (const BucketTimes& times : after.buckets)
        RANK_CHECK_EQ(times.launched_ns > 1'000'000'000, size == 2 && timed);
      RANK_CHECK(size == 1 || after.exposed_ns > 0, "nothing is exposed");
      wait();
      RANK_CHECK_OK(training.Backward());
      RANK_CHECK_EQ(model.statistics().steps, 6);
      wait();
    });
  }
}

TEST_CASE("no plan is made in a capture, nor by replays") {
  Job job(2);
  const ScopedDevices devices(job.gpus);
  job.Run([&](Rank& rank, ProcessGroup& group) {
    Training training(rank, group);
    for (int step = 0; step < 9; ++step) RANK_CHECK_OK(training.Backward());
    const auto graph = training.Capture();
    for (int replay = 0; replay < 2; ++replay) training.Launch(graph);
    FakeDevices::Synchronize(training.stream().native);
    RANK_CHECK_EQ(training.model().statistics().plans, 1);
    RANK_CHECK_OK(training.Backward());  // the tenth of those that look at the order
    RANK_CHECK_EQ(training.model().statistics().steps, 12);
    training.Launch(graph);
    FakeDevices::Synchronize(training.stream().native);
  });
}

// The second plan needs more memory for the hook's gradients than the first.
TEST_CASE("a graph keeps what a hook had when it was captured") {
  constexpr size_t kLarge = 5000, kSmall = 10;
  Job job(2);
  const ScopedDevices devices(job.gpus);
  job.Run([&](Rank& rank, ProcessGroup& group) {
    const OwnedStream own = rank.MakeStream();
    const Stream stream{rank.device(), own.get()};
    std::vector<Parameter> parameters;
    for (size_t p = 0; p < 8; ++p) {
      const size_t count = p % 2 == 0 ? kLarge : kSmall;
      parameters.push_back({std::to_string(p), {}, {nullptr, count, DType::kFloat32, rank.device()}, {}});
    }
    const auto model = RANK_VALUE(DistributedDataParallel::Create(
        group, parameters, {.bucket_bytes = 20'000, .hook = CreateCompressionHook(DType::kBFloat16)}));
    float value = 0;
    const auto backward = [&](bool reversed) {
      for (size_t k = 0; k < 8; ++k) {
        const Buffer grad = model->grad(reversed ? 7 - k : k);
        FakeDevices::Enqueue(own.get(),
                             [&value, grad] { std::fill_n(static_cast<float*>(grad.data), grad.count, value); });
        model->GradReady(reversed ? 7 - k : k, stream);
      }
      return model->FinishBackward(stream);
    };
    const auto wait = [&] { FakeDevices::Synchronize(own.get()); };
    for (int step = 0; step < 3; ++step) RANK_CHECK_OK(backward(true));
    wait();
    RANK_CHECK_OK(FakeDevices::BeginCapture(own.get()));
    RANK_CHECK_OK(backward(true));
    const std::shared_ptr<FakeGraph> graph = RANK_VALUE(FakeDevices::EndCapture(own.get()));
    const int64_t plans = model->statistics().plans;
    for (int step = 3; step < 10; ++step) RANK_CHECK_OK(backward(false));
    wait();
    RANK_CHECK_EQ(model->statistics().plans, plans + 1);
    // What was given back is handed out again.
    std::vector<Allocation> others;
    for (size_t bytes = 256; bytes <= 65536; bytes += 256) {
      others.push_back(RANK_VALUE(group.Allocate(bytes, rank.device())));
      std::fill_n(static_cast<char*>(others.back().data()), bytes, 'x');
    }
    value = 4.0f + 2 * static_cast<float>(rank.rank);
    FakeDevices::Launch(graph, own.get());
    wait();
    RANK_CHECK_EQ(static_cast<const float*>(model->grad(0).data)[kLarge - 1], 5);
    for (const Allocation& other : others) {
      const char* const bytes = static_cast<const char*>(other.data());
      RANK_CHECK_EQ(std::count(bytes, bytes + other.bytes(), 'x'), static_cast<ptrdiff_t>(other.bytes()));
    }
    RANK_CHECK_OK(group.Barrier().Wait());
  });
}

void ExpectRefusal(Training& training, const char* why) {
  RANK_CHECK_STATUS(training.model().CanCapture(), absl::StatusCode::kFailedPrecondition, why);
  RANK_CHECK_OK(FakeDevices::BeginCapture(training.stream().native));
  RANK_CHECK_STATUS(training.Backward(), absl::StatusCode::kFailedPrecondition, "cannot be captured", why);
  RANK_CHECK_OK(FakeDevices::EndCapture(training.stream().native).status());
}

TEST_CASE("no step is captured where the host takes part in the group's operations") {
  for (const auto& [name, value] : {std::pair("DDP_NODE_SIZE", "1"), std::pair("DDP_STAGED_REDUCE", "cpu")}) {
    const Variable variable(name, value);
    StagedJob job(2);
    const ScopedDevices devices(job.gpus);
    job.Run([&](Rank& rank, ProcessGroup& group) {
      Training training(rank, group);
      ExpectRefusal(training, "the host takes part");
      training.Set(static_cast<float>(2 * rank.rank));
      RANK_CHECK_OK(training.Backward());
      training.Expect(1);
    });
  }
}

TEST_CASE("a captured step that needs the host is refused, and others follow it") {
  float tables[2][4] = {};
  const auto none = []() -> std::shared_ptr<CommHook> { return nullptr; };
  const struct {
    DdpOptions options;
    std::shared_ptr<CommHook> (*hook)();  // of each rank's own
    const char* why;
    bool first = false;  // only the first step is refused
  } cases[] = {
      {{.weighted = true}, none, "weighted"},
      {{.unused = UnusedParameters::kDetect}, none, "kDetect"},
      {{.static_graph = true}, none, "static_graph the first step", true},
      {{.buffers = {{"table", {tables[0], 4, DType::kFloat32, {}}}}}, none, "buffer 'table' is on the CPU"},
      {{}, [] { return CreatePowerSgdHook(); }, "hook power_sgd"},
      {{}, [] { return CreateCompressionHook(DType::kBFloat16, CreatePowerSgdHook()); }, "its first 10 steps"},
  };
  for (const auto& c : cases) {
    INFO(c.why);
    Job job(2);
    const ScopedDevices devices(job.gpus);
    job.Run([&](Rank& rank, ProcessGroup& group) {
      DdpOptions options = c.options;
      options.hook = c.hook();
      for (ModelBuffer& buffer : options.buffers) buffer.data.data = tables[rank.rank];
      Training training(rank, group, options);
      const auto step = [&](float value) {
        training.Set(value + static_cast<float>(2 * rank.rank));
        RANK_CHECK_OK(training.model().BeginForward(training.stream()));
        RANK_CHECK_OK(training.Backward());
        training.Expect(value + 1);
      };
      if (!c.first) step(1);
      ExpectRefusal(training, c.why);
      RANK_CHECK_OK(group.status());
      step(2);
      RANK_CHECK_EQ(training.model().CanCapture().ok(), c.first);
    });
  }
}

TEST_CASE("no step is captured in a Join") {
  Job job(2);
  const ScopedDevices devices(job.gpus);
  job.Run([&](Rank& rank, ProcessGroup& group) {
    Training training(rank, group);
    RANK_CHECK_OK(training.Backward());
    {
      DistributedDataParallel::Join join(training.model());
      RANK_CHECK_STATUS(training.model().CanCapture(), absl::StatusCode::kFailedPrecondition, "in a Join");
      RANK_CHECK_OK(join.Finish());
    }
    training.Launch(training.Capture());
    FakeDevices::Synchronize(training.stream().native);
  });
}

TEST_CASE("a failure during a replay reaches the stream, the group and the next step") {
  Job job(2);
  std::barrier<> both_are_through(2);
  const ScopedDevices devices(job.gpus);
  job.Run([&](Rank& rank, ProcessGroup& group) {
    Training training(rank, group);
    RANK_CHECK_OK(training.Backward());
    const auto graph = training.Capture();
    training.Launch(graph);
    FakeDevices::Synchronize(training.stream().native);
    RANK_CHECK_EQ(*training.model().skip_step(), 0u);
    both_are_through.arrive_and_wait();
    if (rank.rank == 1) group.Abort(absl::InternalError("enough"));
    while (group.status().ok()) std::this_thread::yield();
    training.Launch(graph);
    FakeDevices::Synchronize(training.stream().native);
    RANK_CHECK_EQ(*training.model().skip_step(), 1u);
    RANK_CHECK_STATUS(group.status(), absl::StatusCode::kAborted, "enough");
    RANK_CHECK_STATUS(training.Backward(), absl::StatusCode::kAborted, "enough");
  });
}

TEST_CASE("graphs, models and groups are destroyed in any order") {
  enum class GraphGoes { kFirst, kSecond, kLast };
  for (const GraphGoes graph_goes : {GraphGoes::kFirst, GraphGoes::kSecond, GraphGoes::kLast}) {
    INFO(static_cast<int>(graph_goes));
    Job job(2);
    const ScopedDevices devices(job.gpus);
    job.RunOver([&](Rank& rank, std::unique_ptr<ProcessGroup> control) {
      std::unique_ptr<ProcessGroup> group = RANK_VALUE(CreateGpuGroup(std::move(control), rank.Options()));
      Training training(rank, *group);
      RANK_CHECK_OK(training.Backward());
      std::shared_ptr<FakeGraph> graph = training.Capture();
      training.Launch(graph);
      FakeDevices::Synchronize(training.stream().native);
      RANK_CHECK_OK(group->Barrier().Wait());
      if (graph_goes == GraphGoes::kFirst) graph.reset();
      training.DestroyModel();
      if (graph_goes == GraphGoes::kSecond) graph.reset();
      group.reset();
      graph.reset();
    });
  }
}

// It would wait for what is captured and does not run, and take the model's stream into the capture for good.
TEST_CASE("a call that is given no stream while the last one is being captured is refused, and changes nothing") {
  Job job(2);
  const ScopedDevices devices(job.gpus);
  job.Run([&](Rank& rank, ProcessGroup& group) {
    const std::shared_ptr<void> mean = RANK_VALUE(rank.gpus.Allocate(rank.device(), 4));
    Training training(rank, group, {.buffers = {{"mean", {mean.get(), 1, DType::kFloat32, rank.device()}}}});
    DistributedDataParallel& model = training.model();
    training.Set(static_cast<float>(2 * rank.rank));
    RANK_CHECK_OK(training.Backward());
    training.Expect(1);
    std::vector<Parameter> parameters = {model.parameter(0), model.parameter(1)};
    RANK_CHECK_OK(FakeDevices::BeginCapture(training.stream().native));
    constexpr auto kRefused = absl::StatusCode::kFailedPrecondition;
    const char* const why = "is being captured into a CUDA graph";
    RANK_CHECK_STATUS(model.BeginForward(kNoStream), kRefused, "BeginForward", why, "give");
    RANK_CHECK_STATUS(model.BroadcastValues(0, kNoStream), kRefused, "BroadcastValues", why);
    RANK_CHECK_STATUS(model.SetParameters(parameters), kRefused, "SetParameters", why);
    RANK_CHECK_STATUS(model.GradNorm(2, kNoStream), kRefused, "GradNorm", why);
    RANK_CHECK_STATUS(model.ClipGradNorm(1, 2, kNoStream), kRefused, "GradNorm", why);
    RANK_CHECK_STATUS(model.ClipGradNormAsync(1, 2, kNoStream), kRefused, "ClipGradNormAsync", why);
    RANK_CHECK_OK(training.Backward());
    training.Launch(RANK_VALUE(FakeDevices::EndCapture(training.stream().native)));
    training.Set(static_cast<float>(2 * rank.rank + 4));
    RANK_CHECK_OK(group.status());
    RANK_CHECK_OK(model.BroadcastValues(0, kNoStream));
    RANK_CHECK_OK(training.Backward());
    training.Expect(5);
  });
}

}  // namespace
}  // namespace ddp::testing::simulated
