// SPDX-License-Identifier: Apache-2.0
// Runs the same test on ranks that are processes under mpirun or threads of one process.
//
//   TEST_CASE("the barrier ends") {
//     RunOnRanks([](Rank& rank) { RANK_CHECK_OK(rank.group().Barrier().Wait()); });
//   }
#ifndef TESTS_SUPPORT_RANKS_H_
#define TESTS_SUPPORT_RANKS_H_

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "ddp/context.h"
#include "ddp/process_group.h"
#include "tests/support/check.h"

namespace ddp::testing {

// One rank, as its test body sees it. Used by that rank's thread only.
class Rank {
 public:
  Rank(Context& context, ProcessGroup& group, std::function<void()> meet)
      : context_(context), group_(group), meet_(std::move(meet)) {}

  Context& context() { return context_; }
  // The world; or another group of all ranks, see ranks_group.
  ProcessGroup& group() { return group_; }
  int rank() const { return context_.rank(); }
  int size() const { return context_.world_size(); }

  // Waits until all ranks are here, without the library under test.
  void Meet() { meet_(); }

  // At least so many bytes from the group's Allocate, those asked for zero. Collective. What has been let go of is lent
  // again: to allocate takes a hundred times as long as most operations. Ranks let go in the same order.
  std::shared_ptr<const Allocation> Lend(size_t bytes);

 private:
  Context& context_;
  ProcessGroup& group_;
  std::function<void()> meet_;
  std::vector<std::shared_ptr<const Allocation>> lent_;
};

// Set before main: makes the groups of the ranks. Null: these are the worlds.
extern absl::StatusOr<std::unique_ptr<ProcessGroup>> (*ranks_group)(Context& context);

// The world's size here: mpirun's, or DDP_TEST_RANKS (2 if unset).
int RankCount();

// Entries of a folder, such as /proc/self/fd.
size_t EntriesOf(const char* folder);

// How many threads this process has, once there are no more than `most`, but after 5 s in any case: the kernel lists a
// thread for a moment after it was joined.
size_t ThreadsLeft(size_t most);

// Whether the ranks of this run are threads of one process.
bool RanksAreThreads();

// Whether they are all on one node: DDP_NODE_SIZE does not cut them.
bool OnOneNode();

// Makes a new world of RankCount() ranks, runs `body` on each of them, and fails the Catch2 test case with every rank's
// failures. When a rank fails, its group is aborted so that the others end too. `options` may leave out who the ranks
// are.
void RunOnRanks(const std::function<void(Rank&)>& body, const ContextOptions& options = {});

// The same with a short time-out of the ranks' groups, which begins when all ranks are there: a busy machine takes its
// time to start them.
inline void RunWithTimeout(absl::Duration timeout, const std::function<void(Rank&)>& body) {
  RunOnRanks([&](Rank& rank) {
    RANK_CHECK_OK(rank.group().SetTimeout(timeout));
    rank.Meet();
    body(rank);
  });
}

}  // namespace ddp::testing

#endif  // TESTS_SUPPORT_RANKS_H_
