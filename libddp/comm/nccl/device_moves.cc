#include "libddp/comm/nccl/device_moves.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <utility>

#include "libddp/comm/nccl/api.h"
#include "libddp/device/cpu_reduce.h"

namespace ddp {
namespace {

// The outcome of two operations as one.
class BothState final : public internal::WorkState {
 public:
  BothState(Work first, Work second) : first_(std::move(first)), second_(std::move(second)) {}

  bool Done() const override { return first_.Done() && second_.Done(); }
  absl::Status Wait(absl::Time deadline) override {
    if (absl::Status s = first_.Wait(deadline); !s.ok()) return s;
    return second_.Wait(deadline);
  }
  // A stream cannot wait for the CPU's operations: the host does.
  absl::Status BlockStream(Stream stream) override {
    if (absl::Status s = first_.Wait(); !s.ok()) return s;
    return second_.BlockStream(stream);
  }
  void Ref() override { refs_.fetch_add(1, std::memory_order_relaxed); }
  void Unref() override {
    if (refs_.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;
  }

 private:
  Work first_, second_;
  std::atomic<int> refs_{1};
};

// As an element of a floating-point type.
void StoreScalar(double value, DType dtype, void* to) {
  if (dtype == DType::kFloat64) {
    std::memcpy(to, &value, sizeof value);
    return;
  }
  const float narrow = static_cast<float>(value);
  const void* const from = &narrow;
  CpuReduce::Create({.in = DType::kFloat32, .out = dtype}).value()(&from, 1, &to, 1, 1);
}

nccl::DataType TypeOf(Buffers buffers) { return nccl::ToNccl(buffers[0].dtype); }

}  // namespace

Work BothWorks(Work first, Work second) { return Work(new BothState(std::move(first), std::move(second))); }

std::vector<Buffer> Slice(Buffers buffers, size_t first, size_t count) {
  std::vector<Buffer> slice;
  for (const Buffer& b : buffers) {
    if (first >= b.count) {
      first -= b.count;
      continue;
    }
    const size_t n = std::min(count, b.count - first);
    if (n == 0) break;
    slice.push_back({static_cast<char*>(b.data) + first * SizeOf(b.dtype), n, b.dtype, b.device});
    count -= n;
    first = 0;
  }
  return slice;
}

std::vector<TransformPiece> PairPieces(Buffers from, Buffers to) {
  std::vector<TransformPiece> pieces;
  size_t i = 0, j = 0, i_done = 0, j_done = 0;
  while (i < from.size() && j < to.size()) {
    const size_t n = std::min(from[i].count - i_done, to[j].count - j_done);
    if (n > 0) {
      pieces.push_back({static_cast<const char*>(from[i].data) + i_done * SizeOf(from[i].dtype),
                        static_cast<char*>(to[j].data) + j_done * SizeOf(to[j].dtype), n});
    }
    i_done += n;
    j_done += n;
    if (i_done == from[i].count) i_done = 0, ++i;
    if (j < to.size() && j_done == to[j].count) j_done = 0, ++j;
  }
  return pieces;
}

// Memory for one operation, in the stream's order.
class DeviceMoves::Scratch {
 public:
  Scratch(DeviceRuntime& runtime, void* stream) : runtime_(runtime), stream_(stream) {}
  ~Scratch() {
    if (buffer_.data != nullptr) runtime_.FreeOnStream(buffer_.data, stream_).IgnoreError();
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  absl::Status Allocate(size_t count, DType dtype, Device device) {
    absl::StatusOr<void*> data = runtime_.AllocateOnStream(count * SizeOf(dtype), stream_);
    if (!data.ok()) return data.status();
    buffer_ = {*data, count, dtype, device};
    return absl::OkStatus();
  }
  Buffers buffers() const { return {&buffer_, 1}; }

  // As much as `like` holds, cut as it is.
  absl::StatusOr<std::vector<Buffer>> AllocateLike(Buffers like) {
    size_t total = 0;
    for (const Buffer& b : like) total += b.count;
    if (absl::Status s = Allocate(std::max<size_t>(total, 1), like[0].dtype, like[0].device); !s.ok()) return s;
    std::vector<Buffer> cut;
    char* data = static_cast<char*>(buffer_.data);
    for (const Buffer& b : like) {
      cut.push_back({data, b.count, b.dtype, b.device});
      data += b.count * SizeOf(b.dtype);
    }
    return cut;
  }

 private:
  DeviceRuntime& runtime_;
  void* const stream_;
  Buffer buffer_;
};

bool DeviceMoves::AnyRegistered(Buffers buffers) const {
  return std::any_of(buffers.begin(), buffers.end(), [&](const Buffer& b) { return b.count > 0 && Registered(b); });
}

bool DeviceMoves::Misaligned(Buffers whole, Buffers part) const {
  constexpr size_t kAlign = 4;
  const auto misaligned = [&](const Buffer& b) {
    return b.count > 0 && reinterpret_cast<uintptr_t>(b.data) % kAlign != 0 && Registered(b);
  };
  if (std::any_of(whole.begin(), whole.end(), misaligned) || std::any_of(part.begin(), part.end(), misaligned)) {
    return true;
  }
  const auto bytes = [](Buffers buffers) {
    size_t sum = 0;
    for (const Buffer& b : buffers) sum += b.count * SizeOf(b.dtype);
    return sum;
  };
  return bytes(part) < bytes(whole) && bytes(part) % kAlign != 0 && AnyRegistered(whole);
}

// in -(copy)-> from -(NCCL)-> to -(copy)-> out. The copies convert. Without copies `from` is `in` and `to` is `out`.
absl::Status DeviceMoves::Reduce(bool scatter, const ReducePlan& plan, Buffers in, Buffers out, size_t count,
                                 uint32_t* nonfinite, void* stream) {
  const size_t out_count = scatter ? count / size_ : count;
  if (communicator_ == nullptr) {  // the reduction of one contribution is that contribution
    const double scale = plan.before_scale * plan.factor * plan.after_scale;
    const bool nothing = scale == 1 && nonfinite == nullptr && in[0].dtype == out[0].dtype;
    if (nothing) return CopyPieces(in, out, stream);
    return runtime_.Run({in[0].dtype, out[0].dtype, scale, nonfinite}, PairPieces(in, out), stream);
  }
  const bool other_memory = Misaligned(in, out);
  const bool copy_in = plan.convert_in || other_memory, copy_out = plan.convert_out || other_memory;
  Scratch before(runtime_, stream), after(runtime_, stream);
  Buffers from = in, to = out;
  if (copy_out) {
    if (absl::Status s = after.Allocate(out_count, plan.type, out[0].device); !s.ok()) return s;
    to = after.buffers();
  }
  if (copy_in) {
    // An all-reduce works in place in its result; the parts of a reduce-scatter have no room there.
    from = to;
    if (scatter) {
      if (absl::Status s = before.Allocate(count, plan.type, in[0].device); !s.ok()) return s;
      from = before.buffers();
    }
    if (absl::Status s =
            runtime_.Run({in[0].dtype, plan.type, plan.before_scale, nullptr}, PairPieces(in, from), stream);
        !s.ok()) {
      return s;
    }
  }
  if (absl::Status s = ReduceWithNccl(scatter, plan, from, to, stream); !s.ok()) return s;
  if (!copy_out && plan.after_scale == 1 && nonfinite == nullptr) return absl::OkStatus();
  std::vector<TransformPiece> pieces = PairPieces(to, out);
  if (!copy_out && plan.after_scale == 1) {
    for (TransformPiece& piece : pieces) piece.out = nullptr;  // a look is enough
  }
  return runtime_.Run({plan.type, out[0].dtype, plan.after_scale, nonfinite}, pieces, stream);
}

absl::Status DeviceMoves::ReduceWithNccl(bool scatter, const ReducePlan& plan, Buffers from, Buffers to, void* stream) {
  using Op = ReducePlan::Op;
  const nccl::DataType type = nccl::ToNccl(plan.type);
  const bool one_call = from.size() == 1 && to.size() == 1;
  // One by one where NCCL would make one kernel of them that sums in part only.
  const bool group = !one_call && (scatter || communicator_->setup().features.groups_of_sums || !AnyRegistered(to));
  const auto enqueue = [&](const nccl::Api& api, nccl::Comm comm) {
    int op = plan.op == Op::kAvg       ? nccl::kAvg
             : plan.op == Op::kMin     ? nccl::kMin
             : plan.op == Op::kMax     ? nccl::kMax
             : plan.op == Op::kProduct ? nccl::kProd
                                       : nccl::kSum;
    if (plan.op == Op::kPremultiplied) {
      // The scalar has the type of the data.
      alignas(8) char scalar[8];
      StoreScalar(plan.factor, plan.type, scalar);
      const nccl::Result made = api.RedOpCreatePreMulSum(&op, scalar, type, nccl::kScalarHostImmediate, comm);
      if (made != nccl::kSuccess) return made;
    }
    nccl::Result result = nccl::kSuccess;
    const auto each = [&](nccl::Result r) { result = result == nccl::kSuccess ? r : result; };
    if (!scatter) {
      for (const TransformPiece& p : PairPieces(from, to))
        each(api.AllReduce(p.in, p.out, p.count, type, op, comm, stream));
    } else if (one_call) {
      each(api.ReduceScatter(from[0].data, to[0].data, to[0].count, type, op, comm, stream));
    } else {
      size_t part = 0;
      for (const Buffer& b : to) part += b.count;
      for (size_t r = 0; r < size_; ++r) {
        for (const TransformPiece& p : PairPieces(Slice(from, r * part, part), to)) {
          each(api.Reduce(p.in, p.out, p.count, type, op, static_cast<int>(r), comm, stream));
        }
      }
    }
    if (plan.op == Op::kPremultiplied) each(api.RedOpDestroy(op, comm));
    return result;
  };
  const absl::string_view what = scatter ? "ncclReduceScatter" : "ncclAllReduce";
  return group ? Group(what, enqueue) : communicator_->Call(what, enqueue);
}

absl::Status DeviceMoves::Broadcast(Buffers buffers, int root, void* stream) {
  if (communicator_ == nullptr) return absl::OkStatus();
  return Group("ncclBroadcast", [&](const nccl::Api& api, nccl::Comm comm) {
    nccl::Result result = nccl::kSuccess;
    for (const Buffer& b : buffers) {
      if (b.count == 0 || result != nccl::kSuccess) continue;
      result = api.Broadcast(b.data, b.data, b.count, TypeOf(buffers), root, comm, stream);
    }
    return result;
  });
}

absl::Status DeviceMoves::AllGather(Buffers in, Buffers out, absl::Span<const size_t> counts, void* stream) {
  if (communicator_ == nullptr) return CopyPieces(in, out, stream);
  const bool even = std::all_of(counts.begin(), counts.end(), [&](size_t n) { return n == counts[0]; });
  if (even && in.size() == 1 && out.size() == 1 && !Misaligned(out, in)) {
    return communicator_->Call("ncclAllGather", [&](const nccl::Api& api, nccl::Comm comm) {
      return api.AllGather(in[0].data, out[0].data, in[0].count, TypeOf(in), comm, stream);
    });
  }
  // Each rank's part is broadcast, range by range of the output, which is cut alike on all ranks. So this rank's input
  // goes to its place there first.
  std::vector<std::vector<Buffer>> parts;
  size_t begin = 0;
  for (const size_t n : counts) {
    parts.push_back(Slice(out, begin, n));
    begin += n;
  }
  if (absl::Status s = CopyPieces(in, parts[static_cast<size_t>(rank_)], stream); !s.ok()) return s;
  return Group("ncclBroadcast", [&](const nccl::Api& api, nccl::Comm comm) {
    nccl::Result result = nccl::kSuccess;
    for (size_t r = 0; r < size_; ++r) {
      for (const Buffer& b : parts[r]) {
        if (result != nccl::kSuccess) break;
        result = api.Broadcast(b.data, b.data, b.count, TypeOf(out), static_cast<int>(r), comm, stream);
      }
    }
    return result;
  });
}

bool DeviceMoves::SendsFromRegistered(Buffers in, Buffers out) const {
  const auto all = [&](Buffers buffers) {
    return std::all_of(buffers.begin(), buffers.end(), [&](const Buffer& b) { return b.count == 0 || Registered(b); });
  };
  return in[0].data != out[0].data && all(in) && all(out);
}

absl::Status DeviceMoves::AllToAll(Buffers in, Buffers out, bool direct, void* stream) {
  if (communicator_ == nullptr) return CopyPieces(in, out, stream);
  size_t total = 0;
  for (const Buffer& b : in) total += b.count;
  const size_t part = total / size_;
  Scratch sent(runtime_, stream), arrived(runtime_, stream);
  absl::StatusOr<std::vector<Buffer>> copy_in, copy_out;
  Buffers from = in, to = out;
  // In place what is sent has to be kept: it is overwritten by what arrives.
  if (in[0].data == out[0].data || (!direct && AnyRegistered(in))) {
    copy_in = sent.AllocateLike(in);
    if (!copy_in.ok()) return copy_in.status();
    from = *copy_in;
    if (absl::Status s = CopyPieces(in, from, stream); !s.ok()) return s;
  }
  if (!direct && AnyRegistered(out)) {
    copy_out = arrived.AllocateLike(out);
    if (!copy_out.ok()) return copy_out.status();
    to = *copy_out;
  }
  const absl::Status done = Group("ncclSend and ncclRecv", [&](const nccl::Api& api, nccl::Comm comm) {
    // A message is cut where the sender's input or the receiver's output is. Both know that, since all ranks have cut
    // theirs alike: what goes from s to r is part r of the input and part s of the output.
    nccl::Result result = nccl::kSuccess;
    const size_t me = static_cast<size_t>(rank_);
    for (size_t r = 0; r < size_; ++r) {
      const int peer = static_cast<int>(r);
      for (const TransformPiece& p : PairPieces(Slice(from, r * part, part), Slice(to, me * part, part))) {
        if (result == nccl::kSuccess) result = api.Send(p.in, p.count, TypeOf(in), peer, comm, stream);
      }
      for (const TransformPiece& p : PairPieces(Slice(from, me * part, part), Slice(to, r * part, part))) {
        if (result == nccl::kSuccess) result = api.Recv(p.out, p.count, TypeOf(out), peer, comm, stream);
      }
    }
    return result;
  });
  return done.ok() && to.data() != out.data() ? CopyPieces(to, out, stream) : done;
}

absl::Status DeviceMoves::Send(Buffers buffers, int peer, void* stream) {
  Scratch scratch(runtime_, stream);
  absl::StatusOr<std::vector<Buffer>> copy;
  Buffers from = buffers;
  if (AnyRegistered(buffers)) {
    copy = scratch.AllocateLike(buffers);
    if (!copy.ok()) return copy.status();
    from = *copy;
    if (absl::Status s = CopyPieces(buffers, from, stream); !s.ok()) return s;
  }
  return Group("ncclSend", [&](const nccl::Api& api, nccl::Comm comm) {
    nccl::Result result = nccl::kSuccess;
    for (const Buffer& b : from) {
      if (b.count == 0 || result != nccl::kSuccess) continue;
      result = api.Send(b.data, b.count, TypeOf(from), peer, comm, stream);
    }
    return result;
  });
}

absl::Status DeviceMoves::Recv(Buffers buffers, int peer, void* stream) {
  Scratch scratch(runtime_, stream);
  absl::StatusOr<std::vector<Buffer>> copy;
  Buffers to = buffers;
  if (AnyRegistered(buffers)) {
    copy = scratch.AllocateLike(buffers);
    if (!copy.ok()) return copy.status();
    to = *copy;
  }
  const absl::Status done = Group("ncclRecv", [&](const nccl::Api& api, nccl::Comm comm) {
    nccl::Result result = nccl::kSuccess;
    for (const Buffer& b : to) {
      if (b.count == 0 || result != nccl::kSuccess) continue;
      result = api.Recv(b.data, b.count, TypeOf(to), peer, comm, stream);
    }
    return result;
  });
  return done.ok() && to.data() != buffers.data() ? CopyPieces(to, buffers, stream) : done;
}

absl::Status DeviceMoves::Barrier(void* stream) {
  if (communicator_ == nullptr) return absl::OkStatus();
  Scratch word(runtime_, stream);
  if (absl::Status s = word.Allocate(1, DType::kInt32, {}); !s.ok()) return s;
  void* const data = word.buffers()[0].data;
  return communicator_->Call("ncclAllReduce", [&](const nccl::Api& api, nccl::Comm comm) {
    return api.AllReduce(data, data, 1, nccl::kInt32, nccl::kSum, comm, stream);
  });
}

// One launch, whatever the calls are. A group has to be closed also after one of them has failed.
absl::Status DeviceMoves::Group(absl::string_view what, Calls calls) {
  return communicator_->Call(what, [&](const nccl::Api& api, nccl::Comm comm) {
    nccl::Result result = api.GroupStart();
    if (result != nccl::kSuccess) return result;
    result = calls(api, comm);
    const nccl::Result end = api.GroupEnd();
    return result == nccl::kSuccess ? end : result;
  });
}

absl::Status DeviceMoves::CopyPieces(Buffers from, Buffers to, void* stream) {
  std::vector<TransformPiece> pieces = PairPieces(from, to);
  pieces.erase(std::remove_if(pieces.begin(), pieces.end(), [](const TransformPiece& p) { return p.in == p.out; }),
               pieces.end());
  if (pieces.empty()) return absl::OkStatus();
  return runtime_.Run({from[0].dtype, from[0].dtype, 1, nullptr}, pieces, stream);
}

}  // namespace ddp
