// SPDX-License-Identifier: Apache-2.0
#include "examples/train/checkpoint_writer.h"

#include <exception>

#include "absl/strings/str_cat.h"

namespace examples {

void CheckpointWriter::Start(const Progress& progress, absl::Span<const Tensor> tensors) {
  if (!Finish().ok()) return;
  Copy(tensors);
  progress_ = progress;
  thread_ = std::thread([this] { Write(); });
}

void CheckpointWriter::Copy(absl::Span<const Tensor> tensors) {
  floats_.resize(tensors.size());
  copies_.resize(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    floats_[i].assign(tensors[i].data.begin(), tensors[i].data.end());
    copies_[i] = {tensors[i].name, tensors[i].shape, absl::MakeSpan(floats_[i])};
  }
}

void CheckpointWriter::Write() {
  try {
    status_ = SaveCheckpoint(*file_, optimizer_, progress_, copies_, environment_);
  } catch (const std::exception& e) {
    status_ = absl::ResourceExhaustedError(absl::StrCat("cannot write ", file_->path(), ": ", e.what()));
  }
  if (!status_.ok()) failed_.store(true, std::memory_order_relaxed);
}

absl::Status CheckpointWriter::Finish() {
  if (thread_.joinable()) thread_.join();
  return status_;
}

}  // namespace examples
