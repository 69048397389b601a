// SPDX-License-Identifier: Apache-2.0
// The example trainers with --recover on simulated GPUs: NCCL fails in the middle of a training, which goes on through
// host memory, with CUDA graphs and without.
#include <barrier>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "examples/data/dataset.h"
#include "examples/nn/model.h"
#include "examples/train/trainer.h"
#include "libddp/comm/base/internal_group.h"
#include "tests/support/auto_world.h"
#include "tests/support/streamed_device.h"

namespace examples {
namespace {

using ddp::testing::Logged;
using ddp::testing::StreamedDevice;
using ddp::testing::simulated::Rank;
using ddp::testing::simulated::World;
using Mishap = ddp::testing::FakeNccl::Mishap;

// In upload `number`, counted from 0, each step's being one, it calls `mishap`.
class FailingDevice final : public StreamedDevice {
 public:
  FailingDevice(Rank& rank, int number, std::function<void()> mishap)
      : StreamedDevice(rank), left_(number), mishap_(std::move(mishap)) {}
  void UploadTo(int slot, const void* from, void* to, size_t bytes) override {
    if (left_-- == 0) mishap_();
    StreamedDevice::UploadTo(slot, from, to, bytes);
  }

 private:
  int left_;
  const std::function<void()> mishap_;
};

struct Outcome {
  Summary summary;
  int launches = 0;
};

TrainFlags Flags(const std::string& optimizer, bool graphs) {
  TrainFlags flags;
  flags.batch = 16;
  flags.steps = 24;
  flags.epochs = 24;
  flags.optimizer = optimizer;
  flags.deterministic = flags.recover = true;
  flags.cuda_graph = graphs;
  flags.schedule = {.kind = Schedule::Kind::kCosine, .warmup_steps = 3};
  return flags;
}

// Of rank 0 of two. `mishap` is called by the last rank before step `step`, counted from 0.
Outcome Train(const TrainFlags& flags, int step, const std::function<void(ddp::Context&, World&)>& mishap) {
  nn::SetThreads(1);
  World world(2);
  world.gpus().host_memory_is_theirs = true;
  Logged log;
  Outcome outcomes[2];
  std::barrier both(2);
  const auto body = [&](ddp::Context& context) {
    Rank rank{.rank = context.rank(), .size = 2, .gpus = world.gpus(), .nccl = world.nccl(), .progress = {}};
    RANK_CHECK_OK(context.world().SetTimeout(ddp::testing::simulated::TimeFor(absl::Seconds(3))));
    const bool fails = mishap != nullptr && rank.rank == 1;
    FailingDevice device(rank, fails ? step : -1, [&] { mishap(context, world); });
    const Dataset data = EmbeddedDigits();
    Console console(false, false);
    const std::unique_ptr<nn::Model> model = nn::MakeMlp(data.features(), {16}, data.classes, flags.batch, device);
    const auto trainer =
        RANK_VALUE(Trainer::Create(context.world(), flags, data, *model, console, "", nullptr, &context));
    both.arrive_and_wait();  // who is not in Run yet recovers from nothing
    outcomes[rank.rank] = {RANK_VALUE(trainer->Run()), device.launches()};
    RANK_CHECK_EQ(context.world().backend(), mishap == nullptr ? "nccl" : "hierarchical");
  };
  for (const absl::Status& status : world.Create(body)) CHECK(status == absl::OkStatus());
  CHECK(log.Count({"goes on: backend hierarchical with all 2 ranks"}) == (mishap == nullptr ? 0 : 1));
  CHECK(outcomes[1].summary.parameters_sha256 == outcomes[0].summary.parameters_sha256);
  return outcomes[0];
}

void FailWorld(ddp::Context& context, World&) {
  dynamic_cast<ddp::InternalGroup&>(context.world()).Fail(absl::InternalError("the test breaks NCCL"));
}

void CheckSameTraining(const Outcome& outcome, const Outcome& undisturbed) {
  CHECK(outcome.summary.parameters_sha256 == undisturbed.summary.parameters_sha256);
  CHECK(outcome.summary.steps == undisturbed.summary.steps);
  CHECK(outcome.summary.epochs == undisturbed.summary.epochs);
  CHECK(outcome.summary.skipped_steps == 0);
  CHECK(outcome.summary.test_accuracy == undisturbed.summary.test_accuracy);
}

}  // namespace

TEST_CASE("a training on GPUs whose world fails goes on without NCCL, to the same parameters") {
  const auto check = [](const std::string& optimizer, const std::vector<std::pair<bool, int>>& graphs_and_steps) {
    const Outcome undisturbed = Train(Flags(optimizer, false), 0, nullptr);
    for (const auto& [graphs, step] : graphs_and_steps) {
      CAPTURE(optimizer, graphs, step);
      const Outcome outcome = Train(Flags(optimizer, graphs), step, FailWorld);
      CheckSameTraining(outcome, undisturbed);
      CHECK(outcome.summary.cuda_graph == graphs);
      CHECK((outcome.launches > 0) == graphs);
    }
  };
  check("sgd", {{false, 2}, {true, 0}, {true, 9}});
  check("adam", {{false, 9}, {true, 12}});
}

TEST_CASE("a training whose NCCL hangs or refuses goes on without it, to the same parameters") {
  const Outcome undisturbed = Train(Flags("sgd", false), 0, nullptr);
  for (const auto& [mishap, result] :
       {std::pair(Mishap::kFail, ddp::nccl::kUnhandledCudaError), {Mishap::kStuck, ddp::nccl::kInternalError}}) {
    const Outcome outcome =
        Train(Flags("sgd", false), 9, [m = mishap, r = result](ddp::Context& context, World& world) {
          world.nccl().Plan("AllReduce", context.rank(), m, r);
        });
    CheckSameTraining(outcome, undisturbed);
  }
}

}  // namespace examples
