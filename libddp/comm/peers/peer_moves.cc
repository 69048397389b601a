// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/peers/peer_moves.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "libddp/base/log.h"
#include "libddp/base/owner_process.h"
#include "libddp/base/process_id.h"
#include "libddp/comm/base/exchange.h"
#include "libddp/comm/gpu/large_sum_moves.h"
#include "libddp/comm/ring/staged_call.h"
#include "libddp/comm/ring/stopwatch.h"

namespace ddp {
namespace {

// What is compared, and what is checked: an odd number of elements, over two chunks and a half where these are small.
constexpr size_t kComparedBytes = 16 << 20;
constexpr size_t kMostCheckedBytes = 1 << 20;
static_assert(kMostCheckedBytes <= kComparedBytes);
constexpr int kComparisons = 5;
// While copy engines move data the backward pass has the processors: that is worth more than so much of a sum's time.
constexpr double kWorthIt = 1.25;

// The kernels that wait watch the ring's words by themselves. NCCL does not know of these operations, and does not keep
// those of graphs and others apart.
class PeerTransport final : public DeviceTransport {
 public:
  PeerTransport(std::shared_ptr<DeviceTransport> theirs, std::shared_ptr<PeerCopies> copies)
      : theirs_(std::move(theirs)), copies_(std::move(copies)) {}

  absl::Status Health() override { return theirs_->Health(); }
  void Abort(const absl::Status& why) override {
    copies_->ring().Abort();
    theirs_->Abort(why);
  }
  absl::Duration LeaveTime() const override { return std::max(absl::Seconds(1), theirs_->LeaveTime()); }
  bool TellsTimeouts() const override { return theirs_->TellsTimeouts(); }
  bool HandsOn() const override { return theirs_->HandsOn(); }
  std::string WhyStuck() const override { return theirs_->WhyStuck(); }

 private:
  const std::shared_ptr<DeviceTransport> theirs_;
  const std::shared_ptr<PeerCopies> copies_;
};

class PeerMoves final : public LargeSumMoves {
 public:
  PeerMoves(std::shared_ptr<PeerCopies> copies, uint64_t from, std::unique_ptr<DeviceMoves> moves,
            const DeviceEngine& engine)
      : LargeSumMoves(from, std::move(moves)), copies_(std::move(copies)), engine_(engine) {}
  // What is still to run would look at the ring, and use peers' memory.
  ~PeerMoves() override {
    if (!engine_.MayStillRun()) return;
    copies_->ring().Leave();
    KeepForever(copies_);
  }

 private:
  absl::Status AllReduce(const CheckedCall& call, void* stream) override {
    staged::Collective c = CollectiveOf(call);
    CallSide in(engine_.runtime(), call.in, stream), out(engine_.runtime(), call.out, stream);
    if (absl::Status s = in.Fill(true, &c.in); !s.ok()) return s;
    if (absl::Status s = out.Fill(false, &c.out); !s.ok()) return s;
    if (absl::Status s = copies_->AllReduce(c, engine_.words(), stream); !s.ok()) return s;
    return out.StoreResult();
  }

  const std::shared_ptr<PeerCopies> copies_;
  const DeviceEngine& engine_;
};

// What a rank tells the others of itself.
struct PeerSeat {
  PeerLimits limits;
  ProcessId process;
  int blocks = 0;  // 0: the kernels cannot be used
  char host[256] = {}, gpu[64] = {};
};

PeerSeat SitAmongPeers(const DeviceGroupOptions& options) {
  PeerSeat seat = {.limits = options.peer_copies, .process = ProcessId::OfSelf()};
  if (seat.limits.from == PeerLimits::kNever) return seat;
  const DeviceGuard guard(*options.runtime, options.device);
  const absl::StatusOr<std::string> gpu = options.runtime->Identity(options.device);
  const absl::StatusOr<int> blocks = options.runtime->StagedBlocks();  // loads them, before anything waits
  if (!guard.status().ok() || !gpu.ok() || !blocks.ok()) return seat;
  seat.blocks = *blocks;
  options.host.copy(seat.host, sizeof seat.host - 1);
  gpu->copy(seat.gpu, sizeof seat.gpu - 1);
  return seat;
}

// What speaks against it; empty if nothing does. `by_itself`: the backend may not be known to work over the GPUs'
// links, and more than two ranks have not been measured.
std::string AgainstPeerCopies(const std::vector<PeerSeat>& seats, bool by_itself, bool over_links) {
  if (seats.size() == 1) return "one rank";
  if (seats.size() > (by_itself ? 2 : staged::kMaxRanks)) return absl::StrCat(seats.size(), " ranks");
  if (by_itself && !over_links) return "nothing has shown that the GPUs' links work";
  for (size_t r = 0; r < seats.size(); ++r) {
    const PeerSeat& seat = seats[r];
    if (seat.blocks == 0) return "a rank cannot use its kernels";
    if (absl::string_view(seat.host) != seats[0].host) return "ranks on several hosts";
    // Those of several processes take turns on it. Those of one might wait for each other in one of its queues.
    const bool shared =
        std::any_of(seats.begin(), seats.begin() + static_cast<ptrdiff_t>(r), [&](const PeerSeat& other) {
          return absl::string_view(other.gpu) == seat.gpu && other.process.SameProcess(seat.process);
        });
    if (shared) return "ranks of one process that share a GPU";
  }
  return "";
}

// A group's copies before it uses them.
class PeerTrial {
 public:
  PeerTrial(ProcessGroup& control, const DeviceGroupOptions& options, PeerCopies& copies)
      : control_(control), options_(options), copies_(copies), stopwatch_(control, options, copies.ring()) {}

  // DataLoss if sums come out wrong: with a fault of the platform GPUs can read each other's memory, wrongly.
  absl::Status Check(const PeerLimits& limits) {
    const size_t bytes = std::min<size_t>(limits.chunk * 5 / 2, kMostCheckedBytes), count = bytes / sizeof(float) - 1;
    absl::StatusOr<std::shared_ptr<void>> host = options_.runtime->AllocatePinned(bytes);
    absl::Status ready = host.status();
    if (ready.ok()) ready = stopwatch_.Prepare(limits.automatic ? kComparedBytes : bytes);
    if (absl::Status s = Agree(control_, ready); !s.ok()) return s;
    float* const numbers = static_cast<float*>(host->get());
    const int ranks = control_.size(), me = control_.rank();
    const auto number = [](size_t i, int rank) {
      return static_cast<float>((i * 7 + static_cast<size_t>(rank)) % 1021);
    };
    Buffer array = stopwatch_.Array(bytes);
    array.count = count;
    for (size_t i = 0; i < count; ++i) numbers[i] = number(i, me);
    absl::Status status = stopwatch_.TimeOf(0, [&] { return Sum(array, numbers); }).status();
    // A sum that was left says nothing of the links: another rank has the error.
    const bool left = std::atomic_ref<uint32_t>(*stopwatch_.failed_word()).load() != 0;
    for (size_t i = 0; i < count && status.ok() && !left; ++i) {
      float sum = 0;
      for (int r = 0; r < ranks; ++r) sum += number(i, r);
      if (numbers[i] != sum) {
        status =
            absl::DataLossError(absl::StrFormat("element %d of a sum over the GPUs' links is %.9g instead of %.9g: "
                                                "what one GPU writes into another's memory "
                                                "arrives changed",
                                                i, numbers[i], sum));
      }
    }
    return Agree(control_, status);
  }

  // Microseconds, of the slowest rank: by the copies, and by the backend.
  absl::StatusOr<std::pair<double, double>> Compare(const SumOfBackend& theirs) {
    struct Times {
      double ours = 0, theirs = 0;
    } mine;
    const Buffer array = stopwatch_.Array(kComparedBytes);
    absl::StatusOr<double> us = stopwatch_.TimeOf(kComparisons, [&] { return AllReduce(array); });
    if (us.ok()) {
      mine.ours = *us;
      us = stopwatch_.TimeOf(kComparisons, [&] { return theirs(array, stopwatch_.stream()); });
    }
    if (absl::Status s = Agree(control_, us.status()); !s.ok()) return s;
    mine.theirs = *us;
    const absl::StatusOr<std::vector<Times>> all = Exchange(control_, mine);
    if (!all.ok()) return all.status();
    std::pair<double, double> slowest;
    for (const Times& times : *all) {
      slowest.first = std::max(slowest.first, times.ours);
      slowest.second = std::max(slowest.second, times.theirs);
    }
    return slowest;
  }

 private:
  absl::Status AllReduce(const Buffer& array) {
    return copies_.AllReduce(SumInPlace(array), stopwatch_.failed_word(), stopwatch_.stream());
  }
  absl::Status Sum(const Buffer& array, float* numbers) {
    DeviceRuntime& runtime = *options_.runtime;
    const size_t bytes = array.count * sizeof(float);
    absl::Status status = runtime.Copy(array.data, numbers, bytes, stopwatch_.stream());
    if (status.ok()) status = AllReduce(array);
    if (status.ok()) status = runtime.Copy(numbers, array.data, bytes, stopwatch_.stream());
    return status;
  }

  ProcessGroup& control_;
  const DeviceGroupOptions& options_;
  PeerCopies& copies_;
  Stopwatch stopwatch_;
};

// Whether all ranks have the same error, and have done with it. Any other leaves them apart, or a GPU at work.
bool AllWereTold(const absl::Status& error) {
  return absl::IsResourceExhausted(error) || absl::IsFailedPrecondition(error) || absl::IsDataLoss(error) ||
         absl::IsInternal(error) || absl::IsUnimplemented(error);
}

// Null if the backend is left alone, with the reason in *why. An error: no backend can be used any more.
absl::StatusOr<std::shared_ptr<PeerCopies>> TryPeerCopies(ProcessGroup& control, const DeviceGroupOptions& options,
                                                          const PeerLimits& limits, const SumOfBackend& theirs,
                                                          DeviceTransport& transport, std::string* why) {
  const DeviceGuard guard(*options.runtime, options.device);
  absl::StatusOr<std::shared_ptr<PeerCopies>> copies =
      PeerCopies::Create(control, *options.runtime, options.device, limits.chunk);
  std::optional<PeerTrial> trial;
  absl::Status status = copies.status();
  if (status.ok()) status = trial.emplace(control, options, **copies).Check(limits);
  if (!status.ok()) {
    if (!AllWereTold(status) || !control.status().ok()) return status;
    if (absl::IsDataLoss(status)) LogWarn("rank ", control.rank(), ": ", status.message());
    *why = std::string(status.message());
    return nullptr;
  }
  if (!limits.automatic) return copies;
  const absl::StatusOr<std::pair<double, double>> us = trial->Compare(theirs);
  if (!us.ok()) {
    transport.Abort(us.status());  // the trial's end waits for the GPU
    return us.status();
  }
  *why = absl::StrFormat("16 MiB take %.0f us, and %.0f us without", us->first, us->second);
  return us->first <= us->second * kWorthIt ? copies : std::shared_ptr<PeerCopies>();
}

}  // namespace

absl::Status AddPeerCopies(ProcessGroup& control, const DeviceGroupOptions& options, const SumOfBackend& theirs,
                           DeviceBackend* backend) {
  const absl::StatusOr<std::vector<PeerSeat>> seats = Exchange(control, SitAmongPeers(options));
  if (!seats.ok()) return seats.status();
  PeerLimits agreed = (*seats)[0].limits;
  for (const PeerSeat& seat : *seats) agreed.from = std::max(agreed.from, seat.limits.from);
  if (agreed.from == PeerLimits::kNever) return absl::OkStatus();
  std::string why = AgainstPeerCopies(*seats, agreed.automatic, theirs != nullptr);
  std::shared_ptr<PeerCopies> copies;
  if (why.empty()) {
    absl::StatusOr<std::shared_ptr<PeerCopies>> tried =
        TryPeerCopies(control, options, agreed, theirs, *backend->transport, &why);
    if (!tried.ok()) return tried.status();
    copies = *std::move(tried);
  }
  LogInfo("rank ", control.rank(), ": all-reduces from ", agreed.from, " bytes on go by ",
          copies == nullptr ? "the backend: " : "the GPUs' copy engines", why.empty() || copies == nullptr ? "" : ": ",
          why);
  if (copies == nullptr) return absl::OkStatus();
  backend->transport = std::make_shared<PeerTransport>(backend->transport, copies);
  backend->make_moves = [copies, from = agreed.from, inner = std::move(backend->make_moves)](
                            InternalGroup& group, const DeviceEngine& engine) -> std::unique_ptr<DeviceMoves> {
    return std::make_unique<PeerMoves>(copies, from, inner(group, engine), engine);
  };
  return absl::OkStatus();
}

}  // namespace ddp
