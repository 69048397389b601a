// DistributedDataParallel: parameters that a step does not use.
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ddp/distributed_data_parallel.h"
#include "tests/support/catch.h"
#include "tests/support/ddp_model.h"
#include "tests/support/forwarding_group.h"

namespace ddp::testing {
namespace {

// --- unused parameters ----------------------------------------------------------------------------------------------

// Which of 6 parameters a rank uses in a step: 0 and 1 always, 2 on even ranks, 3 on the last rank, 4 nowhere, 5 in
// even steps.
bool Uses(int rank, int size, size_t p, int step) {
  switch (p) {
    case 2:
      return rank % 2 == 0;
    case 3:
      return rank == size - 1;
    case 4:
      return false;
    case 5:
      return step % 2 == 0;
    default:
      return true;
  }
}

void CheckUnusedStep(Rank& rank, DistributedDataParallel& model, int step,
                     const std::function<bool(int, size_t)>& uses) {
  const auto mark = [&](size_t p, size_t i) { return -1000.0 * rank.rank() - static_cast<double>(p + i); };
  for (size_t p = 0; p < model.size(); ++p) {
    const Buffer g = model.grad(p);
    for (size_t i = 0; i < g.count; ++i) SetElement(g.dtype, g.data, i, mark(p, i));
  }
  for (const size_t p : Backwards(model.size())) {
    if (!uses(rank.rank(), p)) continue;
    WriteGradient(rank, model, p, step);
    model.GradReady(p);
  }
  RANK_CHECK_OK(model.FinishBackward());
  CheckGradients(rank, model, [&](size_t p, size_t i) {
    double sum = 0;
    bool used = false;
    for (int r = 0; r < rank.size(); ++r) {
      if (!uses(r, p)) continue;
      used = true;
      sum += Gradient(r, p, i, step);
    }
    return used ? sum / rank.size() : mark(p, i);  // what nobody used is left as it was
  });
}

TEST_CASE("unused parameters count as zeros, and stay as they are where nobody used them") {
  RunOnRanks([](Rank& rank) {
    for (const bool copied : {false, true}) {
      for (const size_t bucket_bytes : {size_t{1}, size_t{3000}, size_t{25} << 20}) {
        DdpOptions options;
        options.unused = UnusedParameters::kDetect;
        options.bucket_bytes = bucket_bytes;
        std::vector<Parameter> parameters = MakeParameters({500, 1, 200, 1000, 30, 64});
        std::vector<std::vector<float>> own;
        for (Parameter& p : parameters) {
          if (!copied) break;
          own.emplace_back(p.value.count);
          p.grad = {own.back().data(), p.value.count, DType::kFloat32, {}};
        }
        const Model model = Make(rank, parameters, options);
        for (int step = 0; step < 4; ++step) {
          CheckUnusedStep(rank, *model, step, [&](int r, size_t p) { return Uses(r, rank.size(), p, step); });
        }
      }
    }
  });
}

TEST_CASE("once the order is known, unused parameters do not keep others from overlapping") {
  RunOnRanks([](Rank& rank) {
    DdpOptions options;
    options.unused = UnusedParameters::kDetect;
    options.bucket_bytes = 400;
    const Model model = Make(rank, MakeParameters({100, 100, 100}), options);
    for (int step = 0; step < 2; ++step) {
      for (const size_t p : {size_t{1}, size_t{0}}) {  // 2, expected first, is not used
        WriteGradient(rank, *model, p, step);
        model->GradReady(p);
      }
      RANK_CHECK_OK(model->FinishBackward());
      const std::vector<BucketTimes> b = model->statistics().buckets;
      RANK_CHECK_EQ(b.size(), size_t{3});
      // In the first step all are launched at the end; then only what is not used is.
      RANK_CHECK(step == 0 || (b[0].launched_ns <= b[1].ready_ns && b[1].launched_ns <= b[2].ready_ns));
    }
    RANK_CHECK_EQ(model->statistics().plans, int64_t{2});
  });
}

// --- static graph ---------------------------------------------------------------------------------------------------

// Counts the reductions of bytes: used-maps.
class CountingGroup final : public ForwardingGroup {
 public:
  using ForwardingGroup::ForwardingGroup;
  absl::StatusOr<Work> AllReduce(Buffers in, Buffers out, const ReduceOptions& options, Stream after) override {
    maps += in[0].dtype == DType::kUInt8;
    for (const Buffer& b : in) elements += b.dtype == DType::kUInt8 ? 0 : b.count;
    return ForwardingGroup::AllReduce(in, out, options, after);
  }
  int maps = 0;
  size_t elements = 0;
};

TEST_CASE("a static graph is looked at once, also with micro-batches, and goes on being reduced") {
  RunOnRanks([](Rank& rank) {
    CountingGroup group(rank.group());
    DdpOptions options;
    options.static_graph = true;
    options.bucket_bytes = 1000;
    const Model model =
        RANK_VALUE(DistributedDataParallel::Create(group, MakeParameters({500, 1, 200, 1000, 30, 64}), options));
    const auto uses = [&](int r, size_t p) { return Uses(r, rank.size(), p, 0); };
    for (int step = 0; step < 5; ++step) {
      group.elements = 0;
      if (step == 2) {  // a micro-batch that is not reduced
        const DistributedDataParallel::NoSync local(*model);
        for (size_t p = 0; p < model->size(); ++p) {
          if (uses(rank.rank(), p)) model->GradReady(p);
        }
        RANK_CHECK_OK(model->FinishBackward());
        RANK_CHECK_EQ(group.elements, size_t{0});
      }
      CheckUnusedStep(rank, *model, step, uses);
      RANK_CHECK_EQ(group.maps, 1);
      // Parameter 4, which nobody uses, is not reduced any more. (Padding is: 64 elements in the worst case each.)
      if (step > 0) RANK_CHECK(group.elements < 500 + 1 + 200 + 1000 + 64 + 5 * 64, group.elements);
    }
  });
}

void CheckDeviation(const std::function<void(DistributedDataParallel&)>& second_step, const char* part) {
  RunOnRanks([&](Rank& rank) {
    DdpOptions options;
    options.static_graph = true;
    options.bucket_bytes = 400;
    const Model model = Make(rank, MakeParameters({100, 100, 100}), options);
    Announce(rank, *model, {2, 0}, 0);  // 1 is not used
    RANK_CHECK_OK(model->FinishBackward());
    rank.Meet();
    second_step(*model);
    const absl::Status status = model->FinishBackward();
    RANK_CHECK(!status.ok());
    RANK_CHECK(absl::StrContains(status.message(), part) && absl::StrContains(status.message(), "static_graph"),
               status.ToString());
  });
}

TEST_CASE("a deviation from a static graph is an error, whichever way it goes") {
  CheckDeviation([](DistributedDataParallel& model) { model.GradReady(2); }, "layer0.weight");
  CheckDeviation(
      [](DistributedDataParallel& model) {
        for (const size_t p : {size_t{2}, size_t{1}, size_t{0}}) model.GradReady(p);
      },
      "layer1.weight");
}

}  // namespace
}  // namespace ddp::testing
