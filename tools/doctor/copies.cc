// SPDX-License-Identifier: Apache-2.0
#include "tools/doctor/copies.h"

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "examples/train/library.h"

namespace doctor {
namespace {

using examples::FindFunction;

constexpr size_t kElements = size_t{1} << 20, kBytes = kElements * sizeof(uint32_t);
constexpr int kPeerAlreadyEnabled = 704;  // CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED

using CudaContext = void*;
using Address = uint64_t;  // CUdeviceptr

// The functions of CUDA's driver that copies need.
struct Driver {
  explicit Driver(const char* library) {
    const auto find = [library]<typename Function>(Function** function, const char* name) {
      *function = FindFunction<Function>(library, name);
      return *function != nullptr;
    };
    complete = find(&Init, "cuInit") && find(&Count, "cuDeviceGetCount") && find(&CanAccess, "cuDeviceCanAccessPeer") &&
               find(&Retain, "cuDevicePrimaryCtxRetain") && find(&Release, "cuDevicePrimaryCtxRelease_v2") &&
               find(&SetCurrent, "cuCtxSetCurrent") && find(&Synchronize, "cuCtxSynchronize") &&
               find(&EnablePeer, "cuCtxEnablePeerAccess") && find(&Allocate, "cuMemAlloc_v2") &&
               find(&Free, "cuMemFree_v2") && find(&ToDevice, "cuMemcpyHtoD_v2") && find(&ToHost, "cuMemcpyDtoH_v2") &&
               find(&CopyPeer, "cuMemcpyPeer");
  }
  int (*Init)(unsigned) = nullptr;
  int (*Count)(int*) = nullptr;
  int (*CanAccess)(int*, int, int) = nullptr;
  int (*Retain)(CudaContext*, int) = nullptr;
  int (*Release)(int) = nullptr;
  int (*SetCurrent)(CudaContext) = nullptr;
  int (*Synchronize)() = nullptr;
  int (*EnablePeer)(CudaContext, unsigned) = nullptr;
  int (*Allocate)(Address*, size_t) = nullptr;
  int (*Free)(Address) = nullptr;
  int (*ToDevice)(Address, const void*, size_t) = nullptr;
  int (*ToHost)(void*, Address, size_t) = nullptr;
  int (*CopyPeer)(Address, CudaContext, Address, CudaContext, size_t) = nullptr;
  bool complete = false;
};

// What the caller and the thread that may be left behind share.
struct Shared {
  std::mutex mutex;
  std::condition_variable changed;
  CopyReport report;
  CopyFault at;  // what is being tried
  bool done = false;
};

// Another one for each pair and direction, and in each element.
uint32_t PatternOf(int from, int to, size_t i) {
  return (static_cast<uint32_t>(i) + 1) * 2654435761U ^ (static_cast<uint32_t>(from) << 8 | static_cast<uint32_t>(to));
}

class Copier {
 public:
  Copier(const Driver& driver, std::shared_ptr<Shared> shared) : driver_(driver), shared_(std::move(shared)) {}

  void Run() {
    int count = 0;
    if (driver_.Init(0) != 0 || driver_.Count(&count) != 0) return;  // said elsewhere
    for (int gpu = 0; gpu < count; ++gpu) {
      const bool works = TryAlone(gpu);
      gpus_.back().works = works;
    }
    for (int from = 0; from < count; ++from) {
      for (int to = 0; to < count; ++to) {
        const bool both = gpus_[static_cast<size_t>(from)].works && gpus_[static_cast<size_t>(to)].works;
        if (from != to && both) TryPair(from, to);
      }
    }
    for (int gpu = 0; gpu < count; ++gpu) Leave(gpu);
  }

 private:
  struct Gpu {
    CudaContext context = nullptr;
    Address memory = 0;
    bool retained = false;
    bool works = false;  // by itself
  };

  void Begin(int from, int to, bool direct) {
    const std::lock_guard<std::mutex> lock(shared_->mutex);
    shared_->at = {CopyFault::Kind::kHang, from, to, direct, ""};
    shared_->report.gpus += from == to ? 1 : 0;
    shared_->report.pairs += from == to ? 0 : 1;
    shared_->report.direct_pairs += direct ? 1 : 0;
  }
  bool Fail(CopyFault::Kind kind, std::string what) {
    const std::lock_guard<std::mutex> lock(shared_->mutex);
    CopyFault fault = shared_->at;
    fault.kind = kind;
    fault.what = std::move(what);
    shared_->report.faults.push_back(std::move(fault));
    return false;
  }
  bool Good(int result, const char* call) {
    return result == 0 || Fail(CopyFault::Kind::kError, absl::StrCat(call, ": CUDA error ", result));
  }

  bool Write(const Gpu& gpu, int from, int to) {
    host_.resize(kElements);
    for (size_t i = 0; i < kElements; ++i) host_[i] = PatternOf(from, to, i);
    return Good(driver_.SetCurrent(gpu.context), "cuCtxSetCurrent") &&
           Good(driver_.ToDevice(gpu.memory, host_.data(), kBytes), "cuMemcpyHtoD");
  }
  bool Compare(const Gpu& gpu, int from, int to) {
    host_.assign(kElements, 0);
    if (!Good(driver_.SetCurrent(gpu.context), "cuCtxSetCurrent") ||
        !Good(driver_.ToHost(host_.data(), gpu.memory, kBytes), "cuMemcpyDtoH")) {
      return false;
    }
    for (size_t i = 0; i < kElements; ++i) {
      const uint32_t expected = PatternOf(from, to, i);
      if (host_[i] == expected) continue;
      return Fail(CopyFault::Kind::kWrong, absl::StrCat("element ", i, " of ", kElements, " is ", absl::Hex(host_[i]),
                                                        " instead of ", absl::Hex(expected)));
    }
    return true;
  }

  bool TryAlone(int number) {
    Begin(number, number, false);
    Gpu& gpu = gpus_.emplace_back();
    if (!Good(driver_.Retain(&gpu.context, number), "cuDevicePrimaryCtxRetain")) return false;
    gpu.retained = true;
    return Good(driver_.SetCurrent(gpu.context), "cuCtxSetCurrent") &&
           Good(driver_.Allocate(&gpu.memory, kBytes), "cuMemAlloc") && Write(gpu, number, number) &&
           Compare(gpu, number, number);
  }

  bool TryPair(int from, int to) {
    int offered = 0;
    const Gpu &source = gpus_[static_cast<size_t>(from)], &sink = gpus_[static_cast<size_t>(to)];
    const bool direct = driver_.CanAccess(&offered, from, to) == 0 && offered != 0;
    Begin(from, to, direct);
    // The target must hold something else before.
    if (!Write(sink, to, to) || !Write(source, from, to)) return false;  // the source stays current
    if (direct) {
      const int enabled = driver_.EnablePeer(sink.context, 0);
      if (!Good(enabled == kPeerAlreadyEnabled ? 0 : enabled, "cuCtxEnablePeerAccess")) return false;
    }
    return Good(driver_.CopyPeer(sink.memory, sink.context, source.memory, source.context, kBytes), "cuMemcpyPeer") &&
           Good(driver_.Synchronize(), "cuCtxSynchronize") && Compare(sink, from, to);
  }

  void Leave(int number) {
    const Gpu& gpu = gpus_[static_cast<size_t>(number)];
    if (gpu.memory != 0 && driver_.SetCurrent(gpu.context) == 0) (void)driver_.Free(gpu.memory);
    if (gpu.retained) (void)driver_.Release(number);
  }

  const Driver driver_;
  const std::shared_ptr<Shared> shared_;
  std::vector<Gpu> gpus_;
  std::vector<uint32_t> host_;
};

}  // namespace

CopyReport TryCopies(const std::string& cuda, absl::Duration limit) {
  const Driver driver(cuda.c_str());
  CopyReport none;
  none.limit = limit;
  if (!driver.complete) return none;
  const auto shared = std::make_shared<Shared>();
  shared->report.limit = limit;
  std::thread([driver, shared] {
    Copier(driver, shared).Run();
    const std::lock_guard<std::mutex> lock(shared->mutex);
    shared->done = true;
    shared->changed.notify_all();
  }).detach();
  std::unique_lock<std::mutex> lock(shared->mutex);
  shared->changed.wait_for(lock, absl::ToChronoMilliseconds(limit), [&] { return shared->done; });
  CopyReport report = shared->report;
  if (!shared->done) report.faults.push_back(shared->at);
  return report;
}

}  // namespace doctor
