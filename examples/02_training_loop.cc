// SPDX-License-Identifier: Apache-2.0
// The training loop: a line is fitted to points, of which each rank has its own.
//
//   mpirun -n 2 02_training_loop    # prints y = 3 x + 1 on both ranks
#include <cstdio>

#include "ddp/ddp.h"

absl::Status Train() {
  auto context = ddp::Context::Create();
  if (!context.ok()) return context.status();
  const int rank = (*context)->rank();

  float slope = static_cast<float>(rank), offset = 0;  // ranks may differ here: Create copies rank 0's values
  const ddp::Parameter parameters[] = {{.name = "slope", .value = {&slope, 1}},
                                       {.name = "offset", .value = {&offset, 1}}};
  auto created = ddp::DistributedDataParallel::Create((*context)->world(), {parameters[0], parameters[1]});
  if (!created.ok()) return created.status();
  ddp::DistributedDataParallel& model = **created;
  auto* const slope_grad = static_cast<float*>(model.grad(0).data);  // the library's memory, reduced in place
  auto* const offset_grad = static_cast<float*>(model.grad(1).data);

  for (int step = 0; step < 300; ++step) {
    model.ZeroGrad();
    constexpr int kBatch = 8;
    for (int i = 0; i < kBatch; ++i) {  // forward and backward, on this rank's points
      const float x = static_cast<float>((step + rank * 3 + i * 5) % 11 - 5) / 5, y = 3 * x + 1;
      const float error = slope * x + offset - y;
      *offset_grad += error / kBatch;
      *slope_grad += error * x / kBatch;
    }
    model.GradReady(1);  // in the order in which the backward pass has them
    model.GradReady(0);
    if (absl::Status s = model.FinishBackward(); !s.ok()) return s;
    slope -= 0.5f * *slope_grad;  // now the average over ranks
    offset -= 0.5f * *offset_grad;
  }
  std::printf("rank %d of %d: y = %.2f x + %.2f\n", rank, (*context)->world_size(), slope, offset);
  return absl::OkStatus();
}

int main() {
  const absl::Status status = Train();
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
