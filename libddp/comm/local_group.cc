#include "libddp/comm/local_group.h"

#include <algorithm>
#include <mutex>
#include <utility>

#include "absl/strings/str_cat.h"
#include "libddp/base/memory_room.h"
#include "libddp/comm/base/internal_group.h"
#include "libddp/comm/base/range_list.h"
#include "libddp/comm/base/validate.h"
#include "libddp/comm/memory/allocation_list.h"
#include "libddp/comm/memory/backing.h"
#include "libddp/device/cpu_reduce.h"
#include "libddp/device/host_memory.h"

namespace ddp {
namespace {

bool SameMemory(const Buffer& a, const Buffer& b) { return a.data == b.data && a.count == b.count; }

class LocalGroup final : public InternalGroup {
 public:
  explicit LocalGroup(Observer* observer) : observer_(observer) {}

  int rank() const override { return 0; }
  int size() const override { return 1; }
  absl::string_view backend() const override { return "local"; }

  absl::StatusOr<Work> AllReduce(Buffers in, Buffers out, const ReduceOptions& options, Stream) override {
    return Reduce("all_reduce", in, out, options);
  }
  absl::StatusOr<Work> ReduceScatter(Buffers in, Buffers out, const ReduceOptions& options, Stream) override {
    return Reduce("reduce_scatter", in, out, options);
  }
  absl::StatusOr<Work> Broadcast(Buffers buffers, int root, Stream) override {
    const CallCheck check(0, 1, "broadcast");
    Extent extent;
    if (absl::Status s = check.CheckBuffers("in", buffers, &extent); !s.ok()) return s;
    if (absl::Status s = check.Root(root); !s.ok()) return s;
    return Finished();
  }
  absl::StatusOr<Work> AllGather(Buffers in, Buffers out, Stream) override {
    Extent from, to;
    const CallCheck check(0, 1, "all_gather");
    if (absl::Status s = check.InOut(in, out, 1, 1, &from, &to); !s.ok()) return s;
    if (from.dtype != to.dtype) return check.Error("in and out have different types");
    return Copy(in, out);
  }
  absl::StatusOr<Work> AllGatherV(Buffers in, Buffers out, absl::Span<const size_t> counts, Stream) override {
    Extent extent;
    if (absl::Status s = CallCheck(0, 1, "all_gather_v").Counts(in, out, counts, &extent); !s.ok()) return s;
    return Copy(in, out);
  }
  absl::StatusOr<Work> AllToAll(Buffers in, Buffers out, Stream) override {
    Extent extent;
    if (absl::Status s = CallCheck(0, 1, "all_to_all").Parts(in, out, &extent); !s.ok()) return s;
    return Copy(in, out);
  }
  absl::StatusOr<Work> Send(Buffers buffers, int to, int tag, Stream) override {
    return NoPeer("send", buffers, to, tag);
  }
  absl::StatusOr<Work> Recv(Buffers buffers, int from, int tag, Stream) override {
    return NoPeer("recv", buffers, from, tag);
  }
  absl::StatusOr<Work> Barrier() override { return Finished(); }

  absl::StatusOr<Allocation> Allocate(size_t bytes, Device device) override {
    if (absl::Status s = CallCheck(0, 1, "allocate").AllocationOf(bytes, device); !s.ok()) return s;
    if (absl::Status s = status(); !s.ok()) return s;
    const MemoryRoom room = MemoryRoom::For(bytes);
    if (absl::Status s = CheckRoom({&room, 1}, bytes); !s.ok()) return s;
    absl::StatusOr<std::shared_ptr<void>> data = AllocateHost(bytes);
    if (!data.ok()) return data.status();
    char* const begin = static_cast<char*>(data->get());
    Allocation memory = Backing::Make(begin, bytes, *std::move(data), nullptr);
    list_.Add(memory);
    return memory;
  }

  absl::Status Register(const Allocation& memory) override {
    Backing* const backing = Backing::Of(memory);
    if (backing == nullptr) return CallCheck(0, 1, "register").Error("not memory from Allocate of a CPU group");
    if (absl::Status s = status(); !s.ok()) return s;
    const absl::StatusOr<SharedSegment::Kind> kind = SharedSegment::KindFromEnv();
    if (!kind.ok()) return kind.status();
    absl::StatusOr<std::shared_ptr<SharedSegment>> segment = SharedSegment::Create(memory.bytes(), *kind);
    if (!segment.ok()) return segment.status();
    if (absl::Status s = (*segment)->Reserve(0, memory.bytes()); !s.ok()) return s;
    (*segment)->Seal();
    if (absl::Status s = backing->MoveTo(*std::move(segment), 0); !s.ok()) return s;
    list_.Add(memory);
    return absl::OkStatus();
  }
  std::optional<AllocatedRange> Find(const void* data, size_t bytes) const override { return list_.Find(data, bytes); }

  absl::StatusOr<std::unique_ptr<ProcessGroup>> Split(int color, int) override {
    if (absl::Status s = status(); !s.ok()) return s;
    return color < 0 ? nullptr : CreateLocalGroup(observer_);
  }

  void Abort(absl::Status why) override {
    Fail(absl::AbortedError(absl::StrCat("rank 0 aborted the group: ", why.message())));
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
  absl::StatusOr<Work> Finished() const {
    if (absl::Status s = status(); !s.ok()) return s;
    return Work();
  }

  // There is nobody to send to.
  static absl::Status NoPeer(absl::string_view call, Buffers buffers, int peer, int tag) {
    const CallCheck check(0, 1, call);
    Extent extent;
    if (absl::Status s = check.CheckBuffers("message", buffers, &extent); !s.ok()) return s;
    return check.PeerAndTag(peer, tag);
  }

  absl::StatusOr<Work> Copy(Buffers in, Buffers out) const {
    if (absl::Status s = status(); !s.ok()) return s;
    const RangeList source = Ranges(in);
    source.CopyTo(0, Ranges(out), 0, source.bytes());
    return Work();
  }

  absl::StatusOr<Work> Reduce(absl::string_view call, Buffers in, Buffers out, const ReduceOptions& options) {
    const CallCheck check(0, 1, call);
    Extent from, to;
    if (absl::Status s = check.InOut(in, out, 1, 1, &from, &to); !s.ok()) return s;
    absl::StatusOr<CpuReduce> reduce = CpuReduce::Create({.in = from.dtype,
                                                          .out = to.dtype,
                                                          .op = options.op,
                                                          .prescale = options.prescale,
                                                          .postscale = options.postscale,
                                                          .check_nonfinite = options.nonfinite != nullptr});
    if (!reduce.ok()) return check.Error(reduce.status().message());
    if (absl::Status s = status(); !s.ok()) return s;
    const bool nothing_to_do = from.dtype == to.dtype && options.prescale == 1 && options.postscale == 1 &&
                               options.nonfinite == nullptr &&
                               std::equal(in.begin(), in.end(), out.begin(), out.end(), SameMemory);
    if (nothing_to_do) return Work();
    const RangeList source = Ranges(in), target = Ranges(out);
    const size_t in_size = SizeOf(from.dtype), out_size = SizeOf(to.dtype);
    for (size_t at = 0; at < from.count;) {
      size_t in_bytes = 0, out_bytes = 0;
      const void* const a = source.At(at * in_size, &in_bytes);
      void* const b = target.At(at * out_size, &out_bytes);
      const size_t n = std::min(in_bytes / in_size, out_bytes / out_size);
      if ((*reduce)(&a, 1, &b, 1, n)) *options.nonfinite = 1;
      at += n;
    }
    return Work();
  }

  Observer* const observer_;
  AllocationList list_;
  mutable std::mutex mutex_;
  absl::Status failure_;
};

}  // namespace

std::unique_ptr<ProcessGroup> CreateLocalGroup(Observer* observer) { return std::make_unique<LocalGroup>(observer); }

}  // namespace ddp
