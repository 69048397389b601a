// SPDX-License-Identifier: Apache-2.0
// Going on in another group: Context::NewGroup, ProcessGroup::Register, DistributedDataParallel::Rebind, SyncState.
// Ranks that really die are in tests/fault.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "ddp/ddp.h"
#include "tests/support/catch.h"
#include "tests/support/forwarding_group.h"
#include "tests/support/ranks.h"

namespace ddp::testing {
namespace {

using absl::StatusCode;

absl::Time In(double seconds) { return absl::Now() + absl::Seconds(seconds); }

// The ranks of the world but those from `end` on.
std::vector<int> FirstRanks(int end) {
  std::vector<int> ranks(static_cast<size_t>(end));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

// The ranks of the world but those from `end` on, without a store; null on those. Collective over the world.
std::unique_ptr<ProcessGroup> SplitFirst(Rank& rank, int end) {
  return RANK_VALUE(rank.group().Split(rank.rank() < end ? 0 : -1, rank.rank()));
}

// The sum over `group` of each rank's number in the world + 1, times i: what AllReduce gives in `buffer`.
void CheckReduces(ProcessGroup& group, Buffer buffer, int world_rank, const std::vector<int>& ranks) {
  auto* const data = static_cast<float*>(buffer.data);
  for (size_t i = 0; i < buffer.count; ++i) data[i] = static_cast<float>((world_rank + 1) * static_cast<int>(i % 100));
  RANK_CHECK_OK(group.AllReduce(buffer, buffer).Wait());
  const int factor = std::accumulate(ranks.begin(), ranks.end(), static_cast<int>(ranks.size()));
  for (size_t i = 0; i < buffer.count; ++i)
    RANK_CHECK_EQ(data[i], static_cast<float>(factor * static_cast<int>(i % 100)));
}

TEST_CASE("a world without a store says that NewGroup needs one") {
  RunOnRanks([](Rank& rank) {
    if (RanksAreThreads() || rank.size() == 1) return;
    RANK_CHECK_STATUS(rank.context().NewGroup(FirstRanks(rank.size()), In(5)), StatusCode::kFailedPrecondition, "store",
                      "torchrun", absl::StrCat("rank ", rank.rank()));
  });
}

TEST_CASE("a new group of the ranks of the world reduces among them") {
  if (!RanksAreThreads()) return;
  RunOnRanks([](Rank& rank) {
    for (int end = rank.size(); end > 0; --end) {
      std::vector<int> ranks = FirstRanks(end);
      std::reverse(ranks.begin(), ranks.end());
      if (rank.rank() < end) {
        std::unique_ptr<ProcessGroup> group = RANK_VALUE(rank.context().NewGroup(ranks, In(60)));
        RANK_CHECK_EQ(group->size(), end);
        RANK_CHECK_EQ(group->rank(), end - 1 - rank.rank());  // its place in the list
        std::vector<float> data(5000);
        CheckReduces(*group, {data.data(), data.size(), DType::kFloat32, {}}, rank.rank(), ranks);
        Allocation memory = RANK_VALUE(group->Allocate(20'000, Device{}));
        CheckReduces(*group, memory.View(DType::kFloat32, 0, 5000), rank.rank(), ranks);
        RANK_CHECK_OK(group->Barrier().Wait());
        // Errors, of a model too, name the ranks of the world beside the group's.
        if (group->rank() != rank.rank()) {
          RANK_CHECK_STATUS(group->SetTimeout(absl::ZeroDuration()), StatusCode::kInvalidArgument,
                            absl::StrCat("rank ", group->rank(), " (rank ", rank.rank(), " of the world): "));
        }
        if (end > 1) {
          RANK_CHECK_STATUS(DistributedDataParallel::Create(*group, {}), StatusCode::kInvalidArgument, "parameter",
                            "of this group are ranks");
        }
      }
      rank.Meet();
    }
    RANK_CHECK_OK(rank.group().Barrier().Wait());  // the world goes on working
  });
}

TEST_CASE("a new group and its parts keep the time-out of the context") {
  if (!RanksAreThreads() || RankCount() == 1) return;
  ContextOptions options;
  options.timeout = absl::Seconds(2);  // of the start, too
  RunOnRanks(
      [](Rank& rank) {
        std::unique_ptr<ProcessGroup> group = RANK_VALUE(rank.context().NewGroup(FirstRanks(rank.size()), In(60)));
        std::unique_ptr<ProcessGroup> part = RANK_VALUE(group->Split(0, rank.rank()));
        for (ProcessGroup* each : {group.get(), part.get()}) {
          rank.Meet();
          const bool late = rank.rank() == 0;
          const auto check = [&] {
            RANK_CHECK_STATUS(each->Barrier().Wait(), StatusCode::kDeadlineExceeded, "barrier", "timed out after",
                              "did not arrive", "rank 0");
          };
          if (!late) check();
          rank.Meet();
          if (late) check();
        }
      },
      options);
}

TEST_CASE("lists that cannot be a group are refused") {
  RunOnRanks([](Rank& rank) {
    Context& context = rank.context();
    const int last = rank.size() - 1;
    RANK_CHECK_STATUS(context.NewGroup({rank.rank(), rank.size()}, In(5)), StatusCode::kInvalidArgument,
                      absl::StrCat("no rank ", rank.size()));
    RANK_CHECK_STATUS(context.NewGroup({rank.rank(), -1}, In(5)), StatusCode::kInvalidArgument, "no rank -1");
    RANK_CHECK_STATUS(context.NewGroup({last, last}, In(5)), StatusCode::kInvalidArgument, "twice");
    RANK_CHECK_STATUS(context.NewGroup({}, In(5)), StatusCode::kInvalidArgument, "not among them");
    if (rank.rank() > 0) {
      RANK_CHECK_STATUS(context.NewGroup({0}, In(5)), StatusCode::kInvalidArgument, "not among them");
    }
  });
}

TEST_CASE("a rank that does not come is named, and may come to a later attempt") {
  if (!RanksAreThreads()) return;
  RunOnRanks([](Rank& rank) {
    const int last = rank.size() - 1;
    if (last == 0) return;
    const std::vector<int> all = FirstRanks(rank.size());
    for (int attempt = 0; attempt < 2; ++attempt) {
      if (rank.rank() != last) {
        const auto group = rank.context().NewGroup(all, In(2));  // all the others come in it
        RANK_CHECK_STATUS(group, StatusCode::kDeadlineExceeded, absl::StrCat("rank ", last), absl::StrJoin(all, ","));
        RANK_CHECK_EQ(absl::StrJoin(FailedRanks(group.status()), ","), absl::StrCat(last));
      }
      rank.Meet();
    }
    // The first attempt of the last rank is the third of the others.
    std::unique_ptr<ProcessGroup> group = RANK_VALUE(rank.context().NewGroup(all, In(60)));
    RANK_CHECK_OK(group->Barrier().Wait());
  });
}

TEST_CASE("in errors a rank is called by its number in the world") {
  if (!RanksAreThreads() || RankCount() < 3) return;
  RunOnRanks([](Rank& rank) {
    if (rank.rank() != 0) return;
    const auto group = rank.context().NewGroup({0, 2}, In(0.2));
    RANK_CHECK_STATUS(group, StatusCode::kDeadlineExceeded, "rank 2 of 2 did not come");
    RANK_CHECK_EQ(absl::StrJoin(FailedRanks(group.status()), ","), "2");
  });
}

TEST_CASE("memory of a failed group keeps place and contents, and is reduced in another where it lies") {
  for (const size_t count : {size_t{100}, size_t{300'000}, size_t{1'500'000}}) {
    RunOnRanks([&](Rank& rank) {
      const int end = std::max(1, rank.size() - 1);
      const std::vector<int> ranks = FirstRanks(end);
      Allocation a = RANK_VALUE(rank.group().Allocate(count * 4, Device{}));
      Allocation b = RANK_VALUE(rank.group().Allocate(count * 4, Device{}));
      const Buffer view = a.View(DType::kFloat32, 0, count);
      auto* const data = static_cast<float*>(view.data);
      std::unique_ptr<ProcessGroup> group = SplitFirst(rank, end);
      std::unique_ptr<ProcessGroup> second = SplitFirst(rank, end);
      CheckReduces(rank.group(), view, rank.rank(), FirstRanks(rank.size()));
      rank.Meet();
      rank.group().Abort(absl::AbortedError("the test goes on in a smaller group"));
      if (rank.rank() >= end) return;
      for (size_t i = 0; i < count; ++i) data[i] = static_cast<float>(static_cast<size_t>(rank.rank()) + i % 1000);
      RANK_CHECK_OK(group->Register(a));
      RANK_CHECK_OK(group->Register(b));
      RANK_CHECK(a.data() == data);
      for (size_t i = 0; i < count; ++i)
        RANK_CHECK_EQ(data[i], static_cast<float>(static_cast<size_t>(rank.rank()) + i % 1000));
      CheckReduces(*group, view, rank.rank(), ranks);
      CheckReduces(*group, b.View(DType::kFloat32, 0, count), rank.rank(), ranks);
      // Again, into a second one.
      RANK_CHECK_OK(second->Register(a));
      CheckReduces(*second, view, rank.rank(), ranks);
      CheckReduces(*group, view, rank.rank(), ranks);  // which copies it now
      // Where it lies: else it would not matter to rank 0 that it has freed what the others use.
      RANK_CHECK_OK(second->Register(b));
      RANK_CHECK_OK(second->Barrier().Wait());
      RANK_CHECK_OK(group->Barrier().Wait());  // what fails the second group next finds nobody in its barrier
      if (end == 1) return;
      if (rank.rank() == 0) a = Allocation();
      const Buffer mine = (rank.rank() == 0 ? b : a).View(DType::kFloat32, 0, count);
      const absl::Status mixed = second->AllReduce(mine, mine).Wait();
      if (rank.rank() == 0) RANK_CHECK_STATUS(mixed, StatusCode::kFailedPrecondition, "freed");
    });
  }
}

TEST_CASE("what cannot be registered is refused") {
  RunOnRanks([](Rank& rank) {
    RANK_CHECK_STATUS(rank.group().Register(Allocation()), StatusCode::kInvalidArgument, "register",
                      absl::StrCat("rank ", rank.rank()));
    Allocation large = RANK_VALUE(rank.group().Allocate(8192, Device{}));
    Allocation small = RANK_VALUE(rank.group().Allocate(100, Device{}));
    if (rank.size() == 1) return;
    static_cast<char*>(large.data())[8191] = 7;
    RANK_CHECK_STATUS(rank.group().Register(rank.rank() == 0 ? large : small), StatusCode::kFailedPrecondition, "8192",
                      "100");
    RANK_CHECK_EQ(static_cast<int>(static_cast<char*>(large.data())[8191]), 7);
    RANK_CHECK_OK(rank.group().Barrier().Wait());
  });
}

TEST_CASE("state is taken from a rank at the lowest step") {
  RunOnRanks([](Rank& rank) {
    // Rank 0 is ahead; the lowest of the others gives.
    const int giver = rank.size() > 1 ? 1 : 0;
    int64_t step = rank.rank() == 0 && rank.size() > 1 ? 8 : 7;
    std::vector<float> floats(1000, static_cast<float>(rank.rank()));
    std::vector<int64_t> integers(3, 100 + rank.rank());
    std::vector<float> more(5, static_cast<float>(200 + rank.rank()));
    const std::vector<Buffer> state = {{floats.data(), floats.size(), DType::kFloat32, {}},
                                       {integers.data(), integers.size(), DType::kInt64, {}},
                                       {more.data(), more.size(), DType::kFloat32, {}}};
    RANK_CHECK_EQ(RANK_VALUE(SyncState(rank.group(), step, state)), 7);
    RANK_CHECK_EQ(absl::StrJoin(integers, ","), absl::StrJoin(std::vector<int>(3, 100 + giver), ","));
    for (const float f : floats) RANK_CHECK_EQ(f, static_cast<float>(giver));
    for (const float f : more) RANK_CHECK_EQ(f, static_cast<float>(200 + giver));
    RANK_CHECK_EQ(step, 7);
    RANK_CHECK_EQ(RANK_VALUE(SyncState(rank.group(), step, {})), 7);
  });
}

TEST_CASE("state that one rank cannot give or take is told on every rank, and changes nothing") {
  RunOnRanks([](Rank& rank) {
    const int wrong = rank.size() - 1;
    int64_t step = 7 + rank.rank();
    std::vector<float> floats(1000, static_cast<float>(rank.rank()));
    std::vector<Buffer> state = {{floats.data(), floats.size(), DType::kFloat32, {}}, {&step, 0, DType::kInt64, {}}};
    const Buffer right = state[0];
    if (rank.rank() == wrong) state[0].data = nullptr;
    RANK_CHECK_STATUS(SyncState(rank.group(), step, state).status(), StatusCode::kInvalidArgument,
                      absl::StrCat("rank ", wrong, ": sync_state: "));
    RANK_CHECK_EQ(step, 7 + rank.rank());
    RANK_CHECK_OK(rank.group().status());
    state[0] = right;
    RANK_CHECK_EQ(RANK_VALUE(SyncState(rank.group(), step, state)), 7);
    RANK_CHECK(floats == std::vector<float>(1000, 0.0f));
  });
}

// The first of its two parts has arrived everywhere then.
TEST_CASE("half a state is not taken for one, when a second failure comes while it is copied") {
  for (const bool ahead : {false, true}) {  // the others than rank 0, which gives
    INFO(ahead);
    RunOnRanks([ahead](Rank& rank) {
      if (rank.size() == 1) return;
      const bool root = rank.rank() == 0;
      const auto first = RANK_VALUE(rank.group().Split(0, rank.rank()));
      const auto others = RANK_VALUE(rank.group().Split(root ? -1 : 0, rank.rank()));
      const int64_t made = ahead && !root ? 8 : 7;
      int64_t step = made;
      std::vector<float> floats(1000, static_cast<float>(made));
      std::vector<int64_t> integers(3, made);
      const std::vector<Buffer> state = {{floats.data(), floats.size(), DType::kFloat32, {}},
                                         {integers.data(), integers.size(), DType::kInt64, {}}};
      int left = 2;
      FailingGroup failing(
          *first, [&](const Call&) { return left-- == 0; }, [&] { rank.Meet(); });
      RANK_CHECK_STATUS(SyncState(failing, step, state).status(), StatusCode::kAborted, "a rank is gone");
      RANK_CHECK_EQ(step, ahead && !root ? INT64_MAX : 7);
      RANK_CHECK_EQ(floats[999], 7.0f);
      if (!root) {
        const absl::StatusOr<int64_t> common = SyncState(*others, step, state);
        if (ahead) RANK_CHECK_STATUS(common.status(), StatusCode::kDataLoss, "start from a checkpoint");
        if (!ahead) RANK_CHECK_EQ(RANK_VALUE(common), 7);
      }
      rank.Meet();
      RANK_CHECK_EQ(RANK_VALUE(SyncState(rank.group(), step, state)), 7);
      RANK_CHECK_EQ(step, 7);
      RANK_CHECK(floats == std::vector<float>(1000, 7.0f) && integers == std::vector<int64_t>(3, 7));
    });
  }
}

std::vector<Parameter> ThreeParameters() {
  std::vector<Parameter> parameters;
  for (int i = 0; i < 3; ++i) {
    parameters.push_back({absl::StrCat("p", i), {}, Buffer{nullptr, 20'000, DType::kFloat32, {}}, {}});
  }
  return parameters;
}

// One backward pass in which every gradient is the rank's number in the world + 1 + its index.
absl::Status Step(DistributedDataParallel& model, int world_rank) {
  for (size_t p = model.size(); p-- > 0;) {
    std::fill_n(static_cast<float*>(model.grad(p).data), model.grad(p).count,
                static_cast<float>(world_rank + 1 + static_cast<int>(p)));
    model.GradReady(p);
  }
  return model.FinishBackward();
}

void CheckStep(DistributedDataParallel& model, int world_rank, int ranks) {
  RANK_CHECK_OK(Step(model, world_rank));
  for (size_t p = 0; p < model.size(); ++p) {
    // The mean of 1 .. ranks, and p.
    const float expected = static_cast<float>(ranks + 1) / 2 + static_cast<float>(p);
    const auto* const grad = static_cast<const float*>(model.grad(p).data);
    for (size_t i = 0; i < model.grad(p).count; ++i) RANK_CHECK_EQ(grad[i], expected);
  }
}

TEST_CASE("a model goes on in a smaller group, with its gradients where they were") {
  RunOnRanks([](Rank& rank) {
    DdpOptions options;
    options.bucket_bytes = 80'000;
    auto model = RANK_VALUE(DistributedDataParallel::Create(rank.group(), ThreeParameters(), options));
    CheckStep(*model, rank.rank(), rank.size());
    std::vector<void*> before;
    for (size_t p = 0; p < model->size(); ++p) before.push_back(model->grad(p).data);
    static_cast<float*>(model->value(1).data)[5] = static_cast<float>(rank.rank());
    const int end = std::max(1, rank.size() - 1);
    std::unique_ptr<ProcessGroup> group = SplitFirst(rank, end);
    rank.Meet();
    if (rank.rank() >= end) {
      rank.group().Abort(absl::AbortedError("enough"));
      rank.Meet();
      return;
    }
    // Some ranks hear of it in a step, some before.
    if (rank.rank() == 0) model->GradReady(2);
    rank.group().Abort(absl::AbortedError("enough"));
    RANK_CHECK_STATUS(rank.rank() == 0 ? absl::AbortedError("") : Step(*model, rank.rank()), StatusCode::kAborted);

    RANK_CHECK_OK(model->Rebind(*group));
    for (size_t p = 0; p < model->size(); ++p) RANK_CHECK(model->grad(p).data == before[p]);
    RANK_CHECK_EQ(static_cast<float*>(model->value(1).data)[5], static_cast<float>(rank.rank()));
    for (int step = 0; step < 3; ++step) CheckStep(*model, rank.rank(), end);
    RANK_CHECK_EQ(model->statistics().steps, 4);

    model->GradReady(1);
    RANK_CHECK_STATUS(model->Rebind(*group), StatusCode::kFailedPrecondition, "middle of a step",
                      absl::StrCat("rank ", rank.rank()));
    // A model that is destroyed in the middle of a step aborts its group, so all ranks must have come here.
    rank.Meet();
    rank.group().Abort(absl::AbortedError("over"));
    model.reset();
  });
}

// Writes down the steps that it is told of.
class StepsHook final : public CommHook {
 public:
  std::string name() const override { return "steps"; }
  Work Start(ProcessGroup& group, const GradBucket& bucket, int) override {
    if (bucket.index == 0) steps.push_back(bucket.step);
    return group.AllReduce(bucket.buffer, bucket.buffer, bucket.reduce);
  }
  absl::Status Finish(const GradBucket&) override { return absl::OkStatus(); }
  void Reset() override { steps.clear(); }

  std::vector<int64_t> steps;
};

// The last step before a failure may end on some ranks only. What it has taught them (the order of gradients, who uses
// what, how far hooks are) and when they look again must not keep them from making the same calls.
TEST_CASE("ranks that have made unequal numbers of steps go on together") {
  const auto steps_hook = [] { return std::make_shared<StepsHook>(); };
  const auto power = [] { return CreatePowerSgdHook({.rank = 1, .start_step = 4}); };
  const std::vector<std::function<void(DdpOptions&)>> variants = {
      [](DdpOptions&) {},
      [](DdpOptions& o) { o.static_graph = true; },
      [](DdpOptions& o) { o.unused = UnusedParameters::kDetect; },
      [&](DdpOptions& o) { o.hook = steps_hook(); },
      [&](DdpOptions& o) { o.hook = power(); },
      [&](DdpOptions& o) { o.hook = CreateCompressionHook(DType::kFloat16, power()); },
  };
  for (const auto& variant : variants) {
    RunOnRanks([&](Rank& rank) {
      DdpOptions options;
      options.bucket_bytes = 80'000;
      variant(options);
      std::vector<Parameter> parameters = ThreeParameters();
      for (Parameter& p : parameters) p.shape = {100, 200};
      std::unique_ptr<ProcessGroup> alone = RANK_VALUE(rank.group().Split(rank.rank(), 0));
      std::unique_ptr<ProcessGroup> all = SplitFirst(rank, rank.size());
      auto model = RANK_VALUE(DistributedDataParallel::Create(rank.group(), parameters, options));
      // Each rank's order is another one, and by itself it leaves a parameter out where that is allowed.
      const auto step = [&](int ranks, bool leave_out) {
        for (size_t k = 0; k < model->size(); ++k) {
          const size_t p = (k + static_cast<size_t>(rank.rank())) % model->size();
          if (leave_out && p == 1) continue;
          std::fill_n(static_cast<float*>(model->grad(p).data), model->grad(p).count,
                      static_cast<float>(rank.rank() + 1) + static_cast<float>(p));
          model->GradReady(p);
        }
        RANK_CHECK_OK(model->FinishBackward());
        for (size_t p = 0; p < model->size() && !leave_out; ++p) {
          const float own = static_cast<float>(ranks == 1 ? rank.rank() + 1 : 0);
          const float expected = (ranks == 1 ? own : static_cast<float>(ranks + 1) / 2) + static_cast<float>(p);
          const auto* const grad = static_cast<const float*>(model->grad(p).data);
          const float allowed = options.hook == nullptr ? 0.0f : 0.01f;
          for (size_t i = 0; i < model->grad(p).count; ++i) RANK_CHECK(std::abs(grad[i] - expected) <= allowed);
        }
      };
      RANK_CHECK_OK(model->Rebind(*alone));
      const bool may_leave_out = options.static_graph || options.unused == UnusedParameters::kDetect;
      for (int i = 0; i < rank.rank() + 1; ++i) step(1, may_leave_out && rank.rank() == 0);
      RANK_CHECK_OK(model->Rebind(*all));
      RANK_CHECK_EQ(model->statistics().steps, 1);
      for (int i = 0; i < 11; ++i) step(rank.size(), false);
      RANK_CHECK_EQ(model->statistics().steps, 12);
      if (const auto* const hook = dynamic_cast<const StepsHook*>(options.hook.get()); hook != nullptr) {
        RANK_CHECK_EQ(hook->steps.size(), size_t{11});
        RANK_CHECK_EQ(hook->steps.front(), 1);
        RANK_CHECK_EQ(hook->steps.back(), 11);
      }
      model.reset();
    });
  }
}

TEST_CASE("models that differ are not bound to one group") {
  if (RankCount() == 1) return;
  RunOnRanks([](Rank& rank) {
    auto model = RANK_VALUE(DistributedDataParallel::Create(rank.group(), ThreeParameters()));
    auto other = RANK_VALUE(DistributedDataParallel::Create(
        rank.group(), {{"other", {}, Buffer{nullptr, 20'000, DType::kFloat32, {}}, {}}}));
    std::unique_ptr<ProcessGroup> group = SplitFirst(rank, rank.size());
    RANK_CHECK_STATUS((rank.rank() == 0 ? model : other)->Rebind(*group), StatusCode::kFailedPrecondition, "other");
    RANK_CHECK_OK(model->Rebind(*group));
    CheckStep(*model, rank.rank(), rank.size());
    other.reset();
    model.reset();
  });
}

}  // namespace
}  // namespace ddp::testing
