#include "libddp/comm/base/validate.h"

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <string>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "libddp/device/device_runtime.h"

namespace ddp {
namespace {

// A buffer as an interval of addresses. `place`: where its first byte lies in the logical array, the list of buffers
// end to end.
struct Interval {
  uintptr_t begin = 0, end = 0;
  size_t place = 0;
};

Interval IntervalOf(const Buffer& b, size_t place) {
  const auto begin = reinterpret_cast<uintptr_t>(b.data);
  return {begin, begin + b.count * SizeOf(b.dtype), place};
}

// What is wrong with the memory of `in` and `out`: nothing if each byte of out that also belongs to in is the byte that
// lies `shift` further in in's logical array. Null if all is well.
const char* CheckOverlap(Buffers in, Buffers out, ptrdiff_t shift) {
  constexpr const char* kMisplaced =
      "in and out overlap without being the same memory, element for element; in place, equal elements of the same "
      "size lie at their own place, and everything else needs memory of its own";
  const bool same_size = SizeOf(in[0].dtype) == SizeOf(out[0].dtype);
  const auto misplaced = [&](const Interval& a, const Interval& b) {
    if (a.begin >= b.end || b.begin >= a.end) return false;
    return !same_size || a.begin - a.place != b.begin - b.place - static_cast<uintptr_t>(shift);
  };
  if (in.size() == 1 && out.size() == 1) {
    return misplaced(IntervalOf(in[0], 0), IntervalOf(out[0], 0)) ? kMisplaced : nullptr;
  }
  absl::InlinedVector<Interval, 8> outs;
  size_t place = 0;
  for (const Buffer& b : out) {
    if (b.count == 0) continue;
    outs.push_back(IntervalOf(b, place));
    place += outs.back().end - outs.back().begin;
  }
  const auto by_begin = [](const Interval& a, const Interval& b) { return a.begin < b.begin; };
  if (!std::is_sorted(outs.begin(), outs.end(), by_begin)) std::sort(outs.begin(), outs.end(), by_begin);
  for (size_t i = 1; i < outs.size(); ++i) {
    if (outs[i].begin < outs[i - 1].end) return "two out buffers overlap; each result needs memory of its own";
  }
  // Of one out byte only one byte of in can be at its place, so the loops end after as many steps as there are buffers.
  place = 0;
  for (const Buffer& b : in) {
    const Interval a = IntervalOf(b, place);
    place += a.end - a.begin;
    const auto ends_before = [](const Interval& o, uintptr_t begin) { return o.end <= begin; };
    auto o = std::lower_bound(outs.begin(), outs.end(), a.begin, ends_before);
    for (; o != outs.end() && o->begin < a.end; ++o) {
      if (misplaced(a, *o)) return kMisplaced;
    }
  }
  return nullptr;
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
  // Where the smaller array, a part, lies in the larger one.
  const auto rank = static_cast<ptrdiff_t>(rank_);
  const auto part_in = out_times > 1 ? static_cast<ptrdiff_t>(out_extent->count * SizeOf(out_extent->dtype)) : 0;
  const auto part_out = in_times > 1 ? static_cast<ptrdiff_t>(in_extent->count * SizeOf(in_extent->dtype)) : 0;
  const char* const wrong = CheckOverlap(in, out, rank * (part_in - part_out));
  return wrong == nullptr ? absl::OkStatus() : Error(wrong);
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
  if (out_extent->count != total) {
    return Error(absl::StrCat("out has ", out_extent->count, " elements, but the counts come to ", total));
  }
  const size_t before = std::accumulate(counts.begin(), counts.begin() + rank_, size_t{0});
  const char* const wrong = CheckOverlap(in, out, -static_cast<ptrdiff_t>(before * SizeOf(from.dtype)));
  return wrong == nullptr ? absl::OkStatus() : Error(wrong);
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

absl::Status CallCheck::After(Stream after) const {
  if (absl::Status s = CheckStream(device_, after); !s.ok()) return Error(s.message());
  return absl::OkStatus();
}

absl::Status CallCheck::AllocationOf(size_t bytes, Device device) const {
  if (bytes == 0) return Error("0 bytes asked for");
  if (device == device_) return absl::OkStatus();
  return Error(
      absl::StrCat(NameOf(device), " memory asked for, but the group's backend works in ", NameOf(device_), " memory"));
}

}  // namespace ddp
