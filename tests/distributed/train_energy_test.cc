// SPDX-License-Identifier: Apache-2.0
// The energy of a training on several ranks, from a planted counter that moves with their steps.
#include <cstdint>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/strings/match.h"
#include "ddp/collectives.h"
#include "examples/data/dataset.h"
#include "examples/nn/model.h"
#include "examples/train/energy.h"
#include "examples/train/summary.h"
#include "examples/train/trainer.h"
#include "tests/support/catch.h"
#include "tests/support/check.h"
#include "tests/support/forwarding_device.h"
#include "tests/support/ranks.h"
#include "tests/support/temporary_folder.h"

namespace examples {
namespace {

using ddp::testing::Rank;
using ddp::testing::RunOnRanks;

// Rank 0's: the folder of a machine with one package.
class Machine {
 public:
  Machine() {
    root_.Write(domain_ + "name", "package-0\n");
    root_.Write(domain_ + "max_energy_range_uj", "1000000000000");
    Write();
  }

  const std::string& root() const { return root_.path(); }
  void UseOneJoule() {
    ++joules_;
    Write();
  }

 private:
  void Write() const { root_.Write(domain_ + "energy_uj", std::to_string(joules_ * 1'000'000)); }

  const ddp::testing::TemporaryFolder root_;
  const std::string domain_ = "sys/class/powercap/intel-rapl:0/";
  uint64_t joules_ = 0;
};

// Each step uses a joule of the machine's, if there is one.
class Consumer final : public ddp::testing::ForwardingDevice {
 public:
  explicit Consumer(Machine* machine) : machine_(machine) {}
  std::string name() const override { return "cpu"; }
  void* stream() const override { return nullptr; }
  void CrossEntropy(const float* logits, const int32_t* labels, int rows, int classes, float* dlogits,
                    const nn::LossOptions& options, const nn::LossRing& loss) override {
    if (machine_ != nullptr) machine_->UseOneJoule();
    ForwardingDevice::CrossEntropy(logits, labels, rows, classes, dlogits, options, loss);
  }

 private:
  Machine* const machine_;
};

TEST_CASE("The energy of all ranks' host is counted once, per sample of the timed steps") {
  RunOnRanks([](Rank& rank) {
    const std::unique_ptr<Machine> machine = rank.rank() == 0 ? std::make_unique<Machine>() : nullptr;
    const std::string root =
        ddp::testing::ValueOr(__FILE__, __LINE__, "GatherStrings",
                              ddp::GatherStrings(rank.group(), machine != nullptr ? machine->root() : ""))[0];
    TrainFlags flags;
    flags.batch = 16;
    flags.epochs = 2;
    flags.warmup = 2;
    flags.summary_json = rank.rank() == 0 ? root + "/summary" : "elsewhere";
    const Dataset data = EmbeddedDigits();
    Console console(false, false);
    nn::SetThreads(1);
    Consumer device(machine.get());
    const std::unique_ptr<nn::Model> model = nn::MakeMlp(data.features(), {32}, data.classes, flags.batch, device);
    EnergyMeter energy({.root = root});
    absl::StatusOr<std::unique_ptr<Trainer>> trainer =
        Trainer::Create(rank.group(), flags, data, *model, console, "", &energy);
    RANK_CHECK_OK(trainer);
    const absl::StatusOr<Summary> summary = (*trainer)->Run();
    RANK_CHECK_OK(summary);
    if (rank.rank() == 0) {
      RANK_CHECK(summary->energy.has_value());
      RANK_CHECK(summary->energy->cpu_joules.has_value());
      const double joules = *summary->energy->cpu_joules;
      RANK_CHECK_EQ(joules, static_cast<double>(summary->steps - 2));
      RANK_CHECK_OK(WriteJson(*summary, flags.summary_json));
      const nlohmann::json json = nlohmann::json::parse(std::ifstream(flags.summary_json));
      const auto samples = static_cast<double>((summary->steps - 2) * 16 * rank.size());
      RANK_CHECK_EQ(json["energy"]["joules_per_sample"].get<double>(), joules / samples);
      RANK_CHECK_EQ(json["energy"]["processors"].size(), size_t{1});
      RANK_CHECK_EQ(json["operations"]["flops_per_sample"].get<int64_t>(), model->flops());
      RANK_CHECK(json["operations"]["share_of_products"].get<double>() > 0);
      RANK_CHECK(absl::StrContains(ToText(*summary), " J a sample, "));
    }
    RANK_CHECK_OK(rank.group().Barrier().Wait());  // the machine is there until all have read it
  });
}

}  // namespace
}  // namespace examples
