// SPDX-License-Identifier: Apache-2.0
#include "libddp/launch/rendezvous.h"

#include <atomic>
#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ddp/collectives.h"
#include "ddp/context.h"
#include "ddp/process_group.h"
#include "libddp/comm/hierarchical_group.h"
#include "tests/support/catch.h"
#include "tests/unit/store_place.h"

namespace ddp {
namespace {

using Gathered = absl::StatusOr<std::vector<std::string>>;

// What one rank thinks it is, and when it comes.
struct Player {
  int rank;
  int size;
  absl::Duration delay = absl::ZeroDuration();
};

// Each player on its own thread meets the others once; the outcomes in the order of `players`.
std::vector<Gathered> Meet(const std::function<std::shared_ptr<Store>()>& store, const std::vector<Player>& players,
                           absl::Duration timeout) {
  std::vector<Gathered> outcomes(players.size(), absl::UnknownError("did not run"));
  std::vector<std::thread> threads;
  for (size_t i = 0; i < players.size(); ++i) {
    threads.emplace_back([&, i] {
      absl::SleepFor(players[i].delay);
      const auto rendezvous = CreateStoreRendezvous(store(), players[i].rank, players[i].size, "world");
      outcomes[i] =
          rendezvous->AllGather(absl::StrCat("I am ", players[i].rank), "start of the world", absl::Now() + timeout);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return outcomes;
}

std::vector<Gathered> MeetInMemory(const std::vector<Player>& players, absl::Duration timeout) {
  const std::shared_ptr<Store> store = CreateMemoryStore();
  return Meet([store] { return store; }, players, timeout);
}

void CheckFailed(const Gathered& outcome, absl::StatusCode code, const std::vector<std::string>& parts) {
  INFO(outcome.status().ToString());
  CHECK(outcome.status().code() == code);
  for (const std::string& part : parts) {
    INFO("lacks " << part);
    CHECK(absl::StrContains(outcome.status().message(), part));
  }
}

TEST_CASE("a world of one meets itself without a store") {
  const auto rendezvous = CreateStoreRendezvous(nullptr, 0, 1, "world");
  const Gathered outcome = rendezvous->AllGather("alone", "start", absl::InfinitePast());
  REQUIRE(outcome.ok());
  CHECK(*outcome == std::vector<std::string>{"alone"});
}

TEST_CASE("ranks meet again and again, whatever the bytes and whoever is late") {
  constexpr int kSize = 4;
  constexpr int kRounds = 20;
  const std::shared_ptr<Store> store = CreateMemoryStore();
  const auto said = [](int rank, int round) {
    return std::string(static_cast<size_t>(rank * round), static_cast<char>(rank + round));
  };
  int good[kSize] = {};
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kSize; ++rank) {
    threads.emplace_back([&, rank] {
      const auto rendezvous = CreateStoreRendezvous(store, rank, kSize, "world");
      for (int round = 0; round < kRounds; ++round) {
        if (round % kSize == rank) absl::SleepFor(absl::Milliseconds(3));
        const Gathered all =
            rendezvous->AllGather(said(rank, round), absl::StrCat("round ", round), absl::Now() + absl::Seconds(30));
        if (!all.ok()) return;
        bool right = all->size() == kSize;
        for (int i = 0; right && i < kSize; ++i) right = (*all)[i] == said(i, round);
        good[rank] += right;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (int rank = 0; rank < kSize; ++rank) CHECK(good[rank] == kRounds);
}

TEST_CASE("groups of other names do not meet") {
  const std::shared_ptr<Store> store = CreateMemoryStore();
  const auto meet = [&](int rank, const std::string& name) {
    return CreateStoreRendezvous(store, rank, 2, name)->AllGather("", "start", absl::Now() + absl::Milliseconds(60));
  };
  Gathered first = absl::UnknownError("");
  std::thread other([&] { first = meet(0, "a"); });
  CheckFailed(meet(1, "b"), absl::StatusCode::kDeadlineExceeded, {"rank 0 of 2"});
  other.join();
  CheckFailed(first, absl::StatusCode::kDeadlineExceeded, {"rank 1 of 2"});
}

TEST_CASE("a time-out names exactly the ranks that did not come, on every rank that did") {
  const auto outcomes = MeetInMemory({{0, 5}, {2, 5}, {4, 5}}, absl::Seconds(2));  // they all come in it
  CheckFailed(outcomes[0], absl::StatusCode::kDeadlineExceeded,
              {"rank 0: start of the world: ", "ranks 1, 3 of 5 did not come within ", "s; is every rank started"});
  // A busy machine may let a moment pass between the choice of the deadline and the call.
  const bool told = absl::StrContains(outcomes[0].status().message(), "within 2s") ||
                    absl::StrContains(outcomes[0].status().message(), "within 1.");
  CHECK(told);
  CheckFailed(outcomes[1], absl::StatusCode::kDeadlineExceeded, {"rank 2: start of the world: ", "ranks 1, 3 of 5"});
  CheckFailed(outcomes[2], absl::StatusCode::kDeadlineExceeded, {"rank 4: start of the world: ", "ranks 1, 3 of 5"});
}

TEST_CASE("nobody waits for a rank that has died, which all learn") {
  const absl::Time start = absl::Now();
  const std::shared_ptr<Store> store = CreateMemoryStore();
  // Ranks of a world of which only some are to meet. One of them sees who has died.
  const std::vector<int> called = {2, 3, 5, 7};
  const auto meet = [&](int rank, bool sees) {
    const auto find_dead = [] { return std::vector<int>{4, 5, 7}; };
    return CreateStoreRendezvous(store, rank, 4, "part", called, sees ? find_dead : std::function<std::vector<int>()>())
        ->AllGather("", "start", absl::Now() + absl::Minutes(5));
  };
  Gathered first = absl::UnknownError("did not run");
  std::thread other([&] { first = meet(0, false); });
  const Gathered second = meet(1, true);
  other.join();
  CheckFailed(first, absl::StatusCode::kUnavailable,
              {"rank 2: start: rank 3 reports: ranks 5, 7 of 4 have died before they came"});
  CheckFailed(second, absl::StatusCode::kUnavailable, {"rank 3: start: ranks 5, 7 of 4 have died before they came"});
  CHECK(FailedRanks(first.status()) == std::vector<int>{5, 7});
  CHECK(FailedRanks(second.status()) == std::vector<int>{5, 7});
  CHECK(FailedRanks(StoreRendezvousFailure(*store, "part")) == std::vector<int>{5, 7});
  CHECK(StoreRendezvousFailure(*store, "another").ok());
  CHECK(absl::Now() - start < absl::Minutes(2));
}

TEST_CASE("one who comes after the others gave up fails at once") {
  const absl::Time start = absl::Now();
  const std::shared_ptr<Store> store = CreateMemoryStore();
  const auto get = [store] { return store; };
  CheckFailed(Meet(get, {{0, 2}}, absl::Milliseconds(50))[0], absl::StatusCode::kDeadlineExceeded, {"rank 1 of 2"});
  CheckFailed(Meet(get, {{1, 2}}, absl::Minutes(1))[0], absl::StatusCode::kDeadlineExceeded,
              {"rank 1: start of the world: rank 0 reports: rank 1 of 2 did not come within "});
  CHECK(absl::Now() - start < absl::Seconds(20));
}

// A store that holds up what a rank sets under a key.
class SlowStore final : public Store {
 public:
  SlowStore(std::shared_ptr<Store> store, std::string key, absl::Duration pause)
      : store_(std::move(store)), key_(std::move(key)), pause_(pause) {}

  absl::Status Set(absl::string_view key, absl::string_view value, absl::Time deadline) override {
    if (key == key_) {
      reached_.store(true);
      absl::SleepFor(pause_);
    }
    return store_->Set(key, value, deadline);
  }
  absl::StatusOr<std::string> Get(absl::string_view key, absl::Time deadline) override {
    return store_->Get(key, deadline);
  }
  absl::StatusOr<int64_t> Add(absl::string_view key, int64_t delta, absl::Time deadline) override {
    return store_->Add(key, delta, deadline);
  }
  void AwaitPause() const {
    while (!reached_.load()) absl::SleepFor(absl::Milliseconds(1));
  }

 private:
  const std::shared_ptr<Store> store_;
  const std::string key_;
  const absl::Duration pause_;
  std::atomic<bool> reached_{false};
};

TEST_CASE("the first cause is that of all ranks, also while it is being told") {
  const std::shared_ptr<Store> store = CreateMemoryStore();
  const auto slow = std::make_shared<SlowStore>(store, "part/failed", absl::Milliseconds(300));
  const auto meet = [&](int rank, std::shared_ptr<Store> over, int dead) {
    return CreateStoreRendezvous(std::move(over), rank, 4, "part", {0, 1, 2, 3}, [dead] { return std::vector{dead}; })
        ->AllGather("", "start", absl::Now() + absl::Minutes(5));
  };
  Gathered first = absl::UnknownError("did not run");
  std::thread other([&] { first = meet(0, slow, 2); });
  slow->AwaitPause();
  const Gathered second = meet(1, store, 3);
  other.join();
  CheckFailed(first, absl::StatusCode::kUnavailable, {"rank 0: start: rank 2 of 4 has died"});
  CheckFailed(second, absl::StatusCode::kUnavailable, {"rank 1: start: rank 0 reports: rank 2 of 4 has died"});
  CHECK(FailedRanks(second.status()) == std::vector<int>{2});
  CHECK(FailedRanks(StoreRendezvousFailure(*store, "part")) == std::vector<int>{2});
}

TEST_CASE("ranks that have come in time wait a moment for rank 0 to say so") {
  const std::shared_ptr<Store> store = CreateMemoryStore();
  const auto slow = std::make_shared<SlowStore>(store, "world/0/all", absl::Milliseconds(300));
  Gathered first = absl::UnknownError("did not run"), second = first;
  std::thread other([&] {
    first = CreateStoreRendezvous(slow, 0, 3, "world")->AllGather("", "start", absl::Now() + absl::Minutes(1));
  });
  std::thread third([&] {
    second = CreateStoreRendezvous(store, 2, 3, "world")->AllGather("", "start", absl::Now() + absl::Minutes(1));
  });
  for (const char* value : {"world/0/0", "world/0/2"}) REQUIRE(store->Get(value, absl::Now() + absl::Minutes(1)).ok());
  const auto rendezvous = CreateStoreRendezvous(store, 1, 3, "world");
  const Gathered mine = rendezvous->AllGather("", "start", absl::Now() + absl::Milliseconds(100));
  other.join();
  third.join();
  INFO(mine.status().ToString());
  CHECK(mine.ok());
  CHECK(first.ok());
  CHECK(second.ok());
}

TEST_CASE("a rank 0 that has come and then says nothing is to blame") {
  const std::shared_ptr<Store> store = CreateMemoryStore();
  REQUIRE(store->Set("world/size", "2 0", absl::InfiniteFuture()).ok());
  REQUIRE(store->Add("world/arrivals", 1, absl::InfiniteFuture()).ok());
  REQUIRE(store->Set("world/0/0", "", absl::InfiniteFuture()).ok());
  const Gathered outcome =
      CreateStoreRendezvous(store, 1, 2, "world")->AllGather("", "start", absl::Now() + absl::Milliseconds(50));
  CheckFailed(outcome, absl::StatusCode::kDeadlineExceeded,
              {"rank 1: start: all 2 ranks came within ", "s, but rank 0, which was to tell them, is silent"});
  CHECK(FailedRanks(outcome.status()) == std::vector<int>{0});
}

// Ranks that come in the last moment.
class LateRendezvous final : public Rendezvous {
 public:
  LateRendezvous(std::unique_ptr<Rendezvous> rendezvous, absl::Time until)
      : rendezvous_(std::move(rendezvous)), until_(until) {}
  int rank() const override { return rendezvous_->rank(); }
  int size() const override { return rendezvous_->size(); }
  Gathered AllGather(absl::string_view mine, absl::string_view what, absl::Time deadline) override {
    Gathered all = rendezvous_->AllGather(mine, what, deadline);
    absl::SleepFor(until_ - absl::Now());
    return all;
  }
  absl::StatusOr<std::unique_ptr<Wire>> OpenWire() override { return rendezvous_->OpenWire(); }

 private:
  const std::unique_ptr<Rendezvous> rendezvous_;
  const absl::Time until_;
};

TEST_CASE("a group is made also where its last rank has left no time for more than to come") {
  const std::shared_ptr<Store> store = CreateMemoryStore();
  const absl::Time deadline = absl::Now() + absl::Seconds(3);
  ProgressThread progress;
  absl::Status made[2];
  std::vector<std::thread> threads;
  std::mutex mutex;
  std::vector<std::unique_ptr<ProcessGroup>> groups;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      LateRendezvous rendezvous(CreateStoreRendezvous(store, rank, 2, "world"),
                                deadline + absl::Milliseconds(50 * rank));
      auto group = CreateHierarchicalGroup(
          rendezvous, {.timeout = absl::Seconds(60), .deadline = deadline, .stall_warning = {}, .progress = &progress});
      made[rank] = group.status();
      const std::lock_guard<std::mutex> lock(mutex);
      if (group.ok()) groups.push_back(*std::move(group));
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const absl::Status& status : made) {
    INFO(status.ToString());
    CHECK(status.ok());
  }
}

TEST_CASE("a time-out in a later round names the round's step") {
  const std::shared_ptr<Store> store = CreateMemoryStore();
  Gathered second = absl::UnknownError("did not run");
  std::thread other([&] {
    const auto rendezvous = CreateStoreRendezvous(store, 0, 2, "world");
    if (!rendezvous->AllGather("", "start", absl::Now() + absl::Seconds(30)).ok()) return;
    second = rendezvous->AllGather("", "exchange of memory", absl::Now() + absl::Milliseconds(60));
  });
  CHECK(CreateStoreRendezvous(store, 1, 2, "world")->AllGather("", "start", absl::Now() + absl::Seconds(30)).ok());
  other.join();
  CheckFailed(second, absl::StatusCode::kDeadlineExceeded, {"rank 0: exchange of memory: rank 1 of 2"});
}

TEST_CASE("other world sizes are found at once and told to everybody") {
  const absl::Time start = absl::Now();
  SECTION("the odd one comes last") {
    const auto outcomes = MeetInMemory({{0, 3}, {1, 3}, {2, 4, absl::Milliseconds(50)}}, absl::Minutes(1));
    for (const Gathered& outcome : outcomes) {
      CheckFailed(outcome, absl::StatusCode::kFailedPrecondition,
                  {"start of the world", "rank 2 has world size 4", "has world size 3", "same one"});
    }
    CheckFailed(outcomes[0], absl::StatusCode::kFailedPrecondition, {"rank 0: ", "rank 2 reports"});
  }
  SECTION("the odd one comes first, and is not part of the others' world") {
    const auto outcomes =
        MeetInMemory({{0, 2, absl::Milliseconds(50)}, {1, 2, absl::Milliseconds(50)}, {3, 4}}, absl::Minutes(1));
    for (const Gathered& outcome : outcomes) {
      CheckFailed(outcome, absl::StatusCode::kFailedPrecondition, {"rank 3 has world size 4", "has world size 2"});
    }
  }
  CHECK(absl::Now() - start < absl::Seconds(20));
}

TEST_CASE("two processes of one rank are found at once and told to everybody") {
  const absl::Time start = absl::Now();
  const auto outcomes = MeetInMemory({{0, 3}, {1, 3}, {1, 3, absl::Milliseconds(50)}}, absl::Minutes(1));
  for (const Gathered& outcome : outcomes) {
    CheckFailed(outcome, absl::StatusCode::kFailedPrecondition, {"as rank 1 of 3 before", "a rank of its own"});
  }
  CHECK(absl::Now() - start < absl::Seconds(20));
}

// What one rank gets when it makes a Context of two, and more over the same store, beside the first and after it.
struct SecondContexts {
  absl::Status beside = absl::UnknownError("did not run"), after = beside;
  absl::StatusOr<int64_t> sum = beside;  // of the first Context, made when it has seen the second one fail
};
SecondContexts CreateAgain(std::shared_ptr<Store> store, int rank) {
  ContextOptions options;
  options.rank = rank;
  options.world_size = 2;
  options.store = std::move(store);
  SecondContexts found;
  absl::StatusOr<std::unique_ptr<Context>> first = Context::Create(options);
  if (!first.ok()) return found;
  found.beside = Context::Create(options).status();
  found.sum = AllReduceScalar((*first)->world(), int64_t{rank} + 1, ReduceOp::kSum);
  first->reset();
  found.after = Context::Create(options).status();
  return found;
}

TEST_CASE("over one store there is one Context, and another one is refused on all ranks") {
  const Place place;
  const std::shared_ptr<Store> memory = CreateMemoryStore();
  std::function<std::shared_ptr<Store>(int rank)> open;
  SECTION("in memory") {
    open = [&](int) { return memory; };
  }
  SECTION("over TCP") {
    open = [&](int rank) { return *CreateTcpStore(place.Options(rank == 0)); };
  }
  SecondContexts found[2];
  std::thread other([&] { found[1] = CreateAgain(open(1), 1); });
  found[0] = CreateAgain(open(0), 0);
  other.join();
  for (const SecondContexts& mine : found) {
    CheckFailed(mine.beside, absl::StatusCode::kFailedPrecondition, {"an earlier Context", "a store of its own"});
    CheckFailed(mine.after, absl::StatusCode::kFailedPrecondition, {"an earlier Context", "a store of its own"});
    INFO(mine.sum.status().ToString());
    CHECK(mine.sum.value_or(0) == 3);
  }
}

TEST_CASE("over a file store too, each rank with a store of its own") {
  const std::string path = absl::StrCat(std::filesystem::temp_directory_path().string(), "/ddp_rendezvous_test.",
                                        absl::ToUnixNanos(absl::Now()));
  const auto open = [&] { return *CreateFileStore({path, "run", 3}); };
  SECTION("all come") {
    const auto outcomes = Meet(open, {{0, 3}, {1, 3}, {2, 3, absl::Milliseconds(20)}}, absl::Minutes(1));
    for (const Gathered& outcome : outcomes) {
      REQUIRE(outcome.ok());
      CHECK(*outcome == std::vector<std::string>{"I am 0", "I am 1", "I am 2"});
    }
    CHECK_FALSE(std::filesystem::exists(path));
  }
  SECTION("one does not") {
    const auto outcomes = Meet(open, {{0, 3}, {1, 3}}, absl::Seconds(2));
    for (const Gathered& outcome : outcomes) {
      CheckFailed(outcome, absl::StatusCode::kDeadlineExceeded, {"rank 2 of 3 did not come within "});
    }
    std::filesystem::remove(path);
  }
}

}  // namespace
}  // namespace ddp
