// SPDX-License-Identifier: Apache-2.0
// Contexts on simulated GPUs whose backend is left to the library, or named: with a libnccl.so that has a simulated one
// behind it, and helpers that do as they are told.
#include <atomic>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "ddp/context.h"
#include "tests/support/auto_world.h"

namespace ddp::testing::simulated {
namespace {

TEST_CASE("auto checks NCCL at the first start, and when it is told to") {
  World world(2);
  const BackendChoice first = world.Choice();
  CHECK(first.backend == "nccl");
  CHECK_FALSE(first.from_cache);
  CHECK(absl::StrContains(first.text, "backend nccl: NCCL works"));
  CHECK(world.Helpers() == 2);
  CHECK(world.Choice().from_cache);
  CHECK(world.Helpers() == 2);
  CHECK_FALSE(world.Choice([](ContextOptions& options) { options.fresh_probe = true; }).from_cache);
  CHECK(world.Helpers() == 4);
  {
    const Variable variable("DDP_FRESH_PROBE", "1");
    CHECK_FALSE(world.Choice().from_cache);
    CHECK(world.Choice([](ContextOptions& options) { options.fresh_probe = false; }).from_cache);
  }
  CHECK(world.Helpers() == 6);
}

TEST_CASE("no GPU is used before the helpers have been started") {
  World world(2);
  std::atomic<int> uses = 0, early = 0;
  world.gpus().first_use = [&](int) {
    ++uses;
    if (world.Helpers() < 2) ++early;
  };
  CHECK(world.Choice().backend == "nccl");
  CHECK(uses == 2);
  CHECK(early == 0);
}

TEST_CASE("a backend that is named is used without a check") {
  World world(2);
  FakeHelpers::Tell("error", "error");
  for (const char* const backend : {"nccl", "hierarchical"}) {
    const Variable variable("DDP_BACKEND", backend);
    const BackendChoice choice = world.Choice();
    CHECK(choice.backend == backend);
    CHECK(choice.text == "");
  }
  CHECK(world.Choice([](ContextOptions& options) { options.backend = "nccl"; }).backend == "nccl");
  CHECK(world.Helpers() == 0);
}

TEST_CASE("without a good NCCL library auto takes the hierarchical backend") {
  struct Case {
    std::string library;
    const char* words;
  };
  for (const Case& c :
       {Case{"/no/such/libnccl.so", "NCCL cannot be loaded"}, Case{DDP_OTHER_LIBRARY, "is no NCCL library"}}) {
    World world(2);
    const Variable variable("DDP_NCCL_LIBRARY", c.library);
    const BackendChoice choice = world.Choice();
    INFO(choice.text);
    CHECK(choice.backend == "hierarchical");
    CHECK(choice.failed_step == "loading NCCL");
    CHECK(absl::StrContains(choice.failure, c.words));
    CHECK(world.Helpers() == 0);
  }
}

TEST_CASE("smaller groups use the backend that was chosen for the world") {
  for (const char* const told : {"pass", "error"}) {
    World world(3);
    FakeHelpers::Tell(told, told);
    Logged log;
    const auto body = [&](Context& context) {
      const std::string backend = told == std::string("pass") ? "nccl" : "hierarchical";
      RANK_CHECK_EQ(context.world().backend(), backend);
      if (context.rank() == 1) return;
      const auto two = RANK_VALUE(context.NewGroup({0, 2}, absl::Now() + absl::Seconds(60)));
      RANK_CHECK_EQ(two->backend(), backend);
      RANK_CHECK_EQ(RANK_VALUE(context.NewGroup({context.rank()}, absl::Now() + absl::Seconds(60)))->backend(),
                    "local");
    };
    for (const absl::Status& status : world.Create(body)) CHECK(status == absl::OkStatus());
    CHECK(world.Helpers() == (told == std::string("pass") ? 3 : 6));
  }
}

TEST_CASE("ranks that do not agree on the backend or the kind of device learn of it") {
  const auto check = [](const std::function<void(ContextOptions&)>& change, const char* part) {
    World world(2);
    for (const absl::Status& status : world.Create([](Context&) {}, change)) {
      CheckStatus(__FILE__, __LINE__, "Create", status, absl::StatusCode::kFailedPrecondition, {part});
      CHECK(FailedRanks(status) == std::vector<int>{0, 1});
    }
  };
  check(
      [](ContextOptions& options) {
        if (options.rank == 1) options.backend = "nccl";
      },
      "rank 0 has chosen the backend auto and rank 1 nccl; all ranks need the same");
  check(
      [](ContextOptions& options) {
        if (options.rank == 1) options.device = Device{};
      },
      "rank 0 has chosen a GPU and rank 1 the CPU; give all ranks a ContextOptions::device of the same kind");
}

TEST_CASE("where there is nothing to choose the choice is the backend alone") {
  ContextOptions options;
  options.rank = 0;
  options.world_size = 1;
  options.store = CreateMemoryStore();
  const auto alone = RANK_VALUE(Context::Create(options));
  CHECK(alone->backend_choice().backend == "local");
  CHECK(alone->backend_choice().text == "");
}

}  // namespace
}  // namespace ddp::testing::simulated
