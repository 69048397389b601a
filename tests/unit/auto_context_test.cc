// Contexts on simulated GPUs whose backend is left to the library, or named: with a libnccl.so that has a simulated one
// behind it, and helpers that do as they are told.
#include <dlfcn.h>

#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "ddp/context.h"
#include "tests/support/fake_probe.h"
#include "tests/support/faulty_nccl.h"
#include "tests/support/logged.h"
#include "tests/support/nccl_job.h"
#include "tests/support/temporary_folder.h"

namespace ddp::testing::simulated {
namespace {

// Sets a variable while it lives.
class Variable {
 public:
  Variable(const char* name, const std::string& value) : name_(name) { setenv(name, value.c_str(), 1); }
  ~Variable() { unsetenv(name_); }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;

 private:
  const char* const name_;
};

// Contexts of ranks that are threads.
class World {
 public:
  explicit World(int size) : job_(size), devices_(job_.gpus) {
    void* const library = dlopen(DDP_FAULTY_NCCL, RTLD_NOW | RTLD_LOCAL);
    REQUIRE(library != nullptr);
    static_cast<nccl::Behind*>(dlsym(library, "faulty_nccl_behind"))->api = job_.nccl.api();
  }

  using Body = std::function<void(Context&)>;
  // What Create says on every rank; `body` runs where it has worked.
  std::vector<absl::Status> Create(
      const Body& body, const std::function<void(ContextOptions&)>& change = [](ContextOptions&) {}) {
    const std::shared_ptr<Store> store = CreateMemoryStore();
    std::vector<absl::Status> statuses(static_cast<size_t>(job_.size));
    std::vector<std::string> failures(statuses.size());
    std::vector<std::thread> threads;
    for (int r = 0; r < job_.size; ++r) {
      threads.emplace_back([&, r] {
        ContextOptions options;
        options.rank = r;
        options.world_size = job_.size;
        options.store = store;
        options.device = {Device::Kind::kCuda, static_cast<int16_t>(r)};
        options.timeout = absl::Seconds(60);
        change(options);
        const absl::StatusOr<std::unique_ptr<Context>> context = Context::Create(options);
        statuses[static_cast<size_t>(r)] = context.status();
        try {
          if (context.ok()) body(**context);
        } catch (const std::exception& e) {
          failures[static_cast<size_t>(r)] = e.what();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const std::string& failure : failures) CHECK(failure == "");
    for (const std::string& complaint : job_.gpus.complaints()) CHECK(complaint == "");
    return statuses;
  }
  // The same choice on all ranks.
  BackendChoice Choice(const std::function<void(ContextOptions&)>& change = [](ContextOptions&) {}) {
    Logged log;
    std::vector<BackendChoice> choices(static_cast<size_t>(job_.size));
    const auto body = [&](Context& context) {
      choices[static_cast<size_t>(context.rank())] = context.backend_choice();
      RANK_CHECK_EQ(context.backend_choice().backend, context.world().backend());
      RANK_CHECK_EQ(context.world().device().index, context.rank());
      RANK_CHECK_OK(context.world().Barrier().Wait());
    };
    for (const absl::Status& status : Create(body, change)) CHECK(status == absl::OkStatus());
    for (const BackendChoice& choice : choices) CHECK(choice.text == choices[0].text);
    return choices[0];
  }
  int Helpers() const { return helpers_.Count(); }

 private:
  Job job_;
  const ScopedDevices devices_;
  FakeHelpers helpers_;
  TemporaryFolder folder_;
  const Variable library_{"DDP_NCCL_LIBRARY", DDP_FAULTY_NCCL};
  const Variable helper_{"DDP_PROBE", DDP_FAKE_PROBE};
  const Variable cache_{"DDP_PROBE_CACHE", folder_.path()};
};

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

TEST_CASE("ranks that do not agree on the backend learn of it") {
  World world(2);
  for (const absl::Status& status : world.Create([](Context&) {},
                                                 [](ContextOptions& options) {
                                                   if (options.rank == 1) options.backend = "nccl";
                                                 })) {
    CheckStatus(__FILE__, __LINE__, "Create", status, absl::StatusCode::kFailedPrecondition,
                {"chose backend", "rank 0 and rank 1 differ"});
  }
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
