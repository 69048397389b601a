// SPDX-License-Identifier: Apache-2.0
// Tells the process that made an object from those that have a copy of it by fork.
#ifndef LIBDDP_BASE_OWNER_PROCESS_H_
#define LIBDDP_BASE_OWNER_PROCESS_H_

#include <unistd.h>

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace ddp {

// A child has its parent's objects, but not the threads that serve them, and it does not speak for the parent's rank:
// its destructors must not tell the peers anything, nor wait for anybody. A member of what has such a destructor.
class OwnerProcess {
 public:
  OwnerProcess() : pid_(getpid()) {}
  bool IsHere() const { return pid_ == getpid(); }

 private:
  const pid_t pid_;
};

// What `owner` owns is never destroyed. It stays reachable, so that leak checkers do not report it.
inline void KeepForever(std::shared_ptr<const void> owner) {
  static auto* const mutex = new std::mutex;
  static auto* const kept = new std::vector<std::shared_ptr<const void>>;
  const std::lock_guard<std::mutex> lock(*mutex);
  kept->push_back(std::move(owner));
}

}  // namespace ddp

#endif  // LIBDDP_BASE_OWNER_PROCESS_H_
