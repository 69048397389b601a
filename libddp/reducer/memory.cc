#include "libddp/reducer/memory.h"

#include <algorithm>
#include <utility>

#include "libddp/device/buffer_ops.h"
#include "libddp/reducer/layout.h"

namespace ddp {
namespace {

size_t BytesOf(const Arena& arena) { return std::max<size_t>(arena.bytes, kItemAlign); }

void* At(absl::Span<const Buffer> arenas, const Place& place) {
  return static_cast<char*>(arenas[static_cast<size_t>(place.arena)].data) + place.offset;
}

bool Is16Bit(DType dtype) { return dtype == DType::kFloat16 || dtype == DType::kBFloat16; }

// Memory of the group's for a layout, appended to `memory` and `spans`.
absl::Status AllocateArenas(ProcessGroup& group, Device device, const Layout& layout, std::vector<Allocation>& memory,
                            std::vector<Buffer>& spans) {
  for (const Arena& arena : layout.arenas) {
    absl::StatusOr<Allocation> made = group.Allocate(BytesOf(arena), device);
    if (!made.ok()) return made.status();
    spans.push_back(made->View(arena.dtype, 0, arena.bytes / SizeOf(arena.dtype)));
    memory.push_back(*std::move(made));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ModelMemory::Place(ProcessGroup& group, std::vector<Trained>& all, absl::Span<const size_t> order) {
  if (absl::Status s = PlaceValues(all, order); !s.ok()) return s;
  if (absl::Status s = PlaceGradients(group, all, order); !s.ok()) return s;
  return PlaceSlots(group, all, order);
}

absl::Status ModelMemory::PlaceValues(std::vector<Trained>& all, absl::Span<const size_t> order) {
  std::vector<Buffer> values;
  std::vector<bool> wanted;
  for (const Trained& t : all) {
    values.push_back(t.parameter.value);
    wanted.push_back(t.parameter.value.data == nullptr);
  }
  const Layout layout = LayOut(values, wanted, order);
  const size_t first = value_spans_.size();
  for (const Arena& arena : layout.arenas) {
    absl::StatusOr<std::shared_ptr<void>> memory = AllocateOn(device_, BytesOf(arena));
    if (!memory.ok()) return memory.status();
    value_spans_.push_back({memory->get(), arena.bytes / SizeOf(arena.dtype), arena.dtype, device_});
    value_memory_.push_back(*std::move(memory));
  }
  const auto spans = absl::MakeConstSpan(value_spans_).subspan(first);
  for (size_t i = 0; i < all.size(); ++i) {
    if (!wanted[i]) continue;
    all[i].parameter.value.data = At(spans, layout.places[i]);
    all[i].value_owned = true;
  }
  return absl::OkStatus();
}

absl::Status ModelMemory::PlaceGradients(ProcessGroup& group, std::vector<Trained>& all,
                                         absl::Span<const size_t> order) {
  std::vector<Buffer> grads;
  std::vector<bool> wanted;
  for (Trained& t : all) {
    Parameter& p = t.parameter;
    const bool fresh = !p.frozen && t.slot.data == nullptr;
    wanted.push_back(fresh && p.grad.data == nullptr && !copy_gradients_);
    if (p.grad.data == nullptr && !t.owned) p.grad = {nullptr, p.value.count, p.value.dtype, p.value.device};
    grads.push_back(p.grad);
  }
  const Layout layout = LayOut(grads, wanted, order);
  const size_t first = grad_spans_.size();
  if (absl::Status s = AllocateArenas(group, device_, layout, group_memory_, grad_spans_); !s.ok()) return s;
  const auto spans = absl::MakeConstSpan(grad_spans_).subspan(first);
  for (size_t i = 0; i < all.size(); ++i) {
    if (!wanted[i]) continue;
    all[i].parameter.grad.data = At(spans, layout.places[i]);
    all[i].owned = true;
  }
  return absl::OkStatus();
}

absl::Status ModelMemory::PlaceSlots(ProcessGroup& group, std::vector<Trained>& all, absl::Span<const size_t> order) {
  std::vector<Buffer> slots;
  std::vector<bool> wanted;
  for (Trained& t : all) {
    const Buffer& grad = t.parameter.grad;
    const DType dtype = reduce_in_float32_ && Is16Bit(grad.dtype) ? DType::kFloat32 : grad.dtype;
    const bool fresh = !t.parameter.frozen && t.slot.data == nullptr;
    if (fresh && t.owned && dtype == grad.dtype) t.slot = grad;
    wanted.push_back(fresh && t.slot.data == nullptr);
    slots.push_back({nullptr, grad.count, dtype, grad.device});
  }
  const Layout layout = LayOut(slots, wanted, order);
  const size_t first = slot_spans_.size();
  if (absl::Status s = AllocateArenas(group, device_, layout, group_memory_, slot_spans_); !s.ok()) return s;
  const auto spans = absl::MakeConstSpan(slot_spans_).subspan(first);
  for (size_t i = 0; i < all.size(); ++i) {
    if (!wanted[i]) continue;
    slots[i].data = At(spans, layout.places[i]);
    all[i].slot = slots[i];
  }
  return absl::OkStatus();
}

absl::Status ModelMemory::Register(ProcessGroup& group) const {
  for (const Allocation& memory : group_memory_) {
    if (absl::Status s = group.Register(memory); !s.ok()) return s;
  }
  return absl::OkStatus();
}

// By span, then by address: the same order on all ranks, though spans lie elsewhere on each.
std::vector<Buffer> ModelMemory::Merge(absl::Span<const Buffer> buffers) const {
  std::vector<Buffer> spans = grad_spans_;
  spans.insert(spans.end(), slot_spans_.begin(), slot_spans_.end());
  const auto place = [&spans](const Buffer& b) {
    const char* const data = static_cast<const char*>(b.data);
    size_t s = 0;
    while (s < spans.size()) {
      const char* const begin = static_cast<const char*>(spans[s].data);
      if (data >= begin && data < begin + spans[s].count * SizeOf(spans[s].dtype)) break;
      ++s;
    }
    return std::make_pair(s, data);
  };
  std::vector<std::pair<std::pair<size_t, const char*>, Buffer>> placed;
  for (const Buffer& b : buffers) {
    if (b.count > 0) placed.emplace_back(place(b), b);
  }
  std::sort(placed.begin(), placed.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<Buffer> sorted;
  sorted.reserve(placed.size());
  for (const auto& [where, buffer] : placed) sorted.push_back(buffer);
  return MergeAdjacent(sorted, spans);
}

}  // namespace ddp
