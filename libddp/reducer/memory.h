// SPDX-License-Identifier: Apache-2.0
// The memory of a model's values and gradients.
#ifndef LIBDDP_REDUCER_MEMORY_H_
#define LIBDDP_REDUCER_MEMORY_H_

#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "ddp/distributed_data_parallel.h"
#include "ddp/process_group.h"
#include "ddp/types.h"

namespace ddp {

// One parameter, and where its gradient is reduced.
struct Trained {
  Parameter parameter;
  // The gradient's own memory, if that is the library's or an allocation of the group's; otherwise, and for a type that
  // is not reduced as it is, a place of the library's that the gradient is copied to and from. Null for a parameter
  // that was frozen from the first.
  Buffer slot;
  bool owned = false;        // the gradient is the library's
  bool value_owned = false;  // the value is
  bool in_place = false;     // `slot` is the gradient's own memory

  // Memory that SetGrad gives counts for one reduced step; after that the program may have freed it.
  bool given_by_step = false;                // the gradient has no other memory of the program's
  bool given = false;                        // SetGrad has been called since the last reduced step
  std::shared_ptr<void> stand_in = nullptr;  // holds a result for which the program has given no memory

  bool copied() const { return !in_place; }
};

// All slots lie in memory of the group's, at the same places on all ranks; a place once given stays for the life of
// this object. Not thread-safe.
class ModelMemory {
 public:
  // copy_gradients: gradients without an address are the caller's, who will give one later. reduce_in_float32: slots of
  // 16-bit gradients are float32.
  ModelMemory(Device device, bool copy_gradients, bool reduce_in_float32)
      : device_(device), copy_gradients_(copy_gradients), reduce_in_float32_(reduce_in_float32) {}

  // Collective. Fills in the addresses that are missing, laying out what is new in `order`.
  absl::Status Place(ProcessGroup& group, std::vector<Trained>& all, absl::Span<const size_t> order);

  // Collective over `group`: what was allocated in another group is its memory from now on. FailedPrecondition if ranks
  // have laid out their gradients differently.
  absl::Status Register(ProcessGroup& group, const std::vector<Trained>& all) const;

  // What the library owns of gradients and values, one range for each dtype and call of Place.
  const std::vector<Buffer>& grad_spans() const { return grad_spans_; }
  const std::vector<Buffer>& value_spans() const { return value_spans_; }

  // Slots in the order of memory, which is the same on all ranks; neighbours merged, those of the library's memory with
  // the padding between them.
  std::vector<Buffer> Merge(absl::Span<const Buffer> buffers) const;

 private:
  absl::Status PlaceValues(std::vector<Trained>& all, absl::Span<const size_t> order);
  absl::Status PlaceGradients(ProcessGroup& group, std::vector<Trained>& all, absl::Span<const size_t> order);
  absl::Status TakeGivenInPlace(ProcessGroup& group, std::vector<Trained>& all);
  absl::Status PlaceSlots(ProcessGroup& group, std::vector<Trained>& all, absl::Span<const size_t> order);
  DType SlotType(const Parameter& parameter) const;
  std::vector<Buffer> Regions() const;
  static size_t RegionOf(absl::Span<const Buffer> regions, const Buffer& slot);

  const Device device_;
  const bool copy_gradients_, reduce_in_float32_;
  std::vector<std::shared_ptr<void>> value_memory_;
  std::vector<Allocation> group_memory_;  // of gradients and slots
  std::vector<Allocation> given_memory_;  // the caller's, in which gradients are reduced where they lie
  std::vector<Buffer> value_spans_, grad_spans_, slot_spans_;
};

}  // namespace ddp

#endif  // LIBDDP_REDUCER_MEMORY_H_
