// SPDX-License-Identifier: Apache-2.0
// The hook that sends gradients in block-scaled 8 bits.
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ddp/comm_hook.h"
#include "libddp/base/round.h"
#include "libddp/comm/base/block_reducer.h"
#include "libddp/device/block_rule.h"
#include "libddp/device/buffer_ops.h"
#include "libddp/reducer/scratch.h"

namespace ddp {
namespace {

using blocks::Pass;

static_assert(static_cast<int>(BlockFormat::kInt8) == static_cast<int>(blocks::Format::kInt8));
static_assert(static_cast<int>(BlockFormat::kFloat8E4M3) == static_cast<int>(blocks::Format::kFloat8E4M3));

// Rank r reduces part r of the groups (block_rule.h) of a bucket:
//   round 0   quantizes the bucket, and gives each rank its part
//   round 1   adds up the contributions to this rank's part, quantizes the sum, and gives it to all
//   Finish    dequantizes all parts
// A group that does all of this in one operation has the same bits.
class BlockHook final : public CommHook {
 public:
  explicit BlockHook(BlockFormat format) : format_(static_cast<blocks::Format>(format)) {}

  std::string name() const override {
    return absl::StrCat("block_compression(", format_ == blocks::Format::kInt8 ? "int8" : "float8_e4m3", ")");
  }
  int rounds() const override { return 2; }

  absl::Status Prepare(ProcessGroup& group, absl::Span<const GradBucket> buckets) override;
  void Reset() override { scratch_ = Scratch(); }
  Work Start(ProcessGroup& group, const GradBucket& bucket, int round) override;
  absl::Status Finish(const GradBucket& bucket) override;

 private:
  enum class How { kUnchanged, kFused, kExchange };
  struct Exchange {
    How how = How::kUnchanged;
    uint64_t part_groups = 0;
    // Groups of all parts: sent, this rank's, which become the results; received, all ranks' for this rank's part.
    Buffer sent, received;
  };

  Pass PassOf(const GradBucket& bucket, Pass::Step step) const {
    return {.step = step,
            .format = format_,
            .dtype = static_cast<uint8_t>(bucket.buffer.dtype),
            .count = bucket.buffer.count};
  }
  absl::Status Quantize(const GradBucket& bucket, const Exchange& exchange);
  Work ReducePart(ProcessGroup& group, const GradBucket& bucket, const Exchange& exchange);

  const blocks::Format format_;
  BlockReducer* reducer_ = nullptr;  // the group's, if it has one
  Scratch scratch_;
  std::vector<Exchange> exchanges_;  // by bucket
};

float Prescale(const ReduceOptions& reduce) { return static_cast<float>(reduce.prescale); }
float Postscale(const ReduceOptions& reduce, int ranks) {
  return static_cast<float>(reduce.op == ReduceOp::kAvg ? reduce.postscale / ranks : reduce.postscale);
}

absl::Status BlockHook::Prepare(ProcessGroup& group, absl::Span<const GradBucket> buckets) {
  const auto ranks = static_cast<uint64_t>(group.size());
  reducer_ = BlockReducerOf(group);
  exchanges_.assign(buckets.size(), {});
  size_t bytes = 0;
  for (const GradBucket& bucket : buckets) {
    Exchange& exchange = exchanges_[bucket.index];
    if (ranks == 1 || bucket.buffer.dtype == DType::kFloat64 || bucket.buffer.count == 0) continue;
    exchange.how = reducer_ != nullptr && IsGpu(bucket.buffer.device) ? How::kFused : How::kExchange;
    if (exchange.how == How::kFused) continue;
    exchange.part_groups = CeilDiv(blocks::GroupsOf(bucket.buffer.count), ranks);
    bytes += 2 * Scratch::Room(ranks * exchange.part_groups * blocks::kGroupBytes);
  }
  if (absl::Status s = scratch_.Reserve(group, bytes, buckets.empty() ? Device{} : buckets[0].buffer.device); !s.ok()) {
    return s;
  }
  for (Exchange& exchange : exchanges_) {
    if (exchange.how != How::kExchange) continue;
    const size_t all = ranks * exchange.part_groups * blocks::kGroupBytes;
    exchange.sent = scratch_.Take(DType::kUInt8, all);
    exchange.received = scratch_.Take(DType::kUInt8, all);
  }
  return absl::OkStatus();
}

Work BlockHook::Start(ProcessGroup& group, const GradBucket& bucket, int round) {
  const Exchange& exchange = exchanges_[bucket.index];
  if (exchange.how == How::kExchange) {
    if (round == 1) return ReducePart(group, bucket, exchange);
    if (absl::Status s = Quantize(bucket, exchange); !s.ok()) return s;
    return group.AllToAll(exchange.sent, exchange.received, bucket.stream);
  }
  if (round == 0) return Work();  // a bucket is done when its last operation is
  if (exchange.how == How::kUnchanged) {
    return group.AllReduce(bucket.buffer, bucket.buffer, bucket.reduce, bucket.stream);
  }
  return reducer_->AllReduceBlocks({.buffer = bucket.buffer,
                                    .format = format_,
                                    .prescale = Prescale(bucket.reduce),
                                    .postscale = Postscale(bucket.reduce, group.size()),
                                    .bucket = bucket.reduce.bucket,
                                    .after = bucket.stream});
}

absl::Status BlockHook::Quantize(const GradBucket& bucket, const Exchange& exchange) {
  Pass pass = PassOf(bucket, Pass::Step::kQuantize);
  pass.in = bucket.buffer.data;
  pass.out = exchange.sent.data;
  pass.scale = Prescale(bucket.reduce);
  return RunBlocks(pass, bucket.buffer.device, bucket.stream);
}

// What lies behind the bucket's last group belongs to nothing, and stays in its part.
Work BlockHook::ReducePart(ProcessGroup& group, const GradBucket& bucket, const Exchange& exchange) {
  const size_t part = exchange.part_groups * blocks::kGroupBytes;
  Buffer mine = exchange.sent;
  mine.data = static_cast<char*>(mine.data) + static_cast<size_t>(group.rank()) * part;
  mine.count = part;
  Pass pass = PassOf(bucket, Pass::Step::kReduce);
  pass.in = exchange.received.data;
  pass.out = mine.data;
  pass.count = exchange.part_groups * blocks::kGroup;
  pass.ins = group.size();
  pass.stride = part;
  pass.scale = Postscale(bucket.reduce, group.size());
  if (absl::Status s = RunBlocks(pass, bucket.buffer.device, bucket.stream); !s.ok()) return s;
  return group.AllGather(mine, exchange.sent, bucket.stream);
}

absl::Status BlockHook::Finish(const GradBucket& bucket) {
  const Exchange& exchange = exchanges_[bucket.index];
  if (exchange.how != How::kExchange) return absl::OkStatus();
  Pass pass = PassOf(bucket, Pass::Step::kDequantize);
  pass.in = exchange.sent.data;
  pass.out = bucket.buffer.data;
  return RunBlocks(pass, bucket.buffer.device, bucket.stream);
}

}  // namespace

std::shared_ptr<CommHook> CreateBlockCompressionHook(BlockFormat format) { return std::make_shared<BlockHook>(format); }

}  // namespace ddp
