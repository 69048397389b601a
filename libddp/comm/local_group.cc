// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/local_group.h"

#include <algorithm>
#include <mutex>
#include <utility>

#include "absl/strings/str_cat.h"
#include "libddp/base/memory_room.h"
#include "libddp/comm/base/checked_group.h"
#include "libddp/comm/base/range_list.h"
#include "libddp/comm/memory/allocation_table.h"
#include "libddp/comm/memory/backing.h"
#include "libddp/device/host_memory.h"

namespace ddp {
namespace {

bool SameMemory(const Buffer& a, const Buffer& b) { return a.data == b.data && a.count == b.count; }

class LocalGroup final : public CheckedGroup {
 public:
  LocalGroup(Observer* observer, absl::Duration timeout, WorldRanks world_ranks)
      : CheckedGroup(timeout, std::move(world_ranks)), observer_(observer) {}

  int rank() const override { return 0; }
  int size() const override { return 1; }
  absl::string_view backend() const override { return "local"; }

  absl::Status Register(const Allocation& memory) override {
    Backing* const backing = Backing::Of(memory);
    if (backing == nullptr) return Check("register").Error("not memory from Allocate of a CPU group");
    if (absl::Status s = status(); !s.ok()) return s;
    const absl::StatusOr<SharedSegment::Kind> kind = SharedSegment::KindFromEnv();
    if (!kind.ok()) return kind.status();
    absl::StatusOr<std::shared_ptr<SharedSegment>> segment = SharedSegment::Create(memory.bytes(), *kind);
    if (!segment.ok()) return segment.status();
    if (absl::Status s = (*segment)->Reserve(0, memory.bytes()); !s.ok()) return s;
    (*segment)->Seal();
    if (absl::Status s = backing->MoveTo(*std::move(segment), 0); !s.ok()) return s;
    allocations_.Add(memory);
    return absl::OkStatus();
  }
  std::optional<AllocatedRange> Find(const void* data, size_t bytes) const override {
    return allocations_.Find(data, bytes);
  }

  absl::StatusOr<std::unique_ptr<ProcessGroup>> Split(int color, int) override {
    if (absl::Status s = status(); !s.ok()) return s;
    return color < 0 ? nullptr : CreateLocalGroup(observer_, timeout(), world_ranks());
  }

  void Fail(const absl::Status& why) override {
    std::lock_guard<std::mutex> lock(mutex_);
    if (failure_.ok()) failure_ = why;
  }
  absl::Status status() const override {
    std::lock_guard<std::mutex> lock(mutex_);
    return failure_;
  }
  void Progress() override {}
  Observer* observer() const override { return observer_; }

 private:
  Work StartChecked(const CheckedCall& call) override {
    if (absl::Status s = status(); !s.ok()) return s;
    if (call.reduce != nullptr) {
      Reduce(call);
    } else {
      const RangeList source = Ranges(call.in);
      source.CopyTo(0, Ranges(call.out), 0, source.bytes());
    }
    return Work();
  }
  Work StartMessage(const MessageCall&) override {
    return absl::InternalError("a group of one rank has nobody to send to");  // which the checks have told
  }
  absl::StatusOr<Allocation> AllocateHere(size_t bytes) override {
    if (absl::Status s = status(); !s.ok()) return s;
    const MemoryRoom room = MemoryRoom::For(bytes);
    if (absl::Status s = CheckRoom({&room, 1}, bytes); !s.ok()) return s;
    absl::StatusOr<std::shared_ptr<void>> data = AllocateHost(bytes);
    if (!data.ok()) return data.status();
    char* const begin = static_cast<char*>(data->get());
    Allocation memory = Backing::Make(begin, bytes, *std::move(data), nullptr);
    allocations_.Add(memory);
    return memory;
  }

  static void Reduce(const CheckedCall& call) {
    const ReduceOptions& options = *call.reduce;
    const bool nothing_to_do = call.key.in == call.key.out && options.prescale == 1 && options.postscale == 1 &&
                               options.nonfinite == nullptr &&
                               std::equal(call.in.begin(), call.in.end(), call.out.begin(), call.out.end(), SameMemory);
    if (nothing_to_do) return;
    const RangeList source = Ranges(call.in), target = Ranges(call.out);
    const size_t in_size = SizeOf(call.key.in), out_size = SizeOf(call.key.out);
    for (size_t at = 0; at < call.count;) {
      size_t in_bytes = 0, out_bytes = 0;
      const void* const a = source.At(at * in_size, &in_bytes);
      void* const b = target.At(at * out_size, &out_bytes);
      const size_t n = std::min(in_bytes / in_size, out_bytes / out_size);
      if (call.kernel(&a, 1, &b, 1, n)) *options.nonfinite = 1;
      at += n;
    }
  }

  Observer* const observer_;
  AllocationTable allocations_{0};
  mutable std::mutex mutex_;
  absl::Status failure_;
};

}  // namespace

std::unique_ptr<ProcessGroup> CreateLocalGroup(Observer* observer, absl::Duration timeout, WorldRanks world_ranks) {
  return std::make_unique<LocalGroup>(observer, timeout, std::move(world_ranks));
}

}  // namespace ddp
