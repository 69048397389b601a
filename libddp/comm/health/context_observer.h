// SPDX-License-Identifier: Apache-2.0
// The observers that the library brings with it, as comm knows them; libddp/observe implements them.
#ifndef LIBDDP_COMM_HEALTH_CONTEXT_OBSERVER_H_
#define LIBDDP_COMM_HEALTH_CONTEXT_OBSERVER_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "ddp/observer.h"
#include "ddp/process_group.h"
#include "libddp/comm/health/flight_ring.h"

namespace ddp {

// Something that the user should hear of: a group that has failed, or that has not got on for long.
struct FlightIncident {
  absl::string_view what;                // one line
  bool failure = false;                  // else a stall: the group goes on
  int rank = 0;                          // who tells
  std::vector<const FlightRing*> rings;  // by rank; in a group of several nodes, by local rank of one of them
  std::vector<int> dead;                 // ranks whose process has ended, numbered as the rings
  int node = -1;                         // whose rings they are, or all ranks'
  std::vector<int> names = {};           // what each ring's rank is called; empty: its number
};

// One per Context. Outlives its groups. Thread-safe.
class ContextObserver {
 public:
  virtual ~ContextObserver() = default;

  // Null where nobody wants operations, buckets and scopes told: what groups keep, and give to others.
  virtual Observer* listener() = 0;

  // Where there is a timeline: the Context's group has been made, and is about to be destroyed. Collective.
  virtual absl::Status Begin(ProcessGroup& world) = 0;
  virtual void End(ProcessGroup& world) = 0;

  // A group has failed: what is only in memory may be lost soon.
  virtual void OnGroupFailed() = 0;

  // A number for a new group, by which events tell this Context's groups apart: the world's is 0.
  virtual uint64_t AddGroup() = 0;

  // Logs the incident, and writes DDP_FLIGHT_RECORDER.
  virtual void OnIncident(const FlightIncident& incident) = 0;
};

struct ObserverOptions {
  int rank = 0;
  Observer* user = nullptr;
  std::string trace;            // where to write the timeline; empty: nowhere
  std::string flight_recorder;  // where to write the rings at an incident; empty: nowhere
};

std::unique_ptr<ContextObserver> CreateContextObserver(const ObserverOptions& options);

}  // namespace ddp

#endif  // LIBDDP_COMM_HEALTH_CONTEXT_OBSERVER_H_
