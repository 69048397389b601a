#include "libddp/launch/launch_info.h"

#include <sched.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "libddp/launch/topology.h"
#include "tests/support/catch.h"

namespace ddp {
namespace {

constexpr const char* kVariables[] = {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                                      "OMPI_COMM_WORLD_LOCAL_SIZE"};

// Sets Open MPI's four variables (null: unset) while it lives.
class OmpiVariables {
 public:
  OmpiVariables(const char* rank, const char* size, const char* local_rank, const char* local_size) {
    const char* const values[] = {rank, size, local_rank, local_size};
    for (int i = 0; i < 4; ++i) {
      unsetenv(kVariables[i]);
      if (values[i] != nullptr) setenv(kVariables[i], values[i], 1);
    }
  }
  ~OmpiVariables() {
    for (const char* name : kVariables) unsetenv(name);
  }
};

ContextOptions Options(int rank, int world_size) {
  ContextOptions options;
  options.rank = rank;
  options.world_size = world_size;
  options.store = CreateMemoryStore();
  return options;
}

void CheckInvalid(const ContextOptions& options, const std::vector<std::string>& parts) {
  const absl::StatusOr<LaunchInfo> info = DetectLaunch(options);
  REQUIRE(info.status().code() == absl::StatusCode::kInvalidArgument);
  for (const std::string& part : parts) {
    INFO(info.status().message() << " lacks " << part);
    CHECK(absl::StrContains(info.status().message(), part));
  }
}

TEST_CASE("without launcher and options it is a world of one") {
  const OmpiVariables none(nullptr, nullptr, nullptr, nullptr);
  const absl::StatusOr<LaunchInfo> info = DetectLaunch({});
  REQUIRE(info.ok());
  CHECK(info->rank == 0);
  CHECK(info->world_size == 1);
  CHECK(info->local_rank == 0);
  CHECK(info->local_world_size == 1);
  CHECK(info->launcher == "none");
}

TEST_CASE("Open MPI's variables are taken") {
  const OmpiVariables variables("5", "8", "1", "4");
  const absl::StatusOr<LaunchInfo> info = DetectLaunch({});
  REQUIRE(info.ok());
  CHECK(info->rank == 5);
  CHECK(info->world_size == 8);
  CHECK(info->local_rank == 1);
  CHECK(info->local_world_size == 4);
  CHECK(info->launcher == "mpirun");
}

TEST_CASE("options come before the launcher, and locals default to the world") {
  const OmpiVariables variables("5", "8", "1", "4");
  absl::StatusOr<LaunchInfo> info = DetectLaunch(Options(2, 3));
  REQUIRE(info.ok());
  CHECK(info->rank == 2);
  CHECK(info->world_size == 3);
  CHECK(info->local_rank == 2);
  CHECK(info->local_world_size == 3);
  CHECK(info->launcher == "options");

  ContextOptions options = Options(2, 4);
  options.local_rank = 0;
  options.local_world_size = 2;
  info = DetectLaunch(options);
  REQUIRE(info.ok());
  CHECK(info->local_rank == 0);
  CHECK(info->local_world_size == 2);
}

TEST_CASE("Open MPI's variables that are missing, no numbers or contradictory are refused by name") {
  SECTION("missing") {
    const OmpiVariables v("0", nullptr, "0", "1");
    CheckInvalid({}, {"OMPI_COMM_WORLD_SIZE is not set", "mpirun"});
  }
  SECTION("only a local one") {
    const OmpiVariables v(nullptr, nullptr, nullptr, "1");
    CheckInvalid({}, {"OMPI_COMM_WORLD_RANK is not set"});
  }
  SECTION("no number") {
    const OmpiVariables v("0", "2", "zero", "2");
    CheckInvalid({}, {"OMPI_COMM_WORLD_LOCAL_RANK=zero is not a number"});
  }
  SECTION("too large to be a number") {
    const OmpiVariables v("0", "99999999999", "0", "1");
    CheckInvalid({}, {"OMPI_COMM_WORLD_SIZE=99999999999"});
  }
  SECTION("rank beyond the world") {
    const OmpiVariables v("2", "2", "0", "2");
    CheckInvalid({}, {"OMPI_COMM_WORLD_RANK is 2", "0 to OMPI_COMM_WORLD_SIZE - 1 = 1"});
  }
  SECTION("negative rank") {
    const OmpiVariables v("-1", "2", "0", "2");
    CheckInvalid({}, {"OMPI_COMM_WORLD_RANK is -1"});
  }
  SECTION("empty world") {
    const OmpiVariables v("0", "0", "0", "1");
    CheckInvalid({}, {"OMPI_COMM_WORLD_SIZE is 0", "at least 1"});
  }
  SECTION("more local ranks than ranks") {
    const OmpiVariables v("0", "2", "0", "3");
    CheckInvalid({}, {"OMPI_COMM_WORLD_LOCAL_SIZE is 3", "OMPI_COMM_WORLD_SIZE = 2"});
  }
  SECTION("local rank beyond the host") {
    const OmpiVariables v("1", "4", "2", "2");
    CheckInvalid({}, {"OMPI_COMM_WORLD_LOCAL_RANK is 2", "OMPI_COMM_WORLD_LOCAL_SIZE - 1 = 1"});
  }
}

TEST_CASE("options given in part or out of range are refused by name") {
  const OmpiVariables none(nullptr, nullptr, nullptr, nullptr);
  ContextOptions options;
  SECTION("store alone") {
    options.store = CreateMemoryStore();
    CheckInvalid(options, {"no rank", "set all of rank, world_size and store"});
  }
  SECTION("local rank alone") {
    options.local_rank = 0;
    CheckInvalid(options, {"no rank"});
  }
  SECTION("no world size") {
    options.rank = 0;
    CheckInvalid(options, {"no world_size"});
  }
  SECTION("no store") {
    options = Options(1, 2);
    options.store = nullptr;
    CheckInvalid(options, {"rank 1 of 2", "no store"});
  }
  SECTION("rank out of range") { CheckInvalid(Options(3, 3), {"ContextOptions::rank is 3", "= 2"}); }
  SECTION("world size out of range") { CheckInvalid(Options(0, -2), {"ContextOptions::world_size is -2"}); }
  SECTION("local world size out of range") {
    options = Options(0, 2);
    options.local_world_size = 3;
    CheckInvalid(options, {"ContextOptions::local_world_size is 3"});
  }
  SECTION("local rank out of range") {
    options = Options(0, 4);
    options.local_rank = 2;
    options.local_world_size = 2;
    CheckInvalid(options, {"ContextOptions::local_rank is 2"});
  }
}

TEST_CASE("a world of one needs no store") {
  const OmpiVariables none(nullptr, nullptr, nullptr, nullptr);
  ContextOptions options = Options(0, 1);
  options.store = nullptr;
  CHECK(DetectLaunch(options).ok());
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
