// SPDX-License-Identifier: Apache-2.0
#include "tests/support/fake_devices.h"

#include <malloc.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/support/fake_memory.h"

namespace ddp::testing {
namespace {

thread_local int current_device = kNowhere;
std::atomic<int> streams_held{0}, events_held{0};

// Simulated GPUs compute on the processors, of which there may be fewer than threads: who asks again and again whether
// they are through gives its processor to them, as one that looks at a real GPU need not.
void LetGpusRun(bool finished) {
  thread_local int in_vain = 0;
  in_vain = finished ? 0 : in_vain + 1;
  if (finished) return;
  if (in_vain < 20) {
    std::this_thread::yield();
  } else {
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

// All streams there are.
class Streams {
 public:
  static Streams& Get() {
    static auto* const streams = new Streams;
    return *streams;
  }
  FakeStream* Start(bool late) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return all_.emplace_back(FakeStream::Start(current_device, late));
  }
  void End(FakeStream* stream) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      all_.erase(std::find(all_.begin(), all_.end(), stream));
    }
    stream->End();
  }
  // The current device's default stream, which all threads share.
  FakeStream& Default() {
    const std::lock_guard<std::mutex> lock(mutex_);
    FakeStream*& mine = default_[current_device];
    if (mine == nullptr) mine = all_.emplace_back(FakeStream::Start(current_device, true));
    return *mine;
  }
  // Waits for all that the current device's streams hold now.
  void Drain() {
    std::vector<std::pair<std::shared_ptr<FakeStream>, uint64_t>> busy;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      for (FakeStream* const stream : all_) {
        if (stream->device() == current_device) busy.emplace_back(stream->shared_from_this(), stream->enqueued());
      }
    }
    for (const auto& [stream, position] : busy) stream->Await(position);
  }
  // Lets go of `memory` when all that the device's streams hold now has run.
  void Outlive(int device, const std::shared_ptr<void>& memory) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (FakeStream* const stream : all_) {
      if (device == kHost || stream->device() == device) stream->EnqueueHere([memory] {});
    }
  }

 private:
  std::mutex mutex_;
  std::vector<FakeStream*> all_;
  std::map<int, FakeStream*> default_;
};

FakeStream& AsStream(void* stream) {
  return stream == nullptr ? Streams::Get().Default() : *static_cast<FakeStream*>(stream);
}
// Freed when the device's streams have done what they have been given by then, as cudaFree does.
std::shared_ptr<void> OwnMemory(void* data, size_t bytes, int device, void (*free)(void*)) {
  MemoryMap::Get().Add(data, bytes, device);
  return std::shared_ptr<void>(data, [device, free](void* p) {
    MemoryMap::Get().Remove(p);
    Streams::Get().Outlive(device, std::shared_ptr<void>(p, free));
  });
}

using EventHandle = std::shared_ptr<FakeEvent>;
const EventHandle& AsEvent(void* event) { return *static_cast<EventHandle*>(event); }

}  // namespace

// The start of a communicator works on 16 MiB. The heap keeps that from job to job, where pages made anew would take
// most of a test's time.
FakeDevices::FakeDevices(int count)
    : count_(count),
      streams_made_(static_cast<size_t>(count)),
      used_(static_cast<size_t>(count)),
      blocks_running_(static_cast<size_t>(count)) {
  mallopt(M_ARENA_MAX, 1);
  mallopt(M_MMAP_THRESHOLD, 1 << 30);
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
}
FakeDevices::~FakeDevices() = default;

FakeDevices::Held FakeDevices::held() {
  return {.streams = streams_held, .events = events_held, .memory = MemoryMap::Get().size()};
}

std::vector<std::string> FakeDevices::complaints() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return complaints_;
}

absl::Status FakeDevices::Complain(absl::string_view call, const std::string& what) {
  const std::string text = absl::StrCat(call, ": ", what);
  const std::lock_guard<std::mutex> lock(mutex_);
  complaints_.push_back(text);
  return absl::FailedPreconditionError(text);
}

absl::Status FakeDevices::Enter(absl::string_view call, int device) {
  if (device < 0 || device >= count_) return Complain(call, absl::StrCat("GPU ", device, " of ", count_));
  return fail(call, device);
}

absl::Status FakeDevices::EnterOn(absl::string_view call, void* stream) {
  const int device = stream == nullptr ? current_device : AsStream(stream).device();
  if (device == current_device) return Enter(call, device);
  return Complain(call, absl::StrCat("on a stream of GPU ", device, " while GPU ", current_device, " is current"));
}

// A thread that has made no GPU current is CUDA's on GPU 0, and whatever it calls starts that GPU for the process.
absl::Status FakeDevices::OnAnyGpu(absl::string_view call) {
  return current_device != kNowhere ? absl::OkStatus()
                                    : Complain(call, "no GPU is current: the call would start GPU 0");
}

absl::Status FakeDevices::Reach(absl::string_view call, const void* data, size_t bytes) {
  if (data == nullptr || bytes == 0) return absl::OkStatus();
  const int where = MemoryMap::Get().DeviceOf(data, bytes);
  if (where == current_device || where == kHost) return absl::OkStatus();
  if (where == kNowhere && host_memory_is_theirs) return absl::OkStatus();
  return Complain(call, absl::StrCat("GPU ", current_device, " does not reach the memory: it is ",
                                     where == kNowhere ? "the host's, and not registered" : "another GPU's"));
}

absl::Status FakeDevices::ReachPieces(absl::string_view call, absl::Span<const TransformPiece> pieces, size_t in_size,
                                      size_t out_size) {
  absl::Status status;
  for (const TransformPiece& piece : pieces) {
    status.Update(Reach(call, piece.in, piece.count * in_size));
    status.Update(Reach(call, piece.out, piece.count * out_size));
  }
  return status;
}

// --- what tests do --------------------------------------------------------------------------------------------------

void FakeDevices::Enqueue(void* stream, std::function<void()> what) { AsStream(stream).Enqueue(std::move(what)); }
void FakeDevices::Synchronize(void* stream) {
  FakeStream& fake = AsStream(stream);
  fake.Await(fake.enqueued());
}
void FakeDevices::RunEarly(void* stream) { AsStream(stream).RunEarly(); }

absl::Status FakeDevices::BeginCapture(void* stream) { return AsStream(stream).BeginCapture(); }
absl::StatusOr<std::shared_ptr<FakeGraph>> FakeDevices::EndCapture(void* stream) {
  return AsStream(stream).EndCapture();
}
void FakeDevices::Launch(const std::shared_ptr<FakeGraph>& graph, void* stream) {
  FakeGraph::Launch(graph, AsStream(stream));
}

void FakeDevices::AddMemory(void* data, size_t bytes) { MemoryMap::Get().Add(data, bytes, current_device); }
void FakeDevices::FreeMemory(void* data) {
  const int device = MemoryMap::Get().DeviceOf(data, 1);
  MemoryMap::Get().Remove(data);
  Streams::Get().Outlive(device, std::shared_ptr<void>(data, std::free));
}

// --- devices, streams, events ---------------------------------------------------------------------------------------

absl::Status FakeDevices::Check(Device device) {
  if (device.kind == Device::Kind::kCuda && device.index >= 0 && device.index < count_) {
    Use(device.index);
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(absl::StrCat("GPU ", device.index, " is asked for, but there are ", count_));
}

absl::StatusOr<std::string> FakeDevices::Identity(Device device) {
  if (device.index < 0 || device.index >= count_) return Check(device);
  return identity(device.index);
}

absl::Status FakeDevices::SetCurrent(Device device) {
  current_device = device.index;
  Use(device.index);
  return absl::OkStatus();
}

void FakeDevices::Use(int device) {
  if (device < 0 || device >= count_) return;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (used_[static_cast<size_t>(device)]) return;
    used_[static_cast<size_t>(device)] = true;
  }
  first_use(device);
}

bool FakeDevices::InUse(int index) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return index >= 0 && index < count_ && used_[static_cast<size_t>(index)];
}
int FakeDevices::ThreadDevice() { return current_device; }
int FakeDevices::Current() { return ThreadDevice(); }

absl::StatusOr<Device> FakeDevices::DeviceOf(const void* data) {
  const int device = MemoryMap::Get().DeviceOf(data, 1);
  if (device == kHost || device == kNowhere) return Device{};
  return Device{Device::Kind::kCuda, static_cast<int16_t>(device)};
}

absl::StatusOr<void*> FakeDevices::CreateStream() {
  if (absl::Status s = Enter("CreateStream", current_device); !s.ok()) return s;
  const std::lock_guard<std::mutex> lock(mutex_);
  ++streams_held;
  return Streams::Get().Start(late(current_device, streams_made_[static_cast<size_t>(current_device)]++));
}
void FakeDevices::DestroyStream(void* stream) {
  OnAnyGpu("DestroyStream").IgnoreError();
  Streams::Get().End(static_cast<FakeStream*>(stream));
  --streams_held;
}
absl::StatusOr<void*> FakeDevices::CreateEvent(bool) {
  if (absl::Status s = Enter("CreateEvent", current_device); !s.ok()) return s;
  auto* const event = new EventHandle(std::make_shared<FakeEvent>());
  (*event)->device = current_device;
  ++events_held;
  return event;
}
void FakeDevices::DestroyEvent(void* event) {
  OnAnyGpu("DestroyEvent").IgnoreError();
  AsEvent(event)->Destroy();
  delete static_cast<EventHandle*>(event);
  --events_held;
}

absl::Status FakeDevices::Record(void* event, void* stream) {
  if (absl::Status s = EnterOn("Record", stream); !s.ok()) return s;
  if (AsEvent(event)->device != current_device) return Complain("Record", "an event of another GPU");
  return AsEvent(event)->Record(AsStream(stream));
}
absl::Status FakeDevices::RecordEachReplay(void* event, void* stream) {
  if (absl::Status s = EnterOn("RecordEachReplay", stream); !s.ok()) return s;
  if (AsEvent(event)->device != current_device) return Complain("RecordEachReplay", "an event of another GPU");
  if (!AsStream(stream).AddRecord(AsEvent(event))) {
    return Complain("RecordEachReplay", "on a stream that does not capture");
  }
  Enqueue(stream, [recorded = AsEvent(event)] { recorded->CountReplay(); });
  return absl::OkStatus();
}
absl::Status FakeDevices::WaitEvent(void* stream, void* event) {
  if (absl::Status s = EnterOn("WaitEvent", stream); !s.ok()) return s;
  const absl::Status status = FakeEvent::Wait(AsStream(stream), AsEvent(event));
  return status.ok() ? status : Complain("WaitEvent", std::string(status.message()));
}
absl::Status FakeDevices::WaitEachReplay(void* stream, void* event) {
  if (absl::Status s = EnterOn("WaitEachReplay", stream); !s.ok()) return s;
  if (AsStream(stream).AddWait(AsEvent(event))) return absl::OkStatus();
  return Complain("WaitEachReplay", "on a stream that does not capture");
}
absl::StatusOr<bool> FakeDevices::Finished(void* event) {
  if (absl::Status s = OnAnyGpu("Finished"); !s.ok()) return s;
  if (absl::Status s = Enter("Finished", AsEvent(event)->device); !s.ok()) return s;
  absl::StatusOr<bool> finished = AsEvent(event)->Finished();
  if (finished.ok()) {
    LetGpusRun(*finished);
    return finished;
  }
  return Complain("Finished", std::string(finished.status().message()));
}
absl::StatusOr<double> FakeDevices::ElapsedUs(void* begin, void* end) {
  if (absl::Status s = OnAnyGpu("ElapsedUs"); !s.ok()) return s;
  if (absl::Status s = Enter("ElapsedUs", AsEvent(begin)->device); !s.ok()) return s;
  if (!AsEvent(begin)->recorded() || !AsEvent(end)->recorded()) return absl::InternalError("an event has no time");
  // Of a replay that has begun and not come to `end` yet.
  if (AsEvent(begin)->replays() > AsEvent(end)->replays()) return -elapsed_us();
  return elapsed_us();
}
absl::Status FakeDevices::Drain() {
  if (absl::Status s = Enter("Drain", current_device); !s.ok()) return s;
  Streams::Get().Drain();
  return absl::OkStatus();
}
absl::StatusOr<uint64_t> FakeDevices::CaptureOf(void* stream) {
  if (absl::Status s = EnterOn("CaptureOf", stream); !s.ok()) return s;
  return AsStream(stream).capture();
}
absl::StatusOr<bool> FakeDevices::Capturing(void* stream) {
  if (absl::Status s = EnterOn("Capturing", stream); !s.ok()) return s;
  return AsStream(stream).capturing();
}

// --- memory ---------------------------------------------------------------------------------------------------------

absl::StatusOr<std::shared_ptr<void>> FakeDevices::Allocate(Device device, size_t bytes) {
  if (absl::Status s = Enter("Allocate", device.index); !s.ok()) return s;
  if (bytes > size_t{1} << 40) return absl::ResourceExhaustedError("out of memory");
  if (absl::Status s = allow(device, bytes); !s.ok()) return s;
  return OwnMemory(std::calloc(bytes, 1), bytes, device.index, std::free);
}
absl::StatusOr<std::shared_ptr<void>> FakeDevices::AllocatePinned(size_t bytes) {
  if (absl::Status s = Enter("AllocatePinned", current_device); !s.ok()) return s;
  return OwnMemory(std::calloc(bytes, 1), bytes, kHost, std::free);
}
absl::StatusOr<std::shared_ptr<void>> FakeDevices::RegisterHost(void* data, size_t bytes) {
  if (absl::Status s = Enter("RegisterHost", current_device); !s.ok()) return s;
  return OwnMemory(data, bytes, kHost, [](void*) {});
}

// Within this process.
absl::StatusOr<DeviceRuntime::SharedMemory> FakeDevices::ShareMemory(Device device, void* data) {
  if (absl::Status s = Enter("ShareMemory", device.index); !s.ok()) return s;
  if (MemoryMap::Get().DeviceOf(data, kSharedAlign) != device.index) {
    return Complain("ShareMemory", "the memory is not this GPU's, or smaller than kSharedAlign");
  }
  SharedMemory shared;
  std::memcpy(shared.bytes, &data, sizeof data);
  return shared;
}
absl::StatusOr<std::shared_ptr<void>> FakeDevices::OpenMemory(const SharedMemory& shared) {
  if (absl::Status s = Enter("OpenMemory", current_device); !s.ok()) return s;
  void* data = nullptr;
  std::memcpy(&data, shared.bytes, sizeof data);
  const int other = MemoryMap::Get().DeviceOf(data, kSharedAlign), device = current_device;
  if (other == kNowhere) return Complain("OpenMemory", "the memory is gone");
  if (!linked(device, other)) return absl::FailedPreconditionError("these GPUs do not reach each other");
  const std::lock_guard<std::mutex> lock(mutex_);
  ++opened_[{device, other}];
  return std::shared_ptr<void>(data, [this, device, other](void*) {
    const std::lock_guard<std::mutex> locked(mutex_);
    --opened_[{device, other}];
  });
}

// Not zeroed.
absl::StatusOr<void*> FakeDevices::AllocateOnStream(size_t bytes, void* stream) {
  if (absl::Status s = EnterOn("AllocateOnStream", stream); !s.ok()) return s;
  void* const data = std::malloc(bytes);
  std::memset(data, 0x5a, bytes);
  MemoryMap::Get().Add(data, bytes, current_device);
  return data;
}
// In a capture the memory is the graph's.
absl::Status FakeDevices::FreeOnStream(void* data, void* stream) {
  if (absl::Status s = EnterOn("FreeOnStream", stream); !s.ok()) return s;
  MemoryMap::Get().Remove(data);
  const std::shared_ptr<void> owner(data, std::free);
  Enqueue(stream, [owner] {});
  return absl::OkStatus();
}

// As CUDA does, with memory of the host's that is not registered the call returns when that has been read or written.
absl::Status FakeDevices::Copy(void* to, const void* from, size_t bytes, void* stream) {
  if (absl::Status s = EnterOn("Copy", stream); !s.ok()) return s;
  const auto reaches = [&](const void* data) {
    return host_memory_is_theirs || MemoryMap::Get().DeviceOf(data, bytes) != kNowhere;
  };
  bool garbled = false;
  for (const void* const data : {static_cast<const void*>(to), from}) {
    const int where = MemoryMap::Get().DeviceOf(data, bytes);
    if (where == kNowhere || where == kHost || where == current_device) continue;
    garbled = garbles(current_device, where);
    const std::lock_guard<std::mutex> lock(mutex_);
    if (opened_[{current_device, where}] == 0) complaints_.push_back("Copy: another GPU's memory, which is not open");
  }
  const bool reaches_to = reaches(to), reaches_from = reaches(from);
  if (bytes == 0) return absl::OkStatus();
  if (reaches_to && reaches_from) {
    Enqueue(stream, [=] {
      std::memcpy(to, from, bytes);
      if (garbled) static_cast<char*>(to)[bytes / 2] ^= 1;
    });
    return absl::OkStatus();
  }
  if (AsStream(stream).capturing())
    return Complain("Copy", "a capture with memory of the host's that is not registered");
  if (reaches_to) {
    const char* const begin = static_cast<const char*>(from);
    Enqueue(stream,
            [to, bytes, copy = std::vector<char>(begin, begin + bytes)] { std::memcpy(to, copy.data(), bytes); });
    return absl::OkStatus();
  }
  Enqueue(stream, [=] { std::memcpy(to, from, bytes); });
  Synchronize(stream);
  return absl::OkStatus();
}
absl::Status FakeDevices::Zero(void* data, size_t bytes, void* stream) {
  absl::Status status = EnterOn("Zero", stream);
  if (status.ok()) status = Reach("Zero", data, bytes);
  if (status.ok()) Enqueue(stream, [=] { std::memset(data, 0, bytes); });
  return status;
}

}  // namespace ddp::testing
