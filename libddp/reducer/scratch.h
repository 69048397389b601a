// SPDX-License-Identifier: Apache-2.0
// Memory of a group's for what is passed on in another form than it is kept.
#ifndef LIBDDP_REDUCER_SCRATCH_H_
#define LIBDDP_REDUCER_SCRATCH_H_

#include <cstddef>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ddp/process_group.h"
#include "ddp/types.h"
#include "libddp/reducer/layout.h"

namespace ddp {

// One piece of memory that is dealt out as arrays, anew after each Reserve. Not thread-safe.
class Scratch {
 public:
  // What an array of so many bytes takes.
  static size_t Room(size_t bytes) { return (bytes + kItemAlign - 1) / kItemAlign * kItemAlign; }

  // Collective: the same on all ranks. Earlier arrays are void, but on GPUs their memory stays until another group
  // comes: a CUDA graph may use them. `bytes` is a sum of Room()s.
  absl::Status Reserve(ProcessGroup& group, size_t bytes, Device device) {
    taken_ = 0;
    if (bytes == 0 || (group_ == &group && bytes <= memory_.bytes())) return absl::OkStatus();
    absl::StatusOr<Allocation> memory = group.Allocate(bytes, device);
    if (!memory.ok()) return memory.status();
    if (group_ != &group) {
      kept_.clear();
    } else if (device.kind != Device::Kind::kCpu) {
      kept_.push_back(std::move(memory_));
    }
    memory_ = *std::move(memory);
    group_ = &group;
    return absl::OkStatus();
  }

  Buffer Take(DType dtype, size_t count) {
    const Buffer array = memory_.View(dtype, taken_, count);
    taken_ += Room(count * SizeOf(dtype));
    return array;
  }

 private:
  const ProcessGroup* group_ = nullptr;  // that the memory is of
  Allocation memory_;
  std::vector<Allocation> kept_;
  size_t taken_ = 0;
};

}  // namespace ddp

#endif  // LIBDDP_REDUCER_SCRATCH_H_
