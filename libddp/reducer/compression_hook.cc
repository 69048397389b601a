// SPDX-License-Identifier: Apache-2.0
// Hooks that send gradients as they are, or in 16 bits.
#include <utility>

#include "absl/strings/str_cat.h"
#include "ddp/comm_hook.h"
#include "libddp/device/buffer_ops.h"
#include "libddp/reducer/scratch.h"

namespace ddp {

absl::Status CommHook::Prepare(ProcessGroup&, absl::Span<const GradBucket>) { return absl::OkStatus(); }
absl::Status CommHook::Finish(const GradBucket&) { return absl::OkStatus(); }

namespace {

class AllReduceHook final : public CommHook {
 public:
  std::string name() const override { return "all_reduce"; }
  Work Start(ProcessGroup& group, const GradBucket& bucket, int) override {
    return group.AllReduce(bucket.buffer, bucket.buffer, bucket.reduce, bucket.stream);
  }
};

// Without an inner hook the all-reduce itself converts back, so that the sum is never rounded to the wire's type.
class CompressionHook final : public CommHook {
 public:
  CompressionHook(DType wire, std::shared_ptr<CommHook> inner) : wire_(wire), inner_(std::move(inner)) {}

  std::string name() const override {
    return absl::StrCat("compression(", Name(wire_), inner_ == nullptr ? "" : absl::StrCat(", ", inner_->name()), ")");
  }
  int rounds() const override { return inner_ == nullptr ? 1 : inner_->rounds(); }

  absl::Status CanCapture() const override { return inner_ == nullptr ? absl::OkStatus() : inner_->CanCapture(); }
  absl::Status Prepare(ProcessGroup& group, absl::Span<const GradBucket> buckets) override {
    if (wire_ != DType::kFloat16 && wire_ != DType::kBFloat16) {
      return absl::InvalidArgumentError(
          absl::StrCat("CreateCompressionHook: the wire type is ", Name(wire_), "; give kFloat16 or kBFloat16"));
    }
    size_t bytes = 0;
    for (const GradBucket& bucket : buckets) {
      if (Compresses(bucket)) bytes += Scratch::Room(bucket.buffer.count * SizeOf(wire_));
    }
    if (absl::Status s = scratch_.Reserve(group, bytes, buckets.empty() ? Device{} : buckets[0].buffer.device);
        !s.ok()) {
      return s;
    }
    compressed_.assign(buckets.begin(), buckets.end());
    for (GradBucket& bucket : compressed_) {
      if (Compresses(bucket)) bucket.buffer = scratch_.Take(wire_, bucket.buffer.count);
    }
    return inner_ == nullptr ? absl::OkStatus() : inner_->Prepare(group, compressed_);
  }

  void Reset() override {
    scratch_ = Scratch();
    if (inner_ != nullptr) inner_->Reset();
  }

  Work Start(ProcessGroup& group, const GradBucket& bucket, int round) override {
    GradBucket& sent = compressed_[bucket.index];
    if (round == 0) {
      sent.step = bucket.step;
      sent.reduce = bucket.reduce;
      sent.share = bucket.share;
      sent.stream = bucket.stream;
      if (Compresses(bucket)) {
        // What is to be divided before the sum had better be before it is rounded to fewer bits.
        sent.reduce.prescale = 1;
        absl::Status s = CopyScaled(bucket.buffer, sent.buffer, bucket.reduce.prescale, bucket.stream);
        if (!s.ok()) return s;
      }
    }
    if (inner_ != nullptr) return inner_->Start(group, sent, round);
    return group.AllReduce(sent.buffer, bucket.buffer, sent.reduce, bucket.stream);
  }

  absl::Status Finish(const GradBucket& bucket) override {
    if (inner_ == nullptr) return absl::OkStatus();
    GradBucket& sent = compressed_[bucket.index];
    sent.stream = bucket.stream;
    if (absl::Status s = inner_->Finish(sent); !s.ok()) return s;
    return CopyScaled(sent.buffer, bucket.buffer, 1, bucket.stream);
  }

 private:
  bool Compresses(const GradBucket& bucket) const {
    return bucket.buffer.dtype != wire_ && bucket.buffer.dtype != DType::kFloat64;
  }

  const DType wire_;
  const std::shared_ptr<CommHook> inner_;
  Scratch scratch_;
  std::vector<GradBucket> compressed_;  // by bucket: what is sent
};

}  // namespace

std::shared_ptr<CommHook> CreateAllReduceHook() { return std::make_shared<AllReduceHook>(); }

std::shared_ptr<CommHook> CreateCompressionHook(DType wire, std::shared_ptr<CommHook> inner) {
  return std::make_shared<CompressionHook>(wire, std::move(inner));
}

}  // namespace ddp
