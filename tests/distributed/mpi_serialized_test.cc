// SPDX-License-Identifier: Apache-2.0
// That the library calls MPI from one thread at a time, as MPI_THREAD_SERIALIZED demands: this program stands between
// the two (MPI's profiling interface) and looks whether anybody else is inside.
#include <mpi.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "ddp/context.h"
#include "tests/support/catch.h"

namespace {

std::atomic<int> inside{0}, collisions{0}, calls{0};

// While one lives, a thread is inside MPI; it stays a moment.
class Inside {
 public:
  Inside() {
    if (inside.fetch_add(1) > 0) ++collisions;
    if (++calls % 8 == 0) usleep(20);
  }
  ~Inside() { inside.fetch_sub(1); }
};

}  // namespace

extern "C" {
int MPI_Isend(const void* data, int count, MPI_Datatype type, int to, int tag, MPI_Comm comm, MPI_Request* request) {
  const Inside here;
  return PMPI_Isend(data, count, type, to, tag, comm, request);
}
int MPI_Irecv(void* data, int count, MPI_Datatype type, int from, int tag, MPI_Comm comm, MPI_Request* request) {
  const Inside here;
  return PMPI_Irecv(data, count, type, from, tag, comm, request);
}
int MPI_Testsome(int count, MPI_Request* requests, int* done, int* indices, MPI_Status* statuses) {
  const Inside here;
  return PMPI_Testsome(count, requests, done, indices, statuses);
}
int MPI_Test(MPI_Request* request, int* done, MPI_Status* status) {
  const Inside here;
  return PMPI_Test(request, done, status);
}
int MPI_Get_count(const MPI_Status* status, MPI_Datatype type, int* count) {
  const Inside here;
  usleep(20);
  return PMPI_Get_count(status, type, count);
}
int MPI_Cancel(MPI_Request* request) {
  const Inside here;
  return PMPI_Cancel(request);
}
int MPI_Iallgather(const void* data, int count, MPI_Datatype type, void* all, int each, MPI_Datatype all_type,
                   MPI_Comm comm, MPI_Request* request) {
  const Inside here;
  return PMPI_Iallgather(data, count, type, all, each, all_type, comm, request);
}
int MPI_Ibarrier(MPI_Comm comm, MPI_Request* request) {
  const Inside here;
  return PMPI_Ibarrier(comm, request);
}
}

namespace ddp {
namespace {

TEST_CASE("one thread at a time is inside MPI") {
  auto context = Context::Create();
  INFO(context.status().ToString());
  REQUIRE(context.ok());
  int level = 0;
  MPI_Query_thread(&level);
  REQUIRE(level == MPI_THREAD_SERIALIZED);
  ProcessGroup& world = (*context)->world();
  std::vector<std::unique_ptr<ProcessGroup>> groups;
  for (int i = 0; i < 3; ++i) {
    auto group = world.Split(0, world.rank());
    REQUIRE(group.ok());
    groups.push_back(*std::move(group));
  }
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (const auto& group : groups) {
    threads.emplace_back([&wrong, &group = *group] {
      for (int round = 0; round < 100; ++round) {
        int64_t value = group.rank() + round;
        const Buffer buffer{&value, 1, DType::kInt64, {}};
        auto work = group.AllReduce(buffer, buffer);
        const int64_t n = group.size();
        wrong += !work.Wait().ok() || value != n * (n - 1) / 2 + n * round;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == 0);
  groups.clear();
  context->reset();
  CHECK(calls > 300);
  CHECK(collisions == 0);
}

}  // namespace
}  // namespace ddp
