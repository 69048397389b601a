#include "libddp/comm/nodes/node_pipeline.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"

namespace ddp {
namespace {

// Among allocations: one that the group's own will not reach.
constexpr uint64_t kScratchId = (uint64_t{1} << (64 - Address::kOffsetBits)) - 1;

bool AllSucceeded(const std::deque<Transfer>& transfers) {
  return std::all_of(transfers.begin(), transfers.end(), [](const Transfer& t) { return t.done && !t.truncated; });
}

}  // namespace

NodePipeline::NodePipeline(NodePipelineOptions options, ProgressThread* progress)
    : Driver({.rank = options.rank, .oversubscribed = options.oversubscribed, .looks_each_tick = true}, progress),
      options_(std::move(options)),
      reducing_(std::move(options_.reducing), progress),
      spreading_(std::move(options_.spreading), progress),
      mail_stride_(MailStride(options_.layout)),
      steps_(std::make_unique<std::array<Step, kChunksInFlight>>()),
      mail_(std::make_unique<Mail>()),
      messages_(std::make_unique<NodeMessages>(this, options_.layout.size())) {
  const NodeLayout& layout = options_.layout;
  const size_t stride = kChunksInFlight * kScratchBytes;
  SharedAllocation scratch{kScratchId,
                           {},
                           stride,
                           options_.scratch_offset + stride * static_cast<size_t>(local()),
                           options_.segment,
                           std::make_shared<std::atomic<bool>>(false),
                           {}};
  for (int l = 0; l < layout.width(node()); ++l) {
    scratch.parts.push_back(options_.segment->data() + options_.scratch_offset + stride * static_cast<size_t>(l));
  }
  scratch_ = scratch.part(local());
  options_.allocations->Add(scratch);
  for (size_t i = 0; i < kChunksInFlight; ++i) (*steps_)[i].scratch = scratch_ + i * kScratchBytes;

  // Each rank compares its calls with one rank of each other node; within a node the engine does.
  for (int n = 0; n < layout.nodes(); ++n) {
    if (n == node()) continue;
    header_from_.push_back(layout.rank(n, local() % layout.width(n)));
    for (int l = local(); l < layout.width(n); l += layout.width(node())) {
      // Those whose local rank, modulo the width of this node, is this one's.
      header_to_.push_back(layout.rank(n, l));
    }
  }
  finished_by_gone_.assign(static_cast<size_t>(layout.size()), kHere);
  gone_.resize(static_cast<size_t>(layout.size()));
  progress->Add(this);
}

NodePipeline::~NodePipeline() {
  if (!owner_.IsHere()) return;
  progress()->Remove(this);
  Lock lock(mutex_);
  TakeLaunched();
  Leave();
}

// --- launching ------------------------------------------------------------------------------------------------------

absl::StatusOr<Work> NodePipeline::Launch(NodeOperation* operation) {
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
absl::StatusOr<Work> NodePipeline::StartMessage(Call call) {
  absl::StatusOr<Work> work;
  {
    const Lock lock = LockToCall();
    if (wire_.Usable(/*background=*/false)) Drive(/*background=*/false, /*steal=*/false);
    if (!failure_.ok()) return failure_;
    if (!wire_.Usable(/*background=*/false)) {
      return absl::FailedPreconditionError(
          absl::StrCat("rank ", options_.rank,
                       ": MPI was initialised for use by one thread, and this is another one; initialise it with ",
                       "MPI_Init_thread and MPI_THREAD_SERIALIZED, or call Send and Recv in the thread that did"));
    }
    work = call();
    if (messages_->Pending()) pending_.store(1);
    Drive(/*background=*/false, /*steal=*/false);
  }
  progress()->Notify();
  return work;
}

absl::StatusOr<Work> NodePipeline::Send(NodeMessageSpec spec) {
  return StartMessage([&] { return messages_->Send(std::move(spec)); });
}

absl::StatusOr<Work> NodePipeline::Recv(NodeMessageSpec spec) {
  return StartMessage([&]() -> absl::StatusOr<Work> { return messages_->Recv(std::move(spec)); });
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
    if (look) {
      if (absl::Status s = wire_.Poll(); !s.ok()) FailLocked(s, /*tell=*/false);
    }
    if (failure_.ok()) ListenForNews();
    if (mail_->listening.done) HearNews();
    if (failure_.ok()) progressed = BeginChunks();
    if (failure_.ok()) progressed |= messages_->Advance();
    const Step* earlier = nullptr;
    for (auto step = flight_.begin(); step != flight_.end() && failure_.ok(); ++step) {
      progressed |= Advance(*step, earlier);
      earlier = *step;
    }
    if (failure_.ok()) progressed |= Retire();
  }
  if (!failure_.ok()) {
    Tell(background);
    EndPending();
  }
  NotePending();
  return progressed;
}

void NodePipeline::NotePending() {
  if (!queue_.empty() || messages_->Pending() || pending_.load(std::memory_order_relaxed) == 0) return;
  std::lock_guard<std::mutex> lock(launch_mutex_);
  if (launched_.empty()) pending_.store(0, std::memory_order_release);
}

// Operations take effect in the order of the calls: one that shares memory with an earlier one begins when that is
// done.
bool NodePipeline::MustWaitForEarlier(const NodeOperation& operation) const {
  for (const NodeOperation* earlier : queue_) {
    if (earlier == &operation) return false;
    if (earlier->Done()) continue;
    if (operation.Is(Kind::kBarrier) || operation.out.Overlaps(earlier->out) || operation.out.Overlaps(earlier->in) ||
        operation.in.Overlaps(earlier->out)) {
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
      if (flight_.size() == kChunksInFlight || !failure_.ok()) return progressed;
      Begin(operation);
      progressed = true;
    }
  }
  return progressed;
}

void NodePipeline::Begin(NodeOperation* operation) {
  // Chunks end in the order in which they begin, so this step is free. The same one again, where it is, as its memory
  // is in the processor's caches.
  if (flight_.empty()) steps_begun_ = 0;
  Step& step = (*steps_)[steps_begun_++ % kChunksInFlight];
  step.operation = operation;
  step.chunk = operation->begun++;
  step.room = operation->Room(step.chunk);
  step.areas = operation->AreasFor(step.room);
  step.stage = Stage::kReducing;
  step.exposed = step.listening = step.summed = false;
  step.reducing = step.spreading = Work();
  step.partials.clear();
  step.results.clear();
  step.sends.clear();
  flight_.push_back(&step);
  if (step.chunk == 0) {
    notes_.Entered(*operation, FlightState::kAnnounced);
    operation->header = {operation->sequence, operation->key().Pack(), operation->count, operation->parameters};
    if (spare_mail_.empty()) {
      spare_mail_.push_back(std::make_unique_for_overwrite<char[]>((header_from_.size() + 1) * mail_stride_));
    }
    operation->mail = std::move(spare_mail_.back());
    spare_mail_.pop_back();
    for (size_t i = 0; i < header_from_.size(); ++i) {
      Transmit(&operation->headers_in, /*send=*/false, header_from_[i], kHeader,
               operation->mail.get() + i * mail_stride_, mail_stride_);
    }
  }
  Place(&step);
  ExpectSums(&step);
  if (!step.exposed) ExpectResults(&step, flight_.size() > 1 ? *(flight_.end() - 2) : nullptr);
  LaunchReducing(&step);
}

void NodePipeline::Transmit(std::deque<Transfer>* list, bool send, int peer, Tag tag, void* data, size_t bytes) {
  Transfer& transfer = list->emplace_back();
  transfer.peer = options_.wire_ranks[static_cast<size_t>(peer)];
  transfer.tag = tag;
  transfer.data = data;
  transfer.bytes = bytes;
  if (absl::Status s = send ? wire_.Send(&transfer) : wire_.Receive(&transfer); !s.ok()) FailLocked(s, false);
}

// Each stage takes the chunks in their order: `earlier` is the one before this.
bool NodePipeline::Advance(Step* step, const Step* earlier) {
  switch (step->stage) {
    case Stage::kReducing:
      if (!step->reducing.Done() || (earlier != nullptr && earlier->stage == Stage::kReducing)) return false;
      if (absl::Status s = step->reducing.Wait(absl::InfinitePast()); !s.ok()) {
        FailAndTell(s);
        return false;
      }
      if (step->chunk == 0) {
        step->operation->met = true;
        if (step->operation->compared) notes_.Entered(*step->operation, FlightState::kReady);
      }
      // A header that goes alone goes while the wire asks for the sums.
      SendSums(step);
      if (step->chunk == 0) Greet(step);
      step->stage = Stage::kExchanging;
      Exchange(step, earlier);
      return true;
    case Stage::kExchanging:
      return Exchange(step, earlier);
    case Stage::kSpreading:
      if (!step->spreading.Done() || !AllSucceeded(step->sends)) return false;
      if (absl::Status s = step->spreading.Wait(absl::InfinitePast()); !s.ok()) {
        FailAndTell(s);
        return false;
      }
      CollectFlags(*step);
      ++step->operation->finished;
      step->stage = Stage::kFinished;
      return true;
    case Stage::kFinished:
      return false;
  }
  return false;
}

bool NodePipeline::Exchange(Step* step, const Step* earlier) {
  bool progressed = false;
  // Whatever is to be replaced must have been sent.
  if (!step->exposed || AllSucceeded(step->sends)) ExpectResults(step, earlier);
  const bool carried = step->operation->Carries(step->chunk);
  if (carried && !step->summed) Compare(step->operation);
  const bool came = AllSucceeded(step->partials) && (!carried || step->operation->compared) && failure_.ok();
  if (!step->summed && step->listening && (earlier == nullptr || earlier->summed) && came) {
    SendResults(step);
    step->summed = progressed = true;
  }
  if (step->summed && (earlier == nullptr || earlier->stage >= Stage::kSpreading) && AllSucceeded(step->results) &&
      failure_.ok()) {
    LaunchSpreading(step);
    step->stage = Stage::kSpreading;
    progressed = true;
  }
  return progressed;
}

// --- the end --------------------------------------------------------------------------------------------------------

void NodePipeline::Compare(NodeOperation* operation) {
  if (operation->compared || !AllSucceeded(operation->headers_in)) return;
  operation->compared = true;
  const auto describe = [](const NodeHeader& h) { return OperationKey::Unpack(h.what).Describe(h.count); };
  for (size_t i = 0; i < header_from_.size(); ++i) {
    const NodeHeader& mine = operation->header;
    NodeHeader theirs;
    std::memcpy(&theirs, operation->mail.get() + i * mail_stride_, sizeof theirs);
    if (theirs.what == mine.what && theirs.count == mine.count && theirs.parameters == mine.parameters &&
        theirs.sequence == mine.sequence) {
      continue;
    }
    const bool only_parameters = theirs.what == mine.what && theirs.count == mine.count;
    const bool mine_first = options_.rank < header_from_[i];
    const NodeHeader& first = mine_first ? mine : theirs;
    const NodeHeader& second = mine_first ? theirs : mine;
    return FailAndTell(absl::FailedPreconditionError(absl::StrCat(
        "ranks disagree about operation ", operation->sequence, ": rank ", std::min(options_.rank, header_from_[i]),
        " calls ", describe(first), ", rank ", std::max(options_.rank, header_from_[i]), " calls ", describe(second),
        !only_parameters                   ? ""
        : operation->Is(Kind::kAllGatherV) ? " with other counts of the single ranks"
                                           : " with another prescale or postscale",
        "; all ranks must make the same calls in the same order")));
  }
  if (operation->met) notes_.Entered(*operation, FlightState::kReady);
}

bool NodePipeline::Retire() {
  bool progressed = false;
  while (!flight_.empty() && flight_.front()->stage == Stage::kFinished) flight_.pop_front();
  for (NodeOperation* operation : queue_) {
    if (operation->begun == 0) break;
    if (!operation->Done()) Compare(operation);
    if (!failure_.ok()) return true;
    if (operation->Done() || operation->finished < operation->chunks() || !operation->compared ||
        !AllSucceeded(operation->headers_out)) {
      continue;
    }
    const int64_t ended_ns = operation->bucket >= 0 ? NowNs() : 0;
    notes_.Entered(*operation, FlightState::kDone, ended_ns);
    spare_mail_.push_back(std::move(operation->mail));
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
