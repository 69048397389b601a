// SPDX-License-Identifier: Apache-2.0
#include "bench/collective.h"

#include <algorithm>
#include <utility>

namespace bench {
namespace {

using ddp::Buffer;
using ddp::Work;

// Name, in, out, reduces, rooted, in place, out of place.
constexpr CollectiveInfo kInfo[kCollectives] = {
    {"all_reduce", Share::kWhole, Share::kWhole, true, false, true, true},
    {"all_gather", Share::kPart, Share::kWhole, false, false, true, true},
    {"all_gather_v", Share::kPart, Share::kWhole, false, false, true, true},
    {"reduce_scatter", Share::kWhole, Share::kPart, true, false, true, true},
    {"broadcast", Share::kWhole, Share::kWhole, false, true, true, false},
    {"reduce", Share::kWhole, Share::kWhole, true, true, true, true},
    {"gather", Share::kPart, Share::kWhole, false, true, true, true},
    {"scatter", Share::kWhole, Share::kPart, false, true, true, true},
    {"all_to_all", Share::kWhole, Share::kWhole, false, false, true, true},
    {"sendrecv", Share::kWhole, Share::kWhole, false, false, false, true},
    {"pingpong", Share::kWhole, Share::kWhole, false, false, false, true},
    {"barrier", Share::kNone, Share::kNone, false, false, true, false},
};

bool IsRoot(const Case& c) { return c.rank == c.root; }

// Two messages in an order in which no rank waits for one that waits for it.
Work Exchange(ddp::ProcessGroup& group, const Buffer& in, const Buffer& out, int to, int from, bool send_first,
              ddp::Stream after) {
  Work first = send_first ? group.Send(in, to, 0, after) : group.Recv(out, from, 0, after);
  if (absl::Status s = first.call_status(); !s.ok()) return s;
  return send_first ? group.Recv(out, from, 0, after) : group.Send(in, to, 0, after);
}

Work StartMessages(ddp::ProcessGroup& group, const Case& c, const Buffer& in, const Buffer& out, ddp::Stream after) {
  const bool pairs = c.collective == Collective::kPingPong;
  const int to = pairs ? c.partner() : c.next(), from = pairs ? c.partner() : c.previous();
  if (to < 0) return {};
  // On GPUs messages run in the order of the calls.
  if (c.device.kind == ddp::Device::Kind::kCuda) return Exchange(group, in, out, to, from, c.rank % 2 == 0, after);
  const bool answers = pairs && c.rank > to;
  absl::Status status = absl::OkStatus();
  if (answers) status = group.Recv(out, from, 0).Wait();
  Work send = status.ok() ? group.Send(in, to, 0) : Work(status);
  if (!answers) status = group.Recv(out, from, 0).Wait();
  return status.ok() ? send.Wait() : status;
}

}  // namespace

const CollectiveInfo& Info(Collective collective) { return kInfo[static_cast<size_t>(collective)]; }

void Case::SetBytes(size_t bytes) {
  const auto n = static_cast<size_t>(ranks);
  const bool uneven = collective == Collective::kAllGatherV;
  const bool split = info().in == Share::kPart || info().out == Share::kPart || collective == Collective::kAllToAll;
  const size_t elements = collective == Collective::kBarrier ? 0 : std::max<size_t>(1, bytes / ddp::SizeOf(dtype));
  const size_t unit = std::max<size_t>(1, elements / (uneven ? n * (n + 1) / 2 : n));
  counts.clear();
  offsets.assign(1, 0);
  for (size_t r = 0; r < n; ++r) {
    const size_t rest = r == n - 1 ? elements : 0;  // without parts, all of it is the last one's
    counts.push_back(!split ? rest : uneven ? unit * (r + 1) : unit);
    offsets.push_back(offsets.back() + counts.back());
  }
}

size_t Case::InCount() const {
  if (collective == Collective::kScatter && !IsRoot(*this)) return 0;
  return info().in == Share::kPart ? counts[static_cast<size_t>(rank)] : count();
}

size_t Case::OutCount() const {
  if ((collective == Collective::kReduce || collective == Collective::kGather) && !IsRoot(*this)) return 0;
  return info().out == Share::kPart ? counts[static_cast<size_t>(rank)] : count();
}

std::vector<Segment> Case::Results() const {
  const size_t all = OutCount(), mine = offsets[static_cast<size_t>(rank)];
  if (all == 0) return {};
  switch (collective) {
    case Collective::kAllReduce:
    case Collective::kReduce:
      return {{0, all, -1, 0}};
    case Collective::kReduceScatter:
      return {{0, all, -1, mine}};
    case Collective::kBroadcast:
      return {{0, all, root, 0}};
    case Collective::kScatter:
      return {{0, all, root, mine}};
    case Collective::kSendRecv:
      return {{0, all, previous(), 0}};
    case Collective::kPingPong:
      if (partner() < 0) return {};
      return {{0, all, partner(), 0}};
    default:
      break;  // the parts of all ranks, one after the other
  }
  std::vector<Segment> segments;
  for (size_t r = 0; r < counts.size(); ++r) {
    segments.push_back({offsets[r], counts[r], static_cast<int>(r), collective == Collective::kAllToAll ? mine : 0});
  }
  return segments;
}

double Case::BusFactor() const {
  const double n = ranks;
  switch (collective) {
    case Collective::kAllReduce:
      return 2 * (n - 1) / n;
    case Collective::kPingPong:
      return 2;
    case Collective::kBroadcast:
    case Collective::kReduce:
    case Collective::kSendRecv:
      return 1;
    default:
      return (n - 1) / n;
  }
}

Work Start(ddp::ProcessGroup& group, const Case& c, void* in_data, void* out_data, ddp::Stream after) {
  const Buffer in{in_data, c.InCount(), c.dtype, c.device}, out{out_data, c.OutCount(), c.dtype, c.device};
  const ddp::ReduceOptions reduce{.op = c.op};
  switch (c.collective) {
    case Collective::kAllReduce:
      return group.AllReduce(in, out, reduce, after);
    case Collective::kAllGather:
      return group.AllGather(in, out, after);
    case Collective::kAllGatherV:
      return group.AllGather(in, out, c.counts, after);
    case Collective::kReduceScatter:
      return group.ReduceScatter(in, out, reduce, after);
    case Collective::kBroadcast:
      return group.Broadcast(out, c.root, after);
    case Collective::kReduce:
      return group.Reduce(in, IsRoot(c) ? ddp::Buffers(out) : ddp::Buffers(), c.root, reduce, after);
    case Collective::kGather:
      return group.Gather(in, IsRoot(c) ? ddp::Buffers(out) : ddp::Buffers(), c.root, after);
    case Collective::kScatter:
      return group.Scatter(IsRoot(c) ? ddp::Buffers(in) : ddp::Buffers(), out, c.root, after);
    case Collective::kAllToAll:
      return group.AllToAll(in, out, after);
    case Collective::kSendRecv:
    case Collective::kPingPong:
      return StartMessages(group, c, in, out, after);
    case Collective::kBarrier:
      break;
  }
  return group.Barrier();
}

}  // namespace bench
