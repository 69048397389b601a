#include "ddp/collectives.h"

#include <algorithm>
#include <memory>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "libddp/comm/base/exchange.h"
#include "libddp/comm/base/range_list.h"
#include "libddp/comm/base/validate.h"

namespace ddp {
namespace {

// Above those that programs may use.
constexpr int kGatherTag = 1 << 30, kScatterTag = kGatherTag + 1;

// The elements [first, first + count) of a list of ranges.
std::vector<Buffer> Part(Buffers buffers, size_t first, size_t count) {
  std::vector<Buffer> part;
  for (const Buffer& b : buffers) {
    const size_t begin = std::min(first, b.count), end = std::min(first + count, b.count);
    if (begin < end) {
      part.push_back({static_cast<char*>(b.data) + begin * SizeOf(b.dtype), end - begin, b.dtype, b.device});
    }
    first -= begin;
    count -= end - begin;
  }
  if (part.empty()) part.push_back({nullptr, 0, buffers[0].dtype, buffers[0].device});
  return part;
}

// Moves the parts of `whole`, on root, from or to `mine` on every rank.
absl::Status Move(ProcessGroup& group, absl::string_view call, Buffers whole, Buffers mine, int root, bool gather) {
  const CallCheck check(group.rank(), group.size(), call);
  Extent one, all;
  if (absl::Status s = check.Root(root); !s.ok()) return s;
  if (absl::Status s = check.CheckBuffers(gather ? "in" : "out", mine, &one); !s.ok()) return s;
  const int tag = gather ? kGatherTag : kScatterTag;
  if (group.rank() != root) return (gather ? group.Send(mine, root, tag) : group.Recv(mine, root, tag)).Wait();
  const size_t size = static_cast<size_t>(group.size());
  if (absl::Status s = check.CheckBuffers(gather ? "out" : "in", whole, &all); !s.ok()) return s;
  if (all.dtype != one.dtype) return check.Error("in and out have different types");
  if (all.count != one.count * size) {
    return check.Error(absl::StrCat(gather ? "out" : "in", " has ", all.count, " elements; ", size, " ranks with ",
                                    one.count, " each need ", one.count * size));
  }
  absl::Status status = group.status();
  std::vector<Work> works;
  for (int r = 0; r < group.size() && status.ok(); ++r) {
    const std::vector<Buffer> part = Part(whole, one.count * static_cast<size_t>(r), one.count);
    if (r == root) {
      const RangeList from = Ranges(gather ? mine : part), to = Ranges(gather ? part : mine);
      from.CopyTo(0, to, 0, from.bytes());
      continue;
    }
    works.push_back(gather ? group.Recv(part, r, tag) : group.Send(part, r, tag));
    status = works.back().call_status();
  }
  for (Work& work : works) status.Update(work.Wait());
  return status;
}

template <typename T>
absl::StatusOr<T> ReduceOne(ProcessGroup& group, T value, DType dtype, ReduceOp op) {
  const Buffer buffer{&value, 1, dtype, {}};
  if (absl::Status s = group.AllReduce(buffer, buffer, {.op = op}).Wait(); !s.ok()) return s;
  return value;
}

Buffer Bytes(std::string& bytes) { return {bytes.data(), bytes.size(), DType::kUInt8, {}}; }

}  // namespace

absl::Status Reduce(ProcessGroup& group, Buffers in, Buffers out, int root, const ReduceOptions& options) {
  const CallCheck check(group.rank(), group.size(), "reduce");
  Extent extent;
  if (absl::Status s = check.Root(root); !s.ok()) return s;
  if (absl::Status s = check.CheckBuffers("in", in, &extent); !s.ok()) return s;
  if (group.rank() == root) {
    Extent result;
    if (absl::Status s = check.CheckBuffers("out", out, &result); !s.ok()) return s;
    return group.AllReduce(in, out, options).Wait();
  }
  // The result's dtype is the root's to say; all ranks must agree on it.
  const DType dtype = out.empty() ? extent.dtype : out[0].dtype;
  const std::unique_ptr<char[]> unused(new char[extent.count * SizeOf(dtype)]);
  const Buffer scratch{unused.get(), extent.count, dtype, {}};
  return group.AllReduce(in, scratch, options).Wait();
}

absl::Status Gather(ProcessGroup& group, Buffers in, Buffers out, int root) {
  return Move(group, "gather", out, in, root, /*gather=*/true);
}

absl::Status Scatter(ProcessGroup& group, Buffers in, Buffers out, int root) {
  return Move(group, "scatter", in, out, root, /*gather=*/false);
}

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
