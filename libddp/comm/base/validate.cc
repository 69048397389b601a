// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/base/validate.h"

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <string>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "libddp/comm/base/operation_key.h"
#include "libddp/comm/base/range_list.h"
#include "libddp/device/device_runtime.h"

namespace ddp {
namespace {

using Kind = Call::Kind;

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

absl::InlinedVector<Interval, 8> ByAddress(Buffers buffers) {
  absl::InlinedVector<Interval, 8> intervals;
  size_t place = 0;
  for (const Buffer& b : buffers) {
    if (b.count == 0) continue;
    intervals.push_back(IntervalOf(b, place));
    place += intervals.back().end - intervals.back().begin;
  }
  const auto by_begin = [](const Interval& a, const Interval& b) { return a.begin < b.begin; };
  if (!std::is_sorted(intervals.begin(), intervals.end(), by_begin)) {
    std::sort(intervals.begin(), intervals.end(), by_begin);
  }
  return intervals;
}

// Null if all is well.
const char* CheckApart(absl::Span<const Interval> outs) {
  for (size_t i = 1; i < outs.size(); ++i) {
    if (outs[i].begin < outs[i - 1].end) return "two out buffers overlap; each result needs memory of its own";
  }
  return nullptr;
}

// What is wrong with the memory of `in` and `out`: nothing if each byte of out that also belongs to in is the byte that
// lies `shift` further in in's logical array. Null if all is well.
const char* CheckOverlap(Buffers in, Buffers out, ptrdiff_t shift) {
  constexpr const char* kMisplaced =
      "in and out overlap without being the same memory, element for element; in place, equal elements of the same "
      "size lie at their own place, and everything else needs memory of its own";
  const bool same_size = SizeOf(in[0].dtype) == SizeOf(out[0].dtype);
  const auto misplaced = [&](const Interval& a, const Interval& b) {
    const bool apart = a.begin >= b.end || b.begin >= a.end || a.begin == a.end || b.begin == b.end;
    if (apart) return false;
    return !same_size || a.begin - a.place != b.begin - b.place - static_cast<uintptr_t>(shift);
  };
  if (in.size() == 1 && out.size() == 1) {
    return misplaced(IntervalOf(in[0], 0), IntervalOf(out[0], 0)) ? kMisplaced : nullptr;
  }
  const absl::InlinedVector<Interval, 8> outs = ByAddress(out);
  if (const char* const wrong = CheckApart(outs); wrong != nullptr) return wrong;
  // Of one out byte only one byte of in can be at its place, so the loops end after as many steps as there are buffers.
  size_t place = 0;
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
  const std::string name = world_ranks_ == nullptr ? absl::StrCat("rank ", rank_) : world_ranks_->NameOf(rank_);
  return absl::InvalidArgumentError(absl::StrCat(name, ": ", call_, ": ", what));
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

absl::Status CallCheck::Arguments(const Call& call, Extent* in, Extent* out) const {
  absl::Status status;
  if (call.kind == Call::Kind::kSend || call.kind == Call::Kind::kRecv) {
    status = CheckBuffers("message", call.in, in);
    if (status.ok()) status = PeerAndTag(call.peer, call.tag);
  } else if (call.kind == Call::Kind::kBroadcast) {
    status = CheckBuffers("in", call.in, in);
    *out = *in;
    if (status.ok()) status = Root(call.peer);
  } else {
    status = InOut(call, in, out);
  }
  const bool fills = call.kind == Call::Kind::kRecv || call.kind == Call::Kind::kBroadcast;
  if (status.ok() && fills && call.out.size() > 1) {
    if (const char* const wrong = CheckApart(ByAddress(call.out)); wrong != nullptr) status = Error(wrong);
  }
  if (status.ok() && !(status = CheckStream(device_, call.after)).ok()) status = Error(status.message());
  return status;
}

absl::Status CallCheck::InOut(const Call& call, Extent* in, Extent* out) const {
  if (HasRoot(call.kind)) {
    if (absl::Status s = Root(call.peer); !s.ok()) return s;
    if (call.peer != rank_) return NotAtRoot(call, in, out);
  }
  if (absl::Status s = CheckBuffers("in", call.in, in); !s.ok()) return s;
  if (absl::Status s = CheckBuffers("out", call.out, out); !s.ok()) return s;
  const bool gathers = call.kind == Kind::kAllGather || call.kind == Kind::kGather;
  const bool scatters = call.kind == Kind::kReduceScatter || call.kind == Kind::kScatter;
  const bool apart = call.kind == Kind::kAllToAllV || call.kind == Kind::kSendRecv;  // never in place
  if (!Reduces(call.kind) && in->dtype != out->dtype) return Error("in and out have different types");
  const auto size = static_cast<size_t>(size_), rank = static_cast<size_t>(rank_);
  const bool with_counts =
      call.kind == Kind::kAllGatherV || call.kind == Kind::kReduceScatterV || call.kind == Kind::kAllToAllV;
  if (call.kind == Kind::kSendRecv) {
    for (const int peer : {call.peer, call.from}) {
      if (absl::Status s = PeerAndTag(peer, call.tag); !s.ok()) return s;
    }
  } else if (with_counts) {
    if (absl::Status s = Counts(call, in->count, out->count); !s.ok()) return s;
  } else if (in->count * (gathers ? size : 1) != out->count * (scatters ? size : 1)) {
    return Error(absl::StrCat("in has ", in->count, " elements and out ", out->count, "; with ", size_,
                              " ranks out needs ", gathers ? size : 1, scatters ? absl::StrCat("/", size) : "",
                              " times as many as in"));
  }
  if (call.kind == Kind::kAllToAll && in->count % size != 0) {
    return Error(absl::StrCat(in->count, " elements cannot be cut into ", size, " equal parts"));
  }
  // Where the smaller array, a part, lies in the larger one.
  size_t in_place = 0, out_place = 0;
  if (scatters) in_place = rank * out->count;
  if (gathers) out_place = rank * in->count;
  size_t& uneven = call.kind == Kind::kReduceScatterV ? in_place : out_place;
  for (size_t r = 0; r < rank && with_counts; ++r) uneven += call.counts[r];
  if (apart) {
    return Ranges(call.in).Overlaps(Ranges(call.out)) ? Error("in and out overlap; each needs memory of its own")
                                                      : absl::OkStatus();
  }
  const char* const wrong =
      CheckOverlap(call.in, call.out, static_cast<ptrdiff_t>((in_place - out_place) * SizeOf(in->dtype)));
  return wrong == nullptr ? absl::OkStatus() : Error(wrong);
}

// Where one side of the call is the root's alone.
absl::Status CallCheck::NotAtRoot(const Call& call, Extent* in, Extent* out) const {
  if (call.kind == Call::Kind::kScatter) {
    const absl::Status status = CheckBuffers("out", call.out, out);
    *in = *out;
    return status;
  }
  const absl::Status status = CheckBuffers("in", call.in, in);
  *out = *in;
  if (call.kind == Call::Kind::kReduce && !call.out.empty()) out->dtype = call.out[0].dtype;
  return status;
}

// Calls with counts, of `in` and `out` elements.
absl::Status CallCheck::Counts(const Call& call, size_t in, size_t out) const {
  const bool gathers = call.kind == Call::Kind::kAllGatherV, exchanges = call.kind == Call::Kind::kAllToAllV;
  const absl::Span<const size_t> outs = exchanges ? call.out_counts : call.counts;
  for (const absl::Span<const size_t> counts : {call.counts, outs}) {
    if (counts.size() == static_cast<size_t>(size_)) continue;
    return Error(absl::StrCat(counts.size(), " counts given to a group of ", size_, " ranks"));
  }
  const size_t own = call.counts[static_cast<size_t>(rank_)], own_out = outs[static_cast<size_t>(rank_)];
  const auto part = [&](absl::string_view name, size_t have) {
    if (have == own) return absl::OkStatus();
    return Error(absl::StrCat(name, " has ", have, " elements, but this rank's count is ", own));
  };
  const auto whole = [&](absl::string_view name, size_t have, absl::Span<const size_t> counts) {
    const size_t total = std::accumulate(counts.begin(), counts.end(), size_t{0});
    if (have == total) return absl::OkStatus();
    return Error(absl::StrCat(name, " has ", have, " elements, but the counts come to ", total));
  };
  if (own != own_out) {
    return Error(absl::StrCat("this rank gives itself ", own, " elements and takes ", own_out, " of them"));
  }
  absl::Status status = gathers ? part("in", in) : whole("in", in, call.counts);
  if (status.ok()) status = gathers || exchanges ? whole("out", out, outs) : part("out", out);
  return status;
}

absl::Status CallCheck::Root(int root) const {
  if (root >= 0 && root < size_) return absl::OkStatus();
  return Error(absl::StrCat("root ", root, " is not a rank of a group of ", size_));
}

absl::Status CallCheck::PeerAndTag(int peer, int tag) const {
  if (peer < 0 || peer >= size_) return Error(absl::StrCat("rank ", peer, " is not in this group of ", size_));
  if (peer == rank_) return Error(absl::StrCat("rank ", peer, " is this rank itself: messages go to other ranks"));
  if (tag < 0) return Error(absl::StrCat("tag ", tag, " is negative"));
  if (tag > kHighestTag) {
    return Error(absl::StrCat("tag ", tag, " is above ", kHighestTag, ", the highest one that a program may use"));
  }
  return absl::OkStatus();
}

absl::Status CallCheck::AllocationOf(size_t bytes, Device device) const {
  if (bytes == 0) return Error("0 bytes asked for");
  if (device == device_) return absl::OkStatus();
  return Error(
      absl::StrCat(NameOf(device), " memory asked for, but the group's backend works in ", NameOf(device_), " memory"));
}

}  // namespace ddp
