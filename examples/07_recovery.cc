// SPDX-License-Identifier: Apache-2.0
// Recovery: one of three ranks dies in the middle of the training, and the other two go on.
//
//   07_recovery    # starts its ranks itself, because mpirun would end them all; both that are left print 0.500
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <string>
#include <vector>

#include "ddp/ddp.h"

constexpr int kRanks = 3, kSteps = 100;

absl::Status Train(int rank, const std::string& path) {
  auto store = ddp::CreateFileStore({.path = path, .run_id = path, .world_size = kRanks});
  if (!store.ok()) return store.status();
  auto created = ddp::Context::Create({.rank = rank, .world_size = kRanks, .store = *store});
  if (!created.ok()) return created.status();
  ddp::Context& context = **created;

  std::vector<float> weight(1000, 1.0f);
  const ddp::Buffer state{weight.data(), weight.size()};  // what a step changes
  auto model = ddp::DistributedDataParallel::Create(context.world(), {{.name = "weight", .value = state}});
  if (!model.ok()) return model.status();
  auto* const grad = static_cast<float*>((*model)->grad(0).data);

  int64_t step = 0;
  while (step < kSteps) {
    if (step == 20 && rank == 2) raise(SIGKILL);
    for (size_t i = 0; i < weight.size(); ++i) grad[i] = weight[i] - static_cast<float>(rank);
    (*model)->GradReady(0);
    if (absl::Status error = (*model)->FinishBackward(); !error.ok()) {
      std::printf("rank %d: step %d failed: %s\n", rank, static_cast<int>(step), std::string(error.message()).c_str());
      if (absl::Status s = context.Recover(absl::Seconds(20)); !s.ok()) return s;  // a world of the ranks that are left
      if (absl::Status s = (*model)->Rebind(context.world()); !s.ok()) return s;   // with the memory where it was
      // Some ranks may have done one step more than others.
      if (absl::Status s = ddp::SyncState(context.world(), step, state).status(); !s.ok()) return s;
      continue;
    }
    for (size_t i = 0; i < weight.size(); ++i) weight[i] -= 0.1f * grad[i];
    ++step;
  }
  std::printf("rank %d, now %d of %d: %.3f\n", rank, context.world().rank(), context.world().size(), weight[0]);
  return absl::OkStatus();
}

int main() {
  const std::string path = "/tmp/ddp-recovery-" + std::to_string(getpid());
  for (int rank = 0; rank < kRanks; ++rank) {
    if (fork() != 0) continue;
    const absl::Status status = Train(rank, path);
    if (!status.ok()) std::fprintf(stderr, "rank %d: %s\n", rank, status.ToString().c_str());
    return status.ok() ? 0 : 1;
  }
  int good = 0, ended = 0;
  while (wait(&ended) > 0) good += WIFEXITED(ended) && WEXITSTATUS(ended) == 0 ? 1 : 0;
  return good == kRanks - 1 ? 0 : 1;
}
