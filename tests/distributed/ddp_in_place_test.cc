// SPDX-License-Identifier: Apache-2.0
// DistributedDataParallel: gradients of the caller's that lie in memory of ProcessGroup::Allocate are reduced in place.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ddp/distributed_data_parallel.h"
#include "tests/support/catch.h"
#include "tests/support/ddp_model.h"
#include "tests/support/forwarding_group.h"
#include "tests/support/logged.h"

namespace ddp::testing {
namespace {

using absl::StatusCode;

constexpr char kCanary = 0x5a;

// Notes which memory is reduced, allocated and registered.
class WatchedGroup final : public ForwardingGroup {
 public:
  using ForwardingGroup::ForwardingGroup;
  Work Start(const Call& call) override {
    for (const Buffer& b : call.in) {
      if (call.kind == Call::Kind::kAllReduce && call.reduce.bucket >= 0) reduced.push_back(b);
    }
    return ForwardingGroup::Start(call);
  }
  absl::StatusOr<Allocation> Allocate(size_t bytes, Device device) override {
    allocated += bytes;
    return ForwardingGroup::Allocate(bytes, device);
  }
  absl::Status Register(const Allocation& memory) override {
    ++registered;
    return ForwardingGroup::Register(memory);
  }

  std::vector<Buffer> reduced;  // of buckets
  size_t allocated = 0;
  int registered = 0;
};

// One piece of memory with slices for gradients, as a C program has it; what is no slice is filled with kCanary.
struct Slices {
  Allocation memory;
  std::vector<Buffer> slices;  // by parameter

  // `order`: of the slices in memory. `gap`: bytes before each slice, and behind the last.
  Slices(ProcessGroup& group, const std::vector<size_t>& counts, const std::vector<DType>& types,
         const std::vector<size_t>& order, size_t gap)
      : slices(counts.size()) {
    size_t end = 0;
    std::vector<size_t> offsets(counts.size());
    for (const size_t p : order) {
      const size_t size = SizeOf(types[p]);
      offsets[p] = (end + gap + size - 1) / size * size;
      end = offsets[p] + counts[p] * size;
    }
    memory = RANK_VALUE(group.Allocate(end + gap + 1, Device{}));
    std::fill_n(static_cast<char*>(memory.data()), memory.bytes(), kCanary);
    for (size_t p = 0; p < counts.size(); ++p) slices[p] = memory.View(types[p], offsets[p], counts[p]);
  }

  bool Holds(const Buffer& b) const {
    const auto* const data = static_cast<const char*>(b.data);
    const auto* const begin = static_cast<const char*>(memory.data());
    return data >= begin && data + b.count * SizeOf(b.dtype) <= begin + memory.bytes();
  }
  bool InSlice(size_t offset) const {
    const auto* const here = static_cast<const char*>(memory.data()) + offset;
    return std::any_of(slices.begin(), slices.end(), [&](const Buffer& b) {
      const auto* const begin = static_cast<const char*>(b.data);
      return here >= begin && here < begin + b.count * SizeOf(b.dtype);
    });
  }
  void CheckCanaries() const {
    for (size_t i = 0; i < memory.bytes(); ++i) {
      RANK_CHECK(InSlice(i) || static_cast<const char*>(memory.data())[i] == kCanary, "byte ", i, " was changed");
    }
  }
  std::vector<Parameter> Parameters() const {
    std::vector<Parameter> parameters;
    for (size_t p = 0; p < slices.size(); ++p) {
      const Buffer& grad = slices[p];
      parameters.push_back(
          {absl::StrCat("layer", p, ".weight"), {}, Buffer{nullptr, grad.count, grad.dtype, {}}, grad});
    }
    return parameters;
  }
};

std::vector<DType> All(size_t n, DType dtype) { return std::vector<DType>(n, dtype); }
std::vector<size_t> Forwards(size_t n) {
  std::vector<size_t> order(n);
  std::iota(order.begin(), order.end(), size_t{0});
  return order;
}

Model Make(ProcessGroup& group, const std::vector<Parameter>& parameters, const DdpOptions& options = {}) {
  return RANK_VALUE(DistributedDataParallel::Create(group, parameters, options));
}

// Whole numbers below 128 and divisible by 12, so that bfloat16 has them, too.
double Small(int rank, size_t p, size_t i, int step) {
  return static_cast<double>((i + 3 * p + static_cast<size_t>(rank + step)) % 5) * 12;
}
double SmallAverage(int size, size_t p, size_t i, int step) {
  double sum = 0;
  for (int r = 0; r < size; ++r) sum += Small(r, p, i, step);
  return sum / size;
}

void Write(Rank& rank, DistributedDataParallel& model, size_t p, int step) {
  const Buffer g = model.grad(p);
  for (size_t i = 0; i < g.count; ++i) SetElement(g.dtype, g.data, i, Small(rank.rank(), p, i, step));
}

void Step(Rank& rank, DistributedDataParallel& model, int step) {
  for (const size_t p : Backwards(model.size())) {
    Write(rank, model, p, step);
    model.GradReady(p);
  }
  RANK_CHECK_OK(model.FinishBackward());
}

void CheckedStep(Rank& rank, DistributedDataParallel& model, int step, double tolerance = 0) {
  Step(rank, model, step);
  for (size_t p = 0; p < model.size(); ++p) {
    const Buffer g = model.grad(p);
    for (size_t i = 0; i < g.count; ++i) {
      const double got = GetElement(g.dtype, g.data, i), want = SmallAverage(rank.size(), p, i, step);
      RANK_CHECK(std::fabs(got - want) <= tolerance, "rank ", rank.rank(), " parameter ", p, " at ", i, ": ", got,
                 " not ", want);
    }
  }
}

// Those of one layer of a transformer with 72 channels, and odd ones: none a multiple of 256 bytes.
const std::vector<size_t> kSlices = {72, 72 * 7, 1, 0, 3001, 72 * 72, 5, 20'001, 72};

TEST_CASE("gradients inside an allocation are reduced where they lie, in any layout") {
  RunOnRanks([](Rank& rank) {
    const size_t n = kSlices.size();
    const std::vector<size_t> shuffled = {5, 0, 8, 2, 1, 7, 3, 6, 4};
    std::vector<DType> mixed = All(n, DType::kFloat32);
    mixed[0] = mixed[4] = mixed[8] = DType::kBFloat16;
    mixed[2] = mixed[5] = DType::kFloat64;
    const std::vector<DType> all_types[] = {All(n, DType::kFloat32), All(n, DType::kBFloat16), mixed};
    const std::vector<size_t> orders[] = {Forwards(n), Backwards(n), shuffled};
    const size_t gaps[] = {0, 2, 300}, buckets[] = {DdpOptions::kDefaultBucketBytes, 1, 10'000};
    // Every three of these four with each other.
    for (size_t run = 0; run < 27; ++run) {
      const size_t a = run / 9, b = run / 3 % 3, c = run % 3;
      const std::vector<DType>& types = all_types[a];
      const size_t gap = gaps[c], bucket = buckets[(a + b + c) % 3];
      const Slices slices(rank.group(), kSlices, types, orders[b], gap);
      WatchedGroup group(rank.group());
      DdpOptions options;
      options.bucket_bytes = bucket;
      const Model model = Make(group, slices.Parameters(), options);
      RANK_CHECK_EQ(group.allocated, size_t{0});  // no places to copy them to
      for (int step = 0; step < 2; ++step) CheckedStep(rank, *model, step);
      RANK_CHECK(!group.reduced.empty());
      for (const Buffer& buffer : group.reduced) RANK_CHECK(slices.Holds(buffer));
      slices.CheckCanaries();
      // Without gaps a bucket of one type is one range, however it was registered.
      if (gap == 0 && types != mixed && bucket == DdpOptions::kDefaultBucketBytes) {
        RANK_CHECK_EQ(model->statistics().buckets[0].ranges, size_t{1});
      }
    }
  });
}

// Slices of stacked layers: more ranges than a group tells its peers of in one operation.
TEST_CASE("a bucket may have hundreds of ranges inside an allocation") {
  RunOnRanks([](Rank& rank) {
    const std::vector<size_t> counts(400, 37);
    const Slices slices(rank.group(), counts, All(counts.size(), DType::kFloat32), Forwards(counts.size()), 4);
    const Model model = Make(rank.group(), slices.Parameters());
    for (int step = 0; step < 3; ++step) CheckedStep(rank, *model, step);
    RANK_CHECK_EQ(model->statistics().buckets[0].ranges, counts.size());
    slices.CheckCanaries();
  });
}

TEST_CASE("every option works on gradients inside an allocation") {
  RunOnRanks([](Rank& rank) {
    struct Case {
      DType dtype = DType::kFloat32;
      double tolerance = 0;
      DdpOptions options;
    };
    std::vector<Case> cases(13);
    cases[0].options.piece_bytes = 4096;
    cases[1].options.gradient_predivide_factor = 2;
    cases[2].options.weighted = true;
    cases[2].tolerance = 1e-4;
    cases[3].options.unused = UnusedParameters::kDetect;
    cases[4].options.static_graph = true;
    cases[5].options.hook = CreateAllReduceHook();
    cases[6].options.hook = CreateCompressionHook(DType::kBFloat16);
    cases[7].options.hook = CreatePowerSgdHook();
    cases[8].options.hook = CreateAllReduceHook();
    cases[8].options.reduce_in_float32 = true;
    cases[8].dtype = DType::kBFloat16;
    cases[9].options.copy_gradients = true;
    cases[10].options.bucket_bytes = DdpOptions::kAutoBucketBytes;
    cases[11].options.reduce_in_float32 = true;
    cases[11].dtype = DType::kFloat16;
    cases[12].options.replan = false;
    for (const Case& c : cases) {
      const Slices slices(rank.group(), kSlices, All(kSlices.size(), c.dtype), Forwards(kSlices.size()), 12);
      const Model model = Make(rank.group(), slices.Parameters(), c.options);
      for (int step = 0; step < 3; ++step) CheckedStep(rank, *model, step, c.tolerance);
      slices.CheckCanaries();
      model->ZeroGrad();
      for (size_t p = 0; p < model->size(); ++p) CheckGradient(rank, *model, p, [](size_t, size_t) { return 0.0; });
      slices.CheckCanaries();
    }
  });
}

TEST_CASE("gradients that lie at different places on some rank are copied on every rank") {
  Logged logged;
  RunOnRanks([](Rank& rank) {
    const std::vector<size_t> counts = {100, 5000, 77, 30};
    for (const bool elsewhere : {false, true}) {
      Slices slices(rank.group(), counts, All(4, DType::kFloat32), Forwards(4), 64);
      const Slices others(rank.group(), counts, All(4, DType::kFloat32), Forwards(4), 64);
      // The last rank has gradient 1 somewhere else, or 4 bytes further on; 0 and 2 are swapped for others' memory
      // there.
      std::vector<float> own(counts[1]);
      if (rank.rank() == rank.size() - 1) {
        slices.slices[1].data = elsewhere ? own.data() : static_cast<float*>(slices.slices[1].data) + 1;
        slices.slices[0] = others.slices[0];
      }
      WatchedGroup group(rank.group());
      const Model model = Make(group, slices.Parameters());
      for (int step = 0; step < 3; ++step) CheckedStep(rank, *model, step);
      const size_t copied = std::count_if(group.reduced.begin(), group.reduced.end(),
                                          [&](const Buffer& b) { return !slices.Holds(b) && !others.Holds(b); });
      if (rank.size() > 1) {
        RANK_CHECK(group.allocated > 0 && group.allocated < 6000 * sizeof(float), group.allocated);
        RANK_CHECK_EQ(copied, size_t{3});  // one range in each step
      }
      RANK_CHECK(group.reduced.size() > copied);  // 2 and 3 in place
    }
  });
  if (RanksAreThreads() && RankCount() > 1) {
    CHECK(logged.Count({"'layer1.weight' is copied", "at byte 528 of allocation"}) == 2);
    CHECK(logged.Count({"'layer1.weight' is copied", "in other memory on rank"}) == 1);
  }
}

TEST_CASE("gradients that overlap, or are not aligned to their elements, are refused on every rank") {
  RunOnRanks([](Rank& rank) {
    const Slices slices(rank.group(), {100, 200}, All(2, DType::kFloat32), Forwards(2), 0);
    const bool culprit = rank.rank() == rank.size() - 1;
    const std::string name = absl::StrCat("rank ", rank.size() - 1);
    std::vector<Parameter> parameters = slices.Parameters();
    if (culprit) parameters[1].grad.data = static_cast<float*>(parameters[1].grad.data) - 1;
    RANK_CHECK_STATUS(DistributedDataParallel::Create(rank.group(), parameters), StatusCode::kInvalidArgument, name,
                      "'layer0.weight'", "'layer1.weight'", "share memory");
    parameters = slices.Parameters();
    if (culprit) parameters[1].grad.data = static_cast<char*>(parameters[1].grad.data) + 2;
    RANK_CHECK_STATUS(DistributedDataParallel::Create(rank.group(), parameters), StatusCode::kInvalidArgument, name,
                      "'layer1.weight'", "multiple of 4");
  });
}

TEST_CASE("only gradients inside an allocation are looked at for what is not finite") {
  RunOnRanks([](Rank& rank) {
    const Slices slices(rank.group(), {72, 500, 3}, All(3, DType::kFloat32), {2, 0, 1}, 60);
    for (size_t i = 0; i + 4 <= slices.memory.bytes(); i += 4) {  // NaN in all gaps
      if (!slices.InSlice(i)) SetElement(DType::kFloat32, slices.memory.data(), i / 4, std::nan(""));
    }
    uint32_t nonfinite = 0;
    DdpOptions options;
    options.nonfinite = &nonfinite;
    const Model model = Make(rank.group(), slices.Parameters(), options);
    CheckedStep(rank, *model, 0);
    RANK_CHECK_EQ(nonfinite, 0u);
    for (const size_t p : Backwards(3)) {
      Write(rank, *model, p, 1);
      if (p == 2 && rank.rank() == rank.size() - 1) static_cast<float*>(model->grad(2).data)[2] = HUGE_VALF;
      model->GradReady(p);
    }
    RANK_CHECK_OK(model->FinishBackward());
    RANK_CHECK_EQ(nonfinite, 1u);
  });
}

TEST_CASE("unused gradients inside an allocation keep what no rank has changed") {
  const Logged logged;
  RunOnRanks([](Rank& rank) {
    const Slices slices(rank.group(), {72, 500, 3}, All(3, DType::kFloat32), {1, 0, 2}, 0);
    DdpOptions options;
    options.unused = UnusedParameters::kDetect;
    const Model model = Make(rank.group(), slices.Parameters(), options);
    for (size_t p = 0; p < 3; ++p) {
      for (size_t i = 0; i < model->grad(p).count; ++i) SetElement(DType::kFloat32, model->grad(p).data, i, 7);
    }
    // Nobody uses parameter 1, rank 0 alone parameter 2.
    for (const size_t p : {size_t{2}, size_t{0}}) {
      if (p == 2 && rank.rank() != 0) continue;
      Write(rank, *model, p, 1);
      model->GradReady(p);
    }
    RANK_CHECK_OK(model->FinishBackward());
    CheckGradient(rank, *model, 0, [&](size_t p, size_t i) { return SmallAverage(rank.size(), p, i, 1); });
    CheckGradient(rank, *model, 1, [](size_t, size_t) { return 7.0; });
    for (size_t i = 0; i < 3; ++i) {
      const double got = GetElement(DType::kFloat32, model->grad(2).data, i);
      RANK_CHECK(std::fabs(got - Small(0, 2, i, 1) / rank.size()) < 1e-5, got);
    }
  });
}

TEST_CASE("a gradient that is reduced in place cannot be moved") {
  RunOnRanks([](Rank& rank) {
    const Slices slices(rank.group(), {100, 200}, All(2, DType::kFloat32), Forwards(2), 0);
    const Model model = Make(rank.group(), slices.Parameters());
    std::vector<float> own(100);
    RANK_CHECK_OK(model->SetGrad(0, slices.slices[0]));
    RANK_CHECK_STATUS(model->SetGrad(0, {own.data(), own.size(), DType::kFloat32, {}}), StatusCode::kFailedPrecondition,
                      absl::StrCat("rank ", rank.rank()), "'layer0.weight'", "copy_gradients");
    for (int step = 0; step < 3; ++step) CheckedStep(rank, *model, step);
  });
}

TEST_CASE("what is frozen inside an allocation is left alone, and thaws in place") {
  RunOnRanks([](Rank& rank) {
    const Slices slices(rank.group(), {100, 33, 200}, All(3, DType::kFloat32), Forwards(3), 0);
    WatchedGroup group(rank.group());
    std::vector<Parameter> parameters = slices.Parameters();
    parameters[1].frozen = true;
    const Model model = Make(group, parameters);

    std::vector<char> before(static_cast<const char*>(slices.slices[1].data),
                             static_cast<const char*>(slices.slices[1].data) + 33 * sizeof(float));
    for (const size_t p : {size_t{2}, size_t{0}}) {
      Write(rank, *model, p, 0);
      model->GradReady(p);
    }
    RANK_CHECK_OK(model->FinishBackward());
    CheckGradient(rank, *model, 2, [&](size_t p, size_t i) { return SmallAverage(rank.size(), p, i, 0); });
    RANK_CHECK(std::equal(before.begin(), before.end(), static_cast<const char*>(slices.slices[1].data)));
    RANK_CHECK_OK(model->SetParameters(slices.Parameters()));
    CheckedStep(rank, *model, 1);
    RANK_CHECK_EQ(group.allocated, size_t{0});
    for (const Buffer& b : group.reduced) RANK_CHECK(slices.Holds(b));
  });
}

TEST_CASE("a model keeps the allocation that its gradients lie in, and takes it along into another group") {
  RunOnRanks([](Rank& rank) {
    for (const bool registered : {false, true}) {
      const std::unique_ptr<ProcessGroup> split = RANK_VALUE(rank.group().Split(0, rank.rank()));
      WatchedGroup group(*split);
      std::optional<Slices> slices(std::in_place, rank.group(), kSlices, All(kSlices.size(), DType::kFloat32),
                                   Forwards(kSlices.size()), 0);
      const Model model = Make(rank.group(), slices->Parameters());
      CheckedStep(rank, *model, 0);
      const std::weak_ptr<void> memory = slices->memory.owner();
      if (registered) RANK_CHECK_OK(split->Register(slices->memory));
      slices.reset();
      RANK_CHECK(!memory.expired());
      RANK_CHECK_OK(model->Rebind(group));
      RANK_CHECK_EQ(group.registered, registered ? 0 : 1);
      for (int step = 1; step < 3; ++step) CheckedStep(rank, *model, step);
      for (const Buffer& b : group.reduced) {
        RANK_CHECK(FindAllocation(group, b.data, b.count * SizeOf(b.dtype)).has_value());
      }
    }
  });
}

TEST_CASE("a group tells where memory lies in what it has allocated") {
  RunOnRanks([](Rank& rank) {
    Allocation first = RANK_VALUE(rank.group().Allocate(1000, Device{}));
    const Allocation second = RANK_VALUE(rank.group().Allocate(5000, Device{}));
    const char* const data = static_cast<const char*>(second.data());
    const std::optional<AllocatedRange> whole = FindAllocation(rank.group(), data, 5000);
    RANK_CHECK(whole.has_value() && whole->offset == 0 && whole->memory.owner() == second.owner());
    const std::optional<AllocatedRange> part = FindAllocation(rank.group(), data + 77, 10);
    RANK_CHECK(part.has_value() && part->offset == 77 && part->number == whole->number);
    RANK_CHECK(!FindAllocation(rank.group(), data + 4999, 2).has_value());
    RANK_CHECK(!FindAllocation(rank.group(), data - 1, 2).has_value());
    RANK_CHECK(!FindAllocation(rank.group(), &rank, 1).has_value());
    RANK_CHECK(FindAllocation(rank.group(), first.data(), 1)->number != whole->number);
    const void* const freed = first.data();
    first = Allocation();
    RANK_CHECK(!FindAllocation(rank.group(), freed, 1).has_value());
    // Registered memory, too.
    const std::unique_ptr<ProcessGroup> split = RANK_VALUE(rank.group().Split(0, rank.rank()));
    RANK_CHECK(!FindAllocation(*split, data, 5000).has_value());
    RANK_CHECK_OK(split->Register(second));
    RANK_CHECK(FindAllocation(*split, data + 1, 4999).has_value());
  });
}

}  // namespace
}  // namespace ddp::testing
