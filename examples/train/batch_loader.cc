// SPDX-License-Identifier: Apache-2.0
#include "examples/train/batch_loader.h"

namespace examples {

BatchLoader::BatchLoader(const Dataset& data, const SamplerOptions& sampler, const Augmentation& augmentation,
                         nn::Device& device, int threads)
    : data_(data), sampler_(sampler), augmentation_(augmentation), threads_(threads) {
  for (Slot& slot : slots_) {
    const size_t floats = sampler.batch * static_cast<size_t>(data.features());
    slot.memory = device.AllocateHost(floats * sizeof(float) + sampler.batch * sizeof(int32_t));
    slot.pixels = static_cast<float*>(slot.memory.get());
    slot.labels = {static_cast<int32_t*>(slot.memory.get()) + floats, sampler.batch};
  }
  augmentation_.seed = sampler.seed;
  free_ = taken_ = filled_ = sampler_.batches();  // nothing to do before Start
  thread_ = std::thread([this] { Run(); });
}

BatchLoader::~BatchLoader() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  to_thread_.notify_one();
  thread_.join();
}

void BatchLoader::Start(uint64_t epoch, size_t first) {
  {
    std::unique_lock lock(mutex_);
    to_caller_.wait(lock, [this] { return !filling_; });
    new_epoch_ = true;
    epoch_ = epoch;
    free_ = taken_ = filled_ = first;
  }
  to_thread_.notify_one();
}

absl::StatusOr<Batch> BatchLoader::Next() {
  std::unique_lock lock(mutex_);
  free_ = taken_;
  to_thread_.notify_one();
  to_caller_.wait(lock, [this] { return filled_ > taken_; });
  const size_t s = taken_++ % 2;
  if (!slots_[s].status.ok()) return slots_[s].status;
  return Batch{slots_[s].pixels, slots_[s].labels};
}

// Fills batch after batch, but none into a slot that is not free.
void BatchLoader::Run() {
  std::unique_lock lock(mutex_);
  while (true) {
    to_thread_.wait(lock, [this] { return stop_ || (filled_ < sampler_.batches() && filled_ < free_ + 2); });
    if (stop_) return;
    filling_ = true;
    const size_t batch = filled_;
    if (new_epoch_) {
      sampler_.SetEpoch(epoch_);
      augmentation_.epoch = epoch_;
      new_epoch_ = false;
    }
    lock.unlock();
    Fill(batch);
    lock.lock();
    filling_ = false;
    ++filled_;
    to_caller_.notify_one();
  }
}

void BatchLoader::Fill(size_t batch) {
  Slot& slot = slots_[batch % 2];
  slot.status =
      GatherBatch(data_, data_.train, sampler_.Batch(batch), augmentation_, slot.pixels, slot.labels.data(), threads_);
}

}  // namespace examples
