// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/host/engine.h"

#include <algorithm>
#include <utility>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "libddp/comm/memory/read_process.h"

namespace ddp {

Engine::Engine(EngineOptions options, ProgressThread* progress)
    : Driver(
          {.name = options.world_ranks.NameOf(options.NameOf(options.rank)), .oversubscribed = options.oversubscribed},
          progress),
      options_(std::move(options)) {
  PeerLine& line = control_.peer(options_.rank);
  line.token = token_;
  line.token_address.store(reinterpret_cast<uintptr_t>(&token_), std::memory_order_release);
  progress->Add(this);
}

bool Engine::HasPeers(bool in_this_process) const {
  for (int r = 0; r < options_.size; ++r) {
    if (r != options_.rank && options_.peers.InThisProcess(r) == in_this_process) return true;
  }
  return false;
}

Engine::~Engine() {
  if (!owner_.IsHere()) return;
  progress()->Remove(this);
  Lock lock(mutex_);
  // The peers would go on with memory that the program has back.
  if (OldestPending() != nullptr) FailLocked(options_.world_ranks.DestroyedError(options_.NameOf(options_.rank)));
  control_.peer(options_.rank).departed.store(1, std::memory_order_release);
  for (Operation* operation : queue_) operation->Unref();
}

// --- launching ------------------------------------------------------------------------------------------------------

Work Engine::Launch(Operation* operation) {
  Work work(operation);
  {
    Lock lock(mutex_);
    if (FailedElsewhere()) {
      operation->Unref();  // the queue's
      return failure_;
    }
    operation->sequence = first_sequence_ + queue_.size();
    queue_.push_back(operation);
    pending_.store(static_cast<int>(queue_.size()), std::memory_order_release);
    notes_.Queued(*operation);
    Announce();
  }
  progress()->Notify();
  return work;
}

// Tells the peers of every operation that has a slot and waits for no earlier one, in order.
void Engine::Announce() {
  while (failure_.ok() && announced_ < first_sequence_ + queue_.size()) {
    if (announced_ >= slots_free_until_ && !FreeSlots()) return;
    Operation* const operation = At(announced_);
    if (MustWaitForEarlier(*operation)) return;
    AnnounceOne(operation);
    announced_.store(announced_ + 1, std::memory_order_relaxed);
  }
}

// Looks how far the peers are; whether there is a slot for the next operation.
bool Engine::FreeSlots() {
  uint64_t retired = announced_;
  for (int r = 0; r < options_.size; ++r) {
    if (r != options_.rank) retired = std::min(retired, control_.peer(r).retired.load(std::memory_order_acquire));
  }
  slots_free_until_ = std::min(retired, first_sequence_) + control_.slots();
  return announced_ < slots_free_until_;
}

// Operations take effect in the order of the calls. Those that share no memory may overlap in time; one that does is
// held back until this rank is through with the earlier one, and so, since all must have announced it, until everybody
// is.
bool Engine::MustWaitForEarlier(const Operation& operation) const {
  const bool barrier = operation.key().kind == OperationKey::Kind::kBarrier;  // shares memory with all of them
  for (uint64_t s = first_sequence_; s < operation.sequence; ++s) {
    const Operation& earlier = *At(s);
    if (earlier.Done()) continue;
    if (barrier || operation.out.Overlaps(earlier.out) || operation.out.Overlaps(earlier.in) ||
        operation.in.Overlaps(earlier.out)) {
      return true;
    }
  }
  return false;
}

void Engine::AnnounceOne(Operation* operation) {
  Slot& slot = control_.slot(operation->sequence, options_.rank);
  slot.claimed.store(0, std::memory_order_relaxed);
  slot.done.store(0, std::memory_order_relaxed);
  slot.done_ns.store(0, std::memory_order_relaxed);
  slot.nonfinite.store(0, std::memory_order_relaxed);
  Announcement& a = slot.announcement;
  a.call = {operation->called.key.Pack(), operation->called.count, operation->parameters};
  Place(operation, &a);
  a.sequence.store(operation->sequence + 1, std::memory_order_release);
  notes_.Entered(*operation, FlightState::kAnnounced);
}

// Tells the peers where this rank's data lies, or lays it out for them.
void Engine::Place(Operation* operation, Announcement* announcement) {
  Announcement& a = *announcement;
  const RangeList &in = operation->in, &out = operation->out;
  const OperationKey& key = operation->key();
  PlacementFacts facts{.kind = key.kind,
                       .ranks = options_.size,
                       .oversubscribed = options_.oversubscribed,
                       .is_root = key.root == options_.rank,
                       .in_bytes = in.bytes(),
                       .out_bytes = out.bytes(),
                       .in_ranges = in.ranges(),
                       .out_ranges = out.ranges(),
                       .in_place = key.kind == OperationKey::Kind::kAllToAll && in.Overlaps(out)};
  facts.shared = CanBeShared(facts) && Locate(*operation, announcement);
  facts.readable = !facts.shared && CanReadPeers();
  facts.has_large_row = in.bytes() > kInlineBytes && in.bytes() <= kLargeBytes && HasLargeRow(operation->sequence);
  a.placement = ChoosePlacement(facts);
  if (a.placement == Placement::kInline) {
    PublishInline(*operation, host_, &writer_);
  } else if (a.placement == Placement::kReadable) {
    size_t contiguous = 0;
    a.in = reinterpret_cast<uintptr_t>(in.At(0, &contiguous));
    a.out = reinterpret_cast<uintptr_t>(out.At(0, &contiguous));
  }
}

// Writes where the data lies in the group's memory; false if some of it lies elsewhere.
bool Engine::Locate(const Operation& operation, Announcement* a) {
  const RangeList &in = operation.in, &out = operation.out;
  const bool single = in.ranges() == 1 && out.ranges() == 1;
  ListedRange pair[2];
  ListedRange* const entries = single ? pair : control_.listed(operation.sequence, options_.rank);
  {
    const AllocationTable::Lookup memory(allocations_);
    if (!memory.Locate(in, entries) || !memory.Locate(out, entries + in.ranges())) return false;
  }
  a->in = single ? pair[0].address : in.ranges();
  a->out = single ? pair[1].address : out.ranges();
  return true;
}

// Whether the operation that used its row of the larger ring last is over.
bool Engine::HasLargeRow(uint64_t sequence) {
  const auto has = [&] { return sequence + control_.slots() - control_.larges() < slots_free_until_; };
  return has() || (FreeSlots() && has());
}

// --- driving --------------------------------------------------------------------------------------------------------

bool Engine::InExchange() const {
  return !queue_.empty() && queue_.front()->run != nullptr && queue_.front()->run->traits.takes_turns;
}

// One pass over the announced operations in order. Of those behind the awaited one it does a chunk at a time.
bool Engine::Poll(Lock& lock, const Pass& pass) {
  const uint64_t up_to = pass.awaited == nullptr ? ~uint64_t{0} : static_cast<const Operation*>(pass.awaited)->sequence;
  bool progressed = false, turn_taken = false;
  Announce();
  for (uint64_t s = first_sequence_; s < announced_ && failure_.ok(); s = std::max(s + 1, first_sequence_)) {
    Operation* const operation = At(s);
    if (operation->Done()) continue;
    if (operation->run == nullptr) {
      if (!HasArrived(operation)) break;  // in order, so that all ranks number the staging rounds alike
      StartRun(operation);
      if (!failure_.ok()) break;
      progressed = true;
    }
    // One at a time, in order. And one thread at a time.
    const bool takes_turns = operation->run->traits.takes_turns;
    if (takes_turns && (std::exchange(turn_taken, true) || operation->workers > 0)) continue;
    progressed |= Step(lock, operation, pass.steal, s <= up_to ? 1 << 30 : 1);
    if (takes_turns && operation->Done()) turn_taken = false;
  }
  Retire();
  return progressed;
}

// Whether all ranks have announced it.
bool Engine::HasArrived(Operation* operation) const {
  while (operation->arrived < options_.size && HasAnnounced(operation->sequence, operation->arrived))
    ++operation->arrived;
  return operation->arrived == options_.size;
}

// All ranks have announced it: do they agree, and how is it executed?
void Engine::StartRun(Operation* operation) {
  absl::InlinedVector<Placement, 16> placements;
  const CallSummary& first = control_.slot(operation->sequence, 0).announcement.call;
  for (int r = 0; r < options_.size; ++r) {
    const Announcement& a = control_.slot(operation->sequence, r).announcement;
    if (a.call != first) {
      return FailAndReport(
          DisagreementError(operation->number(), options_.NameOf(0), first, options_.NameOf(r), a.call));
    }
    placements.push_back(a.placement);
  }
  notes_.Entered(*operation, FlightState::kReady);
  const Route route = ChooseRoute(placements, operation->IsBroadcast() ? operation->key().root : -1);
  absl::StatusOr<std::unique_ptr<Run>> run = MakeRun(route, *operation, host_, staged_rounds_);
  if (!run.ok()) return FailAndReport(run.status());
  operation->run = *std::move(run);
  staged_rounds_ += operation->run->Rounds();
}

// Whether every peer is another process whose memory this one may read, which it tries once it is asked.
bool Engine::CanReadPeers() {
  if (can_read_peers_.has_value()) return *can_read_peers_;
  if (host_.has_threads || !MayReadProcesses()) return *(can_read_peers_ = false);
  for (int r = 0; r < options_.size; ++r) {
    if (r == options_.rank) continue;
    if (!options_.peers.Visible(r)) return *(can_read_peers_ = false);
    const PeerLine& line = control_.peer(r);
    const uint64_t address = line.token_address.load(std::memory_order_acquire);
    if (address == 0) return false;  // not said yet
    uint64_t token = 0;
    RangeList from, to;
    from.Add(reinterpret_cast<char*>(static_cast<uintptr_t>(address)), sizeof(token));
    to.Add(reinterpret_cast<char*>(&token), sizeof(token));
    const bool read = ReadProcess(r, options_.peers.pid(r), from, to).ok() && token == line.token;
    if (!read) return *(can_read_peers_ = false);
  }
  return *(can_read_peers_ = true);
}

bool Engine::Step(Lock& lock, Operation* operation, bool steal, int limit) {
  Run& run = *operation->run;
  ++operation->workers;
  if (!run.traits.is_brief) lock.unlock();
  const absl::StatusOr<bool> ran = run.Advance(steal, limit);
  if (!run.traits.is_brief) lock.lock();
  Worked(operation);
  // A peer that has ended, or has failed and given its memory back, is for CheckHealth to tell.
  if (!ran.ok() && !absl::IsNotFound(ran.status()) && !control_.failure().happened()) FailAndReport(ran.status());
  if (operation->Done() || !run.Done()) return ran.ok() && *ran;
  FinishOk(operation);
  return true;
}

// A thread has come back from working on the operation. If the group failed meanwhile, the last one back says so.
void Engine::Worked(Operation* operation) {
  if (--operation->workers > 0 || failure_.ok() || operation->Done()) return;
  notes_.Entered(*operation, FlightState::kFailed);
  operation->Finish(failure_);
}

// Where peers' memory was read, only if the group had not failed by then: whoever has been told of a failure may write
// there again, and a rank that was stopped in the middle of reading wakes up late.
void Engine::FinishOk(Operation* operation) {
  std::atomic_thread_fence(std::memory_order_acquire);
  if (operation->run->traits.reads_peers && FailedElsewhere()) return;
  if (operation->nonfinite != nullptr) {
    // Each rank noted what it saw in its own slot, or that of the rank it helped. Of a reduce-scatter only this rank's
    // result counts.
    const bool own = operation->Scatters();
    bool found = false;
    for (int r = own ? options_.rank : 0; r < (own ? options_.rank + 1 : options_.size); ++r) {
      found |= control_.slot(operation->sequence, r).nonfinite.load(std::memory_order_relaxed) != 0;
    }
    if (found) *operation->nonfinite = 1;
  }
  int64_t ended_ns = operation->bucket < 0 ? 0 : operation->run->EndedNs();
  if (ended_ns == 0 && operation->bucket >= 0) ended_ns = NowNs();
  notes_.Entered(*operation, FlightState::kDone, ended_ns);
  operation->Finish(absl::OkStatus(), ended_ns);
}

void Engine::Retire() {
  const uint64_t before = first_sequence_;
  while (!queue_.empty() && queue_.front()->Done() && queue_.front()->workers == 0) {
    queue_.front()->Unref();
    queue_.pop_front();
    ++first_sequence_;
  }
  pending_.store(static_cast<int>(queue_.size()), std::memory_order_release);
  if (first_sequence_ == before) return;
  // What failed before it was announced is nothing to the peers.
  control_.peer(options_.rank).retired.store(std::min(first_sequence_, announced_.load()), std::memory_order_release);
  Announce();  // what was held back by one of them
}

}  // namespace ddp
