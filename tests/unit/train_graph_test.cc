// SPDX-License-Identifier: Apache-2.0
// The example trainers with --cuda-graph on simulated GPUs.
#include <stdlib.h>

#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "examples/data/dataset.h"
#include "examples/nn/model.h"
#include "examples/train/trainer.h"
#include "libddp/comm/local_group.h"
#include "tests/support/catch.h"
#include "tests/support/nccl_job.h"
#include "tests/support/streamed_device.h"

namespace examples {
namespace {

using ddp::testing::StreamedDevice;
using ddp::testing::simulated::Job;
using ddp::testing::simulated::Rank;

struct Outcome {
  absl::Status status;
  Summary summary;
  std::string plan;
  int launches = 0;
};

Outcome TrainOn(nn::Device& device, ddp::ProcessGroup& group, const TrainFlags& flags) {
  const Dataset data = EmbeddedDigits();
  Console console(false, false);
  const std::unique_ptr<nn::Model> model = nn::MakeMlp(data.features(), {16}, data.classes, flags.batch, device);
  const auto trainer = RANK_VALUE(Trainer::Create(group, flags, data, *model, console));
  const absl::StatusOr<Summary> summary = trainer->Run();
  return {summary.status(), summary.ok() ? *summary : Summary(), trainer->Plan()};
}

// Of rank 0. What is unordered shows where of two streams one runs at once and the other late.
Outcome Train(int ranks, const TrainFlags& flags, bool late = true) {
  nn::SetThreads(1);
  Outcome outcomes[2];
  Job job(ranks);
  job.gpus.host_memory_is_theirs = true;
  job.gpus.late = [late](int, int number) { return late || number % 2 == 0; };
  const ddp::ScopedDevices devices(job.gpus);
  job.Run([&](Rank& rank, ddp::ProcessGroup& group) {
    StreamedDevice device(rank);
    Outcome& mine = outcomes[rank.rank];
    mine = TrainOn(device, group, flags);
    mine.launches = device.launches();
  });
  for (int rank = 0; rank < ranks; ++rank) {
    CHECK(outcomes[rank].status.code() == outcomes[0].status.code());
    CHECK(outcomes[rank].launches == outcomes[0].launches);
    CHECK(outcomes[rank].summary.parameters_sha256 == outcomes[0].summary.parameters_sha256);
  }
  return outcomes[0];
}

TrainFlags Flags(int batch, int steps) {
  TrainFlags flags;
  flags.batch = batch;
  flags.steps = steps;
  flags.epochs = steps;
  flags.deterministic = true;
  return flags;
}

// The steps are the same with graphs and without, to the last bit.
void CompareWithGraphs(int ranks, TrainFlags flags, bool late = true) {
  const Outcome eager = Train(ranks, flags, late);
  flags.cuda_graph = true;
  const Outcome replayed = Train(ranks, flags, late);
  REQUIRE(eager.status.ok());
  INFO(replayed.status.ToString());
  REQUIRE(replayed.status.ok());
  CHECK(eager.launches == 0);
  CHECK(!eager.summary.cuda_graph);
  CHECK(replayed.launches == flags.steps - 3);
  CHECK(replayed.summary.cuda_graph);
  CHECK(absl::StrContains(replayed.plan, "steps in CUDA graphs"));
  CHECK(replayed.summary.first_losses.size() == 20);
  CHECK(replayed.summary.first_losses == eager.summary.first_losses);
  CHECK(replayed.summary.parameters_sha256 == eager.summary.parameters_sha256);
  CHECK(replayed.summary.final_loss == eager.summary.final_loss);
  CHECK(replayed.summary.test_accuracy == eager.summary.test_accuracy);
  CHECK(replayed.summary.skipped_steps == eager.summary.skipped_steps);
  CHECK(replayed.summary.communication.steps == eager.summary.communication.steps);
  CHECK(replayed.summary.communication.plans == eager.summary.communication.plans);
}

class Folder {
 public:
  Folder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "train_graph_test.XXXXXX").string();
    REQUIRE(mkdtemp(pattern.data()) != nullptr);
    path_ = pattern;
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

}  // namespace

TEST_CASE("replayed steps train as steps do") {
  for (const bool late : {true, false}) {
    CompareWithGraphs(1, Flags(64, 40), late);  // evaluates in between
    CompareWithGraphs(2, Flags(16, 24), late);
  }
}

// A batch that came too late, or over one that was still read, would change the losses.
TEST_CASE("batches uploaded on a stream of their own train as on the CPU, with graphs and without") {
  TrainFlags flags = Flags(64, 40);
  const std::unique_ptr<ddp::ProcessGroup> alone = ddp::CreateLocalGroup(nullptr, absl::Minutes(10));
  nn::SetThreads(1);
  const Outcome on_cpu = TrainOn(nn::Cpu(), *alone, flags);
  REQUIRE(on_cpu.status.ok());
  for (const bool cuda_graph : {false, true}) {
    for (const bool late : {true, false}) {
      flags.cuda_graph = cuda_graph;
      const Outcome outcome = Train(1, flags, late);
      INFO(outcome.status.ToString());
      REQUIRE(outcome.status.ok());
      CHECK(outcome.launches == (cuda_graph ? flags.steps - 3 : 0));
      CHECK(outcome.summary.first_losses == on_cpu.summary.first_losses);
      CHECK(outcome.summary.final_loss == on_cpu.summary.final_loss);
      CHECK(outcome.summary.parameters_sha256 == on_cpu.summary.parameters_sha256);
    }
  }
}

TEST_CASE("replayed steps accumulate, clip, and follow a schedule") {
  TrainFlags flags = Flags(8, 24);
  flags.accumulate = 3;
  flags.clip_norm = 0.5;
  flags.schedule = {.kind = Schedule::Kind::kCosine, .warmup_steps = 6};
  CompareWithGraphs(2, flags);
  flags.optimizer = "adamw";
  flags.weight_decay = 0.1;
  CompareWithGraphs(1, flags);
}

TEST_CASE("replayed steps scale the loss, and skip those that overflow") {
  TrainFlags flags = Flags(16, 24);
  flags.grad_scaler = true;
  flags.schedule = {.kind = Schedule::Kind::kCosine, .warmup_steps = 3};
  CompareWithGraphs(2, flags);
}

TEST_CASE("replayed steps compress gradients") {
  TrainFlags flags = Flags(16, 24);
  for (const char* compress : {"bf16", "int8", "fp8"}) {
    CAPTURE(compress);
    flags.compress = compress;
    CompareWithGraphs(2, flags);
  }
}

TEST_CASE("a training with graphs resumes exactly") {
  const Folder folder;
  TrainFlags flags = Flags(16, 24);
  flags.grad_scaler = true;
  const Outcome whole = Train(2, flags);
  TrainFlags first = flags, second = flags;
  first.cuda_graph = second.cuda_graph = true;
  first.steps = 11;
  first.save = second.resume = folder / "checkpoint";
  REQUIRE(Train(2, first).status.ok());
  const Outcome resumed = Train(2, second);
  REQUIRE(resumed.status.ok());
  CHECK(resumed.launches == 24 - 11 - 3);
  CHECK(resumed.summary.parameters_sha256 == whole.summary.parameters_sha256);
  CHECK(std::vector<double>(whole.summary.first_losses.begin() + 11, whole.summary.first_losses.end()) ==
        std::vector<double>(resumed.summary.first_losses.begin(), resumed.summary.first_losses.begin() + 9));
}

TEST_CASE("a loss that is lost within a graph ends the training on all ranks") {
  TrainFlags flags = Flags(16, 40);
  flags.cuda_graph = true;
  flags.schedule = {.kind = Schedule::Kind::kConstant, .warmup_steps = 30};
  flags.lr = 1e6;
  const Outcome outcome = Train(2, flags);
  CHECK(outcome.status.code() == absl::StatusCode::kOutOfRange);
  CHECK(absl::StrContains(outcome.status.message(), "the training loss is not finite"));
}

TEST_CASE("a rank that fails between replays ends the training of the others") {
  nn::SetThreads(1);
  Outcome outcomes[2];
  Job job(2);
  job.gpus.host_memory_is_theirs = true;
  TrainFlags flags = Flags(16, 40);
  flags.cuda_graph = true;
  const ddp::ScopedDevices devices(job.gpus);
  job.Run([&](Rank& rank, ddp::ProcessGroup& group) {
    StreamedDevice device(rank);
    if (rank.rank == 1) device.FailLaunch(5);
    outcomes[rank.rank] = TrainOn(device, group, flags);
  });
  CHECK(absl::StrContains(outcomes[1].status.message(), "fallen off the bus"));
  INFO(outcomes[0].status.ToString());
  CHECK(absl::StrContains(outcomes[0].status.message(), "rank 1"));
  CHECK(absl::StrContains(outcomes[0].status.message(), "fallen off the bus"));
}

TEST_CASE("where steps cannot be captured, the trainer says why and goes on without graphs") {
  TrainFlags flags = Flags(16, 6);
  flags.cuda_graph = true;
  flags.reduce = "gather";
  const Outcome gathers = Train(2, flags);
  INFO(gathers.status.ToString());
  REQUIRE(gathers.status.ok());
  CHECK(gathers.launches == 0);
  CHECK(!gathers.summary.cuda_graph);
  CHECK(absl::StrContains(gathers.plan,
                          "without a CUDA graph: a step cannot be captured into a CUDA graph: hook gather"));
  flags.reduce = "overlap";
  const std::unique_ptr<ddp::ProcessGroup> alone = ddp::CreateLocalGroup(nullptr, absl::Minutes(10));
  const Outcome on_cpu = TrainOn(nn::Cpu(), *alone, flags);
  REQUIRE(on_cpu.status.ok());
  CHECK(absl::StrContains(on_cpu.plan, "without a CUDA graph: steps run on the CPU"));
}

}  // namespace examples
