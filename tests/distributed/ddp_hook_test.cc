// DistributedDataParallel: communication hooks.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ddp/comm_hook.h"
#include "ddp/distributed_data_parallel.h"
#include "tests/support/catch.h"
#include "tests/support/ddp_model.h"

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
  absl::StatusOr<Work> Start(ProcessGroup& group, const GradBucket& bucket, int round) override {
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
    return group.AllReduce({&bucket.buffer, 1}, {&bucket.buffer, 1}, bucket.reduce);
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
  absl::StatusOr<Work> Start(ProcessGroup& group, const GradBucket& bucket, int round) override {
    std::this_thread::sleep_for(std::chrono::microseconds(random_() % 100));
    if (round == 1) return group.Broadcast({&bucket.buffer, 1}, static_cast<int>(bucket.index) % group.size());
    return group.AllReduce({&bucket.buffer, 1}, {&bucket.buffer, 1}, bucket.reduce);
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

// --- failures -------------------------------------------------------------------------------------------------------

class FailingHook final : public CommHook {
 public:
  enum class How { kNever, kStatus, kThrow, kThrowInt, kFinishThrow };
  explicit FailingHook(How how) : how_(how) {}
  std::string name() const override { return "failing"; }
  absl::StatusOr<Work> Start(ProcessGroup& group, const GradBucket& bucket, int) override {
    if (bucket.step == 1 && bucket.index == 1) {
      if (how_ == How::kStatus) return absl::DataLossError("the codebook is empty");
      if (how_ == How::kThrow) throw std::runtime_error("the codebook is empty");
      if (how_ == How::kThrowInt) throw 5;
    }
    return group.AllReduce({&bucket.buffer, 1}, {&bucket.buffer, 1}, bucket.reduce);
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

// --- PowerSGD -------------------------------------------------------------------------------------------------------

constexpr size_t kRows = 24, kColumns = 20;

std::vector<Parameter> MatrixAndBias(DType dtype = DType::kFloat32) {
  return {{"fc.weight", {kRows, kColumns}, {nullptr, kRows * kColumns, dtype, {}}, {}},
          {"fc.bias", {kRows}, {nullptr, kRows, dtype, {}}, {}}};
}

// A pseudo-random number from -0.5 to 0.5.
double Noise(size_t i, int seed) {
  uint64_t bits = (i + 1) * 0x9e3779b97f4a7c15u + static_cast<uint64_t>(seed) * 0xd1b54a32d192ed03u;
  bits = (bits ^ (bits >> 29)) * 0xbf58476d1ce4e5b9u;
  return static_cast<double>(bits >> 11) * 0x1p-53 - 0.5;
}

using Entry = std::function<double(int rank, size_t i, size_t j)>;

// One step with the matrix of `entry`; the result.
std::vector<double> PowerStep(Rank& rank, DistributedDataParallel& model, const Entry& entry) {
  const Buffer g = model.grad(0), bias = model.grad(1);
  for (size_t i = 0; i < g.count; ++i) SetElement(g.dtype, g.data, i, entry(rank.rank(), i / kColumns, i % kColumns));
  for (size_t i = 0; i < bias.count; ++i) SetElement(bias.dtype, bias.data, i, Gradient(rank.rank(), 1, i, 0));
  model.GradReady(1);
  model.GradReady(0);
  RANK_CHECK_OK(model.FinishBackward());
  CheckGradient(rank, model, 1, [&](size_t p, size_t i) { return Average(rank.size(), p, i, 0); });
  std::vector<double> result;
  for (size_t i = 0; i < g.count; ++i) result.push_back(GetElement(g.dtype, g.data, i));
  return result;
}

double Mean(int size, const Entry& entry, size_t k) {
  double sum = 0;
  for (int r = 0; r < size; ++r) sum += entry(r, k / kColumns, k % kColumns);
  return sum / size;
}

// How far `result` is from the mean of the ranks' matrices, relative to that.
double Distance(Rank& rank, const std::vector<double>& result, const Entry& entry) {
  double difference = 0, size = 0;
  for (size_t k = 0; k < result.size(); ++k) {
    const double mean = Mean(rank.size(), entry, k);
    difference += (result[k] - mean) * (result[k] - mean);
    size += mean * mean;
  }
  return std::sqrt(difference / size);
}

// Each rank's matrix is of rank 1, and so is their mean.
double LowRank(int rank, size_t i, size_t j) { return Noise(i + 100 * static_cast<size_t>(rank), 3) * Noise(j, 4); }
// Of rank 2.
double TwoRank(int rank, size_t i, size_t j) { return LowRank(rank, i, j) + Noise(i + 100, 6) * Noise(j + 100, 7); }
double FullRank(int rank, size_t i, size_t j) {
  return Noise(i * kColumns + j, 5 + rank) + Noise(i * kColumns + j, 17);
}

Model MakePower(Rank& rank, const PowerSgdOptions& power, std::function<void(DdpOptions&)> change = nullptr) {
  DdpOptions options;
  options.hook = CreatePowerSgdHook(power);
  if (change != nullptr) change(options);
  return Make(rank, MatrixAndBias(), options);
}

TEST_CASE("PowerSGD gives a matrix of low rank back, and one-dimensional gradients in full") {
  RunOnRanks([](Rank& rank) {
    for (const int power_rank : {1, 2, 4}) {
      for (const bool warm_start : {true, false}) {
        const Model model = MakePower(rank, {.rank = power_rank, .start_step = 0, .warm_start = warm_start});
        for (int step = 0; step < 3; ++step) {
          const double distance = Distance(rank, PowerStep(rank, *model, LowRank), LowRank);
          RANK_CHECK(distance < 1e-5, distance);
        }
        // A matrix of zeros is no trap for the steps that follow.
        PowerStep(rank, *model, [](int, size_t, size_t) { return 0.0; });
        const double distance = Distance(rank, PowerStep(rank, *model, LowRank), LowRank);
        RANK_CHECK(distance < 1e-4, distance);
      }
    }
  });
}

TEST_CASE("PowerSGD keeps as many directions as its rank, of what shrinks by its ratio") {
  RunOnRanks([](Rank& rank) {
    for (const int power_rank : {1, 2}) {
      const Model model = MakePower(rank, {.rank = power_rank, .start_step = 0});
      const double distance = Distance(rank, PowerStep(rank, *model, TwoRank), TwoRank);
      RANK_CHECK(power_rank == 2 ? distance < 1e-5 : distance > 0.05, distance);
    }
    // 24 x 20 numbers would be 24 + 20: 10.9 times fewer.
    for (const double ratio : {10.0, 11.0}) {
      const Model model = MakePower(rank, {.start_step = 0, .min_ratio = ratio});
      const double distance = Distance(rank, PowerStep(rank, *model, FullRank), FullRank);
      RANK_CHECK(ratio == 11.0 ? distance < 1e-6 : distance > 0.3, distance);
    }
  });
}

// Singular values 2 and 1.
double TwoToOne(int, size_t i, size_t j) { return i == 0 && j == 0 ? 2 : i == 1 && j == 1 ? 1 : 0; }

TEST_CASE("a warm start makes of PowerSGD's steps one power iteration") {
  RunOnRanks([](Rank& rank) {
    // The best that rank 1 can do loses the smaller one.
    const double best = 1 / std::sqrt(5.0);
    for (const bool warm_start : {true, false}) {
      const Model model = MakePower(rank, {.start_step = 0, .warm_start = warm_start, .error_feedback = false});
      double worst = 0;  // of the last steps
      for (int step = 0; step < 24; ++step) {
        const double distance = Distance(rank, PowerStep(rank, *model, TwoToOne), TwoToOne);
        if (step >= 12) worst = std::max(worst, distance);
      }
      RANK_CHECK(warm_start ? worst < best + 1e-4 : worst > best + 1e-2, worst);
    }
  });
}

TEST_CASE("PowerSGD begins at its step, and loses something from then on") {
  RunOnRanks([](Rank& rank) {
    const Model model = MakePower(rank, {.rank = 2, .start_step = 3});
    for (int step = 0; step < 5; ++step) {
      const double distance = Distance(rank, PowerStep(rank, *model, FullRank), FullRank);
      RANK_CHECK(step < 3 ? distance < 1e-6 : distance > 0.3, step, ": ", distance);
    }
  });
}

TEST_CASE("PowerSGD's first directions come from its seed, on all ranks the same") {
  RunOnRanks([](Rank& rank) {
    const auto first_step = [&](uint64_t seed) {
      return PowerStep(rank, *MakePower(rank, {.start_step = 0, .seed = seed}), FullRank);
    };
    const std::vector<double> one = first_step(1);
    RANK_CHECK(first_step(1) == one);
    RANK_CHECK(first_step(2) != one);
  });
}

TEST_CASE("error feedback makes up over the steps for what PowerSGD loses in each") {
  RunOnRanks([](Rank& rank) {
    for (const ReduceOp op : {ReduceOp::kAvg, ReduceOp::kSum}) {
      double distances[2];
      for (const bool feedback : {false, true}) {
        const Model model = MakePower(rank, {.rank = 2, .start_step = 0, .error_feedback = feedback},
                                      [&](DdpOptions& options) { options.op = op; });
        constexpr int kSteps = 60;
        std::vector<double> mean(kRows * kColumns);
        const double n = op == ReduceOp::kSum ? rank.size() : 1;
        for (int step = 0; step < kSteps; ++step) {
          const Buffer g = model->grad(0);
          for (size_t i = 0; i < g.count; ++i) {
            SetElement(g.dtype, g.data, i, FullRank(rank.rank(), i / kColumns, i % kColumns));
          }
          model->GradReady(1);
          model->GradReady(0);
          RANK_CHECK_OK(model->FinishBackward());
          for (size_t k = 0; k < mean.size(); ++k) mean[k] += GetElement(g.dtype, g.data, k) / kSteps / n;
        }
        distances[feedback] = Distance(rank, mean, FullRank);
      }
      RANK_CHECK(distances[0] > 0.5, distances[0]);
      RANK_CHECK(distances[1] < 0.25, distances[1]);
    }
  });
}

TEST_CASE("PowerSGD's state belongs to parameters, not to buckets") {
  RunOnRanks([](Rank& rank) {
    std::vector<std::vector<double>> results;
    for (const bool replan : {false, true}) {
      DdpOptions options;
      options.hook = CreatePowerSgdHook({.rank = 2, .start_step = 0});
      options.bucket_bytes = 2000;
      options.replan = replan;
      std::vector<Parameter> parameters = MatrixAndBias();
      parameters.push_back({"head.weight", {20, 30}, {nullptr, 600, DType::kFloat32, {}}, {}});
      const Model model = Make(rank, parameters, options);
      std::vector<double> result;
      for (int step = 0; step < 4; ++step) {
        for (const size_t p : {size_t{0}, size_t{1}, size_t{2}}) {
          const Buffer g = model->grad(p);
          for (size_t i = 0; i < g.count; ++i) {
            SetElement(g.dtype, g.data, i, Noise(i, static_cast<int>(p) + 10 * rank.rank() + 100 * step));
          }
          model->GradReady(p);
        }
        RANK_CHECK_OK(model->FinishBackward());
        for (const size_t p : {size_t{0}, size_t{2}}) {
          for (size_t i = 0; i < model->grad(p).count; ++i) {
            result.push_back(GetElement(DType::kFloat32, model->grad(p).data, i));
          }
        }
      }
      RANK_CHECK_EQ(model->statistics().plans, int64_t{replan ? 2 : 1});
      results.push_back(std::move(result));
    }
    RANK_CHECK(results[0] == results[1]);
    // All ranks have the same bits.
    std::vector<double> rank0 = results[0];
    const Buffer bytes{rank0.data(), rank0.size() * 8, DType::kUInt8, {}};
    RANK_CHECK_OK(Rank::Finish(rank.group().Broadcast({&bytes, 1}, 0)));
    RANK_CHECK(rank0 == results[0]);
  });
}

TEST_CASE("hooks compose: 16 bits around PowerSGD") {
  RunOnRanks([](Rank& rank) {
    for (const DType wire : {DType::kFloat16, DType::kBFloat16}) {
      DdpOptions options;
      options.hook = CreateCompressionHook(wire, CreatePowerSgdHook({.rank = 2, .start_step = 1}));
      const Model model = Make(rank, MatrixAndBias(), options);
      for (int step = 0; step < 4; ++step) {
        const double distance = Distance(rank, PowerStep(rank, *model, LowRank), LowRank);
        RANK_CHECK(distance < (wire == DType::kFloat16 ? 4e-3 : 3e-2), step, ": ", distance);
        RANK_CHECK(distance > 1e-6, "nothing was rounded");
      }
    }
  });
}

}  // namespace
}  // namespace ddp::testing
