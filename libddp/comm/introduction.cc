// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/introduction.h"

#include <optional>
#include <set>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "libddp/base/env.h"
#include "libddp/launch/topology.h"

namespace ddp {

absl::StatusOr<int> ReadNodeSize(int rank) {
  int size = 0;
  if (const std::optional<std::string> text = ReadEnv(Env::kNodeSize);
      text.has_value() && (!absl::SimpleAtoi(*text, &size) || size < 1)) {
    return absl::InvalidArgumentError(absl::StrCat("rank ", rank, ": DDP_NODE_SIZE is '", *text,
                                                   "'; it must be a number of ranks, 1 or more, or unset"));
  }
  return size;
}

absl::StatusOr<Introduction> Introduction::OfSelf(int rank) {
  const absl::StatusOr<int> node_size = ReadNodeSize(rank);
  if (!node_size.ok()) return node_size.status();
  Introduction self;
  self.node_size = *node_size;
  self.host = HostId();
  self.host_name = HostName();
  self.process = ProcessId::OfSelf();
  self.cpus = BoundCpus();
  return self;
}

std::string Introduction::Pack() const {
  return absl::StrJoin({host, host_name, absl::StrCat(node_size), absl::StrCat(process.token),
                        absl::StrCat(process.pid_namespace), absl::StrCat(process.pid), absl::StrJoin(cpus, ",")},
                       "\n");
}

absl::StatusOr<Introduction> Introduction::Unpack(absl::string_view packed) {
  const std::vector<std::string> fields = absl::StrSplit(packed, '\n');
  Introduction i;
  if (fields.size() != 7 || !absl::SimpleAtoi(fields[2], &i.node_size) ||
      !absl::SimpleAtoi(fields[3], &i.process.token) || !absl::SimpleAtoi(fields[4], &i.process.pid_namespace) ||
      !absl::SimpleAtoi(fields[5], &i.process.pid)) {
    return absl::InternalError(
        "a peer introduces itself in a way this version does not understand; do all ranks run the same program?");
  }
  i.host = fields[0];
  i.host_name = fields[1];
  for (absl::string_view cpu : absl::StrSplit(fields[6], ',', absl::SkipEmpty())) {
    int n = 0;
    if (absl::SimpleAtoi(cpu, &n)) i.cpus.push_back(n);
  }
  return i;
}

absl::StatusOr<std::vector<Introduction>> Introduce(Rendezvous& rendezvous, const Introduction& self,
                                                    absl::Time deadline) {
  absl::StatusOr<std::vector<std::string>> packed = rendezvous.AllGather(self.Pack(), "start of the group", deadline);
  if (!packed.ok()) return packed.status();
  std::vector<Introduction> all;
  for (const std::string& text : *packed) {
    absl::StatusOr<Introduction> one = Introduction::Unpack(text);
    if (!one.ok()) return one.status();
    all.push_back(*std::move(one));
    if (all.back().node_size == all[0].node_size) continue;
    const auto describe = [](const Introduction& i) { return i.node_size > 0 ? absl::StrCat(i.node_size) : "unset"; };
    return absl::FailedPreconditionError(absl::StrCat("DDP_NODE_SIZE is ", describe(all[0]), " on rank 0 and ",
                                                      describe(all.back()), " on rank ", all.size() - 1,
                                                      "; give it to all ranks alike (mpirun -x DDP_NODE_SIZE)"));
  }
  return all;
}

NodeLayout LayoutOf(const std::vector<Introduction>& all) {
  std::vector<std::string> hosts;
  hosts.reserve(all.size());
  for (const Introduction& i : all) hosts.push_back(i.host);
  return CutIntoNodes(hosts, all[0].node_size);
}

bool MoreRanksThanCpus(const std::vector<Introduction>& all, int rank) {
  std::set<int> cpus;
  size_t ranks = 0;
  for (const Introduction& i : all) {
    if (i.host != all[static_cast<size_t>(rank)].host) continue;
    cpus.insert(i.cpus.begin(), i.cpus.end());
    ++ranks;
  }
  return !cpus.empty() && cpus.size() < ranks;
}

}  // namespace ddp
