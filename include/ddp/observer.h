// What the library tells of its work while it is under way: for timelines, profilers and metrics of one's own.
#ifndef DDP_OBSERVER_H_
#define DDP_OBSERVER_H_

#include <cstddef>
#include <cstdint>

#include "absl/strings/string_view.h"
#include "ddp/types.h"

namespace ddp {

// All times are nanoseconds on CLOCK_MONOTONIC, which the processes of a host share; 0: not reached.

// One collective operation of one rank, told when it is called and when it has ended.
struct OperationEvent {
  enum class State : uint8_t { kCalled, kDone, kFailed };

  State state = State::kCalled;
  absl::string_view kind;  // "all_reduce", ...; a literal
  DType dtype = DType::kFloat32;
  uint64_t group = 0;     // the same for all operations of one ProcessGroup of this process
  uint64_t sequence = 0;  // number of the call in its group, the same on all ranks
  uint64_t count = 0;     // elements
  int bucket = -1;        // ReduceOptions::bucket
  int64_t called_ns = 0;
  int64_t announced_ns = 0;  // the peers know of it
  int64_t ready_ns = 0;      // all ranks have announced it, seen from here (or all whom it waits for)
  int64_t ended_ns = 0;
};

// One bucket of gradients in one reduced step, told at the step's end.
struct BucketEvent {
  int64_t step = 0;
  int bucket = 0;
  size_t bytes = 0;
  int64_t ready_ns = 0;     // its last gradient was announced here
  int64_t launched_ns = 0;  // its reduction was handed to the group
  int64_t done_ns = 0;
};

// A stretch of the program on one thread, told at its begin and at its end; see TraceScope.
struct ScopeEvent {
  const char* name = "";  // a literal
  bool begin = false;
  int64_t begin_ns = 0;
  int64_t end_ns = 0;  // 0 at the begin
};

// Requires of who implements it: calls come from any thread, concurrently, some with the group's mutex held: be quick,
// and call nothing of the library. The observer outlives the Context that it was given to.
class DDP_EXPORT Observer {
 public:
  virtual ~Observer() = default;

  virtual void OnOperation(const OperationEvent& event) noexcept = 0;
  virtual void OnBucket(const BucketEvent& event) noexcept = 0;
  virtual void OnScope(const ScopeEvent& event) noexcept = 0;
};

class ProcessGroup;

// Makes a stretch of the caller's code, from construction to destruction, known to the group's observers: it shows in
// the timeline and in NVIDIA's tools. Costs a comparison where nobody observes. Scopes of a thread nest.
//
//   {
//     ddp::TraceScope scope(context->world(), "forward");
//     ...
//   }
class DDP_EXPORT TraceScope {
 public:
  // `name` is a string literal, or lives as long as the Context.
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
