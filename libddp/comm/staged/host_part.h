// SPDX-License-Identifier: Apache-2.0
// What the host does within operations on GPU memory: a thread that takes over where the stream hands over to it, and
// hands back.
#ifndef LIBDDP_COMM_STAGED_HOST_PART_H_
#define LIBDDP_COMM_STAGED_HOST_PART_H_

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "libddp/base/steady_condition.h"
#include "libddp/device/device_runtime.h"

namespace ddp {

// Jobs run one at a time, in order. HandOver and Await are called by one thread at a time, with the GPU current; the
// rest by any. The progress thread would be too late: it looks once in some milliseconds.
class HostPart {
 public:
  using Job = std::function<absl::Status()>;

  static absl::StatusOr<std::shared_ptr<HostPart>> Create(DeviceRuntime& runtime);
  ~HostPart();

  // Before the first HandOver. `failed`: not 0 once the group has failed. Then no job begins. `left`: of Release.
  void Start(const uint32_t* failed, uint64_t* left);

  // `job` runs once the stream has come this far. Returns its number.
  absl::StatusOr<uint32_t> HandOver(void* stream, Job job);
  // What follows on the stream waits until that job has ended well.
  absl::Status Await(uint32_t number, void* stream);

  // The error of the job that went wrong, once that is so long ago: none has begun since.
  absl::Status status(absl::Duration ago) const;

  // The streams that wait for jobs go on, with *left set (see DeviceRuntime::AwaitCounter), and may write over what
  // peers read of this rank: to be called when the jobs' groups have failed, so that nobody takes that for a result.
  void Release();

  // No further job begins.
  void Leave();
  // The same, and returns when none runs. Its caller has seen to it that one that runs will end.
  void Stop();

  // The stream's work looks at this.
  std::shared_ptr<const void> counters() const { return counters_; }

 private:
  explicit HostPart(DeviceRuntime& runtime) : runtime_(runtime) {}
  void Run();
  bool Reached(uint32_t number);
  bool MustLeave() const;
  uint32_t* handed_over() const { return static_cast<uint32_t*>(counters_.get()); }
  uint32_t* handed_back() const { return handed_over() + 16; }  // in another cache line
  uint32_t* released() const { return handed_over() + 32; }

  DeviceRuntime& runtime_;
  std::shared_ptr<void> counters_;  // pinned
  const uint32_t* failed_ = nullptr;
  uint64_t* left_ = nullptr;
  uint32_t number_ = 0;  // of the last job
  std::atomic<bool> leave_{false};

  mutable std::mutex mutex_;
  SteadyCondition changed_;
  std::deque<Job> jobs_;
  absl::Status status_;
  int64_t failed_ns_ = 0;
  std::thread thread_;
};

}  // namespace ddp

#endif  // LIBDDP_COMM_STAGED_HOST_PART_H_
