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

}  // namespace ddp::testing::gpu_cases
