// What the operating system says about this process, and what it asks of it.
#ifndef EXAMPLES_TRAIN_HOST_H_
#define EXAMPLES_TRAIN_HOST_H_

#include <cstdint>
#include <string>

namespace examples {

// The logical processors that this process may run on, as ranges: "0", "0-3,8".
std::string BoundCores();

// The most memory that this process has had resident so far.
int64_t PeakRssMb();

// From now on SIGTERM, SIGUSR1 (batch systems send either ahead of the end) and SIGINT are remembered instead of ending
// the process; the second of a kind ends it.
void CatchStopSignals();

// The signal that was caught, or 0.
int StopSignal();

// "SIGTERM" and the like, for those above.
const char* SignalName(int signal);

// Whether a person sees what we print on standard output, directly or through a parent (mpirun gives rank 0 a terminal
// of its own whatever becomes of the output).
bool OutputIsTerminal(bool through_parent);

}  // namespace examples

#endif  // EXAMPLES_TRAIN_HOST_H_
