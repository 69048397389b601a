// SPDX-License-Identifier: Apache-2.0
// One communication stream of one GPU and the operations on it: their order, their Works, their time-outs, and what
// becomes of them when the group fails. What an operation enqueues is the backend's affair.
#ifndef LIBDDP_COMM_GPU_DEVICE_ENGINE_H_
#define LIBDDP_COMM_GPU_DEVICE_ENGINE_H_

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "ddp/process_group.h"
#include "libddp/base/steady_condition.h"
#include "libddp/comm/base/internal_group.h"
#include "libddp/comm/base/progress_thread.h"
#include "libddp/comm/base/world_ranks.h"
#include "libddp/comm/gpu/device_operation.h"
#include "libddp/comm/gpu/device_peers.h"
#include "libddp/comm/gpu/graph_watch.h"
#include "libddp/comm/health/context_observer.h"
#include "libddp/comm/health/flight_notes.h"
#include "libddp/comm/health/peer_board.h"
#include "libddp/device/device_runtime.h"

namespace ddp {

class DeviceWork;

// What the engine asks of the transport that its stream's kernels use.
class DeviceTransport {
 public:
  virtual ~DeviceTransport() = default;
  // An error that the transport noticed by itself. Cheap; never blocks.
  virtual absl::Status Health() = 0;
  // Ends what runs on the stream and what blocks in a call of the transport. Called once, by a thread of its own.
  // `why`: what the group has failed with.
  virtual void Abort(const absl::Status& why) = 0;
  // For how long after Abort what has begun may still run, at most.
  virtual absl::Duration LeaveTime() const { return absl::ZeroDuration(); }
  // Whether Health tells, not much later than a time-out, for whom the operation waits.
  virtual bool TellsTimeouts() const { return false; }
  // Whether what is aborted hands on to peers what it has not received, so that theirs ends as though it had a result.
  virtual bool HandsOn() const { return false; }
  // Whether it keeps the operations of CUDA graphs and others apart, which may be launched on two streams.
  virtual bool OrdersGraphs() const { return false; }
  // Why the stream may not come free although it was aborted, and what helps; empty if nothing is known.
  virtual std::string WhyStuck() const { return ""; }
};

struct DeviceEngineOptions {
  int rank = 0;
  Device device;
  absl::Duration abort_grace = absl::Seconds(10);  // what an abort is given to end what runs
  DeviceRuntime* runtime = nullptr;
  std::shared_ptr<DeviceTransport> transport;  // null: nothing can hang (a world of one)
  std::shared_ptr<PeerBoard> board;            // null: nobody else is there
  std::weak_ptr<InternalGroup> control;        // of the same ranks on CPU memory: fails with this
  absl::Duration stall_warning;                // zero: none
  ContextObserver* observer = nullptr;         // may be null
  uint64_t group = 0;                          // tells this process's groups apart
  WorldRanks world_ranks = {};
  ProgressThread* progress = nullptr;
};

// How an operation begins and ends:
//   Launch   on the caller's thread: orders the stream after the caller's, lets the backend enqueue, records an event
//   running  the progress thread looks once a millisecond: is the event through, has a peer gone, is it out of time?
//   failed   the first cause wins. `failed` becomes visible to the device before any stream that waits is released.
//            Where the transport hands on what is no result, the peers are given time for the same. Then a thread of
//            its own aborts the transport; the Works fail when that is done, or after abort_grace.
//
// No more than kMaxPending operations are enqueued ahead. What a thread enqueues into CUDA's queue when that is full
// blocks inside the driver: behind a dead peer's operation for ever, or until the abort, and NCCL then frees what is
// being enqueued still. A thread that waits here instead is told.
//
// Two mutexes: `issue_` is held while the backend enqueues, which may block inside the transport; `mutex_` never is, so
// the group can be aborted at any time.
//
// Operations that are captured into a CUDA graph have Works that support BlockStream only, which joins the capture.
// Nobody tells when the graph is launched, so a GraphWatch looks whether one is running: such a sequence of operations
// has one time-out. Peers and the transport are looked after as soon as anything has been captured.
class DeviceEngine final : public ProgressThread::Client, public std::enable_shared_from_this<DeviceEngine> {
 public:
  static absl::StatusOr<std::shared_ptr<DeviceEngine>> Create(DeviceEngineOptions options);
  ~DeviceEngine() override;

  // Leaves the group: what is unfinished is waited for a short while, and then ends with Aborted. To be called once,
  // before the last owner goes.
  void Shutdown();

  // After Shutdown: whether something may run yet, now or when a graph is launched.
  bool MayStillRun() const { return captured_ || !through_; }

  // After a failure: waits until nothing of the group runs any more, for no longer than an abort is given, and a second
  // where kernels need one to leave. An error says that the GPU is still at work, and why it may be.
  absl::Status AwaitFree();

  // Calls enqueue(stream), in order, with the group's device current. An error from it fails the group: some of the
  // operation may have been enqueued.
  Work Launch(const DeviceOperation& operation, Stream after, absl::FunctionRef<absl::Status(void* stream)> enqueue);

  void Fail(const absl::Status& error);
  absl::Status status();
  const uint32_t* failed_word() const { return words(); }
  // The same, for kernels that set it where they leave because a peer has failed.
  uint32_t* words() const { return static_cast<uint32_t*>(words_.get()); }
  ProgressThread::Found Tick() override;

  const DeviceEngineOptions& options() const { return options_; }
  DeviceRuntime& runtime() const { return *options_.runtime; }
  std::string name() const { return options_.world_ranks.NameOf(options_.rank); }

 private:
  friend class DeviceWork;
  explicit DeviceEngine(DeviceEngineOptions options);
  static constexpr size_t kMaxPending = 64;
  // While a graph lives the abort does not return; the kernels have been told long before.
  static constexpr absl::Duration kAbortGraceWithGraphs = absl::Seconds(2);

  absl::Status LaunchFailed(const DeviceOperation& operation, uint64_t sequence, const absl::Status& why);
  absl::Status MakeRoom();
  absl::Status OrderAfter(Stream after, bool* captured);
  absl::StatusOr<DeviceWork*> NewWork();
  void Recycle(DeviceWork* work);
  void Reap();
  bool Passed(uint64_t number);
  void Settle(DeviceWork* work);
  void SettleBefore(uint64_t number);
  void Look(DeviceWork* oldest);
  void LookAtGraphs();
  void Inquire(const absl::Status& error, uint64_t sequence);
  bool TimeToLook(int64_t now_ns);
  absl::Status JoinCaptured(DeviceWork* work, Stream stream);
  void TellStreams();
  void AbortTransport(const absl::Status& why);
  bool AwaitLeaving(const OwnedEvent& event) const;
  absl::Duration leave_time() const {
    return options_.transport == nullptr ? absl::ZeroDuration() : options_.transport->LeaveTime();
  }
  void HeedDevice();
  bool WaitUntilThrough();
  void Note(const DeviceWork& work, FlightState state) const;
  absl::Duration abort_grace() const {
    return captured_.load(std::memory_order_relaxed) ? kAbortGraceWithGraphs : options_.abort_grace;
  }
  // After a failure: what to say about a stream that has not come free, once it ought to have; else empty.
  std::string Stuck() const;
  // Of one Work:
  bool Finished(DeviceWork* work);
  absl::Status Outcome(DeviceWork* work);

  const DeviceEngineOptions options_;
  const DevicePeers peers_;
  std::optional<FlightNotes> notes_;  // of collective operations, where there is a board
  OwnedStream stream_;
  OwnedEvent after_event_;
  std::shared_ptr<void> words_;  // pinned: the failed word, which the device reads, and the graphs' counters

  std::mutex issue_;
  uint64_t next_sequence_ = 0;                 // guarded by issue_
  const DeviceWork* captured_last_ = nullptr;  // the same
  std::atomic<int64_t> graph_timeout_ns_{0};   // of what was captured last
  std::optional<GraphWatch> graphs_;           // RunningNs guarded by mutex_, the rest by issue_

  std::atomic<bool> captured_{false};  // there are graphs with operations of this group

  mutable std::mutex mutex_;
  std::deque<DeviceWork*> pending_;  // in order, one reference each
  uint64_t next_number_ = 0;         // in pending_
  std::vector<std::unique_ptr<DeviceWork>> idle_;
  absl::Status failure_;
  std::atomic<bool> failing_{false};  // the device knows, the cause is being told, or the group has gone
  std::atomic<bool> failed_{false};   // failure_ is set
  int64_t failed_ns_ = 0;
  bool released_ = false;  // nothing runs any more
  bool through_ = false;   // by Shutdown: the stream is at its end
  std::atomic<bool> told_stuck_{false};
  SteadyCondition changed_;
  int64_t next_look_ns_ = 0;
  struct Inquiry {
    absl::Status error;
    uint64_t sequence = 0;
    int64_t since_ns = 0;
  };
  std::optional<Inquiry> inquiry_;  // what the group will fail with
};

}  // namespace ddp

#endif  // LIBDDP_COMM_GPU_DEVICE_ENGINE_H_
