// One rank's copy of the model: its parameters and gradients in flat memory, and what keeps them equal on all ranks.
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

enum class SyncMode {
  kDdp,     // gradients are averaged over the ranks
  kNoSync,  // DistributedDataParallel is there but reduces nothing
  kNone,    // no DistributedDataParallel; memory of our own in the same layout
};

struct ReplicaOptions {
  SyncMode mode = SyncMode::kDdp;
  size_t bucket_bytes = ddp::DdpOptions::kDefaultBucketBytes;
  bool replan = true;  // see DdpOptions
};

// Thread-safety: one thread at a time.
class Replica {
 public:
  // Lays out the model's memory and binds the model to it. Collective. The group and the model outlive the replica.
  static absl::StatusOr<std::unique_ptr<Replica>> Create(nn::Model& model, ddp::ProcessGroup& group,
                                                         const ReplicaOptions& options);

  // All parameters and all gradients, each one range in the same layout, for the optimizer.
  absl::Span<float> values() const { return values_; }
  absl::Span<const float> grads() const { return grads_; }
  absl::Span<float> mutable_grads() { return grads_; }

  // Where parameter i lies in values(), or its gradient in grads().
  size_t offset(size_t i) const { return offsets_[i]; }

  // Before a forward pass of training, or the first of an evaluation: gives all ranks rank 0's buffers.
  absl::Status BeginForward() { return ddp_ == nullptr ? absl::OkStatus() : ddp_->BeginForward(stream_); }

  // Runs the backward pass of the model's last Forward. Where it is the last of those that make one step, each bucket
  // of gradients is reduced as soon as it is complete. Gradients are added to those of the passes before, unless it is
  // the first. FinishBackward comes after each.
  void Backward(bool first = true, bool last = true) {
    if (ddp_ != nullptr) ddp_->SetIsLastMicrobatch(last);
    model_.Backward(
        [this](size_t i) {
          if (ddp_ != nullptr) ddp_->GradReady(i, stream_);
        },
        /*accumulate=*/!first);
  }

  // Waits until the gradients are averages over all ranks; on a GPU its stream waits.
  absl::Status FinishBackward() { return ddp_ == nullptr ? absl::OkStatus() : ddp_->FinishBackward(stream_); }

  // See DistributedDataParallel::skip_step; null without it.
  const uint32_t* skip_step() const { return ddp_ == nullptr ? nullptr : ddp_->skip_step(); }

  // Where the parameters are, and the stream in whose order they are read and written.
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
