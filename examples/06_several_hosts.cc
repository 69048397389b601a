// SPDX-License-Identifier: Apache-2.0
// Ranks of several hosts, and a launcher of your own.
//
//   mpirun --hostfile hosts -n 8 06_several_hosts     # on several hosts, through MPI
//   DDP_NODE_SIZE=1 mpirun -n 2 06_several_hosts      # the same on one host, as if each rank had one of its own
//
// Without mpirun, each rank is told its number, and the ranks meet at a port:
//
//   06_several_hosts 0 2 29400 & 06_several_hosts 1 2 29400 & wait    # rank, ranks, port
#include <cstdio>
#include <cstdlib>
#include <string>

#include "ddp/ddp.h"

absl::Status Run(int argc, char** argv) {
  ddp::ContextOptions options;  // empty: the launcher's variables decide
  if (argc == 4) {
    options.rank = std::atoi(argv[1]);
    options.world_size = std::atoi(argv[2]);
    auto store = ddp::CreateTcpStore({.port = std::atoi(argv[3]),
                                      .serve = *options.rank == 0,
                                      .run_id = "several-hosts",  // different for each run that may be there at a time
                                      .world_size = *options.world_size});
    if (!store.ok()) return store.status();
    options.store = *store;
  }
  auto context = ddp::Context::Create(options);
  if (!context.ok()) return context.status();
  ddp::ProcessGroup& world = (*context)->world();

  const int64_t mine = world.rank() + 1;
  auto sum = ddp::AllReduceScalar(world, mine, ddp::ReduceOp::kSum);
  if (!sum.ok()) return sum.status();
  auto launchers = ddp::GatherStrings(world, (*context)->launcher());
  if (!launchers.ok()) return launchers.status();
  std::printf("rank %d of %d, local rank %d of %d: sum %d, started by %s\n", world.rank(), world.size(),
              (*context)->local_rank(), (*context)->local_world_size(), static_cast<int>(*sum),
              launchers->back().c_str());
  return absl::OkStatus();
}

int main(int argc, char** argv) {
  const absl::Status status = Run(argc, argv);
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
