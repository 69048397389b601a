// SPDX-License-Identifier: Apache-2.0
// One NCCL communicator: made under a deadline, called by one thread at a time, aborted from any thread.
#ifndef LIBDDP_COMM_NCCL_COMMUNICATOR_H_
#define LIBDDP_COMM_NCCL_COMMUNICATOR_H_

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "libddp/comm/gpu/device_engine.h"
#include "libddp/comm/nccl/api.h"
#include "libddp/device/device_runtime.h"

namespace ddp {

struct NcclSetup {
  nccl::Api api;
  nccl::Features features;
  nccl::Comm* given = nullptr;  // the program's, null once it is aborted; without it one is made
  nccl::UniqueId id = {};       // then
  int rank = 0;
  int size = 1;
  Device device;
  DeviceRuntime* runtime = nullptr;
  size_t warm_up_limit = SIZE_MAX;  // bytes of a sum
};

// A blocking communicator: enqueueing on one takes 5 us, on a nonblocking one, which starts a thread for each call, 40.
// But what blocks cannot be aborted before it exists, so it is made and warmed up by a thread that is left behind if
// that takes too long. The warm-up connects every pair of ranks, so that no later call has to wait for a peer's.
class NcclCommunicator final : public DeviceTransport {
 public:
  // Collective. `interrupted` is asked about once a millisecond; an error from it ends the wait. The warm-up's result
  // is checked: DataLoss if NCCL moved wrong data. Where the start fails `before_abort` is called with the error, for
  // the peers to know of it: what is aborted hands on what looks like wrong data.
  static absl::StatusOr<std::shared_ptr<NcclCommunicator>> Create(
      const NcclSetup& setup, absl::Time deadline, const std::function<absl::Status()>& interrupted,
      const std::function<void(const absl::Status&)>& before_abort);
  ~NcclCommunicator() override { Destroy(); }

  // Ends it, or gives it back to the program, unless it has been aborted; waits a few seconds at most, and leaves to
  // itself what takes longer. Nothing may be running.
  void Destroy();

  // Runs call(api, comm) unless the communicator is being aborted, then Aborted. `what` names it in errors.
  absl::Status Call(absl::string_view what, absl::FunctionRef<nccl::Result(const nccl::Api&, nccl::Comm)> call);

  // Waits, on the host, for what has been enqueued on `stream`.
  absl::Status WaitFor(void* stream, absl::Time deadline);

  // To be deregistered when the communicator is destroyed. One thread at a time.
  void Keep(nccl::Window window) { windows_.push_back(window); }

  absl::Status Health() override;
  // Locks out new calls, gives running ones a moment, and aborts: kernels end, blocked calls return.
  void Abort(const absl::Status&) override { Abort(); }
  // With NCCL's protocols for small messages the kernel stores what it read last, and the mark that the next rank waits
  // for; with the other one it tells the next rank without having stored anything.
  bool HandsOn() const override { return true; }
  bool OrdersGraphs() const override { return true; }  // unless NCCL_GRAPH_MIXING_SUPPORT=0 says otherwise
  void Abort();
  std::string WhyStuck() const override;

  const NcclSetup& setup() const { return setup_; }

 private:
  explicit NcclCommunicator(const NcclSetup& setup)
      : setup_(setup), comm_(setup.given == nullptr ? nullptr : *setup.given) {}
  struct Place;  // what the warm-up works on, and where
  absl::Status Connect(Place& place);
  absl::Status Begin();
  absl::Status WarmUp(Place& place);
  absl::Status Exercise(Place& place, size_t bytes);
  absl::Status ToStatus(nccl::Result result, absl::string_view what, nccl::Comm comm) const;

  const NcclSetup setup_;
  std::atomic<nccl::Comm> comm_;
  std::atomic<bool> aborted_{false};
  std::atomic<int> calls_{0};  // threads inside NCCL
  std::mutex health_;          // held while the communicator is asked, or goes away
  std::vector<nccl::Window> windows_;
};

}  // namespace ddp

#endif  // LIBDDP_COMM_NCCL_COMMUNICATOR_H_
