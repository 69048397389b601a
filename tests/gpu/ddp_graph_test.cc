// SPDX-License-Identifier: Apache-2.0
// Steps of DistributedDataParallel in CUDA graphs, on real GPUs.
#include <cmath>
#include <cstddef>
#include <functional>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ddp/comm_hook.h"
#include "ddp/distributed_data_parallel.h"
#include "tests/gpu/on_gpus.h"
#include "tests/support/catch.h"

// g++ takes members of class type that are left out of designated initializers for forgotten.
#pragma GCC diagnostic ignored "-Wmissing-field-initializers"

namespace ddp::testing {
namespace {

constexpr size_t kCounts[] = {1000, 70'001, 64};
constexpr size_t kParameters = std::size(kCounts);

void RunCase(const std::function<void(Rank&)>& body) {
  for (const std::string& backend : {GpuBackend(), std::string("local")}) {
    ContextOptions options = OnGpus();
    options.backend = backend;
    if (RankCount() == 1 || backend != "local") RunOnGpus(body, options);
  }
}

// A model whose gradients a stream copies from memory that does not move, as a graph needs it.
class Training {
 public:
  Training(Rank& rank, DdpOptions options) : rank_(rank), stream_(rank) {
    const Device gpu = rank.context().device();
    options.bucket_bytes = 4096;
    for (size_t p = 0; p < kParameters; ++p) {
      parameters_.push_back({absl::StrCat("p", p), {}, {nullptr, kCounts[p], DType::kFloat32, gpu}, {}});
      sources_.push_back(std::make_unique<Array>(rank, DType::kFloat32, kCounts[p], false));
    }
    model_ = RANK_VALUE(DistributedDataParallel::Create(rank.group(), parameters_, options));
  }
  DistributedDataParallel& model() { return *model_; }
  const CallerStream& stream() const { return stream_; }

  absl::Status Backward(bool reversed = false) {
    for (size_t k = 0; k < kParameters; ++k) {
      const size_t p = reversed ? k : kParameters - 1 - k;
      GPU(cudaMemcpyAsync(model_->grad(p).data, sources_[p]->data(), kCounts[p] * sizeof(float),
                          cudaMemcpyDeviceToDevice, stream_.native()));
      model_->GradReady(p, stream_.get());
    }
    return model_->FinishBackward(stream_.get());
  }
  void Fill(
      int number, const std::function<double(double)>& last = [](double x) { return x; }) {
    stream_.Wait();  // it may still read them
    for (size_t p = 0; p < kParameters; ++p) {
      sources_[p]->Fill([&](size_t i) {
        const double value = 2.0 * rank_.rank() + static_cast<double>(number + p + i % 7);
        return i + 1 == kCounts[p] ? last(value) : value;
      });
    }
  }
  // The average of what the last Fill gave all ranks.
  void Check(int number) {
    for (size_t p = 0; p < kParameters; ++p) {
      std::vector<float> got(kCounts[p]);
      GPU(cudaMemcpyAsync(got.data(), model_->grad(p).data, got.size() * sizeof(float), cudaMemcpyDeviceToHost,
                          stream_.native()));
      stream_.Wait();
      for (size_t i = 0; i < got.size(); ++i) {
        RANK_CHECK_EQ(got[i], static_cast<float>(rank_.size() - 1 + number + static_cast<int>(p + i % 7)));
      }
    }
  }
  void FreezeOne() {
    parameters_[1].frozen = true;
    RANK_CHECK_OK(model_->SetParameters(parameters_));
  }

 private:
  Rank& rank_;
  const CallerStream stream_;
  std::vector<Parameter> parameters_;
  std::vector<std::unique_ptr<Array>> sources_;
  std::unique_ptr<DistributedDataParallel> model_;
};

TEST_CASE("a captured step can be replayed, and others may follow it") {
  for (const bool hook : {false, true}) {
    RunCase([&](Rank& rank) {
      Training training(rank, {.check_replicas = 1, .hook = hook ? CreateAllReduceHook() : nullptr});
      int number = 0;
      const auto step = [&](bool reversed, const CapturedGraph* graph = nullptr) {
        training.Fill(++number);
        if (graph != nullptr) graph->Launch(training.stream());
        if (graph == nullptr) RANK_CHECK_OK(training.Backward(reversed));
        training.Check(number);
      };
      while (number < 8) step(false);
      const auto capture = [&] { RANK_CHECK_OK(training.Backward()); };
      {
        const CapturedGraph graph(training.stream(), capture);
        for (int replay = 0; replay < 3; ++replay) step(false, &graph);
        step(true);
        for (int replay = 0; replay < 3; ++replay) step(false, &graph);
        const CapturedGraph other(training.stream(), capture);
        step(false, &other);
        step(false, &graph);
        step(true);
        rank.Meet();
      }
      training.FreezeOne();
      rank.Meet();
    });
  }
}

TEST_CASE("replays are counted as steps, and timed") {
  RunCase([](Rank& rank) {
    Training training(rank, {});
    int number = 0;
    const auto step = [&](const CapturedGraph* graph) {
      training.Fill(++number);
      if (graph != nullptr) graph->Launch(training.stream());
      if (graph == nullptr) RANK_CHECK_OK(training.Backward());
      training.Check(number);
    };
    while (number < 9) step(nullptr);
    RANK_CHECK_OK(training.model().CanCapture());
    const auto capture = [&] { RANK_CHECK_OK(training.Backward(true)); };
    const CapturedGraph first(training.stream(), capture), second(training.stream(), capture);
    const int64_t plans = training.model().statistics().plans;
    for (int replay = 0; replay < 20; ++replay) step(replay % 2 == 0 ? &first : &second);
    const DdpStatistics statistics = training.model().statistics();
    RANK_CHECK_EQ(statistics.steps, 29);
    RANK_CHECK_EQ(statistics.plans, plans);
    RANK_CHECK_EQ(statistics.buckets.size() > 1, true);
    for (const BucketTimes& times : statistics.buckets)
      RANK_CHECK(times.done_ns >= times.launched_ns, "a bucket's times");
    RANK_CHECK(rank.size() == 1 || statistics.communication_ns > 0, "communication takes time");
    rank.Meet();
  });
}

TEST_CASE("a captured step that needs the host is refused, and others follow it") {
  for (const bool weighted : {true, false}) {
    RunCase([&](Rank& rank) {
      DdpOptions options;
      options.weighted = weighted;
      if (!weighted) options.unused = UnusedParameters::kDetect;
      Training training(rank, options);
      training.Fill(1);
      RANK_CHECK_OK(training.Backward());
      training.Check(1);
      const CapturedGraph none(training.stream(), [&] {
        RANK_CHECK_STATUS(training.Backward(), absl::StatusCode::kFailedPrecondition, "cannot be captured",
                          weighted ? "weighted" : "kDetect");
      });
      training.Fill(2);
      RANK_CHECK_OK(training.Backward());
      training.Check(2);
      rank.Meet();
    });
  }
}

TEST_CASE("a captured step is not looked through for NaN, and the next one is") {
  RunCase([](Rank& rank) {
    Training training(rank, {.check_nan = true});
    const auto bad = [&](double x) { return rank.rank() + 1 == rank.size() ? NAN : x; };
    training.Fill(1);
    RANK_CHECK_OK(training.Backward());
    const CapturedGraph graph(training.stream(), [&] { RANK_CHECK_OK(training.Backward()); });
    training.Fill(2, bad);
    graph.Launch(training.stream());
    training.Fill(3);
    RANK_CHECK_OK(training.Backward());
    training.Check(3);
    training.Fill(4, bad);
    RANK_CHECK_STATUS(training.Backward(), absl::StatusCode::kDataLoss, absl::StrCat("rank ", rank.size() - 1, " has"),
                      "in step 4");
    training.stream().Wait();
    rank.Meet();
  });
}

}  // namespace
}  // namespace ddp::testing
