// SPDX-License-Identifier: Apache-2.0
// What a test tells a simulated NCCL, and asks of it.
#include "tests/support/fake_nccl.h"

#include <chrono>
#include <utility>

#include "tests/support/fake_devices.h"
#include "tests/support/fake_nccl_state.h"

namespace ddp::testing {
namespace fake_nccl {

State* state = nullptr;
thread_local double last_cost = 0;

Call Enter(const char* function, int rank, nccl::Comm comm) {
  State* const mine = state;  // who hangs may wake up in another test
  Call call;
  call.result = mine->owner->fail(function, FakeDevices::ThreadDevice());
  call.failed = call.result != nccl::kSuccess;
  std::unique_lock<std::mutex> lock(mine->mutex);
  ++mine->calls[function];
  if (call.failed) return call;
  const auto plan = mine->plans.find({function, rank});
  if (plan == mine->plans.end() || plan->second.skip-- > 0) return call;
  const Planned planned = plan->second;
  mine->plans.erase(plan);
  call.result = planned.result;
  switch (planned.mishap) {
    case FakeNccl::Mishap::kFail:
      call.failed = true;
      break;
    case FakeNccl::Mishap::kHang:
      mine->changed.wait(lock, [&] { return mine->ending || (comm != nullptr && comm->aborted); });
      call.failed = true;
      break;
    case FakeNccl::Mishap::kSlow:
      mine->changed.wait_for(lock, std::chrono::seconds(1), [&] { return mine->ending; });
      break;
    case FakeNccl::Mishap::kStuck:
      call.stuck = true;
      break;
    case FakeNccl::Mishap::kCorrupt:
      call.corrupt = true;
      break;
  }
  return call;
}

}  // namespace fake_nccl

namespace {

using fake_nccl::State;
using fake_nccl::state;

int Read(int State::*number) {
  const std::lock_guard<std::mutex> lock(state->mutex);
  return state->*number;
}

}  // namespace

FakeNccl::FakeNccl(int version) : FakeNccl(version, "") {}

FakeNccl::FakeNccl(int version, const std::string& folder) {
  // Never freed, and reachable: threads that hung in a call look at theirs once more.
  static auto* const all = new std::vector<std::unique_ptr<State>>;
  state = all->emplace_back(std::make_unique<State>()).get();
  state->owner = this;
  state->version = version;
  state->board = folder.empty() ? MakeBoardInMemory() : MakeBoardInFolder(folder);
}

FakeNccl::~FakeNccl() {
  const std::lock_guard<std::mutex> lock(state->mutex);
  state->ending = true;
  for (const auto& comm : state->comms) comm->aborted = true;
  state->changed.notify_all();
}

nccl::Api FakeNccl::api() const { return fake_nccl::Functions(state->version); }

void FakeNccl::Plan(const std::string& function, int rank, Mishap mishap, nccl::Result result, int skip) {
  const std::lock_guard<std::mutex> lock(state->mutex);
  state->plans[{function, rank}] = {mishap, result, skip};
}

void FakeNccl::SetAsyncError(int rank, nccl::Result error) {
  const std::lock_guard<std::mutex> lock(state->mutex);
  for (const auto& comm : state->comms) {
    if (comm->rank == rank) comm->async_error = error;
  }
}

double FakeNccl::LastCost() { return fake_nccl::last_cost; }

int FakeNccl::Calls(const std::string& function) const {
  const std::lock_guard<std::mutex> lock(state->mutex);
  return state->calls[function];
}
int FakeNccl::live_memory() const { return Read(&State::memory); }
int FakeNccl::live_windows() const { return Read(&State::windows); }
int FakeNccl::live_comms() const { return Read(&State::live); }
int FakeNccl::last_op(int rank) const {
  const std::lock_guard<std::mutex> lock(state->mutex);
  return state->last_op.at(rank);
}

}  // namespace ddp::testing
