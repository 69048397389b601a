// SPDX-License-Identifier: Apache-2.0
// What the model does by itself comes after the program's work that still reads, and before the program's work that
// already reads again.
#include <functional>
#include <memory>
#include <vector>

#include "tests/support/ddp_gpu_cases.h"
#include "tests/support/ddp_gpu_steps.h"

// g++ takes members of class type that are left out of designated initializers for forgotten.
#pragma GCC diagnostic ignored "-Wmissing-field-initializers"

namespace ddp::testing::gpu_cases {
namespace {

// Arrays of the gradients' sizes, on this rank's GPU.
class Arrays {
 public:
  explicit Arrays(const GpuRank& rank) {
    for (const size_t count : kCounts) {
      memory_.push_back(RANK_VALUE(AllocateOn(rank.device(), std::max<size_t>(1, count) * sizeof(float))));
      buffers_.push_back({memory_.back().get(), count, DType::kFloat32, rank.device()});
    }
  }
  const Buffer& operator[](size_t p) const { return buffers_[p]; }

 private:
  std::vector<std::shared_ptr<void>> memory_;
  std::vector<Buffer> buffers_;
};

void Submit(const Buffer& from, const Buffer& to, const TestStream& stream) {
  RANK_CHECK_OK(CopyScaled({&from, 1}, {&to, 1}, 1, stream.get()));
}

// A backward pass and an optimizer that the host waits for nowhere.
class Program {
 public:
  static constexpr int kSteps = 4;
  Program(const GpuRank& rank, const TestStream& stream) : rank_(rank), stream_(stream), read_(rank) {
    for (int number = 0; number < kSteps; ++number) {
      const Arrays& grads = *grads_.emplace_back(std::make_unique<Arrays>(rank));
      for (size_t p = 0; p < kCounts.size(); ++p) {
        Write(
            grads[p], [&](size_t i) { return Gradient(DType::kFloat32, rank.rank(), p, i, number); }, stream.get());
      }
    }
  }
  void Backward(
      DistributedDataParallel& model, int number,
      const std::function<bool(size_t)>& used = [](size_t) { return true; }) const {
    for (size_t p = kCounts.size(); p-- > 0;) {
      if (!used(p)) continue;
      Submit((*grads_[static_cast<size_t>(number)])[p], model.grad(p), stream_);
      model.GradReady(p, stream_.get());
    }
  }
  // Reads all gradients, as an optimizer does.
  void Step(DistributedDataParallel& model) { StepInto(model, read_); }
  void StepInto(DistributedDataParallel& model, const Arrays& read) const {
    for (size_t p = 0; p < kCounts.size(); ++p) Submit(model.grad(p), read[p], stream_);
  }
  // What Step has read.
  void Check(const std::function<double(size_t, size_t)>& expected) const { CheckRead(read_, expected); }
  void CheckRead(const Arrays& read, const std::function<double(size_t, size_t)>& expected) const {
    for (size_t p = 0; p < kCounts.size(); ++p) {
      const std::vector<double> got = Read(read[p], stream_.get());
      for (size_t i = 0; i < got.size(); ++i) {
        const double want = expected(p, i);
        RANK_CHECK(std::fabs(got[i] - want) <= 1e-6 * std::max(1.0, std::fabs(want)), "rank ", rank_.rank(),
                   " parameter ", p, " at ", i, ": ", got[i], " not ", want);
      }
    }
  }

 private:
  const GpuRank& rank_;
  const TestStream& stream_;
  std::vector<std::unique_ptr<Arrays>> grads_;
  Arrays read_;
};

}  // namespace

void Order(GpuRank& rank) {
  const TestStream a(rank);
  Program program(rank, a);
  const auto average = [&](int number) {
    return [&rank, number](size_t p, size_t i) { return Average(DType::kFloat32, rank.size(), p, i, number); };
  };
  {  // without a stream: behind what the program's last stream has, and done on return
    const Model model = Make(rank, DType::kFloat32, {});
    const Arrays after(rank);
    program.Backward(*model, 1);
    RANK_CHECK_OK(model->FinishBackward(a.get()));
    program.Step(*model);
    model->ZeroGrad(kNoStream);
    program.StepInto(*model, after);
    program.Check(average(1));
    program.CheckRead(after, [](size_t, size_t) { return 0.0; });
    program.Backward(*model, 2);
    RANK_CHECK_OK(model->FinishBackward(a.get()));
    program.Step(*model);
    const double norm = RANK_VALUE(model->ClipGradNorm(1, 2, kNoStream));
    program.StepInto(*model, after);
    program.Check(average(2));
    program.CheckRead(after, [&](size_t p, size_t i) { return average(2)(p, i) / (norm + 1e-6); });
  }
  for (const bool static_graph : {true, false}) {  // rank 0 alone uses parameter 4
    const auto used = [&](size_t p) { return p != 4 || rank.rank() == 0; };
    const auto expected = [&](int number) {
      return [&, number](size_t p, size_t i) {
        return p == 4 ? Gradient(DType::kFloat32, 0, p, i, number) / rank.size() : average(number)(p, i);
      };
    };
    DdpOptions options{.static_graph = static_graph};
    if (!static_graph) options.unused = UnusedParameters::kDetect;
    const Model model = Make(rank, DType::kFloat32, options);
    for (int number = 0; number < Program::kSteps; ++number) {
      const Arrays read(rank);
      if (number > 0) program.StepInto(*model, read);
      program.Backward(*model, number, used);
      RANK_CHECK_OK(number == 2 ? model->FinishBackward(kNoStream) : model->FinishBackward(a.get()));
      if (number > 0) program.CheckRead(read, expected(number - 1));
    }
  }
  {  // rank 0 has one step more, and writes its values last
    const Model model = Make(rank, DType::kFloat32, {});
    const Arrays values(rank);
    Write(
        values[1], [&](size_t i) { return static_cast<double>(i) + 7 * rank.rank(); }, a.get());
    DistributedDataParallel::Join join(*model, {.divide_by_active = true});
    for (int number = 0; number < (rank.rank() == 0 ? 2 : 1); ++number) {
      program.Backward(*model, number);
      RANK_CHECK_OK(model->FinishBackward(a.get()));
      program.Step(*model);
    }
    Submit(values[1], model->value(1), a);
    RANK_CHECK_OK(join.Finish());
    RANK_CHECK_EQ(Read(model->value(1), a.get())[kCounts[1] - 1], static_cast<double>(kCounts[1]) - 1);
    const bool longer = rank.rank() == 0;
    program.Check(
        [&](size_t p, size_t i) { return longer ? Gradient(DType::kFloat32, 0, p, i, 1) : average(0)(p, i); });
  }
  a.Wait();
}

void OrderWithoutReduction(GpuRank& rank) {
  const TestStream a(rank), b(rank);
  Program on_a(rank, a), on_b(rank, b);
  for (const Stream end : {a.get(), b.get(), kNoStream}) {
    const Model model = Make(rank, DType::kFloat32, {});
    for (int number = 0; number < 2; ++number) {  // all parameters but 4 in the pass that is not reduced
      {
        const DistributedDataParallel::NoSync local(*model);
        on_a.Backward(*model, number, [](size_t p) { return p != 4; });
        RANK_CHECK_OK(model->FinishBackward(end));
      }
      on_b.Backward(*model, number, [](size_t p) { return p == 4; });
      RANK_CHECK_OK(model->FinishBackward(b.get()));
      on_b.Step(*model);
      on_b.Check([&](size_t p, size_t i) { return Average(DType::kFloat32, rank.size(), p, i, number); });
    }
  }
  a.Wait();
}

namespace {

// What `array` becomes when a call without a stream copies rank 0's to all. The program writes it before, copies it to
// `before` and, after the call, to `after`, and waits for none of that.
class Copied {
 public:
  Copied(const GpuRank& rank, const TestStream& stream, const Buffer& array)
      : rank_(rank), stream_(stream), array_(array), source_(Make()), before_(Make()), after_(Make()) {
    Write(
        View(source_), [&](size_t i) { return Value(rank_.rank(), i); }, stream_.get());
  }
  void SubmitBefore() const {
    Submit(View(source_), array_, stream_);
    Submit(array_, View(before_), stream_);
  }
  void SubmitAfter() const { Submit(array_, View(after_), stream_); }
  void Check() const {
    const std::vector<double> before = Read(View(before_), stream_.get()), after = Read(View(after_), stream_.get());
    for (size_t i = 0; i < array_.count; ++i) {
      RANK_CHECK_EQ(before[i], Value(rank_.rank(), i));
      RANK_CHECK_EQ(after[i], Value(0, i));
    }
  }

 private:
  static double Value(int rank, size_t i) { return static_cast<double>(i % 1000) + 7 * rank + 1; }
  std::shared_ptr<void> Make() const { return RANK_VALUE(AllocateOn(rank_.device(), array_.count * sizeof(float))); }
  Buffer View(const std::shared_ptr<void>& memory) const {
    return {memory.get(), array_.count, DType::kFloat32, rank_.device()};
  }

  const GpuRank& rank_;
  const TestStream& stream_;
  const Buffer array_;
  const std::shared_ptr<void> source_, before_, after_;
};

}  // namespace

void OrderBetweenSteps(GpuRank& rank) {
  const TestStream a(rank), b(rank);
  const Arrays own(rank);  // 1: a buffer of the model's, 2: a new parameter's value
  std::vector<float> on_cpu = {static_cast<float>(rank.rank() + 3)};
  const Buffer cpu_buffer{on_cpu.data(), 1, DType::kFloat32, {}};
  const Model model = Make(rank, DType::kFloat32, {.buffers = {{"mean", own[1]}, {"count", cpu_buffer}}});
  Program program(rank, a);
  program.Backward(*model, 1);
  RANK_CHECK_OK(model->FinishBackward(a.get()));
  program.Step(*model);
  // Each comes behind what the program's last stream has, and has taken effect on return.
  const Copied value(rank, a, model->value(4)), buffer(rank, a, own[1]), later(rank, b, model->value(1)),
      added(rank, b, own[2]);
  for (const Copied* const copied : {&value, &buffer}) copied->SubmitBefore();
  RANK_CHECK_OK(model->BroadcastValues(0, kNoStream));
  RANK_CHECK_EQ(on_cpu[0], 3.0f);
  for (const Copied* const copied : {&value, &buffer}) copied->SubmitAfter();
  for (const Copied* const copied : {&value, &buffer}) copied->Check();
  on_cpu[0] = static_cast<float>(rank.rank() + 5);
  buffer.SubmitBefore();
  RANK_CHECK_OK(model->BeginForward(kNoStream));
  RANK_CHECK_EQ(on_cpu[0], 5.0f);
  buffer.SubmitAfter();
  buffer.Check();
  // The last stream is another one now.
  a.Wait();
  RANK_CHECK_OK(model->BroadcastValues(0, b.get()));
  later.SubmitBefore();
  RANK_CHECK_OK(model->BroadcastValues(0, kNoStream));
  later.SubmitAfter();
  later.Check();
  // The gradient of what is frozen becomes zero only when the optimizer has read it.
  const Arrays read(rank);
  for (size_t p = 0; p < kCounts.size(); ++p) Submit(model->grad(p), read[p], b);
  added.SubmitBefore();
  std::vector<Parameter> parameters = MakeParameters(rank, DType::kFloat32);
  parameters[4].frozen = true;
  parameters.push_back({"added", {}, own[2], {}});
  RANK_CHECK_OK(model->SetParameters(parameters));
  added.SubmitAfter();
  program.CheckRead(read, [&](size_t p, size_t i) { return Average(DType::kFloat32, rank.size(), p, i, 1); });
  added.Check();
  const Arrays after(rank);
  Submit(model->grad(4), after[4], b);
  for (const double grad : Read(after[4], b.get())) RANK_CHECK_EQ(grad, 0.0);
  b.Wait();
}

}  // namespace ddp::testing::gpu_cases
