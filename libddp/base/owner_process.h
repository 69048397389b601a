// Tells the process that made an object from those that have a copy of it by fork.
#ifndef LIBDDP_BASE_OWNER_PROCESS_H_
#define LIBDDP_BASE_OWNER_PROCESS_H_

#include <unistd.h>

#include <memory>

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

// What `owner` owns is never destroyed.
template <typename T>
void KeepForever(const std::shared_ptr<T>& owner) {
  new std::shared_ptr<T>(owner);
}

}  // namespace ddp

#endif  // LIBDDP_BASE_OWNER_PROCESS_H_
