// SPDX-License-Identifier: Apache-2.0
// Steps in CUDA graphs: what a model needs the host for in every step cannot be replayed.
#include <string>

#include "absl/strings/str_cat.h"
#include "libddp/comm/base/internal_group.h"
#include "libddp/reducer/model.h"

namespace ddp {

absl::StatusOr<bool> Model::Capturing(Stream stream) const {
  if (!streams_.on_gpu() || !IsGpu(stream.device)) return false;
  return streams_.Capturing(stream);
}

absl::Status Model::CanCapture() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return Capturable();
}

absl::Status Model::Capturable() const {
  const auto refuse = [](const auto&... why) {
    return absl::FailedPreconditionError(absl::StrCat("a step cannot be captured into a CUDA graph: ", why...));
  };
  if (!streams_.on_gpu()) return refuse("the model is on the CPU");
  if (options_.weighted) return refuse("with DdpOptions::weighted ranks exchange their weights on the host");
  if (join_.has_value()) return refuse("in a Join ranks tell each other on the host whether they have inputs");
  if (Detecting()) {
    return options_.static_graph
               ? refuse("with DdpOptions::static_graph the first step learns which parameters are used; run it before")
               : refuse("with UnusedParameters::kDetect ranks exchange on the host which parameters they used");
  }
  for (const ModelBuffer& buffer : options_.buffers) {
    if (options_.broadcast_buffers && !IsGpu(buffer.data.device) && buffer.data.count > 0) {
      return refuse("buffer '", buffer.name, "' is on the CPU");
    }
  }
  absl::Status operations = MayBeCaptured(*group_);
  operations.Update(reducer_.CanCapture());
  return operations.ok() ? operations : refuse(operations.message());
}

}  // namespace ddp
