// Small messages between the ranks of a group, in host memory. Each call is collective and waits for its outcome.
#ifndef LIBDDP_REDUCER_EXCHANGE_H_
#define LIBDDP_REDUCER_EXCHANGE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "ddp/process_group.h"

namespace ddp {

// The outcome of an operation: that of the call if it failed, else of waiting.
inline absl::Status Finish(absl::StatusOr<Work> work) { return work.ok() ? work->Wait() : work.status(); }

// `values` as the bytes that operations move.
template <typename T>
Buffer Bytes(absl::Span<T> values) {
  return {values.data(), values.size() * sizeof(T), DType::kUInt8, Device{}};
}

// all[r * mine.size() + i] = rank r's mine[i].
template <typename T>
absl::StatusOr<Work> StartGather(ProcessGroup& group, absl::Span<T> mine, absl::Span<T> all) {
  const Buffer in = Bytes(mine), out = Bytes(all);
  return group.AllGather({&in, 1}, {&out, 1});
}

// Every rank's text, in rank order.
absl::StatusOr<std::vector<std::string>> GatherText(ProcessGroup& group, absl::string_view mine);

template <typename T>
absl::Status BroadcastValues(ProcessGroup& group, absl::Span<T> values, int root) {
  const Buffer buffer = Bytes(values);
  return Finish(group.Broadcast({&buffer, 1}, root));
}

}  // namespace ddp

#endif  // LIBDDP_REDUCER_EXCHANGE_H_
