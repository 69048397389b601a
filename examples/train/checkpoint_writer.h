// Writes checkpoints while training goes on.
#ifndef EXAMPLES_TRAIN_CHECKPOINT_WRITER_H_
#define EXAMPLES_TRAIN_CHECKPOINT_WRITER_H_

#include <atomic>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "examples/train/checkpoint.h"

namespace examples {

// Training waits for a copy of the tensors in memory, and for the disk only where the next checkpoint is due before
// this one is written. The copy is made once and used again.
//
//   CheckpointWriter writer(path, "sgd");
//   writer.Start(progress, tensors);         // after step 100; the tensors may change from here on
//   if (writer.failed()) ...                 // now and then
//   absl::Status status = writer.Finish();   // the last one is on the disk
//
// Thread-safety: one thread at a time.
class CheckpointWriter {
 public:
  CheckpointWriter(std::string path, std::string optimizer)
      : path_(std::move(path)), optimizer_(std::move(optimizer)) {}
  ~CheckpointWriter() { Finish().IgnoreError(); }
  CheckpointWriter(const CheckpointWriter&) = delete;
  CheckpointWriter& operator=(const CheckpointWriter&) = delete;

  // Waits for the write before this one, copies everything, and leaves the rest to a thread. After a failure it does
  // nothing.
  void Start(const Progress& progress, absl::Span<const Tensor> tensors);

  // Whether a write has failed by now. Never waits.
  bool failed() const { return failed_.load(std::memory_order_relaxed); }

  // Waits until all is written. The first failure of all: see SaveCheckpoint.
  absl::Status Finish();

 private:
  void Copy(absl::Span<const Tensor> tensors);
  void Write();

  const std::string path_;
  const std::string optimizer_;
  std::thread thread_;
  // The thread's while it runs, but for failed_.
  std::vector<std::vector<float>> floats_;
  std::vector<Tensor> copies_;
  Progress progress_;
  absl::Status status_;
  std::atomic<bool> failed_{false};
};

}  // namespace examples

#endif  // EXAMPLES_TRAIN_CHECKPOINT_WRITER_H_
