// SPDX-License-Identifier: Apache-2.0
// Gradients and values in memory of the program's.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

#include "libddp/device/buffer_ops.h"
#include "tests/support/ddp_gpu_cases.h"
#include "tests/support/ddp_gpu_steps.h"

// g++ takes members of class type that are left out of designated initializers for forgotten.
#pragma GCC diagnostic ignored "-Wmissing-field-initializers"

namespace ddp::testing::gpu_cases {

namespace {

// Slices of odd sizes, some with a gap before them, registered in another order than they lie in. own: memory of the
// program's, which the group gets to know.
void InPlaceIn(GpuRank& rank, DType dtype, size_t gap, bool own) {
  const TestStream a(rank);
  std::vector<Parameter> parameters = MakeParameters(rank, dtype);
  size_t total = gap;
  for (const size_t count : kCounts) total += count + gap;
  const size_t bytes = total * SizeOf(dtype);
  Allocation memory;
  if (own) {
    memory = Allocation(RANK_VALUE(AllocateOn(rank.device(), bytes)), bytes, rank.device());
    RANK_CHECK_OK(rank.group.Register(memory));
  } else {
    memory = RANK_VALUE(rank.group.Allocate(bytes, rank.device()));
  }
  const Buffer whole = memory.View(dtype, 0, total);
  Write(
      whole, [](size_t) { return 99.0; }, a.get());
  std::vector<bool> used(total);
  size_t at = gap;
  for (const size_t p : {4u, 0u, 7u, 3u, 1u, 6u, 2u, 5u}) {
    parameters[p].grad = memory.View(dtype, at * SizeOf(dtype), kCounts[p]);
    std::fill_n(used.begin() + static_cast<std::ptrdiff_t>(at), kCounts[p], true);
    at += kCounts[p] + gap;
  }
  const Model model = RANK_VALUE(DistributedDataParallel::Create(rank.group, parameters));
  for (int number = 0; number < 2; ++number) {
    const Step step{.dtype = dtype, .number = number, .tolerance = dtype == DType::kFloat32 ? 0 : 0.02};
    Backward(rank, *model, step, {&a});
    RANK_CHECK_OK(model->FinishBackward(a.get()));
    CheckGradients(rank, *model, step, a.get());
    const std::vector<double> now = Read(whole, a.get());
    for (size_t i = 0; i < total; ++i) RANK_CHECK(used[i] || now[i] == 99.0, "element ", i, " is ", now[i]);
  }
  const DdpStatistics statistics = model->statistics();
  if (!statistics.buckets.empty()) {  // a copy, of gradients with gaps between them, would be one range
    const size_t ranges = statistics.buckets[0].ranges;
    RANK_CHECK(gap == 0 ? ranges == 1 : ranges > 1, ranges, " ranges");
  }
  model->ZeroGrad(a.get());
  const std::vector<double> zeroed = Read(whole, a.get());
  for (size_t i = 0; i < total; ++i) RANK_CHECK_EQ(zeroed[i], used[i] ? 0.0 : 99.0);
}

}  // namespace

void InPlace(GpuRank& rank) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const size_t gap : {size_t{0}, size_t{3}}) {
      for (const bool own : {false, true}) InPlaceIn(rank, dtype, gap, own);
    }
  }
}

void Replicas(GpuRank& rank) {
  const TestStream a(rank);
  double on_host = 5;
  const Buffer host{&on_host, 1, DType::kFloat64, {}};
  for (const int64_t every : {1, 2}) {
    const Model model = Make(rank, DType::kFloat32, {.buffers = {{"host", host, true}}, .check_replicas = every});
    for (size_t p = 0; p < model->size(); ++p) {
      Write(
          model->value(p), [&](size_t i) { return static_cast<double>(i) + rank.rank(); }, a.get());
    }
    RANK_CHECK_OK(model->BroadcastValues(rank.size() - 1, a.get()));
    RANK_CHECK_EQ(Read(model->value(4), a.get())[40'000], 40'000.0 + rank.size() - 1);
    int number = 0;
    const auto step = [&](Stream finish) {
      Backward(rank, *model, {.number = number}, {&a});
      if (finish.native == nullptr) a.Wait();
      const absl::Status status = model->FinishBackward(finish);
      CheckGradients(rank, *model, {.number = number++}, a.get());
      return status;
    };
    for (int i = 0; i < 4; ++i) RANK_CHECK_OK(step(i == 2 ? kNoStream : a.get()));
    // The last bit of the last element of one rank; the fifth step is checked, and the sixth tells.
    if (rank.rank() == rank.size() - 1) {
      const Buffer last = {static_cast<float*>(model->value(4).data) + 40'000, 1, DType::kFloat32, rank.device()};
      Write(
          last, [&](size_t) { return std::nextafter(40'000.0f + static_cast<float>(rank.size() - 1), 0.0f); }, a.get());
    }
    RANK_CHECK_OK(step(a.get()));
    const absl::Status told = step(a.get());
    if (rank.size() == 1) {
      RANK_CHECK_OK(told);
      continue;
    }
    RANK_CHECK_STATUS(told, StatusCode::kFailedPrecondition, "'layer4.weight'", "step 5", "1 of 9 differ",
                      absl::StrCat("rank ", rank.size() - 1));
    RANK_CHECK_OK(model->BroadcastValues(0, a.get()));
    while (number < 8) RANK_CHECK_OK(step(a.get()));
    on_host = rank.rank();  // in host memory, beside a model on GPUs
    RANK_CHECK_OK(step(a.get()));
    RANK_CHECK_STATUS(step(a.get()), StatusCode::kFailedPrecondition, "buffer 'host'");
    RANK_CHECK_OK(rank.group.status());
    on_host = 5;
    a.Wait();
  }
}

namespace {

// Doubles before the sum, and halves after it, on a stream of its own.
class ScalingHook final : public CommHook {
 public:
  ScalingHook(const GpuRank& rank, int rounds) : own_(rank), rounds_(rounds) {}
  std::string name() const override { return "scaling"; }
  int rounds() const override { return rounds_; }
  Work Start(ProcessGroup& group, const GradBucket& bucket, int round) override {
    if (round + 1 < rounds_) return Scale(group, bucket, StreamWork(group, bucket.stream), 2);
    return Scale(group, bucket, group.AllReduce(bucket.buffer, bucket.buffer, bucket.reduce, bucket.stream), 0.5);
  }

 private:
  Work Scale(ProcessGroup& group, const GradBucket& bucket, Work before, double factor) {
    if (absl::Status s = before.BlockStream(own_.get()); !s.ok()) return s;
    if (absl::Status s = CopyScaled(bucket.buffer, bucket.buffer, factor, own_.get()); !s.ok()) return s;
    return StreamWork(group, own_.get());
  }

  const TestStream own_;
  const int rounds_;
};

}  // namespace

void OwnKernels(GpuRank& rank) {
  const TestStream a(rank);
  for (const int rounds : {1, 2}) {
    const Model model =
        Make(rank, DType::kFloat32, {.bucket_bytes = 4096, .hook = std::make_shared<ScalingHook>(rank, rounds)});
    Step step;
    step.expected = [&](size_t p, size_t i) {
      return Average(DType::kFloat32, rank.size(), p, i, step.number) * (rounds == 1 ? 0.5 : 1);
    };
    for (; step.number < 3; ++step.number) {
      Backward(rank, *model, step, {&a});
      RANK_CHECK_OK(model->FinishBackward(a.get()));
      CheckGradients(rank, *model, step, a.get());
    }
    Work done = StreamWork(rank.group, a.get());
    RANK_CHECK_OK(done.Wait());
    RANK_CHECK(done.Done());
  }
  RANK_CHECK_STATUS(StreamWork(rank.group, kNoStream), StatusCode::kInvalidArgument, "StreamWork",
                    "no stream of a GPU");
}

void Nan(GpuRank& rank) {
  const TestStream a(rank), b(rank);
  const int last = rank.size() - 1;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const bool copied : {false, true}) {
      const Model model = Make(rank, dtype, {.bucket_bytes = 4096, .copy_gradients = copied, .check_nan = true});
      OwnGradients own;
      const auto step = [&](const std::vector<size_t>& bad, Stream finish) {
        if (copied) own.Give(rank, *model, dtype);
        for (size_t p = model->size(); p-- > 0;) {
          const bool here = rank.rank() == last && std::find(bad.begin(), bad.end(), p) != bad.end();
          const Stream stream = p % 2 == 0 ? a.get() : b.get();
          Write(
              model->grad(p), [&](size_t i) { return here && i + 1 == kCounts[p] ? HUGE_VAL : 1.0; }, stream);
          model->GradReady(p, stream);
        }
        const absl::Status status = model->FinishBackward(finish);
        a.Wait();  // the next step's gradients are written in both
        b.Wait();
        return status;
      };
      RANK_CHECK_OK(step({}, a.get()));
      RANK_CHECK_STATUS(step({4}, a.get()), StatusCode::kDataLoss, absl::StrCat("rank ", last, " has"),
                        "'layer4.weight', in step 2");
      RANK_CHECK_OK(step({}, a.get()));
      RANK_CHECK_STATUS(step({0, 6}, kNoStream), StatusCode::kDataLoss, absl::StrCat("rank ", last, " has"),
                        "'layer6.weight' (the first of 2), in step 4");
      RANK_CHECK_OK(step({}, b.get()));
      RANK_CHECK_OK(rank.group.status());
      a.Wait();
      b.Wait();
    }
  }
}

}  // namespace ddp::testing::gpu_cases
