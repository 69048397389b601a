// SPDX-License-Identifier: Apache-2.0
// An interface for your own timelines, profilers and metrics: the library reports its operations as they happen.
#ifndef DDP_OBSERVER_H_
#define DDP_OBSERVER_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "ddp/types.h"

namespace ddp {

// All times are nanoseconds on CLOCK_MONOTONIC, which all processes of a host share. 0: not reached.

// One collective operation of one rank. Reported when it is called and when it has ended.
struct OperationEvent {
  // How far it is.
  enum class State : uint8_t { kCalled, kDone, kFailed };

  State state = State::kCalled;   // how far it is
  absl::string_view kind = {};    // "all_reduce", ...; a string literal
  DType dtype = DType::kFloat32;  // of its elements
  uint64_t group = 0;             // identifies the ProcessGroup within this process
  uint64_t sequence = 0;          // the number of the call in its group, the same on all ranks
  uint64_t count = 0;             // elements
  int bucket = -1;                // ReduceOptions::bucket
  int64_t called_ns = 0;          // the program made the call
  int64_t announced_ns = 0;       // the peers can see it
  int64_t ready_ns = 0;           // this rank saw that all ranks it waits for have announced it; on GPUs: ended_ns
  int64_t ended_ns = 0;           // on GPUs: when the host saw it, which looks once a millisecond
};

// One bucket of gradients in one reduced step. Reported at the end of the step.
struct BucketEvent {
  int64_t step = 0;         // 1, 2, ...
  int bucket = 0;           // its number in the plan
  size_t bytes = 0;         // of its gradients
  int64_t ready_ns = 0;     // its last gradient was announced on this rank
  int64_t launched_ns = 0;  // its reduction was handed to the group
  int64_t done_ns = 0;      // see BucketTimes::done_ns
  // The names of its parameters, in the order in which their gradients are expected; valid during the call.
  absl::Span<const std::string> parameters = {};
};

// A named section of the program on one thread. Reported at its begin and at its end; see TraceScope.
struct ScopeEvent {
  const char* name = "";  // a string literal
  bool begin = false;     // true at the begin, false at the end
  int64_t begin_ns = 0;   // when it began
  int64_t end_ns = 0;     // 0 at the begin
};

// Receives the events. Implementations must be fast, must not call the library, and must accept concurrent calls from
// any thread: the library makes some calls with the group's mutex held. The observer must outlive its Context.
class DDP_EXPORT Observer {
 public:
  virtual ~Observer() = default;

  virtual void OnOperation(const OperationEvent& event) noexcept = 0;  // called, and ended
  virtual void OnBucket(const BucketEvent& event) noexcept = 0;        // at the end of a reduced step
  virtual void OnScope(const ScopeEvent& event) noexcept = 0;          // begun, and ended
};

class ProcessGroup;

// Reports a section of the caller's code, from construction to destruction, to the group's observers. It appears in the
// timeline and in NVIDIA's tools. Without an observer it costs one comparison. Scopes of a thread may nest.
//
//   {
//     ddp::TraceScope scope(context->world(), "forward");
//     ...
//   }
class DDP_EXPORT TraceScope {
 public:
  // `name` is a string literal, or must live as long as the Context.
  [[nodiscard]] TraceScope(const ProcessGroup& group, const char* name);
  ~TraceScope() {
    if (observer_ != nullptr) Tell(false);
  }
  TraceScope(const TraceScope&) = delete;
  TraceScope& operator=(const TraceScope&) = delete;

 private:
  void Tell(bool begin);

  Observer* observer_;
  ScopeEvent event_;
};

}  // namespace ddp

#endif  // DDP_OBSERVER_H_
