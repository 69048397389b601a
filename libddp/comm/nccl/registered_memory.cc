// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/nccl/registered_memory.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "ddp/collectives.h"
#include "libddp/base/log.h"
#include "libddp/comm/base/exchange.h"
#include "libddp/comm/gpu/device_moves.h"

namespace ddp {
namespace {

// Where the two kinds of kernels are compared: below, the symmetric ones have won wherever anybody looked.
constexpr size_t kCalibrationBytes[] = {size_t{1} << 20, size_t{4} << 20, size_t{16} << 20, size_t{64} << 20};
constexpr int kCalibrationRuns = 5;
// So much faster the plain kernels have to be: noise decides nothing.
constexpr double kMargin = 0.98;

// What ncclMemAlloc has given to groups of this process. Whether NCCL registers other memory is not known beforehand.
class NcclAllocations {
 public:
  static NcclAllocations& Get() {
    static auto* const all = new NcclAllocations;
    return *all;
  }
  void Add(const void* data, size_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    bytes_[static_cast<const char*>(data)] = bytes;
  }
  void Remove(const void* data) {
    const std::lock_guard<std::mutex> lock(mutex_);
    bytes_.erase(static_cast<const char*>(data));
  }
  bool Holds(const Allocation& memory) {
    const char* const begin = static_cast<const char*>(memory.data());
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto behind = bytes_.upper_bound(begin);
    if (behind == bytes_.begin()) return false;
    const auto& [data, bytes] = *std::prev(behind);
    return begin + memory.bytes() <= data + bytes;
  }

 private:
  std::mutex mutex_;
  std::map<const char*, size_t> bytes_;
};

}  // namespace

void RegisteredMemory::Table::Free(void* data) {
  const DeviceGuard guard(*setup.runtime, setup.device);
  NcclAllocations::Get().Remove(data);
  setup.api.MemFree(data);
}

RegisteredMemory::RegisteredMemory(std::shared_ptr<NcclCommunicator> communicator, ProcessGroup& control)
    : communicator_(std::move(communicator)), control_(control), table_(std::make_shared<Table>()) {
  table_->setup = communicator_->setup();
}

RegisteredMemory::~RegisteredMemory() {
  const std::lock_guard<std::mutex> lock(table_->mutex);
  table_->open = false;
  // What callers still hold they free themselves. Peers may have this memory mapped; that keeps it alive for them.
  for (const Block& block : table_->blocks) {
    if (block.returned) table_->Free(block.data);
  }
}

absl::StatusOr<Allocation> RegisteredMemory::Allocate(size_t bytes) {
  if (!communicator_->setup().features.windows || declined_) return AllocateOrdinary(bytes);
  absl::StatusOr<Block> block = Agree(bytes);
  if (!block.ok()) return block.status();
  const bool used = block->data != nullptr;
  if (!used) {
    block = Make(bytes);
    if (!block.ok()) return block.status();
    if (declined_) return AllocateOrdinary(bytes);
  }
  Allocation memory = HandOut(*block);  // an error from here on gives it back
  const NcclSetup& setup = communicator_->setup();
  const DeviceGuard guard(*setup.runtime, setup.device);
  if (!guard.status().ok()) return guard.status();
  // Its last owner may have let go of it while streams of the program still read and write it. cudaFree waits for them.
  if (used) {
    if (absl::Status s = setup.runtime->Drain(); !s.ok()) return s;
  }
  absl::StatusOr<OwnedStream> stream = MakeStream(*setup.runtime);
  if (!stream.ok()) return stream.status();
  if (absl::Status s = setup.runtime->Zero(block->data, bytes, stream->get()); !s.ok()) return s;
  if (absl::Status s = communicator_->WaitFor(stream->get(), absl::Now() + control_.timeout()); !s.ok()) return s;
  if (absl::Status s = Calibrate(*block); !s.ok()) return s;
  return memory;
}

// Where nothing is registered: sums on memory of ncclMemAlloc took up to twice as long then (NCCL 2.28.3).
absl::StatusOr<Allocation> RegisteredMemory::AllocateOrdinary(size_t bytes) {
  return AllocateTogether(control_, *communicator_->setup().runtime, communicator_->setup().device, bytes);
}

// All ranks ask for the same size; a block of it that all of them have back is taken again. Its data is null if there
// is none.
absl::StatusOr<RegisteredMemory::Block> RegisteredMemory::Agree(size_t bytes) {
  std::vector<uint64_t> returned;
  {
    const std::lock_guard<std::mutex> lock(table_->mutex);
    for (const Block& block : table_->blocks) {
      if (block.returned && block.bytes == bytes && returned.size() < 40) returned.push_back(block.id);
    }
  }
  absl::StatusOr<std::vector<std::string>> texts =
      GatherStrings(control_, absl::StrCat(bytes, " ", absl::StrJoin(returned, ",")));
  if (!texts.ok()) return texts.status();
  std::set<uint64_t> common(returned.begin(), returned.end());
  std::string first;
  for (size_t r = 0; r < texts->size(); ++r) {
    const std::pair<std::string, std::string> fields = absl::StrSplit((*texts)[r], absl::MaxSplits(' ', 1));
    if (r == 0) first = fields.first;
    if (fields.first != first) {
      return absl::FailedPreconditionError(
          absl::StrCat("ranks disagree about the size of an allocation: rank 0 asks for ", first, " bytes, rank ", r,
                       " for ", fields.first));
    }
    std::set<uint64_t> theirs, both;
    for (absl::string_view text : absl::StrSplit(fields.second, ',', absl::SkipEmpty())) {
      uint64_t id = 0;
      if (absl::SimpleAtoi(text, &id)) theirs.insert(id);
    }
    std::set_intersection(common.begin(), common.end(), theirs.begin(), theirs.end(), std::inserter(both, both.end()));
    common = std::move(both);
  }
  if (common.empty()) return Block{};
  const std::lock_guard<std::mutex> lock(table_->mutex);
  for (Block& block : table_->blocks) {
    if (block.id != *common.begin()) continue;
    block.returned = false;
    return block;
  }
  return absl::InternalError("a block that was returned is gone");
}

// Empty if NCCL declines to register memory.
absl::StatusOr<RegisteredMemory::Block> RegisteredMemory::Make(size_t bytes) {
  Block block;
  block.id = next_id_++;
  block.bytes = bytes;
  const DeviceGuard guard(*communicator_->setup().runtime, communicator_->setup().device);
  // Not through Call: failing for want of memory leaves the communicator as it is.
  const nccl::Result result = communicator_->setup().api.MemAlloc(&block.data, bytes);
  absl::Status status;
  if (result != nccl::kSuccess) {
    status = NoGpuMemory(bytes, absl::StrCat("ncclMemAlloc: ", communicator_->setup().api.GetErrorString(result)));
  }
  if (absl::Status s = ddp::Agree(control_, status); !s.ok()) {
    if (result == nccl::kSuccess) table_->Free(block.data);
    return s;
  }
  NcclAllocations::Get().Add(block.data, bytes);
  const absl::Status registering = Register(&block);
  if (!registering.ok() || !block.registered) {
    table_->Free(block.data);
    declined_ = registering.ok();
    return registering.ok() ? absl::StatusOr<Block>(Block{}) : registering;
  }
  const std::lock_guard<std::mutex> lock(table_->mutex);
  table_->blocks.push_back(block);
  return block;
}

absl::Status RegisteredMemory::Adopt(const Allocation& memory) {
  if (!communicator_->setup().features.windows) return absl::OkStatus();
  enum Source : uint8_t { kElsewhere, kNccl, kThisGroup };
  const Source mine = Owns(memory) ? kThisGroup : NcclAllocations::Get().Holds(memory) ? kNccl : kElsewhere;
  const absl::StatusOr<std::vector<Source>> all = Exchange(control_, mine);
  if (!all.ok()) return all.status();
  const auto count = [&](Source source) { return std::count(all->begin(), all->end(), source); };
  const auto ranks = static_cast<std::ptrdiff_t>(all->size());
  if (count(kThisGroup) == ranks) return absl::OkStatus();  // registered as far as it can be
  if (count(kThisGroup) > 0) {
    return absl::FailedPreconditionError(
        "some ranks register memory that this group has allocated, and others do not; give memory of one call of "
        "Allocate on all ranks");
  }
  // A rank whose memory NCCL declines would leave the others waiting in NCCL.
  if (count(kNccl) < ranks) return absl::OkStatus();
  Block block;
  block.id = next_id_++;
  block.data = memory.data();
  block.bytes = memory.bytes();
  block.adopted = memory;
  const DeviceGuard guard(*communicator_->setup().runtime, communicator_->setup().device);
  if (absl::Status s = Register(&block); !s.ok()) return s;
  const std::lock_guard<std::mutex> lock(table_->mutex);
  table_->blocks.push_back(std::move(block));
  return absl::OkStatus();
}

// All ranks register or none. That NCCL declines is no error, the memory is good without.
absl::Status RegisteredMemory::Register(Block* block) {
  nccl::Window window = nullptr;  // 2.28.9 may succeed without writing it
  const absl::Status done = communicator_->Call("ncclCommWindowRegister", [&](const nccl::Api& api, nccl::Comm comm) {
    return api.CommWindowRegister(comm, block->data, block->bytes, &window, nccl::kWinCollSymmetric);
  });
  const bool mine = done.ok() && window != nullptr;
  absl::StatusOr<std::vector<std::string>> texts = GatherStrings(control_, mine ? "yes" : "no");
  block->registered =
      texts.ok() && std::all_of(texts->begin(), texts->end(), [](const std::string& text) { return text == "yes"; });
  if (window != nullptr && (block->registered || !texts.ok())) communicator_->Keep(window);
  if (!texts.ok()) return texts.status();
  // NCCL sends from registered memory to other memory in vain.
  if (window != nullptr && !block->registered) {
    const absl::Status undone = communicator_->Call(
        "ncclCommWindowDeregister",
        [&](const nccl::Api& api, nccl::Comm comm) { return api.CommWindowDeregister(comm, window); });
    if (!undone.ok()) return undone;
  }
  if (!block->registered) {
    LogInfo("rank ", communicator_->setup().rank,
            ": NCCL does not register memory here; small reductions take longer: ", done.message());
  }
  return absl::OkStatus();
}

Allocation RegisteredMemory::HandOut(const Block& block) {
  std::shared_ptr<void> data(block.data, [table = table_, id = block.id](void* p) {
    const std::lock_guard<std::mutex> lock(table->mutex);
    if (!table->open) return table->Free(p);
    for (Block& b : table->blocks) {
      if (b.id == id) b.returned = true;
    }
  });
  return Allocation(std::move(data), block.bytes, communicator_->setup().device, block.registered);
}

template <typename Which>
bool RegisteredMemory::Any(const void* data, size_t bytes, Which which) const {
  const char* const begin = static_cast<const char*>(data);
  const std::lock_guard<std::mutex> lock(table_->mutex);
  return std::any_of(table_->blocks.begin(), table_->blocks.end(), [&](const Block& block) {
    const char* const from = static_cast<const char*>(block.data);
    return which(block) && begin >= from && begin + bytes <= from + block.bytes;
  });
}

bool RegisteredMemory::Owns(const Allocation& memory) const {
  return Any(memory.data(), memory.bytes(), [](const Block& block) { return block.adopted.data() == nullptr; });
}

bool RegisteredMemory::Holds(const Buffer& buffer) const {
  return Any(buffer.data, buffer.count * SizeOf(buffer.dtype), [](const Block& block) { return block.registered; });
}

ReducePath RegisteredMemory::PathOf(const Buffer& buffer, size_t total) const {
  if (!Holds(buffer)) return ReducePath::kPlain;
  return total < crossover_bytes() ? ReducePath::kSymmetric : ReducePath::kNotSymmetric;
}

size_t RegisteredMemory::crossover_bytes() const { return crossover_.load(std::memory_order_relaxed); }

// Sums zeros in place by either kind of kernel. The slowest rank's median counts.
absl::Status RegisteredMemory::Calibrate(const Block& block) {
  const size_t largest = *std::max_element(std::begin(kCalibrationBytes), std::end(kCalibrationBytes));
  if (!block.registered || control_.size() == 1 || measured_bytes_ >= std::min(block.bytes, largest)) {
    return absl::OkStatus();
  }
  absl::StatusOr<OwnedStream> stream = MakeStream(*communicator_->setup().runtime);
  if (!stream.ok()) return stream.status();
  size_t faster_until = 0;  // the largest size at which the symmetric kernels won
  for (const size_t bytes : kCalibrationBytes) {
    if (bytes > block.bytes) break;
    if (bytes <= measured_bytes_) {
      faster_until = bytes;
      continue;
    }
    measured_bytes_ = bytes;
    if (crossover_bytes() != SIZE_MAX) break;  // larger sums lose more
    absl::StatusOr<double> symmetric = TimeSum(block, bytes, true, stream->get());
    if (!symmetric.ok()) return symmetric.status();
    absl::StatusOr<double> plain = TimeSum(block, bytes, false, stream->get());
    if (!plain.ok()) return plain.status();
    absl::StatusOr<std::vector<std::string>> texts = GatherStrings(control_, absl::StrCat(*symmetric, " ", *plain));
    if (!texts.ok()) return texts.status();
    double slowest[2] = {0, 0};
    for (const std::string& text : *texts) {
      const std::pair<std::string, std::string> fields = absl::StrSplit(text, ' ');
      double a = 0, b = 0;
      if (!absl::SimpleAtod(fields.first, &a) || !absl::SimpleAtod(fields.second, &b)) {
        return absl::InternalError("a peer's times cannot be read");
      }
      slowest[0] = std::max(slowest[0], a);
      slowest[1] = std::max(slowest[1], b);
    }
    LogInfo("rank ", control_.rank(), ": a sum of ", bytes, " bytes takes ", absl::StrFormat("%.1f", slowest[0]),
            " us by symmetric kernels, ", absl::StrFormat("%.1f", slowest[1]), " us by others");
    if (slowest[1] > slowest[0] * kMargin) {
      faster_until = bytes;
    } else {
      // Somewhere between the last size that won and this one.
      const double between =
          std::sqrt(static_cast<double>(std::max(faster_until, bytes / 4)) * static_cast<double>(bytes));
      crossover_.store(static_cast<size_t>(between), std::memory_order_relaxed);
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<double> RegisteredMemory::TimeSum(const Block& block, size_t bytes, bool symmetric, void* stream) {
  DeviceRuntime& runtime = *communicator_->setup().runtime;
  const size_t count = bytes / sizeof(float);
  absl::StatusOr<OwnedEvent> begin = MakeEvent(runtime, true), end = MakeEvent(runtime, true);
  if (!begin.ok()) return begin.status();
  if (!end.ok()) return end.status();
  std::vector<double> times;
  for (int run = -2; run < kCalibrationRuns; ++run) {
    if (absl::Status s = runtime.Record(begin->get(), stream); !s.ok()) return s;
    const absl::Status called = communicator_->Call("ncclAllReduce", [&](const nccl::Api& api, nccl::Comm comm) {
      if (symmetric) return api.AllReduce(block.data, block.data, count, nccl::kFloat32, nccl::kSum, comm, stream);
      int op = 0;
      float one = 1;
      nccl::Result result = api.RedOpCreatePreMulSum(&op, &one, nccl::kFloat32, nccl::kScalarHostImmediate, comm);
      if (result != nccl::kSuccess) return result;
      result = api.AllReduce(block.data, block.data, count, nccl::kFloat32, op, comm, stream);
      const nccl::Result destroyed = api.RedOpDestroy(op, comm);
      return result == nccl::kSuccess ? destroyed : result;
    });
    if (!called.ok()) return called;
    if (absl::Status s = runtime.Record(end->get(), stream); !s.ok()) return s;
    if (absl::Status s = communicator_->WaitFor(stream, absl::Now() + control_.timeout()); !s.ok()) return s;
    absl::StatusOr<double> us = runtime.ElapsedUs(begin->get(), end->get());
    if (!us.ok()) return us.status();
    if (run >= 0) times.push_back(*us);
  }
  std::nth_element(times.begin(), times.begin() + kCalibrationRuns / 2, times.end());
  return times[kCalibrationRuns / 2];
}

}  // namespace ddp
