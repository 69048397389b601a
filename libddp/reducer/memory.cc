// SPDX-License-Identifier: Apache-2.0
#include "libddp/reducer/memory.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "libddp/base/log.h"
#include "libddp/comm/base/exchange.h"
#include "libddp/comm/base/internal_group.h"
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

// Where a gradient lies, as ranks tell each other. Travels as bytes: no padding.
struct Where {
  static constexpr uint64_t kElsewhere = UINT64_MAX;
  uint64_t memory = kElsewhere;  // the number of the allocation, or of the region
  uint64_t offset = 0;

  bool operator==(const Where& other) const { return memory == other.memory && offset == other.offset; }
  std::string Text() const {
    return memory == kElsewhere ? "in other memory" : absl::StrCat("at byte ", offset, " of allocation ", memory);
  }
};

// mine.size() places of each rank, by rank. Collective.
absl::StatusOr<std::vector<Where>> GatherPlaces(ProcessGroup& group, std::vector<Where> mine) {
  std::vector<Where> all(mine.size() * static_cast<size_t>(group.size()));
  if (absl::Status s = StartGather(group, absl::MakeSpan(mine), absl::MakeSpan(all)).Wait(); !s.ok()) return s;
  return all;
}

// The first rank that has item k at another place than rank 0; 0 if none has.
size_t FirstToDiffer(absl::Span<const Where> all, size_t items, size_t k) {
  for (size_t at = k + items; at < all.size(); at += items) {
    if (!(all[at] == all[k])) return at / items;
  }
  return 0;
}

}  // namespace

absl::Status ModelMemory::Place(ProcessGroup& group, std::vector<Trained>& all, absl::Span<const size_t> order) {
  // Allocated by each rank alone, where what follows is collective.
  if (absl::Status s = Agree(group, PlaceValues(all, order)); !s.ok()) return s;
  if (absl::Status s = PlaceGradients(group, all, order); !s.ok()) return s;
  if (absl::Status s = TakeGivenInPlace(group, all); !s.ok()) return s;
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
    // That of a frozen parameter keeps the layout equal to that of the values.
    const bool beside_value = p.frozen && t.value_owned && IsFloatingPoint(p.value.dtype);
    wanted.push_back((fresh || beside_value) && p.grad.data == nullptr && !copy_gradients_);
    t.given_by_step |= fresh && p.grad.data == nullptr && copy_gradients_;
    if (p.grad.data == nullptr && !t.owned && t.slot.data == nullptr) {
      p.grad = {nullptr, p.value.count, p.value.dtype, p.value.device};
    }
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

// Gradients of the caller's that lie at the same place of the same allocation on all ranks are reduced there. All ranks
// decide alike, as they see all places.
absl::Status ModelMemory::TakeGivenInPlace(ProcessGroup& group, std::vector<Trained>& all) {
  if (copy_gradients_) return absl::OkStatus();
  std::vector<size_t> given;
  std::vector<Where> mine;
  std::vector<Allocation> memory;
  for (size_t i = 0; i < all.size(); ++i) {
    const Parameter& p = all[i].parameter;
    const bool is_given = !all[i].owned && p.grad.data != nullptr && SlotType(p) == p.grad.dtype;
    if (!is_given || p.frozen || all[i].slot.data != nullptr) continue;
    const std::optional<AllocatedRange> found = FindAllocation(group, p.grad.data, p.grad.count * SizeOf(p.grad.dtype));
    given.push_back(i);
    mine.push_back(found.has_value() ? Where{found->number, found->offset} : Where{});
    memory.push_back(found.has_value() ? found->memory : Allocation());
  }
  if (given.empty()) return absl::OkStatus();
  const absl::StatusOr<std::vector<Where>> places = GatherPlaces(group, std::move(mine));
  if (!places.ok()) return places.status();

  size_t taken = 0;
  for (size_t k = 0; k < given.size(); ++k) {
    Trained& trained = all[given[k]];
    const Where& first = (*places)[k];
    if (const size_t rank = FirstToDiffer(*places, given.size(), k); rank != 0) {
      if (group.rank() == 0) {
        LogWarn("the gradient of '", trained.parameter.name, "' is copied on every rank: it lies ", first.Text(),
                " on rank 0, but ", (*places)[rank * given.size() + k].Text(), " on rank ", rank,
                ". To be reduced in place it has to lie at the same place of the same allocation on all ranks");
      }
      continue;
    }
    if (first.memory == Where::kElsewhere) continue;
    trained.slot = trained.parameter.grad;
    trained.in_place = true;
    ++taken;
    const bool known = std::any_of(given_memory_.begin(), given_memory_.end(),
                                   [&](const Allocation& m) { return m.owner() == memory[k].owner(); });
    if (!known) given_memory_.push_back(memory[k]);
  }
  LogInfo("rank ", group.rank(), ": of ", given.size(), " gradients in memory of the program ", taken,
          " are reduced in place");
  return absl::OkStatus();
}

DType ModelMemory::SlotType(const Parameter& parameter) const {
  const DType dtype = parameter.grad.dtype;
  return reduce_in_float32_ && Is16Bit(dtype) ? DType::kFloat32 : dtype;
}

absl::Status ModelMemory::PlaceSlots(ProcessGroup& group, std::vector<Trained>& all, absl::Span<const size_t> order) {
  std::vector<Buffer> slots;
  std::vector<bool> wanted;
  for (Trained& t : all) {
    const Buffer& grad = t.parameter.grad;
    const DType dtype = SlotType(t.parameter);
    const bool fresh = !t.parameter.frozen && t.slot.data == nullptr;
    if (fresh && t.owned && dtype == grad.dtype) {
      t.slot = grad;
      t.in_place = true;
    }
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

absl::Status ModelMemory::Register(ProcessGroup& group, const std::vector<Trained>& all) const {
  const std::vector<Buffer> regions = Regions();
  std::vector<Where> mine;
  for (const Trained& t : all) {
    const size_t region = RegionOf(regions, t.slot);
    if (region == regions.size() || t.slot.count == 0) {
      mine.push_back({});
      continue;
    }
    const auto offset = static_cast<const char*>(t.slot.data) - static_cast<const char*>(regions[region].data);
    mine.push_back({region, static_cast<uint64_t>(offset)});
  }
  const absl::StatusOr<std::vector<Where>> places = GatherPlaces(group, std::move(mine));
  if (!places.ok()) return places.status();
  for (size_t i = 0; i < all.size(); ++i) {
    const size_t rank = FirstToDiffer(*places, all.size(), i);
    if (rank == 0) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        "the gradient of '", all[i].parameter.name, "' lies ", (*places)[i].Text(), " on rank 0, but ",
        (*places)[rank * all.size() + i].Text(), " on rank ", rank,
        "; models that go on together have had the same parameters, in the same order, since they were made"));
  }
  for (const Allocation& memory : group_memory_) {
    if (absl::Status s = group.Register(memory); !s.ok()) return s;
  }
  for (const Allocation& memory : given_memory_) {
    if (FindAllocation(group, memory.data(), memory.bytes()).has_value())
      continue;  // the program has registered it, or a model
    if (absl::Status s = group.Register(memory); !s.ok()) return s;
  }
  return absl::OkStatus();
}

// All memory that slots may lie in, in an order that is the same on all ranks.
std::vector<Buffer> ModelMemory::Regions() const {
  std::vector<Buffer> regions = grad_spans_;
  regions.insert(regions.end(), slot_spans_.begin(), slot_spans_.end());
  for (const Allocation& m : given_memory_) regions.push_back(m.View(DType::kUInt8, 0, m.bytes()));
  return regions;
}

// The region that holds the slot; regions.size() if none does.
size_t ModelMemory::RegionOf(absl::Span<const Buffer> regions, const Buffer& slot) {
  const char* const data = static_cast<const char*>(slot.data);
  const auto found = std::find_if(regions.begin(), regions.end(), [data](const Buffer& region) {
    const char* const begin = static_cast<const char*>(region.data);
    return data >= begin && data < begin + region.count * SizeOf(region.dtype);
  });
  return static_cast<size_t>(found - regions.begin());
}

// By region, then by address: regions lie elsewhere on each rank, and may border on each other on some.
std::vector<Buffer> ModelMemory::Merge(absl::Span<const Buffer> buffers) const {
  const std::vector<Buffer> regions = Regions();
  const size_t padded = grad_spans_.size() + slot_spans_.size();
  std::vector<std::vector<Buffer>> by_region(regions.size() + 1);
  for (const Buffer& b : buffers) {
    if (b.count > 0) by_region[RegionOf(regions, b)].push_back(b);
  }
  std::vector<Buffer> merged;
  for (size_t r = 0; r < by_region.size(); ++r) {
    std::sort(by_region[r].begin(), by_region[r].end(),
              [](const Buffer& a, const Buffer& b) { return a.data < b.data; });
    const std::vector<Buffer> here =
        MergeAdjacent(by_region[r], r < padded ? absl::MakeConstSpan(&regions[r], 1) : absl::Span<const Buffer>());
    merged.insert(merged.end(), here.begin(), here.end());
  }
  return merged;
}

}  // namespace ddp
