// SPDX-License-Identifier: Apache-2.0
// Trainings on JPEG files: the same bits with any number of decoding threads and after a resume; a damaged file ends
// all ranks.
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "ddp/collectives.h"
#include "examples/data/dataset.h"
#include "examples/nn/model.h"
#include "examples/train/trainer.h"
#include "tests/support/catch.h"
#include "tests/support/check.h"
#include "tests/support/jpeg_files.h"
#include "tests/support/ranks.h"

namespace examples {
namespace {

using ddp::testing::JpegFolder;
using ddp::testing::Rank;
using ddp::testing::RunOnRanks;

// Rank 0's folder, and its path on all ranks.
struct Shared {
  explicit Shared(Rank& rank) {
    if (rank.rank() == 0) {
      folder = std::make_unique<JpegFolder>();
      folder->WriteTwoClasses(13, 20);
    }
    path = ddp::testing::ValueOr(__FILE__, __LINE__, "GatherStrings",
                                 ddp::GatherStrings(rank.group(), folder != nullptr ? folder->path() : ""))[0];
  }

  std::unique_ptr<JpegFolder> folder;
  std::string path;
};

absl::StatusOr<Summary> Train(Rank& rank, const std::string& folder, const TrainFlags& flags) {
  const absl::StatusOr<Dataset> data = LoadDataset(folder, {3, 16, 16});
  RANK_CHECK_OK(data);
  Console console(false, false);
  nn::SetThreads(1);
  const std::unique_ptr<nn::Model> model = nn::MakeMlp(data->features(), {16}, data->classes, flags.batch);
  absl::StatusOr<std::unique_ptr<Trainer>> trainer = Trainer::Create(rank.group(), flags, *data, *model, console);
  RANK_CHECK_OK(trainer);
  return (*trainer)->Run();
}

TEST_CASE("Threads that decode, and a resume, do not change the training") {
  RunOnRanks([](Rank& rank) {
    Shared shared(rank);
    TrainFlags flags;
    flags.batch = 4;
    flags.epochs = 100;
    flags.steps = 12;
    flags.augment = true;
    flags.deterministic = true;
    const absl::StatusOr<Summary> one = Train(rank, shared.path, flags);
    RANK_CHECK_OK(one);
    flags.loader_threads = 3;
    const absl::StatusOr<Summary> three = Train(rank, shared.path, flags);
    RANK_CHECK_OK(three);
    RANK_CHECK_EQ(one->parameters_sha256, three->parameters_sha256);
    flags.steps = 5;  // in the middle of an epoch
    flags.save = shared.path + "/checkpoint";
    RANK_CHECK_OK(Train(rank, shared.path, flags));
    flags.steps = 12;
    flags.resume = flags.save;
    const absl::StatusOr<Summary> resumed = Train(rank, shared.path, flags);
    RANK_CHECK_OK(resumed);
    RANK_CHECK_EQ(one->parameters_sha256, resumed->parameters_sha256);
    rank.Meet();
  });
}

TEST_CASE("A damaged file ends all ranks, and is named") {
  for (const std::string part : {"train", "val"}) {
    RunOnRanks([part](Rank& rank) {
      Shared shared(rank);
      const std::string file = part + "/striped/12.jpg";
      if (rank.rank() == 0) shared.folder->Write(file, ddp::testing::MakeJpeg(20, 20, {1, 2, 3}).substr(0, 300));
      rank.Meet();
      TrainFlags flags;
      flags.batch = 2;
      flags.epochs = 2;
      const absl::Status status = Train(rank, shared.path, flags).status();
      RANK_CHECK(absl::IsDataLoss(status) || absl::IsAborted(status), status.ToString());
      RANK_CHECK(status.message().find(shared.path + "/" + file + ": it is damaged") != std::string::npos,
                 status.ToString());
      rank.Meet();
    });
  }
}

}  // namespace
}  // namespace examples
