#include "tests/support/fake_devices.h"

#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "libddp/device/buffer_ops.h"
#include "libddp/device/cpu_hash.h"
#include "libddp/device/cpu_norm.h"
#include "libddp/device/cpu_reduce.h"
#include "libddp/device/cpu_scale.h"

namespace ddp::testing {
namespace {

class FakeStream {
 public:
  FakeStream() : thread_([this] { Run(); }) {}
  ~FakeStream() {
    Enqueue(nullptr);
    thread_.join();
  }
  void Enqueue(std::function<void()> what) {
    const std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back(std::move(what));
    changed_.notify_all();
  }

 private:
  void Run() {
    while (true) {
      std::function<void()> next;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [&] { return !queue_.empty(); });
        next = std::move(queue_.front());
        queue_.pop_front();
      }
      if (next == nullptr) return;
      next();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  std::thread thread_;
};

struct EventState {
  std::mutex mutex;
  std::condition_variable changed;
  int recorded = 0;
  std::set<int> finished;  // records; those on other streams may be overtaken by later ones

  bool Has(int number) const { return number == 0 || finished.count(number) > 0; }
};
using FakeEvent = std::shared_ptr<EventState>;  // streams may still refer to what has been destroyed

// Null is the legacy default stream, of which all threads have the same.
FakeStream& AsStream(void* stream) {
  static FakeStream* const legacy = new FakeStream;
  return stream == nullptr ? *legacy : *static_cast<FakeStream*>(stream);
}
const FakeEvent& AsEvent(void* event) { return *static_cast<FakeEvent*>(event); }

thread_local int current_device = 0;

}  // namespace

FakeDevices::~FakeDevices() = default;

void FakeDevices::SetCapturing(void* stream, bool capturing) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (capturing) {
    capturing_.insert(stream);
  } else {
    capturing_.erase(stream);
  }
}

void FakeDevices::Enqueue(void* stream, std::function<void()> what) { AsStream(stream).Enqueue(std::move(what)); }

void FakeDevices::Synchronize(void* stream) {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  Enqueue(stream, [&] {
    const std::lock_guard<std::mutex> lock(mutex);
    done = true;
    changed.notify_all();
  });
  std::unique_lock<std::mutex> lock(mutex);
  changed.wait(lock, [&] { return done; });
}

absl::Status FakeDevices::Check(Device device) {
  if (device.kind == Device::Kind::kCuda && device.index >= 0 && device.index < count_) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("GPU ", device.index, " is asked for, but there are ", count_));
}

absl::StatusOr<std::string> FakeDevices::Identity(Device device) {
  return identity.empty() ? absl::StrCat("fake:", device.index) : identity;
}

absl::Status FakeDevices::SetCurrent(Device device) {
  current_device = device.index;
  return absl::OkStatus();
}
int FakeDevices::Current() { return current_device; }

absl::StatusOr<Device> FakeDevices::DeviceOf(const void* data) {
  const std::lock_guard<std::mutex> lock(mutex_);
  auto after = memory_.upper_bound(static_cast<const char*>(data));
  if (after == memory_.begin()) return Device{};
  --after;
  return static_cast<const char*>(data) < after->first + after->second.first ? after->second.second : Device{};
}

absl::StatusOr<void*> FakeDevices::CreateStream() { return new FakeStream; }
void FakeDevices::DestroyStream(void* stream) { delete static_cast<FakeStream*>(stream); }
absl::StatusOr<void*> FakeDevices::CreateEvent(bool) { return new FakeEvent(std::make_shared<EventState>()); }
void FakeDevices::DestroyEvent(void* event) { delete static_cast<FakeEvent*>(event); }

absl::Status FakeDevices::Record(void* event, void* stream) {
  const FakeEvent state = AsEvent(event);
  int number = 0;
  {
    const std::lock_guard<std::mutex> lock(state->mutex);
    number = ++state->recorded;
  }
  Enqueue(stream, [state, number] {
    const std::lock_guard<std::mutex> lock(state->mutex);
    state->finished.insert(number);
    state->changed.notify_all();
  });
  return absl::OkStatus();
}

absl::Status FakeDevices::WaitEvent(void* stream, void* event) {
  const FakeEvent state = AsEvent(event);
  int number = 0;
  {
    const std::lock_guard<std::mutex> lock(state->mutex);
    number = state->recorded;
  }
  Enqueue(stream, [state, number] {
    std::unique_lock<std::mutex> lock(state->mutex);
    state->changed.wait(lock, [&] { return state->Has(number); });
  });
  return absl::OkStatus();
}

absl::StatusOr<bool> FakeDevices::Finished(void* event) {
  const FakeEvent& state = AsEvent(event);
  const std::lock_guard<std::mutex> lock(state->mutex);
  return state->Has(state->recorded);
}

absl::StatusOr<bool> FakeDevices::Capturing(void* stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return capturing_.count(stream) > 0;
}

absl::StatusOr<std::shared_ptr<void>> FakeDevices::Allocate(Device device, size_t bytes) {
  if (bytes > size_t{1} << 40) return absl::ResourceExhaustedError("out of memory");
  if (absl::Status s = allow(device, bytes); !s.ok()) return s;
  char* const data = static_cast<char*>(std::calloc(bytes, 1));
  const std::lock_guard<std::mutex> lock(mutex_);
  memory_[data] = {bytes, device};
  return std::shared_ptr<void>(data, [this](void* p) {
    {
      const std::lock_guard<std::mutex> locked(mutex_);
      memory_.erase(static_cast<char*>(p));
    }
    std::free(p);
  });
}
absl::StatusOr<std::shared_ptr<void>> FakeDevices::AllocatePinned(size_t bytes) {
  return std::shared_ptr<void>(std::calloc(bytes, 1), std::free);
}
absl::StatusOr<std::shared_ptr<void>> FakeDevices::RegisterHost(void* data, size_t) {
  return std::shared_ptr<void>(data, [](void*) {});
}
absl::StatusOr<void*> FakeDevices::AllocateOnStream(size_t bytes, void*) { return std::malloc(bytes); }
absl::Status FakeDevices::FreeOnStream(void* data, void* stream) {
  Enqueue(stream, [data] { std::free(data); });
  return absl::OkStatus();
}

absl::Status FakeDevices::Copy(void* to, const void* from, size_t bytes, void* stream) {
  Enqueue(stream, [=] { std::memcpy(to, from, bytes); });
  return absl::OkStatus();
}
absl::Status FakeDevices::Zero(void* data, size_t bytes, void* stream) {
  Enqueue(stream, [=] { std::memset(data, 0, bytes); });
  return absl::OkStatus();
}

absl::Status FakeDevices::Run(const Transform& transform, absl::Span<const TransformPiece> pieces, void* stream) {
  absl::StatusOr<CpuReduce> reduce = CpuReduce::Create({.in = transform.in,
                                                        .out = transform.out,
                                                        .postscale = transform.scale,
                                                        .check_nonfinite = transform.nonfinite != nullptr});
  if (!reduce.ok()) return reduce.status();
  const std::vector<TransformPiece> copy(pieces.begin(), pieces.end());
  Enqueue(stream, [reduce = *reduce, copy, transform] {
    for (const TransformPiece& piece : copy) {
      std::vector<char> nowhere(piece.out == nullptr ? piece.count * SizeOf(transform.out) : 0);
      void* const out = piece.out == nullptr ? nowhere.data() : piece.out;
      bool bad = piece.count > 0 && reduce(&piece.in, 1, &out, 1, piece.count);
      if (transform.factor != nullptr) bad = CpuScale(transform.out, out, piece.count, *transform.factor);
      if (bad && transform.nonfinite != nullptr) *transform.nonfinite = 1;
    }
  });
  return absl::OkStatus();
}

absl::Status FakeDevices::Commit(const uint32_t* failed, const uint32_t* found_inf, uint32_t* skip_step, void* stream) {
  Enqueue(stream, [=] {
    const auto set = [](const uint32_t* word) {
      return word != nullptr && std::atomic_ref<uint32_t>(*const_cast<uint32_t*>(word)).load() != 0;
    };
    *skip_step = set(failed) || set(found_inf) ? 1 : 0;
  });
  return absl::OkStatus();
}

absl::Status FakeDevices::NormPart(DType dtype, NormKind kind, absl::Span<const TransformPiece> pieces, double* result,
                                   void* stream) {
  const std::vector<TransformPiece> copy(pieces.begin(), pieces.end());
  Enqueue(stream, [dtype, kind, copy, result] {
    *result = 0;
    for (const TransformPiece& piece : copy) {
      const double part = CpuNormPart({const_cast<void*>(piece.in), piece.count, dtype, {}}, kind);
      *result = kind != NormKind::kMax ? *result + part : std::isnan(part) ? part : std::max(part, *result);
    }
  });
  return absl::OkStatus();
}

absl::Status FakeDevices::Hash(absl::Span<const TransformPiece> pieces, uint64_t* results, void* stream) {
  const std::vector<TransformPiece> copy(pieces.begin(), pieces.end());
  Enqueue(stream, [copy, results] {
    for (size_t k = 0; k < copy.size(); ++k) results[k] = CpuHash(copy[k].in, copy[k].count);
  });
  return absl::OkStatus();
}

absl::Status FakeDevices::UpdateScale(const ScaleRule& rule, ScalerNumbers* numbers, void* stream) {
  Enqueue(stream, [rule, numbers] { ddp::UpdateScale(rule, *numbers); });
  return absl::OkStatus();
}

}  // namespace ddp::testing
