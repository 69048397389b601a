// SPDX-License-Identifier: Apache-2.0
// Training with synchronised batch normalisation: several ranks train as one does on the whole batch.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ddp/process_group.h"
#include "examples/data/dataset.h"
#include "examples/nn/cnn.h"
#include "examples/nn/device.h"
#include "examples/nn/layer.h"
#include "examples/nn/model.h"
#include "examples/nn/sync_group.h"
#include "examples/train/trainer.h"
#include "tests/support/catch.h"
#include "tests/support/check.h"
#include "tests/support/forwarding_device.h"
#include "tests/support/ranks.h"
#include "tests/support/temporary_folder.h"

namespace examples {

using ddp::testing::Rank;
using ddp::testing::RunOnRanks;

namespace {

Summary Train(ddp::ProcessGroup& group, const TrainFlags& flags) {
  const Dataset data = EmbeddedDigits();
  Console console(false, false);
  nn::SetThreads(1);
  const auto model = nn::MakeResnet20({data.channels, data.height, data.width}, data.classes, flags.batch);
  const auto trainer =
      ddp::testing::ValueOr(__FILE__, __LINE__, "Create", Trainer::Create(group, flags, data, *model, console));
  return ddp::testing::ValueOr(__FILE__, __LINE__, "Run", trainer->Run());
}

// The largest difference between the losses of `many` ranks and those of `one`, step by step.
double LossesApart(const Summary& many, const Summary& one) {
  double worst = 0;
  RANK_CHECK_EQ(many.first_losses.size(), one.first_losses.size());
  for (size_t s = 0; s < one.first_losses.size(); ++s) {
    worst = std::max(worst, std::abs(many.first_losses[s] - one.first_losses[s]));
  }
  return worst;
}

TrainFlags Flags(Rank& rank) {
  TrainFlags flags;
  flags.batch = 24 / rank.size();
  flags.steps = 6;
  flags.lr = 0.02;
  flags.seed = 3;
  flags.deterministic = true;
  return flags;
}

}  // namespace

TEST_CASE("K ranks train ResNet-20 as one does on the whole batch if they normalise together, and not else") {
  RunOnRanks([](Rank& rank) {
    TrainFlags flags = Flags(rank);
    // After more steps an input of a ReLU that is next to 0 may be rounded to the other side of it, and the losses
    // part.
    flags.steps = 2;
    TrainFlags whole = flags;
    whole.batch = 24;
    const auto alone = ddp::testing::ValueOr(__FILE__, __LINE__, "Split", rank.group().Split(rank.rank(), 0));
    const Summary one = Train(*alone, whole);
    const double apart = LossesApart(Train(rank.group(), flags), one);
    flags.sync_bn = true;
    const Summary together = Train(rank.group(), flags);
    const double near = LossesApart(together, one);
    RANK_CHECK(near < 2e-4, near);
    RANK_CHECK(std::abs(*together.final_loss - *one.final_loss) < 2e-3, *together.final_loss, " is not ",
               *one.final_loss);
    RANK_CHECK(rank.size() == 1 ? near == 0 : apart > 20 * near, apart, " without, ", near, " with");
    // Micro-batches are normalised one by one, on all ranks together.
    flags.accumulate = 2;
    flags.batch /= 2;
    const Summary parts = Train(rank.group(), flags);
    RANK_CHECK_EQ(parts.steps, 2);
  });
}

namespace {

// Fails where it computes a loss for the third time.
class FailingDevice final : public ddp::testing::ForwardingDevice {
 public:
  explicit FailingDevice(bool fails) : left_(fails ? 3 : 0) {}
  std::string name() const override { return "cpu"; }
  void* stream() const override { return nullptr; }
  void CrossEntropy(const float* logits, const int32_t* labels, int rows, int classes, float* dlogits,
                    const nn::LossOptions& options, const nn::LossRing& loss) override {
    if (left_ > 0 && --left_ == 0) throw nn::DeviceError("the GPU has fallen off the bus");
    nn::Cpu().CrossEntropy(logits, labels, rows, classes, dlogits, options, loss);
  }

 private:
  int left_;
};

}  // namespace

TEST_CASE("a rank that fails leaves nobody waiting for its statistics") {
  RunOnRanks([](Rank& rank) {
    TrainFlags flags = Flags(rank);
    flags.sync_bn = true;
    const Dataset data = EmbeddedDigits();
    Console console(false, false);
    nn::SetThreads(1);
    const bool mine = rank.rank() == rank.size() - 1;
    FailingDevice device(mine);
    const auto model = nn::MakeResnet20({data.channels, data.height, data.width}, data.classes, flags.batch, device);
    const auto trainer = ddp::testing::ValueOr(__FILE__, __LINE__, "Create",
                                               Trainer::Create(rank.group(), flags, data, *model, console));
    // With the groups' time-out of 10 minutes, a rank that waits fails the test by its limit.
    const absl::Status status = trainer->Run().status();
    RANK_CHECK_STATUS(status, mine ? absl::StatusCode::kInternal : absl::StatusCode::kAborted,
                      "the GPU has fallen off the bus");
    rank.Meet();
  });
}

namespace {

// Passes everything on, and knows the group of the layers.
class Tap final : public nn::Layer {
 public:
  explicit Tap(int size) : size_(size) {}
  ddp::ProcessGroup& group() const { return group_->group(); }
  int input_size() const override { return size_; }
  int output_size() const override { return size_; }
  absl::Span<const nn::ParameterSpec> parameters() const override { return {}; }
  void Bind(absl::Span<float* const>, absl::Span<float* const>) override {}
  void Synchronize(nn::SyncGroup* group) override { group_ = group; }
  void Forward(const float* x, float* y, int rows) override { std::copy_n(x, rows * size_, y); }
  void Backward(const float*, const float*, float*, float*, int, bool, nn::GradReadyFn) override {}

 private:
  const int size_;
  nn::SyncGroup* group_ = nullptr;
};

// Calls a function once, when it is waited for after so many losses.
class DeviceWithEnd final : public ddp::testing::ForwardingDevice {
 public:
  DeviceWithEnd(int losses, std::function<void()> end) : left_(losses), end_(std::move(end)) {}
  std::string name() const override { return "cpu"; }
  void* stream() const override { return nullptr; }
  void CrossEntropy(const float* logits, const int32_t* labels, int rows, int classes, float* dlogits,
                    const nn::LossOptions& options, const nn::LossRing& loss) override {
    nn::Cpu().CrossEntropy(logits, labels, rows, classes, dlogits, options, loss);
    --left_;
  }
  void Wait() override {
    if (left_ == 0) std::exchange(end_, [] {})();
  }

 private:
  int left_;
  std::function<void()> end_;
};

}  // namespace

// As on a GPU, where the host learns of it when it waits.
TEST_CASE("nothing is saved, and no accuracy told, of steps whose statistics have failed since") {
  for (const int losses : {2, 3}) {  // before a checkpoint in an epoch, and after the last step
    INFO(losses);
    RunOnRanks([losses](Rank& rank) {
      if (rank.size() == 1) return;
      const ddp::testing::TemporaryFolder folder;
      TrainFlags flags = Flags(rank);
      flags.sync_bn = true;
      flags.steps = 3;
      flags.save_every = losses == 2 ? 2 : 0;
      flags.save = folder.File("checkpoint");
      const Dataset data = EmbeddedDigits();
      Console console(false, false);
      nn::SetThreads(1);
      auto tap = std::make_unique<Tap>(static_cast<int>(data.features()));
      DeviceWithEnd device(losses, [&rank, &tap = *tap] {
        rank.Meet();
        if (rank.rank() == rank.size() - 1) tap.group().Abort(absl::AbortedError("no statistics"));
        while (tap.group().status().ok()) std::this_thread::yield();
        rank.Meet();
      });
      std::vector<nn::NamedLayer> layers;
      layers.push_back({"tap", std::move(tap)});
      layers.push_back({"linear", device.MakeLinear(layers[0].layer->output_size(), data.classes, nn::Activation::kNone,
                                                    flags.batch, nullptr)});
      nn::Model model(std::move(layers), flags.batch, device);
      auto trainer = ddp::testing::ValueOr(__FILE__, __LINE__, "Create",
                                           Trainer::Create(rank.group(), flags, data, model, console));
      RANK_CHECK_STATUS(trainer->Run().status(), absl::StatusCode::kAborted, "no statistics");
      trainer.reset();  // which ends to write
      RANK_CHECK(!std::filesystem::exists(flags.save));
      rank.Meet();
    });
  }
}

}  // namespace examples
