// SPDX-License-Identifier: Apache-2.0
// Batches of training images. A thread prepares the next batch during a training step.
#ifndef EXAMPLES_TRAIN_BATCH_LOADER_H_
#define EXAMPLES_TRAIN_BATCH_LOADER_H_

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "examples/data/dataset.h"
#include "examples/data/sampler.h"
#include "examples/nn/device.h"

namespace examples {

// This rank's part of a global batch.
struct Batch {
  const float* pixels = nullptr;     // row by row
  absl::Span<const int32_t> labels;  // one per row; directly after the pixels
};

// Double-buffered: a thread gathers, augments and normalises the next batch while the caller computes on this one.
//
//   BatchLoader loader(data, {.samples = data.train.count(), .batch = 64}, {});
//   loader.Start(/*epoch=*/0, /*first=*/0);
//   for (size_t b = 0; b < loader.batches(); ++b) Train(loader.Next());
//
// Thread-safety: one thread at a time.
class BatchLoader {
 public:
  // The data set must outlive the loader. The loader sets the augmentation's seed and epoch. Batches are in memory from
  // which `device` can upload. JPEG files are decoded by `threads` threads.
  BatchLoader(const Dataset& data, const SamplerOptions& sampler, const Augmentation& augmentation,
              nn::Device& device = nn::Cpu(), int threads = 1);
  ~BatchLoader();
  BatchLoader(const BatchLoader&) = delete;
  BatchLoader& operator=(const BatchLoader&) = delete;

  size_t batches() const { return sampler_.batches(); }
  size_t global_batch() const { return sampler_.global_batch(); }

  // Lets Next() start at batch `first` of `epoch`. The remaining batches of the epoch before are dropped.
  void Start(uint64_t epoch, size_t first);

  // Returns the next batch, which is valid until the next call. Call it at most batches() - first times after Start.
  // An error names the file that cannot be read.
  absl::StatusOr<Batch> Next();

 private:
  struct Slot {
    std::shared_ptr<void> memory;
    float* pixels = nullptr;
    absl::Span<int32_t> labels;
    absl::Status status;
  };

  void Run();
  void Fill(size_t batch);

  const Dataset& data_;
  DistributedSampler sampler_;  // batches() and global_batch() never change; only the thread uses the rest
  Augmentation augmentation_;   // used only by the thread
  const int threads_;
  Slot slots_[2];  // batch b is in slot b % 2

  std::mutex mutex_;
  std::condition_variable to_thread_, to_caller_;
  // Guarded by the mutex.
  bool stop_ = false;
  bool filling_ = false;
  bool new_epoch_ = false;
  uint64_t epoch_ = 0;
  size_t filled_ = 0;  // batches before this one have been filled
  size_t taken_ = 0;   // batches before this one have been returned by Next
  size_t free_ = 0;    // batches before this one are no longer used
  std::thread thread_;
};

}  // namespace examples

#endif  // EXAMPLES_TRAIN_BATCH_LOADER_H_
