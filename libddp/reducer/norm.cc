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

absl::StatusOr<double> Model::GradNorm(double order, Stream stream) {
  const absl::StatusOr<Stream> followed = Follow("GradNorm", stream);
  if (!followed.ok()) return followed.status();
  if (order != 1 && order != 2 && !(std::isinf(order) && order > 0)) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", group_->rank(), ": GradNorm: the order ", order, " is none of 1, 2 and infinity"));
  }
  const NormKind kind = order == 1 ? NormKind::kL1 : order == 2 ? NormKind::kL2 : NormKind::kMax;
  absl::StatusOr<double> norm = Norm(Gradients(), kind, *followed);
  if (!norm.ok()) return Named("GradNorm", norm.status());
  return norm;
}

// As torch.nn.utils.clip_grad_norm_ does, the small number in the divisor included.
absl::StatusOr<double> Model::ClipGradNorm(double max_norm, double order, Stream stream) {
  if (!(max_norm > 0)) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", group_->rank(), ": ClipGradNorm: max_norm is ", max_norm, ", but must be above 0"));
  }
  const absl::StatusOr<double> norm = GradNorm(order, stream);
  if (!norm.ok() || !std::isfinite(*norm)) return norm;
  const double scale = max_norm / (*norm + 1e-6);
  if (scale >= 1) return norm;
  const absl::StatusOr<Stream> followed = streams_.Follow(stream);
  absl::Status status = followed.status();
  for (const Buffer& range : Gradients()) {
    if (status.ok()) status = CopyScaled(range, range, scale, *followed);
  }
  if (status.ok()) status = streams_.Complete(*followed);
  if (!status.ok()) return Named("ClipGradNorm", status);
  return norm;
}

}  // namespace ddp
