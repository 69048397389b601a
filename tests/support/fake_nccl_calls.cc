// SPDX-License-Identifier: Apache-2.0
// NCCL's functions, as FakeNccl does them on simulated GPUs.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <optional>

#include "absl/strings/str_cat.h"
#include "libddp/device/cpu_reduce.h"
#include "tests/support/fake_devices.h"
#include "tests/support/fake_nccl_state.h"

namespace ddp::testing::fake_nccl {
namespace {

using nccl::Comm;
using nccl::CommOpaque;
using nccl::Result;
using Pieces = std::vector<FakeBoard::Piece>;

constexpr int kFirstPremultiplied = 100;

// What one group call enqueues, on one stream.
struct GroupCalls {
  int depth = 0;
  int registered_sums = 0;
  void* stream = nullptr;
  std::vector<std::function<void()>> sends, others;
};
thread_local GroupCalls group;

DType FromNccl(nccl::DataType type) {
  for (const DType dtype : {DType::kFloat64, DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kInt64,
                            DType::kInt32, DType::kInt8}) {
    if (nccl::ToNccl(dtype) == type) return dtype;
  }
  return DType::kUInt8;
}

Result Flush() {
  if (group.depth > 0) return nccl::kSuccess;
  GroupCalls calls = std::exchange(group, {});
  if (calls.stream == nullptr) return nccl::kSuccess;
  FakeDevices::Enqueue(calls.stream, [calls = std::move(calls)] {
    for (const auto& send : calls.sends) send();
    for (const auto& other : calls.others) other();
  });
  return nccl::kSuccess;
}

Result Add(void* stream, bool send, std::function<void()> what) {
  group.stream = stream;
  (send ? group.sends : group.others).push_back(std::move(what));
  return Flush();
}

// As NCCL does where it is aborted.
void HandOnWhatIsMissing(Comm comm, size_t bytes, const std::function<std::string(int rank)>& key) {
  if (comm->home->ending) return;
  const std::string nothing(bytes, 'Z');
  for (int r = 0; r < comm->size; ++r) {
    comm->home->board->PutIfMissing(key(r), nothing.data(), bytes, comm->size);
  }
  comm->home->changed.notify_all();
}

// Waits, in a stream, for `ready`; false if the communicator is aborted first.
template <typename Ready>
bool Await(std::unique_lock<std::mutex>& lock, Comm comm, bool stuck, Ready ready) {
  comm->home->Wait(lock, [&] { return comm->aborted || (!stuck && ready()); });
  return !comm->aborted;
}

// A collective call: everybody's input, then `finish` with all of them. `in_bytes` may be 0. As NCCL does, it waits for
// ever where some ranks make the call in a group and others do not.
Result Collective(const char* function, Comm comm, void* stream, const void* in, size_t in_bytes, void* out,
                  std::function<void(const Pieces&)> finish) {
  const Call call = Enter(function, comm->rank, comm);
  if (call.failed) return call.result;
  const char* const grouped = group.depth > 0 ? ".group." : ".";
  const Result added = Add(stream, false, [=] {
    std::unique_lock<std::mutex> lock(comm->home->mutex);
    const auto key = [comm, grouped, number = comm->collectives++](int rank) {
      return absl::StrCat(comm->world, ".", number, grouped, rank);
    };
    // After an abort the memory may be gone.
    if (!Await(lock, comm, call.stuck, [] { return true; })) return HandOnWhatIsMissing(comm, in_bytes, key);
    comm->home->board->Put(key(comm->rank), in, in_bytes, comm->size);
    comm->home->changed.notify_all();
    Pieces all;
    if (!Await(lock, comm, false, [&] {
          for (std::optional<FakeBoard::Piece> piece; static_cast<int>(all.size()) < comm->size;) {
            if (piece = comm->home->board->Find(key(static_cast<int>(all.size()))); !piece.has_value()) return false;
            all.push_back(*piece);
          }
          return true;
        })) {
      return HandOnWhatIsMissing(comm, in_bytes, key);
    }
    finish(all);
    if (call.corrupt) ++*static_cast<char*>(out);
    for (int r = 0; r < comm->size; ++r) comm->home->board->Take(key(r));
  });
  return added == nccl::kSuccess && !comm->blocking ? nccl::kInProgress : added;
}

// The reduction of [begin, begin + count) of everybody's input.
void Reduce(const Pieces& in, size_t begin, size_t count, nccl::DataType type, int op, void* out) {
  const DType dtype = FromNccl(type);
  CpuReduceSpec spec{.in = dtype, .out = dtype, .average_over = static_cast<int>(in.size())};
  spec.op = op == nccl::kAvg    ? ReduceOp::kAvg
            : op == nccl::kMin  ? ReduceOp::kMin
            : op == nccl::kMax  ? ReduceOp::kMax
            : op == nccl::kProd ? ReduceOp::kProduct
                                : ReduceOp::kSum;
  if (op >= kFirstPremultiplied) spec.prescale = state->factors.at(op);
  std::vector<const void*> from;
  for (const FakeBoard::Piece& piece : in) {
    from.push_back(piece.data + begin * SizeOf(dtype));
    count = std::min(count, piece.bytes / SizeOf(dtype) - begin);  // ranks may disagree
  }
  CpuReduce::Create(spec).value()(from.data(), static_cast<int>(from.size()), &out, 1, count);
}

size_t Bytes(size_t count, nccl::DataType type) { return count * SizeOf(FromNccl(type)); }

bool Registered(const void* data) {
  const std::lock_guard<std::mutex> lock(state->mutex);
  auto after = state->registered.upper_bound(static_cast<const char*>(data));
  if (after == state->registered.begin()) return false;
  --after;
  return static_cast<const char*>(data) < after->first + after->second;
}

// Where NCCL's symmetric kernels are wrong: registered memory that does not begin at a multiple of 4 bytes.
bool Misaligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % 4 != 0 && Registered(data); }

void NoteOp(Comm comm, int op) {
  const std::lock_guard<std::mutex> lock(state->mutex);
  state->last_op[comm->rank] = std::min(op, kFirstPremultiplied);
}

Result AllReduce(const void* in, void* out, size_t count, nccl::DataType type, int op, Comm comm, void* stream) {
  NoteOp(comm, op);
  last_cost = state->owner->cost(Bytes(count, type), op == nccl::kSum);
  // NCCL 2.32.3 looks for a kernel that it does not have.
  if (op == nccl::kAvg && state->version >= 23003 && IsFloatingPoint(FromNccl(type)) && Registered(out)) {
    return nccl::kUnhandledCudaError;
  }
  // NCCL 2.28.3 makes one kernel of the bare sums of a group, which forgets some.
  const bool forgotten = group.depth > 0 && op == nccl::kSum && state->version >= 22800 && state->version < 22807 &&
                         Registered(out) && ++group.registered_sums > 2;
  const bool wrong = forgotten || Misaligned(in) || Misaligned(out);
  return Collective("AllReduce", comm, stream, in, Bytes(count, type), out, [=](const auto& all) {
    if (!wrong) Reduce(all, 0, count, type, op, out);
  });
}
Result ReduceTo(const void* in, void* out, size_t count, nccl::DataType type, int op, int root, Comm comm,
                void* stream) {
  NoteOp(comm, op);
  return Collective("Reduce", comm, stream, in, Bytes(count, type), out, [=](const auto& all) {
    if (comm->rank == root) Reduce(all, 0, count, type, op, out);
  });
}
Result ReduceScatter(const void* in, void* out, size_t count, nccl::DataType type, int op, Comm comm, void* stream) {
  NoteOp(comm, op);
  const size_t n = static_cast<size_t>(comm->size), r = static_cast<size_t>(comm->rank);
  const bool wrong = Misaligned(in) || Misaligned(out) || (Registered(in) && Bytes(count, type) % 4 != 0);
  return Collective("ReduceScatter", comm, stream, in, Bytes(count * n, type), out, [=](const auto& all) {
    if (!wrong) Reduce(all, r * count, count, type, op, out);
  });
}
Result Broadcast(const void* in, void* out, size_t count, nccl::DataType type, int root, Comm comm, void* stream) {
  return Collective("Broadcast", comm, stream, in, comm->rank == root ? Bytes(count, type) : 0, out,
                    [=](const auto& all) {
                      const FakeBoard::Piece& from = all[static_cast<size_t>(root)];
                      std::memcpy(out, from.data, std::min(from.bytes, Bytes(count, type)));
                    });
}
Result AllGather(const void* in, void* out, size_t count, nccl::DataType type, Comm comm, void* stream) {
  const bool wrong = Misaligned(in) || Misaligned(out) || (Registered(out) && Bytes(count, type) % 4 != 0);
  return Collective("AllGather", comm, stream, in, Bytes(count, type), out, [=](const auto& all) {
    if (wrong) return;
    for (size_t r = 0; r < all.size(); ++r) {
      std::memcpy(static_cast<char*>(out) + r * Bytes(count, type), all[r].data, all[r].bytes);
    }
  });
}

// Of a message between two ranks of a communicator.
std::string MessageKey(Comm comm, int from, int to, uint64_t number) {
  return absl::StrCat(comm->world, ".", from, "to", to, ".", number);
}

// A message tells, in front, whether the memory that it comes from is registered.
Result Send(const void* in, size_t count, nccl::DataType type, int peer, Comm comm, void* stream) {
  const Call call = Enter("Send", comm->rank, comm);
  if (call.failed) return call.result;
  const bool registered = Registered(in);
  return Add(stream, true, [=] {
    std::unique_lock<std::mutex> lock(comm->home->mutex);
    if (!Await(lock, comm, call.stuck, [] { return true; })) return;  // after an abort the memory may be gone
    std::string message(1, registered ? 'r' : 'p');
    message.append(static_cast<const char*>(in), Bytes(count, type));
    comm->home->board->Put(MessageKey(comm, comm->rank, peer, comm->sent[peer]++), message.data(), message.size(), 1);
    comm->home->changed.notify_all();
  });
}
Result Recv(void* out, size_t count, nccl::DataType type, int peer, Comm comm, void* stream) {
  const Call call = Enter("Recv", comm->rank, comm);
  if (call.failed) return call.result;
  const bool registered = Registered(out);
  return Add(stream, false, [=] {
    std::unique_lock<std::mutex> lock(comm->home->mutex);
    const std::string key = MessageKey(comm, peer, comm->rank, comm->received[peer]++);
    std::optional<FakeBoard::Piece> message;
    // As NCCL does, it waits for ever for a message of another size than was sent, and where only one of the two sides
    // is registered. A message to itself is a copy.
    if (!Await(lock, comm, call.stuck, [&] {
          message = comm->home->board->Find(key);
          return message.has_value() && message->bytes == Bytes(count, type) + 1 &&
                 (peer == comm->rank || (message->data[0] == 'r') == registered);
        })) {
      return;
    }
    std::memcpy(out, message->data + 1, Bytes(count, type));
    comm->home->board->Take(key);
  });
}

Result GroupStart() {
  const Call call = Enter("GroupStart", 0, nullptr);
  if (!call.failed) ++group.depth;
  return call.failed ? call.result : nccl::kSuccess;
}
Result GroupEnd() {
  --group.depth;
  const Call call = Enter("GroupEnd", 0, nullptr);
  if (!call.failed) return Flush();
  group = {};
  return call.result;
}

Result GetVersion(int* version) {
  *version = state->version;
  return Enter("GetVersion", 0, nullptr).result;
}
Result GetUniqueId(nccl::UniqueId* id) {
  const Call call = Enter("GetUniqueId", 0, nullptr);
  if (call.failed) return call.result;
  const std::lock_guard<std::mutex> lock(state->mutex);
  std::snprintf(id->internal, sizeof id->internal, "world-%d-%d", static_cast<int>(getpid()),
                static_cast<int>(++state->worlds));
  return nccl::kSuccess;
}

// Whether all ranks have come.
bool Connected(State& mine, Comm comm) {
  for (int r = 0; r < comm->size && !comm->connected; ++r) {
    if (!mine.board->Find(absl::StrCat(comm->world, ".join.", r)).has_value()) return false;
  }
  return comm->connected = true;
}

Result CommInitRankConfig(Comm* comm, int ranks, nccl::UniqueId id, int rank, nccl::Config* config) {
  State* const mine = state;
  const Call call = Enter("CommInitRankConfig", rank, nullptr);
  if (call.failed) return call.result;
  auto made = std::make_unique<CommOpaque>();
  made->home = mine;
  made->world = id.internal;
  made->rank = rank;
  made->size = ranks;
  made->device = FakeDevices::ThreadDevice();
  made->blocking = config->blocking != 0;
  made->hanging = call.stuck;
  std::unique_lock<std::mutex> lock(mine->mutex);
  if (!call.stuck) mine->board->Put(absl::StrCat(made->world, ".join.", rank), "", 0, ranks);
  mine->changed.notify_all();
  if (made->blocking) {
    mine->Wait(lock, [&] { return mine->ending || Connected(*mine, made.get()); });
    if (mine->ending) return nccl::kRemoteError;
  }
  *comm = mine->comms.emplace_back(std::move(made)).get();
  ++mine->live;
  return (*comm)->blocking ? nccl::kSuccess : nccl::kInProgress;
}
Result CommCount(Comm comm, int* ranks) {
  *ranks = comm->size;
  return nccl::kSuccess;
}
Result CommUserRank(Comm comm, int* rank) {
  *rank = comm->rank;
  return nccl::kSuccess;
}
Result CommCuDevice(Comm comm, int* device) {
  *device = comm->device;
  return nccl::kSuccess;
}
Result CommDestroy(Comm comm) {
  const std::lock_guard<std::mutex> lock(comm->home->mutex);
  --comm->home->live;
  return nccl::kSuccess;
}
Result CommAbort(Comm comm) {
  State* const mine = comm->home;
  const Call call = Enter("CommAbort", comm->rank, nullptr);
  const std::lock_guard<std::mutex> lock(mine->mutex);
  --mine->live;
  comm->aborted = true;
  mine->changed.notify_all();
  return call.result;
}
Result CommGetAsyncError(Comm comm, Result* error) {
  const std::lock_guard<std::mutex> lock(comm->home->mutex);
  *error = comm->async_error;
  if (*error == nccl::kSuccess && (comm->hanging || !Connected(*comm->home, comm))) *error = nccl::kInProgress;
  return nccl::kSuccess;
}
const char* GetErrorString(Result result) {
  return result == nccl::kUnhandledCudaError ? "unhandled cuda error" : "some error";
}
const char* GetLastError(Comm) { return "the fake's last words"; }

Result RedOpCreatePreMulSum(int* op, void* scalar, nccl::DataType type, nccl::ScalarResidence, Comm comm) {
  const Call call = Enter("RedOpCreatePreMulSum", comm->rank, comm);
  if (call.failed) return call.result;
  double factor = 0;
  void* to = &factor;
  float narrow = 0;
  if (type == nccl::kFloat64) {
    std::memcpy(to, scalar, sizeof factor);
  } else {
    to = &narrow;
    const void* from = scalar;
    CpuReduce::Create({.in = FromNccl(type), .out = DType::kFloat32}).value()(&from, 1, &to, 1, 1);
    factor = static_cast<double>(narrow);
  }
  const std::lock_guard<std::mutex> lock(state->mutex);
  *op = kFirstPremultiplied + state->ops++;
  state->factors[*op] = factor;
  return nccl::kSuccess;
}
Result RedOpDestroy(int, Comm comm) { return Enter("RedOpDestroy", comm->rank, comm).result; }

Result MemAlloc(void** data, size_t bytes) {
  const Call call = Enter("MemAlloc", 0, nullptr);
  if (call.failed) return call.result;
  *data = std::malloc(bytes);
  std::memset(*data, 0x5a, bytes);
  FakeDevices::AddMemory(*data, bytes);
  const std::lock_guard<std::mutex> lock(state->mutex);
  ++state->memory;
  return nccl::kSuccess;
}
Result MemFree(void* data) {
  {
    const std::lock_guard<std::mutex> lock(state->mutex);
    state->registered.erase(static_cast<const char*>(data));
    --state->memory;
  }
  FakeDevices::FreeMemory(data);
  return nccl::kSuccess;
}
Result CommWindowRegister(Comm comm, void* data, size_t bytes, nccl::Window* window, int flags) {
  const Call call = Enter("CommWindowRegister", comm->rank, comm);
  if (call.failed) return call.result;
  if (flags != nccl::kWinCollSymmetric) return nccl::kInvalidArgument;
  const std::lock_guard<std::mutex> lock(state->mutex);
  if (state->owner->null_windows) return nccl::kSuccess;
  ++state->windows;
  state->registered[static_cast<const char*>(data)] = bytes;
  *window = state->all_windows.emplace_back(std::make_unique<nccl::WindowOpaque>()).get();
  (*window)->data = static_cast<const char*>(data);
  state->window_of[(*window)->data] = *window;
  return nccl::kSuccess;
}
Result CommWindowDeregister(Comm, nccl::Window window) {
  const std::lock_guard<std::mutex> lock(state->mutex);
  --state->windows;
  // The memory may be gone, and others have it.
  const auto found = state->window_of.find(window->data);
  if (found == state->window_of.end() || found->second != window) return nccl::kSuccess;
  state->registered.erase(window->data);
  state->window_of.erase(found);
  return nccl::kSuccess;
}

}  // namespace

nccl::Api Functions(int version) {
  nccl::Api api;
  api.GetVersion = GetVersion;
  api.GetUniqueId = GetUniqueId;
  api.CommInitRankConfig = CommInitRankConfig;
  api.CommCount = CommCount;
  api.CommUserRank = CommUserRank;
  api.CommCuDevice = CommCuDevice;
  api.CommDestroy = CommDestroy;
  api.CommAbort = CommAbort;
  api.CommGetAsyncError = CommGetAsyncError;
  api.GetErrorString = GetErrorString;
  api.GetLastError = GetLastError;
  api.AllReduce = AllReduce;
  api.Reduce = ReduceTo;
  api.Broadcast = Broadcast;
  api.AllGather = AllGather;
  api.ReduceScatter = ReduceScatter;
  api.Send = Send;
  api.Recv = Recv;
  api.GroupStart = GroupStart;
  api.GroupEnd = GroupEnd;
  api.RedOpCreatePreMulSum = RedOpCreatePreMulSum;
  api.RedOpDestroy = RedOpDestroy;
  if (version >= 21900) {
    api.MemAlloc = MemAlloc;
    api.MemFree = MemFree;
  }
  api.CommWindowRegister = CommWindowRegister;
  api.CommWindowDeregister = CommWindowDeregister;
  return api;
}

}  // namespace ddp::testing::fake_nccl
