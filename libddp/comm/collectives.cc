// SPDX-License-Identifier: Apache-2.0
#include "ddp/collectives.h"

#include <numeric>

#include "libddp/comm/base/exchange.h"

namespace ddp {
namespace {

template <typename T>
absl::StatusOr<T> ReduceOne(ProcessGroup& group, T value, DType dtype, ReduceOp op) {
  const Buffer buffer{&value, 1, dtype, {}};
  if (absl::Status s = group.AllReduce(buffer, buffer, {.op = op}).Wait(); !s.ok()) return s;
  return value;
}

Buffer Bytes(std::string& bytes) { return {bytes.data(), bytes.size(), DType::kUInt8, {}}; }

}  // namespace

absl::StatusOr<std::string> BroadcastBytes(ProcessGroup& group, absl::string_view bytes, int root) {
  std::string result;
  if (group.rank() == root) result = std::string(bytes);
  uint64_t size = result.size();
  const Buffer length{&size, sizeof size, DType::kUInt8, {}};
  if (absl::Status s = group.Broadcast(length, root).Wait(); !s.ok()) return s;
  result.resize(size);
  const Buffer buffer = Bytes(result);
  if (absl::Status s = group.Broadcast(buffer, root).Wait(); !s.ok()) return s;
  return result;
}

absl::StatusOr<std::vector<std::string>> GatherStrings(ProcessGroup& group, absl::string_view mine) {
  const absl::StatusOr<std::vector<size_t>> counts = Exchange(group, mine.size());
  if (!counts.ok()) return counts.status();
  std::string own(mine), all(std::accumulate(counts->begin(), counts->end(), size_t{0}), '\0');
  const Buffer in = Bytes(own), out = Bytes(all);
  if (absl::Status s = group.AllGather(in, out, *counts).Wait(); !s.ok()) return s;
  std::vector<std::string> strings;
  size_t at = 0;
  for (const size_t count : *counts) {
    strings.push_back(all.substr(at, count));
    at += count;
  }
  return strings;
}

absl::StatusOr<double> AllReduceScalar(ProcessGroup& group, double value, ReduceOp op) {
  return ReduceOne(group, value, DType::kFloat64, op);
}

absl::StatusOr<int64_t> AllReduceScalar(ProcessGroup& group, int64_t value, ReduceOp op) {
  return ReduceOne(group, value, DType::kInt64, op);
}

}  // namespace ddp
