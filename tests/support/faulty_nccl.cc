// SPDX-License-Identifier: Apache-2.0
// A libnccl.so that hands its calls on to another NCCL, real or simulated, and misbehaves as FAULTY_NCCL tells it to:
//
//   FAULTY_NCCL="AllReduce:error:bytes=524288:p2p;CommInitRankConfig:hang:rank=1"
//
// A fault is a function, what it does, and when it does so. What it does:
//
//   error   returns "unhandled cuda error"
//   hang    does not return
//   stuck   the stream comes to a halt, until the communicator is aborted
//   wrong   spoils the first element of the result
//   slow    takes 30 ms longer
//   old     the version is 2.17.3
//   kill    the process is killed
//
// When: always, or rank=R; bytes=N, of the result; after=N, from the call on that follows N such calls; p2p and no_p2p,
// where NCCL may use P2P or not; probe, in ddp_probe, and program, elsewhere. FAULTY_NCCL_BEHIND names the real NCCL,
// libnccl.so.2 if it is unset.
#include "tests/support/faulty_nccl.h"

#include <dlfcn.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>

namespace ddp::nccl {

extern "C" __attribute__((visibility("default"))) Behind faulty_nccl_behind;

namespace {

constexpr int kSlowUs = 30'000;

// --- the NCCL behind ------------------------------------------------------------------------------------------------

void* Open(const char* name) {
  void* const library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) std::fprintf(stderr, "faulty_nccl: %s\n", dlerror());
  return library;
}

template <typename Function>
void Find(void* library, const char* name, Function** function) {
  *function = reinterpret_cast<Function*>(dlsym(library, name));
}

template <typename Function>
Function* OfDriver(const char* name) {
  static void* const driver = Open("libcuda.so.1");
  Function* function = nullptr;
  Find(driver, name, &function);
  if (function == nullptr) std::abort();
  return function;
}

void CallByCuda(CudaStream stream, void (*what)(void*), void* argument) {
  static auto* const launch = OfDriver<int(CudaStream, void (*)(void*), void*)>("cuLaunchHostFunc");
  if (launch(stream, what, argument) != 0) std::abort();
}
void SpoilByCuda(CudaStream stream, void* data) {
  static auto* const set = OfDriver<int(uintptr_t, unsigned char, size_t, CudaStream)>("cuMemsetD8Async");
  if (set(reinterpret_cast<uintptr_t>(data), 0x5a, 4, stream) != 0) std::abort();
}
void DelayByCuda(CudaStream stream, int us) {
  CallByCuda(
      stream, [](void* argument) { usleep(static_cast<useconds_t>(reinterpret_cast<uintptr_t>(argument))); },
      reinterpret_cast<void*>(static_cast<uintptr_t>(us)));
}

Behind LoadBehind() {
  Behind behind;
  const char* const name = std::getenv("FAULTY_NCCL_BEHIND");
  void* const library = Open(name == nullptr ? "libnccl.so.2" : name);
  if (library == nullptr) std::abort();
#define FIND(function) Find(library, "nccl" #function, &behind.api.function)
  FIND(GetVersion), FIND(GetUniqueId), FIND(CommInitRankConfig), FIND(CommCount), FIND(CommUserRank);
  FIND(CommCuDevice), FIND(CommDestroy), FIND(CommAbort), FIND(CommGetAsyncError), FIND(GetErrorString);
  FIND(GetLastError), FIND(AllReduce), FIND(Reduce), FIND(Broadcast), FIND(AllGather), FIND(ReduceScatter), FIND(Send);
  FIND(Recv), FIND(GroupStart), FIND(GroupEnd), FIND(RedOpCreatePreMulSum), FIND(RedOpDestroy), FIND(MemAlloc);
  FIND(MemFree), FIND(CommWindowRegister), FIND(CommWindowDeregister);
  behind.Call = CallByCuda;
  behind.Spoil = SpoilByCuda;
  behind.Delay = DelayByCuda;
  return behind;
}

const Behind& Real() {
  if (faulty_nccl_behind.api.GetVersion != nullptr) return faulty_nccl_behind;
  static const Behind loaded = LoadBehind();
  return loaded;
}

// --- faults ---------------------------------------------------------------------------------------------------------

struct Fault {
  std::string function, what;
  int rank = -1, after = 0;
  size_t bytes = 0;  // 0: any
  bool p2p = false, no_p2p = false, probe = false, program = false;
  std::atomic<int> calls{0};
};

bool InProbe() {
  const std::string name = program_invocation_short_name;
  return name.find("probe") != std::string::npos;
}

// A fault that cannot be understood ends the process: a test would wait for it in vain.
void Read(const std::string& text, std::deque<Fault>& faults) {
  Fault& fault = faults.emplace_back();
  std::istringstream words(text);
  std::getline(words, fault.function, ':');
  std::getline(words, fault.what, ':');
  for (std::string word; std::getline(words, word, ':');) {
    const int number = std::atoi(word.substr(word.find('=') + 1).c_str());
    if (word.rfind("rank=", 0) == 0) {
      fault.rank = number;
    } else if (word.rfind("bytes=", 0) == 0) {
      fault.bytes = static_cast<size_t>(number);
    } else if (word.rfind("after=", 0) == 0) {
      fault.after = number;
    } else if (word == "p2p" || word == "no_p2p") {
      (word == "p2p" ? fault.p2p : fault.no_p2p) = true;
    } else if (word == "probe" || word == "program") {
      (word == "probe" ? fault.probe : fault.program) = true;
    } else {
      std::fprintf(stderr, "faulty_nccl: FAULTY_NCCL has '%s'\n", word.c_str());
      std::abort();
    }
  }
}

std::deque<Fault>& Faults() {
  static auto* const faults = [] {
    auto* const read = new std::deque<Fault>;
    const char* const told = std::getenv("FAULTY_NCCL");
    std::istringstream all(told == nullptr ? "" : told);
    for (std::string one; std::getline(all, one, ';');) Read(one, *read);
    return read;
  }();
  return *faults;
}

// What this call does instead of, or beside, what it should; empty: nothing. Does not return from what does not.
std::string Enter(const char* function, int rank, size_t bytes) {
  for (Fault& fault : Faults()) {
    const char* const disabled = std::getenv("NCCL_P2P_DISABLE");
    const bool p2p = disabled == nullptr || *disabled == '0' || *disabled == 0;
    if (fault.function != function || (fault.rank >= 0 && fault.rank != rank) ||
        (fault.bytes > 0 && fault.bytes != bytes) || (fault.p2p && !p2p) || (fault.no_p2p && p2p) ||
        (fault.probe && !InProbe()) || (fault.program && InProbe()) || fault.calls++ < fault.after) {
      continue;
    }
    if (fault.what == "kill") raise(SIGKILL);
    while (fault.what == "hang") pause();
    return fault.what;
  }
  return "";
}

// Of a communicator: streams that have come to a halt.
struct Halt {
  std::mutex mutex;
  std::condition_variable changed;
  bool over = false;
};
std::shared_ptr<Halt> HaltOf(Comm comm, bool over) {
  static auto* const mutex = new std::mutex;
  static auto* const halts = new std::map<Comm, std::shared_ptr<Halt>>;
  const std::lock_guard<std::mutex> lock(*mutex);
  std::shared_ptr<Halt>& halt = (*halts)[comm];
  if (halt == nullptr) halt = std::make_shared<Halt>();
  const std::shared_ptr<Halt> result = halt;
  if (over) halts->erase(comm);
  return result;
}
void Release(Comm comm) {
  const std::shared_ptr<Halt> halt = HaltOf(comm, true);
  const std::lock_guard<std::mutex> lock(halt->mutex);
  halt->over = true;
  halt->changed.notify_all();
}
void Stop(CudaStream stream, Comm comm) {
  Real().Call(
      stream,
      [](void* argument) {
        const std::unique_ptr<std::shared_ptr<Halt>> halt(static_cast<std::shared_ptr<Halt>*>(argument));
        std::unique_lock<std::mutex> lock((*halt)->mutex);
        (*halt)->changed.wait(lock, [&] { return (*halt)->over; });
      },
      new std::shared_ptr<Halt>(HaltOf(comm, false)));
}

size_t SizeOf(DataType type) {
  switch (type) {
    case kInt8:
    case kUint8:
      return 1;
    case kFloat16:
    case kBfloat16:
      return 2;
    case kInt32:
    case kFloat32:
      return 4;
    default:
      return 8;
  }
}

// An operation on a stream, which `call` hands on.
template <typename HandOn>
Result Operate(const char* function, Comm comm, CudaStream stream, void* out, size_t bytes, HandOn call) {
  int rank = -1;
  Real().api.CommUserRank(comm, &rank);
  const std::string what = Enter(function, rank, bytes);
  if (what == "error") return kUnhandledCudaError;
  if (what == "stuck") {
    Stop(stream, comm);
    return kSuccess;
  }
  if (what == "slow") Real().Delay(stream, kSlowUs);
  Result result = call(Real().api);
  if (what != "wrong") return result;
  while (result == kInProgress) {
    if (Real().api.CommGetAsyncError(comm, &result) != kSuccess) break;
  }
  Real().Spoil(stream, out);
  return result;
}

}  // namespace

// --- the library ----------------------------------------------------------------------------------------------------

extern "C" {

Behind faulty_nccl_behind;

#define EXPORT(type, name, parameters) __attribute__((visibility("default"))) type nccl##name parameters
#define FORWARD(type, name, parameters, arguments) \
  EXPORT(type, name, parameters) { return Real().api.name arguments; }
// What older versions lack.
#define FORWARD_NEW(name, parameters, arguments) \
  EXPORT(Result, name, parameters) { return Real().api.name == nullptr ? kInvalidUsage : Real().api.name arguments; }

EXPORT(Result, GetVersion, (int* version)) {
  const Result result = Real().api.GetVersion(version);
  if (Enter("GetVersion", -1, 0) == "old") *version = 21703;
  return result;
}
EXPORT(Result, GetUniqueId, (UniqueId * id)) {
  return Enter("GetUniqueId", -1, 0) == "error" ? kUnhandledCudaError : Real().api.GetUniqueId(id);
}
EXPORT(Result, CommInitRankConfig, (Comm * comm, int ranks, UniqueId id, int rank, Config* config)) {
  if (Enter("CommInitRankConfig", rank, 0) == "error") return kUnhandledCudaError;
  return Real().api.CommInitRankConfig(comm, ranks, id, rank, config);
}
FORWARD(Result, CommCount, (Comm comm, int* ranks), (comm, ranks))
FORWARD(Result, CommUserRank, (Comm comm, int* rank), (comm, rank))
FORWARD(Result, CommCuDevice, (Comm comm, int* device), (comm, device))
EXPORT(Result, CommDestroy, (Comm comm)) {
  Release(comm);
  return Real().api.CommDestroy(comm);
}
EXPORT(Result, CommAbort, (Comm comm)) {
  Release(comm);
  return Real().api.CommAbort(comm);
}
FORWARD(Result, CommGetAsyncError, (Comm comm, Result* error), (comm, error))
FORWARD(const char*, GetErrorString, (Result result), (result))
FORWARD(const char*, GetLastError, (Comm comm), (comm))
EXPORT(Result, AllReduce,
       (const void* in, void* out, size_t count, DataType type, int op, Comm comm, CudaStream stream)) {
  return Operate("AllReduce", comm, stream, out, count * SizeOf(type),
                 [&](const Api& api) { return api.AllReduce(in, out, count, type, op, comm, stream); });
}
EXPORT(Result, Reduce,
       (const void* in, void* out, size_t count, DataType type, int op, int root, Comm comm, CudaStream stream)) {
  return Operate("Reduce", comm, stream, out, count * SizeOf(type),
                 [&](const Api& api) { return api.Reduce(in, out, count, type, op, root, comm, stream); });
}
EXPORT(Result, Broadcast,
       (const void* in, void* out, size_t count, DataType type, int root, Comm comm, CudaStream stream)) {
  return Operate("Broadcast", comm, stream, out, count * SizeOf(type),
                 [&](const Api& api) { return api.Broadcast(in, out, count, type, root, comm, stream); });
}
EXPORT(Result, AllGather, (const void* in, void* out, size_t count, DataType type, Comm comm, CudaStream stream)) {
  int ranks = 1;
  Real().api.CommCount(comm, &ranks);
  return Operate("AllGather", comm, stream, out, static_cast<size_t>(ranks) * count * SizeOf(type),
                 [&](const Api& api) { return api.AllGather(in, out, count, type, comm, stream); });
}
EXPORT(Result, ReduceScatter,
       (const void* in, void* out, size_t count, DataType type, int op, Comm comm, CudaStream stream)) {
  return Operate("ReduceScatter", comm, stream, out, count * SizeOf(type),
                 [&](const Api& api) { return api.ReduceScatter(in, out, count, type, op, comm, stream); });
}
FORWARD(Result, Send, (const void* in, size_t count, DataType type, int peer, Comm comm, CudaStream stream),
        (in, count, type, peer, comm, stream))
FORWARD(Result, Recv, (void* out, size_t count, DataType type, int peer, Comm comm, CudaStream stream),
        (out, count, type, peer, comm, stream))
FORWARD(Result, GroupStart, (), ())
FORWARD(Result, GroupEnd, (), ())
FORWARD(Result, RedOpCreatePreMulSum, (int* op, void* scalar, DataType type, ScalarResidence residence, Comm comm),
        (op, scalar, type, residence, comm))
#ifndef FAULTY_NCCL_LACKS_SYMBOL  // defined: it lacks one that every version has
FORWARD(Result, RedOpDestroy, (int op, Comm comm), (op, comm))
#endif
FORWARD_NEW(MemAlloc, (void** data, size_t bytes), (data, bytes))
FORWARD_NEW(MemFree, (void* data), (data))
FORWARD_NEW(CommWindowRegister, (Comm comm, void* data, size_t bytes, Window* window, int flags),
            (comm, data, bytes, window, flags))
FORWARD_NEW(CommWindowDeregister, (Comm comm, Window window), (comm, window))

}  // extern "C"

}  // namespace ddp::nccl
