// SPDX-License-Identifier: Apache-2.0
// Training with synchronised batch normalisation: several ranks train as one does on the whole batch.
#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "ddp/process_group.h"
#include "examples/data/dataset.h"
#include "examples/nn/cnn.h"
#include "examples/nn/device.h"
#include "examples/train/trainer.h"
#include "tests/support/catch.h"
#include "tests/support/check.h"
#include "tests/support/forwarding_device.h"
#include "tests/support/ranks.h"

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

}  // namespace examples
