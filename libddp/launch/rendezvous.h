// SPDX-License-Identifier: Apache-2.0
// The first meeting of the ranks of a group, before it has memory in common: an all-gather of short strings.
#ifndef LIBDDP_LAUNCH_RENDEZVOUS_H_
#define LIBDDP_LAUNCH_RENDEZVOUS_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "ddp/store.h"
#include "libddp/launch/wire.h"

namespace ddp {

// Used by one thread at a time. Calls match by their order.
class Rendezvous {
 public:
  virtual ~Rendezvous() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;

  // Everybody's `mine`, by rank. `what` names the step in errors: DeadlineExceeded says which ranks did not come (over
  // a store) or how many there should be (over MPI).
  virtual absl::StatusOr<std::vector<std::string>> AllGather(absl::string_view mine, absl::string_view what,
                                                             absl::Time deadline) = 0;

  // A wire between these ranks, for those that have no memory in common. After the first AllGather; it may outlive the
  // rendezvous. Unimplemented, with the remedy, where nothing carries it.
  virtual absl::StatusOr<std::unique_ptr<Wire>> OpenWire() = 0;
};

// Over a store. `name` keeps the keys of several groups apart. The first AllGather also checks that all ranks agree on
// `size` and that no two have the same rank (FailedPrecondition, naming the ranks and both values). `called`: how
// errors call the ranks, if not by their numbers here. `find_dead`: asked now and then by who waits, returns the ranks
// that have died, as `called` calls them; those of this rendezvous end it with Unavailable, on every rank. Ranks that
// have died or did not come can be read with FailedRanks.
std::unique_ptr<Rendezvous> CreateStoreRendezvous(std::shared_ptr<Store> store, int rank, int size, std::string name,
                                                  std::vector<int> called = {},
                                                  std::function<std::vector<int>()> find_dead = {});

// What a rendezvous of that name has failed with on some rank, and so fails with on every other; OK if it has not, or
// the store does not tell.
absl::Status StoreRendezvousFailure(Store& store, absl::string_view name);

}  // namespace ddp

#endif  // LIBDDP_LAUNCH_RENDEZVOUS_H_
