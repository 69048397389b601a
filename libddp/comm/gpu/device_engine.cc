// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/gpu/device_engine.h"

#include <time.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "libddp/base/failed_ranks.h"
#include "libddp/base/log.h"
#include "libddp/base/owner_process.h"
#include "libddp/base/spin.h"
#include "libddp/comm/gpu/device_work.h"

namespace ddp {
namespace {

// How long a group that is destroyed waits for what its caller did not wait for, graphs that run too.
constexpr int64_t kDrainNs = 2'000'000'000;

}  // namespace

absl::StatusOr<std::shared_ptr<DeviceEngine>> DeviceEngine::Create(DeviceEngineOptions options) {
  DeviceRuntime& runtime = *options.runtime;
  if (absl::Status s = runtime.Check(options.device); !s.ok()) {
    return absl::Status(s.code(), absl::StrCat("rank ", options.rank, ": ", s.message()));
  }
  const DeviceGuard guard(runtime, options.device);
  if (!guard.status().ok()) return guard.status();
  std::shared_ptr<DeviceEngine> engine(new DeviceEngine(std::move(options)));
  absl::StatusOr<OwnedStream> stream = MakeStream(runtime);
  if (!stream.ok()) return stream.status();
  engine->stream_ = *std::move(stream);
  absl::StatusOr<OwnedEvent> event = MakeEvent(runtime);
  if (!event.ok()) return event.status();
  engine->after_event_ = *std::move(event);
  absl::StatusOr<std::shared_ptr<void>> words = runtime.AllocatePinned(3 * sizeof(uint32_t));
  if (!words.ok()) return words.status();
  engine->graphs_.emplace(runtime, static_cast<uint32_t*>(words->get()) + 1);
  const bool takes_turns = engine->options_.transport != nullptr && !engine->options_.transport->OrdersGraphs();
  if (absl::Status s = takes_turns ? engine->graphs_->TakeTurns() : absl::OkStatus(); !s.ok()) return s;
  engine->words_ = *std::move(words);
  engine->options_.progress->Add(engine.get());
  return engine;
}

DeviceEngine::DeviceEngine(DeviceEngineOptions options) : options_(std::move(options)), peers_(options_) {
  if (options_.board != nullptr) notes_.emplace(options_.observer, options_.group, options_.board->flight());
}
// A graph may be launched when the group has gone, and what waits behind the program's own work may begin: what they
// read and write stays, and tells them that their results are none.
DeviceEngine::~DeviceEngine() {
  if (graphs_.has_value()) graphs_->Forsake();
  if (words_ != nullptr && (captured_ || (leave_time() > absl::ZeroDuration() && !through_))) KeepForever(words_);
}

void DeviceEngine::Shutdown() {
  const int64_t until = NowNs() + kDrainNs;
  const auto idle = [&] {
    const std::lock_guard<std::mutex> lock(mutex_);
    return pending_.empty();
  };
  for (; !(idle() && !graphs_->running()) && !failed_.load(std::memory_order_acquire) && NowNs() < until;) {
    Tick();
    const timespec nap{0, 100'000};
    nanosleep(&nap, nullptr);
  }
  if (!idle()) Fail(options_.world_ranks.DestroyedError(options_.rank));
  options_.progress->Remove(this);
  // Nobody looks any more whether what a graph receives is a result. A Work may keep this object, and NCCL take its
  // time.
  if (captured_) TellStreams();
  std::deque<DeviceWork*> left;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    if (failed_) {
      const int64_t give_up = NowNs() + absl::ToInt64Nanoseconds(abort_grace());
      while (!released_ && NowNs() < give_up) changed_.WaitFor(lock, std::chrono::nanoseconds(give_up - NowNs()));
      released_ = true;
    }
    left.swap(pending_);
  }
  for (DeviceWork* work : left) work->Unref();
  // In a group that has not failed every operation's end has been seen.
  through_ = captured_ || !failed_.load(std::memory_order_acquire) || WaitUntilThrough();
}

// Also of what was enqueued by a call that failed in the middle. Not for long: what has not begun, behind the program's
// own work, may begin at any time.
bool DeviceEngine::WaitUntilThrough() {
  const DeviceGuard guard(runtime(), options_.device);
  if (!guard.status().ok() || !runtime().Record(after_event_.get(), stream_.get()).ok()) return false;
  return AwaitLeaving(after_event_);
}

// --- launching ------------------------------------------------------------------------------------------------------

Work DeviceEngine::Launch(const DeviceOperation& operation, Stream after,
                          absl::FunctionRef<absl::Status(void* stream)> enqueue) {
  const std::lock_guard<std::mutex> issue(issue_);
  if (options_.board != nullptr && !failed_.load(std::memory_order_relaxed)) {
    if (const absl::Status s = options_.board->failure(); !s.ok()) Fail(s);
  }
  if (failed_.load(std::memory_order_acquire)) return status();
  const DeviceGuard guard(runtime(), options_.device);
  if (!guard.status().ok()) return LaunchFailed(operation, next_sequence_, guard.status());
  if (absl::Status s = MakeRoom(); !s.ok()) return s;

  bool captured = false;
  if (absl::Status s = OrderAfter(after, &captured); !s.ok()) return LaunchFailed(operation, next_sequence_, s);
  absl::StatusOr<DeviceWork*> made = NewWork();
  if (!made.ok()) return LaunchFailed(operation, next_sequence_, made.status());
  DeviceWork* const launched = *made;
  Work work(launched);
  launched->operation = operation;
  launched->sequence = next_sequence_;
  if (operation.message == nullptr) {
    // Posted first: should the call block for a peer, the others see that this rank has come.
    if (!captured) Note(*launched, FlightState::kQueued);
    if (options_.board != nullptr) options_.board->Post(next_sequence_, operation.entry);
    if (!captured) Note(*launched, FlightState::kAnnounced);
    ++next_sequence_;
  }
  absl::Status enqueued;
  if (captured && options_.transport != nullptr) enqueued = graphs_->Begin(stream_.get());
  if (enqueued.ok()) enqueued = enqueue(stream_.get());
  if (enqueued.ok() && !captured) enqueued = graphs_->Leave(stream_.get());
  if (enqueued.ok()) enqueued = runtime().Record(launched->event.get(), stream_.get());
  if (!enqueued.ok()) {
    const absl::Status first = LaunchFailed(operation, launched->sequence, enqueued);
    if (!captured) Note(*launched, FlightState::kFailed);
    return first;
  }
  if (captured) {
    graph_timeout_ns_.store(absl::ToInt64Nanoseconds(operation.timeout), std::memory_order_relaxed);
    captured_.store(true, std::memory_order_release);
    captured_last_ = launched;
    launched->state.store(DeviceWork::kCaptured, std::memory_order_release);
    return work;
  }
  launched->Ref();
  bool late = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    launched->number = next_number_++;
    pending_.push_back(launched);
    late = failed_.load(std::memory_order_relaxed);
  }
  options_.progress->Notify();
  if (late) {  // the abort may not have seen it
    AwaitLeaving(launched->event);
    Note(*launched, FlightState::kFailed);
  }
  return work;
}

// The peers run an operation that this rank does not: the group has failed. The first cause, which may have been
// another's.
absl::Status DeviceEngine::LaunchFailed(const DeviceOperation& operation, uint64_t sequence, const absl::Status& why) {
  Fail(peers_.Explain(NameRank(options_.rank, operation.Describe(), why), sequence));
  return status();
}

absl::Status DeviceEngine::MakeRoom() {
  const auto full = [&] {
    const std::lock_guard<std::mutex> lock(mutex_);
    return pending_.size() >= kMaxPending;
  };
  for (Backoff backoff(/*oversubscribed=*/false); full(); backoff.Pause()) {
    Reap();
    if (failed_.load(std::memory_order_acquire)) return status();
    if (backoff.TimeToLook()) options_.progress->WhileWaiting();
  }
  return absl::OkStatus();
}

// Everything the caller has submitted to `after` comes first. With kNoStream nothing has to; the group's stream may
// have become part of a capture by an earlier call.
absl::Status DeviceEngine::OrderAfter(Stream after, bool* captured) {
  const bool ordered = after.device.kind != Device::Kind::kCpu;
  absl::StatusOr<bool> capturing = runtime().Capturing(ordered ? after.native : stream_.get());
  if (!capturing.ok()) return capturing.status();
  *captured = *capturing;
  if (absl::Status s = graphs_->Enter(stream_.get(), *captured); !s.ok() || !ordered) return s;
  if (absl::Status s = runtime().Record(after_event_.get(), after.native); !s.ok()) return s;
  return runtime().WaitEvent(stream_.get(), after_event_.get());
}

// The sequence ends with its last operation; the stream has to join what tells of that, too.
absl::Status DeviceEngine::JoinCaptured(DeviceWork* work, Stream stream) {
  const std::lock_guard<std::mutex> issue(issue_);
  if (work == captured_last_) {
    const DeviceGuard guard(runtime(), options_.device);
    if (!guard.status().ok()) return guard.status();
    const absl::StatusOr<bool> ended = graphs_->End(stream_.get());
    if (!ended.ok()) return ended.status();
    if (*ended) {
      if (absl::Status s = runtime().Record(work->event.get(), stream_.get()); !s.ok()) return s;
    }
  }
  const DeviceGuard guard(runtime(), stream.device);
  return guard.status().ok() ? runtime().WaitEvent(stream.native, work->event.get()) : guard.status();
}

absl::StatusOr<DeviceWork*> DeviceEngine::NewWork() {
  std::unique_ptr<DeviceWork> work;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!idle_.empty()) {
      work = std::move(idle_.back());
      idle_.pop_back();
    }
  }
  if (work == nullptr) {
    absl::StatusOr<OwnedEvent> event = MakeEvent(runtime());
    if (!event.ok()) return event.status();
    work = std::make_unique<DeviceWork>();
    work->event = *std::move(event);
  }
  work->engine = shared_from_this();
  work->noticed_ns = 0;
  work->state.store(DeviceWork::kPending, std::memory_order_relaxed);
  work->refs.store(1, std::memory_order_relaxed);
  return work.release();
}

void DeviceEngine::Recycle(DeviceWork* work) {
  const std::lock_guard<std::mutex> lock(mutex_);
  idle_.emplace_back(work);
}

// --- looking --------------------------------------------------------------------------------------------------------

// Whether the operation is over, well or badly. What ends after the group has failed was perhaps ended by the abort,
// so it counts as failed; the event is asked before the flag is read, and the flag is set before anything is aborted.
bool DeviceEngine::Finished(DeviceWork* work) {
  if (work->state.load(std::memory_order_acquire) != DeviceWork::kPending) return true;
  if (failed_.load(std::memory_order_acquire)) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return released_ || NowNs() - failed_ns_ > absl::ToInt64Nanoseconds(abort_grace());
  }
  const DeviceGuard guard(runtime(), options_.device);  // this may be the library's own thread
  const absl::StatusOr<bool> finished = guard.status().ok() ? runtime().Finished(work->event.get()) : guard.status();
  if (!finished.ok()) {
    Fail(work->Named(finished.status()));
    return false;
  }
  if (!*finished) return false;
  SettleBefore(work->number);
  Settle(work);
  return work->state.load(std::memory_order_acquire) != DeviceWork::kPending;
}

// So that nothing behind an operation that went wrong ends well.
void DeviceEngine::SettleBefore(uint64_t number) {
  std::vector<DeviceWork*> before;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto it = pending_.begin(); it != pending_.end() && (*it)->number < number; ++it) {
      (*it)->Ref();
      before.push_back(*it);
    }
  }
  for (DeviceWork* work : before) {
    if (work->state.load(std::memory_order_acquire) == DeviceWork::kPending) Settle(work);
    work->Unref();
  }
}

// The operation is through: well, unless ranks have called different things, or the group has failed by now, on this
// rank or on another, which may have handed on what is no result.
void DeviceEngine::Settle(DeviceWork* work) {
  if (options_.board != nullptr && work->operation.message == nullptr) {
    if (const std::optional<std::string> text = options_.board->Disagreement(work->sequence, work->operation.entry)) {
      Fail(absl::FailedPreconditionError(*text));
    }
  }
  HeedDevice();
  if (options_.board != nullptr && !failing_.load(std::memory_order_acquire)) {
    if (const absl::Status s = options_.board->failure(); !s.ok()) Fail(s);
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    int pending = DeviceWork::kPending;
    if (failing_.load(std::memory_order_acquire)) return;
    if (!work->state.compare_exchange_strong(pending, DeviceWork::kDone, std::memory_order_acq_rel)) return;
  }
  Note(*work, FlightState::kDone);
}

// What is captured has not run, and nobody tells when it does: it is not noted.
void DeviceEngine::Note(const DeviceWork& work, FlightState state) const {
  if (!notes_.has_value() || work.operation.message != nullptr) return;
  const DeviceOperation& operation = work.operation;
  const FlightNotes::Call call{work.sequence, operation.key, operation.entry.count, operation.bucket};
  if (state == FlightState::kQueued) return notes_->Queue(call);
  notes_->Enter(call, state);
}

absl::Status DeviceEngine::Outcome(DeviceWork* work) {
  if (work->state.load(std::memory_order_acquire) == DeviceWork::kDone) return absl::OkStatus();
  const absl::Status cause = status();
  const std::string stuck = Stuck();
  return stuck.empty() ? cause : absl::Status(cause.code(), absl::StrCat(std::string(cause.message()), "; ", stuck));
}

std::string DeviceEngine::Stuck() const {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!failed_ || released_ || captured_ || NowNs() - failed_ns_ <= absl::ToInt64Nanoseconds(options_.abort_grace))
      return "";
  }
  const std::string why = options_.transport == nullptr ? "" : options_.transport->WhyStuck();
  return absl::StrCat("and its GPU has not come free since: what waits for its streams hangs, so end this process",
                      why.empty() ? "" : absl::StrCat(" (", why, ")"));
}

// What is through leaves the queue. The stream works in order: behind an operation that is through all are that came
// before it, so that few questions find the last one. Each question to CUDA can hold up the thread that launches.
void DeviceEngine::Reap() {
  uint64_t low = 0, high = 0;  // what is before `low` is through, `high` is not
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (pending_.empty()) return;
    low = pending_.front()->number;
    high = pending_.back()->number + 1;
  }
  uint64_t ask = high - 1;  // most often all are through, or none
  for (bool first = true; low < high; first = false) {
    if (Passed(ask)) {
      low = ask + 1;
    } else {
      high = ask;
    }
    ask = first ? low : low + (high - low) / 2;
  }
}

// Whether operation `number` is over; if so, it and those before it are taken from the queue.
bool DeviceEngine::Passed(uint64_t number) {
  DeviceWork* work = nullptr;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (pending_.empty() || number < pending_.front()->number) return true;  // another thread was faster
    work = pending_[number - pending_.front()->number];
    work->Ref();
  }
  const bool passed = Finished(work);
  std::vector<DeviceWork*> over;
  if (passed) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (; !pending_.empty() && pending_.front()->number <= number; pending_.pop_front()) {
      over.push_back(pending_.front());
    }
  }
  work->Unref();
  for (DeviceWork* each : over) each->Unref();
  return passed;
}

ProgressThread::Found DeviceEngine::Tick() {
  // A peer's failure is known also where nothing waits for it.
  if (!failed_.load(std::memory_order_acquire)) {
    if (const absl::Status s = peers_.Failure(); !s.ok()) Fail(s);
    if (captured_.load(std::memory_order_acquire)) LookAtGraphs();
  }
  if (const std::string stuck = Stuck(); !stuck.empty() && !told_stuck_.exchange(true)) {
    LogError("rank ", options_.rank, ": the group has failed, ", stuck);
  }
  Reap();
  DeviceWork* oldest = nullptr;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (pending_.empty()) return ProgressThread::Found::kNothing;
    oldest = pending_.front();
    oldest->Ref();
  }
  Look(oldest);
  oldest->Unref();
  return ProgressThread::Found::kWork;
}

bool DeviceEngine::TimeToLook(int64_t now_ns) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (now_ns < next_look_ns_) return false;
  next_look_ns_ = now_ns + kLookEveryNs;
  return true;
}

// A graph may be running, and a peer may be waited for, at any time.
void DeviceEngine::LookAtGraphs() {
  if (options_.board == nullptr) return;
  const int64_t now = NowNs();
  options_.board->PostGraphs(graphs_->begun());
  if (const absl::Status s = options_.board->Gone(0); !s.ok()) return Fail(s);
  if (options_.transport != nullptr) {
    if (const absl::Status s = options_.transport->Health(); !s.ok()) return Inquire(s, 0);
  }
  int64_t running = 0;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    running = graphs_->RunningNs(now);
  }
  const int64_t timeout = graph_timeout_ns_.load(std::memory_order_relaxed);
  if (running > timeout) Fail(peers_.GraphTimedOut(graphs_->begun(), absl::Nanoseconds(timeout)));
}

// Fails the group with the error, or what explains it, once that is known. To be called again as long as it is not.
// Does not wait for it: this thread answers what ranks of other hosts ask.
void DeviceEngine::Inquire(const absl::Status& error, uint64_t sequence) {
  Inquiry inquiry;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!inquiry_.has_value()) inquiry_ = {error, sequence, NowNs()};
    inquiry = *inquiry_;
  }
  const std::optional<absl::Status> cause = peers_.Cause(inquiry.error, inquiry.sequence, inquiry.since_ns);
  if (cause.has_value()) Fail(*cause);
}

// What may keep the oldest operation from ending?
void DeviceEngine::Look(DeviceWork* oldest) {
  const int64_t now = NowNs();
  if (failed_.load(std::memory_order_acquire) || !TimeToLook(now)) return;
  int64_t waited = 0;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (oldest->noticed_ns == 0) oldest->noticed_ns = now;
    waited = now - oldest->noticed_ns;
  }
  if (const absl::Status s = peers_.Check(oldest->operation, oldest->sequence, waited); !s.ok()) return Fail(s);
  if (options_.transport != nullptr) {
    if (const absl::Status s = options_.transport->Health(); !s.ok()) return Inquire(s, oldest->sequence);
  }
  if (const absl::Status s = peers_.InTime(oldest->operation, oldest->sequence, waited); !s.ok()) {
    return Inquire(s, oldest->sequence);
  }
  peers_.TellStall(oldest->operation, oldest->sequence, waited);
}

}  // namespace ddp
