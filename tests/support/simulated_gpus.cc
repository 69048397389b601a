// SPDX-License-Identifier: Apache-2.0
// Linked with a program: its GPUs are simulated, and so is the NCCL that is behind its faulty one (faulty_nccl.cc). The
// ranks are processes, which meet in the folder that SIMULATED_NCCL names. All memory passes for a GPU's. Operations
// take a microsecond, and what a fault adds.
#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <utility>

#include "tests/support/fake_devices.h"
#include "tests/support/fake_nccl.h"
#include "tests/support/faulty_nccl.h"

namespace ddp::testing {
namespace {

constexpr int kGpus = 8;

thread_local int delay_us = 0;

void Simulate() {
  auto* const gpus = new FakeDevices(kGpus);
  gpus->late = [](int, int) { return false; };
  gpus->staged_blocks = [](int) { return 4 * kGpus; };
  gpus->host_memory_is_theirs = true;
  gpus->elapsed_us = [] { return 1.0 + std::exchange(delay_us, 0); };
  static const auto* const in_place = new ScopedDevices(*gpus);
  static_cast<void>(in_place);

  const char* const folder = std::getenv("SIMULATED_NCCL");
  const char* const name = std::getenv("DDP_NCCL_LIBRARY");
  if (folder == nullptr || name == nullptr) return;
  void* const library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return;  // one of the faults
  auto* const behind = static_cast<nccl::Behind*>(dlsym(library, "faulty_nccl_behind"));
  if (behind == nullptr) std::abort();
  const auto* const nccl = new FakeNccl(22809, folder);
  behind->api = nccl->api();
  behind->Call = [](nccl::CudaStream stream, void (*what)(void*), void* argument) {
    FakeDevices::Enqueue(stream, [=] { what(argument); });
  };
  behind->Spoil = [](nccl::CudaStream stream, void* data) {
    FakeDevices::Enqueue(stream, [=] { std::memset(data, 0x5a, 4); });
  };
  behind->Delay = [](nccl::CudaStream, int us) { delay_us = us; };
}

[[maybe_unused]] const bool kSimulated = [] {
  Simulate();
  return true;
}();

}  // namespace
}  // namespace ddp::testing
