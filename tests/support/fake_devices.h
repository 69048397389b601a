// GPUs that are none: DeviceRuntime on the CPU. A stream is a thread that does what it is given in order; device memory
// is the host's. So what is built on DeviceRuntime can be tested, also by ThreadSanitizer, where there is no GPU.
#ifndef TESTS_SUPPORT_FAKE_DEVICES_H_
#define TESTS_SUPPORT_FAKE_DEVICES_H_

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>

#include "libddp/device/device_runtime.h"

namespace ddp::testing {

class FakeDevices final : public DeviceRuntime {
 public:
  explicit FakeDevices(int count) : count_(count) {}
  ~FakeDevices() override;

  // What ElapsedUs says.
  std::function<double()> elapsed_us = [] { return 1.0; };
  // May refuse an allocation of device memory.
  std::function<absl::Status(Device device, size_t bytes)> allow = [](Device, size_t) { return absl::OkStatus(); };
  // Streams of which Capturing is true.
  void SetCapturing(void* stream, bool capturing);
  // All devices say that they are this one.
  std::string identity;

  // Does `what` in the stream's order.
  static void Enqueue(void* stream, std::function<void()> what);
  // Waits for what the stream has been given.
  static void Synchronize(void* stream);

  absl::Status Check(Device device) override;
  int Count() override { return count_; }
  absl::StatusOr<std::string> Identity(Device device) override;
  absl::Status SetCurrent(Device device) override;
  int Current() override;
  bool InUse(int) override { return true; }
  absl::StatusOr<Device> DeviceOf(const void* data) override;
  absl::StatusOr<void*> CreateStream() override;
  void DestroyStream(void* stream) override;
  absl::StatusOr<void*> CreateEvent(bool timed) override;
  void DestroyEvent(void* event) override;
  absl::Status Record(void* event, void* stream) override;
  absl::Status WaitEvent(void* stream, void* event) override;
  absl::StatusOr<bool> Finished(void* event) override;
  absl::StatusOr<double> ElapsedUs(void*, void*) override { return elapsed_us(); }
  absl::StatusOr<bool> Capturing(void* stream) override;
  absl::Status LeaveCapturesAlone() override { return absl::OkStatus(); }
  absl::StatusOr<std::shared_ptr<void>> Allocate(Device device, size_t bytes) override;
  absl::StatusOr<std::shared_ptr<void>> AllocatePinned(size_t bytes) override;
  absl::StatusOr<std::shared_ptr<void>> RegisterHost(void* data, size_t bytes) override;
  absl::StatusOr<void*> AllocateOnStream(size_t bytes, void* stream) override;
  absl::Status FreeOnStream(void* data, void* stream) override;
  absl::Status Copy(void* to, const void* from, size_t bytes, void* stream) override;
  absl::Status Zero(void* data, size_t bytes, void* stream) override;
  absl::Status Run(const Transform& transform, absl::Span<const TransformPiece> pieces, void* stream) override;
  absl::Status Commit(const uint32_t* failed, const uint32_t* found_inf, uint32_t* skip_step, void* stream) override;
  absl::Status NormPart(DType dtype, NormKind kind, absl::Span<const TransformPiece> pieces, double* result,
                        void* stream) override;
  absl::Status Hash(absl::Span<const TransformPiece> pieces, uint64_t* results, void* stream) override;
  absl::Status UpdateScale(const ScaleRule& rule, ScalerNumbers* numbers, void* stream) override;

 private:
  const int count_;
  std::mutex mutex_;
  std::map<const char*, std::pair<size_t, Device>> memory_;
  std::set<void*> capturing_;
};

}  // namespace ddp::testing

#endif  // TESTS_SUPPORT_FAKE_DEVICES_H_
