// SPDX-License-Identifier: Apache-2.0
// DistributedDataParallel: which gradients are reduced together, and when.
#include <algorithm>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "ddp/distributed_data_parallel.h"
#include "tests/support/catch.h"
#include "tests/support/ddp_model.h"
#include "tests/support/forwarding_group.h"

namespace ddp::testing {
namespace {

// Time that passes only as the test says: a layer computes, or somebody waits for the link.
struct Clock {
  int64_t now = 0;
  int64_t link_free = 0;
};

// An all-reduce takes `delay`, one after the other, on a link of its own; what it computes is right at the end of that.
class DelayedGroup final : public ForwardingGroup {
 public:
  DelayedGroup(ProcessGroup& group, Clock& clock, int64_t delay)
      : ForwardingGroup(group), clock_(clock), delay_(delay) {}

  Work Start(const Call& call) override {
    Work work = ForwardingGroup::Start(call);
    if (call.kind != Call::Kind::kAllReduce || !work.call_status().ok()) return work;
    called.push_back(clock_.now);
    clock_.link_free = std::max(clock_.now, clock_.link_free) + delay_;
    return Work(new Delayed(std::move(work), clock_, clock_.link_free));
  }

  void Progress() override {
    ++progressed;
    ForwardingGroup::Progress();
  }

  std::vector<int64_t> called;  // when each all-reduce began
  int progressed = 0;           // calls of Progress

 private:
  class Delayed final : public TestWork {
   public:
    Delayed(Work work, Clock& clock, int64_t until) : work_(std::move(work)), clock_(clock), until_(until) {}
    bool Done() const override { return clock_.now >= until_ && work_.Done(); }
    absl::Status Wait(absl::Time deadline) override {
      clock_.now = std::max(clock_.now, until_);
      return work_.Wait(deadline);
    }

   private:
    Work work_;
    Clock& clock_;
    const int64_t until_;
  };

  Clock& clock_;
  const int64_t delay_;
};

constexpr size_t kLayer = 1000;  // elements
constexpr int64_t kCompute = 100;

// One step in `order`, each gradient after kCompute. Returns when backward ended.
int64_t ClockedStep(Rank& rank, DistributedDataParallel& model, Clock& clock, const std::vector<size_t>& order,
                    int step) {
  for (const size_t p : order) {
    clock.now += kCompute;
    WriteGradient(rank, model, p, step);
    model.GradReady(p);
  }
  const int64_t end = clock.now;
  RANK_CHECK_OK(model.FinishBackward());
  CheckGradients(rank, model, [&](size_t p, size_t i) { return Average(rank.size(), p, i, step); });
  return end;
}

TEST_CASE("all communication that can overlap does, from the first step on") {
  RunOnRanks([](Rank& rank) {
    // Communication that is shorter than the layers' computation, as long, and longer.
    for (const int64_t delay : {kCompute / 2, kCompute, 3 * kCompute}) {
      Clock clock;
      DelayedGroup group(rank.group(), clock, delay);
      DdpOptions options;
      options.bucket_bytes = kLayer * 4;  // a bucket for each layer
      const Model model =
          RANK_VALUE(DistributedDataParallel::Create(group, MakeParameters(std::vector<size_t>(10, kLayer)), options));
      for (int step = 0; step < 3; ++step) {
        const int64_t begin = clock.now;
        group.called.clear();
        group.progressed = 0;
        const int64_t end = ClockedStep(rank, *model, clock, Backwards(10), step);
        RANK_CHECK_EQ(group.progressed, 10);  // whoever announces does its share of what is under way
        // Each bucket was launched the moment its gradient was there, before the next layer computed.
        RANK_CHECK_EQ(group.called.size(), size_t{10});
        for (size_t b = 0; b < 10; ++b) {
          RANK_CHECK_EQ(group.called[b], begin + static_cast<int64_t>(b + 1) * kCompute);
        }
        // The link is busy from then on: so the step takes no longer than it must.
        const int64_t best = std::max(end + delay, begin + kCompute + 10 * delay);
        RANK_CHECK_EQ(clock.now, best);
        const int64_t exposed = clock.now - end, least = best - end, could_hide = 10 * delay - least;
        RANK_CHECK(10 * delay - exposed >= could_hide * 9 / 10, exposed, " of ", 10 * delay);
      }
    }
  });
}

TEST_CASE("buckets follow the order that the first step showed, and no gradient moves") {
  RunOnRanks([](Rank& rank) {
    for (const bool replan : {true, false}) {
      Clock clock;
      DelayedGroup group(rank.group(), clock, 10);
      DdpOptions options;
      options.bucket_bytes = 2 * kLayer * 4;
      options.first_bucket_bytes = kLayer * 4;
      options.replan = replan;
      const Model model =
          RANK_VALUE(DistributedDataParallel::Create(group, MakeParameters(std::vector<size_t>(7, kLayer)), options));
      std::vector<void*> addresses;
      for (size_t p = 0; p < 7; ++p) addresses.push_back(model->grad(p).data);
      std::vector<size_t> forwards = Backwards(7);
      std::reverse(forwards.begin(), forwards.end());
      for (int step = 0; step < 3; ++step) {
        const int64_t begin = clock.now;
        group.called.clear();
        ClockedStep(rank, *model, clock, forwards, step);
        // Planned backwards, the first bucket waits for the very last gradient; planned as observed, for the first.
        const bool planned = replan && step > 0;
        RANK_CHECK_EQ(group.called.size(), size_t{4});
        RANK_CHECK_EQ(group.called[0] - begin, planned ? kCompute : 7 * kCompute);
        RANK_CHECK_EQ(group.called[1] - begin, planned ? 3 * kCompute : 7 * kCompute);
        const std::vector<BucketTimes> buckets = model->statistics().buckets;
        RANK_CHECK_EQ(buckets[0].bytes, kLayer * 4);  // the small one comes first
        for (const BucketTimes& b : buckets) RANK_CHECK_EQ(b.ranges, size_t{1});
      }
      RANK_CHECK_EQ(model->statistics().plans, int64_t{replan ? 2 : 1});
      for (size_t p = 0; p < 7; ++p) RANK_CHECK(model->grad(p).data == addresses[p]);
    }
  });
}

TEST_CASE("buckets are planned again when the order has drifted, and only then") {
  RunOnRanks([](Rank& rank) {
    Clock clock;
    DelayedGroup group(rank.group(), clock, 10);
    DdpOptions options;
    options.bucket_bytes = kLayer * 4;
    const Model model =
        RANK_VALUE(DistributedDataParallel::Create(group, MakeParameters(std::vector<size_t>(6, kLayer)), options));
    std::vector<size_t> order = Backwards(6);
    for (int step = 0; step < 101; ++step) {
      if (step == 5) std::reverse(order.begin(), order.end());
      if (step == 50) std::swap(order[0], order[1]);  // a little disorder does not count
      const int64_t begin = clock.now;
      group.called.clear();
      ClockedStep(rank, *model, clock, order, step);
      if (step == 9) RANK_CHECK_EQ(group.called[0] - begin, 6 * kCompute);
      if (step == 10) RANK_CHECK_EQ(group.called[0] - begin, kCompute);  // looked at after the tenth
      RANK_CHECK_EQ(model->statistics().plans, int64_t{step < 9 ? 1 : 2});
    }
  });
}

class NamedNccl final : public ForwardingGroup {
 public:
  using ForwardingGroup::ForwardingGroup;
  absl::string_view backend() const override { return "nccl"; }
};

TEST_CASE("buckets are of 25 MiB, the first and the last ones smaller; a cap of the user's goes for the first too") {
  RunOnRanks([](Rank& rank) {
    const std::vector<size_t> megabytes(28, size_t{1} << 18);
    NamedNccl nccl(rank.group());
    const auto sizes = [&](const DdpOptions& options, bool over_nccl = false) {
      ProcessGroup& group = over_nccl ? static_cast<ProcessGroup&>(nccl) : rank.group();
      const Model model = RANK_VALUE(DistributedDataParallel::Create(group, MakeParameters(megabytes), options));
      for (const size_t p : Backwards(megabytes.size())) model->GradReady(p);
      RANK_CHECK_OK(model->FinishBackward());
      std::string text;
      for (const BucketTimes& b : model->statistics().buckets) absl::StrAppend(&text, b.bytes >> 20, " ");
      return text;
    };
    RANK_CHECK_EQ(sizes({}), "1 2 4 8 7 3 2 1 ");
    RANK_CHECK_EQ(sizes({}, /*over_nccl=*/true), "1 25 2 ");
    DdpOptions options;
    options.bucket_bytes = size_t{10} << 20;
    RANK_CHECK_EQ(sizes(options), "10 10 8 ");
    options.first_bucket_bytes = size_t{3} << 20;
    RANK_CHECK_EQ(sizes(options), "3 6 10 6 3 ");
  });
}

TEST_CASE("every rank takes rank 0's plan") {
  RunOnRanks([](Rank& rank) {
    DdpOptions options;
    options.bucket_bytes = 20'000;
    options.first_bucket_bytes = 3000;
    const Model model = Make(rank, MakeParameters(kCounts), options);
    std::vector<size_t> order = Backwards(kCounts.size());
    for (int step = 0; step < 12; ++step) {
      std::shuffle(order.begin(), order.end(), std::mt19937(static_cast<unsigned>(100 * step + rank.rank())));
      CheckStep(rank, *model, order, step);
    }
    std::vector<uint64_t> mine;
    for (const BucketTimes& b : model->statistics().buckets) mine.push_back(b.bytes);
    std::vector<uint64_t> rank0 = mine;
    const Buffer buffer{rank0.data(), rank0.size() * 8, DType::kUInt8, {}};
    RANK_CHECK_OK(rank.group().Broadcast(buffer, 0).Wait());
    RANK_CHECK(mine == rank0);
  });
}

TEST_CASE("half-accumulated gradients survive a new plan") {
  RunOnRanks([](Rank& rank) {
    DdpOptions options;
    options.bucket_bytes = 20'000;
    const Model model = Make(rank, MakeParameters(kCounts), options);
    std::vector<size_t> forwards = Backwards(kCounts.size());
    std::reverse(forwards.begin(), forwards.end());
    for (const size_t p : forwards) WriteGradient(rank, *model, p, 0);
    for (const size_t p : forwards) model->GradReady(p);
    RANK_CHECK_OK(model->FinishBackward());
    RANK_CHECK_EQ(model->statistics().plans, int64_t{2});
    for (const size_t p : forwards) {  // onto what the first step left
      WriteGradient(rank, *model, p, 1, /*add=*/true);
      model->GradReady(p);
    }
    RANK_CHECK_OK(model->FinishBackward());
    CheckGradients(rank, *model,
                   [&](size_t p, size_t i) { return Average(rank.size(), p, i, 0) + Average(rank.size(), p, i, 1); });
  });
}

TEST_CASE("large buckets go in pieces, with the same bits") {
  RunOnRanks([](Rank& rank) {
    std::vector<std::vector<char>> results;
    for (const size_t piece_bytes : {size_t{0}, size_t{1}, size_t{4096}, size_t{100'000}}) {
      DdpOptions options;
      options.piece_bytes = piece_bytes;
      const Model model = Make(rank, MakeParameters({5000, 10, 3000}), options);
      for (const size_t p : Backwards(3)) {
        const Buffer g = model->grad(p);
        for (size_t i = 0; i < g.count; ++i) SetElement(g.dtype, g.data, i, Awkward(rank.rank(), i + 100'000 * p));
        model->GradReady(p);
      }
      RANK_CHECK_OK(model->FinishBackward());
      const BucketTimes bucket = model->statistics().buckets.at(0);
      // 8010 elements and the padding between them: 32288 bytes.
      RANK_CHECK_EQ(bucket.operations, piece_bytes == 0 || piece_bytes == 100'000 ? size_t{1}
                                       : piece_bytes == 4096                      ? size_t{8}
                                                                                  : size_t{127});
      std::vector<char> bytes;
      for (size_t p = 0; p < 3; ++p) {
        const char* data = static_cast<const char*>(model->grad(p).data);
        bytes.insert(bytes.end(), data, data + model->grad(p).count * 4);
      }
      results.push_back(std::move(bytes));
    }
    for (const auto& result : results) RANK_CHECK(result == results[0]);
  });
}

TEST_CASE("automatic bucket sizes are the same on all ranks, and give the same bits") {
  RunOnRanks([](Rank& rank) {
    DdpOptions options;
    options.bucket_bytes = DdpOptions::kAutoBucketBytes;
    const Model model = Make(rank, MakeParameters(std::vector<size_t>(40, 20'000)), options);
    CheckStep(rank, *model, Backwards(40), 0);
    size_t largest = 0, bytes = 0;
    for (const BucketTimes& b : model->statistics().buckets) {
      largest = std::max(largest, b.bytes);
      bytes += b.bytes;
    }
    RANK_CHECK_EQ(bytes, size_t{40 * 80'000});
    uint64_t here[2] = {largest, model->statistics().buckets.size()}, rank0[2] = {here[0], here[1]};
    const Buffer buffer{rank0, sizeof rank0, DType::kUInt8, {}};
    RANK_CHECK_OK(rank.group().Broadcast(buffer, 0).Wait());
    RANK_CHECK(here[0] == rank0[0] && here[1] == rank0[1]);
    CheckStep(rank, *model, Backwards(40), 1);
  });
}

TEST_CASE("a bucket is done when its reduction has ended, not when this rank looks again") {
  RunOnRanks([](Rank& rank) {
    DdpOptions options;
    options.bucket_bytes = 400;
    const Model model = Make(rank, MakeParameters({100, 100}), options);
    for (int step = 0; step < 3; ++step) {
      Announce(rank, *model, {1}, step);
      // Comes behind the bucket's reduction, and ends it without the model.
      RANK_CHECK_OK(rank.group().Barrier().Wait());
      Announce(rank, *model, {0}, step);
      RANK_CHECK_OK(model->FinishBackward());
      const std::vector<BucketTimes> b = model->statistics().buckets;
      RANK_CHECK(b[0].launched_ns <= b[0].done_ns && b[0].done_ns <= b[1].ready_ns, b[0].done_ns, " ", b[1].ready_ns);
    }
  });
}

}  // namespace
}  // namespace ddp::testing
