// SPDX-License-Identifier: Apache-2.0
// Worlds of communicators that the program has made itself. The case tagged [early] needs a process that has not
// initialised MPI.
#include <mpi.h>

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "ddp/context.h"
#include "tests/support/catch.h"
#include "tests/support/launch.h"

namespace ddp {
namespace {

// A communicator of the ranks that give the same color, ordered by `key`; none where the color is MPI_UNDEFINED.
class Part {
 public:
  Part(int color, int key) { MPI_Comm_split(MPI_COMM_WORLD, color, key, &comm_); }
  ~Part() { Free(); }
  Part(const Part&) = delete;
  Part& operator=(const Part&) = delete;

  void Free() {
    if (comm_ != MPI_COMM_NULL) MPI_Comm_free(&comm_);
  }
  ContextOptions Options() const {
    ContextOptions options;
    options.mpi_comm = &comm_;
    options.timeout = absl::Seconds(60);
    return options;
  }

 private:
  MPI_Comm comm_ = MPI_COMM_NULL;
};

std::unique_ptr<Context> Create(const ContextOptions& options) {
  absl::StatusOr<std::unique_ptr<Context>> context = Context::Create(options);
  INFO(context.status().ToString());
  REQUIRE(context.ok());
  return *std::move(context);
}

// The sum of all ranks' values, in a small and in a large array.
void CheckSum(ProcessGroup& group, int64_t mine, int64_t sum) {
  for (const size_t count : {size_t{1}, size_t{100'000}}) {
    std::vector<int64_t> values(count, mine);
    const Buffer buffer{values.data(), count, DType::kInt64, {}};
    const absl::Status status = group.AllReduce(buffer, buffer).Wait();
    INFO(status.ToString());
    REQUIRE(status.ok());
    CHECK(values.front() == sum);
    CHECK(values.back() == sum);
  }
}

TEST_CASE("a communicator with the ranks in another order is the world") {
  testing::StartMpi();
  const int size = testing::MpiSize(), mine = testing::MpiRank();
  Part reversed(0, -mine);
  const std::unique_ptr<Context> context = Create(reversed.Options());
  reversed.Free();  // it was duplicated
  CHECK(context->rank() == size - 1 - mine);
  CHECK(context->world_size() == size);
  CHECK(context->local_rank() == context->rank());
  CHECK(context->local_world_size() == size);
  CHECK(context->launcher() == "mpi");
  CHECK(context->world().rank() == context->rank());
  CheckSum(context->world(), mine, size * (size - 1) / 2);
  if (size > 1) {
    int64_t root = mine;  // the world's rank 0 is MPI's last one
    const Buffer buffer{&root, 1, DType::kInt64, {}};
    REQUIRE(context->world().Broadcast(buffer, 0).Wait().ok());
    CHECK(root == size - 1);
  }
}

TEST_CASE("two communicators are two worlds at the same time") {
  testing::StartMpi();
  const int size = testing::MpiSize(), mine = testing::MpiRank();
  const Part part(mine % 2, mine);
  const std::unique_ptr<Context> context = Create(part.Options());
  int64_t sum = 0;
  int members = 0;
  for (int r = mine % 2; r < size; r += 2) {
    sum += r;
    ++members;
  }
  CHECK(context->rank() == mine / 2);
  CHECK(context->world_size() == members);
  CHECK(context->local_world_size() == members);
  for (int round = 0; round < 20; ++round) CheckSum(context->world(), mine, sum);
}

TEST_CASE("ranks that are not in the communicator need no Context") {
  testing::StartMpi();
  const int size = testing::MpiSize(), mine = testing::MpiRank();
  const bool left_out = size > 1 && mine == 0;
  const Part part(left_out ? MPI_UNDEFINED : 0, mine);
  if (left_out) {
    const absl::Status status = Context::Create(part.Options()).status();
    INFO(status.ToString());
    CHECK(status.code() == absl::StatusCode::kInvalidArgument);
    CHECK(absl::StrContains(status.message(), "ContextOptions::mpi_comm is MPI_COMM_NULL"));
  } else {
    const std::unique_ptr<Context> context = Create(part.Options());
    CheckSum(context->world(), mine, size * (size - 1) / 2);
  }
  testing::MpiBarrier();
}

TEST_CASE("a communicator and another identity contradict each other") {
  testing::StartMpi();
  const Part all(0, testing::MpiRank());
  ContextOptions options = all.Options();
  options.rank = 0;
  const absl::Status status = Context::Create(options).status();
  INFO(status.ToString());
  CHECK(status.code() == absl::StatusCode::kInvalidArgument);
  CHECK(absl::StrContains(status.message(), "both mpi_comm and an identity"));
}

TEST_CASE("an inter-communicator is refused") {
  testing::StartMpi();
  if (testing::MpiSize() == 1) return;
  const int mine = testing::MpiRank();
  MPI_Comm half = MPI_COMM_NULL, between = MPI_COMM_NULL;
  MPI_Comm_split(MPI_COMM_WORLD, mine % 2, mine, &half);
  MPI_Intercomm_create(half, 0, MPI_COMM_WORLD, 1 - mine % 2, 0, &between);
  ContextOptions options;
  options.mpi_comm = &between;
  const absl::Status status = Context::Create(options).status();
  INFO(status.ToString());
  CHECK(status.code() == absl::StatusCode::kInvalidArgument);
  CHECK(absl::StrContains(status.message(), "MPI_Intercomm_merge"));
  MPI_Comm_free(&between);
  MPI_Comm_free(&half);
}

TEST_CASE("a rank of the communicator that does not come is told in time") {
  testing::StartMpi();
  if (testing::MpiSize() == 1) return;
  const Part all(0, testing::MpiRank());
  if (testing::MpiRank() != 0) {
    ContextOptions options = all.Options();
    options.timeout = absl::Milliseconds(300);
    const absl::Status status = Context::Create(options).status();
    INFO(status.ToString());
    CHECK(status.code() == absl::StatusCode::kDeadlineExceeded);
    CHECK(absl::StrContains(status.message(), "ranks came within "));  // what was left of the 300 ms
  }
  testing::MpiBarrier();
}

TEST_CASE("a rank of the communicator whose options are wrong is named by the others") {
  const int size = testing::MpiSize(), rank = testing::MpiRank();
  if (size == 1) return;
  const Part all(0, rank);
  ContextOptions options = all.Options();
  if (rank == size - 1) options.backend = "none";
  const absl::Status status = Context::Create(options).status();
  INFO(status.ToString());
  CHECK(status.code() ==
        (rank == size - 1 ? absl::StatusCode::kInvalidArgument : absl::StatusCode::kFailedPrecondition));
  CHECK(absl::StrContains(status.message(), absl::StrCat("rank ", size - 1, ": the backend (DDP_BACKEND)")));
  const std::unique_ptr<Context> context = Create(all.Options());  // MPI is as good as before
  CheckSum(context->world(), 1, size);
}

TEST_CASE("a communicator before MPI is initialised is refused", "[.][early]") {
  const MPI_Comm world = MPI_COMM_WORLD;
  ContextOptions options;
  options.mpi_comm = &world;
  const absl::Status status = Context::Create(options).status();
  INFO(status.ToString());
  CHECK(status.code() == absl::StatusCode::kFailedPrecondition);
  CHECK(absl::StrContains(status.message(), "call MPI_Init_thread before Create"));
}

}  // namespace
}  // namespace ddp
