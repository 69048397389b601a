// SPDX-License-Identifier: Apache-2.0
// What commonly goes wrong with NCCL, recognised by name, and what to do about it.
#ifndef LIBDDP_COMM_NCCL_ADVICE_H_
#define LIBDDP_COMM_NCCL_ADVICE_H_

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "libddp/base/env.h"
#include "libddp/comm/nccl/api.h"

namespace ddp::nccl {

using EnvReader = std::function<std::optional<std::string>(Env)>;

// One sentence for each of NCCL's environment variables whose value cannot be what was meant: names it, its value, and
// what is legal. Values copied from somewhere are the most frequent cause of slow or hanging jobs.
std::vector<std::string> CheckEnvironment(const EnvReader& read = ReadEnv);

struct CauseAndRemedy {
  std::string cause, remedy;
};

// The likely cause and the remedy of a failed call, by NCCL's own words; empty if nothing is known about it. A cause
// may be unknown, the remedy then says how to learn more.
CauseAndRemedy Recognise(absl::string_view words, Result result, int version);

// The same in one phrase.
std::string Advice(absl::string_view words, Result result, int version);

// The Status of a call that did not succeed: what NCCL says, the likely cause, and doubtful variables. Unavailable for
// a lost peer, ResourceExhausted for memory, InvalidArgument for what leaves the communicator usable, else Internal.
absl::Status ToStatus(const Api& api, Result result, Comm comm, absl::string_view call, int rank, int version);

}  // namespace ddp::nccl

#endif  // LIBDDP_COMM_NCCL_ADVICE_H_
