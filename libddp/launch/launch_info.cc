// SPDX-License-Identifier: Apache-2.0
#include "libddp/launch/launch_info.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "libddp/base/failed_ranks.h"
#include "libddp/launch/launchers.h"

namespace ddp {
namespace {

// The four numbers' names as the user knows them: options or variables.
struct Names {
  absl::string_view rank, world_size, local_rank, local_world_size;
};

std::string ListNames(const Launcher& launcher) {
  return absl::StrJoin(launcher.variables, ", ",
                       [](std::string* out, Env variable) { absl::StrAppend(out, EnvName(variable)); });
}

// `remedy` says what to do about numbers that contradict each other.
absl::Status CheckRanges(const LaunchInfo& info, const Names& names, absl::string_view remedy) {
  const auto check = [&](absl::string_view name, int value, int low, int high, const std::string& range) {
    if (value >= low && value <= high) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat(name, " is ", value, " but must be ", range, "; ", remedy));
  };
  const auto between = [](absl::string_view low, absl::string_view name, int value, absl::string_view less) {
    return absl::StrCat(low, " to ", name, less, " = ", value);
  };
  absl::Status s =
      check(names.world_size, info.world_size, 1, kMaxRanks, absl::StrCat("at least 1 and at most ", kMaxRanks));
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
                     " but has no store; set one that all ranks reach (CreateFileStore, CreateTcpStore, or "
                     "CreateMemoryStore for threads of one process)"));
  }
  return info;
}

// A launcher's variable as a number. nullopt if it is not set.
absl::StatusOr<std::optional<int>> ReadNumber(const Launcher& launcher, Env variable, EnvLookup lookup) {
  const std::optional<std::string> text = launcher.read(variable, lookup);
  if (!text) return std::nullopt;
  int value = 0;
  if (absl::SimpleAtoi(*text, &value)) return value;
  return absl::InvalidArgumentError(absl::StrCat(
      EnvName(variable), "=", *text, " is not a number; start the program with ", launcher.product, ", which sets it"));
}

absl::StatusOr<LaunchInfo> FromLauncher(const Launcher& launcher, EnvLookup lookup) {
  LaunchInfo info;
  info.launcher = std::string(launcher.name);
  int* const fields[] = {&info.rank, &info.world_size, &info.local_rank, &info.local_world_size};
  for (size_t i = 0; i < launcher.variables.size(); ++i) {
    const absl::StatusOr<std::optional<int>> value = ReadNumber(launcher, launcher.variables[i], lookup);
    if (!value.ok()) return value.status();
    if (!value->has_value()) {
      return absl::InvalidArgumentError(
          absl::StrCat(EnvName(launcher.variables[i]), " is not set but others of the variables of ", launcher.product,
                       " are; start the program with it, or unset all of ", ListNames(launcher)));
    }
    *fields[i] = **value;
  }
  const Names names = {EnvName(launcher.variables[0]), EnvName(launcher.variables[1]), EnvName(launcher.variables[2]),
                       EnvName(launcher.variables[3])};
  absl::Status s =
      CheckRanges(info, names, absl::StrCat("start the program with ", launcher.product, ", which sets them all"));
  if (s.ok()) s = launcher.meet(lookup, info);
  if (!s.ok()) return s;
  return info;
}

// Which of its variables are set: none, some, or at least rank and world size.
enum class Presence { kNone, kSome, kWhole };

Presence PresenceOf(const Launcher& launcher, EnvLookup lookup) {
  const auto set = [&](Env variable) { return launcher.read(variable, lookup).has_value(); };
  if (set(launcher.variables[0]) && set(launcher.variables[1])) return Presence::kWhole;
  return std::any_of(launcher.variables.begin(), launcher.variables.end(), set) ? Presence::kSome : Presence::kNone;
}

// Whether what `other` says is what `chosen` says, as far as it says anything.
absl::Status CheckAgreement(const Launcher& chosen, const Launcher& other, EnvLookup lookup) {
  for (size_t i = 0; i < chosen.variables.size(); ++i) {
    const std::optional<std::string> mine = chosen.read(chosen.variables[i], lookup);
    const std::optional<std::string> theirs = other.read(other.variables[i], lookup);
    int a = 0;
    int b = 0;
    if (!mine || !theirs || (absl::SimpleAtoi(*mine, &a) && absl::SimpleAtoi(*theirs, &b) && a == b)) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(chosen.product, " and ", other.product, " contradict each other: ", EnvName(chosen.variables[i]),
                     "=", *mine, " but ", EnvName(other.variables[i]), "=", *theirs,
                     "; start the program with one of them, or unset ", ListNames(other)));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<LaunchInfo> DetectLaunch(const ContextOptions& options, EnvLookup lookup) {
  if (options.rank || options.world_size || options.local_rank || options.local_world_size || options.store) {
    return FromOptions(options);
  }
  // The first that says all that is needed; else the first that says something, which is an error.
  const Launcher* chosen = nullptr;
  Presence presence = Presence::kNone;
  for (const Launcher& launcher : Launchers()) {
    const Presence here = PresenceOf(launcher, lookup);
    if (here <= presence) continue;
    chosen = &launcher;
    presence = here;
  }
  if (chosen == nullptr) return LaunchInfo{};
  absl::StatusOr<LaunchInfo> info = FromLauncher(*chosen, lookup);
  for (const Launcher& other : Launchers()) {
    if (!info.ok() || &other == chosen || other.outermost) continue;
    if (absl::Status s = CheckAgreement(*chosen, other, lookup); !s.ok()) return s;
  }
  return info;
}

bool LacksSrun(const LaunchInfo& info, EnvLookup lookup) {
  if (info.launcher != "none" || !lookup(Env::kSlurmProcId)) return false;
  constexpr Env kCounts[] = {Env::kSlurmNtasks, Env::kSlurmNtasksPerNode, Env::kSlurmNnodes};
  return std::any_of(std::begin(kCounts), std::end(kCounts), [&](Env variable) {
    int count = 0;
    return absl::SimpleAtoi(lookup(variable).value_or(""), &count) && count > 1;
  });
}

}  // namespace ddp
