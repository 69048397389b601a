// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/base/composed.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "libddp/base/round.h"
#include "libddp/comm/base/joined_work.h"
#include "libddp/comm/base/range_list.h"

namespace ddp {
namespace {

using Kind = Call::Kind;

// No program's message has these.
constexpr int kGatherTag = kHighestTag + 1, kScatterTag = kGatherTag + 1, kAllToAllTag = kGatherTag + 2;

// As Slice, with a buffer at least.
std::vector<Buffer> Part(Buffers buffers, size_t first, size_t count) {
  std::vector<Buffer> part = Slice(buffers, first, count);
  if (part.empty()) part.push_back({nullptr, 0, buffers[0].dtype, buffers[0].device});
  return part;
}

// The elements that rank `rank` sends to rank r, and receives from it; unset: there is no message.
struct Traffic {
  std::optional<size_t> sent, received;
};
Traffic TrafficWith(int r, int rank, const CheckedCall& call) {
  const int root = call.key.root;
  Traffic traffic;
  switch (call.key.kind) {
    case Kind::kGather:
      if (r == root) traffic.sent = call.count;
      if (rank == root) traffic.received = call.count;
      break;
    case Kind::kScatter:
      if (rank == root) traffic.sent = call.count;
      if (r == root) traffic.received = call.count;
      break;
    case Kind::kSendRecv:
      if (r == call.to) traffic.sent = call.count;
      if (r == call.from) traffic.received = call.out_count;
      break;
    default:
      traffic = {call.counts[static_cast<size_t>(r)], call.out_counts[static_cast<size_t>(r)]};
  }
  return traffic;
}

int TagOf(const CheckedCall& call) {
  switch (call.key.kind) {
    case Kind::kGather:
      return kGatherTag;
    case Kind::kScatter:
      return kScatterTag;
    case Kind::kSendRecv:
      return call.tag;
    default:
      return kAllToAllTag;
  }
}

}  // namespace

// The results of the other ranks, and whether they are finite, go to memory that nobody reads.
Work ReduceByAllReduce(const CheckedCall& call, int rank, StartStep start, std::shared_ptr<OrphanedMemory> orphans) {
  CheckedCall all = call;
  all.key.kind = Kind::kAllReduce;
  all.key.root = 0;
  if (rank == int{call.key.root}) return start(all);
  const std::shared_ptr<uint64_t[]> unused(new uint64_t[1 + CeilDiv(call.count * SizeOf(call.key.out), 8)]);
  const Buffer scratch{&unused[1], call.count, call.key.out, {}};
  ReduceOptions options = *call.reduce;
  if (options.nonfinite != nullptr) options.nonfinite = reinterpret_cast<uint32_t*>(unused.get());
  all.out = scratch;
  all.reduce = &options;
  return JoinWorks({start(all)}, unused, std::move(orphans));
}

Work ReducePartByPart(const CheckedCall& call, StartStep start) {
  std::vector<Work> works;
  size_t begin = 0;
  for (size_t r = 0; r < call.counts.size(); ++r) {
    const std::vector<Buffer> in = Part(call.in, begin, call.counts[r]);
    CheckedCall part = call;
    part.key.kind = Kind::kReduce;
    part.key.root = static_cast<uint16_t>(r);
    part.in = in;
    part.count = part.out_count = call.counts[r];
    part.counts = {};
    works.push_back(start(part));
    begin += call.counts[r];
  }
  return JoinWorks(std::move(works));
}

// Receives first: a message finds its place when it comes. What a rank gives itself is copied.
Work MoveByMessages(const ProcessGroup& group, const CheckedCall& call, StartMessageStep start) {
  if (absl::Status s = group.status(); !s.ok()) return s;
  const int tag = TagOf(call), rank = group.rank();
  const auto message = [&](bool send, Buffers part, int peer, size_t count) {
    return start({send, part, peer, tag, {count, part[0].dtype}, {}, call.timeout});
  };
  std::vector<Work> works, sends;
  RangeList own_in, own_out;
  size_t in_begin = 0, out_begin = 0;
  for (int r = 0; r < group.size(); ++r) {
    const Traffic traffic = TrafficWith(r, rank, call);
    if (traffic.received.has_value()) {
      const std::vector<Buffer> part = Part(call.out, out_begin, *traffic.received);
      if (r == rank) own_out = Ranges(part);
      if (r != rank) works.push_back(message(false, part, r, *traffic.received));
      out_begin += *traffic.received;
    }
    if (traffic.sent.has_value()) {
      const std::vector<Buffer> part = Part(call.in, in_begin, *traffic.sent);
      if (r == rank) own_in = Ranges(part);
      if (r != rank) sends.push_back(message(true, part, r, *traffic.sent));
      in_begin += *traffic.sent;
    }
  }
  own_in.CopyTo(0, own_out, 0, own_in.bytes());
  works.insert(works.end(), sends.begin(), sends.end());
  return JoinWorks(std::move(works));
}

}  // namespace ddp
