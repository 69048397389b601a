// SPDX-License-Identifier: Apache-2.0
// The energy of a training on several ranks, from a planted counter that moves while they train.
#include <atomic>
#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>

#include "absl/strings/match.h"
#include "ddp/collectives.h"
#include "examples/data/dataset.h"
#include "examples/nn/model.h"
#include "examples/train/energy.h"
#include "examples/train/summary.h"
#include "examples/train/trainer.h"
#include "tests/support/catch.h"
#include "tests/support/check.h"
#include "tests/support/ranks.h"
#include "tests/support/temporary_folder.h"

namespace examples {
namespace {

using ddp::testing::Rank;
using ddp::testing::RunOnRanks;

// Rank 0's: the folder of a machine with one package, which uses more and more energy.
class Machine {
 public:
  Machine() {
    root_.Write(domain_ + "name", "package-0\n");
    root_.Write(domain_ + "max_energy_range_uj", std::to_string(kRange));
    Write(0);
    user_ = std::thread([this] {
      for (uint64_t joules = 1; !ended_; ++joules) Write(joules * 1'000'000 % kRange);
    });
  }
  ~Machine() {
    ended_ = true;
    user_.join();
  }

  const std::string& root() const { return root_.path(); }

 private:
  static constexpr uint64_t kRange = 1'000'000'000'000;
  void Write(uint64_t microjoules) const {
    root_.Write(domain_ + "next", std::to_string(microjoules));
    std::filesystem::rename(root_.File(domain_ + "next"), root_.File(domain_ + "energy_uj"));
  }

  const ddp::testing::TemporaryFolder root_;
  const std::string domain_ = "sys/class/powercap/intel-rapl:0/";
  std::atomic<bool> ended_ = false;
  std::thread user_;
};

TEST_CASE("The energy of all ranks' host is counted once, per sample of the timed steps") {
  RunOnRanks([](Rank& rank) {
    const std::unique_ptr<Machine> machine = rank.rank() == 0 ? std::make_unique<Machine>() : nullptr;
    const std::string root =
        ddp::testing::ValueOr(__FILE__, __LINE__, "GatherStrings",
                              ddp::GatherStrings(rank.group(), machine != nullptr ? machine->root() : ""))[0];
    TrainFlags flags;
    flags.batch = 16;
    flags.epochs = 20;  // long enough for the machine to use energy when others use the processors
    flags.warmup = 2;
    flags.summary_json = rank.rank() == 0 ? root + "/summary" : "elsewhere";
    const Dataset data = EmbeddedDigits();
    Console console(false, false);
    nn::SetThreads(1);
    const std::unique_ptr<nn::Model> model = nn::MakeMlp(data.features(), {32}, data.classes, flags.batch);
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
      RANK_CHECK(joules >= 1, joules);
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
