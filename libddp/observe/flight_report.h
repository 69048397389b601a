// SPDX-License-Identifier: Apache-2.0
// Makes sense of what all ranks wrote down of their operations: who waits for whom, and where the ranks part.
#ifndef LIBDDP_OBSERVE_FLIGHT_REPORT_H_
#define LIBDDP_OBSERVE_FLIGHT_REPORT_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "libddp/comm/health/context_observer.h"
#include "libddp/comm/health/flight_ring.h"

namespace ddp {

// The rings of one group, as they were at one moment.
struct FlightLog {
  std::vector<std::vector<FlightRecord>> ranks;  // by rank, each by sequence
  std::vector<int> dead;
  int64_t now_ns = 0;
  int node = -1;                // of whose ranks alone it tells; -1: of all
  std::vector<int> names = {};  // see FlightIncident

  int NameOf(size_t r) const { return names.empty() ? static_cast<int>(r) : names[r]; }
};

FlightLog ReadFlightLog(const FlightIncident& incident);

// The first operation, as far back as all rings reach, that not all ranks have called, or that they have called
// differently; nullopt if there is none.
std::optional<uint64_t> PartingOperation(const FlightLog& log);

// For people: several lines, each indented by two spaces.
std::string FlightText(const FlightLog& log);

// For programs: one object with everything in the log. Times are seconds before `now`; states as in the text.
std::string FlightJson(const FlightIncident& incident, const FlightLog& log);

}  // namespace ddp

#endif  // LIBDDP_OBSERVE_FLIGHT_REPORT_H_
