// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/nodes/node_pipeline.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "libddp/base/spin.h"

namespace ddp {
namespace {

// Among allocations: one that the group's own will not reach.
constexpr uint64_t kScratchId = (uint64_t{1} << (64 - Address::kOffsetBits)) - 1;

}  // namespace

absl::Status NodeWork::Wait(absl::Time deadline) {
  if (Done()) return status();  // its group may be gone
  return pipeline_->Wait(
      *this, [this] { return Describe(); }, deadline);
}

NodePipeline::NodePipeline(NodePipelineOptions options, ProgressThread* progress)
    : Driver({.name = options.reducing.world_ranks.NameOf(options.rank),
              .oversubscribed = options.oversubscribed,
              .looks_each_tick = true},
             progress),
      options_(std::move(options)),
      reducing_(std::move(options_.reducing), progress),
      spreading_(std::move(options_.spreading), progress),
      in_flight_(new InFlight{
          .scratch = {*options_.segment, options_.scratch_offset + NodeScratch::kBytes * static_cast<size_t>(local())},
          .chunks = {},
          .control = {&wire_, options_.layout, options_.rank},
          .messages = {this, &wire_, options_.rank, options_.layout.size()}}),
      control_messages_(in_flight_->control),
      messages_(in_flight_->messages) {
  const size_t stride = NodeScratch::kBytes;
  SharedAllocation scratch{.id = kScratchId,
                           .bytes = stride,
                           .owner = options_.segment,
                           .own_offset = options_.scratch_offset + stride * static_cast<size_t>(local()),
                           .segment = options_.segment};
  for (int l = 0; l < options_.layout.width(node()); ++l) {
    scratch.parts.push_back(options_.segment->data() + options_.scratch_offset + stride * static_cast<size_t>(l));
  }
  for (size_t i = 0; i < kChunksInFlight; ++i) {
    in_flight_->chunks.emplace_back(context_, in_flight_->scratch, i);
  }
  options_.allocations->Add(std::move(scratch));
  progress->Add(this);
}

NodePipeline::~NodePipeline() {
  if (!owner_.IsHere()) return;
  progress()->Remove(this);
  const Lock lock(mutex_);
  TakeLaunched();
  Leave();
}

// --- launching ------------------------------------------------------------------------------------------------------

Work NodePipeline::Launch(NodeOperation* operation) {
  Work work(operation);
  {
    std::lock_guard<std::mutex> lock(launch_mutex_);
    if (!failure_.ok()) {
      operation->Unref();  // the queue's
      return failure_;
    }
    operation->sequence = next_sequence_++;
    notes_.Queued(*operation);
    launched_.push_back(operation);
    pending_.store(1);
  }
  progress()->Notify();
  Progress();  // another thread that drives now will see it
  return work;
}

void NodePipeline::TakeLaunched() {
  if (pending_.load(std::memory_order_acquire) == 0) return;
  std::lock_guard<std::mutex> lock(launch_mutex_);
  queue_.insert(queue_.end(), launched_.begin(), launched_.end());
  launched_.clear();
}

template <typename Call>
Work NodePipeline::StartMessage(Call call) {
  Work work;
  {
    const Lock lock = LockToCall();
    const bool usable = wire_.Usable(/*background=*/false);
    if (usable) Drive(/*background=*/false, /*steal=*/false);
    if (!failure_.ok()) return failure_;
    if (!usable) {
      return absl::FailedPreconditionError(
          absl::StrCat(world_ranks().NameOf(options_.rank),
                       ": MPI was initialised for use by one thread, and this is another one; initialise it with ",
                       "MPI_Init_thread and MPI_THREAD_SERIALIZED, or call Send and Recv in the thread that did"));
    }
    work = call();
    if (messages_.Pending()) pending_.store(1);
    Drive(/*background=*/false, /*steal=*/false);
  }
  progress()->Notify();
  return work;
}

Work NodePipeline::Send(NodeMessageSpec spec) {
  return StartMessage([&] { return messages_.Send(std::move(spec)); });
}

Work NodePipeline::Recv(NodeMessageSpec spec) {
  return StartMessage([&] { return messages_.Recv(std::move(spec)); });
}

// --- driving --------------------------------------------------------------------------------------------------------

// One pass: whatever can be done without waiting. Returns whether anything was.
bool NodePipeline::Drive(bool background, bool steal) {
  TakeLaunched();
  // Where nothing is under way, a look at the wire would only keep what has been launched waiting.
  const bool look = !flight_.empty() || begun_ > 0 || queue_.empty();
  if (!flight_.empty()) {
    reducing_.Progress(steal);
    spreading_.Progress(steal);
  }
  bool progressed = false;
  if (wire_.Usable(background)) {
    if (look) wire_.Poll();
    if (Healthy()) {
      if (absl::Status s = control_messages_.Receive(); !s.ok()) FailAndReport(s, /*tell_nodes=*/false);
    }
    if (Healthy()) progressed = BeginChunks();
    if (Healthy()) progressed |= messages_.Advance();
    if (Healthy()) progressed |= AdvanceChunks();
    if (Healthy()) progressed |= Retire();
  }
  if (!failure_.ok()) TellAndEnd(background);
  NotePending();
  return progressed;
}

void NodePipeline::NotePending() {
  if (!queue_.empty() || messages_.Pending() || pending_.load(std::memory_order_relaxed) == 0) return;
  std::lock_guard<std::mutex> lock(launch_mutex_);
  if (launched_.empty()) pending_.store(0, std::memory_order_release);
}

// Operations take effect in the order of the calls: one that shares memory with an earlier one begins when that is
// done.
bool NodePipeline::MustWaitForEarlier(const NodeOperation& operation) const {
  for (const NodeOperation* earlier : queue_) {
    if (earlier == &operation) return false;
    if (earlier->Done()) continue;
    if (operation.Is(OperationKey::Kind::kBarrier) || operation.out.Overlaps(earlier->out) ||
        operation.out.Overlaps(earlier->in) || operation.in.Overlaps(earlier->out)) {
      return true;
    }
  }
  return false;
}

bool NodePipeline::BeginChunks() {
  bool progressed = false;
  for (; begun_ < queue_.size(); ++begun_) {
    NodeOperation* const operation = queue_[begun_];
    if (operation->begun == 0 && MustWaitForEarlier(*operation)) return progressed;
    while (operation->begun < operation->chunks()) {
      if (flight_.size() == kChunksInFlight) return progressed;
      if (operation->begun == 0) notes_.Entered(*operation, FlightState::kAnnounced);
      // Chunks end in the order in which they begin, so this one is free. The same one again, where it is, as its
      // memory is in the processor's caches.
      if (flight_.empty()) chunks_begun_ = 0;
      Chunk* const earlier = flight_.empty() ? nullptr : flight_.back();
      flight_.push_back(&in_flight_->chunks[chunks_begun_++ % kChunksInFlight]);
      if (absl::Status s = flight_.back()->Begin(operation, earlier); !s.ok()) FailAndReport(s);
      if (!Healthy()) return true;
      progressed = true;
    }
  }
  return progressed;
}

bool NodePipeline::AdvanceChunks() {
  bool progressed = false;
  const Chunk* earlier = nullptr;
  for (Chunk* const chunk : flight_) {
    const absl::StatusOr<bool> advanced = chunk->Advance(earlier);
    if (!advanced.ok()) {
      FailAndReport(advanced.status());
      return true;
    }
    progressed |= *advanced;
    earlier = chunk;
  }
  while (!flight_.empty() && flight_.front()->finished()) flight_.pop_front();
  return progressed;
}

bool NodePipeline::Retire() {
  bool progressed = false;
  for (NodeOperation* operation : queue_) {
    if (operation->begun == 0) break;
    if (operation->Done() || operation->finished < operation->chunks()) continue;
    const int64_t ended_ns = operation->bucket >= 0 ? NowNs() : 0;
    notes_.Entered(*operation, FlightState::kDone, ended_ns);
    operation->Finish(absl::OkStatus(), ended_ns);
    progressed = true;
  }
  while (!queue_.empty() && queue_.front()->Done()) {
    queue_.front()->Unref();
    queue_.pop_front();
    --begun_;
    ++finished_;
  }
  return progressed;
}

}  // namespace ddp
