// SPDX-License-Identifier: Apache-2.0
// The part of ddp/ddp_c.h about errors, stores and the context.
#include <cstdlib>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "ddp/context.h"
#include "ddp/ddp_c.h"
#include "ddp/observer.h"
#include "ddp/process_group.h"
#include "ddp/store.h"
#include "libddp/c/arguments.h"
#include "libddp/c/handles.h"

namespace ddp::c {
namespace {

struct LastError {
  absl::Status status = {};
  std::string text = {};
};

// Like errno: a C function has no other place for a text. Each thread sees its own.
LastError& ErrorOfThread() {
  thread_local LastError last;
  return last;
}

// Passes the library's events on to the program's functions.
class Callbacks : public Observer {
 public:
  explicit Callbacks(const ddp_observer& observer) : to_(observer) {}

  void OnOperation(const OperationEvent& event) noexcept override {
    if (to_.on_operation == nullptr) return;
    const ddp_operation_event told = {static_cast<int32_t>(event.state),
                                      static_cast<ddp_dtype>(event.dtype),
                                      event.kind.data(),
                                      event.group,
                                      event.sequence,
                                      event.count,
                                      event.bucket,
                                      event.called_ns,
                                      event.announced_ns,
                                      event.ready_ns,
                                      event.ended_ns};
    to_.on_operation(to_.user, &told);
  }

  void OnBucket(const BucketEvent& event) noexcept override {
    if (to_.on_bucket == nullptr) return;
    const ddp_bucket_event told = {event.step,     event.bucket,      event.bytes,
                                   event.ready_ns, event.launched_ns, event.done_ns};
    to_.on_bucket(to_.user, &told);
  }

  void OnScope(const ScopeEvent& event) noexcept override {
    if (to_.on_scope == nullptr) return;
    const ddp_scope_event told = {event.name, event.begin ? 1 : 0, event.begin_ns, event.end_ns};
    to_.on_scope(to_.user, &told);
  }

 private:
  ddp_observer to_;
};

absl::Status KeepStore(absl::StatusOr<std::shared_ptr<Store>> made, ddp_store** store) {
  if (!made.ok()) return made.status();
  *store = new ddp_store{*std::move(made)};
  return absl::OkStatus();
}

ContextOptions OptionsOf(Arguments& arguments, const ddp_context_options& given) {
  ContextOptions options;
  if (given.store != nullptr) options.store = given.store->store;
  if (given.store != nullptr || given.world_size != 0) {
    options.rank = given.rank;
    options.world_size = given.world_size;
  }
  if (given.local_world_size != 0) {
    options.local_rank = given.local_rank;
    options.local_world_size = given.local_world_size;
  }
  options.device = arguments.OfDevice(given.device);
  if (given.backend != nullptr) options.backend = given.backend;
  if (given.fresh_probe != 0) options.fresh_probe = true;
  options.mpi_comm = given.mpi_comm;
  options.nccl_comm = given.nccl_comm;
  if (given.timeout != 0) {
    options.timeout = given.timeout > 0 ? absl::Seconds(given.timeout) : absl::InfiniteDuration();
  }
  if (given.stall_warning != 0) {
    options.stall_warning = given.stall_warning > 0 ? absl::Seconds(given.stall_warning) : absl::ZeroDuration();
  }
  if (given.trace != nullptr) options.trace = given.trace;
  return options;
}

}  // namespace

ddp_status Told(const absl::Status& status) noexcept {
  if (status.ok()) return DDP_OK;
  LastError& last = ErrorOfThread();
  last.status = status;
  try {
    last.text = std::string(status.message());
  } catch (...) {
    last.text.clear();
  }
  return static_cast<ddp_status>(status.code());
}

void ForgetError() noexcept { ErrorOfThread().status = absl::OkStatus(); }

absl::Status OfCallback(ddp_status code, const char* what) {
  if (code == DDP_OK) return absl::OkStatus();
  const absl::Status last = ErrorOfThread().status;
  if (last.raw_code() == code) return last;
  return absl::Status(static_cast<absl::StatusCode>(code), absl::StrCat(what, " of the program returned ", code));
}

DType Arguments::Type(ddp_dtype dtype) {
  if (dtype >= DDP_FLOAT64 && dtype <= DDP_UINT8) return static_cast<DType>(dtype);
  Refuse("dtype is ", dtype, ": it is one of DDP_FLOAT64 to DDP_UINT8");
  return DType::kFloat32;
}

ReduceOp Arguments::Op(ddp_reduce_op op) {
  if (op >= DDP_SUM && op <= DDP_PRODUCT) return static_cast<ReduceOp>(op);
  Refuse("op is ", op, ": it is one of DDP_SUM to DDP_PRODUCT");
  return ReduceOp::kSum;
}

Device Arguments::OfDevice(ddp_device device) {
  if ((device.kind == DDP_CPU || device.kind == DDP_CUDA) && device.index >= -1 && device.index <= INT16_MAX) {
    return {static_cast<Device::Kind>(device.kind), static_cast<int16_t>(device.index)};
  }
  Refuse("device is {", device.kind, ", ", device.index, "}: it is {DDP_CPU, 0} or {DDP_CUDA, number of the GPU}");
  return {};
}

Buffer Arguments::One(const ddp_buffer& buffer) {
  return {buffer.data, buffer.count, Type(buffer.dtype), OfDevice(buffer.device)};
}

std::vector<Buffer> Arguments::Ranges(const ddp_buffer* buffers, size_t count, const char* name) {
  std::vector<Buffer> result;
  if (count > 0 && !Need(buffers, name).ok()) return result;
  for (size_t i = 0; i < count; ++i) result.push_back(One(buffers[i]));
  return result;
}

ddp_device ToC(Device device) { return {static_cast<int32_t>(device.kind), device.index}; }

ddp_buffer ToC(const Buffer& buffer) {
  return {buffer.data, buffer.count, static_cast<ddp_dtype>(buffer.dtype), ToC(buffer.device)};
}

size_t ToC(absl::Span<const Buffer> buffers, ddp_buffer* result, size_t capacity) {
  for (size_t i = 0; result != nullptr && i < std::min(buffers.size(), capacity); ++i) result[i] = ToC(buffers[i]);
  return buffers.size();
}

Stream OnDevice(Device device, void* stream) {
  if (device.kind == Device::Kind::kCpu) return {};
  return stream == DDP_NO_STREAM ? kNoStream : Stream{device, stream};
}

void* CopyForC(const void* bytes, size_t count) {
  void* const copy = std::malloc(std::max<size_t>(count, 1));  // NOLINT(cppcoreguidelines-no-malloc)
  if (copy == nullptr) throw std::bad_alloc();
  if (count > 0) std::memcpy(copy, bytes, count);
  return copy;
}

absl::Time Deadline(double seconds) {
  if (seconds < 0) return absl::InfiniteFuture();
  return absl::Now() + (seconds > 0 ? absl::Seconds(seconds) : absl::Minutes(10));
}

}  // namespace ddp::c

// NOLINTBEGIN(google-global-names-in-headers): this is no header
using ddp::c::Arguments;
using ddp::c::Guard;
// NOLINTEND(google-global-names-in-headers)

struct ddp_context {
  std::unique_ptr<ddp::Observer> observer;  // outlives the context
  std::unique_ptr<ddp::Context> context;
  std::string launcher;
  std::deque<ddp_group> worlds;  // addresses stay; the last one is the present world
};

const char* ddp_error(void) { return ddp::c::ErrorOfThread().text.c_str(); }

const char* ddp_status_name(ddp_status code) {
  static constexpr const char* kNames[] = {
      "OK",       "Cancelled",      "Unknown",          "InvalidArgument",   "DeadlineExceeded",
      "NotFound", "AlreadyExists",  "PermissionDenied", "ResourceExhausted", "FailedPrecondition",
      "Aborted",  "OutOfRange",     "Unimplemented",    "Internal",          "Unavailable",
      "DataLoss", "Unauthenticated"};
  const bool known = code >= 0 && code < static_cast<ddp_status>(std::size(kNames));
  return known ? kNames[code] : "unknown code";
}

size_t ddp_failed_ranks(int32_t* ranks, size_t capacity) {
  size_t count = 0;
  Guard([&] {
    const std::vector<int> failed = ddp::FailedRanks(ddp::c::ErrorOfThread().status);
    if (ranks != nullptr) std::copy_n(failed.begin(), std::min(capacity, failed.size()), ranks);
    count = failed.size();
    return absl::OkStatus();
  });
  return count;
}

ddp_status ddp_fail(ddp_status code, const char* text) {
  Guard([&] { return absl::Status(static_cast<absl::StatusCode>(code), ddp::c::OrEmpty(text)); });
  return code;  // also one that is none of DDP_OK and the like
}

int32_t ddp_version(void) { return DDP_VERSION; }

void ddp_free(void* memory) { std::free(memory); }  // NOLINT(cppcoreguidelines-no-malloc)

ddp_status ddp_store_create_memory(ddp_store** store) {
  return Guard([&] {
    Arguments a;
    if (!a.Result(store, "store").ok()) return a.status();
    return ddp::c::KeepStore(ddp::CreateMemoryStore(), store);
  });
}

ddp_status ddp_store_create_file(const ddp_file_store_options* options, ddp_store** store) {
  return Guard([&] {
    Arguments a;
    const auto o = a.Result(store, "store").Options(options, "ddp_file_store_options");
    if (!a.ok()) return a.status();
    return ddp::c::KeepStore(
        ddp::CreateFileStore(
            {.path = ddp::c::OrEmpty(o.path), .run_id = ddp::c::OrEmpty(o.run_id), .world_size = o.world_size}),
        store);
  });
}

ddp_status ddp_store_create_tcp(const ddp_tcp_store_options* options, ddp_store** store) {
  return Guard([&] {
    Arguments a;
    const auto o = a.Result(store, "store").Options(options, "ddp_tcp_store_options");
    if (!a.ok()) return a.status();
    ddp::TcpStoreOptions tcp;
    tcp.host = ddp::c::OrEmpty(o.host);
    tcp.port = o.port;
    tcp.serve = o.serve != 0;
    tcp.run_id = ddp::c::OrEmpty(o.run_id);
    tcp.secret = ddp::c::OrEmpty(o.secret);
    tcp.world_size = o.world_size;
    if (o.timeout != 0) tcp.timeout = o.timeout > 0 ? absl::Seconds(o.timeout) : absl::InfiniteDuration();
    return ddp::c::KeepStore(ddp::CreateTcpStore(std::move(tcp)), store);
  });
}

ddp_status ddp_store_set(ddp_store* store, const char* key, const void* value, size_t bytes, double timeout) {
  return Guard([&] {
    Arguments a;
    a.Need(store, "store").Need(key, "key");
    if (bytes > 0) a.Need(value, "value");
    if (!a.ok()) return a.status();
    return store->store->Set(key, {static_cast<const char*>(value), bytes}, ddp::c::Deadline(timeout));
  });
}

ddp_status ddp_store_get(ddp_store* store, const char* key, double timeout, void** value, size_t* bytes) {
  return Guard([&] {
    Arguments a;
    if (!a.Need(store, "store").Need(key, "key").Result(value, "value").Need(bytes, "bytes").ok()) return a.status();
    const absl::StatusOr<std::string> got = store->store->Get(key, ddp::c::Deadline(timeout));
    if (!got.ok()) return got.status();
    *bytes = got->size();
    *value = ddp::c::CopyForC(got->data(), got->size());
    return absl::OkStatus();
  });
}

ddp_status ddp_store_add(ddp_store* store, const char* key, int64_t delta, double timeout, int64_t* sum) {
  return Guard([&] {
    Arguments a;
    if (!a.Need(store, "store").Need(key, "key").Need(sum, "sum").ok()) return a.status();
    const absl::StatusOr<int64_t> added = store->store->Add(key, delta, ddp::c::Deadline(timeout));
    if (added.ok()) *sum = *added;
    return added.status();
  });
}

void ddp_store_destroy(ddp_store* store) { delete store; }

ddp_status ddp_context_create(const ddp_context_options* options, ddp_context** context) {
  return Guard([&] {
    Arguments a;
    const auto given = a.Result(context, "context").Options(options, "ddp_context_options");
    ddp::ContextOptions o = ddp::c::OptionsOf(a, given);
    auto made = std::make_unique<ddp_context>();
    if (given.observer != nullptr) {
      made->observer = std::make_unique<ddp::c::Callbacks>(a.Options(given.observer, "ddp_observer"));
      o.observer = made->observer.get();
    }
    if (!a.ok()) return a.status();
    absl::StatusOr<std::unique_ptr<ddp::Context>> created = ddp::Context::Create(o);
    if (!created.ok()) return created.status();
    made->context = *std::move(created);
    made->launcher = std::string(made->context->launcher());
    made->worlds.emplace_back(made->context->world());
    *context = made.release();
    return absl::OkStatus();
  });
}

void ddp_context_destroy(ddp_context* context) { delete context; }

int32_t ddp_context_rank(const ddp_context* context) { return context == nullptr ? -1 : context->context->rank(); }

int32_t ddp_context_world_size(const ddp_context* context) {
  return context == nullptr ? -1 : context->context->world_size();
}

int32_t ddp_context_local_rank(const ddp_context* context) {
  return context == nullptr ? -1 : context->context->local_rank();
}

int32_t ddp_context_local_world_size(const ddp_context* context) {
  return context == nullptr ? -1 : context->context->local_world_size();
}

ddp_device ddp_context_device(const ddp_context* context) {
  return context == nullptr ? ddp_device{DDP_CPU, 0} : ddp::c::ToC(context->context->device());
}

const char* ddp_context_launcher(const ddp_context* context) {
  return context == nullptr ? "" : context->launcher.c_str();
}

const char* ddp_context_backend_choice(const ddp_context* context) {
  return context == nullptr ? "" : context->context->backend_choice().text.c_str();
}

ddp_group* ddp_context_world(ddp_context* context) { return context == nullptr ? nullptr : &context->worlds.back(); }

ddp_status ddp_context_recover(ddp_context* context, double patience) {
  return Guard([&] {
    Arguments a;
    if (!a.Need(context, "context").ok()) return a.status();
    std::optional<absl::Duration> wait;
    if (patience != 0) wait = patience > 0 ? absl::Seconds(patience) : absl::InfiniteDuration();
    absl::Status status = context->context->Recover(wait);
    if (status.ok()) context->worlds.emplace_back(context->context->world());
    return status;
  });
}

ddp_status ddp_context_new_group(ddp_context* context, const int32_t* ranks, size_t count, double timeout,
                                 ddp_group** group) {
  return Guard([&] {
    Arguments a;
    if (!a.Result(group, "group").Need(context, "context").Need(ranks, "ranks").ok()) return a.status();
    const absl::Time deadline = timeout == 0 ? absl::Now() + context->context->timeout() : ddp::c::Deadline(timeout);
    auto made = context->context->NewGroup({ranks, count}, deadline);
    if (!made.ok()) return made.status();
    *group = new ddp_group(*std::move(made));
    return absl::OkStatus();
  });
}
