// SPDX-License-Identifier: Apache-2.0
// The example trainers on simulated GPUs: what they start from reaches all ranks.
#include <stdlib.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "examples/data/dataset.h"
#include "examples/nn/device.h"
#include "examples/nn/model.h"
#include "examples/train/trainer.h"
#include "libddp/comm/local_group.h"
#include "tests/support/catch.h"
#include "tests/support/forwarding_device.h"
#include "tests/support/nccl_job.h"

namespace examples {
namespace {

using ddp::testing::FakeDevices;
using ddp::testing::simulated::Job;

// Its state is in the GPU's memory. It makes no steps.
class IdleSgd final : public nn::Optimizer {
 public:
  IdleSgd(std::shared_ptr<void> memory, size_t count, double lr) : memory_(std::move(memory)), count_(count), lr_(lr) {}
  void Step(absl::Span<float>, absl::Span<const float>) override { throw nn::DeviceError("a step was not expected"); }
  std::vector<nn::NamedState> state() override {
    return {{"momentum", absl::MakeSpan(static_cast<float*>(memory_.get()), count_)}};
  }
  double lr() const override { return lr_; }
  void set_lr(double lr) override { lr_ = lr; }

 private:
  const std::shared_ptr<void> memory_;
  const size_t count_;
  double lr_;
};

// A simulated GPU that computes as the CPU does, once its stream has done what it was given.
class SimulatedDevice final : public ddp::testing::ForwardingDevice {
 public:
  SimulatedDevice(ddp::testing::simulated::Rank& rank, void* stream) : rank_(rank), stream_(stream) {}
  std::string name() const override { return "simulated"; }
  void* stream() const override { return stream_; }
  void Upload(const void* from, void* to, size_t bytes) override {
    Wait();
    std::memcpy(to, from, bytes);
  }
  void Download(const void* from, void* to, size_t bytes) override {
    Wait();
    std::memcpy(to, from, bytes);
  }
  void Wait() override { FakeDevices::Synchronize(stream_); }
  std::unique_ptr<nn::Optimizer> MakeSgd(size_t count, const nn::SgdOptions& options) override {
    const ddp::DeviceGuard guard(rank_.gpus, rank_.device());
    auto memory = RANK_VALUE(rank_.gpus.Allocate(rank_.device(), count * sizeof(float)));
    optimizer_state_ = static_cast<const float*>(memory.get());
    return std::make_unique<IdleSgd>(std::move(memory), count, options.lr);
  }
  const float* optimizer_state() const { return optimizer_state_; }

 private:
  ddp::testing::simulated::Rank& rank_;
  void* const stream_;
  const float* optimizer_state_ = nullptr;
};

// Computes as the CPU does, but step n of a run takes n ms by its clock.
class TimedDevice final : public ddp::testing::ForwardingDevice {
 public:
  std::string name() const override { return "timed"; }
  void* stream() const override { return nullptr; }
  std::unique_ptr<nn::Timer> MakeTimer() override { return std::make_unique<Clock>(); }

 private:
  class Clock final : public nn::Timer {
   public:
    void Mark(int64_t n) override {
      REQUIRE((n == marked_ || n == marked_ + 1));
      marked_ = n;
    }
    int64_t NsToMark(int64_t n) override {
      REQUIRE((n <= marked_ && n - 1 > marked_ - kMarks));
      return n * 1'000'000;
    }

   private:
    int64_t marked_ = 0;
  };
};

// Trains, or evaluates where there is nothing left to train.
Summary Run(ddp::ProcessGroup& group, nn::Device& device, const TrainFlags& flags,
            const std::function<void(Trainer&)>& look) {
  const Dataset data = EmbeddedDigits();
  Console console(false, false);
  const std::unique_ptr<nn::Model> model = nn::MakeMlp(data.features(), {16}, data.classes, flags.batch, device);
  const auto trainer = RANK_VALUE(Trainer::Create(group, flags, data, *model, console));
  const Summary summary = RANK_VALUE(trainer->Run());
  look(*trainer);
  return summary;
}

class Folder {
 public:
  Folder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "train_gpu_test.XXXXXX").string();
    REQUIRE(mkdtemp(pattern.data()) != nullptr);
    path_ = pattern;
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

}  // namespace

TEST_CASE("a training on GPUs starts from given weights, and from a checkpoint, on all ranks") {
  const Folder folder;
  nn::SetThreads(1);
  TrainFlags flags;
  flags.batch = 16;
  flags.epochs = flags.steps = 5;
  flags.save = folder / "checkpoint";
  flags.export_weights = folder / "weights";
  const std::unique_ptr<ddp::ProcessGroup> alone = ddp::CreateLocalGroup(nullptr, absl::Minutes(10));
  const Summary trained = Run(*alone, nn::Cpu(), flags, [](Trainer&) {});

  for (const bool resume : {false, true}) {
    TrainFlags onward = flags;
    onward.save = onward.export_weights = "";
    onward.batch = 8;
    if (resume) onward.resume = flags.save;
    if (!resume) onward.init_weights = flags.export_weights, onward.epochs = onward.steps = 0;
    std::vector<float> states[2];
    Job job(2);
    const ddp::ScopedDevices devices(job.gpus);
    job.Run([&](ddp::testing::simulated::Rank& rank, ddp::ProcessGroup& group) {
      const ddp::OwnedStream stream = rank.MakeStream();
      SimulatedDevice device(rank, stream.get());
      const Summary summary = Run(group, device, onward, [&](Trainer& trainer) {
        states[rank.rank].assign(device.optimizer_state(),
                                 device.optimizer_state() + trainer.replica().values().size());
      });
      RANK_CHECK_EQ(summary.parameters_sha256, trained.parameters_sha256);
      RANK_CHECK_EQ(summary.test_accuracy, trained.test_accuracy);
      RANK_CHECK_EQ(summary.steps, resume ? 5 : 0);
    });
    CHECK(states[0] == states[1]);
    const auto written = std::count_if(states[1].begin(), states[1].end(), [](float x) { return x != 0; });
    CHECK((written > 0) == resume);
  }
}

TEST_CASE("the time of a step is the device's, whatever the host does meanwhile") {
  nn::SetThreads(1);
  TrainFlags flags;
  flags.batch = 512;  // two steps an epoch
  flags.steps = flags.epochs = 7;
  flags.warmup = 0;
  TimedDevice device;
  const Summary summary = Run(*ddp::CreateLocalGroup(nullptr, absl::Minutes(10)), device, flags, [](Trainer&) {});
  CHECK(summary.measured_steps == 7);
  CHECK(summary.step_ms_min == 1);
  CHECK(summary.step_ms_median == 4);
  CHECK(summary.step_ms_max == 7);
  CHECK(summary.samples_per_second == ddp::testing::Approx(512 / 4e-3));
}

}  // namespace examples
