// SPDX-License-Identifier: Apache-2.0
// What the layers above ask of a device that is not the CPU: memory, streams, events, copies, and a few kernels over
// many ranges. CUDA implements it (cuda_device.cc); tests implement it on the CPU, so that everything built on it can
// be tested where there is no GPU.
#ifndef LIBDDP_DEVICE_DEVICE_RUNTIME_H_
#define LIBDDP_DEVICE_DEVICE_RUNTIME_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "ddp/types.h"
#include "libddp/device/block_rule.h"
#include "libddp/device/low_rank.h"
#include "libddp/device/norm_rule.h"
#include "libddp/device/scale_rule.h"

namespace ddp {
namespace staged {  // staged_protocol.h, staged_messages.h, staged_blocks.h, staged_turn.h
struct BlockReduction;
struct Collective;
struct Exchange;
struct Meeting;
struct Turn;
}  // namespace staged

// One contiguous piece of work of a kernel: `count` elements from `in` to `out`, which are the same memory, or do not
// overlap.
struct TransformPiece {
  const void* in = nullptr;
  void* out = nullptr;
  size_t count = 0;
};

// out = convert(scale * in * *factor), elementwise. Float32, float16 and bfloat16 convert to each other, by way of
// float32 with one rounding to nearest even; every other type only to itself. Scaling and the check are for
// floating-point types only.
struct Transform {
  DType in = DType::kFloat32;
  DType out = DType::kFloat32;
  double scale = 1;
  // If set, 1 is stored there if `out` gets an infinity or a NaN; otherwise it is left alone. The device must be able
  // to write there. `out` of the pieces may then be null: nothing is stored but the finding.
  uint32_t* nonfinite = nullptr;
  // 1 if null; else read from the device's memory when the kernel runs.
  const float* factor = nullptr;
};

// Pointers called stream and event are the device's own handles (cudaStream_t, cudaEvent_t). A null stream is CUDA's
// legacy default stream. What is "asynchronous" takes effect in the order of its stream.
//
// The calling thread's current device must be the one that a call is about (DeviceGuard sees to it), unless the call
// names a Device. Finished, ElapsedUs, DestroyStream, DestroyEvent and LeaveCapturesAlone work with any current device
// that this process uses. In a thread that has made none current CUDA would start GPU 0 for them, which costs half a
// GiB of its memory for each such process.
//
// Errors: ResourceExhausted (memory), FailedPrecondition (no GPU, no driver, no such GPU, a GPU this build has no
// kernels for), InvalidArgument (types that do not convert), Internal (anything else; names the call). Any thread may
// call anything at any time.
class DeviceRuntime {
 public:
  virtual ~DeviceRuntime() = default;

  // OK if `device` is there and can run this build's kernels. The first call that touches the device.
  virtual absl::Status Check(Device device) = 0;
  // How many there are; 0 without a driver.
  virtual int Count() = 0;
  // What tells it from every other device of this host: "0000:5d:00.0".
  virtual absl::StatusOr<std::string> Identity(Device device) = 0;
  // Makes `device` current for the calling thread.
  virtual absl::Status SetCurrent(Device device) = 0;
  // The calling thread's device; nothing is initialised by asking.
  virtual int Current() = 0;
  // Whether this process has already used the device, so that making it current again costs nothing.
  virtual bool InUse(int index) = 0;
  // Where `data` lies: a GPU, or the CPU for anything that no GPU owns.
  virtual absl::StatusOr<Device> DeviceOf(const void* data) = 0;

  // A stream that does not wait for the legacy default stream, of the highest priority: what it carries is what others
  // wait for.
  virtual absl::StatusOr<void*> CreateStream() = 0;
  virtual void DestroyStream(void* stream) = 0;
  virtual absl::StatusOr<void*> CreateEvent(bool timed) = 0;
  virtual void DestroyEvent(void* event) = 0;

  virtual absl::Status Record(void* event, void* stream) = 0;
  // On a stream that captures: every replay of the graph records the event, which is then like any other.
  virtual absl::Status RecordEachReplay(void* event, void* stream) = 0;
  virtual absl::Status WaitEvent(void* stream, void* event) = 0;  // the stream waits, the host does not
  // On a stream that captures: every replay waits for what the event holds when the graph is launched.
  virtual absl::Status WaitEachReplay(void* stream, void* event) = 0;
  // True also if it was never recorded. May be asked while any thread captures.
  virtual absl::StatusOr<bool> Finished(void* event) = 0;
  virtual absl::StatusOr<double> ElapsedUs(void* begin, void* end) = 0;  // an error if one was never recorded
  virtual absl::StatusOr<bool> Capturing(void* stream) = 0;              // into a graph
  // A number of the capture that no other has; 0: the stream does not capture.
  virtual absl::StatusOr<uint64_t> CaptureOf(void* stream) = 0;
  // Waits, without a limit, for all that the current device has been given.
  virtual absl::Status Drain() = 0;
  // What the calling thread does from now on breaks no capture of another thread.
  virtual absl::Status LeaveCapturesAlone() = 0;

  // Zeroed. Freed by the last owner.
  virtual absl::StatusOr<std::shared_ptr<void>> Allocate(Device device, size_t bytes) = 0;
  // Host memory that every device reads and writes at the same address. Zeroed.
  virtual absl::StatusOr<std::shared_ptr<void>> AllocatePinned(size_t bytes) = 0;
  // Makes memory of the caller's (shared memory, say) usable by every device until the last owner of the result is
  // gone, which is the address that devices use: on most systems the same.
  virtual absl::StatusOr<std::shared_ptr<void>> RegisterHost(void* data, size_t bytes) = 0;
  // Lets other processes of this host, and other devices, use memory that `device` has: what OpenMemory takes. `data`
  // is the beginning of what Allocate gave, of at least kSharedAlign bytes.
  static constexpr size_t kSharedAlign = size_t{2} << 20;  // less may lie in one piece with other memory
  struct SharedMemory {
    alignas(uint64_t) char bytes[256] = {};
  };
  virtual absl::StatusOr<SharedMemory> ShareMemory(Device device, void* data) = 0;
  // Where the current device sees that memory, until the last owner of the result is gone: before the memory itself.
  // FailedPrecondition if it does not reach the other device's memory over their links.
  virtual absl::StatusOr<std::shared_ptr<void>> OpenMemory(const SharedMemory& shared) = 0;
  // Memory for use on `stream` only, in its order. Some that is free is kept for the next call, across
  // synchronisations.
  virtual absl::StatusOr<void*> AllocateOnStream(size_t bytes, void* stream) = 0;
  virtual absl::Status FreeOnStream(void* data, void* stream) = 0;

  // Asynchronous.
  virtual absl::Status Copy(void* to, const void* from, size_t bytes, void* stream) = 0;  // from anywhere to anywhere
  virtual absl::Status Zero(void* data, size_t bytes, void* stream) = 0;
  // One launch for every kRangesPerLaunch pieces.
  virtual absl::Status Run(const Transform& transform, absl::Span<const TransformPiece> pieces, void* stream) = 0;
  // *skip_step = 1 if *failed or *found_inf is not 0, else 0. Adds 1 to *count (pinned memory). Pointers may be null,
  // but for skip_step. See docs/decisions/17-failure-after-return.md.
  virtual absl::Status Commit(const uint32_t* failed, const uint32_t* found_inf, uint32_t* skip_step, uint32_t* count,
                              void* stream) = 0;
  // Adds 1 to *counter, which the host may read meanwhile (pinned memory).
  virtual absl::Status Increment(uint32_t* counter, void* stream) = 0;
  // What follows on the stream waits until the host has brought *counter, in pinned memory, to `target` or beyond, or
  // until *failed is not 0; then *left, in the device's memory, becomes 1. It may be null.
  virtual absl::Status AwaitCounter(const uint32_t* counter, uint32_t target, const uint32_t* failed, uint64_t* left,
                                    void* stream) = 0;
  // *result = the part of a norm (norm_rule.h) that the pieces' `in` hold, in float64, in an order that depends on the
  // counts alone. Floating-point types; `result` is in the device's memory.
  virtual absl::Status NormPart(DType dtype, NormKind kind, absl::Span<const TransformPiece> pieces, double* result,
                                void* stream) = 0;
  // FinishClip where the numbers are.
  virtual absl::Status FinishClip(NormKind kind, double max_norm, ClipNumbers* numbers, void* stream) = 0;
  // results[k] = the hash of pieces[k], as hash_rule.h defines it; a piece's `count` is in bytes here. `results` is in
  // the device's memory.
  virtual absl::Status Hash(absl::Span<const TransformPiece> pieces, uint64_t* results, void* stream) = 0;
  // Arrays in and out of block-scaled 8-bit numbers; see block_rule.h.
  virtual absl::Status RunBlocks(const blocks::Pass& pass, void* stream) = 0;
  // Low-rank compression; see low_rank.h. `dtype`: of gradients and messages; float32 or a 16-bit float.
  virtual absl::Status RunLowRank(LowRankPass pass, DType dtype, const LowRankStep& step,
                                  absl::Span<const LowRankMatrix> matrices, void* stream) = 0;
  // One rank's part in an operation through host memory. Runs until the other ranks have done theirs, or until it has
  // to leave: then its memory holds anything, and *failed of its Place is not 0. It needs BlocksOf thread blocks at
  // once.
  virtual absl::Status RunStaged(const staged::Collective& collective, void* stream) = 0;
  virtual absl::Status RunStaged(const staged::Exchange& exchange, void* stream) = 0;
  virtual absl::Status RunStaged(const staged::Turn& turn, void* stream) = 0;
  virtual absl::Status RunStaged(const staged::Meeting& meeting, void* stream) = 0;
  virtual absl::Status RunStaged(const staged::BlockReduction& reduction, void* stream) = 0;
  // How many of these thread blocks the current device can run at once.
  virtual absl::StatusOr<int> StagedBlocks() = 0;
  // UpdateScale where the numbers are.
  virtual absl::Status UpdateScale(const ScaleRule& rule, ScalerNumbers* numbers, void* stream) = 0;
};

// The GPUs of this process. In a build without CUDA every call fails with Unimplemented, and Count is 0. Never null.
DeviceRuntime* CudaDevices();

// What works on GPU memory outside of groups: CudaDevices(), or what a test has put in its place.
DeviceRuntime& Devices();

// Puts `devices` in CudaDevices' place while it lives; for tests. One at a time.
class ScopedDevices {
 public:
  explicit ScopedDevices(DeviceRuntime& devices);
  ~ScopedDevices();
  ScopedDevices(const ScopedDevices&) = delete;
  ScopedDevices& operator=(const ScopedDevices&) = delete;
};

inline bool IsGpu(Device device) { return device.kind == Device::Kind::kCuda; }

// A call on a GPU's memory needs a stream of this GPU, or kNoStream; a call on CPU memory needs none.
absl::Status CheckStream(Device device, Stream stream);

// Blocks the host until what was submitted to the GPU's stream is through, or until give_up() is true: then
// DeadlineExceeded.
absl::Status Synchronize(
    Stream stream, absl::FunctionRef<bool()> give_up = [] { return false; });

// Makes a device current while it lives. The thread's former device comes back only if this process has used it: to
// make a device current initialises it, which costs some hundred MiB of its memory, and a process that works on one
// GPU must leave the others alone.
class DeviceGuard {
 public:
  DeviceGuard(DeviceRuntime& runtime, Device device) : runtime_(runtime), former_(runtime.Current()) {
    if (former_ == device.index) {
      former_ = -1;
      return;
    }
    const bool restore = former_ >= 0 && runtime.InUse(former_);
    status_ = runtime.SetCurrent(device);
    if (!restore) former_ = -1;
  }
  ~DeviceGuard() {
    if (former_ >= 0) runtime_.SetCurrent({Device::Kind::kCuda, static_cast<int16_t>(former_)}).IgnoreError();
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

  const absl::Status& status() const { return status_; }

 private:
  DeviceRuntime& runtime_;
  int former_;  // to be made current again; -1: nothing to do
  absl::Status status_;
};

// Owns a stream or an event of the device that is current when it is made. Not thread-safe.
template <void (DeviceRuntime::*kDestroy)(void*)>
class OwnedHandle {
 public:
  OwnedHandle() = default;
  OwnedHandle(DeviceRuntime* runtime, void* handle)
      : runtime_(runtime), handle_(handle), device_(static_cast<int16_t>(runtime->Current())) {}
  OwnedHandle(OwnedHandle&& other) noexcept
      : runtime_(other.runtime_), handle_(std::exchange(other.handle_, nullptr)), device_(other.device_) {}
  OwnedHandle& operator=(OwnedHandle&& other) noexcept {
    std::swap(runtime_, other.runtime_);
    std::swap(handle_, other.handle_);
    std::swap(device_, other.device_);
    return *this;
  }
  ~OwnedHandle() {
    if (handle_ == nullptr) return;
    const DeviceGuard guard(*runtime_, device());
    (runtime_->*kDestroy)(handle_);
  }

  void* get() const { return handle_; }
  Device device() const { return {Device::Kind::kCuda, device_}; }

 private:
  DeviceRuntime* runtime_ = nullptr;
  void* handle_ = nullptr;
  int16_t device_ = 0;
};
using OwnedStream = OwnedHandle<&DeviceRuntime::DestroyStream>;
using OwnedEvent = OwnedHandle<&DeviceRuntime::DestroyEvent>;

// Blocks the host as Synchronize does, until what was submitted before the event is through.
absl::Status WaitForEvent(const OwnedEvent& event, absl::FunctionRef<bool()> give_up);

inline absl::StatusOr<OwnedStream> MakeStream(DeviceRuntime& runtime) {
  absl::StatusOr<void*> stream = runtime.CreateStream();
  if (!stream.ok()) return stream.status();
  return OwnedStream(&runtime, *stream);
}
inline absl::StatusOr<OwnedEvent> MakeEvent(DeviceRuntime& runtime, bool timed = false) {
  absl::StatusOr<void*> event = runtime.CreateEvent(timed);
  if (!event.ok()) return event.status();
  return OwnedEvent(&runtime, *event);
}

}  // namespace ddp

#endif  // LIBDDP_DEVICE_DEVICE_RUNTIME_H_
