// SPDX-License-Identifier: Apache-2.0
// What the parts of FakeNccl share.
#ifndef TESTS_SUPPORT_FAKE_NCCL_STATE_H_
#define TESTS_SUPPORT_FAKE_NCCL_STATE_H_

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "libddp/comm/nccl/api.h"
#include "tests/support/fake_board.h"
#include "tests/support/fake_nccl.h"

namespace ddp::testing::fake_nccl {
struct State;
}  // namespace ddp::testing::fake_nccl

namespace ddp::nccl {

struct WindowOpaque {
  const char* data = nullptr;
};

// One rank's communicator.
struct CommOpaque {
  testing::fake_nccl::State* home = nullptr;  // an abort that comes late finds another test's state in `state`
  std::string world;
  int rank = 0;
  int size = 1;
  int device = 0;
  bool aborted = false;
  bool blocking = true;
  bool hanging = false;    // in the start of one that does not block
  bool connected = false;  // all ranks have been seen
  uint64_t collectives = 0;
  std::map<int, uint64_t> sent, received;  // messages by peer
  Result async_error = kSuccess;
};

}  // namespace ddp::nccl

namespace ddp::testing::fake_nccl {

struct Planned {
  FakeNccl::Mishap mishap;
  nccl::Result result;
  int skip;
};

struct State {
  FakeNccl* owner = nullptr;
  int version = 0;
  std::unique_ptr<FakeBoard> board;
  std::mutex mutex;
  std::condition_variable changed;
  bool ending = false;
  uint64_t worlds = 0;
  std::map<const char*, size_t> registered;  // bytes
  std::map<std::pair<std::string, int>, Planned> plans;
  std::map<std::string, int> calls;
  std::map<int, double> factors;
  std::map<int, int> last_op;
  std::vector<std::unique_ptr<nccl::CommOpaque>> comms;
  int ops = 0;  // premultiplied ones
  int memory = 0, windows = 0, live = 0;
  std::vector<std::unique_ptr<nccl::WindowOpaque>> all_windows;
  std::map<const char*, const nccl::WindowOpaque*> window_of;  // by where it begins

  // Waits for `done`, which looks at this state or at the board.
  template <typename Done>
  void Wait(std::unique_lock<std::mutex>& lock, const Done& done) {
    while (!done()) {
      if (board->between_processes()) {
        changed.wait_for(lock, std::chrono::microseconds(50));
      } else {
        changed.wait(lock);
      }
    }
  }
};
extern State* state;
extern thread_local double last_cost;  // see FakeNccl::LastCost

struct Call {
  bool failed = false, stuck = false, corrupt = false;
  nccl::Result result = nccl::kSuccess;
};

// Counts the call, and does what is planned for it.
Call Enter(const char* function, int rank, nccl::Comm comm);

// NCCL's functions, as a version has them.
nccl::Api Functions(int version);

}  // namespace ddp::testing::fake_nccl

#endif  // TESTS_SUPPORT_FAKE_NCCL_STATE_H_
