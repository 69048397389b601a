// SPDX-License-Identifier: Apache-2.0
// How ranks that are threads of one process come by an object that one of them has made.
#ifndef LIBDDP_BASE_AMONG_THREADS_H_
#define LIBDDP_BASE_AMONG_THREADS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

namespace ddp {

// Thread-safe. Whoever made an object may have let go of it by the time its number has come to the others, because it
// has met a failure.
template <typename T>
class AmongThreads {
 public:
  // A number for the others, which no other object has had.
  static uint64_t Publish(const std::shared_ptr<T>& object) {
    Table& t = table();
    const std::lock_guard<std::mutex> lock(t.mutex);
    std::erase_if(t.objects, [](const auto& entry) { return entry.second.expired(); });
    t.objects[++t.last] = object;
    return t.last;
  }

  // Null where the object is gone.
  static std::shared_ptr<T> Find(uint64_t number) {
    Table& t = table();
    const std::lock_guard<std::mutex> lock(t.mutex);
    const auto found = t.objects.find(number);
    return found == t.objects.end() ? nullptr : found->second.lock();
  }

 private:
  struct Table {
    std::mutex mutex;
    uint64_t last = 0;
    std::map<uint64_t, std::weak_ptr<T>> objects;
  };
  // Never destroyed: threads may outlive the static objects.
  static Table& table() {
    static Table& table = *new Table;
    return table;
  }
};

}  // namespace ddp

#endif  // LIBDDP_BASE_AMONG_THREADS_H_
