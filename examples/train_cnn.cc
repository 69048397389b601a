// SPDX-License-Identifier: Apache-2.0
// Trains a convolutional network to classify images, on one or several ranks.
#include <memory>
#include <string>

#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "examples/nn/cnn.h"
#include "examples/train/train_main.h"

ABSL_FLAG(std::string, model, "lenet",
          "lenet (two convolutions, made for MNIST), resnet20 (made for CIFAR-10), resnet50 (made for ImageNet)");
ABSL_FLAG(bool, sync_bn, false,
          "normalise batches by the mean and variance over the batches of all ranks (resnet20, resnet50), for batches "
          "too small to have good ones themselves: N ranks then train as one does on the whole batch");

namespace {

constexpr absl::string_view kIntroduction =
    R"(train_cnn trains a convolutional network to classify images. With several ranks, each rank trains on its own
samples, and the gradients are averaged while the backward pass is still running.

  train_cnn                                     one rank, on the built-in digits
  mpirun -n 2 train_cnn --data=FOLDER           LeNet on MNIST: the four IDX files in FOLDER, plain or .gz
  mpirun -n 2 train_cnn --model=resnet20 --data=FOLDER --augment --epochs=30 --schedule=cosine --lr=0.1 \
      --weight-decay=1e-4 --batch=64            ResNet-20 on CIFAR-10: its six binary files in FOLDER
  train_cnn --model=resnet20 --synthetic --steps=100
                                                measures speed, without data
  mpirun -n 2 train_cnn --model=resnet50 --synthetic --batch=8 --steps=20
                                                the same for 224 x 224 pixels and 1000 classes
  mpirun -n 2 train_cnn --model=resnet50 --data=FOLDER --augment --loader-threads=4
                                                on JPEG files in FOLDER/train/CLASS and FOLDER/val/CLASS
  mpirun -n 2 train_cnn --data=FOLDER --device=cuda --amp=fp16
                                                on GPUs, one per rank, in mixed precision
  train_cnn --batch=32 --accumulate=4           trains like train_cnn --batch=128, with less memory (LeNet)
  mpirun -n 4 train_cnn --model=resnet20 --data=FOLDER --batch=4 --sync-bn
                                                batch normalisation over all 16 images, not over 4 on each rank
  train_cnn --save=cnn.ckpt --epochs=2          saves a checkpoint after each epoch ...
  train_cnn --resume=cnn.ckpt --epochs=5        ... and continues from there to the fifth epoch

scripts/fetch_data.sh shows where to download the data. Write flags as --name=value or --name value. A dash in a name is
the same as an underscore.
)";

nn::ImageShape ShapeOf(const examples::Dataset& data) { return {data.channels, data.height, data.width}; }

absl::StatusOr<examples::ModelChoice> ReadModel() {
  const std::string name = absl::GetFlag(FLAGS_model);
  examples::ModelChoice choice;
  choice.description = name;
  choice.sync_bn = absl::GetFlag(FLAGS_sync_bn);
  if (name == "lenet" && choice.sync_bn) {
    return absl::InvalidArgumentError("--sync_bn: --model=lenet has no batch normalisation; leave it out");
  }
  if (name == "lenet") {
    choice.check = [](const examples::Dataset& data) {
      if (data.height >= nn::kLenetSmallestImage && data.width >= nn::kLenetSmallestImage) return absl::OkStatus();
      return absl::InvalidArgumentError(absl::StrCat("--model=lenet takes images of at least ", nn::kLenetSmallestImage,
                                                     " x ", nn::kLenetSmallestImage, " pixels, these have ",
                                                     data.height, " x ", data.width, "; give --model=resnet20"));
    };
    choice.make = [](const examples::Dataset& data, int max_batch, nn::Device& device) {
      return nn::MakeLenet(ShapeOf(data), data.classes, max_batch, device);
    };
  } else if (name == "resnet20") {
    choice.channels = 3;
    choice.height = choice.width = 32;
    choice.make = [](const examples::Dataset& data, int max_batch, nn::Device& device) {
      return nn::MakeResnet20(ShapeOf(data), data.classes, max_batch, device);
    };
  } else if (name == "resnet50") {
    choice.channels = 3;
    choice.height = choice.width = 224;
    choice.classes = 1000;
    choice.make = [](const examples::Dataset& data, int max_batch, nn::Device& device) {
      return nn::MakeResnet50(ShapeOf(data), data.classes, max_batch, device);
    };
  } else {
    return absl::InvalidArgumentError(
        absl::StrCat("--model=", name, " is not known: it may be lenet, resnet20, resnet50"));
  }
  return choice;
}

}  // namespace

int main(int argc, char** argv) {
  constexpr absl::string_view kOwnFlags[] = {"model", "sync_bn"};
  return examples::TrainMain(argc, argv, {"train_cnn", kIntroduction, kOwnFlags, &ReadModel});
}
