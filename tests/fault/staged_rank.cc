// SPDX-License-Identifier: Apache-2.0
// One rank of the hierarchical backend on simulated GPUs, in a process of its own: reduces arrays of every size until a
// rank is killed. Prints the error, and whether its stream came free.
#include <signal.h>

#include <cstdio>
#include <memory>
#include <random>
#include <string>
#include <thread>

#include "absl/time/clock.h"
#include "tests/fault/flags.h"
#include "tests/support/fake_devices.h"

namespace ddp::testing {
namespace {

constexpr size_t kMost = 600'000;

absl::Status Train(ProcessGroup& group, Stream stream, const Allocation& memory) {
  std::mt19937 random(1);  // the same on all ranks
  while (true) {
    const Buffer array = memory.View(DType::kFloat32, 0, 1 + random() % (random() % 2 == 0 ? 2000 : kMost));
    Work work = group.AllReduce(array, array, {.op = ReduceOp::kAvg}, stream);
    if (absl::Status s = work.BlockStream(stream); !s.ok()) return s;
    if (random() % 4 != 0) continue;  // several are on their way
    if (absl::Status s = work.Wait(); !s.ok()) return s;
  }
}

absl::Status Run(const Flags& flags, FakeDevices& gpus) {
  const int rank = flags.Number("rank"), size = flags.Number("size");
  absl::StatusOr<std::shared_ptr<Store>> store =
      CreateFileStore({.path = flags.Text("store"), .run_id = "staged", .world_size = size});
  if (!store.ok()) return store.status();
  ContextOptions options;
  options.rank = rank;
  options.world_size = size;
  options.store = *store;
  options.backend = "hierarchical";
  options.device = {Device::Kind::kCuda, static_cast<int16_t>(rank)};
  options.timeout = absl::Seconds(100);
  absl::StatusOr<std::unique_ptr<Context>> context = Context::Create(options);
  if (!context.ok()) return context.status();
  ProcessGroup& world = (*context)->world();
  absl::StatusOr<Allocation> memory = world.Allocate(kMost * sizeof(float), options.device);
  if (!memory.ok()) return memory.status();
  const DeviceGuard guard(gpus, options.device);
  absl::StatusOr<OwnedStream> stream = MakeStream(gpus);
  if (!stream.ok()) return stream.status();
  if (absl::Status s = world.Barrier().Wait(); !s.ok()) return s;
  if (rank == flags.Number("victim", -1)) {
    std::thread([us = flags.Number("delay_us")] {
      absl::SleepFor(absl::Microseconds(us));
      raise(SIGKILL);
    }).detach();
  }
  const absl::Status status = Train(world, {options.device, stream->get()}, *memory);
  FakeDevices::Synchronize(stream->get());
  return status;
}

}  // namespace
}  // namespace ddp::testing

int main(int argc, char** argv) {
  const ddp::testing::Flags flags(argc, argv);
  ddp::testing::FakeDevices gpus(flags.Number("size"));
  const ddp::ScopedDevices devices(gpus);
  const absl::Status status = ddp::testing::Run(flags, gpus);
  std::printf("%s; the stream came free\n", status.ToString().c_str());
  return 0;
}
