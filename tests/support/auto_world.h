// SPDX-License-Identifier: Apache-2.0
// Contexts on simulated GPUs, of ranks that are threads: with a libnccl.so that has a simulated one behind it, and
// helpers that do as they are told.
#ifndef TESTS_SUPPORT_AUTO_WORLD_H_
#define TESTS_SUPPORT_AUTO_WORLD_H_

#include <dlfcn.h>

#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "ddp/context.h"
#include "tests/support/fake_probe.h"
#include "tests/support/faulty_nccl.h"
#include "tests/support/logged.h"
#include "tests/support/nccl_job.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/variable.h"

namespace ddp::testing::simulated {

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
  FakeNccl& nccl() { return job_.nccl; }
  FakeDevices& gpus() { return job_.gpus; }

 private:
  Job job_;
  const ScopedDevices devices_;
  FakeHelpers helpers_;
  TemporaryFolder folder_;
  const Variable library_{"DDP_NCCL_LIBRARY", DDP_FAULTY_NCCL};
  const Variable helper_{"DDP_PROBE", DDP_FAKE_PROBE};
  const Variable cache_{"DDP_PROBE_CACHE", folder_.path()};
};

}  // namespace ddp::testing::simulated

#endif  // TESTS_SUPPORT_AUTO_WORLD_H_
