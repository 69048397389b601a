// SPDX-License-Identifier: Apache-2.0
// What becomes of messages that are still on their way when a group of several nodes fails. This program stands between
// the library and MPI (MPI's profiling interface) and holds messages back, as a peer does that does not take them. It
// has initialised MPI for one thread at a time, so that the library's own threads leave MPI alone.
#include <mpi.h>

#include <algorithm>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "libddp/comm/nodes/node_wire.h"
#include "tests/support/catch.h"
#include "tests/support/memory.h"

namespace {

struct Held {
  const char* data;
  std::string before;
  int tag;
  MPI_Comm comm;
};
std::vector<Held> held;
int held_tag = -1;

// Instead of the message something is under way that ends with Release.
int Hold(const void* data, int count, int tag, MPI_Comm comm, MPI_Request* request) {
  const char* const bytes = static_cast<const char*>(data);
  held.push_back({bytes, std::string(bytes, static_cast<size_t>(count)), tag, comm});
  int self = 0;
  PMPI_Comm_rank(comm, &self);
  return PMPI_Irecv(nullptr, 0, MPI_BYTE, self, tag, comm, request);
}

void Release() {
  for (const Held& h : held) {
    int self = 0;
    PMPI_Comm_rank(h.comm, &self);
    PMPI_Send(nullptr, 0, MPI_BYTE, self, h.tag, h.comm);
  }
  held.clear();
}

}  // namespace

extern "C" int MPI_Isend(const void* data, int count, MPI_Datatype type, int to, int tag, MPI_Comm comm,
                         MPI_Request* request) {
  if (tag % ddp::Wire::kTags == held_tag) return Hold(data, count, tag, comm, request);
  return PMPI_Isend(data, count, type, to, tag, comm, request);
}

namespace ddp::testing {
namespace {

using absl::StatusCode;

// What a peer still receives is what it was promised, whatever the program makes of its memory by then. False where a
// rank sent nothing, as the operation had failed before the machine let it come: then it is to be tried again.
bool MessagesStay(WireTag tag, size_t count, bool in_place) {
  int sent = 0;
  RunOnRanks([&](Rank& rank) {
    Memory in(rank, Placement::kAllocated, DType::kFloat32, count),
        out(rank, Placement::kAllocated, DType::kFloat32, count);
    in.Fill(rank.rank() + 1);
    RANK_CHECK_OK(rank.group().SetTimeout(absl::Milliseconds(1500)));  // not of the allocations
    rank.Meet();
    held_tag = static_cast<int>(tag);
    RANK_CHECK(!rank.group().AllReduce(in.whole(), in_place ? in.whole() : out.whole()).Wait().ok(), "");
    held_tag = -1;
    in.Fill(7);
    out.Fill(7);
    sent = held.empty() ? 0 : 1;
    for (const Held& h : held) RANK_CHECK(std::equal(h.before.begin(), h.before.end(), h.data), h.before.size());
    Release();
    rank.Meet();
  });
  int all_sent = 0;
  MPI_Allreduce(&sent, &all_sent, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
  return all_sent == 1;
}

void CheckMessagesStay(WireTag tag, size_t count, bool in_place) {
  bool stay = false;
  for (int tries = 0; tries < 5 && !stay; ++tries) stay = MessagesStay(tag, count, in_place);
  CHECK(stay);
}

// Rank 0's time is up while it computes: only its own calls can tell rank 1.
void CheckPeersAreTold() {
  ContextOptions options;
  options.timeout = absl::Seconds(20);
  RunOnRanks(
      [&](Rank& rank) {
        Memory m(rank, Placement::kAllocated, DType::kFloat32, 100'000);
        rank.Meet();
        if (rank.rank() == 0) RANK_CHECK_OK(rank.group().SetTimeout(absl::Milliseconds(300)));
        held_tag = static_cast<int>(WireTag::kPartial);
        const absl::Time begin = absl::Now();
        Work work = rank.group().AllReduce(m.whole(), m.whole());
        while (rank.rank() == 0 && rank.group().status().ok()) absl::SleepFor(absl::Milliseconds(10));
        absl::SleepFor(absl::Milliseconds(100));
        RANK_CHECK_STATUS(work.Wait(), StatusCode::kDeadlineExceeded, "all_reduce", "timed out after 300ms");
        RANK_CHECK(absl::Now() - begin < absl::Seconds(10), absl::FormatDuration(absl::Now() - begin));
        held_tag = -1;
        Release();
        rank.Meet();
      },
      options);
}

TEST_CASE("messages under way keep their contents when their group fails, and the peers are told", "[timeout]") {
  int level = 0;
  REQUIRE(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &level) == MPI_SUCCESS);
  REQUIRE(level == MPI_THREAD_SERIALIZED);
  constexpr size_t kOneExchange = 100'000, kTwoExchanges = 1'000'000;
  for (const bool in_place : {true, false}) {
    CheckMessagesStay(WireTag::kPartial, kOneExchange, in_place);
    CheckMessagesStay(WireTag::kPartial, kTwoExchanges, in_place);
    CheckMessagesStay(WireTag::kResult, kTwoExchanges, in_place);
  }
  CheckPeersAreTold();
  MPI_Finalize();
}

}  // namespace
}  // namespace ddp::testing
