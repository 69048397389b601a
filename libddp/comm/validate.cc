#include "libddp/comm/validate.h"

#include <numeric>
#include <string>

#include "absl/strings/str_cat.h"

namespace ddp {
namespace {

bool Overlap(const Buffer& a, const Buffer& b) {
  const char* const a_begin = static_cast<const char*>(a.data);
  const char* const b_begin = static_cast<const char*>(b.data);
  return a_begin < b_begin + b.count * SizeOf(b.dtype) && b_begin < a_begin + a.count * SizeOf(a.dtype);
}

std::string NameOf(Device device) {
  return device.kind == Device::Kind::kCpu ? "CPU" : absl::StrCat("GPU ", device.index, "'s");
}

}  // namespace

absl::Status CallCheck::Error(absl::string_view what) const {
  return absl::InvalidArgumentError(absl::StrCat("rank ", rank_, ": ", call_, ": ", what));
}

absl::Status CallCheck::CheckBuffers(absl::string_view name, Buffers buffers, Extent* extent) const {
  if (buffers.empty()) return Error(absl::StrCat("no ", name, " buffers given"));
  extent->count = 0;
  extent->dtype = buffers[0].dtype;
  for (const Buffer& b : buffers) {
    if (!(b.device == device_)) {
      return Error(absl::StrCat("an ", name, " buffer is in ", NameOf(b.device),
                                " memory, but the group's backend works in ", NameOf(device_), " memory"));
    }
    if (b.dtype != extent->dtype) {
      return Error(absl::StrCat("the ", name, " buffers have different types, ", std::string(Name(extent->dtype)),
                                " and ", std::string(Name(b.dtype))));
    }
    if (b.data == nullptr && b.count > 0) return Error(absl::StrCat("an ", name, " buffer is null but not empty"));
    extent->count += b.count;
  }
  return absl::OkStatus();
}

absl::Status CallCheck::InOut(Buffers in, Buffers out, size_t in_times, size_t out_times, Extent* in_extent,
                              Extent* out_extent) const {
  if (absl::Status s = CheckBuffers("in", in, in_extent); !s.ok()) return s;
  if (absl::Status s = CheckBuffers("out", out, out_extent); !s.ok()) return s;
  if (in_extent->count * in_times != out_extent->count * out_times) {
    return Error(absl::StrCat("in has ", in_extent->count, " elements and out ", out_extent->count, "; with ", size_,
                              " ranks out needs ", in_times >= out_times ? in_times : 1,
                              out_times > 1 ? absl::StrCat("/", out_times) : "", " times as many as in"));
  }
  // In place is one thing (the same memory), any other overlap a mistake.
  const bool single = in.size() == 1 && out.size() == 1 && in_times == 1 && out_times == 1;
  const bool same = single && in[0].data == out[0].data && SizeOf(in[0].dtype) == SizeOf(out[0].dtype);
  if (single && !same && Overlap(in[0], out[0])) {
    return Error("in and out overlap without being the same memory, element for element");
  }
  return absl::OkStatus();
}

absl::Status CallCheck::Counts(Buffers in, Buffers out, absl::Span<const size_t> counts, Extent* out_extent) const {
  Extent from;
  if (absl::Status s = CheckBuffers("in", in, &from); !s.ok()) return s;
  if (absl::Status s = CheckBuffers("out", out, out_extent); !s.ok()) return s;
  if (from.dtype != out_extent->dtype) return Error("in and out have different types");
  if (counts.size() != static_cast<size_t>(size_)) {
    return Error(absl::StrCat(counts.size(), " counts given to a group of ", size_, " ranks"));
  }
  if (const size_t own = counts[static_cast<size_t>(rank_)]; from.count != own) {
    return Error(absl::StrCat("in has ", from.count, " elements, but this rank's count is ", own));
  }
  const size_t total = std::accumulate(counts.begin(), counts.end(), size_t{0});
  if (out_extent->count == total) return absl::OkStatus();
  return Error(absl::StrCat("out has ", out_extent->count, " elements, but the counts come to ", total));
}

absl::Status CallCheck::Parts(Buffers in, Buffers out, Extent* extent) const {
  Extent to;
  if (absl::Status s = InOut(in, out, 1, 1, extent, &to); !s.ok()) return s;
  if (extent->dtype != to.dtype) return Error("in and out have different types");
  if (extent->count % static_cast<size_t>(size_) == 0) return absl::OkStatus();
  return Error(absl::StrCat(extent->count, " elements cannot be cut into ", size_, " equal parts"));
}

absl::Status CallCheck::Root(int root) const {
  if (root >= 0 && root < size_) return absl::OkStatus();
  return Error(absl::StrCat("root ", root, " is not a rank of a group of ", size_));
}

absl::Status CallCheck::PeerAndTag(int peer, int tag) const {
  if (peer < 0 || peer >= size_) return Error(absl::StrCat("rank ", peer, " is not in this group of ", size_));
  if (peer == rank_) return Error(absl::StrCat("rank ", peer, " is this rank itself: messages go to other ranks"));
  if (tag < 0) return Error(absl::StrCat("tag ", tag, " is negative"));
  return absl::OkStatus();
}

absl::Status CallCheck::AllocationOf(size_t bytes, Device device) const {
  if (bytes == 0) return Error("0 bytes asked for");
  if (device == device_) return absl::OkStatus();
  return Error(
      absl::StrCat(NameOf(device), " memory asked for, but the group's backend works in ", NameOf(device_), " memory"));
}

}  // namespace ddp
