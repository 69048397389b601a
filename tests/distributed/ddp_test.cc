// SPDX-License-Identifier: Apache-2.0
// DistributedDataParallel: what a step computes, in which buckets, and what it says about it.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "ddp/distributed_data_parallel.h"
#include "tests/support/catch.h"
#include "tests/support/ddp_model.h"
#include "tests/support/forwarding_group.h"

namespace ddp::testing {
namespace {

TEST_CASE("gradients become averages, in every ready order and bucket size") {
  RunOnRanks([](Rank& rank) {
    for (const size_t bucket_bytes : {size_t{1}, size_t{5000}, size_t{200'000}, size_t{25} << 20}) {
      DdpOptions options;
      options.bucket_bytes = bucket_bytes;
      const Model model = Make(rank, MakeParameters(kCounts), options);
      std::vector<size_t> order = Backwards(kCounts.size());
      CheckStep(rank, *model, order, 0);
      std::reverse(order.begin(), order.end());
      CheckStep(rank, *model, order, 1);
      for (int step = 2; step < 6; ++step) {  // another order on each rank
        std::shuffle(order.begin(), order.end(), std::mt19937(static_cast<unsigned>(100 * step + rank.rank())));
        CheckStep(rank, *model, order, step);
      }
      RANK_CHECK_EQ(model->statistics().steps, int64_t{6});
    }
  });
}

TEST_CASE("every floating-point type, and several in one model") {
  RunOnRanks([](Rank& rank) {
    for (const DType dtype : {DType::kFloat64, DType::kFloat16, DType::kBFloat16}) {
      const Model model = Make(rank, MakeParameters({10, 5000, 77}, dtype));
      CheckStep(rank, *model, {2, 0, 1}, 0);
    }
    std::vector<Parameter> mixed = MakeParameters(kCounts);
    for (size_t i = 0; i < mixed.size(); i += 3) mixed[i].value.dtype = DType::kBFloat16;
    for (size_t i = 1; i < mixed.size(); i += 3) mixed[i].value.dtype = DType::kFloat64;
    DdpOptions options;
    options.bucket_bytes = 10'000;
    const Model model = Make(rank, mixed, options);
    for (int step = 0; step < 3; ++step) CheckStep(rank, *model, Backwards(mixed.size()), step);
    RANK_CHECK_EQ(model->grad_spans().size(), size_t{3});
  });
}

TEST_CASE("the sum instead of the average") {
  RunOnRanks([](Rank& rank) {
    DdpOptions options;
    options.op = ReduceOp::kSum;
    const Model model = Make(rank, MakeParameters({100, 20}), options);
    for (const size_t p : {size_t{1}, size_t{0}}) {
      WriteGradient(rank, *model, p, 0);
      model->GradReady(p);
    }
    RANK_CHECK_OK(model->FinishBackward());
    CheckGradients(rank, *model, [&](size_t p, size_t i) { return rank.size() * Average(rank.size(), p, i, 0); });
  });
}

TEST_CASE("a gradient that is not finite anywhere is told on every rank") {
  RunOnRanks([](Rank& rank) {
    uint32_t nonfinite = 0;
    DdpOptions options;
    options.bucket_bytes = 4000;
    options.nonfinite = &nonfinite;
    const Model model = Make(rank, MakeParameters({1000, 7, 3000}), options);
    for (int step = 0; step < 4; ++step) {
      const bool bad = step % 2 == 1;
      nonfinite = 0;
      for (const size_t p : Backwards(model->size())) {
        WriteGradient(rank, *model, p, step);
        if (bad && p == 1 && rank.rank() == rank.size() - 1) {
          SetElement(DType::kFloat32, model->grad(1).data, 6, step == 1 ? HUGE_VAL : NAN);
        }
        model->GradReady(p);
      }
      RANK_CHECK_OK(model->FinishBackward());
      RANK_CHECK_EQ(nonfinite, bad ? 1u : 0u);
    }
  });
}

TEST_CASE("gradients may be announced from several threads") {
  RunOnRanks([](Rank& rank) {
    DdpOptions options;
    options.bucket_bytes = 20'000;
    const Model model = Make(rank, MakeParameters(kCounts), options);
    for (int step = 0; step < 20; ++step) {
      std::atomic<size_t> next{0};
      std::vector<std::thread> threads;
      for (int t = 0; t < 3; ++t) {
        threads.emplace_back([&] {
          for (size_t p; (p = next++) < model->size();) {
            WriteGradient(rank, *model, p, step);
            model->GradReady(p);
          }
        });
      }
      for (std::thread& thread : threads) thread.join();
      RANK_CHECK_OK(model->FinishBackward());
      CheckGradients(rank, *model, [&](size_t p, size_t i) { return Average(rank.size(), p, i, step); });
    }
  });
}

TEST_CASE("the bits do not depend on the buckets") {
  RunOnRanks([](Rank& rank) {
    std::vector<std::vector<char>> results;
    for (const size_t bucket_bytes : {size_t{1}, size_t{30'000}, size_t{25} << 20}) {
      DdpOptions options;
      options.bucket_bytes = bucket_bytes;
      const Model model = Make(rank, MakeParameters({50'000, 10, 3000}), options);
      std::vector<char> bytes;
      for (const size_t p : Backwards(3)) {
        const Buffer g = model->grad(p);
        for (size_t i = 0; i < g.count; ++i) SetElement(g.dtype, g.data, i, Awkward(rank.rank(), i + 100'000 * p));
        model->GradReady(p);
      }
      RANK_CHECK_OK(model->FinishBackward());
      for (size_t p = 0; p < 3; ++p) {
        const char* data = static_cast<const char*>(model->grad(p).data);
        bytes.insert(bytes.end(), data, data + model->grad(p).count * 4);
      }
      results.push_back(std::move(bytes));
    }
    RANK_CHECK(results[0] == results[1]);
    RANK_CHECK(results[0] == results[2]);
  });
}

TEST_CASE("NoSync accumulates locally; the next backward reduces the sum") {
  RunOnRanks([](Rank& rank) {
    const Model model = Make(rank, MakeParameters(kCounts));
    for (int round = 0; round < 3; ++round) {
      model->ZeroGrad();
      for (int part = 0; part < 3; ++part) {
        std::unique_ptr<DistributedDataParallel::NoSync> no_sync;
        if (part < 2) no_sync = std::make_unique<DistributedDataParallel::NoSync>(*model);
        for (const size_t p : Backwards(model->size())) {
          WriteGradient(rank, *model, p, part, /*add=*/true);
          model->GradReady(p);
        }
        RANK_CHECK_OK(model->FinishBackward());
        if (part == 1) {
          CheckGradients(rank, *model, [&](size_t p, size_t i) {
            return Gradient(rank.rank(), p, i, 0) + Gradient(rank.rank(), p, i, 1);
          });
        }
      }
      CheckGradients(rank, *model, [&](size_t p, size_t i) {
        return Average(rank.size(), p, i, 0) + Average(rank.size(), p, i, 1) + Average(rank.size(), p, i, 2);
      });
      RANK_CHECK_EQ(model->statistics().steps, int64_t{round + 1});
    }
  });
}

TEST_CASE("NoSync is read when a backward pass begins") {
  RunOnRanks([](Rank& rank) {
    const Model model = Make(rank, MakeParameters({100, 100}));
    auto outer = std::make_unique<DistributedDataParallel::NoSync>(*model);
    {
      const DistributedDataParallel::NoSync inner(*model);
      WriteGradient(rank, *model, 1, 0);
      model->GradReady(1);
    }
    outer.reset();  // too late for this pass
    WriteGradient(rank, *model, 0, 0);
    model->GradReady(0);
    RANK_CHECK_OK(model->FinishBackward());
    CheckGradients(rank, *model, [&](size_t p, size_t i) { return Gradient(rank.rank(), p, i, 0); });
    CheckStep(rank, *model, {1, 0}, 1);
    // An unfinished set of gradients is no mistake without reduction.
    {
      const DistributedDataParallel::NoSync again(*model);
      model->GradReady(0);
      RANK_CHECK_OK(model->FinishBackward());
    }
    CheckStep(rank, *model, {0, 1}, 2);
  });
}

// Notes what a model asks of its group.
class NotingGroup final : public ForwardingGroup {
 public:
  using ForwardingGroup::ForwardingGroup;
  absl::StatusOr<Allocation> Allocate(size_t bytes, Device device) override {
    allocated += bytes;
    return ForwardingGroup::Allocate(bytes, device);
  }
  Work Start(const Call& call) override {
    broadcasts += call.kind == Call::Kind::kBroadcast;
    if (call.kind == Call::Kind::kAllReduce) {
      reduced.insert(reduced.end(), call.in.begin(), call.in.end());
      RANK_CHECK(std::equal(call.in.begin(), call.in.end(), call.out.begin(), call.out.end(),
                            [](const Buffer& a, const Buffer& b) { return a.data == b.data; }));
    }
    return ForwardingGroup::Start(call);
  }
  size_t allocated = 0;
  std::vector<Buffer> reduced;
  int broadcasts = 0;
};

TEST_CASE("gradients exist once, and are reduced where they lie") {
  RunOnRanks([](Rank& rank) {
    for (const bool copied : {false, true}) {
      NotingGroup group(rank.group());
      DdpOptions options;
      options.bucket_bytes = 100'000;
      options.copy_gradients = copied;
      const Model model = RANK_VALUE(DistributedDataParallel::Create(group, MakeParameters(kCounts), options));
      size_t bytes = 0;  // each at a multiple of 256 bytes
      for (const size_t n : kCounts) bytes += (n * 4 + 255) / 256 * 256;
      RANK_CHECK_EQ(group.allocated, bytes);
      if (copied) continue;
      for (int step = 0; step < 2; ++step) {
        group.reduced.clear();
        CheckStep(rank, *model, Backwards(kCounts.size()), step);
        for (size_t p = 0; p < kCounts.size(); ++p) {
          const char* const data = static_cast<const char*>(model->grad(p).data);
          const auto holds = [&](const Buffer& range) {
            const char* const begin = static_cast<const char*>(range.data);
            return begin <= data && data + kCounts[p] * 4 <= begin + range.count * 4;
          };
          RANK_CHECK(kCounts[p] == 0 || std::any_of(group.reduced.begin(), group.reduced.end(), holds), p);
        }
      }
      RANK_CHECK_EQ(group.allocated, bytes);
    }
  });
}

TEST_CASE("what is broadcast goes in one operation") {
  RunOnRanks([](Rank& rank) {
    NotingGroup group(rank.group());
    float mean = 0;
    int64_t batches = 0;
    DdpOptions options;
    options.replan = false;
    options.buffers = {{"mean", {&mean, 1, DType::kFloat32, {}}}, {"batches", {&batches, 1, DType::kInt64, {}}}};
    std::vector<Parameter> parameters = MakeParameters(kCounts);
    parameters[2].value.dtype = DType::kBFloat16;
    const Model model = RANK_VALUE(DistributedDataParallel::Create(group, parameters, options));
    RANK_CHECK_EQ(group.broadcasts, 1);  // parameters and buffers
    RANK_CHECK_OK(model->BeginForward());
    RANK_CHECK_EQ(group.broadcasts, 2);
  });
}

TEST_CASE("values start as rank 0's, wherever they live") {
  RunOnRanks([](Rank& rank) {
    for (const bool broadcast : {true, false}) {
      std::vector<Parameter> parameters = MakeParameters({5, 3000, 1});
      std::vector<float> own(3000, static_cast<float>(rank.rank() + 1));
      parameters[1].value.data = own.data();
      DdpOptions options;
      options.broadcast_parameters = broadcast;
      const Model model = Make(rank, parameters, options);
      RANK_CHECK(model->value(1).data == own.data());
      RANK_CHECK_EQ(own[2999], broadcast ? 1.0f : static_cast<float>(rank.rank() + 1));
      RANK_CHECK_EQ(GetElement(DType::kFloat32, model->value(0).data, 4), 0.0);
      RANK_CHECK_EQ(model->parameter(1).name, "layer1.weight");
    }
  });
}

TEST_CASE("gradients in the caller's memory, also of another type") {
  RunOnRanks([](Rank& rank) {
    std::vector<Parameter> parameters = MakeParameters({3000, 50'000, 200});
    std::vector<float> own(50'000);
    std::vector<uint16_t> half(200);
    parameters[1].grad = Buffer{own.data(), own.size(), DType::kFloat32, {}};
    parameters[2].grad = Buffer{half.data(), half.size(), DType::kBFloat16, {}};
    const Model model = Make(rank, parameters);
    RANK_CHECK(model->grad(1).data == own.data());
    RANK_CHECK(model->grad(2).data == half.data());
    for (int step = 0; step < 3; ++step) CheckStep(rank, *model, {2, 1, 0}, step);
  });
}

TEST_CASE("what lies between gradients in the caller's memory is not touched") {
  RunOnRanks([](Rank& rank) {
    // Two gradients close to each other, as two heap blocks may be, and on each rank at another distance.
    const size_t gap = 4 + static_cast<size_t>(rank.rank()) % 2 * 8;
    std::vector<float> memory(2000, -5.0f - static_cast<float>(rank.rank()));
    std::vector<Parameter> parameters = MakeParameters({100, 300});
    parameters[1].grad = Buffer{memory.data(), 300, DType::kFloat32, {}};
    parameters[0].grad = Buffer{memory.data() + 300 + gap, 100, DType::kFloat32, {}};
    const Model model = Make(rank, parameters);
    CheckStep(rank, *model, {1, 0}, 0);
    for (size_t i = 0; i < memory.size(); ++i) {
      if (i < 300 || (i >= 300 + gap && i < 400 + gap)) continue;
      RANK_CHECK(memory[i] == -5.0f - static_cast<float>(rank.rank()), "at ", i);
    }
  });
}

TEST_CASE("spans cover the library's memory: reverse order, aligned, zero between") {
  RunOnRanks([](Rank& rank) {
    const Model model = Make(rank, MakeParameters(kCounts));
    for (const bool values : {true, false}) {
      const absl::Span<const Buffer> spans = values ? model->value_spans() : model->grad_spans();
      RANK_CHECK_EQ(spans.size(), size_t{1});
      const auto at = [&](size_t p) {
        return reinterpret_cast<uintptr_t>(values ? model->value(p).data : model->grad(p).data);
      };
      const uintptr_t begin = reinterpret_cast<uintptr_t>(spans[0].data);
      uintptr_t covered = begin;
      for (const size_t p : Backwards(model->size())) {
        if (kCounts[p] == 0) continue;
        RANK_CHECK_EQ(at(p) % 256, uintptr_t{0});
        RANK_CHECK(at(p) >= covered && at(p) < covered + 256, p);
        covered = at(p) + kCounts[p] * 4;
      }
      RANK_CHECK(covered <= begin + spans[0].count * 4);
    }
    // Sums over a span may include the padding: it stays zero through steps.
    CheckStep(rank, *model, Backwards(model->size()), 0);
    double all = 0, gradients = 0;
    const Buffer span = model->grad_spans()[0];
    for (size_t i = 0; i < span.count; ++i) all += GetElement(DType::kFloat32, span.data, i);
    for (size_t p = 0; p < model->size(); ++p) {
      for (size_t i = 0; i < kCounts[p]; ++i) gradients += GetElement(DType::kFloat32, model->grad(p).data, i);
    }
    RANK_CHECK_EQ(all, gradients);
    model->ZeroGrad();
    for (size_t i = 0; i < span.count; ++i) RANK_CHECK(GetElement(DType::kFloat32, span.data, i) == 0);
  });
}

TEST_CASE("statistics of a step agree with themselves") {
  RunOnRanks([](Rank& rank) {
    DdpOptions options;
    options.bucket_bytes = 100'000;
    options.first_bucket_bytes = 20'000;
    const Model model = Make(rank, MakeParameters(std::vector<size_t>(12, 10'000)), options);
    RANK_CHECK_EQ(model->statistics().steps, int64_t{0});
    for (int step = 0; step < 5; ++step) CheckStep(rank, *model, Backwards(model->size()), step);
    const DdpStatistics s = model->statistics();
    RANK_CHECK_EQ(s.steps, int64_t{5});
    RANK_CHECK_EQ(s.buckets.size(), size_t{6});  // 1 + 3 + 3 + 3 + 1 + 1 tensors of 40 kB
    size_t bytes = 0;
    int64_t earlier = 0;
    for (const BucketTimes& b : s.buckets) {
      bytes += b.bytes;
      RANK_CHECK(b.ready_ns >= 0 && b.ready_ns <= b.launched_ns && b.launched_ns <= b.done_ns, b.ready_ns, " ",
                 b.launched_ns, " ", b.done_ns);
      RANK_CHECK(b.launched_ns >= earlier);
      earlier = b.launched_ns;
    }
    RANK_CHECK_EQ(s.buckets[0].bytes, size_t{40'000});
    RANK_CHECK_EQ(bytes, size_t{12 * 40'000});
    RANK_CHECK(s.exposed_ns >= 0 && s.exposed_ns <= s.communication_ns);
    RANK_CHECK(s.overlap >= 0 && s.overlap <= 1, s.overlap);
  });
}

// Whose reductions are done some time after somebody has begun to wait for them.
class LateGroup final : public ForwardingGroup {
 public:
  using ForwardingGroup::ForwardingGroup;
  Work Start(const Call& call) override {
    Work work = ForwardingGroup::Start(call);
    return call.kind == Call::Kind::kAllReduce ? Work(new Late(std::move(work))) : work;
  }
  static constexpr absl::Duration kLate = absl::Milliseconds(5);

 private:
  class Late final : public TestWork {
   public:
    explicit Late(Work work) : work_(std::move(work)) {}
    bool Done() const override { return waited_; }
    absl::Status Wait(absl::Time deadline) override {
      if (!waited_) absl::SleepFor(kLate);
      waited_ = true;
      return work_.Wait(deadline);
    }

   private:
    Work work_;
    bool waited_ = false;
  };
};

TEST_CASE("what a step waits for in FinishBackward is exposed") {
  RunOnRanks([](Rank& rank) {
    LateGroup group(rank.group());
    DdpOptions options;
    options.bucket_bytes = 400;
    const Model model = RANK_VALUE(DistributedDataParallel::Create(group, MakeParameters({100, 100}), options));
    CheckStep(rank, *model, {1, 0}, 0);
    const DdpStatistics s = model->statistics();
    const int64_t late = absl::ToInt64Nanoseconds(LateGroup::kLate);
    for (const BucketTimes& b : s.buckets) RANK_CHECK(b.done_ns - b.launched_ns >= late, b.done_ns, " ", b.launched_ns);
    RANK_CHECK(s.exposed_ns >= 2 * late && s.communication_ns >= 2 * late, s.exposed_ns, " ", s.communication_ns);
    RANK_CHECK(s.overlap < 1, s.overlap);
  });
}

// Reduces as there would be no hook, and shows how far a bucket is.
class WatchedHook final : public CommHook {
 public:
  std::string name() const override { return "watched"; }
  Work Start(ProcessGroup& group, const GradBucket& bucket, int) override {
    works.resize(std::max(works.size(), bucket.index + 1));
    Work work = group.AllReduce(bucket.buffer, bucket.buffer, bucket.reduce);
    works[bucket.index] = work;
    return work;
  }

  std::vector<Work> works;
};

TEST_CASE("reduction runs while backward does") {
  RunOnRanks([](Rank& rank) {
    const auto hook = std::make_shared<WatchedHook>();
    DdpOptions options;
    options.bucket_bytes = 40'000;
    options.hook = hook;
    const Model model = Make(rank, MakeParameters(std::vector<size_t>(8, 10'000)), options);
    for (int step = 0; step < 3; ++step) {
      for (const size_t p : Backwards(8)) {
        WriteGradient(rank, *model, p, step);
        model->GradReady(p);
        // The layer behind computes until the first four buckets are reduced, which nobody waits for.
        const absl::Time limit = absl::Now() + absl::Seconds(40);
        const bool launched = hook->works.size() > 3;
        RANK_CHECK(p > 2 || launched, "four buckets are complete");
        const auto reduced = [&] {  // between nodes a later one may end first
          return std::all_of(hook->works.begin(), hook->works.begin() + 4, [](const Work& w) { return w.Done(); });
        };
        while (p == 2 && launched && !reduced() && absl::Now() < limit) absl::SleepFor(absl::Milliseconds(1));
      }
      RANK_CHECK_OK(model->FinishBackward());
      const std::vector<BucketTimes> buckets = model->statistics().buckets;
      RANK_CHECK_EQ(buckets.size(), size_t{8});
      RANK_CHECK(buckets[0].done_ns < buckets[7].ready_ns, buckets[0].done_ns, " ", buckets[7].ready_ns);
      RANK_CHECK(buckets[3].done_ns < buckets[7].ready_ns, buckets[3].done_ns, " ", buckets[7].ready_ns);
    }
    RANK_CHECK(model->statistics().overlap > 0, model->statistics().overlap);
  });
}

TEST_CASE("two models, one after the other, and a model given up between steps") {
  RunOnRanks([](Rank& rank) {
    const Model first = Make(rank, MakeParameters({100, 2000}));
    {
      const Model second = Make(rank, MakeParameters(kCounts));
      CheckStep(rank, *second, Backwards(kCounts.size()), 0);
      CheckStep(rank, *first, {1, 0}, 1);
    }
    CheckStep(rank, *first, {1, 0}, 2);
  });
}

}  // namespace
}  // namespace ddp::testing
