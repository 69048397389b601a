#include "tests/support/fake_nccl.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "libddp/device/cpu_reduce.h"
#include "tests/support/fake_devices.h"

namespace ddp::nccl {

struct WindowOpaque {};

// One rank's communicator.
struct CommOpaque {
  std::string world;
  int rank = 0;
  int size = 1;
  int device = 0;
  bool aborted = false;
  bool blocking = true;
  bool hanging = false;  // in the start of one that does not block
  uint64_t collectives = 0;
  Result async_error = kSuccess;
};

}  // namespace ddp::nccl

namespace ddp::testing {
namespace {

using nccl::Comm;
using nccl::CommOpaque;
using nccl::Result;

constexpr int kFirstPremultiplied = 100;

struct Planned {
  FakeNccl::Mishap mishap;
  Result result;
  int skip;
};

// What ranks bring to one collective call.
struct Meeting {
  int arrived = 0, grouped = 0, left = 0;
  std::vector<std::vector<char>> in;
};

// What one rank has sent to another.
struct Letter {
  std::vector<char> bytes;
  bool registered = false;
};

struct State {
  FakeNccl* owner = nullptr;
  int version = 0;
  std::mutex mutex;
  std::condition_variable changed;
  bool ending = false;
  uint64_t ids = 0;
  std::map<std::string, int> joined;
  std::map<std::pair<std::string, uint64_t>, Meeting> meetings;
  std::map<std::pair<std::string, std::pair<int, int>>, std::deque<Letter>> mail;
  std::map<const char*, size_t> registered;  // bytes
  std::map<std::pair<std::string, int>, Planned> plans;
  std::map<std::string, int> calls;
  std::map<int, double> factors;
  std::map<int, int> last_op;
  std::vector<std::unique_ptr<CommOpaque>> comms;
  int next_op = kFirstPremultiplied;
  int memory = 0, windows = 0, live = 0;
  nccl::WindowOpaque window;
};
State* state = nullptr;

// What one group call enqueues, on one stream.
struct GroupCalls {
  int depth = 0;
  int registered_sums = 0;
  void* stream = nullptr;
  std::vector<std::function<void()>> sends, others;
};
thread_local GroupCalls group;
thread_local double last_cost = 0;

DType FromNccl(nccl::DataType type) {
  for (const DType dtype : {DType::kFloat64, DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kInt64,
                            DType::kInt32, DType::kInt8}) {
    if (nccl::ToNccl(dtype) == type) return dtype;
  }
  return DType::kUInt8;
}

struct Call {
  bool failed = false, stuck = false, corrupt = false;
  Result result = nccl::kSuccess;
};

// Counts the call, and does what is planned for it.
Call Enter(const char* function, int rank, Comm comm) {
  State* const mine = state;  // who hangs may wake up in another test
  Call call;
  call.result = mine->owner->fail(function, FakeDevices::ThreadDevice());
  call.failed = call.result != nccl::kSuccess;
  std::unique_lock<std::mutex> lock(mine->mutex);
  ++state->calls[function];
  if (call.failed) return call;
  const auto plan = state->plans.find({function, rank});
  if (plan == state->plans.end() || plan->second.skip-- > 0) return call;
  const Planned planned = plan->second;
  state->plans.erase(plan);
  call.result = planned.result;
  switch (planned.mishap) {
    case FakeNccl::Mishap::kFail:
      call.failed = true;
      break;
    case FakeNccl::Mishap::kHang:
      mine->changed.wait(lock, [&] { return mine->ending || (comm != nullptr && comm->aborted); });
      call.failed = true;
      break;
    case FakeNccl::Mishap::kSlow:
      mine->changed.wait_for(lock, std::chrono::seconds(1), [&] { return mine->ending; });
      break;
    case FakeNccl::Mishap::kStuck:
      call.stuck = true;
      break;
    case FakeNccl::Mishap::kCorrupt:
      call.corrupt = true;
      break;
  }
  return call;
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

// Waits, in a stream, for `ready`; false if the communicator is aborted first.
template <typename Ready>
bool Await(std::unique_lock<std::mutex>& lock, Comm comm, bool stuck, Ready ready) {
  state->changed.wait(lock, [&] { return comm->aborted || (!stuck && ready()); });
  return !comm->aborted;
}

// A collective call: everybody's input, then `finish` with all of them. `in_bytes` may be 0. As NCCL does, it waits for
// ever where some ranks make the call in a group and others do not.
Result Collective(const char* function, Comm comm, void* stream, const void* in, size_t in_bytes, void* out,
                  std::function<void(const std::vector<std::vector<char>>&)> finish) {
  const Call call = Enter(function, comm->rank, comm);
  if (call.failed) return call.result;
  const bool grouped = group.depth > 0;
  const Result added = Add(stream, false, [=] {
    std::unique_lock<std::mutex> lock(state->mutex);
    if (!Await(lock, comm, call.stuck, [] { return true; })) return;  // after an abort the memory may be gone
    const std::pair<std::string, uint64_t> key{comm->world, comm->collectives++};
    Meeting& meeting = state->meetings[key];
    meeting.in.resize(static_cast<size_t>(comm->size));
    const char* const bytes = static_cast<const char*>(in);
    meeting.in[static_cast<size_t>(comm->rank)].assign(bytes, bytes + in_bytes);
    ++meeting.arrived;
    meeting.grouped += grouped ? 1 : 0;
    state->changed.notify_all();
    if (!Await(lock, comm, false, [&] {
          return meeting.arrived == comm->size && (meeting.grouped == 0 || meeting.grouped == comm->size);
        })) {
      return;
    }
    finish(meeting.in);
    if (call.corrupt) ++*static_cast<char*>(out);
    if (++meeting.left == comm->size) state->meetings.erase(key);
  });
  return added == nccl::kSuccess && !comm->blocking ? nccl::kInProgress : added;
}

// The reduction of [begin, begin + count) of everybody's input.
void Reduce(const std::vector<std::vector<char>>& in, size_t begin, size_t count, nccl::DataType type, int op,
            void* out) {
  const DType dtype = FromNccl(type);
  CpuReduceSpec spec{.in = dtype, .out = dtype, .average_over = static_cast<int>(in.size())};
  spec.op = op == nccl::kAvg    ? ReduceOp::kAvg
            : op == nccl::kMin  ? ReduceOp::kMin
            : op == nccl::kMax  ? ReduceOp::kMax
            : op == nccl::kProd ? ReduceOp::kProduct
                                : ReduceOp::kSum;
  if (op >= kFirstPremultiplied) spec.prescale = state->factors.at(op);
  std::vector<const void*> from;
  for (const std::vector<char>& bytes : in) {
    from.push_back(bytes.data() + begin * SizeOf(dtype));
    count = std::min(count, bytes.size() / SizeOf(dtype) - begin);  // ranks may disagree
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
                      const std::vector<char>& from = all[static_cast<size_t>(root)];
                      std::memcpy(out, from.data(), std::min(from.size(), Bytes(count, type)));
                    });
}
Result AllGather(const void* in, void* out, size_t count, nccl::DataType type, Comm comm, void* stream) {
  const bool wrong = Misaligned(in) || Misaligned(out) || (Registered(out) && Bytes(count, type) % 4 != 0);
  return Collective("AllGather", comm, stream, in, Bytes(count, type), out, [=](const auto& all) {
    if (wrong) return;
    for (size_t r = 0; r < all.size(); ++r) {
      std::memcpy(static_cast<char*>(out) + r * Bytes(count, type), all[r].data(), all[r].size());
    }
  });
}

Result Send(const void* in, size_t count, nccl::DataType type, int peer, Comm comm, void* stream) {
  const Call call = Enter("Send", comm->rank, comm);
  if (call.failed) return call.result;
  const bool registered = Registered(in);
  return Add(stream, true, [=] {
    std::unique_lock<std::mutex> lock(state->mutex);
    if (!Await(lock, comm, call.stuck, [] { return true; })) return;  // after an abort the memory may be gone
    const char* const bytes = static_cast<const char*>(in);
    state->mail[{comm->world, {comm->rank, peer}}].push_back({{bytes, bytes + Bytes(count, type)}, registered});
    state->changed.notify_all();
  });
}
Result Recv(void* out, size_t count, nccl::DataType type, int peer, Comm comm, void* stream) {
  const Call call = Enter("Recv", comm->rank, comm);
  if (call.failed) return call.result;
  const bool registered = Registered(out);
  return Add(stream, false, [=] {
    std::unique_lock<std::mutex> lock(state->mutex);
    auto& mail = state->mail[{comm->world, {peer, comm->rank}}];
    // As NCCL does, it waits for ever for a message of another size than was sent, and where only one of the two sides
    // is registered. A message to itself is a copy.
    if (!Await(lock, comm, call.stuck, [&] {
          return !mail.empty() && mail.front().bytes.size() == Bytes(count, type) &&
                 (peer == comm->rank || mail.front().registered == registered);
        })) {
      return;
    }
    std::memcpy(out, mail.front().bytes.data(), Bytes(count, type));
    mail.pop_front();
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
  std::snprintf(id->internal, sizeof id->internal, "world %d", static_cast<int>(++state->ids));
  return nccl::kSuccess;
}

Result CommInitRankConfig(Comm* comm, int ranks, nccl::UniqueId id, int rank, nccl::Config* config) {
  const bool blocking = config->blocking != 0;
  State* const mine = state;
  const Call call = Enter("CommInitRankConfig", rank, nullptr);
  if (call.failed) return call.result;
  std::unique_lock<std::mutex> lock(mine->mutex);
  if (!call.stuck) ++mine->joined[id.internal];
  mine->changed.notify_all();
  if (blocking) {
    mine->changed.wait(lock, [&] { return mine->ending || mine->joined[id.internal] == ranks; });
    if (mine->ending) return nccl::kRemoteError;
  }
  mine->comms.push_back(std::make_unique<CommOpaque>());
  *comm = mine->comms.back().get();
  (*comm)->world = id.internal;
  (*comm)->rank = rank;
  (*comm)->size = ranks;
  (*comm)->device = FakeDevices::ThreadDevice();
  (*comm)->blocking = blocking;
  (*comm)->hanging = call.stuck;
  ++mine->live;
  return blocking ? nccl::kSuccess : nccl::kInProgress;
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
Result CommDestroy(Comm) {
  const std::lock_guard<std::mutex> lock(state->mutex);
  --state->live;
  return nccl::kSuccess;
}
Result CommAbort(Comm comm) {
  State* const mine = state;
  const Call call = Enter("CommAbort", comm->rank, nullptr);
  const std::lock_guard<std::mutex> lock(mine->mutex);
  --mine->live;
  comm->aborted = true;
  mine->changed.notify_all();
  return call.result;
}
Result CommGetAsyncError(Comm comm, Result* error) {
  const std::lock_guard<std::mutex> lock(state->mutex);
  *error = comm->async_error;
  const bool connected = !comm->hanging && state->joined[comm->world] == comm->size;
  if (*error == nccl::kSuccess && !connected) *error = nccl::kInProgress;
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
  *op = state->next_op++;
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
  *window = &state->window;
  return nccl::kSuccess;
}
Result CommWindowDeregister(Comm, nccl::Window) {
  const std::lock_guard<std::mutex> lock(state->mutex);
  --state->windows;
  return nccl::kSuccess;
}

int Read(int State::*number) {
  const std::lock_guard<std::mutex> lock(state->mutex);
  return state->*number;
}

}  // namespace

FakeNccl::FakeNccl(int version) {
  // Never freed, and reachable: threads that hung in a call look at theirs once more.
  static auto* const all = new std::vector<std::unique_ptr<State>>;
  state = all->emplace_back(std::make_unique<State>()).get();
  state->owner = this;
  state->version = version;
}

FakeNccl::~FakeNccl() {
  const std::lock_guard<std::mutex> lock(state->mutex);
  state->ending = true;
  for (const auto& comm : state->comms) comm->aborted = true;
  state->changed.notify_all();
}

nccl::Api FakeNccl::api() const {
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
  if (state->version >= 21900) {
    api.MemAlloc = MemAlloc;
    api.MemFree = MemFree;
  }
  api.CommWindowRegister = CommWindowRegister;
  api.CommWindowDeregister = CommWindowDeregister;
  return api;
}

void FakeNccl::Plan(const std::string& function, int rank, Mishap mishap, nccl::Result result, int skip) {
  const std::lock_guard<std::mutex> lock(state->mutex);
  state->plans[{function, rank}] = {mishap, result, skip};
}

void FakeNccl::SetAsyncError(int rank, nccl::Result error) {
  const std::lock_guard<std::mutex> lock(state->mutex);
  for (const auto& comm : state->comms) {
    if (comm->rank == rank) comm->async_error = error;
  }
}

double FakeNccl::LastCost() { return last_cost; }

int FakeNccl::Calls(const std::string& function) const {
  const std::lock_guard<std::mutex> lock(state->mutex);
  return state->calls[function];
}
int FakeNccl::live_memory() const { return Read(&State::memory); }
int FakeNccl::live_windows() const { return Read(&State::windows); }
int FakeNccl::live_comms() const { return Read(&State::live); }
int FakeNccl::last_op(int rank) const {
  const std::lock_guard<std::mutex> lock(state->mutex);
  return state->last_op.at(rank);
}

}  // namespace ddp::testing
