#include "libddp/launch/launch_info.h"

#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace ddp {
namespace {

absl::string_view NameOf(Env env) { return EnvTable()[static_cast<size_t>(env)].name; }

// The four numbers' names as the user knows them: options or variables.
struct Names {
  absl::string_view rank, world_size, local_rank, local_world_size;
};

// `remedy` says what to do about numbers that contradict each other.
absl::Status CheckRanges(const LaunchInfo& info, const Names& names, absl::string_view remedy) {
  const auto check = [&](absl::string_view name, int value, int low, int high, const std::string& range) {
    if (value >= low && value <= high) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat(name, " is ", value, " but must be ", range, "; ", remedy));
  };
  const auto between = [](absl::string_view low, absl::string_view name, int value, absl::string_view less) {
    return absl::StrCat(low, " to ", name, less, " = ", value);
  };
  absl::Status s = check(names.world_size, info.world_size, 1, info.world_size, "at least 1");
  s.Update(check(names.rank, info.rank, 0, info.world_size - 1,
                 between("0", names.world_size, info.world_size - 1, " - 1")));
  s.Update(check(names.local_world_size, info.local_world_size, 1, info.world_size,
                 between("1", names.world_size, info.world_size, "")));
  s.Update(check(names.local_rank, info.local_rank, 0, info.local_world_size - 1,
                 between("0", names.local_world_size, info.local_world_size - 1, " - 1")));
  return s;
}

absl::StatusOr<LaunchInfo> FromOptions(const ContextOptions& options) {
  if (!options.rank || !options.world_size) {
    return absl::InvalidArgumentError(
        absl::StrCat("ContextOptions has no ", options.rank ? "world_size" : "rank",
                     "; set all of rank, world_size and store, or leave all out so that the launcher decides"));
  }
  LaunchInfo info;
  info.rank = *options.rank;
  info.world_size = *options.world_size;
  info.local_rank = options.local_rank.value_or(info.rank);
  info.local_world_size = options.local_world_size.value_or(info.world_size);
  info.launcher = "options";
  constexpr Names kNames = {"ContextOptions::rank", "ContextOptions::world_size", "ContextOptions::local_rank",
                            "ContextOptions::local_world_size"};
  if (absl::Status s = CheckRanges(info, kNames, "correct the options"); !s.ok()) return s;
  if (info.world_size > 1 && options.store == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("ContextOptions says rank ", info.rank, " of ", info.world_size,
                     " but has no store; set one that all ranks reach (CreateFileStore, or CreateMemoryStore for "
                     "threads of one process)"));
  }
  return info;
}

absl::StatusOr<int> ReadNumber(Env env, EnvLookup lookup) {
  const std::optional<std::string> text = lookup(env);
  if (!text) {
    return absl::InvalidArgumentError(
        absl::StrCat(NameOf(env),
                     " is not set but others of Open MPI's variables are; start the program with mpirun, "
                     "or unset every OMPI_COMM_WORLD_ variable"));
  }
  int value = 0;
  if (!absl::SimpleAtoi(*text, &value)) {
    return absl::InvalidArgumentError(
        absl::StrCat(NameOf(env), "=", *text, " is not a number; start the program with mpirun, which sets it"));
  }
  return value;
}

absl::StatusOr<LaunchInfo> FromOpenMpi(EnvLookup lookup) {
  LaunchInfo info;
  info.launcher = "mpirun";
  const struct {
    Env env;
    int& field;
  } fields[] = {{Env::kOmpiRank, info.rank},
                {Env::kOmpiSize, info.world_size},
                {Env::kOmpiLocalRank, info.local_rank},
                {Env::kOmpiLocalSize, info.local_world_size}};
  for (const auto& [env, field] : fields) {
    const absl::StatusOr<int> value = ReadNumber(env, lookup);
    if (!value.ok()) return value.status();
    field = *value;
  }
  const Names names = {NameOf(Env::kOmpiRank), NameOf(Env::kOmpiSize), NameOf(Env::kOmpiLocalRank),
                       NameOf(Env::kOmpiLocalSize)};
  if (absl::Status s = CheckRanges(info, names, "start the program with mpirun, which sets them all"); !s.ok())
    return s;
  return info;
}

}  // namespace

absl::StatusOr<LaunchInfo> DetectLaunch(const ContextOptions& options, EnvLookup lookup) {
  if (options.rank || options.world_size || options.local_rank || options.local_world_size || options.store) {
    return FromOptions(options);
  }
  for (Env env : {Env::kOmpiRank, Env::kOmpiSize, Env::kOmpiLocalRank, Env::kOmpiLocalSize}) {
    if (lookup(env)) return FromOpenMpi(lookup);
  }
  return LaunchInfo{};
}

}  // namespace ddp
