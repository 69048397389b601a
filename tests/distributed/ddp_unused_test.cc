// SPDX-License-Identifier: Apache-2.0
// DistributedDataParallel: parameters that a step does not use.
#include <algorithm>
#include <cmath>
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

// Lets the program own the memory of all gradients: what is returned.
std::vector<std::vector<float>> GiveGradients(std::vector<Parameter>& parameters) {
  std::vector<std::vector<float>> own;
  for (Parameter& p : parameters) {
    own.emplace_back(p.value.count);
    p.grad = {own.back().data(), p.value.count, DType::kFloat32, {}};
  }
  return own;
}

// A Join in which rank r takes 1 + r steps. `backward` announces a step's gradients; `check` sees those of all steps,
// also of the ones that this rank shadows.
void RunUnevenJoin(Rank& rank, DistributedDataParallel& model, const std::function<void(int step)>& backward,
                   const std::function<void(int step)>& check) {
  const int steps = 1 + rank.rank();
  int shadowed = 0;
  JoinOptions options;
  options.on_shadowed_step = [&] {
    check(steps + shadowed++);
    return absl::OkStatus();
  };
  DistributedDataParallel::Join join(model, options);
  for (int step = 0; step < steps; ++step) {
    backward(step);
    RANK_CHECK_OK(model.FinishBackward());
    check(step);
  }
  RANK_CHECK_OK(join.Finish());
  RANK_CHECK_EQ(shadowed, rank.size() - steps);
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
        if (copied) own = GiveGradients(parameters);
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
  Work Start(const Call& call) override {
    if (call.kind == Call::Kind::kAllReduce) {
      maps += call.in[0].dtype == DType::kUInt8;
      for (const Buffer& b : call.in) elements += b.dtype == DType::kUInt8 ? 0 : b.count;
    }
    return ForwardingGroup::Start(call);
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

// --- gradients that a framework frees --------------------------------------------------------------------------------

// Gradients as PyTorch has them: memory comes when backward writes a gradient, and zero_grad() frees it. What is freed
// is used again for other gradients, and must not be written to by anybody else.
class Framework {
 public:
  explicit Framework(DistributedDataParallel& model) : model_(model), grads_(model.size()) {}

  void Backward(Rank& rank, int step, const std::function<bool(size_t)>& uses) {
    for (const size_t p : Backwards(model_.size())) {
      if (!uses(p)) continue;
      if (grads_[p].empty()) grads_[p] = Take(model_.grad(p).count);
      RANK_CHECK_OK(model_.SetGrad(p, {grads_[p].data(), grads_[p].size(), DType::kFloat32, {}}));
      WriteGradient(rank, model_, p, step);
      model_.GradReady(p);
    }
  }

  void ZeroGrad() {
    for (std::vector<float>& grad : grads_) {
      if (grad.empty()) continue;
      std::fill(grad.begin(), grad.end(), kFreed);
      freed_.push_back(std::exchange(grad, {}));
    }
  }

  bool FreedIsUntouched() const {
    return std::all_of(freed_.begin(), freed_.end(), [](const std::vector<float>& memory) {
      return std::all_of(memory.begin(), memory.end(), [](float x) { return x == kFreed; });
    });
  }

 private:
  static constexpr float kFreed = -12345;

  // The freed block of the least index that is large enough, cut to size: another parameter's as a rule.
  std::vector<float> Take(size_t count) {
    for (std::vector<float>& memory : freed_) {
      if (memory.size() < count) continue;
      std::vector<float> taken = std::exchange(memory, {});
      taken.resize(count);
      return taken;
    }
    return std::vector<float>(count);
  }

  DistributedDataParallel& model_;
  std::vector<std::vector<float>> grads_, freed_;
};

// What all ranks' gradients are after a step in which `uses(rank, p)`.
void CheckFrameworkStep(Rank& rank, DistributedDataParallel& model, const Framework& framework, int step,
                        const std::function<bool(int, size_t)>& uses) {
  RANK_CHECK(framework.FreedIsUntouched());
  double squares = 0;
  for (size_t p = 0; p < model.size(); ++p) {
    const auto expected = [&](size_t i) {
      double sum = 0;
      for (int r = 0; r < rank.size(); ++r) sum += uses(r, p) ? Gradient(r, p, i, step) : 0;
      return sum / rank.size();
    };
    bool used = false;
    for (int r = 0; r < rank.size(); ++r) used |= uses(r, p);
    RANK_CHECK_EQ(model.grad(p).data != nullptr, used);
    if (!used) continue;
    CheckGradient(rank, model, p, [&](size_t, size_t i) { return expected(i); });
    for (size_t i = 0; i < model.grad(p).count; ++i) squares += expected(i) * expected(i);
  }
  const double norm = RANK_VALUE(model.GradNorm());
  RANK_CHECK(std::abs(norm - std::sqrt(squares)) <= 1e-9 * norm, norm);
}

TEST_CASE("memory that SetGrad gave is left alone after the step that reduced it") {
  RunOnRanks([](Rank& rank) {
    for (const bool static_graph : {false, true}) {
      for (const size_t bucket_bytes : {size_t{1}, size_t{25} << 20}) {
        DdpOptions options;
        options.copy_gradients = true;
        options.bucket_bytes = bucket_bytes;
        options.static_graph = static_graph;
        if (!static_graph) options.unused = UnusedParameters::kDetect;
        const Model model = Make(rank, MakeParameters({500, 10, 200, 300, 30, 64}), options);
        Framework framework(*model);
        for (int step = 0; step < 4; ++step) {
          const auto uses = [&](int r, size_t p) { return Uses(r, rank.size(), p, static_graph ? 0 : step); };
          const auto here = [&](size_t p) { return uses(rank.rank(), p); };
          if (step == 2) {  // micro-batches in between: gradients of the first live until the second is reduced
            const DistributedDataParallel::NoSync local(*model);
            framework.Backward(rank, step, here);
            RANK_CHECK_OK(model->FinishBackward());
            if (!static_graph) RANK_CHECK_OK(model->SetParameters(MakeParameters({500, 10, 200, 300, 30, 64})));
          } else {
            framework.Backward(rank, step, here);
          }
          RANK_CHECK_OK(model->FinishBackward());
          CheckFrameworkStep(rank, *model, framework, step, uses);
          framework.ZeroGrad();
        }
      }
    }
  });
}

TEST_CASE("a rank that is through with a Join gets the others' results in memory of the library's") {
  RunOnRanks([](Rank& rank) {
    for (const UnusedParameters unused : {UnusedParameters::kError, UnusedParameters::kDetect}) {
      DdpOptions options;
      options.copy_gradients = true;
      options.unused = unused;
      const Model model = Make(rank, MakeParameters({500, 10}), options);
      Framework framework(*model);
      const auto check = [&](int step) {
        CheckFrameworkStep(rank, *model, framework, step, [&](int r, size_t) { return step < 1 + r; });
        framework.ZeroGrad();
      };
      RunUnevenJoin(
          rank, *model, [&](int step) { framework.Backward(rank, step, [](size_t) { return true; }); }, check);
    }
  });
}

// Parameter 0 is used in even steps, 1 always, 2 never.
TEST_CASE("a rank that is through with a Join leaves gradients as they are that no active rank uses") {
  RunOnRanks([](Rank& rank) {
    for (const bool copied : {false, true}) {
      DdpOptions options;
      options.unused = UnusedParameters::kDetect;
      std::vector<Parameter> parameters = MakeParameters({500, 10, 200});
      std::vector<std::vector<float>> own;
      if (copied) own = GiveGradients(parameters);
      const Model model = Make(rank, parameters, options);
      const auto mark = [&](size_t p) { return -1000.0 * rank.rank() - static_cast<double>(p); };
      const auto mark_all = [&] {
        for (size_t p = 0; p < model->size(); ++p) Fill(model->grad(p), mark(p));
      };
      mark_all();
      const auto backward = [&](int step) {
        Announce(rank, *model, step % 2 == 0 ? std::vector<size_t>{1, 0} : std::vector<size_t>{1}, step);
      };
      RunUnevenJoin(rank, *model, backward, [&](int step) {
        CheckGradients(rank, *model, [&](size_t p, size_t i) {
          if (p == 2 || (p == 0 && step % 2 == 1)) return mark(p);
          double sum = 0;
          for (int r = step; r < rank.size(); ++r) sum += Gradient(r, p, i, step);  // those that still have inputs
          return sum / rank.size();
        });
        mark_all();
      });
    }
  });
}

// In the first Join only rank 0 takes steps. In the second the other ranks learn that they do not use layer0.
TEST_CASE("a rank that learns late that it does not use a parameter of a static graph gets the others' result") {
  RunOnRanks([](Rank& rank) {
    for (const bool given : {false, true}) {
      DdpOptions options;
      options.static_graph = true;
      options.copy_gradients = true;
      std::vector<float> own[2] = {std::vector<float>(40), std::vector<float>(40)};
      std::vector<Parameter> parameters = MakeParameters({40, 40});
      for (size_t p = 0; p < 2 && !given; ++p) parameters[p].grad = {own[p].data(), 40, DType::kFloat32, {}};
      const Model model = Make(rank, parameters, options);
      for (int epoch = 0; epoch < 2; ++epoch) {
        DistributedDataParallel::Join join(*model);
        for (int step = 0; step < (epoch == 1 || rank.rank() == 0 ? 3 : 0); ++step) {
          std::fill(own[0].begin(), own[0].end(), -77.0f);
          for (const size_t p : {size_t{1}, size_t{0}}) {
            if (p == 0 && rank.rank() != 0) continue;
            if (given) RANK_CHECK_OK(model->SetGrad(p, {own[p].data(), 40, DType::kFloat32, {}}));
            WriteGradient(rank, *model, p, step);
            model->GradReady(p);
          }
          RANK_CHECK_OK(model->FinishBackward());
          if (epoch == 0) continue;
          CheckGradient(rank, *model, 0, [&](size_t p, size_t i) { return Gradient(0, p, i, step) / rank.size(); });
          CheckGradient(rank, *model, 1, [&](size_t p, size_t i) { return Average(rank.size(), p, i, step); });
        }
        RANK_CHECK_OK(join.Finish());
      }
    }
  });
}

// In the first Join only rank 0 takes steps, without layer0, which the others use in theirs.
TEST_CASE("a static graph knows what a rank uses whose first step comes late") {
  RunOnRanks([](Rank& rank) {
    DdpOptions options;
    options.static_graph = true;
    const Model model = Make(rank, MakeParameters({40, 40, 40}), options);
    const auto uses = [](int r, size_t p) { return p == 1 || (p == 0 && r != 0); };  // nobody uses layer2
    const auto announce = [&](int step) {
      for (size_t p = model->size(); p-- > 0;) {
        if (uses(rank.rank(), p)) Announce(rank, *model, {p}, step);
      }
    };
    for (int epoch = 0; epoch < 3; ++epoch) {
      for (const size_t p : {size_t{0}, size_t{2}}) Fill(model->grad(p), 77);
      DistributedDataParallel::Join join(*model);
      for (int step = 0; step < (epoch > 0 || rank.rank() == 0 ? 3 : 0); ++step) {
        announce(step);
        RANK_CHECK_OK(model->FinishBackward());
        if (epoch == 0) continue;
        for (size_t p = 0; p < 2 && rank.size() > 1; ++p) {
          CheckGradient(rank, *model, p, [&](size_t, size_t i) {
            double sum = 0;
            for (int r = 0; r < rank.size(); ++r) sum += uses(r, p) ? Gradient(r, p, i, step) : 0;
            return sum / rank.size();
          });
        }
      }
      RANK_CHECK_OK(join.Finish());
      if (epoch == 0 && rank.rank() != 0) continue;  // was through all the time
      CheckGradient(rank, *model, 2, [](size_t, size_t) { return 77; });
      if (epoch == 0) CheckGradient(rank, *model, 0, [](size_t, size_t) { return 77; });
    }
    // From then on a step that differs is an error.
    rank.Meet();
    Announce(rank, *model, {1, 2}, 0);
    const absl::Status status = model->FinishBackward();
    RANK_CHECK(absl::StrContains(status.message(), "'layer2.weight' was announced, but"), status.ToString());
  });
}

TEST_CASE("a gradient announced without SetGrad in its step is named") {
  RunOnRanks([](Rank& rank) {
    DdpOptions options;
    options.copy_gradients = true;
    const Model model = Make(rank, MakeParameters({100}), options);
    Framework framework(*model);
    framework.Backward(rank, 0, [](size_t) { return true; });
    RANK_CHECK_OK(model->FinishBackward());
    rank.Meet();
    model->GradReady(0);
    const absl::Status status = model->FinishBackward();
    RANK_CHECK(absl::StrContains(status.message(), "'layer0.weight'") &&
                   absl::StrContains(status.message(), "call SetGrad first, in every step"),
               status.ToString());
  });
}

}  // namespace
}  // namespace ddp::testing
