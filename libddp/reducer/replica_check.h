// SPDX-License-Identifier: Apache-2.0
// Whether all ranks still hold the same values, found out now and then.
#ifndef LIBDDP_REDUCER_REPLICA_CHECK_H_
#define LIBDDP_REDUCER_REPLICA_CHECK_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "ddp/process_group.h"
#include "ddp/types.h"
#include "libddp/base/owner_process.h"
#include "libddp/device/device_runtime.h"

namespace ddp {

// How long a model that goes waits for its GPU after the group has failed.
inline constexpr int64_t kLeaveFailedNs = 1'000'000'000;

// Something that is equal on all ranks, or should be.
struct Replica {
  std::string name;  // "parameter 'x'"
  Buffer data;
};

// One check is under way at a time. It begins in one step, where each rank hashes what it has, and its result is looked
// at in a later one, when the exchange of the hashes has long been done. All ranks make the same calls at the same
// steps. In a world of one nothing happens.
//
// Not thread-safe.
class ReplicaCheck {
 public:
  // Every so many steps, from step 0 on; 0: never.
  explicit ReplicaCheck(int64_t every) : every_(every) {}
  ~ReplicaCheck() { Drop(); }

  bool Due(int64_t step) const { return every_ > 0 && step % every_ == 0; }

  // Hashes `replicas`, on a GPU in the order of `stream`, and begins the exchange. Only ranks with `compared` are held
  // against each other. The check before has to be over.
  absl::Status Begin(ProcessGroup& group, int64_t step, bool compared, std::vector<Replica> replicas, Stream stream);
  // On a GPU: brings the hashes of all ranks to the host, in the order of `stream`.
  absl::Status Fetch(Stream stream);
  // Waits for the check under way, if there is one. *divergence: FailedPrecondition where ranks differ, the same on all
  // ranks. Returns what the group has failed with; DeadlineExceeded once give_up() is true.
  absl::Status Finish(
      absl::Status* divergence, absl::FunctionRef<bool()> give_up = [] { return false; });
  // The GPU may use its memory for ever, which is kept.
  void Forsake() {
    under_way_ = false;
    KeepForever(std::shared_ptr<DeviceArrays>(std::move(arrays_)));
  }
  // Forgets the check under way; waits until nothing works on its memory any more, which is kept if the group has
  // failed and the GPU does not come free.
  void Drop();
  // Before another group: forgets earlier checks, too.
  void Reset() {
    Drop();
    arrays_.reset();
    equal_at_ = -1;
  }

 private:
  // On a GPU: where its kernels put hashes, and what the host reads and writes of it. Hashes as below.
  struct DeviceArrays {
    Allocation mine, all;          // the group's: it knows when no operation has them any more
    std::shared_ptr<void> pinned;  // this rank's, then those of all
    size_t words = 0;              // of one rank
    size_t ranks = 0;
    OwnedEvent fetched;

    uint64_t* pinned_all() const { return static_cast<uint64_t*>(pinned.get()) + words; }
  };

  absl::Status HashOnGpu(ProcessGroup& group, absl::Span<const size_t> order, size_t on_host, Stream stream);
  absl::Status MakeArrays(ProcessGroup& group, Device device);
  absl::Status Compare() const;

  const int64_t every_;
  bool under_way_ = false;
  bool on_gpu_ = false;
  int64_t step_ = 0;       // of the check under way
  int64_t equal_at_ = -1;  // the last step in which all were equal
  std::vector<Replica> replicas_;
  std::vector<size_t> word_of_;  // by replica: which word of a rank's hashes is its own
  std::vector<uint64_t> mine_;   // 1 if this rank is compared, then the hashes
  std::vector<uint64_t> all_;    // of all ranks, in rank order
  size_t ranks_ = 0;
  Work exchange_;
  std::unique_ptr<DeviceArrays> arrays_;
};

}  // namespace ddp

#endif  // LIBDDP_REDUCER_REPLICA_CHECK_H_
