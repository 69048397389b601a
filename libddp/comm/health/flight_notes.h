// SPDX-License-Identifier: Apache-2.0
// What a group writes down of its operations while they are under way, and whom it tells.
#ifndef LIBDDP_COMM_HEALTH_FLIGHT_NOTES_H_
#define LIBDDP_COMM_HEALTH_FLIGHT_NOTES_H_

#include <cstdint>

#include "ddp/observer.h"
#include "libddp/comm/base/operation_key.h"
#include "libddp/comm/health/context_observer.h"
#include "libddp/comm/health/flight_ring.h"

namespace ddp {

// One rank's notes of one group: into its ring of the flight recorder, and to the Context's listener, if there is one.
// One thread at a time for each operation.
class FlightNotes {
 public:
  struct Call {
    uint64_t sequence;
    const OperationKey& key;
    uint64_t count;
    int bucket;
  };

  // Without an observer nothing is noted: the group is a part of another, which notes its own operations. What is
  // given outlives the notes.
  FlightNotes(ContextObserver* observer, uint64_t group, FlightRing& ring)
      : ring_(observer == nullptr ? nullptr : &ring),
        listener_(observer == nullptr ? nullptr : observer->listener()),
        group_(group) {}

  // The listener, or null.
  Observer* listener() const { return listener_; }

  // The operation has been called, then enters one state after the other. For Operation and NodeOperation.
  template <typename T>
  void Queued(const T& operation) const {
    Queue({operation.sequence, operation.called.key, operation.called.count, operation.bucket});
  }
  // At `at_ns`, or now.
  template <typename T>
  void Entered(const T& operation, FlightState state, int64_t at_ns = 0) const {
    Enter({operation.sequence, operation.called.key, operation.called.count, operation.bucket}, state, at_ns);
  }
  void Queue(const Call& call) const {
    if (ring_ != nullptr) NoteQueued(call);
  }
  void Enter(const Call& call, FlightState state, int64_t at_ns = 0) const {
    if (ring_ != nullptr) NoteEntered(call, state, at_ns);
  }

 private:
  void NoteQueued(const Call& call) const;
  void NoteEntered(const Call& call, FlightState state, int64_t at_ns) const;
  void TellListener(const Call& call, OperationEvent::State state, int64_t ended_ns) const;
  int64_t Now() const;

  FlightRing* const ring_;
  Observer* const listener_;
  const uint64_t group_;
};

}  // namespace ddp

#endif  // LIBDDP_COMM_HEALTH_FLIGHT_NOTES_H_
