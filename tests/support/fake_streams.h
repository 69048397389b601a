// SPDX-License-Identifier: Apache-2.0
// Streams, events and captured graphs of simulated GPUs.
#ifndef TESTS_SUPPORT_FAKE_STREAMS_H_
#define TESTS_SUPPORT_FAKE_STREAMS_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ddp::testing {

class FakeEvent;
class FakeStream;

// What was captured: work, and the earlier work that each piece has to follow.
class FakeGraph {
 public:
  // Runs everything in an order that the dependencies allow, but the latest piece first: what is not ordered after an
  // earlier piece comes before it.
  void Run() const;
  // The stream's next work, behind what the graph waits for; then its events have happened.
  static void Launch(const std::shared_ptr<FakeGraph>& graph, FakeStream& stream);

 private:
  friend class FakeStream;
  friend class FakeEvent;
  struct Node {
    std::function<void()> what;
    std::set<size_t> after;
  };
  std::vector<Node> nodes_;
  FakeStream* origin_ = nullptr;
  std::vector<FakeStream*> streams_;  // that capture into it
  uint64_t number_ = 0;               // no other capture has had it
  std::vector<std::shared_ptr<FakeEvent>> waits_, records_;
};

// A place in a stream. Streams may refer to an event that has been destroyed.
class FakeEvent {
 public:
  absl::Status Record(FakeStream& stream);
  // What `stream` is given from now on comes after the event's last record.
  static absl::Status Wait(FakeStream& stream, const std::shared_ptr<FakeEvent>& event);
  // Whether the last record has been reached. Asking lets the stream run up to there.
  absl::StatusOr<bool> Finished();
  bool recorded() const;
  void Destroy() { destroyed_ = true; }
  bool destroyed() const { return destroyed_; }
  int device = 0;
  // How often replays of a graph have recorded it.
  void CountReplay() { replays_.fetch_add(1); }
  int replays() const { return replays_.load(); }

 private:
  std::atomic<int> replays_{0};
  std::atomic<bool> destroyed_{false};
  mutable std::mutex mutex_;
  std::shared_ptr<FakeStream> stream_;  // of the last record; null: never recorded
  uint64_t position_ = 0;
  std::shared_ptr<FakeGraph> capture_;  // if the last record was captured
  std::set<size_t> captured_after_;
};

// A thread that does what it is given, in order. An early stream runs at once. A late one runs only as far as somebody
// waits for: the host, or another stream that runs. So what should wait for it and does not comes too early.
class FakeStream : public std::enable_shared_from_this<FakeStream> {
 public:
  // Lives until End.
  static FakeStream* Start(int device, bool late);
  // Blocks until all that it holds has run. Not on its own thread.
  void End();

  int device() const { return device_; }
  // During a capture it becomes part of the graph.
  void Enqueue(std::function<void()> what);
  // The same, but in the stream itself.
  void EnqueueHere(std::function<void()> what);
  // Lets it run up to `position`, or all of it.
  void Demand(uint64_t position);
  void DemandAll() { Demand(enqueued()); }
  // Blocks until `position` has been reached, and lets the stream run that far.
  void Await(uint64_t position);
  uint64_t enqueued() const;
  // Runs at once from now on, like an early stream.
  void RunEarly();

  bool capturing() const { return capture() != 0; }
  uint64_t capture() const;  // its number; 0: none
  // In a capture, which every replay waits for or records. False if the stream does not capture.
  bool AddWait(const std::shared_ptr<FakeEvent>& event);
  bool AddRecord(const std::shared_ptr<FakeEvent>& event);
  absl::Status BeginCapture();
  // An error if a stream that joined the capture has not been joined by this one again.
  absl::StatusOr<std::shared_ptr<FakeGraph>> EndCapture();

 private:
  friend class FakeEvent;
  FakeStream(int device, bool late) : device_(device), late_(late) {}
  void Run();

  const int device_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  uint64_t enqueued_ = 0, done_ = 0, demanded_ = 0;
  bool late_, ending_ = false, ended_ = false;
  std::shared_ptr<FakeGraph> capture_;  // guarded by the mutex of all captures
  std::set<size_t> after_;              // what the next captured piece follows
};

}  // namespace ddp::testing

#endif  // TESTS_SUPPORT_FAKE_STREAMS_H_
