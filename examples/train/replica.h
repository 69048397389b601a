// SPDX-License-Identifier: Apache-2.0
// One rank's copy of the model: parameters and gradients in flat memory, kept equal on all ranks.
#ifndef EXAMPLES_TRAIN_REPLICA_H_
#define EXAMPLES_TRAIN_REPLICA_H_

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "ddp/distributed_data_parallel.h"
#include "ddp/process_group.h"
#include "examples/nn/model.h"

namespace examples {

// How gradients are averaged over the ranks.
enum class SyncMode {
  kOverlap,  // in buckets, while the backward pass continues
  kEnd,      // all at once, after the backward pass
  kEach,     // each parameter's alone, while the backward pass continues
  kGather,   // all at once, gathered by rank 0 and broadcast; see CreateGatherHook
  kNoSync,   // not at all
  kNone,     // not at all, and without DistributedDataParallel; the replica allocates memory with the same layout
};

struct ReplicaOptions {
  SyncMode mode = SyncMode::kOverlap;
  size_t bucket_bytes = ddp::DdpOptions::kDefaultBucketBytes;  // with kOverlap
  bool replan = true;                                          // see DdpOptions
  std::shared_ptr<ddp::CommHook> hook;                         // see DdpOptions; not with kGather
};

// Thread-safety: one thread at a time.
class Replica {
 public:
  // Collective. Allocates the model's memory and binds the model to it. The group and the model must outlive the
  // replica.
  static absl::StatusOr<std::unique_ptr<Replica>> Create(nn::Model& model, ddp::ProcessGroup& group,
                                                         const ReplicaOptions& options);

  // With kNoSync no gradient is lost: that no step reduces them is what was asked for.
  ~Replica() {
    if (no_sync_.has_value()) ddp_->ZeroGrad(stream_);
  }

  // Binds the model to this replica's memory again, after it was bound to another one's.
  void Bind();

  // All parameters, and all gradients, as one range each with the same layout. For the optimizer.
  absl::Span<float> values() const { return values_; }
  absl::Span<const float> grads() const { return grads_; }
  absl::Span<float> mutable_grads() { return grads_; }

  // The position of parameter i in values(), and of its gradient in grads().
  size_t offset(size_t i) const { return offsets_[i]; }

  // Copies rank 0's buffers to all ranks. Call it before each forward pass of training and before an evaluation.
  absl::Status BeginForward() { return ddp_ == nullptr ? absl::OkStatus() : ddp_->BeginForward(stream_); }

  // Runs the backward pass of the model's last Forward. `first`, `last`: whether it is the first or last pass of a
  // step. The first pass overwrites the gradients, later ones add to them. In the last pass, each bucket of gradients
  // is reduced as soon as it is complete. Call FinishBackward after each pass.
  void Backward(bool first = true, bool last = true) {
    std::optional<ddp::DistributedDataParallel::NoSync> no_sync;
    if (ddp_ != nullptr && !last) no_sync.emplace(*ddp_);
    model_.Backward(
        [this](size_t i) {
          if (ddp_ != nullptr) ddp_->GradReady(i, stream_);
        },
        /*accumulate=*/!first);
  }

  // Waits until the gradients are averages over all ranks. On a GPU only the stream waits.
  absl::Status FinishBackward() { return ddp_ == nullptr ? absl::OkStatus() : ddp_->FinishBackward(stream_); }

  // Whether a step can be captured into a CUDA graph.
  absl::Status CanCapture() const { return ddp_ == nullptr ? absl::OkStatus() : ddp_->CanCapture(); }

  // See DistributedDataParallel::Rebind.
  absl::Status Rebind(ddp::ProcessGroup& group) { return ddp_ == nullptr ? absl::OkStatus() : ddp_->Rebind(group); }

  // See DistributedDataParallel::Watch.
  void Watch(ddp::ProcessGroup& group) {
    if (ddp_ != nullptr) ddp_->Watch(group);
  }

  // See DistributedDataParallel::skip_step. Null with SyncMode::kNone.
  const uint32_t* skip_step() const { return ddp_ == nullptr ? nullptr : ddp_->skip_step(); }

  // The device of the parameters, and the stream that orders all reads and writes of them.
  ddp::Device device() const { return device_; }
  const ddp::Stream& stream() const { return stream_; }

  ddp::DdpStatistics statistics() const { return ddp_ == nullptr ? ddp::DdpStatistics() : ddp_->statistics(); }

  // SHA-256 of the parameters' values, in the model's order.
  std::string ParametersSha256() const;

 private:
  Replica(nn::Model& model, ddp::Device device)
      : model_(model), device_(device), stream_{device, model.device().stream()} {}

  absl::Status AllocateInDdp(ddp::ProcessGroup& group, const ReplicaOptions& options);
  void AllocateHere();

  nn::Model& model_;
  std::unique_ptr<ddp::DistributedDataParallel> ddp_;
  std::optional<ddp::DistributedDataParallel::NoSync> no_sync_;
  const ddp::Device device_;
  const ddp::Stream stream_;
  std::shared_ptr<float> own_values_, own_grads_;
  absl::Span<float> values_, grads_;
  std::vector<size_t> offsets_;
};

}  // namespace examples

#endif  // EXAMPLES_TRAIN_REPLICA_H_
