// SPDX-License-Identifier: Apache-2.0
// A reduction: each rank has an array, and all ranks get the sum.
//
//   mpirun -n 2 01_reduction    # prints 3 on both ranks
#include <cstdio>

#include "ddp/ddp.h"

absl::Status Run() {
  auto context = ddp::Context::Create();  // finds the other ranks; alone it is a world of one
  if (!context.ok()) return context.status();
  ddp::ProcessGroup& world = (*context)->world();

  constexpr size_t kCount = 1'000'000;
  auto memory =
      world.Allocate(kCount * sizeof(float), ddp::Device{});  // reduced without a copy; other memory works too
  if (!memory.ok()) return memory.status();
  auto* const x = static_cast<float*>(memory->data());
  for (size_t i = 0; i < kCount; ++i) x[i] = static_cast<float>(world.rank() + 1);

  const ddp::Buffer buffer = memory->View(ddp::DType::kFloat32, 0, kCount);
  ddp::Work work = world.AllReduce(buffer, buffer, ddp::Sum());  // in place; returns at once
  if (absl::Status s = work.Wait(); !s.ok()) return s;

  std::printf("rank %d of %d: %g\n", world.rank(), world.size(), x[kCount - 1]);
  return absl::OkStatus();
}

int main() {
  const absl::Status status = Run();
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
