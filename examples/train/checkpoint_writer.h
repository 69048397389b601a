// SPDX-License-Identifier: Apache-2.0
// Writes checkpoints while training continues.
#ifndef EXAMPLES_TRAIN_CHECKPOINT_WRITER_H_
#define EXAMPLES_TRAIN_CHECKPOINT_WRITER_H_

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "examples/data/file.h"
#include "examples/train/checkpoint.h"

namespace examples {

// Training waits only while the tensors are copied in memory. It waits for the disk only if the next checkpoint is due
// before this one has been written. The memory of the copy is reused.
//
//   CheckpointWriter writer(*AtomicFile::Create(path), "sgd");
//   writer.Start(progress, tensors);         // after step 100; the tensors may change afterwards
//   if (writer.failed()) ...                 // from time to time
//   absl::Status status = writer.Finish();   // the last checkpoint is on the disk
//
// Thread-safety: one thread at a time.
class CheckpointWriter {
 public:
  // `environment`: see SaveCheckpoint.
  CheckpointWriter(std::unique_ptr<AtomicFile> file, std::string optimizer, std::string environment = "")
      : file_(std::move(file)), optimizer_(std::move(optimizer)), environment_(std::move(environment)) {}
  ~CheckpointWriter() { Finish().IgnoreError(); }
  CheckpointWriter(const CheckpointWriter&) = delete;
  CheckpointWriter& operator=(const CheckpointWriter&) = delete;

  // Waits for the previous write, copies the tensors, and starts a thread that writes them. Does nothing after a
  // failure.
  void Start(const Progress& progress, absl::Span<const Tensor> tensors);

  // True if a write has failed so far. Never waits.
  bool failed() const { return failed_.load(std::memory_order_relaxed); }

  // Waits until everything is written. Returns the first failure of all writes; see SaveCheckpoint.
  absl::Status Finish();

 private:
  void Copy(absl::Span<const Tensor> tensors);
  void Write();

  const std::unique_ptr<AtomicFile> file_;
  const std::string optimizer_;
  const std::string environment_;
  std::thread thread_;
  // While the thread runs, only the thread uses these, except failed_.
  std::vector<std::vector<float>> floats_;
  std::vector<Tensor> copies_;
  Progress progress_;
  absl::Status status_;
  std::atomic<bool> failed_{false};
};

}  // namespace examples

#endif  // EXAMPLES_TRAIN_CHECKPOINT_WRITER_H_
