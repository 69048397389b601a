// SPDX-License-Identifier: Apache-2.0
// Groups of the nccl backend over communicators that the program has made, on an NCCL and GPUs that are none.
#include <memory>

#include "tests/support/nccl_job.h"

namespace ddp::testing::simulated {
namespace {

// What a program does by itself: a communicator of all ranks, in the order of `order`.
nccl::Comm MakeCommunicator(Rank& rank, ProcessGroup& control, int order, bool blocking = true) {
  const nccl::Api api = rank.nccl.api();
  nccl::UniqueId id = {};
  if (rank.rank == 0) RANK_CHECK(api.GetUniqueId(&id) == nccl::kSuccess);
  const Buffer bytes{id.internal, sizeof id.internal, DType::kUInt8, {}};
  RANK_CHECK_OK(control.Broadcast(bytes, 0).Wait());
  const DeviceGuard guard(rank.gpus, rank.device());
  nccl::Config config;
  config.blocking = blocking ? 1 : 0;
  nccl::Comm comm = nullptr;
  RANK_CHECK(api.CommInitRankConfig(&comm, rank.size, id, order, &config) ==
             (blocking ? nccl::kSuccess : nccl::kInProgress));
  return comm;
}

TEST_CASE("a group works over the program's communicator and gives it back") {
  Job job(2);
  job.RunOver([&](Rank& rank, std::unique_ptr<ProcessGroup> control) {
    ProcessGroup& over_cpu = *control;
    nccl::Comm comm = MakeCommunicator(rank, over_cpu, rank.rank);
    RANK_CHECK_OK(over_cpu.Barrier().Wait());
    RANK_CHECK_EQ(rank.nccl.Calls("CommInitRankConfig"), 2);
    NcclGroupOptions options = rank.Options();
    options.given = &comm;
    {
      const std::unique_ptr<ProcessGroup> group = RANK_VALUE(CreateNcclGroup(std::move(control), options));
      for (const bool allocated : {false, true}) {
        Array a(rank, *group, DType::kFloat32, 1000, allocated);
        for (size_t i = 0; i < 1000; ++i) a.Set(i, rank.rank + 1);
        RANK_CHECK_OK(group->AllReduce(a.Cut(1), a.Cut(1), {}, kNoStream).Wait());
        RANK_CHECK_EQ(a.Get(999), 3);
      }
      RANK_CHECK_EQ(rank.nccl.Calls("CommInitRankConfig"), 2);  // the program's, and no other
      RANK_CHECK_OK(group->Barrier().Wait());
      // A part has one of its own.
      const std::unique_ptr<ProcessGroup> part = RANK_VALUE(group->Split(0, -rank.rank));
      RANK_CHECK_EQ(rank.nccl.Calls("CommInitRankConfig"), 4);
      Array a(rank, *part, DType::kFloat32, 10, true);
      a.Set(9, 1);
      RANK_CHECK_OK(part->AllReduce(a.Cut(1), a.Cut(1), {}, kNoStream).Wait());
      RANK_CHECK_EQ(a.Get(9), 2);
    }
    // It works on, and is the program's to destroy.
    const nccl::Api api = rank.nccl.api();
    const OwnedStream stream = rank.MakeStream();
    const std::shared_ptr<void> memory = RANK_VALUE(rank.gpus.Allocate(rank.device(), sizeof(int32_t)));
    auto* const value = static_cast<int32_t*>(memory.get());
    *value = 5;
    {
      const DeviceGuard guard(rank.gpus, rank.device());
      RANK_CHECK(api.AllReduce(value, value, 1, nccl::kInt32, nccl::kSum, comm, stream.get()) == nccl::kSuccess);
      FakeDevices::Synchronize(stream.get());
    }
    RANK_CHECK_EQ(*value, 10);
    RANK_CHECK(api.CommDestroy(comm) == nccl::kSuccess);
  });
  CHECK(job.nccl.live_comms() == 0);
  CHECK(job.nccl.live_windows() == 0);
}

TEST_CASE("the program's communicator ends with a group that fails") {
  Job job(2);
  job.RunOver([&](Rank& rank, std::unique_ptr<ProcessGroup> control) {
    NcclGroupOptions options = rank.Options();
    nccl::Comm comm = MakeCommunicator(rank, *control, rank.rank);
    options.given = &comm;
    options.timeout = TimeFor(absl::Seconds(2));
    const std::unique_ptr<ProcessGroup> group = RANK_VALUE(CreateNcclGroup(std::move(control), options));
    Array a(rank, *group, DType::kFloat32, 10, false);
    if (rank.rank == 0) rank.nccl.Plan("AllReduce", 0, FakeNccl::Mishap::kStuck);
    RANK_CHECK_STATUS(group->AllReduce(a.Cut(1), a.Cut(1), {}, kNoStream).Wait(), absl::StatusCode::kDeadlineExceeded,
                      "all_reduce");
    RANK_CHECK(comm == nullptr);  // so that the program does not destroy it, too
  });
  CHECK(job.nccl.live_comms() == 0);
}

TEST_CASE("the program's communicator ends with a start that fails, and with a Work that is left pending") {
  Job job(2);
  job.RunOver([&](Rank& rank, std::unique_ptr<ProcessGroup> control) {
    nccl::Comm comm = MakeCommunicator(rank, *control, rank.rank);
    NcclGroupOptions options = rank.Options();
    options.given = &comm;
    options.timeout = TimeFor(absl::Seconds(2));
    if (rank.rank == 0) rank.nccl.Plan("AllReduce", 0, FakeNccl::Mishap::kStuck);
    RANK_CHECK(!CreateNcclGroup(std::move(control), options).ok());
    RANK_CHECK(comm == nullptr);
  });
  CHECK(job.nccl.live_comms() == 0);
  Job pending(2);
  pending.RunOver([&](Rank& rank, std::unique_ptr<ProcessGroup> control) {
    nccl::Comm comm = MakeCommunicator(rank, *control, rank.rank);
    NcclGroupOptions options = rank.Options();
    options.given = &comm;
    std::unique_ptr<ProcessGroup> group = RANK_VALUE(CreateNcclGroup(std::move(control), options));
    Array a(rank, *group, DType::kFloat32, 10, false);
    rank.nccl.Plan("AllReduce", rank.rank, FakeNccl::Mishap::kStuck);
    const Work work = group->AllReduce(a.Cut(1), a.Cut(1), {}, kNoStream);
    group.reset();
    RANK_CHECK(comm == nullptr);
  });
  CHECK(pending.nccl.live_comms() == 0);
}

// What Create says on every rank where rank r gives what `give` returns. The communicators stay the program's.
void Expect(absl::StatusCode code, const std::vector<std::string>& parts,
            const std::function<nccl::Comm(Rank&, ProcessGroup&, NcclGroupOptions&)>& give) {
  Job job(2);
  job.RunOver([&](Rank& rank, std::unique_ptr<ProcessGroup> control) {
    NcclGroupOptions options = rank.Options();
    nccl::Comm comm = give(rank, *control, options);
    const nccl::Comm as_given = comm;
    if (comm != nullptr) options.given = &comm;
    const absl::Status status = CreateNcclGroup(std::move(control), options).status();
    CheckStatus(__FILE__, __LINE__, "creating a group", status, code, parts);
    RANK_CHECK(comm == as_given);
  });
  CHECK(job.nccl.Calls("AllReduce") == 0);
  CHECK(job.nccl.Calls("CommAbort") == 0);
}

TEST_CASE("a communicator of other ranks or another GPU is refused on all ranks, and left alone") {
  Expect(absl::StatusCode::kInvalidArgument,
         {"rank 0: ContextOptions::nccl_comm is rank 1 of 2 on GPU 0, but this is rank 0 of 2 on GPU 0"},
         [](Rank& rank, ProcessGroup& control, NcclGroupOptions&) {
           return MakeCommunicator(rank, control, 1 - rank.rank);
         });
  Expect(absl::StatusCode::kInvalidArgument, {"rank 1: ", "rank 1 of 2 on GPU 1, but this is rank 1 of 2 on GPU 0"},
         [](Rank& rank, ProcessGroup& control, NcclGroupOptions& options) {
           options.device.index = 0;
           return MakeCommunicator(rank, control, rank.rank);
         });
}

TEST_CASE("ranks that give a communicator and ranks that give none are told so") {
  for (const int giver : {0, 1}) {
    Expect(absl::StatusCode::kFailedPrecondition,
           {"rank " + std::to_string(giver) + " gives a communicator (ContextOptions::nccl_comm), rank " +
            std::to_string(1 - giver) + " gives none"},
           [giver](Rank& rank, ProcessGroup& control, NcclGroupOptions&) {
             const nccl::Comm comm = MakeCommunicator(rank, control, rank.rank);
             return rank.rank == giver ? comm : nullptr;
           });
  }
}

TEST_CASE("a nonblocking communicator is refused with the remedy") {
  Job job(2);
  job.RunOver([&](Rank& rank, std::unique_ptr<ProcessGroup> control) {
    NcclGroupOptions options = rank.Options();
    nccl::Comm comm = MakeCommunicator(rank, *control, rank.rank, /*blocking=*/false);
    options.given = &comm;
    RANK_CHECK_STATUS(CreateNcclGroup(std::move(control), options).status(), absl::StatusCode::kInvalidArgument,
                      "nonblocking", "blocking = 1");
  });
}

}  // namespace
}  // namespace ddp::testing::simulated
