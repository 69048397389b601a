// SPDX-License-Identifier: Apache-2.0
// Trains a ResNet-18 of LibTorch's on random images, on CPUs or GPUs. See --help.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "ddp/ddp.h"
#include "ddp/torch.h"

namespace {

namespace nn = torch::nn;

constexpr char kHelp[] = R"(train_resnet18 trains a ResNet-18 of LibTorch's on random images.

  mpirun -n 2 train_resnet18
  mpirun -n 4 train_resnet18 --device=cuda --batch=512 --image=224 --steps=200
  train_resnet18 --device=cuda --batch=128 --image=224 --steps=20 --compare=15
                          how fast it is beside the same loop without libddp

  --device=cpu|cuda       (cpu)
  --batch=N               images of a step, over all ranks (8)
  --image=N               their height and width in pixels (32)
  --steps=N               steps to train (10)
  --warmup=N              steps before the clock starts (5)
  --channels_last=0|1     memory format (0)
  --sync_bn=0|1           batch normalisation over the batches of all ranks (0)
  --release=0|1           gradients are released by zero_grad() instead of set to zero (0)
  --compare=N             N times in turn: --steps without libddp, then with it. Prints the ratio of their speeds
)";

struct Flags {
  std::string device = "cpu";
  int64_t batch = 8, image = 32, steps = 10, warmup = 5, channels_last = 0, sync_bn = 0, release = 0, compare = 0;
};

absl::Status Read(int argc, char** argv, Flags* flags) {
  const std::map<std::string, int64_t*> numbers = {
      {"--batch", &flags->batch},     {"--image", &flags->image},     {"--steps", &flags->steps},
      {"--warmup", &flags->warmup},   {"--compare", &flags->compare}, {"--channels_last", &flags->channels_last},
      {"--sync_bn", &flags->sync_bn}, {"--release", &flags->release}};
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i], name = argument.substr(0, argument.find('='));
    const std::string value = argument.substr(std::min(name.size() + 1, argument.size()));
    const auto number = numbers.find(name);
    if (number != numbers.end() && absl::SimpleAtoi(value, number->second) && *number->second >= 0) continue;
    if (name == "--device" && (value == "cpu" || value == "cuda")) {
      flags->device = value;
      continue;
    }
    return absl::InvalidArgumentError(absl::StrCat(argument, " is not a flag, or has a bad value; see --help"));
  }
  if (flags->batch < 1 || flags->image < 1 || flags->steps < 1) {
    return absl::InvalidArgumentError("--batch, --image and --steps must be at least 1");
  }
  return absl::OkStatus();
}

// Batch normalisation of each rank's batch, or, with a group, of the batches of all its ranks.
void AddNorm(nn::Sequential& layers, int64_t channels, ddp::ProcessGroup* group) {
  const nn::BatchNormOptions options(channels);
  if (group == nullptr) {
    layers->push_back(nn::BatchNorm2d(options));
  } else {
    layers->push_back(ddp::SyncBatchNorm(options, *group));
  }
}

nn::Conv2d Convolution(int64_t in, int64_t out, int64_t size, int64_t stride) {
  return nn::Conv2d(nn::Conv2dOptions(in, out, size).stride(stride).padding(size / 2).bias(false));
}

struct BlockImpl : nn::Module {
  BlockImpl(int64_t in, int64_t out, int64_t stride, ddp::ProcessGroup* group) {
    body->push_back(Convolution(in, out, 3, stride));
    AddNorm(body, out, group);
    body->push_back(nn::ReLU());
    body->push_back(Convolution(out, out, 3, 1));
    AddNorm(body, out, group);
    if (in != out) {
      shortcut->push_back(Convolution(in, out, 1, stride));
      AddNorm(shortcut, out, group);
    }
    register_module("body", body);
    register_module("shortcut", shortcut);
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return torch::relu(body->forward(x) + (shortcut->is_empty() ? x : shortcut->forward(x)));
  }
  nn::Sequential body, shortcut;
};
TORCH_MODULE(Block);

nn::Sequential ResNet18(ddp::ProcessGroup* group) {
  nn::Sequential net;
  net->push_back(Convolution(3, 64, 7, 2));
  AddNorm(net, 64, group);
  net->push_back(nn::ReLU());
  net->push_back(nn::MaxPool2d(nn::MaxPool2dOptions(3).stride(2).padding(1)));
  for (int64_t in = 64, out = 64; out <= 512; in = out, out *= 2) {
    net->push_back(Block(in, out, in == out ? 1 : 2, group));
    net->push_back(Block(out, out, 1, group));
  }
  net->push_back(nn::AdaptiveAvgPool2d(nn::AdaptiveAvgPool2dOptions(1)));
  net->push_back(nn::Flatten());
  net->push_back(nn::Linear(512, 1000));
  return net;
}

class Trainer {
 public:
  Trainer(const Flags& flags, ddp::Context& context)
      : flags_(flags),
        world_(context.world()),
        device_(flags.device == "cuda"
                    ? torch::Device(torch::kCUDA, static_cast<c10::DeviceIndex>(context.device().index))
                    : torch::Device(torch::kCPU)),
        guard_(device_),
        net_(ResNet18(flags.sync_bn != 0 ? &world_ : nullptr)) {
    net_->to(device_);
    const auto format = flags.channels_last != 0 ? torch::MemoryFormat::ChannelsLast : torch::MemoryFormat::Contiguous;
    for (torch::Tensor& p : net_->parameters()) {
      if (p.dim() == 4) p.set_data(p.contiguous(format));
    }
    // All ranks draw the whole batch and take their part, so that the numbers do not depend on how many there are.
    const int64_t mine = flags.batch / world_.size();
    torch::manual_seed(1);
    const auto part = [&](const torch::Tensor& all) { return all.narrow(0, world_.rank() * mine, mine); };
    images_ = part(torch::randn({flags.batch, 3, flags.image, flags.image})).to(device_).contiguous(format);
    labels_ = part(torch::randint(1000, {flags.batch})).to(device_);
    optimizer_ = std::make_unique<torch::optim::SGD>(net_->parameters(), torch::optim::SGDOptions(0.01).momentum(0.9));
  }

  // The seconds of a step; with a model over all ranks.
  absl::StatusOr<double> Run(bool distributed) {
    std::unique_ptr<ddp::DdpModule> model;
    if (distributed) {
      auto created = ddp::DdpModule::Create(world_, *net_);
      if (!created.ok()) return created.status();
      model = *std::move(created);
    }
    std::chrono::steady_clock::time_point begin;
    for (int64_t step = -flags_.warmup; step < flags_.steps; ++step) {
      if (step == 0) begin = Now();
      if (absl::Status s = Step(model.get()); !s.ok()) return s;
    }
    const std::chrono::duration<double> seconds = Now() - begin;
    if (distributed) overlap_ = model->ddp().statistics().overlap;
    return seconds.count() / static_cast<double>(flags_.steps);
  }

  void Print(double seconds) {
    double sum = 0, squares = 0;
    int64_t count = 0;
    for (const torch::Tensor& p : net_->parameters()) {
      count += p.numel();
      sum += p.sum().item<double>();
      squares += p.square().sum().item<double>();
    }
    std::printf(
        "rank %d of %d: %lld parameters, loss %.4f, parameters sum %.4f, squares %.4f, %.1f images/s, overlap %.0f "
        "%%\n",
        world_.rank(), world_.size(), static_cast<long long>(count), loss_.item<double>(), sum, squares,
        static_cast<double>(flags_.batch) / seconds, 100 * overlap_);
  }

  // The same module in turn without and with libddp.
  absl::Status Compare() {
    std::vector<double> ratios;
    for (int64_t round = 0; round < flags_.compare; ++round) {
      const absl::StatusOr<double> alone = Run(false);
      if (!alone.ok()) return alone.status();
      const absl::StatusOr<double> together = Run(true);
      if (!together.ok()) return together.status();
      ratios.push_back(*alone / *together);
      if (world_.rank() != 0) continue;
      std::printf("round %d: without libddp %.3f ms a step, with it %.3f ms, speed %.3f times as high\n",
                  static_cast<int>(round), *alone * 1e3, *together * 1e3, ratios.back());
    }
    std::sort(ratios.begin(), ratios.end());
    if (world_.rank() == 0) {
      std::printf("%d ranks, median of %d rounds: %.3f times the speed without libddp (%.3f to %.3f)\n", world_.size(),
                  static_cast<int>(ratios.size()), ratios[ratios.size() / 2], ratios.front(), ratios.back());
    }
    return absl::OkStatus();
  }

 private:
  absl::Status Step(ddp::DdpModule* model) {
    if (model != nullptr) {
      if (absl::Status s = model->BeginForward(); !s.ok()) return s;
    }
    loss_ = nn::functional::cross_entropy(net_->forward(images_), labels_);
    if (model != nullptr && flags_.release == 0) {
      model->ZeroGrad();
    } else {
      optimizer_->zero_grad();
    }
    loss_.backward();
    if (model != nullptr) {
      if (absl::Status s = model->FinishBackward(); !s.ok()) return s;
    }
    optimizer_->step();
    return absl::OkStatus();
  }

  std::chrono::steady_clock::time_point Now() const {
    if (device_.is_cuda()) torch::cuda::synchronize(device_.index());
    return std::chrono::steady_clock::now();
  }

  const Flags flags_;
  ddp::ProcessGroup& world_;
  const torch::Device device_;
  const c10::DeviceGuard guard_;
  nn::Sequential net_;
  torch::Tensor images_, labels_, loss_;
  std::unique_ptr<torch::optim::SGD> optimizer_;
  double overlap_ = 0;
};

absl::Status Train(const Flags& flags) {
  ddp::ContextOptions options;
  if (flags.device == "cuda") options.device = {ddp::Device::Kind::kCuda, -1};
  const auto context = ddp::Context::Create(options);
  if (!context.ok()) return context.status();
  if (flags.batch % (*context)->world_size() != 0) {
    return absl::InvalidArgumentError("--batch must be a multiple of the number of ranks");
  }
  torch::manual_seed((*context)->rank());  // ranks may differ: Create copies rank 0's values
  Trainer trainer(flags, **context);
  if (flags.compare > 0) return trainer.Compare();
  const absl::StatusOr<double> seconds = trainer.Run(true);
  if (seconds.ok()) trainer.Print(*seconds);
  return seconds.status();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 2 && std::string(argv[1]) == "--help") {
    std::fputs(kHelp, stdout);
    return 0;
  }
  Flags flags;
  absl::Status status = Read(argc, argv, &flags);
  const int usage = status.ok() ? 1 : 2;
  try {
    if (status.ok()) status = Train(flags);
  } catch (const c10::Error& e) {  // LibTorch's own errors
    status = absl::InternalError(e.what_without_backtrace());
  }
  if (!status.ok()) std::fprintf(stderr, "train_resnet18: %s\n", status.ToString().c_str());
  return status.ok() ? 0 : usage;
}
