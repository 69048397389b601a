// SPDX-License-Identifier: Apache-2.0
// Trains a LibTorch model. Usage: mpirun -n 2 train_libtorch [SAMPLES_PER_STEP [STEPS]]
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "ddp/ddp.h"
#include "ddp/torch.h"
#include "examples/data/dataset.h"
#include "examples/data/sampler.h"

namespace F = torch::nn::functional;

absl::Status Train(int batch, int steps) {
  auto context = ddp::Context::Create();
  if (!context.ok()) return context.status();
  const int rank = (*context)->rank(), ranks = (*context)->world_size(), mine = batch / ranks;
  if (mine * ranks != batch) return absl::InvalidArgumentError("the batch must be a multiple of the number of ranks");

  torch::manual_seed(1 + rank);  // ranks may differ here: Create copies rank 0's values
  torch::nn::Sequential net(torch::nn::Linear(64, 128), torch::nn::ReLU(), torch::nn::Linear(128, 10));
  auto model = ddp::DdpModule::Create((*context)->world(), *net);
  if (!model.ok()) return model.status();
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));

  const examples::Dataset data = examples::EmbeddedDigits();
  examples::DistributedSampler sampler({.samples = data.train.count(),
                                        .batch = size_t(mine),
                                        .rank = rank,
                                        .world_size = ranks,
                                        .seed = 1,
                                        .drop_last = true});
  torch::Tensor images = torch::empty({mine, 64}), labels = torch::empty({mine}, torch::kInt32), loss;
  for (int step = 0; step < steps; ++step) {
    const size_t b = size_t(step) % sampler.batches();
    if (b == 0) sampler.SetEpoch(size_t(step) / sampler.batches());
    if (absl::Status s = examples::GatherBatch(data, data.train, sampler.Batch(b), {}, images.data_ptr<float>(),
                                               labels.data_ptr<int>());
        !s.ok()) {
      return s;
    }
    (*model)->ZeroGrad();
    loss = F::cross_entropy(net->forward(images), labels.to(torch::kInt64));
    loss.backward();
    if (absl::Status status = (*model)->FinishBackward(); !status.ok()) return status;
    optimizer.step();
  }
  double sum = 0, squares = 0;
  for (const torch::Tensor& p : net->parameters()) {
    sum += p.sum().item<double>();
    squares += p.square().sum().item<double>();
  }
  std::printf("rank %d of %d: loss %.4f, parameters sum %.6f, squares %.6f, overlap %.0f %%\n", rank, ranks,
              loss.item<double>(), sum, squares, 100 * (*model)->ddp().statistics().overlap);
  return absl::OkStatus();
}

int main(int argc, char** argv) {
  int numbers[] = {64, 300};
  for (int i = 1; i < argc; ++i) {
    const bool help = std::strcmp(argv[i], "--help") == 0;
    if (help || i > 2 || (numbers[i - 1] = std::atoi(argv[i])) < 1) {
      std::fputs("usage: mpirun -n 2 train_libtorch [SAMPLES_OF_A_STEP [STEPS]]\n", help ? stdout : stderr);
      if (help) std::fputs(examples::kDigitsAttribution, stdout);
      return help ? 0 : 2;
    }
  }
  const absl::Status status = Train(numbers[0], numbers[1]);
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
