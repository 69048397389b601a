// SPDX-License-Identifier: Apache-2.0
#include "examples/train/replica.h"

#include <cstdint>
#include <new>
#include <utility>

#include "examples/train/gather_hook.h"
#include "examples/train/sha256.h"

namespace examples {
namespace {

// A gradient is never split, so this gives each a bucket of its own.
constexpr size_t kOneGradient = 1;
constexpr size_t kAllGradients = SIZE_MAX / 2;

size_t BucketBytes(const ReplicaOptions& options) {
  switch (options.mode) {
    case SyncMode::kEach:
      return kOneGradient;
    case SyncMode::kEnd:
    case SyncMode::kGather:
      return kAllGradients;
    default:
      return options.bucket_bytes;
  }
}

absl::Span<float> AsFloats(const ddp::Buffer& buffer) { return {static_cast<float*>(buffer.data), buffer.count}; }

}  // namespace

absl::StatusOr<std::unique_ptr<Replica>> Replica::Create(nn::Model& model, ddp::ProcessGroup& group,
                                                         const ReplicaOptions& options) {
  std::unique_ptr<Replica> replica(new Replica(model, model.device().is_host() ? ddp::Device{} : group.device()));
  if (options.mode == SyncMode::kNone) {
    replica->AllocateHere();
  } else {
    if (absl::Status status = replica->AllocateInDdp(group, options); !status.ok()) return status;
    if (options.mode == SyncMode::kNoSync) replica->no_sync_.emplace(*replica->ddp_);
  }
  replica->Bind();
  return replica;
}

void Replica::Bind() {
  std::vector<float*> values, grads;
  for (const size_t offset : offsets_) {
    values.push_back(values_.data() + offset);
    grads.push_back(grads_.data() + offset);
  }
  model_.Bind(values, grads);
}

// Pointers left null: the library owns values and gradients, so that gradients are reduced where backward writes them.
absl::Status Replica::AllocateInDdp(ddp::ProcessGroup& group, const ReplicaOptions& options) {
  std::vector<ddp::Parameter> parameters;
  for (const nn::ParameterSpec& spec : model_.parameters()) {
    const ddp::Buffer buffer = {nullptr, spec.count(), ddp::DType::kFloat32, device_};
    parameters.push_back({spec.name, spec.shape, buffer, buffer});
  }
  ddp::DdpOptions ddp_options;
  ddp_options.bucket_bytes = BucketBytes(options);
  ddp_options.hook = options.hook;
  if (options.mode == SyncMode::kGather) ddp_options.hook = CreateGatherHook(model_.device(), group.size());
  ddp_options.replan = options.replan;
  for (const nn::LayerBuffer& buffer : model_.buffers()) {
    ddp_options.buffers.push_back(
        {buffer.name, {buffer.data.data(), buffer.data.size(), ddp::DType::kFloat32, device_}});
  }
  absl::StatusOr<std::unique_ptr<ddp::DistributedDataParallel>> ddp =
      ddp::DistributedDataParallel::Create(group, std::move(parameters), ddp_options);
  if (!ddp.ok()) return ddp.status();
  ddp_ = *std::move(ddp);
  values_ = AsFloats(ddp_->value_spans()[0]);  // all are float32: there is one range
  grads_ = AsFloats(ddp_->grad_spans()[0]);
  for (size_t i = 0; i < ddp_->size(); ++i) {
    offsets_.push_back(static_cast<size_t>(static_cast<float*>(ddp_->value(i).data) - values_.data()));
  }
  return absl::OkStatus();
}

// The library's layout: reverse order, each at a multiple of 256 bytes, zeros between.
void Replica::AllocateHere() {
  constexpr size_t kAlignment = 256 / sizeof(float);
  const std::vector<nn::ParameterSpec>& specs = model_.parameters();
  offsets_.resize(specs.size());
  size_t count = 0;
  for (size_t i = specs.size(); i-- > 0;) {
    offsets_[i] = count;
    count += (specs[i].count() + kAlignment - 1) / kAlignment * kAlignment;
  }
  own_values_ = model_.device().Allocate(count);
  own_grads_ = model_.device().Allocate(count);
  values_ = {own_values_.get(), count};
  grads_ = {own_grads_.get(), count};
}

std::string Replica::ParametersSha256() const {
  std::vector<float> copy;
  const float* values = values_.data();
  if (!model_.device().is_host()) {
    copy.resize(values_.size());
    model_.device().Download(values, copy.data(), copy.size() * sizeof(float));
    values = copy.data();
  }
  Sha256 sha;
  for (size_t i = 0; i < offsets_.size(); ++i) {
    sha.Update(values + offsets_[i], model_.parameters()[i].count() * sizeof(float));
  }
  return ToHex(sha.Finish());
}

}  // namespace examples
