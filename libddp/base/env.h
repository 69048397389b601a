// Every environment variable that the library reads, in one table; the only place that calls getenv.
#ifndef LIBDDP_BASE_ENV_H_
#define LIBDDP_BASE_ENV_H_

#include <optional>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace ddp {

enum class Env {
  kBackend,        // DDP_BACKEND
  kTimeout,        // DDP_TIMEOUT
  kLogLevel,       // DDP_LOG_LEVEL
  kSharedMemory,   // DDP_SHARED_MEMORY
  kSingleCopy,     // DDP_SINGLE_COPY
  kOmpiRank,       // OMPI_COMM_WORLD_RANK, set by Open MPI's mpirun
  kOmpiSize,       // OMPI_COMM_WORLD_SIZE
  kOmpiLocalRank,  // OMPI_COMM_WORLD_LOCAL_RANK
  kOmpiLocalSize,  // OMPI_COMM_WORLD_LOCAL_SIZE
};

struct EnvInfo {
  Env env;
  absl::string_view name;
  absl::string_view default_value;  // as documented; empty: unset
  absl::string_view meaning;        // one sentence, with legal values
};

// One row per Env, in its order. docs/environment.md is checked against it.
absl::Span<const EnvInfo> EnvTable();

// The variable's value; nullopt if unset or empty.
std::optional<std::string> ReadEnv(Env env);

// ReadEnv, or what a test puts in its place.
using EnvLookup = absl::FunctionRef<std::optional<std::string>(Env)>;

}  // namespace ddp

#endif  // LIBDDP_BASE_ENV_H_
