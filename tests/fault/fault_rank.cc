// SPDX-License-Identifier: Apache-2.0
// One rank of a fault test: works with the others, and at a given moment comes to a given end, if it is the victim.
// Prints a line "code: message" with the first error that it gets, or "done".
#include <sys/wait.h>

#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "tests/fault/flags.h"

namespace {

bool in_child = false;

}  // namespace

// A child by fork owns what it leaves to its parent, so LeakSanitizer asks here whether it should look.
extern "C" int __lsan_is_turned_off() { return in_child ? 1 : 0; }  // NOLINT(bugprone-reserved-identifier)

namespace ddp::testing {
namespace {

constexpr int kRounds = 8;

// One collective operation on the kind of memory that the test asks for.
class Operations {
 public:
  Operations(ProcessGroup& group, const std::string& buffers, size_t count) : group_(group), count_(count) {
    if (buffers == "ordinary") ordinary_.resize(count);
  }
  absl::Status Prepare() {
    if (!ordinary_.empty()) return absl::OkStatus();
    absl::StatusOr<Allocation> memory = group_.Allocate(count_ * 4, Device{});
    if (memory.ok()) allocation_ = *memory;
    return memory.status();
  }
  Work Start() {
    const Buffer buffer = ordinary_.empty() ? allocation_.View(DType::kFloat32, 0, count_)
                                            : Buffer{ordinary_.data(), count_, DType::kFloat32, {}};
    return group_.AllReduce(buffer, buffer);
  }
  absl::Status Run() {
    Work work = Start();
    return work.Wait();
  }

 private:
  ProcessGroup& group_;
  const size_t count_;
  std::vector<float> ordinary_;
  Allocation allocation_;
};

// Rounds of all-reduces. The victim ends before the last one, in the middle of one, or after it.
absl::Status Reduce(ProcessGroup& group, const Flags& flags, bool victim) {
  const std::string when = flags.Text("when"), how = flags.Text("how");
  Operations operations(group, flags.Text("buffers"), static_cast<size_t>(flags.Number("count", 1)));
  if (victim && when == "allocate") EndBy(how);
  if (absl::Status s = operations.Prepare(); !s.ok()) return s;
  for (int round = 0; round < kRounds; ++round) {
    if (absl::Status s = operations.Run(); !s.ok()) return s;
  }
  if (when == "never") return absl::OkStatus();
  if (victim && when == "before") EndBy(how);
  if (victim && when == "while") {
    std::thread([how] {
      absl::SleepFor(absl::Milliseconds(5));
      EndBy(how);
    }).detach();
  }
  if (victim && when == "pending") {
    Work work = operations.Start();
    EndBy(how);
  }
  // Longer than any test: what ends this is the error.
  for (const absl::Time until = absl::Now() + absl::Minutes(2); absl::Now() < until;) {
    if (absl::Status s = operations.Run(); !s.ok()) return s;
    if (victim && when == "after") EndBy(how);
  }
  return absl::OkStatus();
}

// Steps of DistributedDataParallel; the victim ends in the middle of a backward pass.
absl::Status Train(ProcessGroup& group, const Flags& flags, bool victim) {
  std::vector<Parameter> parameters;
  for (int i = 0; i < 6; ++i) {
    parameters.push_back({absl::StrCat("p", i), {}, Buffer{nullptr, 50'000, DType::kFloat32, {}}, {}});
  }
  DdpOptions options;
  options.bucket_bytes = 200'000;
  auto model = DistributedDataParallel::Create(group, parameters, options);
  if (!model.ok()) return model.status();
  for (int step = 0; step < 100'000; ++step) {
    for (size_t p = parameters.size(); p-- > 0;) {
      (*model)->GradReady(p);
      if (victim && step == 5 && p == 3) EndBy(flags.Text("how"));
    }
    if (absl::Status s = (*model)->FinishBackward(); !s.ok()) return s;
  }
  return absl::OkStatus();
}

// A child by fork destroys what it has of its parent's and exits, in the middle of the parent's work. It never has the
// last word: that it ended well is for the parent to check.
absl::Status Fork(std::unique_ptr<Context>* context, bool victim) {
  ProcessGroup& world = (*context)->world();
  absl::StatusOr<std::unique_ptr<ProcessGroup>> part = world.Split(0, world.rank());
  if (!part.ok()) return part.status();
  std::vector<Parameter> parameters = {{"p", {}, Buffer{nullptr, 1000, DType::kFloat32, {}}, {}},
                                       {"q", {}, Buffer{nullptr, 1000, DType::kFloat32, {}}, {}}};
  auto model = DistributedDataParallel::Create(world, parameters);
  if (!model.ok()) return model.status();
  std::vector<float> data(100'000);
  const Buffer buffer{data.data(), data.size(), DType::kFloat32, {}};
  Work pending = (*part)->AllReduce(buffer, buffer);
  (*model)->GradReady(1);
  if (victim) {
    if (const pid_t child = fork(); child == 0) {
      in_child = true;
      model->reset();
      part->reset();
      context->reset();
      std::exit(0);
    } else {
      int how = 0;
      if (waitpid(child, &how, 0) != child || how != 0) return absl::InternalError("the child did not end well");
    }
  }
  (*model)->GradReady(0);
  if (absl::Status s = (*model)->FinishBackward(); !s.ok()) return s;
  if (absl::Status s = pending.Wait(); !s.ok()) return s;
  for (ProcessGroup* group : {&world, part->get()}) {
    Work work = group->AllReduce(buffer, buffer);
    if (absl::Status s = work.Wait(); !s.ok()) return s;
  }
  return absl::OkStatus();
}

absl::Status Run(const Flags& flags) {
  const int rank = flags.Number("rank");
  absl::StatusOr<std::shared_ptr<Store>> store = OpenStore(flags);
  if (!store.ok()) return store.status();
  absl::StatusOr<std::unique_ptr<Context>> context = Join(flags, *store);
  if (!context.ok()) return context.status();
  if (absl::Status s = ShortenTimeout(flags, (*context)->world()); !s.ok()) return s;
  const bool victim = rank == flags.Number("victim", -1);
  if (flags.Text("when") == "fork") return Fork(&*context, victim);
  const absl::Status status = flags.Text("when") == "backward" ? Train((*context)->world(), flags, victim)
                                                               : Reduce((*context)->world(), flags, victim);
  if (flags.Text("leave") == "undestroyed") {
    // Ends when all have their results, without a word to the group.
    const absl::Time deadline = absl::Now() + absl::Seconds(30);
    absl::StatusOr<int64_t> finished = (*store)->Add("finished", 1, deadline);
    while (finished.ok() && *finished < flags.Number("size")) finished = (*store)->Add("finished", 0, deadline);
    if (!finished.ok()) return finished.status();
    static_cast<void>(context->release());
  }
  return status;
}

}  // namespace
}  // namespace ddp::testing

int main(int argc, char** argv) {
  const ddp::testing::Flags flags(argc, argv);
  ddp::testing::DumpNoCore();
  const absl::Status status = ddp::testing::Run(flags);
  ddp::testing::Report(status);
  return status.ok() ? 0 : 1;
}
