// SPDX-License-Identifier: Apache-2.0
// What every rank is told where the start of the nccl backend fails on one.
#include <atomic>
#include <cstdlib>
#include <memory>
#include <utility>

#include "tests/support/nccl_job.h"

namespace ddp::testing::simulated {
namespace {

using Mishap = FakeNccl::Mishap;

TEST_CASE("what one rank lacks, all ranks are told before they enter NCCL", "[nccl]") {
  using absl::StatusCode;
  Job(2, 21703).Expect(StatusCode::kFailedPrecondition, {"NCCL 2.17.3 is too old", "2.18"});
  Job(2, 2708).Expect(StatusCode::kFailedPrecondition, {"too old"});
  Job(3).Expect(StatusCode::kFailedPrecondition, {"rank 2", "GPU 9", "there are 3"},
                [](NcclGroupOptions& o, int rank) { o.device.index = rank == 2 ? 9 : o.device.index; });
  Job(2).Expect(StatusCode::kFailedPrecondition, {"rank 1", "ContextOptions::device"},
                [](NcclGroupOptions& o, int rank) { o.device = rank == 1 ? Device{} : o.device; });
  Job(2).Expect(StatusCode::kFailedPrecondition, {"ranks 0 and 1 use the same GPU", "fake:0", "local rank"},
                [](NcclGroupOptions& o, int) { o.device.index = 0; });
  setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 1);  // then NCCL decides, which here allows it
  Job(2).RunOver([](Rank& rank, std::unique_ptr<ProcessGroup> control) {
    NcclGroupOptions options = rank.Options();
    options.device.index = 0;
    RANK_CHECK_OK(RANK_VALUE(CreateGpuGroup(std::move(control), options))->Barrier().Wait());
  });
  unsetenv("NCCL_MULTI_RANK_GPU_ENABLE");
  Job other(2);
  static std::atomic<int> asked{0};
  other.Expect(StatusCode::kFailedPrecondition, {"rank 0 has NCCL", "rank 1 has", "DDP_NCCL_LIBRARY"},
               [](NcclGroupOptions& o, int rank) {
                 if (rank == 1) {
                   o.api->GetVersion = [](int* version) {
                     ++asked;
                     *version = 22707;
                     return nccl::kSuccess;
                   };
                 }
               });
  CHECK(asked > 0);
  Job none(1);
  none.nccl.Plan("GetUniqueId", 0, Mishap::kFail, nccl::kSystemError);
  none.Expect(StatusCode::kInternal, {"ncclGetUniqueId", "network interface"});
}

TEST_CASE("a communicator that cannot be made is an error on all ranks in time", "[nccl]") {
  using absl::StatusCode;
  {
    Job job(2);
    job.nccl.Plan("CommInitRankConfig", 1, Mishap::kFail, nccl::kSystemError);
    job.Expect(StatusCode::kInternal, {"rank 1", "ncclCommInitRankConfig", "the fake's last words", "NCCL_DEBUG=WARN"});
  }
  {
    Job job(2);
    job.timeout = absl::Milliseconds(300);
    job.nccl.Plan("CommInitRankConfig", 0, Mishap::kHang);
    job.Expect(StatusCode::kDeadlineExceeded, {"did not connect 2 ranks in time", "DDP_TIMEOUT", "NCCL_SOCKET_IFNAME"});
  }
  {
    Job job(3);  // the warm-up hangs in the call
    job.timeout = absl::Milliseconds(300);
    job.nccl.Plan("AllReduce", 2, Mishap::kHang, nccl::kInternalError, 1);
    job.Expect(StatusCode::kDeadlineExceeded, {"did not connect"});
  }
  {
    Job job(2);  // ... or on the GPU
    job.timeout = absl::Milliseconds(300);
    job.nccl.Plan("AllReduce", 0, Mishap::kStuck);
    job.Expect(StatusCode::kDeadlineExceeded, {"did not connect"});
  }
  {
    Job job(2);
    job.nccl.Plan("AllReduce", 1, Mishap::kCorrupt, nccl::kSuccess, 2);
    job.Expect(StatusCode::kDataLoss, {"rank 1", "summed 2 ones to 3", "NCCL_P2P_DISABLE=1"});
  }
}

// Their kernels receive what is handed on when NCCL is aborted, and may find that before they hear of the cause.
TEST_CASE("where NCCL's start fails on one rank the others do not take that for wrong data", "[nccl]") {
  for (int attempt = 0; attempt < 5; ++attempt) {
    Job job(4);
    job.nccl.Plan("AllReduce", 1, Mishap::kStuck);
    job.gpus.fail = [](absl::string_view call, int device) {
      return call == "Finished" && device == 1 ? absl::InternalError("cudaEventQuery: injected") : absl::OkStatus();
    };
    job.Expect(absl::StatusCode::kInternal, {"rank 1", "connecting NCCL", "cudaEventQuery: injected"});
  }
}

}  // namespace
}  // namespace ddp::testing::simulated
