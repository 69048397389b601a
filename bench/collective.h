// SPDX-License-Identifier: Apache-2.0
// The operations that ddp_perf times, and what each rank hands in and gets.
#ifndef BENCH_COLLECTIVE_H_
#define BENCH_COLLECTIVE_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/strings/string_view.h"
#include "ddp/process_group.h"
#include "ddp/types.h"

namespace bench {

enum class Collective : uint8_t {
  kAllReduce,
  kAllGather,
  kAllGatherV,  // rank r contributes r + 1 parts
  kReduceScatter,
  kBroadcast,
  kReduce,
  kGather,
  kScatter,
  kAllToAll,
  kSendRecv,  // to the next rank and from the previous one at the same time
  kPingPong,  // to the other rank of a pair, and back
  kBarrier,
};
inline constexpr int kCollectives = 12;

// The array is cut into one part per rank; a buffer holds all of it, one part, or nothing.
enum class Share : uint8_t { kNone, kPart, kWhole };

struct CollectiveInfo {
  absl::string_view name;
  Share in, out;
  bool reduces, rooted;
  bool in_place, out_of_place;  // what the operation can do
};
const CollectiveInfo& Info(Collective collective);

// Elements `to` to `to + count` of a rank's output come from elements `from` on of the input of `rank`.
struct Segment {
  size_t to, count;
  int rank;  // -1: the reduction over all ranks
  size_t from;
};

// One line of the table, as one rank sees it.
struct Case {
  Collective collective = Collective::kAllReduce;
  ddp::DType dtype = ddp::DType::kFloat32;
  ddp::ReduceOp op = ddp::ReduceOp::kSum;
  int root = 0;
  bool in_place = true;
  ddp::Device device = {};
  int rank = 0, ranks = 1;
  std::vector<size_t> counts;   // elements of each part
  std::vector<size_t> offsets;  // where they begin, and the end

  // Cuts an array of about `bytes` bytes; no part is empty.
  void SetBytes(size_t bytes);

  const CollectiveInfo& info() const { return Info(collective); }
  size_t count() const { return offsets.back(); }
  size_t bytes() const { return count() * ddp::SizeOf(dtype); }
  int next() const { return (rank + 1) % ranks; }
  int previous() const { return (rank + ranks - 1) % ranks; }
  int partner() const { return (rank ^ 1) < ranks ? rank ^ 1 : -1; }

  // This rank's buffers. In place both lie in one array; an offset is where a rank's buffer begins there.
  size_t InCount() const;
  size_t OutCount() const;
  size_t InOffset(int of) const { return in_place ? Offset(info().in, of) : 0; }
  size_t OutOffset() const { return in_place ? Offset(info().out, rank) : 0; }

  // What this rank's output must be.
  std::vector<Segment> Results() const;

  // busbw / algbw, as in nccl-tests.
  double BusFactor() const;

 private:
  size_t Offset(Share share, int of) const { return share == Share::kPart ? offsets[static_cast<size_t>(of)] : 0; }
};

// Starts the operation. `in` and `out` are where this rank's buffers begin. In CPU memory messages are over when it
// returns.
ddp::Work Start(ddp::ProcessGroup& group, const Case& c, void* in, void* out, ddp::Stream after);

}  // namespace bench

#endif  // BENCH_COLLECTIVE_H_
