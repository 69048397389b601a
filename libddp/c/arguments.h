// SPDX-License-Identifier: Apache-2.0
// What the functions of ddp/ddp_c.h have in common: errors as codes, and arguments that are checked before C++ sees
// them.
#ifndef LIBDDP_C_ARGUMENTS_H_
#define LIBDDP_C_ARGUMENTS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <new>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "ddp/ddp_c.h"
#include "ddp/types.h"

namespace ddp::c {

// Keeps `status` for ddp_error and ddp_failed_ranks of this thread if it is an error, and returns its code.
ddp_status Told(const absl::Status& status) noexcept;

// The outcome of a callback of the program: its own error if ddp_fail or a call of the library made it.
absl::Status OfCallback(ddp_status code, const char* what);
void ForgetError() noexcept;

// Runs `f`, which returns a Status. Nothing is thrown out of it.
template <typename F>
ddp_status Guard(F f) noexcept {
  try {
    return Told(f());
  } catch (const std::bad_alloc&) {
    return Told(absl::ResourceExhaustedError("the process is out of memory"));
  } catch (const std::exception& e) {
    return Told(absl::InternalError(e.what()));
  } catch (...) {
    return Told(absl::InternalError("an exception of unknown type"));
  }
}

// Collects what is wrong with the arguments of a call: the first mistake counts.
class Arguments {
 public:
  Arguments& Need(const void* pointer, const char* name) {
    if (pointer == nullptr) Refuse(name, " is null");
    return *this;
  }

  // Where a handle goes: null until the call has succeeded.
  template <typename T>
  Arguments& Result(T** where, const char* name) {
    if (where != nullptr) *where = nullptr;
    return Need(where, name);
  }

  // A copy of the options, with zeros for what the program's version of the struct does not have.
  template <typename T>
  T Options(const T* given, const char* type) {
    T options = {};
    if (given == nullptr) return options;
    size_t size = 0;
    std::memcpy(&size, given, sizeof size);
    if (size < sizeof size) {
      Refuse(type, ".size is ", size, ": set it to sizeof(", type, ")");
      return options;
    }
    const auto* const bytes = reinterpret_cast<const char*>(given);
    if (size > sizeof options && std::any_of(bytes + sizeof options, bytes + size, [](char c) { return c != 0; })) {
      Refuse(type, " has a member that libddp ", DDP_VERSION, " does not know: update the library that is linked");
    }
    std::memcpy(&options, bytes, std::min(size, sizeof options));
    return options;
  }

  DType Type(ddp_dtype dtype);
  ReduceOp Op(ddp_reduce_op op);
  Device OfDevice(ddp_device device);
  Buffer One(const ddp_buffer& buffer);
  std::vector<Buffer> Ranges(const ddp_buffer* buffers, size_t count, const char* name);

  bool ok() const { return status_.ok(); }
  const absl::Status& status() const { return status_; }

  template <typename... Parts>
  void Refuse(const Parts&... parts) {
    if (ok()) status_ = absl::InvalidArgumentError(absl::StrCat(parts...));
  }

 private:
  absl::Status status_;
};

// An array of structs, each of the size that the first one states.
template <typename T>
std::vector<T> Structs(Arguments& arguments, const T* first, size_t count, const char* type) {
  std::vector<T> result;
  if (count == 0) return result;
  if (!arguments.Need(first, type).ok()) return result;
  size_t stride = 0;
  std::memcpy(&stride, first, sizeof stride);
  for (size_t i = 0; i < count && arguments.ok(); ++i) {
    result.push_back(
        arguments.Options(reinterpret_cast<const T*>(reinterpret_cast<const char*>(first) + i * stride), type));
    if (result.back().size != stride) arguments.Refuse(type, " ", i, " has another size than the first one");
  }
  return result;
}

ddp_device ToC(Device device);
ddp_buffer ToC(const Buffer& buffer);
// Stores up to `capacity` of them if `result` is not null, and returns how many there are.
size_t ToC(absl::Span<const Buffer> buffers, ddp_buffer* result, size_t capacity);

Stream OnDevice(Device device, void* stream);
inline const char* OrEmpty(const char* text) { return text == nullptr ? "" : text; }

// A copy that ddp_free frees.
void* CopyForC(const void* bytes, size_t count);

// 0: ten minutes.
absl::Time Deadline(double seconds);

}  // namespace ddp::c

#endif  // LIBDDP_C_ARGUMENTS_H_
