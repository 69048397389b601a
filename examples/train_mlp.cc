// SPDX-License-Identifier: Apache-2.0
// Trains a multi-layer perceptron to recognise digits, on one or several ranks.
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "examples/train/train_main.h"

ABSL_FLAG(std::string, hidden, "1024,1024", "widths of the hidden layers, first to last; empty: no hidden layer");

namespace {

constexpr absl::string_view kIntroduction =
    R"(train_mlp trains a multi-layer perceptron to recognise handwritten digits. With several ranks, each rank trains
on its own samples, and the gradients are averaged while the backward pass is still running.

  train_mlp                                     one rank, on the built-in images
  mpirun -n 2 train_mlp                         the same on two ranks
  torchrun --nproc_per_node=2 --no-python train_mlp
                                                the same with PyTorch's launcher; srun -n 2 works too
  mpirun -n 2 train_mlp --data=FOLDER           on MNIST: the four IDX files in FOLDER, plain or .gz
  train_mlp --batch=128                         trains like mpirun -n 2 train_mlp --batch=64
  train_mlp --save=mlp.ckpt --epochs=2          saves a checkpoint after each epoch ...
  train_mlp --resume=mlp.ckpt --epochs=5        ... and continues from there to the fifth epoch
  mpirun -n 2 train_mlp --steps=200 --reduce=none
                                                measures a step without communication
  mpirun -n 4 train_mlp --device=cuda --tf32    on four GPUs

Write flags as --name=value or --name value. A dash in a name is the same as an underscore.
)";

absl::StatusOr<examples::ModelChoice> ReadHidden() {
  constexpr int kWidest = 1 << 16;
  constexpr size_t kDeepest = 100;
  const std::string flag = absl::GetFlag(FLAGS_hidden);
  std::vector<int> hidden;
  for (const absl::string_view part : absl::StrSplit(flag, ',', absl::SkipEmpty())) {
    int width = 0;
    if (!absl::SimpleAtoi(part, &width) || width < 1 || width > kWidest) {
      return absl::InvalidArgumentError(absl::StrCat("--hidden=", flag, " cannot be understood: \"", part,
                                                     "\" is no width from 1 to ", kWidest,
                                                     "; write --hidden=1024,1024"));
    }
    hidden.push_back(width);
  }
  if (hidden.size() > kDeepest) {
    return absl::InvalidArgumentError(absl::StrCat("--hidden has ", hidden.size(), " layers, more than ", kDeepest));
  }
  examples::ModelChoice choice;
  choice.description =
      hidden.empty() ? "no hidden layer" : absl::StrCat("hidden layers of ", absl::StrJoin(hidden, ", "));
  choice.make = [hidden](const examples::Dataset& data, int max_batch, nn::Device& device) {
    return nn::MakeMlp(data.features(), hidden, data.classes, max_batch, device);
  };
  return choice;
}

}  // namespace

int main(int argc, char** argv) {
  constexpr absl::string_view kOwnFlags[] = {"hidden"};
  return examples::TrainMain(argc, argv, {"train_mlp", kIntroduction, kOwnFlags, &ReadHidden});
}
