// SPDX-License-Identifier: Apache-2.0
// The streams of one model on a GPU.
#ifndef LIBDDP_REDUCER_GRAD_STREAMS_H_
#define LIBDDP_REDUCER_GRAD_STREAMS_H_

#include <atomic>
#include <mutex>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ddp/types.h"
#include "libddp/device/device_runtime.h"

namespace ddp {

// Those of the program on which a step's gradients are written, and one of the model's own, for what is done to buckets
// beside their reduction and where the program gives no stream. A model on the CPU has none of it.
//
// Thread-safety: Use from any thread; the rest by one thread at a time.
class GradStreams {
 public:
  absl::Status Create(Device device);  // a GPU

  bool on_gpu() const { return IsGpu(own_.device); }
  Device device() const { return own_.device; }
  Stream own() const { return own_; }

  // The stream that a call works on: the one given or, where none is, the model's own. What the step's buckets consist
  // of may have been submitted there. (On the CPU: what is given.)
  Stream Use(Stream given);

  // A stream whose next operation comes behind all that the step's streams hold so far: the program's if it is the only
  // one, or the model's own. `own`: only that, because more is to be submitted than the program's stream should wait
  // for.
  absl::StatusOr<Stream> Behind(bool own);

  // What a call between steps, or at the beginning of one, works on: the stream given, which the next such call without
  // a stream comes behind; or the model's own, behind the stream that was given last. FailedPrecondition if that is
  // being captured: the host would wait for what does not run. (On the CPU: what is given.)
  absl::StatusOr<Stream> Follow(Stream given);

  // The model's own stream, behind the one given and the one that was given last.
  absl::StatusOr<Stream> OwnBehind(Stream given);

  // `stream` goes on behind what the model's own holds so far.
  absl::Status JoinOwn(Stream stream);

  absl::StatusOr<bool> Capturing(Stream stream) const;

  // For memory that work on the model's own stream may use for ever: the stream is not destroyed.
  void Forsake();

  // The host waits if `stream` is the model's own: what the program submits to another one comes after it.
  absl::Status Complete(Stream stream) const;

  // A pass is over whose gradients a later one reduces: `stream`, of Follow, goes on behind the pass's streams, and
  // what comes next behind it. Waits if it is the model's own. (On the CPU: nothing.)
  absl::Status EndUnreduced(Stream stream);

  // The step is over.
  void Reset();

 private:
  absl::Status Order(Stream before, Stream after);
  absl::Status OrderAll(Stream after);  // behind all that the step's streams hold

  OwnedStream owned_;
  OwnedEvent event_;
  Stream own_;
  Stream last_;                        // of the program's; the CPU: none yet
  std::atomic<bool> own_used_{false};  // in this step
  std::atomic<void*> first_{this};     // the first stream used in this step; `this`: none
  std::atomic<bool> several_{false};
  std::mutex mutex_;
  std::vector<void*> others_;  // guarded by mutex_
};

}  // namespace ddp

#endif  // LIBDDP_REDUCER_GRAD_STREAMS_H_
