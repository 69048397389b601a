// What collective_bench measures.
#ifndef BENCH_COLLECTIVE_H_
#define BENCH_COLLECTIVE_H_

#include <cstdint>

namespace bench {

// With `count` elements, of which `part` = count / ranks:
enum class Collective : uint8_t {
  kAllGather,      // in: part, out: count
  kReduceScatter,  // in: count, out: part
  kBroadcast,      // out of rank 0: count
  kAllToAll,       // in, out: count
  kSendRecv,       // in: count to the next rank, out: count from the one before, at once
  kPingPong,       // in: count to the other rank of a pair, out: count from there, one after the other
};

}  // namespace bench

#endif  // BENCH_COLLECTIVE_H_
