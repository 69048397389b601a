// SPDX-License-Identifier: Apache-2.0
// Which memory belongs to which simulated GPU.
#ifndef TESTS_SUPPORT_FAKE_MEMORY_H_
#define TESTS_SUPPORT_FAKE_MEMORY_H_

#include <cstddef>
#include <iterator>
#include <map>
#include <mutex>
#include <utility>

namespace ddp::testing {

inline constexpr int kHost = -1;      // registered host memory, which every device reaches
inline constexpr int kNowhere = 999;  // a device of nobody's

// All memory that devices reach, by its first byte: memory is passed between threads, and addresses are the process's.
class MemoryMap {
 public:
  static MemoryMap& Get() {
    static auto* const map = new MemoryMap;
    return *map;
  }
  void Add(const void* data, size_t bytes, int device) {
    const std::lock_guard<std::mutex> lock(mutex_);
    ranges_[static_cast<const char*>(data)] = {bytes, device};
  }
  void Remove(const void* data) {
    const std::lock_guard<std::mutex> lock(mutex_);
    ranges_.erase(static_cast<const char*>(data));
  }
  // The device that all of it belongs to, or kHost; kNowhere for memory that no device reaches.
  int DeviceOf(const void* data, size_t bytes) {
    const char* const begin = static_cast<const char*>(data);
    const std::lock_guard<std::mutex> lock(mutex_);
    auto after = ranges_.upper_bound(begin);
    if (after == ranges_.begin()) return kNowhere;
    --after;
    return begin + bytes <= after->first + after->second.first ? after->second.second : kNowhere;
  }
  int size() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return static_cast<int>(ranges_.size());
  }

 private:
  std::mutex mutex_;
  std::map<const char*, std::pair<size_t, int>> ranges_;
};

}  // namespace ddp::testing

#endif  // TESTS_SUPPORT_FAKE_MEMORY_H_
