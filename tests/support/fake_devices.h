// SPDX-License-Identifier: Apache-2.0
// Simulated GPUs: DeviceRuntime on the CPU. A stream is a thread that does what it is given in order; device memory is
// the host's. So what is built on DeviceRuntime can be tested, also by ThreadSanitizer, where there is no GPU.
//
// They are strict. Every call checks that the right device is current and that the device reaches the memory, as
// device_runtime.h demands; what breaks a rule is an error and a complaint, which Job looks at. A thread's current
// device is none of the job's until it is set. Streams are late (see FakeStream) unless a test says otherwise.
#ifndef TESTS_SUPPORT_FAKE_DEVICES_H_
#define TESTS_SUPPORT_FAKE_DEVICES_H_

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "libddp/device/device_runtime.h"
#include "libddp/device/staged_messages.h"
#include "libddp/device/staged_protocol.h"
#include "tests/support/fake_streams.h"

namespace ddp::testing {

class FakeDevices final : public DeviceRuntime {
 public:
  explicit FakeDevices(int count);
  ~FakeDevices() override;

  // What ElapsedUs says.
  std::function<double()> elapsed_us = [] { return 1.0; };
  // May refuse an allocation of device memory.
  std::function<absl::Status(Device device, size_t bytes)> allow = [](Device, size_t) { return absl::OkStatus(); };
  // May make any call fail ("Record"), on the device that it is about.
  std::function<absl::Status(absl::string_view call, int device)> fail = [](absl::string_view, int) {
    return absl::OkStatus();
  };
  // Whether a stream runs late; `number` counts those of its device.
  std::function<bool(int device, int number)> late = [](int, int) { return true; };
  // Thread blocks of RunStaged that a device runs at once. More are a complaint: a GPU might never run them.
  std::function<int(int device)> staged_blocks = [](int) { return 32; };
  // Whether ordinary memory of the host passes for a device's.
  bool host_memory_is_theirs = false;
  // Called when the process begins to use a device: it is initialised then, as a GPU is.
  std::function<void(int device)> first_use = [](int) {};
  // Whether a device uses another's memory over links between them.
  std::function<bool(int device, int other)> linked = [](int, int) { return true; };
  // Whether what one of them copies to the other arrives with a wrong byte.
  std::function<bool(int device, int other)> garbles = [](int, int) { return false; };
  // What a device says that it is.
  std::function<std::string(int device)> identity = [](int device) { return "fake:" + std::to_string(device); };

  // Does `what` in the stream's order. Null: the current device's default stream.
  static void Enqueue(void* stream, std::function<void()> what);
  // Waits for what the stream has been given.
  static void Synchronize(void* stream);
  // What the stream has been given, and gets, runs at once.
  static void RunEarly(void* stream);

  static absl::Status BeginCapture(void* stream);
  static absl::StatusOr<std::shared_ptr<FakeGraph>> EndCapture(void* stream);
  // The stream's next work; the graph may be launched any number of times.
  static void Launch(const std::shared_ptr<FakeGraph>& graph, void* stream);

  // Memory of the current device from malloc.
  static void AddMemory(void* data, size_t bytes);
  static void FreeMemory(void* data);

  // The calling thread's current device.
  static int ThreadDevice();

  // What rules have been broken.
  std::vector<std::string> complaints() const;

  // What the process has of all simulated GPUs: streams, events, and pieces of memory, the host's included.
  struct Held {
    int streams = 0, events = 0, memory = 0;
    bool operator==(const Held&) const = default;
  };
  static Held held();

  absl::Status Check(Device device) override;
  int Count() override { return count_; }
  absl::StatusOr<std::string> Identity(Device device) override;
  absl::Status SetCurrent(Device device) override;
  int Current() override;
  bool InUse(int index) override;
  absl::StatusOr<Device> DeviceOf(const void* data) override;
  absl::StatusOr<void*> CreateStream() override;
  void DestroyStream(void* stream) override;
  absl::StatusOr<void*> CreateEvent(bool timed) override;
  void DestroyEvent(void* event) override;
  absl::Status Record(void* event, void* stream) override;
  absl::Status RecordEachReplay(void* event, void* stream) override;
  absl::Status WaitEvent(void* stream, void* event) override;
  absl::Status WaitEachReplay(void* stream, void* event) override;
  absl::StatusOr<bool> Finished(void* event) override;
  absl::StatusOr<double> ElapsedUs(void* begin, void* end) override;
  absl::StatusOr<bool> Capturing(void* stream) override;
  absl::StatusOr<uint64_t> CaptureOf(void* stream) override;
  absl::Status Drain() override;
  absl::Status LeaveCapturesAlone() override {
    const absl::Status status = OnAnyGpu("LeaveCapturesAlone");
    return status.ok() ? fail("LeaveCapturesAlone", ThreadDevice()) : status;
  }
  absl::StatusOr<std::shared_ptr<void>> Allocate(Device device, size_t bytes) override;
  absl::StatusOr<std::shared_ptr<void>> AllocatePinned(size_t bytes) override;
  absl::StatusOr<std::shared_ptr<void>> RegisterHost(void* data, size_t bytes) override;
  absl::StatusOr<SharedMemory> ShareMemory(Device device, void* data) override;
  absl::StatusOr<std::shared_ptr<void>> OpenMemory(const SharedMemory& shared) override;
  absl::StatusOr<void*> AllocateOnStream(size_t bytes, void* stream) override;
  absl::Status FreeOnStream(void* data, void* stream) override;
  absl::Status Copy(void* to, const void* from, size_t bytes, void* stream) override;
  absl::Status Zero(void* data, size_t bytes, void* stream) override;
  absl::Status Run(const Transform& transform, absl::Span<const TransformPiece> pieces, void* stream) override;
  absl::Status Commit(const uint32_t* failed, const uint32_t* found_inf, uint32_t* skip_step, uint32_t* count,
                      void* stream) override;
  absl::Status Increment(uint32_t* counter, void* stream) override;
  absl::Status AwaitCounter(const uint32_t* counter, uint32_t target, const uint32_t* failed, uint64_t* left,
                            void* stream) override;
  absl::Status NormPart(DType dtype, NormKind kind, absl::Span<const TransformPiece> pieces, double* result,
                        void* stream) override;
  absl::Status FinishClip(NormKind kind, double max_norm, ClipNumbers* numbers, void* stream) override;
  absl::Status RunLowRank(LowRankPass pass, DType dtype, const LowRankStep& step,
                          absl::Span<const LowRankMatrix> matrices, void* stream) override;
  absl::Status Hash(absl::Span<const TransformPiece> pieces, uint64_t* results, void* stream) override;
  absl::Status UpdateScale(const ScaleRule& rule, ScalerNumbers* numbers, void* stream) override;
  absl::Status RunBlocks(const blocks::Pass& pass, void* stream) override;
  absl::Status RunStaged(const staged::Collective& collective, void* stream) override;
  absl::Status RunStaged(const staged::Exchange& exchange, void* stream) override;
  absl::Status RunStaged(const staged::Turn& turn, void* stream) override;
  absl::Status RunStaged(const staged::Meeting& meeting, void* stream) override;
  absl::Status RunStaged(const staged::BlockReduction& reduction, void* stream) override;
  absl::StatusOr<int> StagedBlocks() override;

 private:
  void Use(int device);
  // What every call begins with. `device` is the one that it is about.
  absl::Status Enter(absl::string_view call, int device);
  absl::Status EnterOn(absl::string_view call, void* stream);
  absl::Status OnAnyGpu(absl::string_view call);
  absl::Status Complain(absl::string_view call, const std::string& what);
  // Whether the current device reaches the memory.
  absl::Status Reach(absl::string_view call, const void* data, size_t bytes);
  absl::Status ReachPieces(absl::string_view call, absl::Span<const TransformPiece> pieces, size_t in_size,
                           size_t out_size);
  absl::Status ReachTable(absl::string_view call, const staged::RangeTable& table);
  // words: of the ring only these.
  absl::Status ReachPlace(absl::string_view call, const staged::Place& at, bool words = false);
  // Runs run(index) for each thread block, on threads of their own.
  void RunThreadBlocks(int device, int blocks, const std::function<void(int index)>& run);
  // The same in the stream's order, on the current device.
  absl::Status EnqueueThreadBlocks(void* stream, int blocks, std::function<void(int index)> run);

  const int count_;
  mutable std::mutex mutex_;
  std::vector<int> streams_made_;  // by device
  std::vector<bool> used_;         // by device
  std::vector<std::string> complaints_;
  std::vector<int> blocks_running_;            // by device
  std::map<std::pair<int, int>, int> opened_;  // by device, and whose memory it has open: how often
};

}  // namespace ddp::testing

#endif  // TESTS_SUPPORT_FAKE_DEVICES_H_
