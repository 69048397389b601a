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

// From now on SIGINT and SIGTERM are remembered instead of ending the process; a second one ends it.
void CatchStopSignals();

// The name of the signal that was caught, or null.
const char* StopSignal();

// Whether a person sees what we print on standard output, directly or through a parent (mpirun gives rank 0 a terminal
// of its own whatever becomes of the output).
bool OutputIsTerminal(bool through_parent);

}  // namespace examples

#endif  // EXAMPLES_TRAIN_HOST_H_
