// SPDX-License-Identifier: Apache-2.0
#include "bench/mpi_peer.h"

namespace bench {

bool HaveMpi() { return false; }
void StartMpi() {}
void StopMpi() {}
bool MpiRuns(const Case& /*c*/) { return false; }
void RunMpi(const Case& /*c*/, const void* /*in*/, void* /*out*/) {}

}  // namespace bench
