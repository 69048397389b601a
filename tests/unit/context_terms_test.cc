// SPDX-License-Identifier: Apache-2.0
// A rank that cannot take part in a Context: all learn of it at once.
#include "libddp/comm/context_terms.h"

#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "ddp/context.h"
#include "ddp/process_group.h"
#include "tests/support/catch.h"

namespace ddp {
namespace {

constexpr int kRanks = 3;

ContextOptions OptionsOf(int rank, std::shared_ptr<Store> store) {
  ContextOptions options;
  options.rank = rank;
  options.world_size = kRanks;
  options.store = std::move(store);
  return options;
}

// What Create says on each rank. It has minutes: who waits for it fails the test by ctest's time-out.
std::vector<absl::Status> CreateAll(const std::function<void(ContextOptions&)>& change) {
  const std::shared_ptr<Store> store = CreateMemoryStore();
  std::vector<absl::Status> outcomes(kRanks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      ContextOptions options = OptionsOf(rank, store);
      change(options);
      outcomes[static_cast<size_t>(rank)] = Context::Create(options).status();
    });
  }
  for (std::thread& thread : threads) thread.join();
  return outcomes;
}

void CheckRefused(const std::vector<absl::Status>& outcomes, int refused, const std::string& why) {
  const std::string own = absl::StrCat("rank ", refused, ": ", why);
  for (int rank = 0; rank < kRanks; ++rank) {
    const absl::Status& outcome = outcomes[static_cast<size_t>(rank)];
    INFO(outcome.ToString());
    if (rank == refused) {
      CHECK(outcome.code() == absl::StatusCode::kInvalidArgument);
      CHECK(absl::StartsWith(outcome.message(), own));
      continue;
    }
    CHECK(outcome.code() == absl::StatusCode::kFailedPrecondition);
    CHECK(absl::StartsWith(outcome.message(), absl::StrCat("rank ", rank, ": the Context cannot begin: ", own)));
    CHECK(FailedRanks(outcome) == std::vector<int>{refused});
  }
}

TEST_CASE("a rank whose options are wrong is named by all the others, which do not wait for it") {
  for (int refused = 0; refused < kRanks; ++refused) {
    CheckRefused(CreateAll([&](ContextOptions& options) {
                   if (options.rank == refused) options.backend = "hierarchic";
                 }),
                 refused, "the backend (DDP_BACKEND) must be auto, nccl, hierarchical or local, not 'hierarchic'");
    CheckRefused(CreateAll([&](ContextOptions& options) {
                   if (options.rank == refused) options.timeout = absl::ZeroDuration();
                 }),
                 refused, "the time-out (DDP_TIMEOUT) must be above 0 s, not 0");
  }
}

TEST_CASE("where all ranks are wrong each one says so itself") {
  const std::vector<absl::Status> outcomes =
      CreateAll([](ContextOptions& options) { options.stall_warning = absl::Seconds(-1); });
  for (int rank = 0; rank < kRanks; ++rank) {
    const absl::Status& outcome = outcomes[static_cast<size_t>(rank)];
    INFO(outcome.ToString());
    CHECK(outcome.code() == absl::StatusCode::kInvalidArgument);
    CHECK(absl::StartsWith(outcome.message(), absl::StrCat("rank ", rank, ": the stall warning (DDP_STALL_WARNING)")));
  }
}

TEST_CASE("a variable that cannot be understood is such a reason") {
  for (const auto& [name, value] : {std::pair{"DDP_NODE_SIZE", "0"}, {"DDP_SHARED_MEMORY", "none"}}) {
    setenv(name, value, 1);
    const std::vector<absl::Status> outcomes = CreateAll([](ContextOptions&) {});
    unsetenv(name);
    for (const absl::Status& outcome : outcomes) {
      INFO(outcome.ToString());
      CHECK(outcome.code() == absl::StatusCode::kInvalidArgument);
      CHECK(absl::StrContains(outcome.message(), absl::StrCat(": ", name, " is '", value, "'")));
    }
  }
}

TEST_CASE("a rank that nobody has come to meet says what is wrong with it") {
  ContextOptions options = OptionsOf(1, CreateMemoryStore());
  options.timeout = absl::Milliseconds(50);
  options.backend = "none";
  const absl::Status status = Context::Create(options).status();
  CHECK(status.code() == absl::StatusCode::kInvalidArgument);
  CHECK(absl::StrContains(status.message(), "rank 1: the backend (DDP_BACKEND)"));
}

// Another version's.
class OddRendezvous final : public Rendezvous {
 public:
  int rank() const override { return 0; }
  int size() const override { return 2; }
  absl::StatusOr<std::vector<std::string>> AllGather(absl::string_view mine, absl::string_view, absl::Time) override {
    return std::vector<std::string>{std::string(mine), "backend auto on GPUs"};
  }
  absl::StatusOr<std::unique_ptr<Wire>> OpenWire() override { return absl::UnimplementedError("none"); }
};

TEST_CASE("terms that cannot be understood are those of another program") {
  OddRendezvous rendezvous;
  const absl::Status status = AgreeOnTerms(rendezvous, {}, absl::InfiniteFuture()).status();
  CHECK(status.code() == absl::StatusCode::kInternal);
  CHECK(absl::StrContains(status.message(), "do all ranks run the same program?"));
}

}  // namespace
}  // namespace ddp
