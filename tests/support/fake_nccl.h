// SPDX-License-Identifier: Apache-2.0
// An NCCL that is none: it does what NCCL does on FakeDevices' streams, between ranks that are threads or processes,
// and what a test tells it to instead: fail, hang, move wrong data. A collective operation that is aborted hands on
// what it has not received: its peers' end as if all had come.
#ifndef TESTS_SUPPORT_FAKE_NCCL_H_
#define TESTS_SUPPORT_FAKE_NCCL_H_

#include <cstddef>
#include <functional>
#include <map>
#include <string>

#include "libddp/comm/nccl/api.h"

namespace ddp::testing {

// One at a time: NCCL's functions have no place for a pointer to it.
class FakeNccl {
 public:
  explicit FakeNccl(int version = 22809);
  // Between processes, which meet in a folder.
  FakeNccl(int version, const std::string& folder);
  ~FakeNccl();

  nccl::Api api() const;

  enum class Mishap {
    kFail,   // the call returns `result`
    kHang,   // the call returns, with an error, when its communicator is aborted; before there is one, with this object
    kStuck,  // what the call enqueues, or the start of a nonblocking communicator, ends only with the abort
    kSlow,   // the call takes a second
    kCorrupt,  // what the call enqueues adds one to the first byte of the result
  };
  // The next call of `function` ("AllReduce") by `rank` goes wrong, after `skip` good ones. GetVersion and the other
  // functions without a communicator have rank 0.
  void Plan(const std::string& function, int rank, Mishap mishap, nccl::Result result = nccl::kInternalError,
            int skip = 0);
  // May make any call fail ("AllReduce"), by the device that is current.
  std::function<nccl::Result(const std::string& function, int device)> fail = [](const std::string&, int) {
    return nccl::kSuccess;
  };
  // What CommGetAsyncError says from now on.
  void SetAsyncError(int rank, nccl::Result error);

  bool null_windows = false;  // CommWindowRegister succeeds without a window
  // How long a sum takes in microseconds, for FakeDevices::elapsed_us.
  std::function<double(size_t bytes, bool bare_sum)> cost = [](size_t, bool) { return 1.0; };
  static double LastCost();  // of this thread's last AllReduce

  int Calls(const std::string& function) const;
  int live_memory() const;      // of MemAlloc, not freed
  int live_windows() const;     // registered and not deregistered
  int live_comms() const;       // neither destroyed nor aborted
  int last_op(int rank) const;  // of the last AllReduce, Reduce or ReduceScatter; kSum ... kAvg, or 100: premultiplied
};

}  // namespace ddp::testing

#endif  // TESTS_SUPPORT_FAKE_NCCL_H_
