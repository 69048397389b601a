// SPDX-License-Identifier: Apache-2.0
// Context::Recover on CPUs: a world that has failed is replaced by one of all ranks, or of those that come.
// Ranks that really die are in tests/fault, GPUs in tests/unit/recover_gpu_test.cc.
#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "ddp/ddp.h"
#include "tests/support/catch.h"
#include "tests/support/ranks.h"

namespace ddp::testing {
namespace {

using absl::StatusCode;

constexpr size_t kTensors = 3, kElements = 5000;

// A training whose sums are exact.
class Training {
 public:
  explicit Training(Rank& rank) : rank_(rank), momenta_(kTensors * kElements) {
    std::vector<Parameter> parameters;
    for (size_t t = 0; t < kTensors; ++t) {
      parameters.push_back({absl::StrCat("t", t), {}, {nullptr, kElements, DType::kFloat32, {}}, {}});
    }
    model_ = RANK_VALUE(DistributedDataParallel::Create(
        rank.context().world(), parameters, {.bucket_bytes = kElements * sizeof(float), .op = ReduceOp::kSum}));
  }

  absl::Status Reduce() {
    for (size_t t = kTensors; t-- > 0;) {
      for (size_t i = 0; i < kElements; ++i) {
        grad(t)[i] = static_cast<float>((rank_.rank() + 1) * (committed_ + 1) + static_cast<int64_t>((i + t) % 5)) +
                     static_cast<float>(static_cast<int64_t>(value(t)[i]) % 2);
      }
      model_->GradReady(t);
    }
    return model_->FinishBackward();
  }
  void Update() {
    for (size_t t = 0; t < kTensors; ++t) {
      for (size_t i = 0; i < kElements; ++i) value(t)[i] += momenta_[t * kElements + i] += grad(t)[i];
    }
    ++committed_;
  }
  void StepUntil(int64_t end) {
    while (committed_ < end) {
      RANK_CHECK_OK(Reduce());
      Update();
    }
  }
  // The step from which all go on.
  int64_t Recover() {
    RANK_CHECK_OK(rank_.context().Recover());
    ProcessGroup& world = rank_.context().world();
    RANK_CHECK_OK(model_->Rebind(world));
    std::vector<Buffer> state = {{momenta_.data(), momenta_.size(), DType::kFloat32, {}}};
    for (size_t t = 0; t < kTensors; ++t) state.push_back(model_->value(t));
    return committed_ = RANK_VALUE(SyncState(world, committed_, state));
  }
  std::vector<float> State() const {
    std::vector<float> state = momenta_;
    for (size_t t = 0; t < kTensors; ++t) state.insert(state.end(), value(t), value(t) + kElements);
    return state;
  }

 private:
  float* value(size_t t) const { return static_cast<float*>(model_->value(t).data); }
  float* grad(size_t t) const { return static_cast<float*>(model_->grad(t).data); }

  Rank& rank_;
  std::vector<float> momenta_;
  std::unique_ptr<DistributedDataParallel> model_;
  int64_t committed_ = 0;
};

// What an operation of a world that has failed says.
absl::Status FailureOf(Rank& rank) { return rank.context().world().Barrier().Wait(); }

TEST_CASE("a training goes on in a new world of all ranks, as often as worlds fail, with the same result") {
  RunOnRanks([](Rank& rank) {
    Training undisturbed(rank), training(rank);
    undisturbed.StepUntil(9);

    // In a step: some ranks wait for the others.
    training.StepUntil(3);
    const bool last = rank.rank() == rank.size() - 1;
    rank.Meet();
    if (last) rank.context().world().Abort(absl::AbortedError("the test breaks the world"));
    RANK_CHECK_STATUS(last ? FailureOf(rank) : training.Reduce(), StatusCode::kAborted, "the test breaks the world");
    RANK_CHECK_EQ(training.Recover(), 3);
    const BackendChoice& choice = rank.context().backend_choice();
    RANK_CHECK_EQ(choice.backend, rank.context().world().backend());
    RANK_CHECK(absl::StrContains(choice.text, absl::StrCat("with all ", rank.size(), " rank")));
    RANK_CHECK(absl::StrContains(choice.text, "the test breaks the world"));
    RANK_CHECK_EQ(rank.context().world().size(), rank.size());
    RANK_CHECK_EQ(rank.context().world().rank(), rank.rank());
    training.StepUntil(6);

    // After a step that rank 0 alone has completed.
    RANK_CHECK_OK(training.Reduce());
    if (rank.rank() == 0) training.Update();
    rank.Meet();
    rank.context().world().Abort(absl::AbortedError("again"));
    RANK_CHECK_STATUS(FailureOf(rank), StatusCode::kAborted, "again");
    RANK_CHECK_EQ(training.Recover(), rank.size() == 1 ? 7 : 6);
    training.StepUntil(9);
    RANK_CHECK(training.State() == undisturbed.State());
    rank.Meet();
  });
}

TEST_CASE("a world that works is not replaced") {
  RunOnRanks([](Rank& rank) {
    ProcessGroup* const world = &rank.context().world();
    RANK_CHECK_STATUS(rank.context().Recover(), StatusCode::kFailedPrecondition, absl::StrCat("rank ", rank.rank()),
                      "has not failed");
    RANK_CHECK(&rank.context().world() == world);
    RANK_CHECK_OK(world->Barrier().Wait());
  });
}

TEST_CASE("a rank that comes late, but alive, belongs to the new world", "[timeout]") {
  RunWithTimeout(absl::Milliseconds(500), [](Rank& rank) {
    if (rank.size() == 1) return;
    const bool late = rank.rank() == rank.size() - 1;
    if (!late) RANK_CHECK_STATUS(FailureOf(rank), StatusCode::kDeadlineExceeded, "did not arrive");
    rank.Meet();
    if (late) RANK_CHECK_STATUS(FailureOf(rank), StatusCode::kDeadlineExceeded, "did not arrive");
    RANK_CHECK_OK(rank.context().Recover(absl::Seconds(50)));
    RANK_CHECK_EQ(rank.context().world().size(), rank.size());
    RANK_CHECK(rank.context().world().timeout() == rank.context().timeout());
    RANK_CHECK_OK(rank.context().world().Barrier().Wait());
    rank.Meet();
  });
}

// With a store the others go on; without one each learns what cannot be done.
TEST_CASE("ranks that do not come to a recovery are left out, where there is a store", "[timeout]") {
  RunOnRanks([](Rank& rank) {
    const int last = rank.size() - 1;
    if (last == 0) return;
    rank.Meet();
    rank.context().world().Abort(absl::AbortedError("enough"));
    RANK_CHECK_STATUS(FailureOf(rank), StatusCode::kAborted, "enough");
    if (rank.rank() == last) {
      rank.Meet();
      const absl::Status status = rank.context().Recover(absl::Seconds(60));
      RANK_CHECK_STATUS(status, StatusCode::kDeadlineExceeded, absl::StrCat("rank ", last));
      RANK_CHECK_EQ(absl::StrJoin(FailedRanks(status), ","), absl::StrCat(last));
      RANK_CHECK(!rank.context().world().status().ok());
      rank.Meet();
      rank.Meet();
      return;
    }
    // Longer than a busy machine keeps one of the others from coming.
    const absl::Status status = rank.context().Recover(absl::Milliseconds(3500));
    rank.Meet();
    if (!RanksAreThreads() && last > 1) {
      RANK_CHECK_STATUS(status, StatusCode::kFailedPrecondition, absl::StrCat("without rank ", last), "no store",
                        "checkpoint", "ContextOptions::store");
    } else {
      RANK_CHECK_OK(status);
      ProcessGroup& world = rank.context().world();
      RANK_CHECK_EQ(world.size(), last);
      RANK_CHECK_EQ(world.rank(), rank.rank());
      RANK_CHECK_OK(world.Barrier().Wait());
      RANK_CHECK(absl::StrContains(rank.context().backend_choice().text, absl::StrCat("without rank ", last)));
    }
    rank.Meet();
    if (status.ok()) {
      ProcessGroup& world = rank.context().world();
      // And once more, all who are left.
      world.Abort(absl::AbortedError("once more"));
      RANK_CHECK_STATUS(FailureOf(rank), StatusCode::kAborted, "once more");
      RANK_CHECK_OK(rank.context().Recover());
      RANK_CHECK_EQ(rank.context().world().size(), last);
      RANK_CHECK_OK(rank.context().world().Barrier().Wait());
    }
    rank.Meet();
  });
}

// What it knows of the failure does not name it: the others gave it up when they met.
TEST_CASE("a rank that comes to a recovery when the others have gone on makes no world of its own", "[timeout]") {
  std::atomic<bool> gone_on{false};
  RunOnRanks([&gone_on](Rank& rank) {
    if (rank.size() != 3 || !RanksAreThreads()) return;
    rank.Meet();
    if (rank.rank() == 2) return;  // leaves
    RANK_CHECK_STATUS(FailureOf(rank), StatusCode::kUnavailable, "rank 2");
    if (rank.rank() == 0) {
      RANK_CHECK_OK(rank.context().Recover(absl::Milliseconds(500)));
      RANK_CHECK_EQ(rank.context().world().size(), 1);
      gone_on = true;
      return;
    }
    while (!gone_on) absl::SleepFor(absl::Milliseconds(1));
    const absl::Status status = rank.context().Recover(absl::Milliseconds(500));
    RANK_CHECK_STATUS(status, StatusCode::kDeadlineExceeded, "rank 1", "rank 0 went on without it");
    RANK_CHECK_EQ(absl::StrJoin(FailedRanks(status), ","), "1");
    RANK_CHECK(!rank.context().world().status().ok());
  });
}

// A store of which calls for keys like this are answered too late.
class SlowStore final : public Store {
 public:
  SlowStore(std::shared_ptr<Store> store, std::string slow) : store_(std::move(store)), slow_(std::move(slow)) {}
  absl::Status Set(absl::string_view key, absl::string_view value, absl::Time deadline) override {
    return store_->Set(key, value, deadline);
  }
  absl::StatusOr<std::string> Get(absl::string_view key, absl::Time deadline) override {
    return store_->Get(key, deadline);
  }
  absl::StatusOr<int64_t> Add(absl::string_view key, int64_t delta, absl::Time deadline) override {
    if (absl::StrContains(key, slow_)) return absl::DeadlineExceededError("the store is slow");
    return store_->Add(key, delta, deadline);
  }

 private:
  const std::shared_ptr<Store> store_;
  const std::string slow_;
};

TEST_CASE("a rank that is left alone does not go on while a slow store may know of others who did", "[timeout]") {
  if (!RanksAreThreads()) return;
  const std::shared_ptr<Store> store = CreateMemoryStore();
  std::vector<std::thread> threads;
  std::atomic<bool> recovered{false};
  absl::Status status;
  for (const int rank : {0, 1}) {
    threads.emplace_back([&, rank] {
      ContextOptions options;
      options.rank = rank;
      options.world_size = 2;
      options.store = rank == 0 ? std::make_shared<SlowStore>(store, "/claims") : store;
      const absl::StatusOr<std::unique_ptr<Context>> context = Context::Create(options);
      if (rank != 0 || !context.ok()) return;  // leaves
      while ((*context)->world().Barrier().Wait().ok()) {
      }
      status = (*context)->Recover(absl::Seconds(10));
      recovered = true;
    });
  }
  for (std::thread& thread : threads) thread.join();
  INFO(status.ToString());
  CHECK(recovered);
  CHECK(status.code() == StatusCode::kDeadlineExceeded);
  CHECK(absl::StrContains(status.message(), "rank 0: Recover cannot learn whether others went on: the store is slow"));
}

}  // namespace
}  // namespace ddp::testing
