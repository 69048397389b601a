// SPDX-License-Identifier: Apache-2.0
// Times one training step of the example MLP 784-1024-1024-10 on one thread: forward, loss, backward, SGD with
// momentum. The argument is the batch size. Compare with PyTorch's `torch_ddp.py --no-ddp --model mlp --threads 1
// --batch N`.
#include <benchmark/benchmark.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "absl/types/span.h"
#include "examples/nn/loss.h"
#include "examples/nn/model.h"
#include "examples/nn/optimizer.h"

namespace {

// Parameters in one flat range, each at a multiple of 256 bytes, as DistributedDataParallel lays them out.
std::vector<float*> Pointers(const nn::Model& model, std::vector<float>& memory) {
  constexpr size_t kAlignment = 64;
  std::vector<size_t> offsets;
  size_t end = 0;
  for (const nn::ParameterSpec& spec : model.parameters()) {
    offsets.push_back(end);
    end += (spec.count() + kAlignment - 1) / kAlignment * kAlignment;
  }
  memory.assign(end, 0.0f);
  std::vector<float*> pointers;
  pointers.reserve(offsets.size());
  for (const size_t offset : offsets) pointers.push_back(memory.data() + offset);
  return pointers;
}

void BM_MlpStep(benchmark::State& state) {
  const auto rows = static_cast<int>(state.range(0));
  nn::SetThreads(1);
  const std::unique_ptr<nn::Model> model = nn::MakeMlp(784, {1024, 1024}, 10, rows);
  std::vector<float> values, grads;
  const std::vector<float*> value_pointers = Pointers(*model, values);
  const std::vector<float*> grad_pointers = Pointers(*model, grads);
  model->Bind(value_pointers, grad_pointers);
  model->Initialize(1);
  nn::Sgd optimizer(values.size(), {.lr = 0.01, .momentum = 0.9});

  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> images(static_cast<size_t>(rows) * 784);
  for (float& x : images) x = normal(random);
  std::vector<int32_t> labels(static_cast<size_t>(rows));
  for (int32_t& label : labels) label = static_cast<int32_t>(random() % 10);

  for (auto step : state) {
    const absl::Span<const float> logits = model->Forward(images.data(), rows);
    benchmark::DoNotOptimize(nn::SoftmaxCrossEntropy(logits, labels, model->output_grad()));
    model->Backward([](size_t) {});
    optimizer.Step(absl::MakeSpan(values), grads);
  }
  state.SetItemsProcessed(state.iterations() * rows);
}
BENCHMARK(BM_MlpStep)->Arg(32)->Arg(64)->Arg(512)->Unit(benchmark::kMillisecond);

}  // namespace

// As BENCHMARK_MAIN, which ends with 1 where a flag is unknown.
int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) {
    std::fputs("see --help\n", stderr);
    return 2;
  }
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
}
