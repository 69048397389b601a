// SPDX-License-Identifier: Apache-2.0
// Trainings that go on after their group has failed: with the parameters of one that nothing has disturbed.
#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/string_view.h"
#include "examples/data/dataset.h"
#include "examples/nn/layer.h"
#include "examples/nn/model.h"
#include "examples/train/agreement.h"
#include "examples/train/trainer.h"
#include "libddp/comm/base/internal_group.h"
#include "tests/support/catch.h"
#include "tests/support/forwarding_device.h"
#include "tests/support/ranks.h"

namespace examples {
namespace {

using ddp::testing::Rank;
using ddp::testing::RunOnRanks;

// Called with where in a training a rank is; may throw.
using Hook = std::function<void(absl::string_view where)>;

class HookedCpu final : public ddp::testing::ForwardingDevice {
 public:
  explicit HookedCpu(Hook hook) : hook_(std::move(hook)) {}
  std::string name() const override { return "cpu"; }
  void* stream() const override { return nullptr; }
  void CrossEntropy(const float* logits, const int32_t* labels, int rows, int classes, float* dlogits,
                    const nn::LossOptions& options, const nn::LossRing& loss) override {
    ForwardingDevice::CrossEntropy(logits, labels, rows, classes, dlogits, options, loss);
    hook_("loss");
  }
  void Upload(const void* from, void* to, size_t bytes) override {
    hook_("recovery");
    ForwardingDevice::Upload(from, to, bytes);
  }
  void CountHits(const float* logits, const int32_t* labels, int rows, int classes, int64_t* hits) override {
    hook_("evaluation");
    ForwardingDevice::CountHits(logits, labels, rows, classes, hits);
  }

 private:
  const Hook hook_;
};

TrainFlags Flags(Rank& rank, const std::string& optimizer) {
  TrainFlags flags;
  flags.batch = 48 / rank.size();
  flags.epochs = 2;
  flags.optimizer = optimizer;
  flags.deterministic = true;
  flags.recover = true;
  return flags;
}

absl::StatusOr<Summary> Train(Rank& rank, const TrainFlags& flags, const Hook& hook) {
  const Dataset data = EmbeddedDigits();
  Console console(false, false);
  nn::SetThreads(1);
  HookedCpu device(hook);
  const std::unique_ptr<nn::Model> model = nn::MakeMlp(data.features(), {32, 24}, data.classes, flags.batch, device);
  absl::StatusOr<std::unique_ptr<Trainer>> trainer =
      Trainer::Create(rank.context().world(), flags, data, *model, console, "", nullptr, &rank.context());
  if (!trainer.ok()) return trainer.status();
  rank.Meet();  // who is not in Run yet recovers from nothing
  return (*trainer)->Run();
}

void BreakWorld(Rank& rank, const std::string& why) {
  dynamic_cast<ddp::InternalGroup&>(rank.context().world()).Fail(absl::InternalError(why));
}

// Out of a hook and of the training: the rank's Context ends with its test body, and the others learn that it has left.
// They wait for no time-out.
struct Leaving {};
[[noreturn]] void BreakWorldAndLeave(Rank& rank) {
  BreakWorld(rank, "the test breaks the world");
  throw Leaving();
}

}  // namespace

TEST_CASE("a training whose group fails goes on in a new one, to the same parameters") {
  struct Case {
    const char* optimizer;
    const char* where;
    int times;
  };
  for (const Case& c : {Case{"sgd", "loss", 1}, Case{"adam", "loss", 20}, Case{"sgd", "loss", 31},
                        Case{"adam", "evaluation", 1}, Case{"sgd", "loss", 60}}) {
    INFO(c.optimizer << ", " << c.where << ", for the " << c.times << ". time");
    RunOnRanks([&](Rank& rank) {
      const TrainFlags flags = Flags(rank, c.optimizer);
      const Summary undisturbed = RANK_VALUE(Train(rank, flags, [](absl::string_view) {}));
      RANK_CHECK(rank.context().backend_choice().text.empty());
      int left = c.times;
      const Summary summary = RANK_VALUE(Train(rank, flags, [&](absl::string_view here) {
        const bool now = here == c.where && --left == 0;
        if (now && rank.rank() == rank.size() - 1) BreakWorld(rank, "the test breaks NCCL");
      }));
      RANK_CHECK(absl::StrContains(rank.context().backend_choice().text, "the test breaks NCCL"));
      RANK_CHECK_EQ(summary.parameters_sha256, undisturbed.parameters_sha256);
      RANK_CHECK_EQ(summary.steps, undisturbed.steps);
      RANK_CHECK_EQ(summary.epochs, undisturbed.epochs);
      RANK_CHECK_EQ(summary.test_accuracy, undisturbed.test_accuracy);
      rank.Meet();
    });
  }
}

// Among threads, which have a store to meet in.
TEST_CASE("the figures after a recovery are of the ranks that are left") {
  if (!ddp::testing::RanksAreThreads() || ddp::testing::RankCount() == 1) return;
  RunOnRanks([](Rank& rank) {
    TrainFlags flags = Flags(rank, "sgd");
    flags.warmup = 2;
    const bool leaves = rank.rank() == rank.size() - 1;
    const ddp::ProcessGroup* const world = &rank.context().world();
    int before = 0, after = 0;
    try {
      const Summary summary = RANK_VALUE(Train(rank, flags, [&](absl::string_view here) {
        if (here != "loss") return;
        ++(&rank.context().world() == world ? before : after);
        if (leaves && before == 20) BreakWorldAndLeave(rank);
      }));
      RANK_CHECK(!leaves);
      RANK_CHECK_EQ(summary.world_size, rank.size() - 1);
      RANK_CHECK_EQ(summary.measured_steps, after - flags.warmup);
      RANK_CHECK_EQ(summary.measured_samples(), (after - flags.warmup) * flags.batch * (rank.size() - 1));
    } catch (const Leaving&) {
    }
  });
}

// Among threads, as above: the last rank leaves, and the one before it while the others recover from that, or at once
// when they have.
TEST_CASE("a second rank may leave during a recovery and right after it") {
  if (!ddp::testing::RanksAreThreads() || ddp::testing::RankCount() != 3) return;
  for (const std::string second : {"recovery", "loss"}) {
    INFO(second);
    RunOnRanks([&](Rank& rank) {
      const ddp::ProcessGroup* const world = &rank.context().world();
      int steps = 0;
      try {
        const Summary summary = RANK_VALUE(Train(rank, Flags(rank, "sgd"), [&](absl::string_view here) {
          steps += here == "loss" ? 1 : 0;
          const bool recovered = &rank.context().world() != world;
          const bool leaves = rank.rank() == 2 ? steps == 20 : rank.rank() == 1 && recovered && here == second;
          if (leaves) BreakWorldAndLeave(rank);
        }));
        RANK_CHECK_EQ(rank.rank(), 0);
        RANK_CHECK_EQ(summary.world_size, 1);
        RANK_CHECK_EQ(summary.epochs, 2);
      } catch (const Leaving&) {
      }
    });
  }
}

namespace {

// Has one number of its own.
class WithBuffer final : public nn::Layer {
 public:
  explicit WithBuffer(int size) : size_(size) {}
  int input_size() const override { return size_; }
  int output_size() const override { return size_; }
  absl::Span<const nn::ParameterSpec> parameters() const override { return {}; }
  void Bind(absl::Span<float* const>, absl::Span<float* const>) override {}
  std::vector<nn::LayerBuffer> buffers() override { return {{"number", {1}, {&number_, 1}}}; }
  void Forward(const float* x, float* y, int rows) override { std::copy_n(x, rows * size_, y); }
  void Backward(const float*, const float*, float*, float*, int, bool, nn::GradReadyFn) override {}

 private:
  const int size_;
  float number_ = 5;
};

}  // namespace

// The broadcast of buffers may leave anything in those of the others.
TEST_CASE("the buffers of layers are whole when rank 0 is lost") {
  if (!ddp::testing::RanksAreThreads() || ddp::testing::RankCount() == 1) return;
  RunOnRanks([](Rank& rank) {
    const TrainFlags flags = Flags(rank, "sgd");
    const Dataset data = EmbeddedDigits();
    Console console(false, false);
    nn::SetThreads(1);
    nn::Model* layers_of = nullptr;
    int losses = 0;
    HookedCpu device([&](absl::string_view here) {
      if (here != "loss" || ++losses != 20) return;
      layers_of->buffers()[0].data[0] = NAN;
      rank.Meet();  // who comes here after the recovery would spoil what is restored
      if (rank.rank() == 0) BreakWorldAndLeave(rank);
    });
    std::vector<nn::NamedLayer> layers;
    layers.push_back({"buffered", std::make_unique<WithBuffer>(static_cast<int>(data.features()))});
    layers.push_back({"linear", device.MakeLinear(layers[0].layer->output_size(), data.classes, nn::Activation::kNone,
                                                  flags.batch, nullptr)});
    nn::Model model(std::move(layers), flags.batch, device);
    layers_of = &model;
    const auto trainer =
        RANK_VALUE(Trainer::Create(rank.context().world(), flags, data, model, console, "", nullptr, &rank.context()));
    rank.Meet();
    try {
      RANK_CHECK_OK(trainer->Run().status());
      RANK_CHECK(rank.rank() != 0);
      RANK_CHECK_EQ(model.buffers()[0].data[0], 5.0f);
    } catch (const Leaving&) {
    }
  });
}

TEST_CASE("a step that fails again after a recovery ends the training") {
  RunOnRanks([](Rank& rank) {
    int step = 0;
    const absl::Status status = Train(rank, Flags(rank, "sgd"), [&](absl::string_view here) {
                                  if (here != "loss" || ++step < 5) return;
                                  rank.Meet();
                                  if (rank.rank() == 0) BreakWorld(rank, "broken for good");
                                }).status();
    RANK_CHECK_STATUS(status, absl::StatusCode::kUnavailable, "the step after a recovery has failed, too",
                      "broken for good");
    RANK_CHECK(IsAgreed(status));
    rank.Meet();
  });
}

TEST_CASE("a rank that gives up by itself ends all, and so does a failure without --recover") {
  RunOnRanks([](Rank& rank) {
    TrainFlags flags = Flags(rank, "sgd");
    const bool last = rank.rank() == rank.size() - 1;
    absl::Status status = Train(rank, flags, [&](absl::string_view) {
                            if (last) throw nn::DeviceError("the GPU has fallen off the bus");
                          }).status();
    RANK_CHECK_STATUS(status, last ? absl::StatusCode::kInternal : absl::StatusCode::kAborted,
                      "the GPU has fallen off the bus");
    rank.Meet();
    RANK_CHECK_OK(rank.context().Recover());  // a program may do so all the same

    flags.recover = false;
    status = Train(rank, flags, [&](absl::string_view) {
               if (last) BreakWorld(rank, "broken");
             }).status();
    RANK_CHECK_STATUS(status, absl::StatusCode::kInternal, "broken");
    rank.Meet();
  });
}

}  // namespace examples
