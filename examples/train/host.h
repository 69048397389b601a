// SPDX-License-Identifier: Apache-2.0
// Information about this process from the operating system, and signals.
#ifndef EXAMPLES_TRAIN_HOST_H_
#define EXAMPLES_TRAIN_HOST_H_

#include <cstdint>
#include <string>

namespace examples {

// Returns the name of this host.
std::string HostName();

// Returns the logical processors that this process may run on, as ranges: "0", "0-3,8".
std::string BoundCores();

// Returns the peak resident memory of this process in MiB.
int64_t PeakRssMb();

// After this call SIGTERM, SIGUSR1 (batch systems send one of them before the end) and SIGINT no longer end the
// process; StopSignal returns them. A second signal of the same kind ends the process.
void CatchStopSignals();

// Returns the signal that was caught, or 0.
int StopSignal();

// Returns the name of one of these signals, such as "SIGTERM".
const char* SignalName(int signal);

// True if standard output is shown on a terminal, directly or through a parent process (mpirun gives rank 0 its own
// terminal, even if mpirun's output goes elsewhere).
bool OutputIsTerminal(bool through_parent);

}  // namespace examples

#endif  // EXAMPLES_TRAIN_HOST_H_
