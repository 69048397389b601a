// SPDX-License-Identifier: Apache-2.0
// The operations of the MPI that starts us, blocking: what libddp's are measured beside.
#ifndef BENCH_MPI_PEER_H_
#define BENCH_MPI_PEER_H_

#include "bench/collective.h"

namespace bench {

bool HaveMpi();

// Initialises MPI for one thread, before the library would do so for several.
void StartMpi();
void StopMpi();

// False where MPI has no such type, operation or place for the result.
bool MpiRuns(const Case& c);

// Errors end the job, as MPI does it.
void RunMpi(const Case& c, const void* in, void* out);

}  // namespace bench

#endif  // BENCH_MPI_PEER_H_
