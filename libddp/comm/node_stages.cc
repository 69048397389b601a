// The three stages of a chunk.
#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/container/inlined_vector.h"
#include "libddp/comm/node_pipeline.h"

namespace ddp {

// Says where to put what will come. All that the wire touches is scratch memory: of a message that comes too late, when
// the group has failed, nobody takes notice.
void NodePipeline::Expect(Step* step) {
  const NodeOperation& op = *step->operation;
  const BlockPlan& plan = op.plan();
  if (op.reduces()) {
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
  if (op.spreads()) {
    for (const int b : plan.slice(node(), local())) {
      if (!IsElsewhere(plan.home(b))) continue;
      char* const to = step->scratch + step->areas.result + op.ResultPlace(b) * op.Stride(step->room);
      if (const size_t bytes = op.ResultBytes(b, step->chunk); bytes > 0) {
        Transmit(&step->results, /*send=*/false, plan.home(b), kResult, to, bytes);
      }
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
  if (op.reduces() && step->room > 0) {
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

// Tells peers on other nodes what this rank has been called for.
void NodePipeline::Greet(NodeOperation* operation) {
  for (const int peer : header_to_) {
    Transmit(&operation->headers_out, /*send=*/true, peer, kHeader, &operation->header, sizeof(NodeHeader));
  }
}

// The node's sums, each to where its block is at home.
void NodePipeline::SendSums(Step* step) {
  const NodeOperation& op = *step->operation;
  if (op.exchanges_all()) return SendParts(step);
  if (!op.reduces()) return;
  const BlockPlan& plan = op.plan();
  for (const int b : plan.slice(node(), local())) {
    char* const from = step->scratch + step->areas.partial + op.SlicePlace(b) * step->room * op.partial_size();
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
  const char* received = step->scratch + step->areas.received;
  for (int b = 0; step->room > 0 && b < plan.blocks(); ++b) {
    if (plan.home(b) != options_.rank) continue;
    char* const result = step->scratch + step->areas.result + op.ResultPlace(b) * op.Stride(step->room);
    if (op.reduces()) {
      Sum(*step, b, received, result);
      received += static_cast<size_t>(options_.layout.nodes() - 1) * step->room * op.partial_size();
    } else {
      const NodeOperation::Part part = op.PartOf(b, step->chunk);
      const size_t origin = op.begins.empty() ? 0 : op.begins[static_cast<size_t>(b)];
      op.in.CopyOut((part.begin - origin) * op.in_size(), result, part.count * op.in_size());
    }
    const size_t bytes = op.ResultBytes(b, step->chunk);
    const bool wanted = op.spreads() && !plan.on_each_node();
    for (int n = 0; wanted && bytes > 0 && n < options_.layout.nodes(); ++n) {
      if (n != node()) Transmit(&step->sends, /*send=*/true, plan.owner(n, b), kResult, result, bytes);
    }
  }
}

// Adds up, in node order, what the nodes have of a block.
void NodePipeline::Sum(const Step& step, int block, const char* received, char* result) const {
  const NodeOperation& op = *step.operation;
  const NodeOperation::Part part = op.PartOf(block, step.chunk);
  const int nodes = options_.layout.nodes();
  const size_t block_bytes = step.room * op.partial_size();
  absl::InlinedVector<const void*, 16> sums(static_cast<size_t>(nodes));
  for (int n = 0; n < nodes; ++n) {
    if (n == node()) {
      sums[static_cast<size_t>(n)] = step.scratch + step.areas.partial + op.SlicePlace(block) * block_bytes;
    } else {
      sums[static_cast<size_t>(n)] = std::exchange(received, received + block_bytes);
    }
  }
  void* const to = result;
  const bool bad = part.count > 0 && op.finish(sums.data(), nodes, &to, 1, part.count);
  if (op.Is(Kind::kReduceScatter)) {
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

void NodePipeline::CollectFlags(const Step& step) const {
  const NodeOperation& op = *step.operation;
  if (!op.flags() || step.room == 0) return;
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
