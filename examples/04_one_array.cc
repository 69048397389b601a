// SPDX-License-Identifier: Apache-2.0
// A model that lives in one array: its values are slices of an array of the program's, its gradients slices of an array
// that the library reduces in place. llmc-like/train_arrays.c does the same in C.
//
//   mpirun -n 2 04_one_array    # prints the sum of all weights, 500.00, on both ranks
#include <cstdio>
#include <numeric>
#include <string>
#include <vector>

#include "ddp/ddp.h"

struct Tensor {
  std::string name;
  size_t offset, count;  // in elements; any size and order will do
};

absl::Status Train() {
  auto context = ddp::Context::Create();
  if (!context.ok()) return context.status();
  ddp::ProcessGroup& world = (*context)->world();

  const std::vector<Tensor> tensors = {{"embedding", 0, 500}, {"layer.0", 500, 123}, {"layer.1", 623, 377}};
  constexpr size_t kTotal = 1000;
  std::vector<float> values(kTotal);
  auto grads = world.Allocate(kTotal * sizeof(float), ddp::Device{});  // in place of calloc
  if (!grads.ok()) return grads.status();
  auto* const grad = static_cast<float*>(grads->data());

  std::vector<ddp::Parameter> parameters;
  for (const Tensor& t : tensors) {
    parameters.push_back({.name = t.name,
                          .value = {values.data() + t.offset, t.count},
                          .grad = grads->View(ddp::DType::kFloat32, t.offset * sizeof(float), t.count)});
  }
  auto model = ddp::DistributedDataParallel::Create(world, parameters);
  if (!model.ok()) return model.status();

  // The targets' mean over ranks is 0.5.
  const float target =
      world.size() == 1 ? 0.5f : static_cast<float>(world.rank()) / static_cast<float>(world.size() - 1);
  for (int step = 0; step < 100; ++step) {
    for (size_t t = tensors.size(); t-- > 0;) {  // the backward pass, from the last layer to the first
      for (size_t i = tensors[t].offset; i < tensors[t].offset + tensors[t].count; ++i) grad[i] = values[i] - target;
      (*model)->GradReady(t);
    }
    if (absl::Status s = (*model)->FinishBackward(); !s.ok()) return s;
    for (size_t i = 0; i < kTotal; ++i) values[i] -= 0.25f * grad[i];  // the optimizer sees one array
  }
  std::printf("rank %d of %d: %.2f\n", world.rank(), world.size(), std::accumulate(values.begin(), values.end(), 0.0));
  return absl::OkStatus();
}

int main() {
  const absl::Status status = Train();
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
