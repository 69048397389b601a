// The three stages of a chunk.
#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/container/inlined_vector.h"
#include "libddp/comm/nodes/node_pipeline.h"

namespace ddp {

// --- places ---------------------------------------------------------------------------------------------------------

// Where the sums and the final values of this rank's slice lie. The wire works on nothing that is the user's alone: of
// a message that comes too late, when the group has failed, nobody must take notice. So it works on scratch memory, or
// on the second view of memory that the group has allocated, from which a failure parts the user's view.
void NodePipeline::Place(Step* step) {
  const NodeOperation& op = *step->operation;
  step->sums.clear();
  step->finals.clear();
  if (!op.reduces()) return;
  const std::vector<int>& slice = op.plan().slice(node(), local());
  char* sum = step->scratch + step->areas.partial;
  for (const int b : slice) {
    step->sums.push_back(PlaceSum(step, b, sum));
    sum += step->room * op.partial_size();
  }
  // The flag of a block follows its final value, which is not where the user has room for it.
  const bool stays = alone() && op.Is(Kind::kAllReduce) && (!op.flags() || op.plan().on_each_node());
  for (size_t i = 0; stays && i < slice.size(); ++i) {
    step->finals.push_back(PlaceFinal(step, slice[i], ResultOf(*step, slice[i])));
  }
}

// The sum of a rank that is alone on its node is what it has.
NodePipeline::Spot NodePipeline::PlaceSum(Step* step, int block, char* scratch) {
  const NodeOperation& op = *step->operation;
  const NodeOperation::Part part = op.PartOf(block, step->chunk);
  const size_t begin = part.begin * op.in_size(), bytes = part.count * op.in_size();
  if (!alone() || !op.sums_as_is || bytes == 0) return {scratch, scratch};
  const bool sent = !op.Carries(step->chunk) && (op.plan().on_each_node() || op.plan().home(block) != options_.rank);
  size_t contiguous = 0;
  char* const data = op.in.At(begin, &contiguous);
  char* const here = contiguous < bytes ? scratch : data;
  char* const wire = sent && here == data ? View(step, data, bytes) : nullptr;
  if (here == scratch || (sent && wire == nullptr)) op.in.CopyOut(begin, scratch, bytes);
  return {here, wire == nullptr ? scratch : wire};
}

// Where `here` is the scratch memory, the values are copied from there at last.
NodePipeline::Spot NodePipeline::PlaceFinal(Step* step, int block, char* scratch) {
  NodeOperation& op = *step->operation;
  const NodeOperation::Part part = op.PartOf(block, step->chunk);
  const size_t bytes = part.count * op.out_size();
  size_t contiguous = 0;
  char* const data = bytes == 0 ? scratch : op.out.At(part.begin * op.out_size(), &contiguous);
  if (contiguous < bytes) return {scratch, scratch};
  const bool is_home = op.plan().home(block) == options_.rank;
  if (is_home && op.plan().on_each_node()) return {data, nullptr};
  char* const wire = View(step, data, bytes);
  if (wire == nullptr) return {scratch, scratch};
  op.exposed |= !is_home;
  return {data, wire};
}

char* NodePipeline::View(Step* step, char* data, size_t bytes) {
  char* const view = options_.allocations->View(data, bytes, &step->operation->views);
  step->exposed |= view != nullptr;
  return view;
}

// Says where to put what will come.
void NodePipeline::ExpectSums(Step* step) {
  const NodeOperation& op = *step->operation;
  const BlockPlan& plan = op.plan();
  if (op.reduces() && !op.Carries(step->chunk)) {
    char* to = step->scratch + step->areas.received;
    for (int b = 0; b < plan.blocks(); ++b) {
      if (plan.home(b) != options_.rank) continue;
      const size_t bytes = op.PartOf(b, step->chunk).count * op.partial_size();
      for (int n = 0; n < options_.layout.nodes(); ++n) {
        if (n == node()) continue;
        if (bytes > 0) Transmit(&step->partials, /*send=*/false, plan.owner(n, b), kPartial, to, bytes);
        to += step->room * op.partial_size();
      }
    }
  }
  if (op.exchanges_all()) {
    for (int r = 0; r < plan.blocks(); ++r) {
      char* const to = step->scratch + step->areas.received + static_cast<size_t>(r) * step->room * op.in_size();
      const size_t bytes = op.PartOf(r, step->chunk).count * op.in_size();
      if (r != options_.rank && bytes > 0) Transmit(&step->partials, /*send=*/false, r, kPartial, to, bytes);
    }
  }
}

// The wire delivers in the order in which this is called.
void NodePipeline::ExpectResults(Step* step, const Step* earlier) {
  const NodeOperation& op = *step->operation;
  const BlockPlan& plan = op.plan();
  if (step->listening || (earlier != nullptr && !earlier->listening)) return;
  step->listening = true;
  if (!op.spreads()) return;
  for (const int b : plan.slice(node(), local())) {
    if (!IsElsewhere(plan.home(b))) continue;
    char* const to = step->finals.empty() ? ResultOf(*step, b) : step->finals[op.SlicePlace(b)].wire;
    if (const size_t bytes = op.ResultBytes(b, step->chunk); bytes > 0) {
      Transmit(&step->results, /*send=*/false, plan.home(b), kResult, to, bytes);
    }
  }
}

// --- reducing -------------------------------------------------------------------------------------------------------

// The slices of this node's ranks end to end, each as long as the longest. `scatter`: they are going to be written, so
// where a slice has no data each gets memory of its own; else they are only read.
void NodePipeline::AddSlices(const Step& step, const RangeList& from, size_t size, bool scatter, RangeList* to) const {
  const NodeOperation& op = *step.operation;
  const int width = options_.layout.width(node());
  const size_t slots = static_cast<size_t>(op.plan().slots(node()));
  char* flags = step.scratch + step.areas.waste;
  char* spare =
      scatter ? flags + static_cast<size_t>(width) * slots * sizeof(uint64_t) : step.scratch + step.areas.zeros;
  for (int l = 0; l < width; ++l) {
    const std::vector<int>& slice = op.plan().slice(node(), l);
    for (size_t i = 0; i < slots; ++i) {
      size_t count = 0;
      if (i < slice.size()) {
        const NodeOperation::Part part = op.PartOf(slice[i], step.chunk);
        count = part.count;
        to->AddFrom(from, part.begin * size, count * size);
      }
      const size_t rest = (step.room - count) * size;
      to->Add(spare, rest);
      if (!scatter) continue;
      spare += rest;
      if (op.flags()) to->Add(flags, sizeof(uint64_t));
      flags += sizeof(uint64_t);
    }
  }
}

// The ranks of the node sum their data. Where there is nothing to sum they meet, once, to find that they agree.
void NodePipeline::LaunchReducing(Step* step) {
  const NodeOperation& op = *step->operation;
  Operation* part = nullptr;
  if (alone() && (!op.reduces() || op.sums_as_is)) {
    return;
  } else if (op.reduces() && step->room > 0) {
    const size_t slots = static_cast<size_t>(op.plan().slots(node()));
    part = new Operation(&reducing_,
                         {.kind = Kind::kReduceScatter, .in = op.key().in, .out = op.partial, .op = op.key().op});
    AddSlices(*step, op.in, op.in_size(), /*scatter=*/false, &part->in);
    part->out.Add(step->scratch + step->areas.partial, slots * step->room * op.partial_size());
    part->count = static_cast<size_t>(options_.layout.width(node())) * slots * step->room;
    part->reduce = op.sum;
  } else if (step->chunk == 0) {
    part = new Operation(&reducing_, {});
  } else {
    return;
  }
  part->CalledAs(op.key(), op.count);
  part->parameters = op.parameters;
  part->bucket = op.bucket;
  absl::StatusOr<Work> work = reducing_.Launch(part);
  if (!work.ok()) return FailLocked(work.status());
  step->reducing = *std::move(work);
  reducing_.Progress();
}

// --- exchanging -----------------------------------------------------------------------------------------------------

// Tells peers on other nodes what this rank has been called for, and its sums with it where they are few.
void NodePipeline::Greet(Step* step) {
  NodeOperation& op = *step->operation;
  char* const message = op.mail.get() + header_from_.size() * mail_stride_;
  size_t bytes = sizeof(NodeHeader);
  std::memcpy(message, &op.header, bytes);
  if (op.Carries(step->chunk)) {
    const int block = op.plan().slice(node(), local())[0];
    const size_t sums = op.PartOf(block, step->chunk).count * op.partial_size();
    std::memcpy(message + bytes, SumOf(*step, block).here, sums);
    bytes += sums;
  }
  for (const int peer : header_to_) Transmit(&op.headers_out, /*send=*/true, peer, kHeader, message, bytes);
}

// The node's sums, each to where its block is at home.
void NodePipeline::SendSums(Step* step) {
  const NodeOperation& op = *step->operation;
  if (op.exchanges_all()) return SendParts(step);
  if (!op.reduces() || op.Carries(step->chunk)) return;
  const BlockPlan& plan = op.plan();
  for (const int b : plan.slice(node(), local())) {
    char* const from = SumOf(*step, b).wire;
    const size_t bytes = op.PartOf(b, step->chunk).count * op.partial_size();
    const auto send = [&](int to) { Transmit(&step->sends, /*send=*/true, to, kPartial, from, bytes); };
    for (int n = 0; plan.on_each_node() && bytes > 0 && n < options_.layout.nodes(); ++n) {
      if (n != node()) send(plan.owner(n, b));
    }
    if (plan.home(b) != options_.rank && bytes > 0) send(plan.home(b));
  }
}

// Makes the final values of what is at home here, and sends them to the blocks' owners on other nodes.
void NodePipeline::SendResults(Step* step) {
  const NodeOperation& op = *step->operation;
  if (op.exchanges_all()) return TakeParts(step);
  const BlockPlan& plan = op.plan();
  const bool carried = op.Carries(step->chunk);
  const char* received = carried ? op.mail.get() + sizeof(NodeHeader) : step->scratch + step->areas.received;
  const size_t stride = carried ? mail_stride_ : step->room * op.partial_size();
  for (int b = 0; step->room > 0 && b < plan.blocks(); ++b) {
    if (plan.home(b) != options_.rank) continue;
    Spot result = {ResultOf(*step, b), ResultOf(*step, b)};
    if (!step->finals.empty()) result = step->finals[op.SlicePlace(b)];
    if (op.reduces()) {
      Sum(*step, b, received, stride, result.here);
      received += static_cast<size_t>(options_.layout.nodes() - 1) * stride;
    } else {
      const NodeOperation::Part part = op.PartOf(b, step->chunk);
      const size_t origin = op.begins.empty() ? 0 : op.begins[static_cast<size_t>(b)];
      op.in.CopyOut((part.begin - origin) * op.in_size(), result.here, part.count * op.in_size());
    }
    const size_t bytes = op.ResultBytes(b, step->chunk);
    const bool wanted = op.spreads() && !plan.on_each_node();
    for (int n = 0; wanted && bytes > 0 && n < options_.layout.nodes(); ++n) {
      if (n != node()) Transmit(&step->sends, /*send=*/true, plan.owner(n, b), kResult, result.wire, bytes);
    }
  }
}

// Adds up, in node order, what the nodes have of a block.
void NodePipeline::Sum(const Step& step, int block, const char* received, size_t stride, char* result) const {
  const NodeOperation& op = *step.operation;
  const NodeOperation::Part part = op.PartOf(block, step.chunk);
  const int nodes = options_.layout.nodes();
  absl::InlinedVector<const void*, 16> sums(static_cast<size_t>(nodes));
  for (int n = 0; n < nodes; ++n) {
    if (n == node()) {
      sums[static_cast<size_t>(n)] = SumOf(step, block).here;
    } else {
      sums[static_cast<size_t>(n)] = std::exchange(received, received + stride);
    }
  }
  void* const to = result;
  const bool bad = part.count > 0 && op.finish(sums.data(), nodes, &to, 1, part.count);
  if (!step.finals.empty()) {
    if (bad) *op.nonfinite = 1;
  } else if (op.Is(Kind::kReduceScatter)) {
    const size_t begin = part.begin - op.begins[static_cast<size_t>(block)];
    op.out.CopyIn(begin * op.out_size(), result, part.count * op.out_size());
    if (bad) *op.nonfinite = 1;
  } else if (op.flags()) {
    const uint64_t flag = bad;
    std::memcpy(result + step.room * op.out_size(), &flag, sizeof flag);
  }
}

// All-to-all needs neither sums nor owners: each part goes straight from rank to rank, also within a node.
void NodePipeline::SendParts(Step* step) {
  const NodeOperation& op = *step->operation;
  for (int r = 0; r < op.plan().blocks(); ++r) {
    const NodeOperation::Part part = op.PartOf(r, step->chunk);
    const size_t begin = part.begin * op.in_size(), bytes = part.count * op.in_size();
    if (r == options_.rank) {
      op.in.CopyTo(begin, op.out, begin, bytes);
      continue;
    }
    if (bytes == 0) continue;
    char* const from = step->scratch + step->areas.result + static_cast<size_t>(r) * step->room * op.in_size();
    op.in.CopyOut(begin, from, bytes);
    Transmit(&step->sends, /*send=*/true, r, kPartial, from, bytes);
  }
}

// What lay here has been copied away.
void NodePipeline::TakeParts(Step* step) const {
  const NodeOperation& op = *step->operation;
  for (int r = 0; r < op.plan().blocks(); ++r) {
    if (r == options_.rank) continue;
    const NodeOperation::Part part = op.PartOf(r, step->chunk);
    op.out.CopyIn(part.begin * op.in_size(),
                  step->scratch + step->areas.received + static_cast<size_t>(r) * step->room * op.in_size(),
                  part.count * op.in_size());
  }
}

// --- spreading ------------------------------------------------------------------------------------------------------

// The ranks of the node gather each other's slices; where the root of a broadcast is among them, its data.
void NodePipeline::LaunchSpreading(Step* step) {
  const NodeOperation& op = *step->operation;
  if (!op.spreads() || step->room == 0) return;
  if (!step->finals.empty()) return TakeFinals(*step);
  Operation* part = nullptr;
  if (op.Is(Kind::kBroadcast) && !IsElsewhere(op.key().root)) {
    const NodeOperation::Part first = op.PartOf(0, step->chunk), last = op.PartOf(op.plan().blocks() - 1, step->chunk);
    part = new Operation(&spreading_, {.kind = Kind::kBroadcast,
                                       .in = op.key().in,
                                       .out = op.key().out,
                                       .root = static_cast<uint16_t>(options_.layout.local_of(op.key().root))});
    part->count = last.begin + last.count - first.begin;
    part->in.AddFrom(op.out, first.begin * op.out_size(), part->count * op.out_size());
    part->out = part->in;
  } else {
    part = new Operation(&spreading_, {.kind = Kind::kAllGather});
    part->count = static_cast<size_t>(op.plan().slots(node())) * op.Stride(step->room);
    part->in.Add(step->scratch + step->areas.result, part->count);
    AddSlices(*step, op.out, op.out_size(), /*scatter=*/true, &part->out);
  }
  part->CalledAs(op.key(), op.count);
  part->parameters = op.parameters;
  part->bucket = op.bucket;
  absl::StatusOr<Work> work = spreading_.Launch(part);
  if (!work.ok()) return FailLocked(work.status());
  step->spreading = *std::move(work);
  spreading_.Progress();
}

// Nobody else is on this node.
void NodePipeline::TakeFinals(const Step& step) const {
  const NodeOperation& op = *step.operation;
  for (const int b : op.plan().slice(node(), local())) {
    const NodeOperation::Part part = op.PartOf(b, step.chunk);
    const char* const final = step.finals[op.SlicePlace(b)].here;
    if (final == ResultOf(step, b)) op.out.CopyIn(part.begin * op.out_size(), final, part.count * op.out_size());
  }
}

void NodePipeline::CollectFlags(const Step& step) const {
  const NodeOperation& op = *step.operation;
  if (!op.flags() || step.room == 0 || !step.finals.empty()) return;
  const size_t slots = static_cast<size_t>(op.plan().slots(node()));
  for (int l = 0; l < options_.layout.width(node()); ++l) {
    for (size_t i = 0; i < op.plan().slice(node(), l).size(); ++i) {
      uint64_t flag = 0;
      std::memcpy(&flag, step.scratch + step.areas.waste + (static_cast<size_t>(l) * slots + i) * sizeof flag,
                  sizeof flag);
      if (flag != 0) *op.nonfinite = 1;
    }
  }
}

}  // namespace ddp
