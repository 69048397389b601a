// SPDX-License-Identifier: Apache-2.0
// The part of ddp/ddp_c.h about groups and their operations.
#include <cmath>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "ddp/collectives.h"
#include "ddp/ddp_c.h"
#include "ddp/observer.h"
#include "ddp/process_group.h"
#include "ddp/sync_state.h"
#include "libddp/c/arguments.h"
#include "libddp/c/handles.h"

struct ddp_scope {
  ddp::TraceScope scope;
};

namespace ddp::c {
namespace {

// An operation as it comes from C.
struct Operation {
  Call::Kind kind = Call::Kind::kBarrier;
  const ddp_buffer* in = nullptr;
  size_t in_ranges = 0;
  const ddp_buffer* out = nullptr;
  size_t out_ranges = 0;
  int peer = 0, from = 0, tag = 0;
  const size_t* counts = nullptr;
  const size_t* out_counts = nullptr;
  const ddp_reduce_options* reduce = nullptr;
  void* stream = nullptr;
};

ddp_status Start(ddp_group* group, const Operation& operation, ddp_work** work) noexcept {
  return Guard([&]() -> absl::Status {
    Arguments a;
    if (work != nullptr) *work = nullptr;
    if (!a.Need(group, "group").ok()) return a.status();
    ProcessGroup& on = *group->group;
    const std::vector<Buffer> in = a.Ranges(operation.in, operation.in_ranges, "in");
    const std::vector<Buffer> out = a.Ranges(operation.out, operation.out_ranges, "out");
    const auto reduce = a.Options(operation.reduce, "ddp_reduce_options");
    Call call{.kind = operation.kind, .in = in, .out = out};
    call.peer = operation.peer;
    call.from = operation.from;
    call.tag = operation.tag;
    const auto ranks = static_cast<size_t>(on.size());
    if (operation.counts != nullptr) call.counts = {operation.counts, ranks};
    if (operation.out_counts != nullptr) call.out_counts = {operation.out_counts, ranks};
    call.reduce.op = a.Op(reduce.op);
    if (reduce.prescale != 0) call.reduce.prescale = reduce.prescale;
    if (reduce.postscale != 0) call.reduce.postscale = reduce.postscale;
    call.reduce.nonfinite = reduce.nonfinite;
    call.after = OnDevice(on.device(), operation.stream);
    if (!a.ok()) return a.status();
    auto handle = work == nullptr ? nullptr : std::make_unique<ddp_work>();
    Work started = on.Start(call);
    if (work == nullptr) return started.Wait();
    if (absl::Status refused = started.call_status(); !refused.ok()) return refused;
    handle->work = std::move(started);
    *work = handle.release();
    return absl::OkStatus();
  });
}

template <typename T>
ddp_status ReduceScalar(ddp_group* group, T* value, ddp_reduce_op op) noexcept {
  return Guard([&] {
    Arguments a;
    const ReduceOp reduce = a.Need(group, "group").Need(value, "value").Op(op);
    if (!a.ok()) return a.status();
    const absl::StatusOr<T> result = AllReduceScalar(*group->group, *value, reduce);
    if (result.ok()) *value = *result;
    return result.status();
  });
}

}  // namespace
}  // namespace ddp::c

// NOLINTBEGIN(google-global-names-in-headers): this is no header
using ddp::c::Arguments;
using ddp::c::Guard;
using ddp::c::Start;
// NOLINTEND(google-global-names-in-headers)
using Kind = ddp::Call::Kind;

void ddp_group_destroy(ddp_group* group) {
  if (group != nullptr && group->owner != nullptr) delete group;
}

int32_t ddp_group_rank(const ddp_group* group) { return group == nullptr ? -1 : group->group->rank(); }

int32_t ddp_group_size(const ddp_group* group) { return group == nullptr ? -1 : group->group->size(); }

ddp_device ddp_group_device(const ddp_group* group) {
  return group == nullptr ? ddp_device{DDP_CPU, 0} : ddp::c::ToC(group->group->device());
}

const char* ddp_group_backend(const ddp_group* group) { return group == nullptr ? "" : group->backend.c_str(); }

ddp_status ddp_group_status(const ddp_group* group) {
  return Guard([&] {
    Arguments a;
    return a.Need(group, "group").ok() ? group->group->status() : a.status();
  });
}

const uint32_t* ddp_group_failed_word(const ddp_group* group) {
  return group == nullptr ? nullptr : group->group->failed_word();
}

ddp_status ddp_group_set_timeout(ddp_group* group, double timeout) {
  return Guard([&] {
    Arguments a;
    a.Need(group, "group");
    if (std::isnan(timeout)) a.Refuse("the time-out must be above 0 s, not ", timeout);  // absl takes it for infinity
    return a.ok() ? group->group->SetTimeout(absl::Seconds(timeout)) : a.status();
  });
}

double ddp_group_timeout(const ddp_group* group) {
  return group == nullptr ? -1 : absl::ToDoubleSeconds(group->group->timeout());
}

void ddp_group_abort(ddp_group* group, const char* why) {
  Guard([&] {
    Arguments a;
    if (a.Need(group, "group").ok()) group->group->Abort(absl::AbortedError(ddp::c::OrEmpty(why)));
    return a.status();
  });
}

void ddp_group_progress(ddp_group* group) {
  Guard([&] {
    Arguments a;
    if (a.Need(group, "group").ok()) group->group->Progress();
    return a.status();
  });
}

ddp_status ddp_group_split(ddp_group* group, int32_t color, int32_t key, ddp_group** part) {
  return Guard([&] {
    Arguments a;
    if (!a.Result(part, "part").Need(group, "group").ok()) return a.status();
    auto made = group->group->Split(color, key);
    if (!made.ok()) return made.status();
    if (*made != nullptr) *part = new ddp_group(*std::move(made));
    return absl::OkStatus();
  });
}

ddp_status ddp_group_allocate(ddp_group* group, size_t bytes, ddp_device device, ddp_memory** memory) {
  return Guard([&] {
    Arguments a;
    const ddp::Device where = a.Result(memory, "memory").Need(group, "group").OfDevice(device);
    if (!a.ok()) return a.status();
    auto made = group->group->Allocate(bytes, where);
    if (!made.ok()) return made.status();
    *memory = new ddp_memory{*std::move(made)};
    return absl::OkStatus();
  });
}

ddp_status ddp_group_register(ddp_group* group, ddp_memory* memory) {
  return Guard([&] {
    Arguments a;
    if (!a.Need(group, "group").Need(memory, "memory").ok()) return a.status();
    return group->group->Register(memory->allocation);
  });
}

ddp_status ddp_group_register_own(ddp_group* group, void* data, size_t bytes, ddp_device device, ddp_memory** memory) {
  return Guard([&] {
    Arguments a;
    const ddp::Device where = a.Result(memory, "memory").Need(group, "group").Need(data, "data").OfDevice(device);
    if (!a.ok()) return a.status();
    auto made = std::make_unique<ddp_memory>();
    made->allocation = ddp::Allocation(std::shared_ptr<void>(data, [](void*) {}), bytes, where);
    absl::Status status = group->group->Register(made->allocation);
    if (status.ok()) *memory = made.release();
    return status;
  });
}

void* ddp_memory_data(const ddp_memory* memory) { return memory == nullptr ? nullptr : memory->allocation.data(); }

size_t ddp_memory_bytes(const ddp_memory* memory) { return memory == nullptr ? 0 : memory->allocation.bytes(); }

void ddp_memory_destroy(ddp_memory* memory) { delete memory; }

ddp_status ddp_all_reduce(ddp_group* group, const ddp_buffer* in, size_t in_ranges, const ddp_buffer* out,
                          size_t out_ranges, const ddp_reduce_options* options, void* stream, ddp_work** work) {
  return Start(group,
               {.kind = Kind::kAllReduce,
                .in = in,
                .in_ranges = in_ranges,
                .out = out,
                .out_ranges = out_ranges,
                .reduce = options,
                .stream = stream},
               work);
}

ddp_status ddp_reduce(ddp_group* group, const ddp_buffer* in, size_t in_ranges, const ddp_buffer* out,
                      size_t out_ranges, int32_t root, const ddp_reduce_options* options, void* stream,
                      ddp_work** work) {
  return Start(group,
               {.kind = Kind::kReduce,
                .in = in,
                .in_ranges = in_ranges,
                .out = out,
                .out_ranges = out_ranges,
                .peer = root,
                .reduce = options,
                .stream = stream},
               work);
}

ddp_status ddp_reduce_scatter(ddp_group* group, const ddp_buffer* in, size_t in_ranges, const ddp_buffer* out,
                              size_t out_ranges, const size_t* counts, const ddp_reduce_options* options, void* stream,
                              ddp_work** work) {
  return Start(group,
               {.kind = counts == nullptr ? Kind::kReduceScatter : Kind::kReduceScatterV,
                .in = in,
                .in_ranges = in_ranges,
                .out = out,
                .out_ranges = out_ranges,
                .counts = counts,
                .reduce = options,
                .stream = stream},
               work);
}

ddp_status ddp_broadcast(ddp_group* group, const ddp_buffer* buffers, size_t ranges, int32_t root, void* stream,
                         ddp_work** work) {
  return Start(group,
               {.kind = Kind::kBroadcast,
                .in = buffers,
                .in_ranges = ranges,
                .out = buffers,
                .out_ranges = ranges,
                .peer = root,
                .stream = stream},
               work);
}

ddp_status ddp_all_gather(ddp_group* group, const ddp_buffer* in, size_t in_ranges, const ddp_buffer* out,
                          size_t out_ranges, const size_t* counts, void* stream, ddp_work** work) {
  return Start(group,
               {.kind = counts == nullptr ? Kind::kAllGather : Kind::kAllGatherV,
                .in = in,
                .in_ranges = in_ranges,
                .out = out,
                .out_ranges = out_ranges,
                .counts = counts,
                .stream = stream},
               work);
}

ddp_status ddp_all_to_all(ddp_group* group, const ddp_buffer* in, size_t in_ranges, const size_t* in_counts,
                          const ddp_buffer* out, size_t out_ranges, const size_t* out_counts, void* stream,
                          ddp_work** work) {
  const bool uneven = in_counts != nullptr || out_counts != nullptr;
  return Start(group,
               {.kind = uneven ? Kind::kAllToAllV : Kind::kAllToAll,
                .in = in,
                .in_ranges = in_ranges,
                .out = out,
                .out_ranges = out_ranges,
                .counts = in_counts,
                .out_counts = out_counts,
                .stream = stream},
               work);
}

ddp_status ddp_gather(ddp_group* group, const ddp_buffer* in, size_t in_ranges, const ddp_buffer* out,
                      size_t out_ranges, int32_t root, void* stream, ddp_work** work) {
  return Start(group,
               {.kind = Kind::kGather,
                .in = in,
                .in_ranges = in_ranges,
                .out = out,
                .out_ranges = out_ranges,
                .peer = root,
                .stream = stream},
               work);
}

ddp_status ddp_scatter(ddp_group* group, const ddp_buffer* in, size_t in_ranges, const ddp_buffer* out,
                       size_t out_ranges, int32_t root, void* stream, ddp_work** work) {
  return Start(group,
               {.kind = Kind::kScatter,
                .in = in,
                .in_ranges = in_ranges,
                .out = out,
                .out_ranges = out_ranges,
                .peer = root,
                .stream = stream},
               work);
}

ddp_status ddp_send(ddp_group* group, const ddp_buffer* buffers, size_t ranges, int32_t to, int32_t tag, void* stream,
                    ddp_work** work) {
  return Start(group,
               {.kind = Kind::kSend,
                .in = buffers,
                .in_ranges = ranges,
                .out = buffers,
                .out_ranges = ranges,
                .peer = to,
                .tag = tag,
                .stream = stream},
               work);
}

ddp_status ddp_recv(ddp_group* group, const ddp_buffer* buffers, size_t ranges, int32_t from, int32_t tag, void* stream,
                    ddp_work** work) {
  return Start(group,
               {.kind = Kind::kRecv,
                .in = buffers,
                .in_ranges = ranges,
                .out = buffers,
                .out_ranges = ranges,
                .peer = from,
                .tag = tag,
                .stream = stream},
               work);
}

ddp_status ddp_send_recv(ddp_group* group, const ddp_buffer* in, size_t in_ranges, int32_t to, const ddp_buffer* out,
                         size_t out_ranges, int32_t from, int32_t tag, void* stream, ddp_work** work) {
  return Start(group,
               {.kind = Kind::kSendRecv,
                .in = in,
                .in_ranges = in_ranges,
                .out = out,
                .out_ranges = out_ranges,
                .peer = to,
                .from = from,
                .tag = tag,
                .stream = stream},
               work);
}

ddp_status ddp_barrier(ddp_group* group, ddp_work** work) { return Start(group, {.kind = Kind::kBarrier}, work); }

int32_t ddp_work_done(const ddp_work* work) { return work == nullptr || work->work.Done() ? 1 : 0; }

ddp_status ddp_work_wait(ddp_work* work, double timeout) {
  return Guard([&] {
    Arguments a;
    if (!a.Need(work, "work").ok()) return a.status();
    return work->work.Wait(timeout > 0 ? ddp::c::Deadline(timeout) : absl::InfiniteFuture());
  });
}

ddp_status ddp_work_block_stream(ddp_work* work, ddp_device device, void* stream) {
  return Guard([&] {
    Arguments a;
    const ddp::Device where = a.Need(work, "work").OfDevice(device);
    return a.ok() ? work->work.BlockStream(ddp::c::OnDevice(where, stream)) : a.status();
  });
}

void ddp_work_destroy(ddp_work* work) { delete work; }

ddp_status ddp_all_reduce_double(ddp_group* group, double* value, ddp_reduce_op op) {
  return ddp::c::ReduceScalar(group, value, op);
}

ddp_status ddp_all_reduce_int64(ddp_group* group, int64_t* value, ddp_reduce_op op) {
  return ddp::c::ReduceScalar(group, value, op);
}

ddp_status ddp_broadcast_bytes(ddp_group* group, const void* bytes, size_t count, int32_t root, void** result,
                               size_t* result_count) {
  return Guard([&] {
    Arguments a;
    a.Result(result, "result").Need(result_count, "result_count").Need(group, "group");
    if (count > 0) a.Need(bytes, "bytes");
    if (!a.ok()) return a.status();
    const auto got = ddp::BroadcastBytes(*group->group, {static_cast<const char*>(bytes), count}, root);
    if (!got.ok()) return got.status();
    *result_count = got->size();
    *result = ddp::c::CopyForC(got->data(), got->size());
    return absl::OkStatus();
  });
}

ddp_status ddp_gather_bytes(ddp_group* group, const void* bytes, size_t count, void** result, size_t* counts) {
  return Guard([&] {
    Arguments a;
    a.Result(result, "result").Need(counts, "counts").Need(group, "group");
    if (count > 0) a.Need(bytes, "bytes");
    if (!a.ok()) return a.status();
    const auto got = ddp::GatherStrings(*group->group, {static_cast<const char*>(bytes), count});
    if (!got.ok()) return got.status();
    std::string all;
    for (size_t r = 0; r < got->size(); ++r) {
      counts[r] = (*got)[r].size();
      all += (*got)[r];
    }
    *result = ddp::c::CopyForC(all.data(), all.size());
    return absl::OkStatus();
  });
}

ddp_status ddp_sync_state(ddp_group* group, const ddp_buffer* state, size_t ranges, int64_t* step) {
  return Guard([&] {
    Arguments a;
    const std::vector<ddp::Buffer> all = a.Need(group, "group").Need(step, "step").Ranges(state, ranges, "state");
    if (!a.ok()) return a.status();
    return ddp::SyncState(*group->group, *step, all).status();
  });
}

ddp_status ddp_scope_begin(const ddp_group* group, const char* name, ddp_scope** scope) {
  return Guard([&] {
    Arguments a;
    if (!a.Result(scope, "scope").Need(group, "group").Need(name, "name").ok()) return a.status();
    *scope = new ddp_scope{ddp::TraceScope(*group->group, name)};
    return absl::OkStatus();
  });
}

void ddp_scope_end(ddp_scope* scope) { delete scope; }
