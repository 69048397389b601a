// SPDX-License-Identifier: Apache-2.0
// Groups on GPUs that are none, for tests in one process: of the nccl backend over an NCCL that is none, or, with
// DDP_TEST_BACKEND=hierarchical, of that one.
#ifndef TESTS_SUPPORT_NCCL_JOB_H_
#define TESTS_SUPPORT_NCCL_JOB_H_

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <latch>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "ddp/store.h"
#include "libddp/comm/hierarchical_group.h"
#include "libddp/comm/local_group.h"
#include "libddp/comm/nccl/nccl_group.h"
#include "libddp/comm/staged/staged_group.h"
#include "libddp/launch/rendezvous.h"
#include "tests/support/catch.h"
#include "tests/support/check.h"
#include "tests/support/fake_devices.h"
#include "tests/support/fake_nccl.h"
#include "tests/support/given_time.h"
#include "tests/support/numbers.h"

namespace ddp::testing::simulated {

// Whether the groups are those of the hierarchical backend. What is about NCCL is tagged [nccl].
inline bool Staged() {
  const char* const backend = std::getenv("DDP_TEST_BACKEND");
  return backend != nullptr && std::string(backend) == "hierarchical";
}
// Nothing is measured, unless a test is about that.
inline std::string StagedLimitsOfTest() {
  const char* const limits = std::getenv("DDP_STAGED_LIMITS");
  return limits == nullptr ? "fixed" : limits;
}
// With DDP_TEST_PEER_COPIES=1 all-reduces go by copy engines, in chunks so small that most have several.
inline PeerLimits PeerLimitsOfTest() {
  if (std::getenv("DDP_TEST_PEER_COPIES") == nullptr) return {};
  return {.from = 0, .chunk = 4096, .automatic = false};
}
inline absl::StatusOr<std::unique_ptr<ProcessGroup>> CreateGpuGroup(std::unique_ptr<ProcessGroup> control,
                                                                    const NcclGroupOptions& options,
                                                                    bool staged = Staged()) {
  return staged ? CreateStagedGroup(std::move(control), options) : CreateNcclGroup(std::move(control), options);
}

// What one rank of a test has.
struct Rank {
  int rank = 0;
  int size = 1;
  FakeDevices& gpus;
  FakeNccl& nccl;
  ProgressThread progress;
  absl::Duration timeout = absl::Seconds(60);
  std::string host = "host 0";
  std::string staged_limits = {};

  Device device() const { return {Device::Kind::kCuda, static_cast<int16_t>(rank)}; }
  OwnedStream MakeStream() const {
    const DeviceGuard guard(gpus, device());
    return RANK_VALUE(ddp::MakeStream(gpus));
  }
  NcclGroupOptions Options() {
    NcclGroupOptions options;
    options.device = device();
    options.timeout = timeout;
    options.progress = &progress;
    options.runtime = &gpus;
    options.host = host;
    options.staged_limits = staged_limits;
    options.api = nccl.api();
    options.peer_copies = PeerLimitsOfTest();
    options.warm_up_limit = size_t{64} << 10;  // simulated GPUs take their time
    return options;
  }
};

// Enough for `work` of a rank to be done in, on slow machines too.
inline absl::Duration TimeFor(absl::Duration work) {
#if defined(__SANITIZE_THREAD__)
  return 10 * work;
#elif defined(__SANITIZE_ADDRESS__) || defined(__clang__)  // clang builds the tests for AddressSanitizer
  return 4 * work;
#else
  return work;
#endif
}

// Never freed: a thread that is left behind in NCCL's start looks at its GPU once more when the test lets go of it.
inline FakeDevices& KeptDevices(int count) {
  static auto* const all = new std::vector<std::unique_ptr<FakeDevices>>;
  return *all->emplace_back(std::make_unique<FakeDevices>(count));
}

struct Job {
  explicit Job(int size_, int version = 22809) : size(size_), gpus(KeptDevices(size_)), nccl(version) {}
  const int size;
  FakeDevices& gpus;
  FakeNccl nccl;
  bool staged = Staged();
  absl::Duration timeout = absl::Seconds(60);
  int hosts = 1;                                     // of as many ranks each; their GPUs have equal names
  std::string staged_limits = StagedLimitsOfTest();  // see DeviceGroupOptions

  // Runs `body` on threads that are ranks; control is the CPU's group. Whoever fails says so at once.
  void RunOver(const std::function<void(Rank&, std::unique_ptr<ProcessGroup>)>& body) {
    const std::shared_ptr<Store> store = CreateMemoryStore();
    if (hosts > 1) gpus.identity = [this](int device) { return "fake:" + std::to_string(device % (size / hosts)); };
    std::vector<std::string> failures(static_cast<size_t>(size));
    std::vector<std::thread> threads;
    for (int r = 0; r < size; ++r) {
      threads.emplace_back([&, r] {
        try {
          const int on_host = size / hosts;
          Rank rank{.rank = r,
                    .size = size,
                    .gpus = gpus,
                    .nccl = nccl,
                    .progress = {},
                    .timeout = timeout,
                    .host = "host " + std::to_string(r / on_host),
                    .staged_limits = staged_limits};
          const std::unique_ptr<Rendezvous> meeting = CreateStoreRendezvous(store, r, size, "test");
          body(rank, size == 1
                         ? CreateLocalGroup(nullptr, timeout)
                         : RANK_VALUE(CreateHierarchicalGroup(*meeting, {.timeout = absl::Seconds(60),
                                                                         .deadline = absl::Now() + absl::Seconds(60),
                                                                         .stall_warning = absl::ZeroDuration(),
                                                                         .progress = &rank.progress,
                                                                         .observer = nullptr})));
        } catch (const std::exception& e) {
          failures[static_cast<size_t>(r)] = e.what();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const std::string& failure : failures) CHECK(failure == "");
    for (const std::string& complaint : gpus.complaints()) CHECK(complaint == "");
  }
  void Run(const std::function<void(Rank&, ProcessGroup&)>& body) {
    std::latch made(size);  // what happens to one rank does not reach into the start of another
    RunOver([&](Rank& rank, std::unique_ptr<ProcessGroup> control) {
      absl::StatusOr<std::unique_ptr<ProcessGroup>> created =
          CreateGpuGroup(std::move(control), rank.Options(), staged);
      made.arrive_and_wait();
      const std::unique_ptr<ProcessGroup> group = RANK_VALUE(std::move(created));
      try {
        body(rank, *group);
      } catch (const std::exception& e) {
        group->Abort(absl::InternalError(e.what()));
        throw;
      }
    });
  }
  // What the group's creation says on every rank.
  void Expect(
      absl::StatusCode code, const std::vector<std::string>& parts,
      const std::function<void(NcclGroupOptions&, int)>& change = [](NcclGroupOptions&, int) {}) {
    RunOver([&](Rank& rank, std::unique_ptr<ProcessGroup> control) {
      NcclGroupOptions options = rank.Options();
      change(options, rank.rank);
      const absl::Status status = CreateGpuGroup(std::move(control), options, staged).status();
      CheckStatus(__FILE__, __LINE__, "creating a group", status, code, parts);
    });
    CHECK(nccl.live_comms() == 0);
  }
};

// Over the hierarchical backend.
struct StagedJob : Job {
  explicit StagedJob(int ranks, const std::string& limits = "fixed") : Job(ranks) {
    staged = true;
    staged_limits = limits;
  }
};

// A rank's array in "device" memory, from the group's Allocate or from elsewhere.
class Array {
 public:
  Array(Rank& rank, ProcessGroup& group, DType dtype, size_t count, bool allocated)
      : dtype_(dtype), count_(count), device_(rank.device()) {
    const size_t bytes = std::max<size_t>(1, count * SizeOf(dtype));
    if (allocated) {
      allocation_ = RANK_VALUE(group.Allocate(bytes, device_));
      data_ = static_cast<char*>(allocation_.data());
    } else {
      memory_ = RANK_VALUE(rank.gpus.Allocate(device_, bytes));
      data_ = static_cast<char*>(memory_.get());
    }
  }
  Buffer whole() const { return {data_, count_, dtype_, device_}; }
  std::vector<Buffer> Cut(size_t pieces) const { return testing::Cut(whole(), pieces); }
  double Get(size_t i) const { return GetElement(dtype_, data_, i); }
  void Set(size_t i, double value) { SetElement(dtype_, data_, i, value); }

 private:
  DType dtype_;
  size_t count_;
  Device device_;
  Allocation allocation_;
  std::shared_ptr<void> memory_;
  char* data_ = nullptr;
};

// What the stream is given from here on waits.
inline void HoldUntil(const std::atomic<bool>& open, void* stream) {
  FakeDevices::Enqueue(stream, [&open] {
    while (!open) std::this_thread::yield();
  });
}

}  // namespace ddp::testing::simulated

#endif  // TESTS_SUPPORT_NCCL_JOB_H_
