// Trains a multi-layer perceptron to recognise digits, on one rank or on many.
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "examples/train/train_main.h"

ABSL_FLAG(std::string, hidden, "1024,1024", "widths of the hidden layers, from the input's side; empty: none");

namespace {

constexpr absl::string_view kIntroduction =
    R"(train_mlp trains a multi-layer perceptron to recognise handwritten digits. Started on several ranks, each trains
on its share of every batch, and their gradients are averaged while the backward pass is still running.

  train_mlp                                     one rank, on the images built into the program
  mpirun -n 2 train_mlp                         the same on two ranks
  torchrun --nproc_per_node=2 --no-python train_mlp
                                                the same, started by PyTorch's launcher; srun -n 2 works too
  mpirun -n 2 train_mlp --data=FOLDER           on MNIST: the four IDX files in FOLDER, plain or .gz
  train_mlp --batch=128                         trains as mpirun -n 2 train_mlp --batch=64 does
  train_mlp --save=mlp.ckpt --epochs=2          saves a checkpoint after each epoch ...
  train_mlp --resume=mlp.ckpt --epochs=5        ... and goes on from there, up to the fifth
  mpirun -n 2 train_mlp --steps=200 --no-sync   what a step costs without communication
  mpirun -n 4 train_mlp --device=cuda --tf32    on four GPUs

Flags are written --name=value or --name value; a dash in a name is as good as an underscore.
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
