// The collective operations of the MPI that starts us, blocking and of float32: what libddp's are measured beside.
#ifndef BENCH_MPI_PEER_H_
#define BENCH_MPI_PEER_H_

#include <cstddef>

#include "bench/collective.h"

namespace bench {

// Initialises MPI for one thread, before the library would do so for several.
void StartMpi();
void StopMpi();

// `in` and `out` as for libddp's, see Collective. Errors end the job, as MPI does it.
void RunMpi(Collective collective, const float* in, float* out, size_t count, int rank, int ranks);

}  // namespace bench

#endif  // BENCH_MPI_PEER_H_
