// SPDX-License-Identifier: Apache-2.0
// What the ranks of a Context tell each other before they have anything in common.
#ifndef LIBDDP_COMM_CONTEXT_TERMS_H_
#define LIBDDP_COMM_CONTEXT_TERMS_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "ddp/types.h"
#include "libddp/launch/rendezvous.h"

namespace ddp {

struct ContextTerms {
  std::string backend;
  Device::Kind device = Device::Kind::kCpu;
  std::string host;       // HostId
  absl::Status settings;  // not OK, naming the rank: it cannot take part
};

// Everybody's, by rank. The error of `mine` if that has one. FailedPrecondition, on every rank, if another rank cannot
// take part, or ranks have other backends or kinds of devices; FailedRanks reads which. Errors as Rendezvous.
absl::StatusOr<std::vector<ContextTerms>> AgreeOnTerms(Rendezvous& rendezvous, const ContextTerms& mine,
                                                       absl::Time deadline);

}  // namespace ddp

#endif  // LIBDDP_COMM_CONTEXT_TERMS_H_
