// SPDX-License-Identifier: Apache-2.0
#include "tests/support/ranks.h"

#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <iterator>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "tests/support/catch.h"
#include "tests/support/launch.h"

namespace ddp::testing {
namespace {

// What threads that play ranks have in common: a barrier that a failing rank breaks, and what went wrong.
class Threads {
 public:
  explicit Threads(int size) : size_(size) {}

  void Meet() {
    std::unique_lock lock(mutex_);
    const int round = round_;
    if (++arrived_ == size_) {
      arrived_ = 0;
      ++round_;
      changed_.notify_all();
    }
    changed_.wait(lock, [&] { return round_ != round || !failures_.empty(); });
    if (round_ == round) throw std::runtime_error("another rank failed before Meet");
  }

  void Fail(std::string what) {
    std::lock_guard lock(mutex_);
    failures_.push_back(std::move(what));
    changed_.notify_all();
  }

  const std::vector<std::string>& failures() const { return failures_; }  // after the threads have ended

 private:
  const int size_;
  std::mutex mutex_;
  std::condition_variable changed_;
  int arrived_ = 0;
  int round_ = 0;
  std::vector<std::string> failures_;
};

// Runs one rank; the text of its failure, or nothing.
std::string RunOne(const std::function<void(Rank&)>& body, const ContextOptions& options, std::function<void()> meet) {
  absl::StatusOr<std::unique_ptr<Context>> context = Context::Create(options);
  if (!context.ok()) return absl::StrCat("Context::Create: ", context.status().ToString());
  absl::StatusOr<std::unique_ptr<ProcessGroup>> other;
  if (ranks_group != nullptr) {
    other = ranks_group(**context);
    if (!other.ok()) return absl::StrCat("the rank's group: ", other.status().ToString());
  }
  ProcessGroup& group = ranks_group == nullptr ? (*context)->world() : **other;
  std::string failure;
  try {
    Rank rank(**context, group, std::move(meet));
    if (ranks_group != nullptr) rank.Meet();  // what happens to one rank does not reach into the start of another
    body(rank);
  } catch (const std::exception& e) {
    failure = e.what();
    group.Abort(absl::InternalError(absl::StrCat("the test failed: ", failure)));
  }
  return failure;
}

}  // namespace

absl::StatusOr<std::unique_ptr<ProcessGroup>> (*ranks_group)(Context& context) = nullptr;

// The smallest that is free and large enough.
std::shared_ptr<const Allocation> Rank::Lend(size_t bytes) {
  const std::shared_ptr<const Allocation>* best = nullptr;
  for (const std::shared_ptr<const Allocation>& each : lent_) {
    if (each.use_count() > 1 || each->bytes() < bytes || each->bytes() > 64 * bytes + 4096) continue;
    if (best == nullptr || each->bytes() < (*best)->bytes()) best = &each;
  }
  if (best != nullptr) {
    std::memset((*best)->data(), 0, bytes);
    return *best;
  }
  lent_.push_back(std::make_shared<const Allocation>(RANK_VALUE(group_.Allocate(bytes, Device{}))));
  return lent_.back();
}

size_t EntriesOf(const char* folder) {
  return static_cast<size_t>(std::distance(std::filesystem::directory_iterator(folder), {}));
}

size_t ThreadsLeft(size_t most) {
  size_t threads = EntriesOf("/proc/self/task");
  for (int i = 0; i < 500 && threads > most; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    threads = EntriesOf("/proc/self/task");
  }
  return threads;
}

bool RanksAreThreads() { return !UnderMpi(); }

bool OnOneNode() {
  const char* const node_size = std::getenv("DDP_NODE_SIZE");
  return node_size == nullptr || std::atoi(node_size) >= RankCount();
}

int RankCount() {
  if (UnderMpi()) return MpiSize();
  const char* text = std::getenv("DDP_TEST_RANKS");
  return text == nullptr ? 2 : std::atoi(text);
}

void RunOnRanks(const std::function<void(Rank&)>& body, const ContextOptions& options) {
  if (UnderMpi()) {
    StartMpi();
    const std::string failure = RunOne(body, options, MpiBarrier);
    CHECK(failure == "");  // main_ranks.cc ends the job
    return;
  }
  const int size = RankCount();
  const std::shared_ptr<Store> store = CreateMemoryStore();
  Threads common(size);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      ContextOptions mine = options;
      mine.rank = rank;
      mine.world_size = size;
      mine.store = store;
      const std::string failure = RunOne(body, mine, [&common] { common.Meet(); });
      if (!failure.empty()) common.Fail(absl::StrCat("rank ", rank, ": ", failure));
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::string& failure : common.failures()) UNSCOPED_INFO(failure);
  CHECK(common.failures().empty());
}

}  // namespace ddp::testing
