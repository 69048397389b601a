// SPDX-License-Identifier: Apache-2.0
#include "libddp/launch/launch_info.h"

#include <sched.h>

#include <algorithm>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "libddp/launch/launch_store.h"
#include "libddp/launch/mpi_session.h"
#include "libddp/launch/topology.h"
#include "tests/support/catch.h"

namespace ddp {
namespace {

using Variables = std::map<std::string, std::string>;

absl::StatusOr<LaunchInfo> Detect(const Variables& variables, const ContextOptions& options = {}) {
  return DetectLaunch(options, [&](Env env) -> std::optional<std::string> {
    const auto found = variables.find(std::string(EnvName(env)));
    if (found == variables.end()) return std::nullopt;
    return found->second;
  });
}

LaunchInfo Good(const Variables& variables, const ContextOptions& options = {}) {
  const absl::StatusOr<LaunchInfo> info = Detect(variables, options);
  INFO(info.status().ToString());
  REQUIRE(info.ok());
  return *info;
}

void CheckPlace(const LaunchInfo& info, const std::string& launcher, int rank, int size, int local_rank,
                int local_size) {
  CHECK(info.launcher == launcher);
  CHECK(info.rank == rank);
  CHECK(info.world_size == size);
  CHECK(info.local_rank == local_rank);
  CHECK(info.local_world_size == local_size);
}

void CheckInvalid(const absl::StatusOr<LaunchInfo>& info, const std::vector<std::string>& parts) {
  REQUIRE(info.status().code() == absl::StatusCode::kInvalidArgument);
  for (const std::string& part : parts) {
    INFO(info.status().message() << " lacks " << part);
    CHECK(absl::StrContains(info.status().message(), part));
  }
}

// What each launcher sets. An empty text leaves a variable out.
Variables Set(const std::vector<std::string>& names, const std::vector<std::string>& values) {
  Variables variables;
  for (size_t i = 0; i < names.size(); ++i) {
    if (!values[i].empty()) variables[names[i]] = values[i];
  }
  return variables;
}
Variables OpenMpi(const std::string& rank, const std::string& size, const std::string& local_rank,
                  const std::string& local_size) {
  return Set(
      {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"},
      {rank, size, local_rank, local_size});
}
Variables Mpich(const std::string& rank, const std::string& size, const std::string& local_rank,
                const std::string& local_size) {
  return Set({"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"}, {rank, size, local_rank, local_size});
}
Variables Torchrun(const std::string& rank, const std::string& size, const std::string& local_rank,
                   const std::string& local_size) {
  Variables variables =
      Set({"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}, {rank, size, local_rank, local_size});
  variables.insert({{"MASTER_ADDR", "127.0.0.1"},
                    {"MASTER_PORT", "29500"},
                    {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                    {"TORCHELASTIC_RUN_ID", "job"},
                    {"TORCHELASTIC_RESTART_COUNT", "0"}});
  return variables;
}
Variables Srun(const std::string& rank, const std::string& size, const std::string& local_rank,
               const std::string& per_node, const std::string& node) {
  return Set({"SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID",
              "SLURM_JOB_ID", "SLURM_STEP_ID"},
             {rank, size, local_rank, per_node, node, "1234", "1"});
}
Variables Both(Variables a, const Variables& b) {
  for (const auto& [name, value] : b) a[name] = value;
  return a;
}

ContextOptions Options(int rank, int world_size) {
  ContextOptions options;
  options.rank = rank;
  options.world_size = world_size;
  options.store = CreateMemoryStore();
  return options;
}

TEST_CASE("without launcher and options it is a world of one") { CheckPlace(Good({}), "none", 0, 1, 0, 1); }

TEST_CASE("each launcher's variables are taken") {
  CheckPlace(Good(OpenMpi("5", "8", "1", "4")), "mpirun", 5, 8, 1, 4);
  CheckPlace(Good(Mpich("5", "8", "1", "4")), "mpirun", 5, 8, 1, 4);
  CheckPlace(Good(Torchrun("5", "8", "1", "4")), "torchrun", 5, 8, 1, 4);
  CheckPlace(Good(Srun("5", "8", "1", "4(x2)", "1")), "srun", 5, 8, 1, 4);
  CHECK(Good(OpenMpi("5", "8", "1", "4")).rendezvous == RendezvousMethod::kMpi);
  CHECK(Good(Mpich("5", "8", "1", "4")).rendezvous == RendezvousMethod::kMpi);
}

TEST_CASE("options come before the launcher, and locals default to the world") {
  CheckPlace(Good(OpenMpi("5", "8", "1", "4"), Options(2, 3)), "options", 2, 3, 2, 3);
  ContextOptions options = Options(2, 4);
  options.local_rank = 0;
  options.local_world_size = 2;
  CheckPlace(Good({}, options), "options", 2, 4, 0, 2);
}

TEST_CASE("under torchrun ranks meet beside its agent's port") {
  Variables v = Torchrun("1", "2", "1", "2");
  CHECK(Good(v).rendezvous == RendezvousMethod::kTcpStore);
  CHECK(Good(v).store_port == 29501);
  const std::string run_id = Good(v).run_id;

  SECTION("or on it, where the agent does not use it") {
    v.erase("TORCHELASTIC_USE_AGENT_STORE");
    CHECK(Good(v).store_port == 29500);
    v["TORCHELASTIC_USE_AGENT_STORE"] = "False";
    CHECK(Good(v).store_port == 29500);
  }
  SECTION("or where DDP_STORE_PORT says, even without a MASTER_PORT") {
    v["DDP_STORE_PORT"] = "4711";
    CHECK(Good(v).store_port == 4711);
    v.erase("MASTER_PORT");
    CHECK(Good(v).store_port == 4711);
  }
  SECTION("another job, or the same started again, is another run") {
    v["TORCHELASTIC_RESTART_COUNT"] = "1";
    CHECK(Good(v).run_id != run_id);
    v["TORCHELASTIC_RESTART_COUNT"] = "0";
    CHECK(Good(v).run_id == run_id);
    v["TORCHELASTIC_RUN_ID"] = "other";
    CHECK(Good(v).run_id != run_id);
  }
  SECTION("and one rank meets nobody") {
    v = Torchrun("0", "1", "0", "1");
    v.erase("MASTER_PORT");
    CHECK(Good(v).rendezvous == RendezvousMethod::kStore);
  }
  SECTION("a port that is none is refused by name") {
    for (const char* port : {"0", "65536", "port", "-1"}) {
      v["MASTER_PORT"] = port;
      CheckInvalid(Detect(v), {absl::StrCat("MASTER_PORT=", port), "65535"});
      v["DDP_STORE_PORT"] = port;
      CheckInvalid(Detect(v), {absl::StrCat("DDP_STORE_PORT=", port), "65535"});
      v.erase("DDP_STORE_PORT");
    }
    v["MASTER_PORT"] = "65535";
    CheckInvalid(Detect(v), {"MASTER_PORT=65535", "DDP_STORE_PORT"});
    v.erase("MASTER_PORT");
    CheckInvalid(Detect(v), {"MASTER_PORT is not set", "torchrun", "DDP_STORE_PORT"});
  }
}

TEST_CASE("under srun the step says more than the job") {
  Variables v = Srun("1", "8", "1", "2", "0");
  v["SLURM_STEP_NUM_TASKS"] = "2";
  CheckPlace(Good(v), "srun", 1, 2, 1, 2);
}

// What sbatch sets for its script, and with it for a program that the script starts by itself.
Variables Sbatch(const std::string& tasks) {
  Variables variables = Set({"SLURM_JOB_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS"},
                            {"1234", "0", "0", "0", tasks});
  variables.insert({{"SLURM_NNODES", "1"}, {"SLURM_TASKS_PER_NODE", "4"}, {"SLURM_NPROCS", "4"}, {"SLURM_GTIDS", "0"}});
  return variables;
}

bool LacksSrunIn(const Variables& variables) {
  return LacksSrun(Good(variables), [&](Env env) -> std::optional<std::string> {
    const auto found = variables.find(std::string(EnvName(env)));
    return found == variables.end() ? std::nullopt : std::optional(found->second);
  });
}

TEST_CASE("in a batch script without srun it is a world of one") {
  for (const char* tasks : {"4", "1", ""}) {
    CheckPlace(Good(Sbatch(tasks)), "none", 0, 1, 0, 1);
    CHECK(Good(Sbatch(tasks)).rendezvous == RendezvousMethod::kStore);
    CheckPlace(Good(Both(Sbatch(tasks), Torchrun("1", "2", "1", "2"))), "torchrun", 1, 2, 1, 2);
    CheckPlace(Good(Both(Sbatch(tasks), OpenMpi("1", "2", "1", "2"))), "mpirun", 1, 2, 1, 2);
  }
  // Whoever has asked for several tasks may have meant another thing.
  CHECK(LacksSrunIn(Sbatch("4")));
  CHECK(LacksSrunIn(Both(Sbatch(""), {{"SLURM_NNODES", "2"}})));
  CHECK(LacksSrunIn(Both(Sbatch(""), {{"SLURM_NTASKS_PER_NODE", "2"}})));
  CHECK_FALSE(LacksSrunIn(Sbatch("1")));
  CHECK_FALSE(LacksSrunIn(Sbatch("")));
  CHECK_FALSE(LacksSrunIn({}));
  CHECK_FALSE(LacksSrunIn({{"SLURM_NTASKS", "4"}}));  // where the job's ranks are started from, by salloc
  CHECK_FALSE(LacksSrunIn(Both(Sbatch("4"), Torchrun("0", "1", "0", "1"))));
  CHECK_FALSE(LacksSrunIn(Srun("0", "4", "0", "4", "0")));
}

TEST_CASE("a shell that is a step of its own, as salloc may start it, is a world of one") {
  Variables v = Sbatch("4");
  v["SLURM_STEP_ID"] = "4294967290";
  v["SLURM_STEP_NUM_TASKS"] = "1";
  v["SLURM_STEP_TASKS_PER_NODE"] = "1";
  CheckPlace(Good(v), "srun", 0, 1, 0, 1);
  CHECK(Good(v).rendezvous == RendezvousMethod::kStore);
}

TEST_CASE("the ranks on a host come from Slurm's list, from the number that was asked for, or from the world") {
  CheckPlace(Good(Srun("8", "11", "0", "4(x2),3", "2")), "srun", 8, 11, 0, 3);
  CheckPlace(Good(Srun("7", "11", "3", "4(x2),3", "1")), "srun", 7, 11, 3, 4);
  Variables v = Srun("1", "4", "1", "", "");
  CheckPlace(Good(v), "srun", 1, 4, 1, 4);
  v["SLURM_NNODES"] = "1";
  CheckPlace(Good(v), "srun", 1, 4, 1, 4);
  v["SLURM_NNODES"] = "2";
  CheckInvalid(Detect(v), {"SLURM_STEP_TASKS_PER_NODE is not set"});
  v["SLURM_NTASKS_PER_NODE"] = "2";
  CheckPlace(Good(v), "srun", 1, 4, 1, 2);
  v["SLURM_NTASKS_PER_NODE"] = "16";
  CheckPlace(Good(v), "srun", 1, 4, 1, 4);
  for (const char* bad : {"x", "2(x", "2(xx)", "2(x0)", ",", "2)", "2(x2", "99999999999"}) {
    CheckInvalid(Detect(Srun("1", "4", "1", bad, "0")), {"SLURM_STEP_TASKS_PER_NODE"});
  }
  CheckInvalid(Detect(Srun("1", "4", "1", "2(x2)", "5")), {"SLURM_STEP_TASKS_PER_NODE=2(x2)"});
}

TEST_CASE("srun starts MPI where it has prepared it and libddp can use it") {
  const Variables v = Srun("1", "2", "1", "2", "0");
  const RendezvousMethod with_pmi = MpiSession::Available() ? RendezvousMethod::kMpi : RendezvousMethod::kTcpStore;
  CHECK(Good(v).rendezvous == RendezvousMethod::kTcpStore);
  CHECK(Good(Both(v, {{"PMIX_RANK", "1"}})).rendezvous == with_pmi);
  const LaunchInfo pmi2 = Good(Both(v, {{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}}));
  CHECK(pmi2.rendezvous == with_pmi);
  CheckPlace(pmi2, "srun", 1, 2, 1, 2);
}

TEST_CASE("under srun without MPI a run has a port of its own, or the one it is given") {
  const LaunchInfo one = Good(Srun("0", "2", "0", "2", "0"));
  CHECK(one.store_port >= 20000);
  CHECK(one.store_port < 30000);
  Variables v = Srun("0", "2", "0", "2", "0");
  v["SLURM_STEP_ID"] = "2";
  const LaunchInfo two = Good(v);
  CHECK(one.store_port != two.store_port);
  CHECK(one.run_id != two.run_id);
  v["DDP_STORE_PORT"] = "4711";
  CHECK(Good(v).store_port == 4711);
  v["DDP_STORE_PORT"] = "none";
  CheckInvalid(Detect(v), {"DDP_STORE_PORT=none"});
}

TEST_CASE("launchers that contradict each other are refused by name") {
  const auto both = [](const Variables& a, const Variables& b) { return Detect(Both(a, b)); };
  SECTION("ranks") {
    CheckInvalid(both(OpenMpi("1", "2", "1", "2"), Torchrun("0", "2", "0", "2")),
                 {"Open MPI's mpirun and torchrun contradict each other", "OMPI_COMM_WORLD_RANK=1", "RANK=0"});
  }
  SECTION("world sizes") {
    CheckInvalid(both(Mpich("1", "2", "1", "2"), Torchrun("1", "4", "1", "2")),
                 {"MPICH's mpirun and torchrun contradict", "PMI_SIZE=2", "WORLD_SIZE=4"});
  }
  SECTION("two kinds of mpirun") {
    CheckInvalid(both(OpenMpi("0", "2", "0", "2"), Mpich("0", "1", "0", "1")),
                 {"Open MPI's mpirun and MPICH's mpirun", "OMPI_COMM_WORLD_SIZE=2", "PMI_SIZE=1"});
  }
  SECTION("one of which says little") {
    CheckInvalid(both(OpenMpi("0", "2", "0", "2"), {{"WORLD_SIZE", "8"}}), {"OMPI_COMM_WORLD_SIZE=2", "WORLD_SIZE=8"});
    CheckInvalid(both(Torchrun("0", "2", "0", "2"), OpenMpi("", "", "1", "")),
                 {"LOCAL_RANK=0", "OMPI_COMM_WORLD_LOCAL_RANK=1"});
    CheckInvalid(both(OpenMpi("0", "2", "0", "2"), {{"RANK", "zero"}}), {"OMPI_COMM_WORLD_RANK=0", "RANK=zero"});
  }
}

TEST_CASE("launchers that agree, or of which one runs inside the other, are no contradiction") {
  CHECK(Good(Both(OpenMpi("1", "2", "1", "2"), Torchrun("1", "2", "1", "2"))).rendezvous == RendezvousMethod::kMpi);
  CHECK(Good(Both(Mpich("1", "2", "1", "2"), {{"WORLD_SIZE", "2"}})).rendezvous == RendezvousMethod::kMpi);
  const Variables batch = Srun("0", "4", "0", "2(x2)", "0");
  CheckPlace(Good(Both(batch, OpenMpi("3", "8", "1", "2"))), "mpirun", 3, 8, 1, 2);
  CheckPlace(Good(Both(batch, Mpich("3", "8", "1", "2"))), "mpirun", 3, 8, 1, 2);
  CheckPlace(Good(Both(batch, Torchrun("3", "8", "1", "2"))), "torchrun", 3, 8, 1, 2);
  CheckInvalid(Detect(Both(batch, {{"WORLD_SIZE", "8"}})), {"srun and torchrun", "SLURM_NTASKS=4", "WORLD_SIZE=8"});
}

TEST_CASE("variables that are missing, no numbers or out of range are refused by name") {
  CheckInvalid(Detect(OpenMpi("0", "", "0", "1")), {"OMPI_COMM_WORLD_SIZE is not set", "mpirun"});
  CheckInvalid(Detect(OpenMpi("", "", "", "1")), {"OMPI_COMM_WORLD_RANK is not set"});
  CheckInvalid(Detect(OpenMpi("0", "2", "zero", "2")), {"OMPI_COMM_WORLD_LOCAL_RANK=zero is not a number"});
  CheckInvalid(Detect(OpenMpi("0", "99999999999", "0", "1")), {"OMPI_COMM_WORLD_SIZE=99999999999"});
  CheckInvalid(Detect(OpenMpi("2", "2", "0", "2")), {"OMPI_COMM_WORLD_RANK is 2", "0 to OMPI_COMM_WORLD_SIZE - 1 = 1"});
  CheckInvalid(Detect(OpenMpi("-1", "2", "0", "2")), {"OMPI_COMM_WORLD_RANK is -1"});
  CheckInvalid(Detect(OpenMpi("0", "0", "0", "1")), {"OMPI_COMM_WORLD_SIZE is 0", "at least 1"});
  CheckInvalid(Detect(OpenMpi("0", "2", "0", "3")), {"OMPI_COMM_WORLD_LOCAL_SIZE is 3", "OMPI_COMM_WORLD_SIZE = 2"});
  CheckInvalid(Detect(OpenMpi("1", "4", "2", "2")),
               {"OMPI_COMM_WORLD_LOCAL_RANK is 2", "OMPI_COMM_WORLD_LOCAL_SIZE - 1 = 1"});
  CheckInvalid(Detect(Mpich("0", "2", "", "2")), {"MPI_LOCALRANKID is not set", "MPICH's mpirun", "PMI_RANK"});
  CheckInvalid(Detect(Mpich("2", "2", "0", "2")), {"PMI_RANK is 2", "PMI_SIZE - 1 = 1"});
  CheckInvalid(Detect(Torchrun("", "2", "0", "2")), {"RANK is not set", "torchrun", "WORLD_SIZE"});
  CheckInvalid(Detect(Torchrun("0", "2", "0", "")), {"LOCAL_WORLD_SIZE is not set", "torchrun"});
  CheckInvalid(Detect({{"RANK", "general"}, {"WORLD_SIZE", "2"}}), {"RANK=general is not a number"});
  CheckInvalid(Detect(Srun("4", "4", "0", "4", "0")), {"SLURM_PROCID is 4", "SLURM_NTASKS - 1 = 3"});
}

TEST_CASE("ranks on several hosts that have no MPI are told to use it") {
  const absl::Status torchrun = OpenLaunchStore(Good(Torchrun("3", "4", "1", "2")), absl::Seconds(1)).status();
  CHECK(torchrun.code() == absl::StatusCode::kFailedPrecondition);
  for (const char* part : {"rank 3", "torchrun", "2 of 4 ranks", "mpirun -n 4"}) {
    CHECK(absl::StrContains(torchrun.message(), part));
  }
  const absl::Status srun = OpenLaunchStore(Good(Srun("3", "4", "1", "2(x2)", "1")), absl::Seconds(1)).status();
  CHECK(absl::StrContains(srun.message(), "srun --mpi=pmix"));
}

TEST_CASE("options given in part or out of range are refused by name") {
  ContextOptions options;
  const auto refused = [&](const std::vector<std::string>& parts) { CheckInvalid(Detect({}, options), parts); };
  SECTION("store alone") {
    options.store = CreateMemoryStore();
    refused({"no rank", "set all of rank, world_size and store"});
  }
  SECTION("local rank alone") {
    options.local_rank = 0;
    refused({"no rank"});
  }
  SECTION("no world size") {
    options.rank = 0;
    refused({"no world_size"});
  }
  SECTION("no store") {
    options = Options(1, 2);
    options.store = nullptr;
    refused({"rank 1 of 2", "no store", "CreateTcpStore"});
  }
  SECTION("rank out of range") {
    options = Options(3, 3);
    refused({"ContextOptions::rank is 3", "= 2"});
  }
  SECTION("world size out of range") {
    options = Options(0, -2);
    refused({"ContextOptions::world_size is -2"});
  }
  SECTION("local world size out of range") {
    options = Options(0, 2);
    options.local_world_size = 3;
    refused({"ContextOptions::local_world_size is 3"});
  }
  SECTION("local rank out of range") {
    options = Options(0, 4);
    options.local_rank = 2;
    options.local_world_size = 2;
    refused({"ContextOptions::local_rank is 2"});
  }
}

TEST_CASE("a world of one needs no store") {
  ContextOptions options = Options(0, 1);
  options.store = nullptr;
  CHECK(Detect({}, options).ok());
}

TEST_CASE("the processors that this thread is bound to are listed in ascending order") {
  const std::vector<int> before = BoundCpus();
  REQUIRE_FALSE(before.empty());
  CHECK(std::is_sorted(before.begin(), before.end(), std::less_equal<>()));

  cpu_set_t all, one;
  REQUIRE(sched_getaffinity(0, sizeof(all), &all) == 0);
  CPU_ZERO(&one);
  CPU_SET(before.back(), &one);
  REQUIRE(sched_setaffinity(0, sizeof(one), &one) == 0);
  CHECK(BoundCpus() == std::vector<int>{before.back()});
  REQUIRE(sched_setaffinity(0, sizeof(all), &all) == 0);
}

}  // namespace
}  // namespace ddp
