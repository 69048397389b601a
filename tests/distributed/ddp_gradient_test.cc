// SPDX-License-Identifier: Apache-2.0
// DistributedDataParallel: where gradients live, and which of them there are.
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ddp/distributed_data_parallel.h"
#include "tests/support/catch.h"
#include "tests/support/ddp_model.h"
#include "tests/support/forwarding_group.h"

namespace ddp::testing {
namespace {

using absl::StatusCode;

// --- gradients of the caller's --------------------------------------------------------------------------------------

TEST_CASE("gradients may live elsewhere in every step") {
  RunOnRanks([](Rank& rank) {
    const std::vector<size_t> counts = {3000, 1, 50'000, 0, 200};
    DdpOptions options;
    options.bucket_bytes = 20'000;
    options.copy_gradients = true;
    const Model model = Make(rank, MakeParameters(counts), options);
    RANK_CHECK(model->grad_spans().empty());
    for (int step = 0; step < 5; ++step) {
      std::vector<std::vector<float>> fresh;
      for (const size_t n : counts) fresh.emplace_back(n);
      for (const size_t p : Backwards(counts.size())) {
        RANK_CHECK_OK(model->SetGrad(p, {fresh[p].data(), counts[p], DType::kFloat32, {}}));
        RANK_CHECK(model->grad(p).data == fresh[p].data());
        WriteGradient(rank, *model, p, step);
        model->GradReady(p);
      }
      RANK_CHECK_OK(model->FinishBackward());
      CheckGradients(rank, *model, [&](size_t p, size_t i) { return Average(rank.size(), p, i, step); });
    }
  });
}

TEST_CASE("a gradient elsewhere is not touched before the step is reduced") {
  RunOnRanks([](Rank& rank) {
    std::vector<float> own(1000);
    std::vector<Parameter> parameters = MakeParameters({1000, 10});
    parameters[0].grad = Buffer{own.data(), own.size(), DType::kFloat32, {}};
    const Model model = Make(rank, parameters);
    {
      const DistributedDataParallel::NoSync local(*model);
      for (const size_t p : {size_t{1}, size_t{0}}) {
        WriteGradient(rank, *model, p, 0);
        model->GradReady(p);
      }
      RANK_CHECK_OK(model->FinishBackward());
    }
    RANK_CHECK_EQ(static_cast<double>(own[7]), Gradient(rank.rank(), 0, 7, 0));
    for (const size_t p : {size_t{1}, size_t{0}}) {
      WriteGradient(rank, *model, p, 1, /*add=*/true);
      model->GradReady(p);
    }
    RANK_CHECK_OK(model->FinishBackward());
    CheckGradients(rank, *model,
                   [&](size_t p, size_t i) { return Average(rank.size(), p, i, 0) + Average(rank.size(), p, i, 1); });
  });
}

TEST_CASE("a buffer swapped for another is refused by name") {
  RunOnRanks([](Rank& rank) {
    DdpOptions options;
    options.copy_gradients = true;
    const Model model = Make(rank, MakeParameters({100, 200}), options);
    std::vector<float> memory(300);
    const Buffer right{memory.data(), 100, DType::kFloat32, {}};
    const std::string me = absl::StrCat("rank ", rank.rank());
    Buffer wrong = right;
    wrong.count = 200;
    RANK_CHECK_STATUS(model->SetGrad(0, wrong), StatusCode::kInvalidArgument, me, "layer0.weight", "100", "200");
    wrong = right;
    wrong.dtype = DType::kFloat64;
    RANK_CHECK_STATUS(model->SetGrad(0, wrong), StatusCode::kInvalidArgument, me, "layer0.weight", "float64");
    wrong = right;
    wrong.device.kind = Device::Kind::kCuda;
    RANK_CHECK_STATUS(model->SetGrad(0, wrong), StatusCode::kInvalidArgument, me, "layer0.weight", "on a GPU");
    wrong = right;
    wrong.data = nullptr;
    RANK_CHECK_STATUS(model->SetGrad(0, wrong), StatusCode::kInvalidArgument, me, "layer0.weight", "no memory");
    wrong = right;
    wrong.data = reinterpret_cast<char*>(memory.data()) + 2;
    RANK_CHECK_STATUS(model->SetGrad(0, wrong), StatusCode::kInvalidArgument, me, "layer0.weight", "multiple of 4");
    RANK_CHECK_STATUS(model->SetGrad(2, right), StatusCode::kInvalidArgument, me, "index 2");
    std::vector<Parameter> frozen = MakeParameters({100, 200});
    frozen[0].frozen = true;
    RANK_CHECK_OK(model->SetParameters(frozen));
    RANK_CHECK_STATUS(model->SetGrad(0, right), StatusCode::kFailedPrecondition, me, "layer0.weight", "is frozen");
    RANK_CHECK_OK(model->SetParameters(MakeParameters({100, 200})));
    const Model views = Make(rank, MakeParameters({100}));
    RANK_CHECK_STATUS(views->SetGrad(0, right), StatusCode::kFailedPrecondition, me, "layer0.weight", "copy_gradients");
    // The last: it ends the group. Both gradients in one memory.
    RANK_CHECK_OK(model->SetGrad(0, right));
    RANK_CHECK_OK(model->SetGrad(1, {memory.data() + 50, 200, DType::kFloat32, {}}));
    rank.Meet();
    model->GradReady(1);
    model->GradReady(0);
    const absl::Status status = model->FinishBackward();
    RANK_CHECK(!status.ok());
    for (const char* part : {"layer0.weight", "layer1.weight", "same memory"}) {
      RANK_CHECK(absl::StrContains(status.message(), part), status.ToString());
    }
  });
}

TEST_CASE("the memory of a gradient that was announced stays") {
  RunOnRanks([](Rank& rank) {
    DdpOptions options;
    options.copy_gradients = true;
    const Model model = Make(rank, MakeParameters({100, 200}), options);
    std::vector<float> memory(400, 1);
    const Buffer first{memory.data(), 100, DType::kFloat32, {}}, other{memory.data() + 300, 100, DType::kFloat32, {}};
    for (int step = 0; step < 2; ++step) {
      RANK_CHECK_OK(model->SetGrad(0, other));  // not announced yet: it may change its place
      RANK_CHECK_OK(model->SetGrad(0, first));
      RANK_CHECK_OK(model->SetGrad(1, {memory.data() + 100, 200, DType::kFloat32, {}}));
      model->GradReady(0);
      RANK_CHECK_OK(model->SetGrad(0, first));
      RANK_CHECK_STATUS(model->SetGrad(0, other), StatusCode::kFailedPrecondition, absl::StrCat("rank ", rank.rank()),
                        "layer0.weight", "before GradReady");
      model->GradReady(1);
      RANK_CHECK_OK(model->FinishBackward());
      RANK_CHECK_EQ(memory[0], 1.0f);
      RANK_CHECK_EQ(memory[300], 1.0f);
    }
  });
}

TEST_CASE("a gradient announced without memory is named") {
  RunOnRanks([](Rank& rank) {
    DdpOptions options;
    options.copy_gradients = true;
    const Model model = Make(rank, MakeParameters({100}), options);
    rank.Meet();
    model->GradReady(0);
    const absl::Status status = model->FinishBackward();
    RANK_CHECK(absl::StrContains(status.message(), "layer0.weight") && absl::StrContains(status.message(), "SetGrad"),
               status.ToString());
  });
}

// --- micro-batches --------------------------------------------------------------------------------------------------

TEST_CASE("a parameter used in an earlier micro-batch only is no unused one") {
  RunOnRanks([](Rank& rank) {
    for (const bool copied : {false, true}) {
      DdpOptions options;
      options.copy_gradients = copied;
      const Model model = Make(rank, MakeParameters({100, 200}), options);
      std::vector<float> memory(300);
      for (int round = 0; round < 3; ++round) {
        if (copied) {
          RANK_CHECK_OK(model->SetGrad(0, {memory.data(), 100, DType::kFloat32, {}}));
          RANK_CHECK_OK(model->SetGrad(1, {memory.data() + 100, 200, DType::kFloat32, {}}));
        }
        auto local = std::make_unique<DistributedDataParallel::NoSync>(*model);
        Announce(rank, *model, {1, 0}, round);
        RANK_CHECK_OK(model->FinishBackward());
        local.reset();
        model->GradReady(1);  // has nothing to add; parameter 0 took no part
        RANK_CHECK_OK(model->FinishBackward());
        CheckGradients(rank, *model, [&](size_t p, size_t i) { return Average(rank.size(), p, i, round); });
      }
    }
  });
}

// --- other groups ---------------------------------------------------------------------------------------------------

TEST_CASE("a model trains in a part of the world, beside another") {
  RunOnRanks([](Rank& rank) {
    const std::unique_ptr<ProcessGroup> group = RANK_VALUE(rank.group().Split(rank.rank() % 2, rank.rank()));
    const Model half = RANK_VALUE(DistributedDataParallel::Create(*group, MakeParameters({5000, 20})));
    const Model whole = Make(rank, MakeParameters({100}));
    for (int step = 0; step < 3; ++step) {
      Announce(rank, *half, {1, 0}, step);
      CheckStep(rank, *whole, {0}, step);
      RANK_CHECK_OK(half->FinishBackward());
      CheckGradients(rank, *half, [&](size_t p, size_t i) {
        double sum = 0;
        for (int r = rank.rank() % 2; r < rank.size(); r += 2) sum += Gradient(r, p, i, step);
        return sum / group->size();
      });
    }
  });
}

// Counts what it is told to be its memory.
class RegisteringGroup final : public ForwardingGroup {
 public:
  using ForwardingGroup::ForwardingGroup;
  absl::Status Register(const Allocation& memory) override {
    ++registered;
    return ForwardingGroup::Register(memory);
  }
  int registered = 0;
};

TEST_CASE("copied gradients and hooks go along into another group, where buckets are planned anew") {
  RunOnRanks([](Rank& rank) {
    const std::unique_ptr<ProcessGroup> split = RANK_VALUE(rank.group().Split(0, rank.rank()));
    RegisteringGroup group(*split);
    std::vector<float> own(300);
    std::vector<Parameter> parameters = MakeParameters({1000, 300, 0, 20});
    parameters[1].grad = {own.data(), own.size(), DType::kFloat32, {}};
    DdpOptions options;
    options.hook = CreateCompressionHook(DType::kFloat16);
    options.static_graph = true;
    const Model model = Make(rank, parameters, options);
    CheckStep(rank, *model, {0, 1, 2, 3}, 0);
    const void* const before = model->grad(0).data;
    RANK_CHECK_OK(model->Rebind(group));
    RANK_CHECK_EQ(group.registered, 2);  // gradients, and places of those that are copied: reduced where they lie
    RANK_CHECK(model->grad(0).data == before);
    for (int step = 1; step < 4; ++step) CheckStep(rank, *model, {0, 1, 2, 3}, step);
    RANK_CHECK_EQ(model->statistics().plans, int64_t{4});  // and both times by the order that the first step shows
  });
}

// --- buffers --------------------------------------------------------------------------------------------------------

TEST_CASE("buffers are rank 0's at the beginning of every forward pass that follows a reduction") {
  RunOnRanks([](Rank& rank) {
    for (const bool broadcast : {true, false}) {
      float mean[3] = {};
      int64_t batches = 100 + rank.rank();
      uint8_t flags[5] = {};
      DdpOptions options;
      options.broadcast_buffers = broadcast;
      options.buffers = {{"bn.mean", {mean, 3, DType::kFloat32, {}}},
                         {"bn.batches", {&batches, 1, DType::kInt64, {}}},
                         {"bn.empty", {nullptr, 0, DType::kFloat16, {}}},
                         {"flags", {flags, 5, DType::kUInt8, {}}}};
      const Model model = Make(rank, MakeParameters({100}), options);
      RANK_CHECK_EQ(batches, int64_t{100});  // at Create in any case
      for (int step = 0; step < 4; ++step) {
        const bool accumulating = step == 2;  // after a backward that was not reduced
        mean[1] = static_cast<float>(rank.rank() + step);
        batches = 1000 * step + rank.rank();
        flags[4] = static_cast<uint8_t>(rank.rank());
        RANK_CHECK_OK(model->BeginForward());
        const int from = broadcast && !accumulating ? 0 : rank.rank();
        RANK_CHECK_EQ(mean[1], static_cast<float>(from + step));
        RANK_CHECK_EQ(batches, int64_t{1000 * step + from});
        RANK_CHECK_EQ(int{flags[4]}, from);
        std::optional<DistributedDataParallel::NoSync> local;
        if (step == 1) local.emplace(*model);
        Announce(rank, *model, {0}, step);
        RANK_CHECK_OK(model->FinishBackward());
      }
    }
  });
}

TEST_CASE("BeginForward copies rank 0's buffers each time it is called, also within a Join") {
  RunOnRanks([](Rank& rank) {
    float mean = 0;
    DdpOptions options;
    options.buffers = {{"bn.mean", {&mean, 1, DType::kFloat32, {}}}};
    const Model model = Make(rank, MakeParameters({100}), options);
    const auto begin_twice = [&](int root) {
      for (const float base : {10.0f, 20.0f}) {
        mean = base + static_cast<float>(rank.rank());
        RANK_CHECK_OK(model->BeginForward());
        RANK_CHECK_EQ(mean, base + static_cast<float>(root));
      }
    };
    for (int step = 0; step < 2; ++step) {
      begin_twice(0);
      CheckStep(rank, *model, {0}, step);
    }
    // Rank r has r + 1 steps: in the last ones the lowest rank that has inputs is the root.
    DistributedDataParallel::Join join(*model);
    for (int step = 0; step < 1 + rank.rank(); ++step) {
      begin_twice(step);
      Announce(rank, *model, {0}, step);
      RANK_CHECK_OK(model->FinishBackward());
    }
    RANK_CHECK_OK(join.Finish());
    RANK_CHECK_EQ(mean, 20.0f + static_cast<float>(rank.size() - 1));
  });
}

}  // namespace
}  // namespace ddp::testing
