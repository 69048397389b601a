// SPDX-License-Identifier: Apache-2.0
#include "tests/support/fake_streams.h"

#include <algorithm>
#include <stdexcept>
#include <thread>
#include <utility>

namespace ddp::testing {
namespace {

// Captures are rare: one mutex guards all of them. It is taken before a stream's own.
std::mutex& Captures() {
  static auto* const mutex = new std::mutex;
  return *mutex;
}

}  // namespace

// --- graphs ---------------------------------------------------------------------------------------------------------

void FakeGraph::Run() const {
  std::vector<bool> done(nodes_.size());
  for (size_t left = nodes_.size(); left > 0; --left) {
    for (size_t k = nodes_.size(); k-- > 0;) {
      const std::set<size_t>& after = nodes_[k].after;
      if (done[k] || !std::all_of(after.begin(), after.end(), [&](size_t n) { return done[n]; })) continue;
      nodes_[k].what();
      done[k] = true;
      break;
    }
  }
}

void FakeGraph::Launch(const std::shared_ptr<FakeGraph>& graph, FakeStream& stream) {
  for (const auto* const events : {&graph->waits_, &graph->records_}) {
    for (const std::shared_ptr<FakeEvent>& event : *events) {
      if (event->destroyed()) throw std::logic_error("a graph is launched of which an event has been destroyed");
    }
  }
  for (const std::shared_ptr<FakeEvent>& event : graph->waits_) FakeEvent::Wait(stream, event).IgnoreError();
  stream.Enqueue([graph] { graph->Run(); });
  for (const std::shared_ptr<FakeEvent>& event : graph->records_) event->Record(stream).IgnoreError();
}

// --- events ---------------------------------------------------------------------------------------------------------

absl::Status FakeEvent::Record(FakeStream& stream) {
  const std::lock_guard<std::mutex> captures(Captures());
  const std::lock_guard<std::mutex> lock(mutex_);
  capture_ = stream.capture_;
  captured_after_ = stream.after_;
  if (capture_ != nullptr) return absl::OkStatus();
  stream_ = stream.shared_from_this();
  position_ = stream.enqueued();
  return absl::OkStatus();
}

absl::Status FakeEvent::Wait(FakeStream& stream, const std::shared_ptr<FakeEvent>& event) {
  const std::lock_guard<std::mutex> captures(Captures());
  const std::lock_guard<std::mutex> lock(event->mutex_);
  if (event->capture_ != nullptr) {
    if (event->capture_->origin_ == nullptr) {
      return absl::FailedPreconditionError("a stream waits for an event of a capture that has ended");
    }
    if (stream.capture_ == nullptr) {
      stream.capture_ = event->capture_;
      stream.after_.clear();
      stream.capture_->streams_.push_back(&stream);
    }
    if (stream.capture_ != event->capture_) return absl::FailedPreconditionError("one capture waits for another");
    stream.after_.insert(event->captured_after_.begin(), event->captured_after_.end());
    return absl::OkStatus();
  }
  if (event->stream_ == nullptr) return absl::OkStatus();
  if (stream.capture_ != nullptr) {
    return absl::FailedPreconditionError("a stream that captures waits for an event from outside of the capture");
  }
  if (event->stream_.get() == &stream) return absl::OkStatus();
  stream.EnqueueHere([before = event->stream_, position = event->position_] { before->Await(position); });
  return absl::OkStatus();
}

absl::StatusOr<bool> FakeEvent::Finished() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (capture_ != nullptr) return absl::FailedPreconditionError("the event was recorded in a capture");
  if (stream_ == nullptr) return true;
  stream_->Demand(position_);
  const std::lock_guard<std::mutex> locked(stream_->mutex_);
  return stream_->done_ >= position_;
}

bool FakeEvent::recorded() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return stream_ != nullptr;
}

// --- streams --------------------------------------------------------------------------------------------------------

FakeStream* FakeStream::Start(int device, bool late) {
  const std::shared_ptr<FakeStream> stream(new FakeStream(device, late));
  std::thread([stream] { stream->Run(); }).detach();
  return stream.get();
}

void FakeStream::End() {
  const std::shared_ptr<FakeStream> self = shared_from_this();  // the thread lets go of its own reference
  std::unique_lock<std::mutex> lock(mutex_);
  ending_ = true;
  late_ = false;
  changed_.notify_all();
  changed_.wait(lock, [&] { return ended_; });
}

void FakeStream::Run() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return queue_.empty() ? ending_ : !late_ || done_ < demanded_; });
    if (queue_.empty()) break;
    std::function<void()> next = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    next();
    next = nullptr;
    lock.lock();
    ++done_;
    changed_.notify_all();
  }
  ended_ = true;
  changed_.notify_all();
}

void FakeStream::Enqueue(std::function<void()> what) {
  {
    const std::lock_guard<std::mutex> captures(Captures());
    if (capture_ != nullptr) {
      const size_t number = capture_->nodes_.size();
      capture_->nodes_.push_back({std::move(what), std::exchange(after_, {number})});
      return;
    }
  }
  EnqueueHere(std::move(what));
}

void FakeStream::EnqueueHere(std::function<void()> what) {
  const std::lock_guard<std::mutex> lock(mutex_);
  queue_.push_back(std::move(what));
  ++enqueued_;
  changed_.notify_all();
}

void FakeStream::Demand(uint64_t position) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (position <= demanded_) return;
  demanded_ = position;
  changed_.notify_all();
}

void FakeStream::Await(uint64_t position) {
  Demand(position);
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return done_ >= position; });
}

uint64_t FakeStream::enqueued() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return enqueued_;
}

void FakeStream::RunEarly() {
  const std::lock_guard<std::mutex> lock(mutex_);
  late_ = false;
  changed_.notify_all();
}

uint64_t FakeStream::capture() const {
  const std::lock_guard<std::mutex> captures(Captures());
  return capture_ == nullptr ? 0 : capture_->number_;
}

bool FakeStream::AddWait(const std::shared_ptr<FakeEvent>& event) {
  const std::lock_guard<std::mutex> captures(Captures());
  if (capture_ != nullptr) capture_->waits_.push_back(event);
  return capture_ != nullptr;
}
bool FakeStream::AddRecord(const std::shared_ptr<FakeEvent>& event) {
  const std::lock_guard<std::mutex> captures(Captures());
  if (capture_ != nullptr) capture_->records_.push_back(event);
  return capture_ != nullptr;
}

absl::Status FakeStream::BeginCapture() {
  const std::lock_guard<std::mutex> captures(Captures());
  if (capture_ != nullptr) return absl::FailedPreconditionError("the stream captures already");
  static uint64_t captures_begun = 0;
  capture_ = std::make_shared<FakeGraph>();
  capture_->number_ = ++captures_begun;
  capture_->origin_ = this;
  capture_->streams_ = {this};
  after_.clear();
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<FakeGraph>> FakeStream::EndCapture() {
  const std::lock_guard<std::mutex> captures(Captures());
  if (capture_ == nullptr || capture_->origin_ != this) {
    return absl::FailedPreconditionError("the stream has not begun a capture");
  }
  const std::shared_ptr<FakeGraph> graph = capture_;
  // All that this stream's end follows, directly or not.
  std::set<size_t> joined;
  std::vector<size_t> open(after_.begin(), after_.end());
  while (!open.empty()) {
    const size_t node = open.back();
    open.pop_back();
    if (!joined.insert(node).second) continue;
    open.insert(open.end(), graph->nodes_[node].after.begin(), graph->nodes_[node].after.end());
  }
  for (FakeStream* const stream : graph->streams_) {
    stream->capture_ = nullptr;
    stream->after_.clear();
  }
  graph->origin_ = nullptr;
  if (joined.size() < graph->nodes_.size()) {
    return absl::FailedPreconditionError("a stream that joined the capture was not joined again before its end");
  }
  return graph;
}

}  // namespace ddp::testing
