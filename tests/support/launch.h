// SPDX-License-Identifier: Apache-2.0
// What a test program needs of MPI. In a build without it launch_no_mpi.cc says that there is none.
#ifndef TESTS_SUPPORT_LAUNCH_H_
#define TESTS_SUPPORT_LAUNCH_H_

namespace ddp::testing {

// Whether mpirun started this process as one of several ranks.
bool UnderMpi();

// This process's rank as mpirun says; 0 without it.
int MpiRank();
int MpiSize();

// Initialises MPI if nobody did yet. A test program does it once, so that each of its worlds finds MPI ready and none
// finalizes it.
void StartMpi();

// Finalizes MPI if StartMpi initialised it.
void FinishMpi();

// Waits for all ranks, without the library under test.
void MpiBarrier();

// Ends this process, and under MPI all ranks, with a failure.
[[noreturn]] void EndJob();

}  // namespace ddp::testing

#endif  // TESTS_SUPPORT_LAUNCH_H_
