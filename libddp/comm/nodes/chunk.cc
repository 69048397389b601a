// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/nodes/chunk.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace ddp {
namespace {

using Kind = OperationKey::Kind;

}  // namespace

absl::Status Chunk::Begin(NodeOperation* operation, const Chunk* earlier) {
  operation_ = operation;
  index_ = operation->begun++;
  room_ = operation->Room(index_);
  areas_ = operation->AreasFor(room_);
  if (absl::Status s = memory_.Reserve(number_, areas_.end); !s.ok()) {
    return context_.reducing.options().world_ranks.Named(
        NameRank(context_.rank, absl::StrCat(operation->Describe(), ": the exchange between nodes"), s), context_.rank);
  }
  stage_ = Stage::kReducing;
  carried_ = operation->Carries(index_);
  agreed_ = index_ > 0;
  exposed_ = receiving_ = summed_ = false;
  part_ = Work();
  for (auto* transfers : {&headers_, &partials_, &results_, &sends_}) transfers->clear();
  if (index_ == 0) ReceiveHeaders();
  PlaceSlice();
  ReceiveSums();
  if (!exposed_) ReceiveResults(earlier);
  return LaunchReducing();
}

absl::StatusOr<bool> Chunk::Advance(const Chunk* earlier) {
  if (!agreed_ && AllDone(headers_)) {
    if (absl::Status s = CompareHeaders(); !s.ok()) return s;
    agreed_ = true;
    if (stage_ != Stage::kReducing) context_.notes.Entered(*operation_, FlightState::kReady);
  }
  switch (stage_) {
    case Stage::kReducing: {
      if (!part_.Done() || (earlier != nullptr && earlier->stage_ == Stage::kReducing)) return false;
      if (absl::Status s = part_.Wait(absl::InfinitePast()); !s.ok()) return s;
      if (index_ == 0 && agreed_) context_.notes.Entered(*operation_, FlightState::kReady);
      // A header that goes alone goes while the wire asks for the sums.
      SendSums();
      if (index_ == 0) SendHeaders();
      stage_ = Stage::kExchanging;
      const absl::StatusOr<bool> exchanged = Exchange(earlier);
      return exchanged.ok() ? true : exchanged;
    }
    case Stage::kExchanging:
      return Exchange(earlier);
    case Stage::kSpreading:
      if (!part_.Done() || !AllDone(sends_)) return false;
      if (absl::Status s = part_.Wait(absl::InfinitePast()); !s.ok()) return s;
      CollectFlags();
      ++operation_->finished;
      stage_ = Stage::kFinished;
      return true;
    case Stage::kFinished:
      return false;
  }
  return false;
}

absl::StatusOr<bool> Chunk::Exchange(const Chunk* earlier) {
  bool progressed = false;
  // Whatever is to be replaced must have been sent.
  if (!exposed_ || AllDone(sends_)) ReceiveResults(earlier);
  const bool sums_came = AllDone(partials_) && (agreed_ || !carried_);
  if (!summed_ && receiving_ && (earlier == nullptr || earlier->summed_) && sums_came) {
    FinishBlocks();
    summed_ = progressed = true;
  }
  if (summed_ && agreed_ && (earlier == nullptr || earlier->stage_ >= Stage::kSpreading) && AllDone(results_)) {
    if (absl::Status s = LaunchSpreading(); !s.ok()) return s;
    stage_ = Stage::kSpreading;
    progressed = true;
  }
  return progressed;
}

// As a part of what the user called: that is what the peers compare and what messages name.
absl::Status Chunk::Launch(Engine* engine, Operation* part) {
  part->called = operation_->called;
  part->called.sequence = operation_->sequence;
  part->parameters = operation_->parameters;
  part->bucket = operation_->bucket;
  part->timeout = operation_->timeout * (engine == &context_.reducing ? kReducingShare : kSpreadingShare);
  part_ = engine->Launch(part);
  if (absl::Status s = part_.call_status(); !s.ok()) return s;
  engine->Progress();
  return absl::OkStatus();
}

std::set<int> Chunk::Missing(bool* arrived) const {
  std::set<int> missing;
  const auto add = [&](const std::deque<Transfer>& transfers) {
    for (const Transfer& t : transfers) {
      if (!t.done) missing.insert(context_.wire.PeerOf(t));
    }
  };
  add(headers_);
  *arrived = missing.empty();
  for (const auto* transfers : {&partials_, &results_, &sends_}) {
    if (*arrived) add(*transfers);
  }
  return missing;
}

// --- headers --------------------------------------------------------------------------------------------------------

void Chunk::ReceiveHeaders() {
  for (int n = 0; n < context_.layout.nodes(); ++n) {
    if (n == context_.node()) continue;
    context_.wire.Receive(&headers_, HeaderRank(n), WireTag::kHeader, HeaderOf(n), operation_->HeaderStride());
  }
}

// To the ranks that receive this one's.
void Chunk::SendHeaders() {
  const NodeHeader header = operation_->header();
  char* const message = HeaderOf(context_.node());
  std::memcpy(message, &header, sizeof header);
  const size_t carried = carried_ ? PartOf(slice()[0]).count * operation_->partial_size() : 0;
  const NodeLayout& layout = context_.layout;
  for (int n = 0; n < layout.nodes(); ++n) {
    for (int l = context_.local(); n != context_.node() && l < layout.width(n); l += context_.width()) {
      context_.wire.Send(&sends_, layout.rank(n, l), WireTag::kHeader, message, sizeof header + carried);
    }
  }
}

absl::Status Chunk::CompareHeaders() {
  for (int n = 0; n < context_.layout.nodes(); ++n) {
    if (n == context_.node()) continue;
    NodeHeader theirs;
    std::memcpy(&theirs, HeaderOf(n), sizeof theirs);
    if (absl::Status s = operation_->Compare(theirs, HeaderRank(n)); !s.ok()) return s;
  }
  return absl::OkStatus();
}

// --- places ---------------------------------------------------------------------------------------------------------

// The wire does not work on memory that only the user has: a message that goes on after the group has failed must not
// change it, nor bring the peer what the user writes then. So it works on scratch memory, or on the second view of
// memory from Allocate, from which a failure detaches the user's view.
void Chunk::PlaceSlice() {
  const NodeOperation& op = *operation_;
  sums_.clear();
  finals_.clear();
  if (!op.reduces()) return;
  char* sum = carried_ ? HeaderOf(context_.node()) + sizeof(NodeHeader) : scratch_ + areas_.partial;
  for (const int b : slice()) {
    sums_.push_back(PlaceSum(b, sum));
    sum += room_ * op.partial_size();
  }
  // The flag of a block follows its final value, so that cannot be where the user has no room for it.
  const bool in_place = alone() && op.Is(Kind::kAllReduce) && (!op.flags() || plan().on_each_node());
  for (size_t i = 0; in_place && i < slice().size(); ++i) {
    finals_.push_back(PlaceFinal(slice()[i], ResultOf(slice()[i])));
  }
}

// The sum of a rank that is alone on its node is what it has.
char* Chunk::PlaceSum(int block, char* scratch) {
  const NodeOperation& op = *operation_;
  const NodeOperation::Part part = PartOf(block);
  const size_t begin = part.begin * op.in_size(), bytes = part.count * op.in_size();
  if (!alone() || !op.sums_as_is || bytes == 0) return scratch;
  size_t contiguous = 0;
  char* place = op.in.At(begin, &contiguous);
  if (contiguous < bytes || carried_) {
    place = nullptr;
  } else if (plan().on_each_node() || !is_root(block)) {  // it is sent
    place = View(place, bytes);
  }
  if (place != nullptr) return place;
  op.in.CopyOut(begin, scratch, bytes);
  return scratch;
}

// If it is `scratch`, the values are copied from there at last.
char* Chunk::PlaceFinal(int block, char* scratch) {
  const NodeOperation::Part part = PartOf(block);
  const size_t size = operation_->out_size(), bytes = part.count * size;
  if (bytes == 0) return scratch;
  size_t contiguous = 0;
  char* const data = operation_->out.At(part.begin * size, &contiguous);
  if (contiguous < bytes) return scratch;
  if (is_root(block) && plan().on_each_node()) return data;
  char* const view = View(data, bytes);
  return view == nullptr ? scratch : view;
}

char* Chunk::View(char* data, size_t bytes) {
  char* const view = context_.allocations.View(data, bytes, &operation_->views);
  exposed_ |= view != nullptr;
  operation_->exposed |= exposed_;
  return view;
}

// --- reducing -------------------------------------------------------------------------------------------------------

// The slices of this node's ranks end to end, each as long as the longest. `scatter`: they are going to be written, so
// where a slice has no data each gets memory of its own; else they are only read.
void Chunk::AddSlices(const RangeList& from, size_t size, bool scatter, RangeList* to) const {
  const int width = context_.width();
  const size_t slots = static_cast<size_t>(plan().slots(context_.node()));
  char* flags = scratch_ + areas_.waste;
  char* spare = scatter ? flags + static_cast<size_t>(width) * slots * sizeof(uint64_t) : scratch_ + areas_.zeros;
  for (int l = 0; l < width; ++l) {
    const std::vector<int>& slice = plan().slice(context_.node(), l);
    for (size_t i = 0; i < slots; ++i) {
      size_t count = 0;
      if (i < slice.size()) {
        const NodeOperation::Part part = PartOf(slice[i]);
        count = part.count;
        to->AddFrom(from, part.begin * size, count * size);
      }
      const size_t rest = (room_ - count) * size;
      to->Add(spare, rest);
      if (!scatter) continue;
      spare += rest;
      if (operation_->flags()) to->Add(flags, sizeof(uint64_t));
      flags += sizeof(uint64_t);
    }
  }
}

// The ranks of the node sum their data. Where there is nothing to sum they meet, once, to find that they agree.
absl::Status Chunk::LaunchReducing() {
  const NodeOperation& op = *operation_;
  if (alone() && (!op.reduces() || op.sums_as_is)) return absl::OkStatus();
  if (op.reduces() && room_ > 0) {
    const size_t slots = static_cast<size_t>(plan().slots(context_.node()));
    auto* const part = new Operation(
        &context_.reducing, {.kind = Kind::kReduceScatter, .in = op.key().in, .out = op.partial, .op = op.key().op});
    AddSlices(op.in, op.in_size(), /*scatter=*/false, &part->in);
    part->out.Add(sums_[0], slots * room_ * op.partial_size());
    part->count = static_cast<size_t>(context_.width()) * slots * room_;
    part->reduce = op.sum;
    return Launch(&context_.reducing, part);
  }
  return index_ == 0 ? Launch(&context_.reducing, new Operation(&context_.reducing, {})) : absl::OkStatus();
}

// --- exchanging -----------------------------------------------------------------------------------------------------

// Says where to put what will come.
void Chunk::ReceiveSums() {
  const NodeOperation& op = *operation_;
  char* to = scratch_ + areas_.received;
  for (int b = 0; b < plan().blocks(); ++b) {
    const size_t count = PartOf(b).count;
    if (op.exchanges_all()) {
      if (b != context_.rank && count > 0) {
        context_.wire.Receive(&partials_, b, WireTag::kPartial, to, count * op.in_size());
      }
      to += room_ * op.in_size();
    } else if (op.reduces() && !carried_ && is_root(b)) {
      ForOtherOwners(b, [&](int owner) {
        if (count > 0) context_.wire.Receive(&partials_, owner, WireTag::kPartial, to, count * op.partial_size());
        to += room_ * op.partial_size();
      });
    }
  }
}

// The wire delivers in the order in which this is called.
void Chunk::ReceiveResults(const Chunk* earlier) {
  if (receiving_ || (earlier != nullptr && !earlier->receiving_)) return;
  receiving_ = true;
  for (const int b : slice()) {
    const int root = plan().root(b);
    if (!operation_->spreads() || context_.layout.node_of(root) == context_.node() || ResultBytes(b) == 0) continue;
    context_.wire.Receive(&results_, root, WireTag::kResult, FinalOf(b), ResultBytes(b));
  }
}

// The node's sums, each to the block's root.
void Chunk::SendSums() {
  const NodeOperation& op = *operation_;
  if (op.exchanges_all()) return SendParts();
  for (size_t i = 0; i < sums_.size() && !carried_; ++i) {
    const int b = slice()[i];
    const size_t bytes = PartOf(b).count * op.partial_size();
    const auto send = [&](int to) { context_.wire.Send(&sends_, to, WireTag::kPartial, sums_[i], bytes); };
    if (bytes == 0) continue;
    if (plan().on_each_node()) {
      ForOtherOwners(b, send);
    } else if (!is_root(b)) {
      send(plan().root(b));
    }
  }
}

// Makes the final values of the blocks whose root this rank is, and sends them to the owners on other nodes.
void Chunk::FinishBlocks() {
  const NodeOperation& op = *operation_;
  if (op.exchanges_all()) return TakeParts();
  const size_t stride = carried_ ? op.HeaderStride() : room_ * op.partial_size();
  const char* received = scratch_ + (carried_ ? areas_.headers + sizeof(NodeHeader) : areas_.received);
  for (int b = 0; room_ > 0 && b < plan().blocks(); ++b) {
    if (!is_root(b)) continue;
    char* const result = FinalOf(b);
    if (op.reduces()) {
      Sum(b, received, stride, result);
      received += static_cast<size_t>(context_.layout.nodes() - 1) * stride;
    } else {
      const NodeOperation::Part part = PartOf(b);
      const size_t origin = op.begins.empty() ? 0 : op.begins[static_cast<size_t>(b)];
      op.in.CopyOut((part.begin - origin) * op.in_size(), result, part.count * op.in_size());
    }
    if (!op.spreads() || plan().on_each_node() || ResultBytes(b) == 0) continue;
    ForOtherOwners(b, [&](int owner) { context_.wire.Send(&sends_, owner, WireTag::kResult, result, ResultBytes(b)); });
  }
}

// Adds up, in node order, what the nodes have of a block.
void Chunk::Sum(int block, const char* received, size_t stride, char* result) const {
  const NodeOperation& op = *operation_;
  const NodeOperation::Part part = PartOf(block);
  const int nodes = context_.layout.nodes();
  absl::InlinedVector<const void*, 16> sums;
  for (int n = 0; n < nodes; ++n) {
    sums.push_back(n == context_.node() ? sums_[op.SlicePlace(block)] : std::exchange(received, received + stride));
  }
  void* const to = result;
  const bool bad = part.count > 0 && op.finish(sums.data(), nodes, &to, 1, part.count);
  if (finals_.empty() && op.flags()) {
    const uint64_t flag = bad;
    std::memcpy(result + room_ * op.out_size(), &flag, sizeof flag);
    return;
  }
  if (bad) *op.nonfinite = 1;
  if (op.Is(Kind::kReduceScatter)) {
    const size_t begin = part.begin - op.begins[static_cast<size_t>(block)];
    op.out.CopyIn(begin * op.out_size(), result, part.count * op.out_size());
  }
}

// All-to-all needs neither sums nor owners: each part goes straight from rank to rank, also within a node.
void Chunk::SendParts() {
  const NodeOperation& op = *operation_;
  char* from = scratch_ + areas_.result;
  for (int r = 0; r < plan().blocks(); ++r, from += room_ * op.in_size()) {
    const NodeOperation::Part part = PartOf(r);
    const size_t begin = part.begin * op.in_size(), bytes = part.count * op.in_size();
    if (r == context_.rank) {
      op.in.CopyTo(begin, op.out, begin, bytes);
    } else if (bytes > 0) {
      op.in.CopyOut(begin, from, bytes);
      context_.wire.Send(&sends_, r, WireTag::kPartial, from, bytes);
    }
  }
}

// What lay here has been copied away.
void Chunk::TakeParts() const {
  const NodeOperation& op = *operation_;
  const char* from = scratch_ + areas_.received;
  for (int r = 0; r < plan().blocks(); ++r, from += room_ * op.in_size()) {
    const NodeOperation::Part part = PartOf(r);
    if (r != context_.rank) op.out.CopyIn(part.begin * op.in_size(), from, part.count * op.in_size());
  }
}

// --- spreading ------------------------------------------------------------------------------------------------------

// The ranks of the node gather each other's slices; where the root of a broadcast is among them, its data.
absl::Status Chunk::LaunchSpreading() {
  const NodeOperation& op = *operation_;
  part_ = Work();
  if (!op.spreads() || room_ == 0) return absl::OkStatus();
  if (!finals_.empty()) {
    TakeFinals();
    return absl::OkStatus();
  }
  const int root = op.key().root;
  if (op.Is(Kind::kBroadcast) && context_.layout.node_of(root) == context_.node()) {
    auto* const part =
        new Operation(&context_.spreading, {.kind = Kind::kBroadcast,
                                            .in = op.key().in,
                                            .out = op.key().out,
                                            .root = static_cast<uint16_t>(context_.layout.local_of(root))});
    const NodeOperation::Part first = PartOf(0), last = PartOf(plan().blocks() - 1);
    part->count = last.begin + last.count - first.begin;
    part->in.AddFrom(op.out, first.begin * op.out_size(), part->count * op.out_size());
    part->out = part->in;
    return Launch(&context_.spreading, part);
  }
  auto* const part = new Operation(&context_.spreading, {.kind = Kind::kAllGather});
  part->count = static_cast<size_t>(plan().slots(context_.node())) * op.Stride(room_);
  part->in.Add(scratch_ + areas_.result, part->count);
  AddSlices(op.out, op.out_size(), /*scatter=*/true, &part->out);
  return Launch(&context_.spreading, part);
}

// Nobody else is on this node.
void Chunk::TakeFinals() const {
  const NodeOperation& op = *operation_;
  for (const int b : slice()) {
    const NodeOperation::Part part = PartOf(b);
    if (FinalOf(b) == ResultOf(b)) {
      op.out.CopyIn(part.begin * op.out_size(), FinalOf(b), part.count * op.out_size());
    }
  }
}

// What the all-gather has put behind each block.
void Chunk::CollectFlags() const {
  const NodeOperation& op = *operation_;
  if (!op.flags() || room_ == 0 || !finals_.empty()) return;
  const size_t slots = static_cast<size_t>(plan().slots(context_.node()));
  for (int l = 0; l < context_.width(); ++l) {
    for (size_t i = 0; i < plan().slice(context_.node(), l).size(); ++i) {
      uint64_t flag = 0;
      std::memcpy(&flag, scratch_ + areas_.waste + (static_cast<size_t>(l) * slots + i) * sizeof flag, sizeof flag);
      if (flag != 0) *op.nonfinite = 1;
    }
  }
}

}  // namespace ddp
