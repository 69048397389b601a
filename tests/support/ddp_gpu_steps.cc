// SPDX-License-Identifier: Apache-2.0
// The loops over elements, which are optimized (DDP_TEST_CODE_OPTIONS).
#include "tests/support/ddp_gpu_steps.h"

namespace ddp::testing::gpu_cases {
namespace {

// `value` is called with the index of each element.
template <typename Value>
void WriteElements(const Buffer& to, const Value& value, Stream stream) {
  if (to.count == 0) return;
  std::vector<char> host(to.count * SizeOf(to.dtype));
  for (size_t i = 0; i < to.count; ++i) SetElement(to.dtype, host.data(), i, value(i));
  const Buffer from{host.data(), to.count, to.dtype, {}};
  RANK_CHECK_OK(CopyScaled({&from, 1}, {&to, 1}, 1, stream));
}

}  // namespace

void Write(const Buffer& to, const std::function<double(size_t)>& value, Stream stream) {
  WriteElements(to, value, stream);
}

std::vector<double> Read(const Buffer& from, Stream stream) {
  std::vector<char> host(std::max<size_t>(1, from.count) * SizeOf(from.dtype));
  const Buffer to{host.data(), from.count, from.dtype, {}};
  if (from.count > 0) RANK_CHECK_OK(CopyScaled({&from, 1}, {&to, 1}, 1, stream));
  std::vector<double> values(from.count);
  for (size_t i = 0; i < from.count; ++i) values[i] = GetElement(from.dtype, host.data(), i);
  return values;
}

double Gradient(DType dtype, int rank, size_t p, size_t i, int step) {
  return WholeNumber(dtype, ReduceOp::kAvg, (rank + step) % 4, i + 3 * p);
}

double Average(DType dtype, int size, size_t p, size_t i, int step) {
  double sum = 0;
  for (int r = 0; r < size; ++r) sum += Gradient(dtype, r, p, i, step);
  return sum / size;
}

void CheckGradients(const GpuRank& rank, DistributedDataParallel& model, const Step& step, Stream stream) {
  const int size = rank.size();
  const double tolerance = size == 3 ? std::max(1e-6, step.tolerance) : step.tolerance;
  for (size_t p = 0; p < model.size(); ++p) {
    const std::vector<double> got = Read(model.grad(p), stream);
    for (size_t i = 0; i < got.size(); ++i) {
      const double want = step.expected != nullptr ? step.expected(p, i) : Average(step.dtype, size, p, i, step.number);
      RANK_CHECK(std::fabs(got[i] - want) <= tolerance * std::max(1.0, std::fabs(want)), "rank ", rank.rank(), " step ",
                 step.number, " parameter ", p, " at ", i, ": ", got[i], " not ", want);
    }
  }
}

void Backward(const GpuRank& rank, DistributedDataParallel& model, const Step& step,
              const std::vector<const TestStream*>& streams) {
  const int me = rank.rank();
  for (size_t p = model.size(); p-- > 0;) {
    if (!step.used(p)) continue;
    const Stream stream = streams[p % streams.size()]->get();
    WriteElements(
        model.grad(p), [&](size_t i) { return Gradient(step.dtype, me, p, i, step.number); }, stream);
    model.GradReady(p, stream);
  }
}

}  // namespace ddp::testing::gpu_cases
