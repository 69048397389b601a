#include "libddp/comm/base/rooted.h"

#include <memory>
#include <utility>
#include <vector>

#include "libddp/comm/base/joined_work.h"
#include "libddp/comm/base/range_list.h"

namespace ddp {
namespace {

// Above those that programs may use.
constexpr int kGatherTag = 1 << 30, kScatterTag = kGatherTag + 1;

}  // namespace

// The results of the other ranks go to memory that nobody reads.
Work ReduceByAllReduce(ProcessGroup& group, const CheckedCall& call, std::shared_ptr<OrphanedMemory> orphans) {
  if (group.rank() == int{call.key.root}) return group.AllReduce(call.in, call.out, *call.reduce);
  const std::shared_ptr<char[]> unused(new char[call.count * SizeOf(call.key.out)]);
  const Buffer scratch{unused.get(), call.count, call.key.out, {}};
  return JoinWorks({group.AllReduce(call.in, scratch, *call.reduce)}, unused, std::move(orphans));
}

Work MoveByMessages(ProcessGroup& group, const CheckedCall& call) {
  const bool gather = call.key.kind == Call::Kind::kGather;
  const int root = call.key.root, tag = gather ? kGatherTag : kScatterTag;
  if (group.rank() != root) return gather ? group.Send(call.in, root, tag) : group.Recv(call.out, root, tag);
  if (absl::Status s = group.status(); !s.ok()) return s;
  std::vector<Work> works;
  for (int r = 0; r < group.size(); ++r) {
    std::vector<Buffer> part = Slice(gather ? call.out : call.in, call.count * static_cast<size_t>(r), call.count);
    if (part.empty()) part.push_back({nullptr, 0, call.key.in, {}});
    if (r == root) {
      const RangeList from = Ranges(gather ? call.in : part), to = Ranges(gather ? part : call.out);
      from.CopyTo(0, to, 0, from.bytes());
    } else {
      works.push_back(gather ? group.Recv(part, r, tag) : group.Send(part, r, tag));
    }
  }
  return JoinWorks(std::move(works));
}

}  // namespace ddp
