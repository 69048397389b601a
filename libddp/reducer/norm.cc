// SPDX-License-Identifier: Apache-2.0
// The norm of all gradients, and clipping by it.
#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "libddp/device/buffer_ops.h"
#include "libddp/reducer/model.h"

namespace ddp {

// Long ranges: gradients that lie side by side are one. The order is the same on all ranks.
std::vector<Buffer> Model::Gradients() const {
  std::vector<Buffer> together, others;
  for (size_t i = all_.size(); i-- > 0;) {
    const Buffer& grad = all_[i].parameter.grad;
    if (all_[i].parameter.frozen || grad.data == nullptr || grad.count == 0) continue;
    (all_[i].owned || all_[i].in_place ? together : others).push_back(grad);
  }
  std::vector<Buffer> all = memory_->Merge(together);
  all.insert(all.end(), others.begin(), others.end());
  return all;
}

absl::StatusOr<NormKind> Model::KindOf(absl::string_view call, double order) const {
  if (order == 1) return NormKind::kL1;
  if (order == 2) return NormKind::kL2;
  if (std::isinf(order) && order > 0) return NormKind::kMax;
  return absl::InvalidArgumentError(
      absl::StrCat("rank ", group_->rank(), ": ", call, ": the order ", order, " is none of 1, 2 and infinity"));
}

absl::Status Model::CheckMaxNorm(absl::string_view call, double max_norm) const {
  if (max_norm > 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("rank ", group_->rank(), ": ", call, ": max_norm is ", max_norm, ", but must be above 0"));
}

absl::StatusOr<double> Model::GradNorm(double order, Stream stream) {
  if (absl::Status s = CheckBetweenSteps("GradNorm"); !s.ok()) return s;
  const absl::StatusOr<Stream> followed = Follow("GradNorm", stream);
  if (!followed.ok()) return followed.status();
  const absl::StatusOr<NormKind> kind = KindOf("GradNorm", order);
  if (!kind.ok()) return kind.status();
  absl::StatusOr<double> norm = Norm(Gradients(), *kind, *followed);
  if (!norm.ok()) return Named("GradNorm", norm.status());
  return norm;
}

absl::StatusOr<double> Model::ClipGradNorm(double max_norm, double order, Stream stream) {
  if (absl::Status s = CheckBetweenSteps("ClipGradNorm"); !s.ok()) return s;
  if (absl::Status s = CheckMaxNorm("ClipGradNorm", max_norm); !s.ok()) return s;
  const absl::StatusOr<double> norm = GradNorm(order, stream);
  if (!norm.ok()) return norm;
  const double factor = ClipFactor(max_norm, *norm);
  if (factor == 1) return norm;
  const absl::StatusOr<Stream> followed = streams_.Follow(stream);
  absl::Status status = followed.status();
  for (const Buffer& range : Gradients()) {
    if (status.ok()) status = CopyScaled(range, range, factor, *followed);
  }
  if (status.ok()) status = streams_.Complete(*followed);
  if (!status.ok()) return Named("ClipGradNorm", status);
  return norm;
}

absl::StatusOr<const double*> Model::ClipGradNormAsync(double max_norm, double order, Stream stream) {
  if (!streams_.on_gpu()) {
    const absl::StatusOr<double> norm = ClipGradNorm(max_norm, order, stream);
    if (!norm.ok()) return norm.status();
    clip_->norm = *norm;
    return &clip_->norm;
  }
  constexpr char kCall[] = "ClipGradNormAsync";
  if (absl::Status s = CheckBetweenSteps(kCall); !s.ok()) return s;
  if (absl::Status s = CheckMaxNorm(kCall, max_norm); !s.ok()) return s;
  const absl::StatusOr<NormKind> kind = KindOf(kCall, order);
  if (!kind.ok()) return kind.status();
  const absl::StatusOr<Stream> followed = Follow(kCall, stream);
  if (!followed.ok()) return followed.status();
  absl::Status status = Clip(Gradients(), *kind, max_norm, clip_.get(), *followed);
  if (status.ok()) status = streams_.Complete(*followed);
  if (!status.ok()) return Named(kCall, status);
  return &clip_->norm;
}

}  // namespace ddp
