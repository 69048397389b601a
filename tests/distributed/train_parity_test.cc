// SPDX-License-Identifier: Apache-2.0
// K ranks train as one rank does, a resumed training goes on as if it had never stopped, on any number of ranks.
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ddp/collectives.h"
#include "ddp/distributed_data_parallel.h"
#include "examples/data/dataset.h"
#include "examples/data/file.h"
#include "examples/nn/cnn.h"
#include "examples/nn/model.h"
#include "examples/train/agreement.h"
#include "examples/train/trainer.h"
#include "tests/support/catch.h"
#include "tests/support/check.h"
#include "tests/support/ranks.h"
#include "tests/support/temporary_folder.h"

namespace examples {
namespace {

using ddp::testing::Rank;
using ddp::testing::RunOnRanks;

constexpr int kGlobalBatch = 48;  // divisible by 1, 2, 3 and 4

TrainFlags Flags(int ranks, int steps) {
  TrainFlags flags;
  flags.batch = kGlobalBatch / ranks;
  flags.epochs = 100;
  flags.steps = steps;
  flags.lr = 0.05;
  flags.seed = 3;
  flags.deterministic = true;
  return flags;
}

struct Trained {
  std::vector<float> values;
  Summary summary;
};

Trained Train(ddp::ProcessGroup& group, const TrainFlags& flags) {
  const Dataset data = EmbeddedDigits();
  Console console(false, false);
  nn::SetThreads(1);
  const std::unique_ptr<nn::Model> model = nn::MakeMlp(data.features(), {32, 24}, data.classes, flags.batch);
  absl::StatusOr<std::unique_ptr<Trainer>> trainer = Trainer::Create(group, flags, data, *model, console);
  RANK_CHECK_OK(trainer);
  const absl::StatusOr<Summary> summary = (*trainer)->Run();
  RANK_CHECK_OK(summary);
  const absl::Span<float> values = (*trainer)->replica().values();
  return {{values.begin(), values.end()}, *summary};
}

// The same training in a world of one.
Trained TrainAlone(const TrainFlags& flags) {
  ddp::ContextOptions options;
  options.rank = 0;
  options.world_size = 1;
  options.store = ddp::CreateMemoryStore();
  const absl::StatusOr<std::unique_ptr<ddp::Context>> context = ddp::Context::Create(options);
  RANK_CHECK_OK(context);
  return Train((*context)->world(), flags);
}

void CheckClose(const Trained& many, const Trained& one, double tolerance) {
  RANK_CHECK_EQ(many.values.size(), one.values.size());
  double worst = 0, largest = 0;
  for (size_t i = 0; i < one.values.size(); ++i) {
    worst = std::max<double>(worst, std::abs(many.values[i] - one.values[i]));
    largest = std::max<double>(largest, std::abs(one.values[i]));
  }
  RANK_CHECK(largest > 0.1);
  RANK_CHECK(worst <= tolerance, "parameters differ by ", worst);
  RANK_CHECK(std::abs(*many.summary.final_loss - *one.summary.final_loss) < 10 * tolerance, *many.summary.final_loss,
             " is not ", *one.summary.final_loss);
  // A test image at the border may fall to either side.
  RANK_CHECK(std::abs(many.summary.test_accuracy - one.summary.test_accuracy) < 2.5 / 360);
}

// A folder of rank 0's that all ranks know.
class SharedFolder {
 public:
  explicit SharedFolder(Rank& rank) {
    if (rank.rank() == 0) mine_.emplace();
    path_ = ddp::testing::ValueOr(__FILE__, __LINE__, "GatherStrings",
                                  GatherStrings(rank.group(), mine_.has_value() ? mine_->path() : ""))[0];
  }
  std::string File(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::optional<ddp::testing::TemporaryFolder> mine_;
  std::string path_;
};

}  // namespace

TEST_CASE("K ranks with batch B / K train as one rank with batch B") {
  RunOnRanks([](Rank& rank) {
    for (const std::string optimizer : {"sgd", "adam"}) {
      TrainFlags many = Flags(rank.size(), 45);  // an epoch and a half
      many.optimizer = optimizer;
      many.weight_decay = 0.001;
      if (optimizer == "adam") many.lr = 0.001;
      TrainFlags one = many;
      one.batch = kGlobalBatch;
      CheckClose(Train(rank.group(), many), TrainAlone(one), 1e-4);
    }
  });
}

TEST_CASE("batches that are accumulated train as one large batch, and are reduced once") {
  RunOnRanks([](Rank& rank) {
    TrainFlags flags = Flags(rank.size(), 33);
    flags.optimizer = "adamw";
    flags.lr = 0.001;
    flags.weight_decay = 0.01;
    flags.label_smoothing = 0.1;
    flags.clip_norm = 0.5;
    flags.schedule.kind = Schedule::Kind::kCosine;
    flags.schedule.warmup_steps = 5;
    TrainFlags parts = flags;
    parts.accumulate = 4;
    parts.batch = flags.batch / 4;
    const Trained whole = Train(rank.group(), flags), accumulated = Train(rank.group(), parts);
    CheckClose(accumulated, whole, 1e-4);
    RANK_CHECK_EQ(accumulated.summary.communication.steps, 33);
    RANK_CHECK_EQ(accumulated.summary.first_losses.size(), size_t{20});
    RANK_CHECK(std::abs(accumulated.summary.first_losses[0] - whole.summary.first_losses[0]) < 1e-5);
    if (rank.size() == 1) return;
    // Small buckets change no bit.
    parts.bucket_mb = 0.001;
    const Trained buckets = Train(rank.group(), parts);
    RANK_CHECK(buckets.summary.communication.buckets.size() > accumulated.summary.communication.buckets.size());
    RANK_CHECK_EQ(buckets.summary.parameters_sha256, accumulated.summary.parameters_sha256);
  });
}

TEST_CASE("every way to reduce trains alike, except none") {
  RunOnRanks([](Rank& rank) {
    const auto train = [&](const std::string& reduce) {
      TrainFlags flags = Flags(rank.size(), 20);
      flags.reduce = reduce;
      Trained trained = Train(rank.group(), flags);
      RANK_CHECK_EQ(trained.summary.reduce, reduce);
      return trained;
    };
    const Trained overlap = train("overlap");
    for (const std::string reduce : {"end", "each", "gather"}) {
      const Trained other = train(reduce);
      const size_t buckets = other.summary.communication.buckets.size();
      RANK_CHECK(buckets == (reduce == "each" ? 6 : 1), reduce, " has ", buckets, " buckets");
      // Rank 0 adds in rank order too, but across nodes an all-reduce adds in another order.
      if (reduce == "gather") {
        CheckClose(other, overlap, 1e-5);
      } else {
        RANK_CHECK_EQ(other.summary.parameters_sha256, overlap.summary.parameters_sha256);
      }
    }
    const Trained none = train("none");
    RANK_CHECK_EQ(none.summary.communication.steps, 0);
    const bool same = none.summary.parameters_sha256 == overlap.summary.parameters_sha256;
    RANK_CHECK_EQ(same, rank.size() == 1);
  });
}

TEST_CASE("clipping, schedules and scaling with the world decide how far a step goes") {
  RunOnRanks([](Rank& rank) {
    TrainFlags flags = Flags(rank.size(), 1);
    flags.momentum = 0;
    const auto length = [&](const TrainFlags& changed) {
      TrainFlags still = changed;
      still.lr = 0;
      const Trained moved = Train(rank.group(), changed), initial = Train(rank.group(), still);
      double squares = 0;
      for (size_t i = 0; i < moved.values.size(); ++i) {
        squares += std::pow(static_cast<double>(moved.values[i]) - static_cast<double>(initial.values[i]), 2);
      }
      return std::sqrt(squares);
    };
    const double plain = length(flags);
    RANK_CHECK(plain > 0.005);
    TrainFlags changed = flags;
    changed.clip_norm = 0.01;
    RANK_CHECK(std::abs(length(changed) - 0.01 * 0.05) < 1e-5, length(changed));
    changed = flags;
    changed.lr_scale = true;
    RANK_CHECK(std::abs(length(changed) / plain - rank.size()) < 0.01);
    changed = flags;
    changed.schedule.warmup_steps = 4;
    RANK_CHECK(std::abs(length(changed) / plain - 0.25) < 0.01);
    if (rank.size() > 1) return;
    changed = flags;
    changed.clip_norm = 0.01;
    changed.no_ddp = true;
    RANK_CHECK(std::abs(length(changed) - 0.01 * 0.05) < 1e-5);
  });
}

TEST_CASE("a loss that is not finite stops all ranks in that step, and says which and whose") {
  RunOnRanks([](Rank& rank) {
    TrainFlags flags = Flags(rank.size(), 40);
    const Dataset data = EmbeddedDigits();
    Console console(false, false);
    const std::unique_ptr<nn::Model> model = nn::MakeMlp(data.features(), {32, 24}, data.classes, flags.batch);
    absl::StatusOr<std::unique_ptr<Trainer>> trainer = Trainer::Create(rank.group(), flags, data, *model, console);
    RANK_CHECK_OK(trainer);
    // A bias of the last layer is spoilt on one rank; that is the one that is named.
    const int spoilt = rank.size() - 1;
    Replica& replica = (*trainer)->replica();
    const size_t bias = replica.offset(model->parameters().size() - 1);
    if (rank.rank() == spoilt) replica.values()[bias] = NAN;
    const std::vector<float> before(replica.values().begin(), replica.values().end());
    const absl::Status status = (*trainer)->Run().status();
    RANK_CHECK_STATUS(status, absl::StatusCode::kOutOfRange, absl::StrCat("in step 1 on rank ", spoilt), "--lr");
    RANK_CHECK(IsAgreed(status));
    // The step changed nothing.
    for (size_t i = 0; i < before.size(); ++i) {
      RANK_CHECK(replica.values()[i] == before[i] || (rank.rank() == spoilt && i == bias));
    }
    rank.Meet();
  });
}

TEST_CASE("under a gradient scaler a step that is not finite is left out, and training goes on alike on all ranks") {
  RunOnRanks([](Rank& rank) {
    // Scaled by a power of two and back: the same but for what rounds to nothing.
    TrainFlags flags = Flags(rank.size(), 40);
    flags.grad_scaler = true;
    flags.clip_norm = 0.5;  // of the gradients that are unscaled
    TrainFlags plain = flags;
    plain.grad_scaler = false;
    const Trained scaled = Train(rank.group(), flags);
    CheckClose(scaled, Train(rank.group(), plain), 1e-5);
    RANK_CHECK_EQ(scaled.summary.skipped_steps, 0);

    // One rank's bias is spoilt: no step is made from then on, and no rank's parameters change.
    const SharedFolder folder(rank);
    flags.steps = 5;
    flags.clip_norm = 1;
    flags.deterministic = false;  // which would find that the ranks differ
    flags.save = folder.File("scaled");
    const Dataset data = EmbeddedDigits();
    Console console(false, false);
    const std::unique_ptr<nn::Model> model = nn::MakeMlp(data.features(), {32, 24}, data.classes, flags.batch);
    absl::StatusOr<std::unique_ptr<Trainer>> trainer = Trainer::Create(rank.group(), flags, data, *model, console);
    RANK_CHECK_OK(trainer);
    Replica& replica = (*trainer)->replica();
    const size_t bias = replica.offset(model->parameters().size() - 1);
    const float whole = replica.values()[bias];
    if (rank.rank() == rank.size() - 1) replica.values()[bias] = NAN;
    const std::vector<float> before(replica.values().begin(), replica.values().end());
    const absl::StatusOr<Summary> summary = (*trainer)->Run();
    RANK_CHECK_OK(summary);
    RANK_CHECK_EQ(summary->skipped_steps, 5);
    for (size_t i = 0; i < before.size(); ++i) {
      RANK_CHECK(replica.values()[i] == before[i] || (i == bias && std::isnan(before[i])));
    }
    // The scale has come down to 65536 / 2^5, and is what a resumed training goes on with: it grows to no more in 20
    // steps. Without a scaler it cannot be resumed.
    rank.Meet();
    if (rank.size() == 1) return;  // there the spoilt bias was saved
    RANK_CHECK(std::isfinite(whole));
    TrainFlags resumed = flags;
    resumed.deterministic = true;
    resumed.resume = flags.save;
    resumed.save = folder.File("resumed");
    resumed.steps = 25;
    RANK_CHECK_EQ(Train(rank.group(), resumed).summary.skipped_steps, 5);
    if (rank.rank() == 0) {
      const std::string text = [&] {
        const std::vector<uint8_t> bytes = RANK_VALUE(ReadFile(resumed.save));
        return std::string(bytes.begin(), bytes.begin() + 2000);
      }();
      RANK_CHECK(text.find("\"loss_scale\":2048.0") != std::string::npos, text);
      RANK_CHECK(text.find("\"growth_tracker\":20") != std::string::npos, text);
    }
    TrainFlags without = resumed;
    without.grad_scaler = false;
    without.resume = resumed.save;
    const std::unique_ptr<nn::Model> other = nn::MakeMlp(data.features(), {32, 24}, data.classes, flags.batch);
    RANK_CHECK_STATUS(Trainer::Create(rank.group(), without, data, *other, console).status(),
                      absl::StatusCode::kFailedPrecondition, "give --grad_scaler");
    rank.Meet();
  });
}

TEST_CASE("one rank trains alike with and without DistributedDataParallel") {
  RunOnRanks([](Rank&) {
    TrainFlags flags = Flags(1, 20);
    const Trained with = TrainAlone(flags);
    flags.no_ddp = true;
    RANK_CHECK_EQ(TrainAlone(flags).summary.parameters_sha256, with.summary.parameters_sha256);
  });
}

TEST_CASE("a resumed training continues bit for bit") {
  RunOnRanks([](Rank& rank) {
    const SharedFolder folder(rank);
    for (const std::string optimizer : {"sgd", "adam"}) {
      // Stopped within the second epoch (30 steps each), resumed over the end of it.
      TrainFlags flags = Flags(rank.size(), 64);
      flags.optimizer = optimizer;
      flags.lr = 0.01;
      const Trained whole = Train(rank.group(), flags);

      TrainFlags first = flags;
      first.steps = 41;
      first.save = folder.File(optimizer);
      Train(rank.group(), first);
      TrainFlags second = flags;
      second.resume = first.save;
      const Trained resumed = Train(rank.group(), second);
      RANK_CHECK_EQ(resumed.summary.parameters_sha256, whole.summary.parameters_sha256);
      RANK_CHECK_EQ(resumed.summary.test_accuracy, whole.summary.test_accuracy);
      RANK_CHECK_EQ(resumed.summary.steps, 64);

      // Over an end: stopped in the first step, at an epoch's end and beside it, and in the last step. What the next
      // run reads is what the run before wrote on its way, not at its end.
      TrainFlags part = flags;
      for (const int steps : {1, 29, 30, 31, 60, 63}) {
        part.steps = steps;
        part.save = folder.File(absl::StrCat(optimizer, steps));
        part.save_every = 7;
        Train(rank.group(), part);
        part.resume = part.save;
      }
      part.steps = 64;
      part.save.clear();
      const Trained last = Train(rank.group(), part);
      RANK_CHECK_EQ(last.summary.parameters_sha256, whole.summary.parameters_sha256);
      // The loss is the epoch's, also of steps before the checkpoint.
      RANK_CHECK(std::abs(*last.summary.final_loss - *whole.summary.final_loss) < 1e-12);

      // Once more, by one rank alone: the checkpoint does not depend on the number of ranks.
      second.batch = kGlobalBatch;
      CheckClose(TrainAlone(second), whole, 1e-4);
      rank.Meet();
    }
  });
}

TEST_CASE("the rate of a resumed training falls by epochs, also with other batches") {
  RunOnRanks([](Rank& rank) {
    const SharedFolder folder(rank);
    TrainFlags flags = Flags(rank.size(), 30);  // an epoch, behind which nothing changes
    flags.schedule = {.kind = Schedule::Kind::kStep, .gamma = 0};
    flags.lr_step = 1;
    flags.save = folder.File("first");
    const Trained first = Train(rank.group(), flags);
    flags.resume = std::exchange(flags.save, "");
    flags.batch = flags.batch * 3 / 4;
    flags.steps = 45;
    RANK_CHECK_EQ(Train(rank.group(), flags).summary.parameters_sha256, first.summary.parameters_sha256);
  });
}

TEST_CASE("in bfloat16 ranks train together as far as in float32, with the same bits for any buckets and resumed") {
  if (!nn::HasBfloat16()) return;
  RunOnRanks([](Rank& rank) {
    const SharedFolder folder(rank);
    TrainFlags flags = Flags(rank.size(), 64);
    const Trained exact = Train(rank.group(), flags);
    flags.amp = "bf16";
    const Trained whole = Train(rank.group(), flags);
    RANK_CHECK(whole.summary.parameters_sha256 != exact.summary.parameters_sha256);
    const auto check_as_good = [&](const Trained& trained) {
      RANK_CHECK(std::abs(*trained.summary.final_loss - *exact.summary.final_loss) < 0.01, *trained.summary.final_loss,
                 " is not ", *exact.summary.final_loss);
      RANK_CHECK(std::abs(trained.summary.test_accuracy - exact.summary.test_accuracy) < 2.5 / 360);
    };
    check_as_good(whole);
    TrainFlags first = flags;
    first.bucket_mb = 0.001;
    first.steps = 41;
    first.save = folder.File("a");
    Train(rank.group(), first);
    TrainFlags second = flags;
    second.resume = first.save;
    RANK_CHECK_EQ(Train(rank.group(), second).summary.parameters_sha256, whole.summary.parameters_sha256);
    // Accumulated, and with a loss scale.
    TrainFlags parts = flags;
    parts.accumulate = 2;
    parts.batch = flags.batch / 2;
    parts.grad_scaler = true;
    const Trained scaled = Train(rank.group(), parts);
    RANK_CHECK_EQ(scaled.summary.skipped_steps, 0);
    check_as_good(scaled);
    rank.Meet();
  });
}

TEST_CASE("a run that ends in an error has saved on its way") {
  RunOnRanks([](Rank& rank) {
    const SharedFolder folder(rank);
    TrainFlags flags = Flags(rank.size(), 64);
    const Trained whole = Train(rank.group(), flags);
    TrainFlags part = flags;
    part.save = folder.File("a");
    part.save_every = 20;
    part.steps = 47;
    Train(rank.group(), part);
    // The next run cannot write, learns it in the middle of an epoch, and ends on all ranks with rank 0's error.
    part.resume = part.save;
    part.steps = 64;
    part.save_every = 1;
    const Dataset data = EmbeddedDigits();
    Console console(false, false);
    const std::unique_ptr<nn::Model> model = nn::MakeMlp(data.features(), {32, 24}, data.classes, part.batch);
    absl::StatusOr<std::unique_ptr<Trainer>> trainer = Trainer::Create(rank.group(), part, data, *model, console);
    RANK_CHECK_OK(trainer);
    const std::string unwritable = part.save + ".tmp";
    if (rank.rank() == 0) RANK_CHECK(std::filesystem::create_directory(unwritable));
    const absl::Status status = (*trainer)->Run().status();
    RANK_CHECK_STATUS(status, absl::StatusCode::kFailedPrecondition, unwritable);
    RANK_CHECK(IsAgreed(status));
    if (rank.rank() == 0) std::filesystem::remove(unwritable);
    // What was there before is still there.
    part.save.clear();
    part.save_every = 0;
    RANK_CHECK_EQ(Train(rank.group(), part).summary.parameters_sha256, whole.summary.parameters_sha256);
    rank.Meet();
  });
}

TEST_CASE("all ranks learn in the same step what one of them knows") {
  RunOnRanks([](Rank& rank) {
    absl::StatusOr<StepNotice> notice = StepNotice::Create(rank.group());
    RANK_CHECK_OK(notice);
    for (int step = 0; step < 50; ++step) {
      const int speaker = step % (rank.size() + 1);  // in some steps nobody
      RANK_CHECK_OK(notice->Begin(speaker == rank.rank() ? 100 + step : 0));
      RANK_CHECK_EQ(RANK_VALUE(notice->End()), speaker < rank.size() ? 100 + step : 0);
    }
  });
}

TEST_CASE("a checkpoint of another run is refused on every rank") {
  RunOnRanks([](Rank& rank) {
    const SharedFolder folder(rank);
    TrainFlags flags = Flags(rank.size(), 41);
    flags.save = folder.File("a");
    Train(rank.group(), flags);
    flags.resume = flags.save;
    const Dataset data = EmbeddedDigits();
    Console console(false, false);
    const auto create = [&](const TrainFlags& changed, std::vector<int> hidden) {
      const std::unique_ptr<nn::Model> model = nn::MakeMlp(data.features(), hidden, data.classes, changed.batch);
      return Trainer::Create(rank.group(), changed, data, *model, console).status();
    };
    RANK_CHECK_STATUS(create(flags, {32, 25}), absl::StatusCode::kFailedPrecondition, "3.weight [24, 32]",
                      "3.weight [25, 32]");
    TrainFlags changed = flags;
    changed.optimizer = "adam";
    RANK_CHECK_STATUS(create(changed, {32, 24}), absl::StatusCode::kFailedPrecondition, "--optimizer=sgd");
    changed = flags;
    changed.seed = 4;
    RANK_CHECK_STATUS(create(changed, {32, 24}), absl::StatusCode::kFailedPrecondition, "give --seed=3");
    changed = flags;
    changed.batch = flags.batch + 1;
    RANK_CHECK_STATUS(create(changed, {32, 24}), absl::StatusCode::kFailedPrecondition, "global batches");
    changed = flags;
    changed.momentum = 0;
    RANK_CHECK_STATUS(create(changed, {32, 24}), absl::StatusCode::kFailedPrecondition, "1.weight/momentum");
    changed.momentum = 0.5;
    RANK_CHECK_STATUS(create(changed, {32, 24}), absl::StatusCode::kFailedPrecondition, "saved with --momentum=0.9");
    changed = flags;
    changed.weight_decay = 0.5;
    RANK_CHECK_STATUS(create(changed, {32, 24}), absl::StatusCode::kFailedPrecondition, "this run has --weight_decay");
    rank.Meet();
  });
}

TEST_CASE("ranks agree on an error, and say whose it is") {
  RunOnRanks([](Rank& rank) {
    ddp::ProcessGroup& group = rank.group();
    RANK_CHECK_OK(AgreeOn(group, absl::OkStatus()));
    const absl::Status same = AgreeOn(group, absl::NotFoundError("no file"));
    RANK_CHECK_STATUS(same, absl::StatusCode::kNotFound, "no file");
    RANK_CHECK(IsAgreed(same));
    RANK_CHECK_EQ(same.message(), "no file");
    if (rank.size() == 1) return;
    const absl::Status last = AgreeOn(group, rank.rank() == rank.size() - 1 ? same : absl::OkStatus());
    RANK_CHECK_EQ(last.message(), absl::StrCat("rank ", rank.size() - 1, ": no file"));
    const absl::Status differ = RequireSame(group, absl::StrCat("a\nb=", rank.rank() > 0), "give all the same");
    RANK_CHECK_EQ(differ.message(), "rank 1 has b=1, rank 0 has b=0; give all the same");
  });
}

}  // namespace examples
