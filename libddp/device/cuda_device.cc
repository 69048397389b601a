// SPDX-License-Identifier: Apache-2.0
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <type_traits>
#include <vector>

#include "absl/strings/str_cat.h"
#include "libddp/base/process_id.h"
#include "libddp/device/cuda_kernels.h"
#include "libddp/device/device_runtime.h"

namespace ddp {
namespace {

static_assert(static_cast<int>(cuda::Type::kUInt8) == static_cast<int>(DType::kUInt8));

cudaStream_t AsStream(void* stream) { return static_cast<cudaStream_t>(stream); }
cudaEvent_t AsEvent(void* event) { return static_cast<cudaEvent_t>(event); }

static_assert(sizeof(TransformPiece) == sizeof(cuda::Piece) &&
              offsetof(TransformPiece, count) == offsetof(cuda::Piece, count));
const cuda::Piece* AsPieces(absl::Span<const TransformPiece> pieces) {
  return reinterpret_cast<const cuda::Piece*>(pieces.data());
}

// The runtime remembers the last error for whoever asks next; what is reported here is taken back.
absl::Status ToStatus(cudaError_t error, absl::string_view call) {
  if (error == cudaSuccess) return absl::OkStatus();
  cudaGetLastError();
  const std::string text =
      absl::StrCat(std::string(call), ": ", cudaGetErrorString(error), " (", cudaGetErrorName(error), ")");
  switch (error) {
    case cudaErrorMemoryAllocation:
      return absl::ResourceExhaustedError(
          absl::StrCat(text, "; nvidia-smi shows who uses the GPU's memory. Use a smaller batch or model"));
    case cudaErrorNoDevice:
    case cudaErrorInsufficientDriver:
    case cudaErrorInitializationError:
      return absl::FailedPreconditionError(absl::StrCat(
          text, "; no GPU can be used here: is the driver installed and at least as new as CUDA ",
          CUDART_VERSION / 1000, ".0, does nvidia-smi list a GPU, and does CUDA_VISIBLE_DEVICES leave one?"));
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorInvalidDeviceFunction:
    case cudaErrorUnsupportedPtxVersion:
      return absl::FailedPreconditionError(absl::StrCat(
          text, "; this build has no kernels for this GPU: configure with -DCMAKE_CUDA_ARCHITECTURES=native"));
    default:
      return absl::InternalError(text);
  }
}

// While it lives, calls of this thread that would break a capture in CUDA's global mode, another thread's too, do not.
class RelaxedCaptures {
 public:
  RelaxedCaptures() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCaptures() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCaptures(const RelaxedCaptures&) = delete;
  RelaxedCaptures& operator=(const RelaxedCaptures&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// The memory that AllocateOnStream hands out: a pool for each GPU. CUDA's default pool gives all of it back to the
// driver whenever the program synchronises, and to map it again costs more than most of what it is used for. The pool
// is the library's own, because how much the default one keeps is the program's business.
class ScratchPools {
 public:
  // Two buckets of the default size, with some room. What is used beyond that goes back at the next synchronisation.
  static constexpr uint64_t kKeptBytes = uint64_t{64} << 20;

  // Of the current device.
  absl::StatusOr<cudaMemPool_t> Get() {
    int device = 0;
    if (absl::Status s = ToStatus(cudaGetDevice(&device), "cudaGetDevice"); !s.ok()) return s;
    const std::lock_guard<std::mutex> lock(mutex_);
    if (const auto made = pools_.find(device); made != pools_.end()) return made->second;
    const RelaxedCaptures relaxed;
    absl::StatusOr<cudaMemPool_t> pool = Make(device);
    if (pool.ok()) pools_[device] = *pool;
    return pool;
  }

 private:
  static absl::StatusOr<cudaMemPool_t> Make(int device) {
    cudaMemPoolProps properties = {};
    properties.allocType = cudaMemAllocationTypePinned;
    properties.location = {cudaMemLocationTypeDevice, device};
    cudaMemPool_t pool = nullptr;
    if (absl::Status s = ToStatus(cudaMemPoolCreate(&pool, &properties), "cudaMemPoolCreate"); !s.ok()) return s;
    uint64_t kept = kKeptBytes;
    const absl::Status set =
        ToStatus(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &kept), "cudaMemPoolSetAttribute");
    if (set.ok()) return pool;
    cudaMemPoolDestroy(pool);
    return set;
  }

  std::mutex mutex_;
  std::map<int, cudaMemPool_t> pools_;  // they live as long as the process uses the GPUs
};

class CudaDeviceRuntime final : public DeviceRuntime {
 public:
  absl::Status Check(Device device) override {
    int count = 0;
    if (absl::Status s = ToStatus(cudaGetDeviceCount(&count), "cudaGetDeviceCount"); !s.ok()) return s;
    if (device.kind != Device::Kind::kCuda || device.index < 0 || device.index >= count) {
      return absl::FailedPreconditionError(
          absl::StrCat("GPU ", device.index, " is asked for, but this process sees ", count,
                       " (numbered from 0); start fewer ranks on this host, or look at CUDA_VISIBLE_DEVICES"));
    }
    const DeviceGuard guard(*this, device);
    if (!guard.status().ok()) return guard.status();
    return ToStatus(cuda::CheckKernels(), "loading libddp's kernels");
  }

  int Count() override {
    int count = 0;
    if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
    cudaGetLastError();
    return 0;
  }

  absl::StatusOr<std::string> Identity(Device device) override {
    char text[32] = {};
    if (absl::Status s = ToStatus(cudaDeviceGetPCIBusId(text, sizeof text, device.index), "cudaDeviceGetPCIBusId");
        !s.ok()) {
      return s;
    }
    return std::string(text);
  }

  absl::Status SetCurrent(Device device) override { return ToStatus(cudaSetDevice(device.index), "cudaSetDevice"); }

  int Current() override {
    int device = 0;
    if (cudaGetDevice(&device) == cudaSuccess) return device;
    cudaGetLastError();
    return -1;
  }

  // The driver's answer; the library is not linked with it, so that programs start where there is none.
  bool InUse(int index) override {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found;
    if (cudaGetDriverEntryPointByVersion("cuDevicePrimaryCtxGetState", &entry, 12000, cudaEnableDefault, &found) !=
            cudaSuccess ||
        entry == nullptr) {
      cudaGetLastError();
      return false;
    }
    unsigned flags = 0;
    int active = 0;
    const auto get_state = reinterpret_cast<decltype(&cuDevicePrimaryCtxGetState)>(entry);
    return get_state(index, &flags, &active) == CUDA_SUCCESS && active != 0;
  }

  absl::StatusOr<Device> DeviceOf(const void* data) override {
    cudaPointerAttributes attributes;
    if (absl::Status s = ToStatus(cudaPointerGetAttributes(&attributes, data), "cudaPointerGetAttributes"); !s.ok()) {
      return s;
    }
    const bool gpu = attributes.type == cudaMemoryTypeDevice || attributes.type == cudaMemoryTypeManaged;
    return gpu ? Device{Device::Kind::kCuda, static_cast<int16_t>(attributes.device)} : Device{};
  }

  absl::StatusOr<void*> CreateStream() override {
    int least = 0, greatest = 0;
    if (absl::Status s =
            ToStatus(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange");
        !s.ok()) {
      return s;
    }
    cudaStream_t stream = nullptr;
    const RelaxedCaptures relaxed;
    if (absl::Status s = ToStatus(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, greatest),
                                  "cudaStreamCreateWithPriority");
        !s.ok()) {
      return s;
    }
    return stream;
  }
  void DestroyStream(void* stream) override { cudaStreamDestroy(AsStream(stream)); }

  absl::StatusOr<void*> CreateEvent(bool timed) override {
    cudaEvent_t event = nullptr;
    if (absl::Status s = ToStatus(cudaEventCreateWithFlags(&event, timed ? cudaEventDefault : cudaEventDisableTiming),
                                  "cudaEventCreate");
        !s.ok()) {
      return s;
    }
    return event;
  }
  void DestroyEvent(void* event) override { cudaEventDestroy(AsEvent(event)); }

  absl::Status Record(void* event, void* stream) override {
    return ToStatus(cudaEventRecord(AsEvent(event), AsStream(stream)), "cudaEventRecord");
  }
  absl::Status RecordEachReplay(void* event, void* stream) override {
    return ToStatus(cudaEventRecordWithFlags(AsEvent(event), AsStream(stream), cudaEventRecordExternal),
                    "cudaEventRecordWithFlags");
  }
  absl::Status WaitEvent(void* stream, void* event) override {
    return ToStatus(cudaStreamWaitEvent(AsStream(stream), AsEvent(event), 0), "cudaStreamWaitEvent");
  }
  absl::Status WaitEachReplay(void* stream, void* event) override {
    return ToStatus(cudaStreamWaitEvent(AsStream(stream), AsEvent(event), cudaEventWaitExternal),
                    "cudaStreamWaitEvent");
  }
  absl::StatusOr<bool> Finished(void* event) override {
    const RelaxedCaptures relaxed;
    const cudaError_t error = cudaEventQuery(AsEvent(event));
    if (error == cudaErrorNotReady) {
      cudaGetLastError();
      return false;
    }
    if (error != cudaSuccess)
      return ToStatus(error, "cudaEventQuery (an earlier kernel of this process may have failed)");
    return true;
  }
  absl::StatusOr<double> ElapsedUs(void* begin, void* end) override {
    float ms = 0;
    if (absl::Status s = ToStatus(cudaEventElapsedTime(&ms, AsEvent(begin), AsEvent(end)), "cudaEventElapsedTime");
        !s.ok()) {
      return s;
    }
    return ms * 1e3;
  }
  absl::StatusOr<bool> Capturing(void* stream) override {
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    if (absl::Status s = ToStatus(cudaStreamIsCapturing(AsStream(stream), &capture), "cudaStreamIsCapturing");
        !s.ok()) {
      return s;
    }
    return capture != cudaStreamCaptureStatusNone;
  }
  absl::StatusOr<uint64_t> CaptureOf(void* stream) override {
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    unsigned long long number = 0;  // NOLINT(google-runtime-int): CUDA's type
    const cudaError_t error = cudaStreamGetCaptureInfo(AsStream(stream), &capture, &number);
    if (absl::Status s = ToStatus(error, "cudaStreamGetCaptureInfo"); !s.ok()) return s;
    return capture == cudaStreamCaptureStatusActive ? number : 0;
  }
  absl::Status Drain() override { return ToStatus(cudaDeviceSynchronize(), "cudaDeviceSynchronize"); }
  absl::Status LeaveCapturesAlone() override {
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    return ToStatus(cudaThreadExchangeStreamCaptureMode(&mode), "cudaThreadExchangeStreamCaptureMode");
  }

  absl::StatusOr<std::shared_ptr<void>> Allocate(Device device, size_t bytes) override {
    const DeviceGuard guard(*this, device);
    if (!guard.status().ok()) return guard.status();
    void* data = nullptr;
    if (absl::Status s = ToStatus(cudaMalloc(&data, bytes), absl::StrCat("cudaMalloc of ", bytes, " bytes")); !s.ok()) {
      return s;
    }
    std::shared_ptr<void> owner(data, [this, device](void* p) {
      const DeviceGuard its_own(*this, device);
      cudaFree(p);
    });
    // The legacy stream's memset may still run when it returns; memory that is handed out is zero.
    if (absl::Status s = ToStatus(cudaMemset(data, 0, bytes), "cudaMemset"); !s.ok()) return s;
    if (absl::Status s = ToStatus(cudaStreamSynchronize(cudaStreamLegacy), "cudaStreamSynchronize"); !s.ok()) return s;
    return owner;
  }

  absl::StatusOr<std::shared_ptr<void>> AllocatePinned(size_t bytes) override {
    void* data = nullptr;
    if (absl::Status s = ToStatus(cudaHostAlloc(&data, bytes, cudaHostAllocPortable | cudaHostAllocMapped),
                                  absl::StrCat("cudaHostAlloc of ", bytes, " bytes"));
        !s.ok()) {
      return s;
    }
    std::fill_n(static_cast<char*>(data), bytes, char{0});
    return std::shared_ptr<void>(data, [this, device = CurrentDevice()](void* p) {
      const DeviceGuard its_own(*this, device);
      cudaFreeHost(p);
    });
  }

  absl::StatusOr<std::shared_ptr<void>> RegisterHost(void* data, size_t bytes) override {
    if (absl::Status s = ToStatus(cudaHostRegister(data, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped),
                                  absl::StrCat("cudaHostRegister of ", bytes, " bytes"));
        !s.ok()) {
      return s;
    }
    const std::shared_ptr<void> owner(data, [this, device = CurrentDevice()](void* p) {
      const DeviceGuard its_own(*this, device);
      cudaHostUnregister(p);
    });
    void* seen = nullptr;
    if (absl::Status s = ToStatus(cudaHostGetDevicePointer(&seen, data, 0), "cudaHostGetDevicePointer"); !s.ok())
      return s;
    return std::shared_ptr<void>(owner, seen);
  }

  absl::StatusOr<SharedMemory> ShareMemory(Device device, void* data) override {
    Shared shared{ProcessId::OfSelf(), data, {}, {}};
    const DeviceGuard its_own(*this, device);
    if (!its_own.status().ok()) return its_own.status();
    const cudaError_t named = cudaDeviceGetPCIBusId(shared.gpu, sizeof shared.gpu, device.index);
    if (absl::Status s = ToStatus(named, "cudaDeviceGetPCIBusId"); !s.ok()) return s;
    if (absl::Status s = ToStatus(cudaIpcGetMemHandle(&shared.handle, data), "cudaIpcGetMemHandle"); !s.ok()) return s;
    SharedMemory told;
    std::memcpy(told.bytes, &shared, sizeof shared);
    return told;
  }
  // Within a process there is nothing to open.
  absl::StatusOr<std::shared_ptr<void>> OpenMemory(const SharedMemory& told) override {
    Shared shared;
    std::memcpy(&shared, told.bytes, sizeof shared);
    if (absl::Status s = ReachGpu(shared.gpu); !s.ok()) return s;
    if (shared.process.SameProcess(ProcessId::OfSelf())) return std::shared_ptr<void>(shared.data, [](void*) {});
    void* data = nullptr;
    const cudaError_t opened = cudaIpcOpenMemHandle(&data, shared.handle, cudaIpcMemLazyEnablePeerAccess);
    if (absl::Status s = ToStatus(opened, "cudaIpcOpenMemHandle"); !s.ok()) return s;
    return std::shared_ptr<void>(data, [this, device = CurrentDevice()](void* p) {
      const DeviceGuard its_own(*this, device);
      cudaIpcCloseMemHandle(p);
    });
  }

  absl::StatusOr<void*> AllocateOnStream(size_t bytes, void* stream) override {
    const absl::StatusOr<cudaMemPool_t> pool = scratch_.Get();
    if (!pool.ok()) return pool.status();
    void* data = nullptr;
    if (absl::Status s = ToStatus(cudaMallocFromPoolAsync(&data, bytes, *pool, AsStream(stream)),
                                  absl::StrCat("cudaMallocFromPoolAsync of ", bytes, " bytes"));
        !s.ok()) {
      return s;
    }
    return data;
  }
  absl::Status FreeOnStream(void* data, void* stream) override {
    return ToStatus(cudaFreeAsync(data, AsStream(stream)), "cudaFreeAsync");
  }

  absl::Status Copy(void* to, const void* from, size_t bytes, void* stream) override {
    return ToStatus(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, AsStream(stream)), "cudaMemcpyAsync");
  }
  absl::Status Zero(void* data, size_t bytes, void* stream) override {
    return ToStatus(cudaMemsetAsync(data, 0, bytes, AsStream(stream)), "cudaMemsetAsync");
  }

  absl::Status Run(const Transform& transform, absl::Span<const TransformPiece> pieces, void* stream) override {
    const cudaError_t error = cuda::LaunchTransform(
        static_cast<cuda::Type>(transform.in), static_cast<cuda::Type>(transform.out), transform.scale,
        transform.nonfinite, transform.factor, AsPieces(pieces), pieces.size(), AsStream(stream));
    if (error == cudaErrorInvalidValue) {
      return absl::InvalidArgumentError(absl::StrCat(std::string(Name(transform.in)), " to ",
                                                     std::string(Name(transform.out)),
                                                     ": no such conversion, or scaling or a check of integers"));
    }
    return ToStatus(error, "a kernel of libddp");
  }

  absl::Status Commit(const uint32_t* failed, const uint32_t* found_inf, uint32_t* skip_step, uint32_t* count,
                      void* stream) override {
    return ToStatus(cuda::LaunchCommit(failed, found_inf, skip_step, count, AsStream(stream)), "the commit kernel");
  }

  absl::Status Increment(uint32_t* counter, void* stream) override {
    return ToStatus(cuda::LaunchIncrement(counter, AsStream(stream)), "the kernel that counts");
  }
  absl::Status AwaitCounter(const uint32_t* counter, uint32_t target, const uint32_t* failed, uint64_t* left,
                            void* stream) override {
    return ToStatus(cuda::LaunchAwait(counter, target, failed, left, AsStream(stream)),
                    "the kernel that waits for the host");
  }

  absl::Status NormPart(DType dtype, NormKind kind, absl::Span<const TransformPiece> pieces, double* result,
                        void* stream) override {
    const size_t partials = cuda::NormPartials(AsPieces(pieces), pieces.size());
    absl::StatusOr<void*> scratch = AllocateOnStream(std::max<size_t>(partials, 1) * sizeof(double), stream);
    if (!scratch.ok()) return scratch.status();
    absl::Status status =
        ToStatus(cuda::LaunchNorm(static_cast<cuda::Type>(dtype), kind, AsPieces(pieces), pieces.size(),
                                  static_cast<double*>(*scratch), result, AsStream(stream)),
                 "the kernels of a norm");
    status.Update(FreeOnStream(*scratch, stream));
    return status;
  }

  absl::Status FinishClip(NormKind kind, double max_norm, ClipNumbers* numbers, void* stream) override {
    return ToStatus(cuda::LaunchFinishClip(kind, max_norm, numbers, AsStream(stream)), "the kernel that clips by norm");
  }

  absl::Status Hash(absl::Span<const TransformPiece> pieces, uint64_t* results, void* stream) override {
    return ToStatus(cuda::LaunchHash(AsPieces(pieces), pieces.size(), results, AsStream(stream)), "the hash kernel");
  }

  absl::Status RunBlocks(const blocks::Pass& pass, void* stream) override {
    return ToStatus(cuda::LaunchBlocks(pass, AsStream(stream)), "a kernel for 8-bit blocks");
  }

  absl::Status RunLowRank(LowRankPass pass, DType dtype, const LowRankStep& step,
                          absl::Span<const LowRankMatrix> matrices, void* stream) override {
    return ToStatus(cuda::LaunchLowRank(pass, static_cast<cuda::Type>(dtype), step, matrices.data(), matrices.size(),
                                        AsStream(stream)),
                    "the kernels of low-rank compression");
  }

  absl::Status RunStaged(const staged::Collective& collective, void* stream) override {
    return ToStatus(cuda::LaunchCollective(collective, AsStream(stream)), "a kernel that goes through host memory");
  }
  absl::Status RunStaged(const staged::Exchange& exchange, void* stream) override {
    return ToStatus(cuda::LaunchExchange(exchange, AsStream(stream)), "the kernel for messages through host memory");
  }
  absl::Status RunStaged(const staged::Turn& turn, void* stream) override {
    return ToStatus(cuda::LaunchTurn(turn, AsStream(stream)), "the kernel that takes turns at host memory");
  }
  absl::Status RunStaged(const staged::Meeting& meeting, void* stream) override {
    return ToStatus(cuda::LaunchMeeting(meeting, AsStream(stream)), "the kernel that waits for peers");
  }
  absl::Status RunStaged(const staged::BlockReduction& reduction, void* stream) override {
    return ToStatus(cuda::LaunchBlockReduction(reduction, AsStream(stream)),
                    "the kernel that reduces 8-bit blocks through host memory");
  }
  absl::StatusOr<int> StagedBlocks() override {
    int blocks = 0;
    if (absl::Status s = ToStatus(cuda::StagedBlocks(&blocks), "loading the kernels that go through host memory");
        !s.ok()) {
      return s;
    }
    return blocks;
  }

  absl::Status UpdateScale(const ScaleRule& rule, ScalerNumbers* numbers, void* stream) override {
    return ToStatus(cuda::LaunchUpdateScale(rule, numbers, AsStream(stream)), "the kernel that updates the scale");
  }

 private:
  // What ShareMemory gives, as bytes.
  struct Shared {
    ProcessId process;
    void* data;  // in that process
    char gpu[32];
    cudaIpcMemHandle_t handle;
  };
  static_assert(sizeof(Shared) <= sizeof(SharedMemory) && std::is_trivially_copyable_v<Shared>);
  // The current device reads and writes the memory of this one from here on.
  absl::Status ReachGpu(const char* gpu) {
    int peer = 0, reaches = 0;
    const int here = Current();
    if (absl::Status s = ToStatus(cudaDeviceGetByPCIBusId(&peer, gpu), "cudaDeviceGetByPCIBusId"); !s.ok()) return s;
    if (peer == here) return absl::OkStatus();
    const cudaError_t asked = cudaDeviceCanAccessPeer(&reaches, here, peer);
    if (absl::Status s = ToStatus(asked, "cudaDeviceCanAccessPeer"); !s.ok()) return s;
    if (reaches == 0) {
      return absl::FailedPreconditionError(
          absl::StrCat("GPU ", here, " does not reach the memory of the GPU ", std::string(gpu)));
    }
    const cudaError_t enabled = cudaDeviceEnablePeerAccess(peer, 0);
    if (enabled != cudaErrorPeerAccessAlreadyEnabled) return ToStatus(enabled, "cudaDeviceEnablePeerAccess");
    cudaGetLastError();
    return absl::OkStatus();
  }
  Device CurrentDevice() { return {Device::Kind::kCuda, static_cast<int16_t>(Current())}; }

  ScratchPools scratch_;
};

}  // namespace

DeviceRuntime* CudaDevices() {
  static auto* const runtime = new CudaDeviceRuntime;  // used until the process ends
  return runtime;
}

}  // namespace ddp
