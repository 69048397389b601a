// SPDX-License-Identifier: Apache-2.0
// DistributedDataParallel: misuse, and ranks whose models differ. Nothing may hang, and every rank hears of it.
#include <cmath>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ddp/distributed_data_parallel.h"
#include "tests/support/catch.h"
#include "tests/support/ddp_model.h"
#include "tests/support/logged.h"

namespace ddp::testing {
namespace {

using absl::StatusCode;

std::vector<Parameter> ThreeLayers() {
  std::vector<Parameter> parameters;
  for (const char* name : {"conv.weight", "conv.bias", "head.weight"}) {
    parameters.push_back({name, {20, 50}, Buffer{nullptr, 1000, DType::kFloat32, {}}, {}});
  }
  return parameters;
}

Model MakeModel(Rank& rank) {
  DdpOptions options;
  options.bucket_bytes = 4000;  // one bucket each
  return RANK_VALUE(DistributedDataParallel::Create(rank.group(), ThreeLayers(), options));
}

// The last rank does something wrong in a step that the others do right: it is told what, and they why nothing comes.
void CheckMisuse(const std::function<void(DistributedDataParallel&)>& wrong, const std::vector<std::string>& parts) {
  RunOnRanks([&](Rank& rank) {
    const Model model = MakeModel(rank);
    const auto announce_all = [&] {
      for (const size_t p : {size_t{2}, size_t{1}, size_t{0}}) model->GradReady(p);
    };
    announce_all();
    RANK_CHECK_OK(model->FinishBackward());
    rank.Meet();  // an abort would also end what others have not seen done
    const bool culprit = rank.rank() == rank.size() - 1;
    if (culprit) {
      wrong(*model);
    } else {
      announce_all();
    }
    const absl::Status status = model->FinishBackward();
    const std::string name = absl::StrCat("rank ", rank.size() - 1);
    for (const std::string& part : parts) {
      RANK_CHECK_STATUS(status, culprit ? StatusCode::kFailedPrecondition : StatusCode::kAborted, part, name);
    }
    // The group has failed: the next step says so too.
    announce_all();
    RANK_CHECK_STATUS(model->FinishBackward(), StatusCode::kAborted, parts[0], name);
  });
}

TEST_CASE("a parameter without a gradient is named on every rank") {
  CheckMisuse(
      [](DistributedDataParallel& model) {
        model.GradReady(2);
        model.GradReady(0);
      },
      // Steps count from 1.
      {"conv.bias", "step 2 ended without a gradient", "kDetect, which leaves a gradient as it is"});
}

TEST_CASE("a step without any gradient names them all") {
  CheckMisuse([](DistributedDataParallel&) {},
              {"conv.weight", "conv.bias", "head.weight", "was FinishBackward called twice?"});
}

TEST_CASE("a gradient announced twice is named on every rank") {
  CheckMisuse(
      [](DistributedDataParallel& model) {
        model.GradReady(2);
        model.GradReady(2);
        model.GradReady(1);
        model.GradReady(0);
      },
      {"head.weight", "twice", "call FinishBackward after every backward pass"});
}

TEST_CASE("an index out of range is told on every rank") {
  CheckMisuse(
      [](DistributedDataParallel& model) {
        model.GradReady(2);
        model.GradReady(3);
        model.GradReady(1);
        model.GradReady(0);
      },
      {"GradReady(3)", "3 parameters"});
}

TEST_CASE("the same parameter unused on all ranks is named too") {
  RunOnRanks([](Rank& rank) {
    const Model model = MakeModel(rank);
    rank.Meet();
    model->GradReady(2);
    model->GradReady(1);
    const absl::Status status = model->FinishBackward();
    RANK_CHECK(!status.ok());
    RANK_CHECK(absl::StrContains(status.message(), "conv.weight"), status.ToString());
  });
}

// The last rank's model differs from the others'.
void CheckDifference(const std::function<void(std::vector<Parameter>&, DdpOptions&)>& change,
                     const std::vector<std::string>& parts) {
  if (RankCount() == 1) return;
  RunOnRanks([&](Rank& rank) {
    std::vector<Parameter> parameters = ThreeLayers();
    DdpOptions options;
    if (rank.rank() == rank.size() - 1) change(parameters, options);
    const absl::Status status = DistributedDataParallel::Create(rank.group(), parameters, options).status();
    for (const std::string& part : parts) {
      RANK_CHECK_STATUS(status, StatusCode::kFailedPrecondition, part, "rank 0",
                        absl::StrCat("rank ", rank.size() - 1));
    }
    // Nothing was begun, so the group still works.
    RANK_CHECK_OK(rank.group().Barrier().Wait());
  });
}

TEST_CASE("different models are told by their first difference") {
  CheckDifference([](auto& p, auto&) { p[1].name = "conv.beta"; }, {"conv.bias", "conv.beta"});
  CheckDifference([](auto& p, auto&) { p[2].shape = {50, 20}; }, {"head.weight", "[20, 50]", "[50, 20]"});
  CheckDifference(
      [](auto& p, auto&) {
        p[2].shape.clear();
        p[2].value.count = 999;
      },
      {"head.weight", "999"});
  CheckDifference([](auto& p, auto&) { p[0].value.dtype = DType::kBFloat16; }, {"conv.weight", "float32", "bfloat16"});
  static float somewhere[1000];
  CheckDifference(
      [](auto& p, auto&) {
        p[1].grad = Buffer{somewhere, 1000, DType::kFloat32, {}};
      },
      {"conv.bias", "gradient"});
  CheckDifference([](auto& p, auto&) { std::swap(p[1], p[2]); }, {"conv.bias", "head.weight"});
  CheckDifference([](auto& p, auto&) { p.pop_back(); }, {"3", "2", "head.weight"});
  CheckDifference(
      [](auto& p, auto&) {
        p.push_back({"extra", {}, Buffer{nullptr, 5, DType::kFloat32, {}}, {}});
      },
      {"3", "4", "extra"});
  CheckDifference([](auto& p, auto&) { p[2].frozen = true; }, {"head.weight", "frozen"});
}

TEST_CASE("every option that differs is named with both values") {
  using Change = std::function<void(DdpOptions&)>;
  static uint32_t nonfinite = 0;
  static float running_mean[4] = {};
  const Buffer mean{running_mean, 4, DType::kFloat32, {}};
  const std::vector<std::pair<Change, std::vector<std::string>>> changes = {
      {[](auto& o) { o.bucket_bytes = 12'345; }, {"bucket_bytes=26214400", "bucket_bytes=12345"}},
      {[](auto& o) { o.bucket_bytes = DdpOptions::kAutoBucketBytes; }, {"bucket_bytes=auto"}},
      {[](auto& o) { o.first_bucket_bytes = 77; }, {"first_bucket_bytes=77"}},
      {[](auto& o) { o.piece_bytes = 4096; }, {"piece_bytes=4096"}},
      {[](auto& o) { o.replan = false; }, {"replan=0", "replan=1"}},
      {[](auto& o) { o.op = ReduceOp::kSum; }, {"op=sum", "op=avg"}},
      {[](auto& o) { o.weighted = true; }, {"weighted=1"}},
      {[](auto& o) { o.gradient_predivide_factor = 2; }, {"gradient_predivide_factor=2"}},
      {[](auto& o) { o.gradient_predivide_factor = std::nextafter(1.0, 2.0); },
       {"gradient_predivide_factor=1.0000000000000002", "gradient_predivide_factor=1"}},
      {[](auto& o) { o.reduce_in_float32 = true; }, {"reduce_in_float32=1"}},
      {[](auto& o) { o.nonfinite = &nonfinite; }, {"nonfinite=set", "nonfinite=unset"}},
      {[](auto& o) { o.unused = UnusedParameters::kDetect; }, {"unused=kDetect", "unused=kError"}},
      {[](auto& o) { o.static_graph = true; }, {"static_graph=1"}},
      {[](auto& o) { o.copy_gradients = true; }, {"copy_gradients=1"}},
      {[](auto& o) { o.broadcast_parameters = false; }, {"broadcast_parameters=0"}},
      {[](auto& o) { o.broadcast_buffers = false; }, {"broadcast_buffers=0"}},
      {[&](auto& o) {
         o.buffers = {{"bn.mean", mean}};
       },
       {"buffers", "bn.mean"}},
      {[](auto& o) { o.hook = CreateAllReduceHook(); }, {"hook=none", "hook=all_reduce"}},
      {[](auto& o) { o.hook = CreatePowerSgdHook({.rank = 3}); }, {"hook=power_sgd(rank=3"}},
      {[](auto& o) { o.hook = CreateCompressionHook(DType::kBFloat16); }, {"hook=compression(bfloat16)"}},
  };
  for (const auto& [change, parts] : changes) {
    CheckDifference([&change = change](auto&, auto& options) { change(options); }, parts);
  }
}

TEST_CASE("hooks whose options differ in the last digit are told apart") {
  RunOnRanks([](Rank& rank) {
    DdpOptions options;
    options.hook = CreatePowerSgdHook({.min_ratio = rank.rank() == 0 ? 2.0 : std::nextafter(2.0, 3.0)});
    const auto model = DistributedDataParallel::Create(rank.group(), ThreeLayers(), options);
    if (rank.size() == 1) return RANK_CHECK_OK(model.status());
    RANK_CHECK_STATUS(model.status(), StatusCode::kFailedPrecondition, "min_ratio=2,", "min_ratio=2.0000000000000004");
  });
}

TEST_CASE("a rank's own mistake at Create is told on every rank") {
  const auto check = [](const std::function<void(std::vector<Parameter>&, DdpOptions&)>& change,
                        const std::vector<std::string>& parts) {
    RunOnRanks([&](Rank& rank) {
      std::vector<Parameter> parameters = ThreeLayers();
      DdpOptions options;
      if (rank.rank() == rank.size() - 1) change(parameters, options);
      const absl::Status status = DistributedDataParallel::Create(rank.group(), parameters, options).status();
      for (const std::string& part : parts) {
        RANK_CHECK_STATUS(status, StatusCode::kInvalidArgument, part, absl::StrCat("rank ", rank.size() - 1));
      }
    });
  };
  static float somewhere[10], thousand[1000];
  check([](auto& p, auto&) { p.clear(); }, {"parameter"});
  check([](auto& p, auto&) { p[2].name = p[0].name; }, {"conv.weight"});
  check([](auto& p, auto&) { p[1].name = ""; }, {"name"});
  check([](auto& p, auto&) { p[1].shape = {7, 7}; }, {"conv.bias", "[7, 7]", "1000"});
  check([](auto& p, auto&) { p[1].value.dtype = DType::kInt32; }, {"conv.bias", "floating"});
  check([](auto& p, auto&) { p[1].value.device.kind = Device::Kind::kCuda; }, {"conv.bias"});
  check([](auto& p, auto&) { p[1].grad = Buffer{somewhere, 10, DType::kFloat32, {}}; }, {"conv.bias", "10", "1000"});
  check(
      [](auto& p, auto&) {
        p[1].grad = p[2].grad = Buffer{thousand, 1000, DType::kFloat32, {}};
      },
      {"conv.bias", "head.weight", "share memory"});
  check([](auto& p, auto&) { p[0].value.data = p[1].grad.data = thousand, p[1].grad.count = 1000; },
        {"conv.weight", "conv.bias", "share memory"});
  check([](auto&, auto& options) { options.op = ReduceOp::kMax; }, {"op"});
  check([](auto&, auto& options) { options.gradient_predivide_factor = 0; }, {"gradient_predivide_factor"});
  check([](auto&, auto& options) { options.buffers = {{"", {}}}; }, {"buffer"});
  check([](auto&, auto& options) { options.buffers = {{"a", {}}, {"a", {}}}; }, {"buffers", "'a'"});
  check([](auto&, auto& options) { options.buffers = {{"a", {nullptr, 3, DType::kInt64, {}}}}; }, {"'a'", "memory"});
  check([](auto&, auto& options) { options.bucket_bytes = 0; }, {"bucket_bytes"});
}

TEST_CASE("buffers that share memory with each other, or with a parameter, are refused, on every rank") {
  RunOnRanks([](Rank& rank) {
    float memory[2000] = {};
    const auto part = [&](size_t first, size_t count) { return Buffer{memory + first, count, DType::kFloat32, {}}; };
    std::vector<Parameter> parameters = ThreeLayers();
    parameters[1].value = part(0, 900);
    parameters[1].shape = {};
    parameters[1].grad = part(1000, 900);
    const auto create = [&](std::vector<ModelBuffer> buffers) {
      const DdpOptions options{
          .broadcast_parameters = false, .buffers = std::move(buffers), .broadcast_buffers = false};
      return DistributedDataParallel::Create(rank.group(), parameters, options).status();
    };
    const std::string last = absl::StrCat("rank ", rank.size() - 1);
    const auto refused = [&](std::vector<ModelBuffer> buffers, const std::string& one, const std::string& other) {
      if (rank.rank() != rank.size() - 1) buffers = {};
      RANK_CHECK_STATUS(create(std::move(buffers)), StatusCode::kInvalidArgument, last, one + " and " + other,
                        "share memory");
    };
    refused({{"mean", part(1900, 50)}, {"var", part(1949, 51)}}, "buffer 'mean'", "buffer 'var'");
    refused({{"mean", part(1900, 50)}, {"again", part(1900, 50)}}, "buffer 'mean'", "buffer 'again'");
    refused({{"mean", part(899, 2)}}, "the value of 'conv.bias'", "buffer 'mean'");
    refused({{"mean", part(1899, 2)}}, "the gradient of 'conv.bias'", "buffer 'mean'");
    RANK_CHECK_OK(create({{"none", part(900, 0)}, {"mean", part(900, 100)}, {"var", part(1900, 100)}}));
  });
}

TEST_CASE("a rank that aborts ends the others' step") {
  if (RankCount() == 1) return;
  RunOnRanks([](Rank& rank) {
    const Model model = MakeModel(rank);
    rank.Meet();
    if (rank.rank() == 1) {
      rank.group().Abort(absl::DataLossError("cannot read batch 17"));
    } else {
      for (const size_t p : {size_t{2}, size_t{1}, size_t{0}}) model->GradReady(p);
    }
    const absl::Status status = model->FinishBackward();
    RANK_CHECK(!status.ok());
    if (rank.rank() != 1) RANK_CHECK_STATUS(status, StatusCode::kAborted, "cannot read batch 17", "rank 1");
    RANK_CHECK_STATUS(rank.group().status(), StatusCode::kAborted, "cannot read batch 17", "rank 1");
  });
}

TEST_CASE("a step ends with the failure of another group that it needs, until the model goes on elsewhere") {
  RunOnRanks([](Rank& rank) {
    const auto whole = RANK_VALUE(rank.group().Split(0, rank.rank()));
    const auto reversed = RANK_VALUE(rank.group().Split(0, -rank.rank()));
    const auto next = RANK_VALUE(rank.group().Split(0, rank.rank()));
    const Model model = RANK_VALUE(DistributedDataParallel::Create(*whole, ThreeLayers()));
    model->Watch(*reversed);
    const auto step = [&] {
      for (const size_t p : {size_t{2}, size_t{1}, size_t{0}}) model->GradReady(p);
      return model->FinishBackward();
    };
    RANK_CHECK_OK(step());
    rank.Meet();
    if (rank.rank() == 0) reversed->Abort(absl::AbortedError("no statistics"));
    RANK_CHECK_STATUS(reversed->Barrier().Wait(), StatusCode::kAborted, "no statistics");
    RANK_CHECK_STATUS(step(), StatusCode::kAborted, "no statistics");
    RANK_CHECK_STATUS(whole->status(), StatusCode::kAborted, "no statistics");
    RANK_CHECK_OK(model->Rebind(*next));
    RANK_CHECK_OK(step());
    rank.Meet();
  });
}

TEST_CASE("a model destroyed before its step has launched a bucket ends the step on every rank, and says so") {
  if (RankCount() == 1) return;
  Logged logged;
  RunOnRanks([&](Rank& rank) {
    Model model = Make(rank, MakeParameters({100, 100}));
    rank.Meet();
    if (rank.rank() == 0) {
      model->GradReady(1);  // its bucket waits for the other gradient
      model.reset();
      RANK_CHECK_STATUS(rank.group().status(), StatusCode::kAborted, "destroyed in the middle of a step");
      RANK_CHECK_EQ(logged.Count({"rank 0", "destroyed in the middle of step 1", "call FinishBackward"}), 1);
      return;
    }
    Announce(rank, *model, {1, 0}, 0);
    RANK_CHECK_STATUS(model->FinishBackward(), StatusCode::kAborted, "rank 0", "destroyed in the middle of a step");
  });
}

TEST_CASE("a model destroyed between steps, or in one that is not reduced, leaves the group as it is") {
  RunOnRanks([](Rank& rank) {
    for (const bool local : {false, true}) {
      Model model = Make(rank, MakeParameters({100, 100}));
      CheckStep(rank, *model, {1, 0}, 0);
      if (local) {
        const DistributedDataParallel::NoSync no_sync(*model);
        model->GradReady(1);
      }
      model.reset();
      RANK_CHECK_OK(rank.group().Barrier().Wait());
    }
  });
}

TEST_CASE("a model destroyed in the middle of a step ends the job with a reason, and does not hang") {
  if (RankCount() == 1) return;
  RunOnRanks([](Rank& rank) {
    Model model = MakeModel(rank);
    rank.Meet();
    if (rank.rank() == 1) rank.Meet();  // so that rank 0's reduction stays pending
    if (rank.rank() != 1) {
      model->GradReady(2);
      model.reset();
      rank.Meet();
    }
    rank.Meet();
    RANK_CHECK_STATUS(rank.group().Barrier().Wait(), StatusCode::kAborted, "destroyed");
  });
}

TEST_CASE("a norm of gradients in the middle of a step is refused, and the step goes on") {
  RunOnRanks([](Rank& rank) {
    const Model model = Make(rank, MakeParameters({100, 30}));
    for (int step = 0; step < 3; ++step) {
      Announce(rank, *model, {1, 0}, step);
      for (const absl::Status& refused :
           {model->GradNorm().status(), model->ClipGradNorm(1).status(), model->ClipGradNormAsync(1).status()}) {
        RANK_CHECK_STATUS(refused, StatusCode::kFailedPrecondition, absl::StrCat("rank ", rank.rank()), "GradNorm",
                          "in the middle of a step");
      }
      RANK_CHECK_OK(model->FinishBackward());
      CheckGradients(rank, *model, [&](size_t p, size_t i) { return Average(rank.size(), p, i, step); });
    }
    const DistributedDataParallel::NoSync local(*model);  // its gradients are the program's own
    WriteGradient(rank, *model, 0, 0);
    model->GradReady(0);
    RANK_CHECK_OK(model->ClipGradNorm(1).status());
    RANK_CHECK_OK(model->FinishBackward());
    model->ZeroGrad();
  });
}

TEST_CASE("ZeroGrad in the middle of a step is told on every rank") {
  CheckMisuse(
      [](DistributedDataParallel& model) {
        model.GradReady(2);
        model.ZeroGrad();
        for (const size_t p : {size_t{1}, size_t{0}}) model.GradReady(p);
      },
      {"ZeroGrad in the middle of a step"});
}

TEST_CASE("BeginForward in the middle of a step is refused, and the step goes on") {
  RunOnRanks([](Rank& rank) {
    float mean = 7;
    DdpOptions options;
    options.buffers = {{"mean", {&mean, 1, DType::kFloat32, {}}, false}};
    for (const bool joins : {false, true}) {
      const Model model = Make(rank, MakeParameters({100, 30}), options);
      std::optional<DistributedDataParallel::Join> join;
      if (joins) join.emplace(*model);
      for (int step = 0; step < 3; ++step) {
        RANK_CHECK_OK(model->BeginForward());
        Announce(rank, *model, {1}, step);
        RANK_CHECK_STATUS(model->BeginForward(), StatusCode::kFailedPrecondition, absl::StrCat("rank ", rank.rank()),
                          "BeginForward in the middle of a step");
        CheckStep(rank, *model, {0}, step);
      }
      if (joins) RANK_CHECK_OK(join->Finish());
    }
  });
}

}  // namespace
}  // namespace ddp::testing
