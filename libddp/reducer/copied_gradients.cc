// SPDX-License-Identifier: Apache-2.0
// Gradients in memory of the program's that are copied into the buckets' memory, and back when they are reduced.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "absl/strings/str_cat.h"
#include "libddp/device/buffer_ops.h"
#include "libddp/reducer/model.h"

namespace ddp {

absl::Status Model::SetGrad(size_t index, Buffer grad) {
  const auto refuse = [this](absl::StatusCode code, const auto&... what) {
    return absl::Status(code, absl::StrCat("rank ", group_->rank(), ": SetGrad: ", what...));
  };
  const std::lock_guard<std::mutex> lock(mutex_);
  if (index >= all_.size()) {
    return refuse(absl::StatusCode::kInvalidArgument, "index ", index, " of ", all_.size(), " parameters");
  }
  Trained& trained = all_[index];
  const Buffer& before = trained.parameter.grad;
  if (trained.parameter.frozen) {
    return refuse(absl::StatusCode::kFailedPrecondition, "the parameter '", trained.parameter.name,
                  "' is frozen; SetParameters changes that");
  }
  if (trained.owned) {
    return refuse(absl::StatusCode::kFailedPrecondition, "the gradient of '", trained.parameter.name,
                  "' is the library's; give Parameter::grad, or set DdpOptions::copy_gradients");
  }
  if (grad.count != before.count || grad.dtype != before.dtype || !(grad.device == before.device) ||
      (grad.data == nullptr && grad.count > 0)) {
    return refuse(absl::StatusCode::kInvalidArgument, "the gradient of '", trained.parameter.name, "' is ",
                  before.count, " elements of ", Name(before.dtype),
                  before.device.kind == Device::Kind::kCpu ? " on the CPU" : " on a GPU", "; the buffer given has ",
                  grad.data == nullptr ? "no memory" : "", grad.data == nullptr ? "" : absl::StrCat(grad.count), " of ",
                  Name(grad.dtype), grad.device.kind == Device::Kind::kCpu ? " on the CPU" : " on a GPU");
  }
  if (reinterpret_cast<uintptr_t>(grad.data) % SizeOf(grad.dtype) != 0) {
    return refuse(absl::StatusCode::kInvalidArgument, "the address of the gradient of '", trained.parameter.name,
                  "' is not a multiple of ", SizeOf(grad.dtype), ", its elements' size");
  }
  if (trained.in_place) {
    if (grad.data == before.data) return absl::OkStatus();
    return refuse(absl::StatusCode::kFailedPrecondition, "the gradient of '", trained.parameter.name,
                  "' lies in an allocation and is reduced there, so it cannot move; set DdpOptions::copy_gradients");
  }
  // On a GPU what was announced may not have been copied yet.
  if ((announced_[index].load(std::memory_order_relaxed) & kNow) != 0 && grad.data != before.data) {
    return refuse(absl::StatusCode::kFailedPrecondition, "the gradient of '", trained.parameter.name,
                  "' was announced already, with other memory; give its memory before GradReady");
  }
  trained.parameter.grad = grad;
  trained.given_by_step = trained.given = true;
  grads_given_.store(true, std::memory_order_relaxed);
  return absl::OkStatus();
}

// The program may have freed what it has not given again since the last reduced step.
void Model::ForgetGivenGradients() {
  for (Trained& trained : all_) {
    if (trained.given_by_step && !trained.given) trained.parameter.grad.data = nullptr;
  }
}

// Gives a gradient without memory some of the library's, for a result that other ranks contribute to.
absl::Status Model::UseStandIn(size_t index) {
  Trained& trained = all_[index];
  Buffer& grad = trained.parameter.grad;
  if (grad.data != nullptr || grad.count == 0) return absl::OkStatus();
  if (trained.stand_in == nullptr) {
    absl::StatusOr<std::shared_ptr<void>> memory = AllocateOn(device_, grad.count * SizeOf(grad.dtype));
    if (!memory.ok()) return memory.status();
    trained.stand_in = *std::move(memory);
  }
  grad.data = trained.stand_in.get();
  return absl::OkStatus();
}

void Model::CopyIn(size_t index, Stream stream) {
  if (streams_.on_gpu()) return;  // there, those of a bucket are copied together
  const absl::Status status = CopyGradients({&index, 1}, true, stream);
  if (status.ok()) return;
  std::lock_guard<std::mutex> lock(mutex_);
  misuse_.Update(status);
}

// Gradients of the program's to their slots, or back; on a GPU all of one type in one launch.
absl::Status Model::CopyGradients(absl::Span<const size_t> indices, bool in, Stream stream) {
  for (const DType dtype : {DType::kFloat64, DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    std::vector<Buffer> grads, slots;
    for (const size_t i : indices) {
      const Trained& trained = all_[i];
      if (!trained.copied() || trained.parameter.grad.data == nullptr || trained.parameter.grad.dtype != dtype)
        continue;
      grads.push_back(trained.parameter.grad);
      slots.push_back(trained.slot);
    }
    // What a slot of float32 holds may be infinite as a gradient of 16 bits; equal types the reduction has checked.
    const bool narrows = !in && !slots.empty() && slots[0].dtype != dtype;
    uint32_t* const nonfinite = narrows ? options_.nonfinite : nullptr;
    if (absl::Status s = CopyScaled(in ? grads : slots, in ? slots : grads, 1, stream, nonfinite); !s.ok()) return s;
  }
  return absl::OkStatus();
}

// Those that were announced, in this backward or since the last reduction; the others' slots are zeros.
absl::Status Model::CopyInBucket(const Bucket& bucket, Stream stream) {
  std::vector<size_t> announced;
  for (const size_t i : bucket.items) {
    if ((announced_[i].load(std::memory_order_relaxed) & kSince) != 0) announced.push_back(i);
  }
  return CopyGradients(announced, true, stream);
}

// What was left out waits until it is known whether anybody used it.
absl::Status Model::CopyOutDone(Stream stream) {
  for (; copied_out_ < reducer_.done(); ++copied_out_) {
    std::vector<size_t> indices;
    for (const size_t i : reducer_.bucket(copied_out_).items) {
      const bool waits = Detecting() && std::binary_search(left_out_.begin(), left_out_.end(), i);
      if (all_[i].copied() && !waits) indices.push_back(i);
    }
    if (indices.empty()) continue;
    if (absl::Status s = CopyGradients(indices, false, stream); !s.ok()) return s;
  }
  return absl::OkStatus();
}

// No two gradients may be the same memory: one would be reduced as the other.
absl::Status Model::CheckGivenGradients() {
  if (!grads_given_.exchange(false)) return absl::OkStatus();
  std::vector<size_t> given;
  for (size_t i = 0; i < all_.size(); ++i) {
    const Buffer& grad = all_[i].parameter.grad;
    if (!all_[i].parameter.frozen && grad.data != nullptr && grad.count > 0) given.push_back(i);
  }
  const auto begin = [this](size_t i) { return static_cast<const char*>(all_[i].parameter.grad.data); };
  std::sort(given.begin(), given.end(), [&](size_t a, size_t b) { return begin(a) < begin(b); });
  for (size_t k = 1; k < given.size(); ++k) {
    const Buffer& lower = all_[given[k - 1]].parameter.grad;
    if (begin(given[k]) >= begin(given[k - 1]) + lower.count * SizeOf(lower.dtype)) continue;
    return absl::FailedPreconditionError(
        absl::StrCat("rank ", group_->rank(), ": SetGrad gave the gradients of '", all_[given[k - 1]].parameter.name,
                     "' and '", all_[given[k]].parameter.name, "' the same memory; each needs its own"));
  }
  return absl::OkStatus();
}

}  // namespace ddp
