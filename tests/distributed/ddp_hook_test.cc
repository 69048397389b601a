// SPDX-License-Identifier: Apache-2.0
// DistributedDataParallel: communication hooks.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ddp/comm_hook.h"
#include "ddp/distributed_data_parallel.h"
#include "libddp/base/failed_ranks.h"
#include "tests/support/catch.h"
#include "tests/support/ddp_model.h"
#include "tests/support/forwarding_group.h"

namespace ddp::testing {
namespace {

using absl::StatusCode;

// --- what a hook sees -----------------------------------------------------------------------------------------------

// Checks what it is given against the model's parameters, and doubles the result.
class ObservingHook final : public CommHook {
 public:
  std::string name() const override { return "observing"; }
  absl::Status Prepare(ProcessGroup&, absl::Span<const GradBucket> buckets) override {
    ++plans;
    prepared.assign(buckets.begin(), buckets.end());
    return absl::OkStatus();
  }
  Work Start(ProcessGroup& group, const GradBucket& bucket, int round) override {
    RANK_CHECK_EQ(round, 0);
    RANK_CHECK_EQ(bucket.index, next_);
    next_ = bucket.is_last ? 0 : next_ + 1;
    RANK_CHECK_EQ(bucket.is_last, bucket.index + 1 == prepared.size());
    RANK_CHECK(bucket.buffer.data == prepared[bucket.index].buffer.data);
    steps.push_back(bucket.step);
    for (const GradBucket::Gradient& g : bucket.gradients) {
      names.push_back(g.name);
      RANK_CHECK(g.offset + g.count <= bucket.buffer.count);
      for (size_t i = 0; i < g.count; ++i) {
        const double got = GetElement(bucket.buffer.dtype, bucket.buffer.data, g.offset + i);
        const double expected = Gradient(group.rank(), g.parameter, i, static_cast<int>(bucket.step));
        RANK_CHECK(got == expected, g.name, " at ", i, ": ", got, " not ", expected);
      }
    }
    return group.AllReduce(bucket.buffer, bucket.buffer, bucket.reduce);
  }
  absl::Status Finish(const GradBucket& bucket) override {
    for (size_t i = 0; i < bucket.buffer.count; ++i) {
      SetElement(bucket.buffer.dtype, bucket.buffer.data, i,
                 2 * GetElement(bucket.buffer.dtype, bucket.buffer.data, i));
    }
    return absl::OkStatus();
  }

  int plans = 0;
  std::vector<GradBucket> prepared;
  std::vector<int64_t> steps;
  std::vector<std::string> names;

 private:
  size_t next_ = 0;
};

TEST_CASE("a hook sees each bucket as one array, and its result is the gradients'") {
  RunOnRanks([](Rank& rank) {
    // Some gradients of the caller's, so that buckets are of several ranges; and all in one, and one each.
    for (const size_t bucket_bytes : {size_t{1}, size_t{30'000}, size_t{25} << 20}) {
      const auto hook = std::make_shared<ObservingHook>();
      DdpOptions options;
      options.bucket_bytes = bucket_bytes;
      options.hook = hook;
      std::vector<Parameter> parameters = MakeParameters(kCounts);
      std::vector<float> own(kCounts[1] + kCounts[5]);
      parameters[1].grad = {own.data(), kCounts[1], DType::kFloat32, {}};
      parameters[5].grad = {own.data() + kCounts[1], kCounts[5], DType::kFloat32, {}};
      parameters[6].shape = {7, 1};
      const Model model = Make(rank, parameters, options);
      std::vector<size_t> order = Backwards(kCounts.size());
      for (int step = 0; step < 3; ++step) {
        std::rotate(order.begin(), order.begin() + 3, order.end());
        Announce(rank, *model, order, step);
        RANK_CHECK_OK(model->FinishBackward());
        CheckGradients(rank, *model, [&](size_t p, size_t i) { return 2 * Average(rank.size(), p, i, step); });
      }
      std::sort(hook->names.begin(), hook->names.end());
      RANK_CHECK_EQ(hook->names.size(), 3 * kCounts.size());
      RANK_CHECK(std::unique(hook->names.begin(), hook->names.end()) - hook->names.begin() ==
                 static_cast<int>(kCounts.size()));
      RANK_CHECK_EQ(hook->steps.back(), int64_t{2});
      RANK_CHECK_EQ(hook->plans, static_cast<int>(model->statistics().plans));
      for (const GradBucket& bucket : hook->prepared) {
        for (const GradBucket::Gradient& g : bucket.gradients)
          RANK_CHECK_EQ(g.shape.size(), g.parameter == 6 ? 2u : 0u);
      }
    }
  });
}

// Two operations for each bucket, of different kinds: if ranks called them in different orders, the group would say so.
class TwoRounds final : public CommHook {
 public:
  explicit TwoRounds(unsigned seed) : random_(seed) {}
  std::string name() const override { return "two_rounds"; }
  int rounds() const override { return 2; }
  Work Start(ProcessGroup& group, const GradBucket& bucket, int round) override {
    std::this_thread::sleep_for(std::chrono::microseconds(random_() % 100));
    if (round == 1) return group.Broadcast(bucket.buffer, static_cast<int>(bucket.index) % group.size());
    return group.AllReduce(bucket.buffer, bucket.buffer, bucket.reduce);
  }

 private:
  std::mt19937 random_;
};

TEST_CASE("hooks of several rounds make the same calls on all ranks") {
  RunOnRanks([](Rank& rank) {
    DdpOptions options;
    options.bucket_bytes = 2000;
    options.hook = std::make_shared<TwoRounds>(static_cast<unsigned>(rank.rank()));
    const Model model = Make(rank, MakeParameters(std::vector<size_t>(12, 500)), options);
    std::vector<size_t> order = Backwards(12);
    for (int step = 0; step < 10; ++step) {
      std::shuffle(order.begin(), order.end(), std::mt19937(static_cast<unsigned>(100 * step + rank.rank())));
      CheckStep(rank, *model, order, step);
    }
    RANK_CHECK_EQ(model->statistics().buckets[0].operations, size_t{2});
  });
}

// Sends every rank's share in place of its gradients.
class ShareHook final : public CommHook {
 public:
  std::string name() const override { return "share"; }
  Work Start(ProcessGroup& group, const GradBucket& bucket, int) override {
    for (size_t i = 0; i < bucket.buffer.count; ++i) {
      SetElement(bucket.buffer.dtype, bucket.buffer.data, i, bucket.share);
    }
    return group.AllReduce(bucket.buffer, bucket.buffer, bucket.reduce);
  }
};

// What error feedback rests on: what ranks subtract from their errors is what the step's result has in it.
TEST_CASE("the shares of all ranks, reduced as the gradients are, give 1") {
  RunOnRanks([](Rank& rank) {
    for (int variant = 0; variant < 16; ++variant) {
      DdpOptions options;
      options.op = (variant & 1) != 0 ? ReduceOp::kSum : ReduceOp::kAvg;
      options.weighted = (variant & 2) != 0;
      options.gradient_predivide_factor = 4;
      options.hook = std::make_shared<ShareHook>();
      const Model model = Make(rank, MakeParameters({100}), options);
      if (options.weighted) model->SetWeight(rank.rank() == 1 ? 0 : 1.0 + rank.rank());
      const auto check = [&] {
        const double got = GetElement(DType::kFloat32, model->grad(0).data, 99);
        RANK_CHECK(std::abs(got - 1) < 1e-6, "variant ", variant, ": ", got);
        return absl::OkStatus();
      };
      std::optional<DistributedDataParallel::Join> join;
      const bool joined = (variant & 4) != 0;
      if (joined) join.emplace(*model, JoinOptions{(variant & 8) != 0, false, nullptr, check});
      for (int step = 0; step < (joined ? 4 - rank.rank() : 2); ++step) {
        model->GradReady(0);
        RANK_CHECK_OK(model->FinishBackward());
        RANK_CHECK_OK(check());
      }
      if (joined) RANK_CHECK_OK(join->Finish());
    }
  });
}

// --- failures -------------------------------------------------------------------------------------------------------

class FailingHook final : public CommHook {
 public:
  enum class How { kNever, kPrepare, kPrepareThrow, kStatus, kThrow, kThrowInt, kFinishThrow };
  explicit FailingHook(How how) : how_(how) {}
  std::string name() const override { return "failing"; }
  absl::Status Prepare(ProcessGroup&, absl::Span<const GradBucket>) override {
    if (how_ == How::kPrepare) return absl::DataLossError("the codebook is empty");
    if (how_ == How::kPrepareThrow) throw std::runtime_error("the codebook is empty");
    return absl::OkStatus();
  }
  Work Start(ProcessGroup& group, const GradBucket& bucket, int) override {
    if (bucket.step == 1 && bucket.index == 1) {
      if (how_ == How::kStatus) return absl::DataLossError("the codebook is empty");
      if (how_ == How::kThrow) throw std::runtime_error("the codebook is empty");
      if (how_ == How::kThrowInt) throw 5;
    }
    return group.AllReduce(bucket.buffer, bucket.buffer, bucket.reduce);
  }
  absl::Status Finish(const GradBucket& bucket) override {
    if (how_ == How::kFinishThrow && bucket.step == 1) throw std::runtime_error("the codebook is empty");
    return absl::OkStatus();
  }

 private:
  const How how_;
};

TEST_CASE("a hook that fails or throws on one rank ends the step with its cause on every rank") {
  using How = FailingHook::How;
  for (const How how : {How::kStatus, How::kThrow, How::kThrowInt, How::kFinishThrow}) {
    RunOnRanks([&](Rank& rank) {
      const int last = rank.size() - 1;
      DdpOptions options;
      options.bucket_bytes = 400;
      options.hook = std::make_shared<FailingHook>(rank.rank() == last ? how : How::kNever);
      const Model model = Make(rank, MakeParameters({100, 100, 100}), options);
      CheckStep(rank, *model, {2, 1, 0}, 0);
      rank.Meet();
      Announce(rank, *model, {2, 1, 0}, 1);
      absl::Status status = model->FinishBackward();
      if (rank.rank() != last && status.ok()) {  // was through with the step
        Announce(rank, *model, {2, 1, 0}, 2);
        status = model->FinishBackward();
      }
      RANK_CHECK(!status.ok());
      const std::string cause = how == How::kThrowInt ? "no std::exception" : "the codebook is empty";
      for (const std::string& part : {std::string("hook failing"), absl::StrCat("rank ", last), cause}) {
        RANK_CHECK(absl::StrContains(status.message(), part), status.ToString());
      }
      if (rank.rank() != last) RANK_CHECK(status.code() == StatusCode::kAborted, status.ToString());
    });
  }
}

// One of the calls that return no status throws on this rank.
class ThrowingHook final : public CommHook {
 public:
  enum class Where { kNowhere, kName, kRounds, kReset };
  explicit ThrowingHook(Where where) : where_(where) {}
  std::string name() const override {
    ThrowIf(Where::kName);
    return "throwing";
  }
  int rounds() const override {
    ThrowIf(Where::kRounds);
    return 1;
  }
  void Reset() override {
    const Where where = std::exchange(where_, Where::kNowhere);  // once
    if (where == Where::kReset) throw std::runtime_error("the codebook is lost");
  }
  Work Start(ProcessGroup& group, const GradBucket& bucket, int) override {
    return group.AllReduce(bucket.buffer, bucket.buffer, bucket.reduce);
  }

 private:
  void ThrowIf(Where where) const {
    if (where_ == where) throw std::runtime_error("the codebook is lost");
  }
  Where where_;
};

TEST_CASE("name(), rounds() and Reset() of a hook that throw on one rank are an error of the call on every rank") {
  using Where = ThrowingHook::Where;
  for (const Where where : {Where::kName, Where::kRounds, Where::kReset}) {
    RunOnRanks([&](Rank& rank) {
      const int last = rank.size() - 1;
      const auto other = RANK_VALUE(rank.group().Split(0, rank.rank()));
      DdpOptions options;
      options.hook = std::make_shared<ThrowingHook>(rank.rank() == last ? where : Where::kNowhere);
      auto model = DistributedDataParallel::Create(rank.group(), MakeParameters({100}), options);
      const absl::Status status = model.ok() ? (*model)->Rebind(*other) : model.status();
      RANK_CHECK_EQ(model.ok(), where == Where::kReset);
      RANK_CHECK(!status.ok());
      for (const std::string& part : {absl::StrCat("rank ", last), std::string("threw: the codebook is lost")}) {
        RANK_CHECK(absl::StrContains(status.message(), part), status.ToString());
      }
      if (where == Where::kReset) {
        RANK_CHECK_OK((*model)->Rebind(*other));  // the group works
        CheckStep(rank, **model, {0}, 0);
        *model = nullptr;
      }
      RANK_CHECK_OK(rank.group().Barrier().Wait());
    });
  }
}

// Its operation ends as one of a group of the hook's own does that has failed.
class OwnGroupHook final : public CommHook {
 public:
  explicit OwnGroupHook(bool fails) : fails_(fails) {}
  std::string name() const override { return "own_group"; }
  Work Start(ProcessGroup& group, const GradBucket& bucket, int) override {
    if (fails_) return Work(new Failed);
    return group.AllReduce(bucket.buffer, bucket.buffer, bucket.reduce);
  }

 private:
  class Failed final : public TestWork {
   public:
    bool Done() const override { return false; }
    absl::Status Wait(absl::Time) override {
      return WithFailedRanks(absl::UnavailableError("rank 0 of the other group is gone"), {0});
    }
  };
  const bool fails_;
};

TEST_CASE("the failure of a hook's own group names the step and the hook, and blames no rank by its number there") {
  RunOnRanks([](Rank& rank) {
    const int last = rank.size() - 1;
    DdpOptions options;
    options.hook = std::make_shared<OwnGroupHook>(rank.rank() == last);
    const Model model = Make(rank, MakeParameters({100}), options);
    rank.Meet();
    Announce(rank, *model, {0}, 0);
    const absl::Status status = model->FinishBackward();
    RANK_CHECK_STATUS(status, rank.rank() == last ? StatusCode::kUnavailable : StatusCode::kAborted,
                      absl::StrCat("rank ", last, ": step 1, bucket 0: hook own_group: rank 0 of the other group"));
    RANK_CHECK(FailedRanks(status).empty(), status.ToString());
  });
}

TEST_CASE("a hook that cannot prepare on one rank is an error of Create on every rank, and the group goes on") {
  using How = FailingHook::How;
  for (const How how : {How::kPrepare, How::kPrepareThrow}) {
    RunOnRanks([&](Rank& rank) {
      const int last = rank.size() - 1;
      DdpOptions options;
      options.hook = std::make_shared<FailingHook>(rank.rank() == last ? how : How::kNever);
      const auto model = DistributedDataParallel::Create(rank.group(), MakeParameters({100}), options);
      const StatusCode code = how == How::kPrepare ? StatusCode::kDataLoss : StatusCode::kUnknown;
      RANK_CHECK_STATUS(model.status(), code, absl::StrCat("rank ", last), "the codebook is empty");
      RANK_CHECK_OK(rank.group().Barrier().Wait());
    });
  }
}

TEST_CASE("a hook with impossible settings is refused at Create") {
  RunOnRanks([](Rank& rank) {
    const auto create = [&](std::shared_ptr<CommHook> hook, DType dtype = DType::kFloat32) {
      DdpOptions options;
      options.hook = std::move(hook);
      return DistributedDataParallel::Create(rank.group(), MakeParameters({100}, dtype), options).status();
    };
    RANK_CHECK_STATUS(create(CreatePowerSgdHook({.rank = 0})), StatusCode::kInvalidArgument, "rank=0");
    RANK_CHECK_STATUS(create(CreatePowerSgdHook({.start_step = -1})), StatusCode::kInvalidArgument, "start_step=-1");
    RANK_CHECK_STATUS(create(CreatePowerSgdHook(), DType::kFloat64), StatusCode::kInvalidArgument, "float64");
    RANK_CHECK_STATUS(create(CreateCompressionHook(DType::kFloat32)), StatusCode::kInvalidArgument, "float32");
  });
}

// --- compression to 16 bits -----------------------------------------------------------------------------------------

TEST_CASE("gradients travel in 16 bits, and the sum is not rounded to them") {
  RunOnRanks([](Rank& rank) {
    for (const DType wire : {DType::kFloat16, DType::kBFloat16}) {
      for (const DType dtype : {DType::kFloat32, DType::kFloat64, wire}) {
        DdpOptions options;
        options.op = ReduceOp::kSum;
        options.hook = CreateCompressionHook(wire);
        const Model model = Make(rank, MakeParameters({1000, 64}, dtype), options);
        // 1 + 2^-12 is no 16-bit float; 256 + 1 is no bfloat16, but fits the sum.
        for (size_t i = 0; i < 1000; ++i) {
          SetElement(dtype, model->grad(0).data, i, i == 0 ? 1 + 0x1p-12 : rank.rank() == 0 ? 256 : 1);
        }
        model->GradReady(0);
        WriteGradient(rank, *model, 1, 0);
        model->GradReady(1);
        RANK_CHECK_OK(model->FinishBackward());
        const double n = rank.size();
        const double rounded = dtype == DType::kFloat64 ? 1 + 0x1p-12 : 1;
        RANK_CHECK_EQ(GetElement(dtype, model->grad(0).data, 0), n * rounded);
        if (dtype == wire) continue;
        RANK_CHECK_EQ(GetElement(dtype, model->grad(0).data, 999), 255 + n);
        CheckGradient(rank, *model, 1, [&](size_t p, size_t i) { return n * Average(rank.size(), p, i, 0); });
      }
    }
  });
}

TEST_CASE("predividing keeps what travels as float16 in range") {
  RunOnRanks([](Rank& rank) {
    for (const double factor : {1.0, 16.0}) {
      DdpOptions options;
      options.gradient_predivide_factor = factor;
      options.hook = CreateCompressionHook(DType::kFloat16);
      const Model model = Make(rank, MakeParameters({10}), options);
      for (size_t i = 0; i < 10; ++i) SetElement(DType::kFloat32, model->grad(0).data, i, 98'304);
      model->GradReady(0);
      RANK_CHECK_OK(model->FinishBackward());
      const double got = GetElement(DType::kFloat32, model->grad(0).data, 9);
      RANK_CHECK(factor == 1 ? std::isinf(got) : std::abs(got - 98'304) < 0.1, got);
    }
  });
}

TEST_CASE("whether all is finite is told with hooks too") {
  RunOnRanks([](Rank& rank) {
    uint32_t nonfinite = 0;
    DdpOptions options;
    options.nonfinite = &nonfinite;
    options.hook = CreateCompressionHook(DType::kFloat16);
    const Model model = Make(rank, MakeParameters({1000}), options);
    CheckStep(rank, *model, {0}, 0);
    RANK_CHECK_EQ(nonfinite, 0u);
    WriteGradient(rank, *model, 0, 1);
    if (rank.rank() == 0) SetElement(DType::kFloat32, model->grad(0).data, 999, 1e30);  // not as float16
    model->GradReady(0);
    RANK_CHECK_OK(model->FinishBackward());
    RANK_CHECK_EQ(nonfinite, 1u);
  });
}

TEST_CASE("a sum in float32 that overflows as it becomes a float16 gradient is told") {
  RunOnRanks([](Rank& rank) {
    for (const bool copied : {false, true}) {
      uint32_t nonfinite = 0;
      DdpOptions options;
      options.op = ReduceOp::kSum;
      options.nonfinite = &nonfinite;
      options.reduce_in_float32 = true;
      options.copy_gradients = copied;
      options.hook = CreateCompressionHook(DType::kFloat16);
      const Model model = Make(rank, MakeParameters({1000}, DType::kFloat16), options);
      std::vector<uint16_t> own(1000);
      for (const double mine : {30'000.0 / rank.size(), 40'000.0}) {
        if (copied) RANK_CHECK_OK(model->SetGrad(0, {own.data(), own.size(), DType::kFloat16, {}}));
        const bool overflows = mine * rank.size() > 65'504;
        nonfinite = 0;
        const Buffer grad = model->grad(0);
        for (size_t i = 0; i < 1000; ++i) SetElement(DType::kFloat16, grad.data, i, i == 998 ? mine : 1);
        model->GradReady(0);
        RANK_CHECK_OK(model->FinishBackward());
        RANK_CHECK_EQ(std::isinf(GetElement(DType::kFloat16, grad.data, 998)), overflows);
        RANK_CHECK_EQ(nonfinite, overflows ? 1u : 0u);
      }
    }
  });
}

// Writes to what lies between the gradients, too.
class SignHook final : public CommHook {
 public:
  std::string name() const override { return "sign"; }
  Work Start(ProcessGroup& group, const GradBucket& bucket, int) override {
    for (size_t i = 0; i < bucket.buffer.count; ++i) {
      const double g = GetElement(bucket.buffer.dtype, bucket.buffer.data, i);
      SetElement(bucket.buffer.dtype, bucket.buffer.data, i, g < 0 ? -1 : 1);
    }
    return group.AllReduce(bucket.buffer, bucket.buffer, bucket.reduce);
  }
};

TEST_CASE("what a hook leaves between gradients does not count") {
  RunOnRanks([](Rank& rank) {
    DdpOptions options;
    options.hook = std::make_shared<SignHook>();
    const Model model = Make(rank, MakeParameters({1, 3, 0, 5}), options);
    for (size_t p = model->size(); p-- > 0;) {
      Fill(model->grad(p), 5);
      model->GradReady(p);
    }
    RANK_CHECK_OK(model->FinishBackward());
    RANK_CHECK_EQ(RANK_VALUE(model->GradNorm()), 3.0);
    for (const Buffer& span : model->grad_spans()) {
      double sum = 0;
      for (size_t i = 0; i < span.count; ++i) sum += GetElement(span.dtype, span.data, i);
      RANK_CHECK_EQ(sum, 9.0);
    }
  });
}

TEST_CASE("an infinity that travels in 8-bit blocks is gone with its step, also if gradients are written over") {
  RunOnRanks([](Rank& rank) {
    DdpOptions options;
    options.hook = CreateBlockCompressionHook(BlockFormat::kInt8);
    const Model model = Make(rank, MakeParameters({3, 100}), options);
    for (int step = 0; step < 3; ++step) {
      for (size_t p = model->size(); p-- > 0;) {
        Fill(model->grad(p), step == 1 && rank.rank() == 0 ? std::numeric_limits<float>::infinity() : 1);
        model->GradReady(p);
      }
      RANK_CHECK_OK(model->FinishBackward());
      const double norm = RANK_VALUE(model->GradNorm());
      RANK_CHECK(step == 1 ? !std::isfinite(norm) : std::abs(norm - std::sqrt(103.0)) < 1e-6, "step ", step, ": ",
                 norm);
    }
  });
}

}  // namespace
}  // namespace ddp::testing
