// SPDX-License-Identifier: Apache-2.0
// One rank of a container test: moves data in every way that depends on where its peers run, and checks what arrives.
// Prints "done", or a line "code: message" with the first error. The victim, if there is one, then ends without a word.
#include <sched.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "libddp/comm/health/peer_board.h"
#include "tests/fault/flags.h"

namespace ddp::testing {
namespace {

constexpr size_t kCount = 262'144;

int32_t Value(int rank, size_t i) { return 1000 * rank + static_cast<int32_t>(i % 997); }

// Of ranks 0 .. size - 1.
int32_t Sum(int size, size_t i) { return 500 * size * (size - 1) + size * static_cast<int32_t>(i % 997); }

template <typename Expected>
absl::Status Check(const int32_t* data, const std::string& what, Expected expected) {
  size_t wrong = 0;
  for (size_t i = 0; i < kCount; ++i) wrong += data[i] != expected(i) ? 1 : 0;
  return wrong == 0 ? absl::OkStatus() : absl::DataLossError(absl::StrCat(what, ": ", wrong, " elements are wrong"));
}

absl::Status CheckAllReduce(ProcessGroup& group, int32_t* data, const std::string& what) {
  const Buffer buffer{data, kCount, DType::kInt32, {}};
  for (int round = 0; round < 3; ++round) {
    for (size_t i = 0; i < kCount; ++i) data[i] = Value(group.rank(), i);
    if (absl::Status s = group.AllReduce(buffer, buffer).Wait(); !s.ok()) return s;
    if (absl::Status s = Check(data, what, [&](size_t i) { return Sum(group.size(), i); }); !s.ok()) return s;
  }
  return absl::OkStatus();
}

// Each rank sends to the next one.
absl::Status CheckMessages(ProcessGroup& group, int32_t* out, int32_t* in, const std::string& what) {
  const int n = group.size(), from = (group.rank() + n - 1) % n;
  for (size_t i = 0; i < kCount; ++i) {
    out[i] = Value(group.rank(), i);
    in[i] = -1;
  }
  const Buffer sent{out, kCount, DType::kInt32, {}}, received{in, kCount, DType::kInt32, {}};
  Work send = group.Send(sent, (group.rank() + 1) % n, 0);
  if (absl::Status s = group.Recv(received, from, 0).Wait(); !s.ok()) return s;
  if (absl::Status s = std::move(send).Wait(); !s.ok()) return s;
  return Check(in, what, [&](size_t i) { return Value(from, i); });
}

absl::Status CheckGroup(ProcessGroup& group, const std::string& name) {
  std::vector<int32_t> a(kCount), b(kCount);
  if (absl::Status s = CheckAllReduce(group, a.data(), name + ", ordinary memory"); !s.ok()) return s;
  if (absl::Status s = CheckMessages(group, a.data(), b.data(), name + ", messages"); !s.ok()) return s;
  absl::StatusOr<Allocation> memory = group.Allocate(2 * kCount * sizeof(int32_t), Device{});
  if (!memory.ok()) return memory.status();
  auto* const data = static_cast<int32_t*>(memory->data());
  if (absl::Status s = CheckAllReduce(group, data, name + ", allocated memory"); !s.ok()) return s;
  return CheckMessages(group, data, data + kCount, name + ", messages in allocated memory");
}

// The board of ranks whose containers share no memory: as in two pods, of two host names, or of one. Each rank has its
// own.
absl::Status CheckBoard(ProcessGroup& group, const std::string& kind) {
  const std::string name = absl::StrCat("pod", group.rank());
  if (kind == "pods" && (unshare(CLONE_NEWUTS) != 0 || sethostname(name.data(), name.size()) != 0)) {
    return absl::PermissionDeniedError("a host name of its own");
  }
  if (kind == "memfd") setenv("DDP_SHARED_MEMORY", "memfd", 1);
  absl::StatusOr<std::unique_ptr<PeerBoard>> board = PeerBoard::Create(group);
  if (!board.ok()) return board.status();
  if (const std::vector<int> missing = (*board)->Missing(0); missing != std::vector<int>{group.rank()}) {
    return absl::InternalError(absl::StrCat("on the board: ranks ", absl::StrJoin(missing, ", ")));
  }
  return absl::OkStatus();
}

absl::Status Run(const Flags& flags) {
  absl::StatusOr<std::shared_ptr<Store>> store = OpenStore(flags);
  if (!store.ok()) return store.status();
  absl::StatusOr<std::unique_ptr<Context>> context = Join(flags, *store);
  if (!context.ok()) return context.status();
  ProcessGroup& world = (*context)->world();
  if (absl::Status s = CheckGroup(world, "world"); !s.ok()) return s;
  absl::StatusOr<std::unique_ptr<ProcessGroup>> part = world.Split(0, -world.rank());
  if (!part.ok()) return part.status();
  if (absl::Status s = CheckGroup(**part, "split"); !s.ok()) return s;
  if (const std::string board = flags.Text("board"); !board.empty()) return CheckBoard(world, board);
  const int victim = flags.Number("victim", -1);
  if (victim < 0) return absl::OkStatus();
  if (victim == world.rank()) _exit(0);
  // The part's ranks are the world's in reverse order.
  if (const absl::Status s = (*part)->Barrier().Wait(); !absl::IsUnavailable(s)) {
    return absl::InternalError(absl::StrCat("expected the part to miss rank ", victim, ": ", s.ToString()));
  }
  return world.Barrier().Wait();
}

}  // namespace
}  // namespace ddp::testing

int main(int argc, char** argv) {
  const absl::Status status = ddp::testing::Run(ddp::testing::Flags(argc, argv));
  ddp::testing::Report(status);
  return status.ok() ? 0 : 1;
}
