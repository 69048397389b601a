// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/nccl/communicator.h"

#include <time.h>

#include <algorithm>
#include <chrono>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "libddp/base/failed_ranks.h"
#include "libddp/base/log.h"
#include "libddp/base/spin.h"
#include "libddp/comm/nccl/advice.h"
#include "libddp/comm/nccl/run_under.h"

namespace ddp {
namespace {

// What Abort grants to calls that run, and the destructor to NCCL's own clean-up.
constexpr int64_t kCallGraceNs = 1'000'000'000;
constexpr std::chrono::seconds kDestroyGrace{10};
// Small enough for the low-latency protocols, and large enough for all channels of the fast ones.
constexpr size_t kWarmUpBytes[] = {8, size_t{512} << 10, size_t{16} << 20};
// With more ranks than this every pair is too many to connect in advance.
constexpr int kMaxPairwise = 64;

// From here on an abort also ends what is queued up behind an operation.
constexpr int kFirstToEndTheQueue = 22800;

void Nap() {
  const timespec nap{0, 1'000'000};
  nanosleep(&nap, nullptr);
}

}  // namespace

// Where the warm-up fails its stream may not be through: it goes first, once the abort has released it, and what it
// works on after it.
struct NcclCommunicator::Place {
  std::vector<int32_t> ones, sums;
  std::shared_ptr<void> buffer;
  OwnedStream stream;
};

absl::StatusOr<std::shared_ptr<NcclCommunicator>> NcclCommunicator::Create(
    const NcclSetup& setup, absl::Time deadline, const std::function<absl::Status()>& interrupted,
    const std::function<void(const absl::Status&)>& before_abort) {
  for (const std::string& problem : nccl::CheckEnvironment()) LogWarn("rank ", setup.rank, ": ", problem);
  std::shared_ptr<NcclCommunicator> communicator(new NcclCommunicator(setup));
  auto place = std::make_shared<Place>();
  const absl::Status status = RunUnder(
      deadline, interrupted,
      absl::StrCat("rank ", setup.rank, ": NCCL ", setup.features.version_text(), " did not connect ", setup.size,
                   " ranks in time (DDP_TIMEOUT sets the limit in seconds); a rank is stuck, ranks cannot reach each "
                   "other by TCP (NCCL_SOCKET_IFNAME), or GPUs cannot reach each other's memory (an IOMMU or PCIe ACS "
                   "in between: try NCCL_P2P_DISABLE=1); NCCL_DEBUG=INFO says how far it came"),
      [communicator, place]() mutable {
        absl::Status result = NameRank(communicator->setup_.rank, "connecting NCCL", communicator->Connect(*place));
        // Nobody waits any more: what has come too late goes away.
        if (communicator->aborted_) communicator->Abort();
        place.reset();
        return result;
      });
  if (status.ok()) return communicator;
  before_abort(status);
  // Its thread may still be waiting for a kernel, and the abort for a GPU that does not answer.
  RunUnder(
      absl::Now() + absl::FromChrono(kDestroyGrace), [] { return absl::OkStatus(); }, "ncclCommAbort",
      [communicator, place = std::move(place)]() mutable {
        communicator->Abort();
        place.reset();
        return absl::OkStatus();
      })
      .IgnoreError();
  return status;
}

absl::Status NcclCommunicator::Begin() {
  if (setup_.given != nullptr) return absl::OkStatus();
  nccl::Config config;
  nccl::Comm comm = nullptr;
  const nccl::Result result = setup_.api.CommInitRankConfig(&comm, setup_.size, setup_.id, setup_.rank, &config);
  if (result != nccl::kSuccess) return ToStatus(result, "ncclCommInitRankConfig", nullptr);
  comm_ = comm;
  return absl::OkStatus();
}

absl::Status NcclCommunicator::Connect(Place& place) {
  const DeviceGuard guard(*setup_.runtime, setup_.device);
  if (!guard.status().ok()) return guard.status();
  if (absl::Status s = Begin(); !s.ok()) return s;
  const size_t most =
      std::min(setup_.warm_up_limit, *std::max_element(std::begin(kWarmUpBytes), std::end(kWarmUpBytes)));
  place.ones.assign(most / sizeof(int32_t), 1);
  place.sums.resize(most / sizeof(int32_t));
  absl::StatusOr<std::shared_ptr<void>> buffer =
      setup_.runtime->Allocate(setup_.device, std::max(most, 2 * static_cast<size_t>(setup_.size)));
  if (!buffer.ok()) return buffer.status();
  place.buffer = *std::move(buffer);
  absl::StatusOr<OwnedStream> stream = MakeStream(*setup_.runtime);
  if (!stream.ok()) return stream.status();
  place.stream = *std::move(stream);
  return WarmUp(place);
}

// Sums of ones at several sizes, then one byte from each to each; the sums are looked at.
absl::Status NcclCommunicator::WarmUp(Place& place) {
  for (const size_t bytes : kWarmUpBytes) {
    if (absl::Status s = Exercise(place, std::min(bytes, setup_.warm_up_limit)); !s.ok()) return s;
  }
  void* const stream = place.stream.get();
  char* const buffer = static_cast<char*>(place.buffer.get());
  if (setup_.size > kMaxPairwise) return absl::OkStatus();
  const absl::Status called = Call("connecting all pairs of ranks", [&](const nccl::Api& api, nccl::Comm comm) {
    nccl::Result result = api.GroupStart();
    for (int r = 0; r < setup_.size && result == nccl::kSuccess; ++r) {
      if (r == setup_.rank) continue;
      result = api.Send(buffer + r, 1, nccl::kUint8, r, comm, stream);
      if (result == nccl::kSuccess) {
        result = api.Recv(buffer + setup_.size + r, 1, nccl::kUint8, r, comm, stream);
      }
    }
    const nccl::Result end = api.GroupEnd();
    return result == nccl::kSuccess ? end : result;
  });
  return called.ok() ? WaitFor(stream, absl::InfiniteFuture()) : called;
}

absl::Status NcclCommunicator::Exercise(Place& place, size_t bytes) {
  DeviceRuntime& runtime = *setup_.runtime;
  void* const stream = place.stream.get();
  void* const buffer = place.buffer.get();
  const size_t count = bytes / sizeof(int32_t);
  if (absl::Status s = runtime.Copy(buffer, place.ones.data(), bytes, stream); !s.ok()) return s;
  if (absl::Status s = Call("the first ncclAllReduce",
                            [&](const nccl::Api& api, nccl::Comm comm) {
                              return api.AllReduce(buffer, buffer, count, nccl::kInt32, nccl::kSum, comm, stream);
                            });
      !s.ok()) {
    return s;
  }
  if (absl::Status s = WaitFor(stream, absl::InfiniteFuture()); !s.ok()) return s;
  if (absl::Status s = runtime.Copy(place.sums.data(), buffer, bytes, stream); !s.ok()) return s;
  if (absl::Status s = WaitFor(stream, absl::InfiniteFuture()); !s.ok()) return s;
  const auto end = place.sums.begin() + static_cast<std::ptrdiff_t>(count);
  const auto wrong = std::find_if(place.sums.begin(), end, [&](int32_t x) { return x != setup_.size; });
  if (wrong == end) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat(
      "rank ", setup_.rank, ": NCCL ", setup_.features.version_text(), " summed ", setup_.size, " ones to ", *wrong,
      " at element ", wrong - place.sums.begin(), " of ", count,
      ": GPUs read each other's memory wrongly (an IOMMU, PCIe ACS or a broken driver): try NCCL_P2P_DISABLE=1"));
}

absl::Status NcclCommunicator::WaitFor(void* stream, absl::Time deadline) {
  DeviceRuntime& runtime = *setup_.runtime;
  absl::StatusOr<OwnedEvent> done = MakeEvent(runtime);
  if (!done.ok()) return done.status();
  if (absl::Status s = runtime.Record(done->get(), stream); !s.ok()) return s;
  while (true) {
    const absl::StatusOr<bool> finished = runtime.Finished(done->get());
    if (!finished.ok()) return finished.status();
    if (*finished) return absl::OkStatus();
    if (aborted_) return absl::AbortedError(absl::StrCat("rank ", setup_.rank, ": the NCCL communicator was aborted"));
    if (absl::Status s = Health(); !s.ok()) return s;
    if (absl::Now() >= deadline) {
      return absl::DeadlineExceededError(absl::StrCat("rank ", setup_.rank, ": a rank did not come in time"));
    }
    CpuRelax();
  }
}

absl::Status NcclCommunicator::Call(absl::string_view what,
                                    absl::FunctionRef<nccl::Result(const nccl::Api&, nccl::Comm)> call) {
  calls_.fetch_add(1, std::memory_order_seq_cst);
  if (aborted_.load(std::memory_order_seq_cst)) {
    calls_.fetch_sub(1, std::memory_order_release);
    return absl::AbortedError(absl::StrCat("rank ", setup_.rank, ": the NCCL communicator was aborted"));
  }
  const nccl::Comm comm = comm_.load(std::memory_order_acquire);
  const nccl::Result result = call(setup_.api, comm);
  absl::Status status = result == nccl::kSuccess ? absl::OkStatus() : ToStatus(result, what, comm);
  calls_.fetch_sub(1, std::memory_order_release);
  return status;
}

absl::Status NcclCommunicator::Health() {
  const std::unique_lock<std::mutex> lock(health_, std::try_to_lock);
  const nccl::Comm comm = comm_.load(std::memory_order_acquire);
  if (!lock.owns_lock() || comm == nullptr || aborted_) return absl::OkStatus();
  nccl::Result error = nccl::kSuccess;
  const nccl::Result result = setup_.api.CommGetAsyncError(comm, &error);
  if (result != nccl::kSuccess) return ToStatus(result, "ncclCommGetAsyncError", comm);
  return error == nccl::kInProgress ? absl::OkStatus() : ToStatus(error, "an operation", comm);
}

void NcclCommunicator::Abort() {
  aborted_.store(true, std::memory_order_seq_cst);
  // A call that waits for a peer returns only once it is aborted; one that does not is best left to finish.
  const int64_t until = NowNs() + kCallGraceNs;
  while (calls_.load(std::memory_order_acquire) > 0 && NowNs() < until) Nap();
  nccl::Comm comm = nullptr;
  {
    const std::lock_guard<std::mutex> lock(health_);
    comm = comm_.exchange(nullptr);
    // So that nobody returns to the program before it can be seen there.
    if (comm != nullptr && setup_.given != nullptr) *setup_.given = nullptr;
  }
  if (comm == nullptr) return;
  // Kernels are told at once. The rest may take for ever: while a captured graph lives, NCCL waits for its end.
  const DeviceGuard guard(*setup_.runtime, setup_.device);
  const nccl::Result result = setup_.api.CommAbort(comm);
  if (result != nccl::kSuccess) {
    LogWarn("rank ", setup_.rank, ": ncclCommAbort: ", setup_.api.GetErrorString(result));
  }
}

std::string NcclCommunicator::WhyStuck() const {
  const nccl::Features& features = setup_.features;
  if (features.symmetric_abort || (!features.windows && features.version >= kFirstToEndTheQueue)) return "";
  const std::string nccl = absl::StrCat("NCCL ", features.version_text());
  if (!features.windows) {  // seen with 2.18.3 and 2.22.3
    return absl::StrCat(nccl, " may not end what is queued up behind an operation that is aborted, 2.28 and later do");
  }
  return absl::StrCat(
      nccl,
      " cannot abort sums on memory of Allocate, 2.29.2 and later can; NCCL_WIN_ENABLE=0 makes this one "
      "able to, but small sums slower");
}

void NcclCommunicator::Destroy() {
  nccl::Comm comm = nullptr;
  const bool aborting = aborted_.exchange(true);  // no more calls
  while (true) {
    {
      const std::lock_guard<std::mutex> lock(health_);
      if (comm_ == nullptr) return;
      if (!aborting && (comm = comm_.exchange(nullptr)) != nullptr) break;
    }
    Nap();  // Abort takes it after its grace, and needs the lock
  }
  // It may wait for peers that do not come; then it is left to itself.
  const absl::Status done = RunUnder(
      absl::Now() + absl::FromChrono(kDestroyGrace), [] { return absl::OkStatus(); }, "ncclCommDestroy",
      [setup = setup_, comm, windows = std::move(windows_)] {
        const DeviceGuard guard(*setup.runtime, setup.device);
        for (const nccl::Window window : windows) setup.api.CommWindowDeregister(comm, window);
        if (setup.given != nullptr) return absl::OkStatus();
        return setup.api.CommDestroy(comm) == nccl::kSuccess ? absl::OkStatus() : absl::InternalError("");
      });
  if (absl::IsDeadlineExceeded(done) && setup_.given != nullptr) *setup_.given = nullptr;
}

absl::Status NcclCommunicator::ToStatus(nccl::Result result, absl::string_view what, nccl::Comm comm) const {
  if (result == nccl::kInProgress && setup_.given != nullptr) {
    return absl::InvalidArgumentError(absl::StrCat(
        "rank ", setup_.rank, ": ContextOptions::nccl_comm is nonblocking; make it with ncclConfig_t::blocking = 1"));
  }
  return nccl::ToStatus(setup_.api, result, comm, what, setup_.rank, setup_.features.version);
}

}  // namespace ddp
