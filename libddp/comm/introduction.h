// SPDX-License-Identifier: Apache-2.0
// What ranks tell each other before they have memory in common.
#ifndef LIBDDP_COMM_INTRODUCTION_H_
#define LIBDDP_COMM_INTRODUCTION_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "libddp/base/process_id.h"
#include "libddp/comm/base/node_layout.h"
#include "libddp/launch/rendezvous.h"

namespace ddp {

// DDP_NODE_SIZE, or 0. InvalidArgument, naming this rank, if it cannot be understood.
absl::StatusOr<int> ReadNodeSize(int rank);

struct Introduction {
  std::string host;  // HostId
  std::string host_name;
  int node_size = 0;  // DDP_NODE_SIZE, or 0
  ProcessId process;
  std::vector<int> cpus;

  // Errors as ReadNodeSize.
  static absl::StatusOr<Introduction> OfSelf(int rank);
  std::string Pack() const;
  static absl::StatusOr<Introduction> Unpack(absl::string_view packed);
};

// Everybody's introduction, by rank. FailedPrecondition where they have different DDP_NODE_SIZE.
absl::StatusOr<std::vector<Introduction>> Introduce(Rendezvous& rendezvous, const Introduction& self,
                                                    absl::Time deadline);

NodeLayout LayoutOf(const std::vector<Introduction>& all);
// Of the ranks on the host of rank 'rank'.
bool MoreRanksThanCpus(const std::vector<Introduction>& all, int rank);

}  // namespace ddp

#endif  // LIBDDP_COMM_INTRODUCTION_H_
