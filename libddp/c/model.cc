// SPDX-License-Identifier: Apache-2.0
// The part of ddp/ddp_c.h about models and hooks.
#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "ddp/comm_hook.h"
#include "ddp/ddp_c.h"
#include "ddp/distributed_data_parallel.h"
#include "libddp/c/arguments.h"
#include "libddp/c/handles.h"
#include "libddp/reducer/model.h"

namespace ddp::c {
namespace {

std::vector<Parameter> ParametersOf(Arguments& arguments, const ddp_parameter* first, size_t count) {
  std::vector<Parameter> result;
  for (const ddp_parameter& p : Structs(arguments, first, count, "ddp_parameter")) {
    Parameter parameter;
    parameter.name = OrEmpty(p.name);
    if (p.shape != nullptr) parameter.shape.assign(p.shape, p.shape + p.dimensions);
    parameter.value = arguments.One(p.value);
    if (p.grad.data != nullptr) parameter.grad = arguments.One(p.grad);
    parameter.frozen = p.frozen != 0;
    result.push_back(std::move(parameter));
  }
  return result;
}

DdpOptions OptionsOfModel(Arguments& arguments, const ddp_model_options& given) {
  DdpOptions options;
  if (given.bucket_bytes != 0) options.bucket_bytes = given.bucket_bytes;
  options.first_bucket_bytes = given.first_bucket_bytes;
  options.piece_bytes = given.piece_bytes;
  options.replan = given.no_replan == 0;
  if (given.sum != 0) options.op = ReduceOp::kSum;
  options.weighted = given.weighted != 0;
  if (given.gradient_predivide_factor != 0) options.gradient_predivide_factor = given.gradient_predivide_factor;
  options.reduce_in_float32 = given.reduce_in_float32 != 0;
  options.nonfinite = given.nonfinite;
  if (given.unused != DDP_UNUSED_ERROR && given.unused != DDP_UNUSED_DETECT) {
    arguments.Refuse("unused is ", given.unused, ": it is DDP_UNUSED_ERROR or DDP_UNUSED_DETECT");
  }
  if (given.unused == DDP_UNUSED_DETECT) options.unused = UnusedParameters::kDetect;
  options.static_graph = given.static_graph != 0;
  options.copy_gradients = given.copy_gradients != 0;
  options.broadcast_parameters = given.no_broadcast_parameters == 0;
  for (const ddp_model_buffer& b : Structs(arguments, given.buffers, given.buffer_count, "ddp_model_buffer")) {
    options.buffers.push_back({OrEmpty(b.name), arguments.One(b.data), b.replicated != 0});
  }
  options.broadcast_buffers = given.no_broadcast_buffers == 0;
  if (given.check_replicas != 0) options.check_replicas = std::max<int64_t>(given.check_replicas, 0);
  options.check_nan = given.check_nan != 0;
  options.time_replays = given.time_replays != 0;
  if (given.hook != nullptr) options.hook = given.hook->hook;
  return options;
}

absl::Status KeepHook(std::shared_ptr<CommHook> made, ddp_hook** hook) {
  *hook = new ddp_hook{std::move(made)};
  return absl::OkStatus();
}

// Calls f(model, stream) on a model that is there.
template <typename F>
ddp_status OnModel(ddp_model* model, void* stream, F f) noexcept {
  return Guard([&]() -> absl::Status {
    Arguments a;
    if (!a.Need(model, "model").ok()) return a.status();
    return f(*model->model, OnDevice(model->device(), stream));
  });
}

// The same for a call whose result goes to `result`.
template <typename T, typename F>
ddp_status OnModelInto(ddp_model* model, void* stream, T* result, F f) noexcept {
  return OnModel(model, stream, [&](DistributedDataParallel& m, Stream s) -> absl::Status {
    Arguments a;
    if (!a.Need(result, "norm").ok()) return a.status();
    const absl::StatusOr<T> got = f(m, s);
    if (got.ok()) *result = *got;
    return got.status();
  });
}

}  // namespace
}  // namespace ddp::c

// NOLINTBEGIN(google-global-names-in-headers): this is no header
using ddp::DistributedDataParallel;
using ddp::Stream;
using ddp::c::Arguments;
using ddp::c::Guard;
using ddp::c::OnModel;
using ddp::c::OnModelInto;
// NOLINTEND(google-global-names-in-headers)

ddp_status ddp_hook_create_all_reduce(ddp_hook** hook) {
  return Guard([&] {
    Arguments a;
    return a.Result(hook, "hook").ok() ? ddp::c::KeepHook(ddp::CreateAllReduceHook(), hook) : a.status();
  });
}

ddp_status ddp_hook_create_compression(ddp_dtype wire, ddp_hook* inner, ddp_hook** hook) {
  return Guard([&] {
    Arguments a;
    const ddp::DType type = a.Result(hook, "hook").Type(wire);
    if (!a.ok()) return a.status();
    return ddp::c::KeepHook(ddp::CreateCompressionHook(type, inner == nullptr ? nullptr : inner->hook), hook);
  });
}

ddp_status ddp_hook_create_block_compression(int32_t format, ddp_hook** hook) {
  return Guard([&] {
    Arguments a;
    a.Result(hook, "hook");
    if (format != DDP_BLOCK_INT8 && format != DDP_BLOCK_FLOAT8_E4M3) {
      a.Refuse("format is ", format, ": it is DDP_BLOCK_INT8 or DDP_BLOCK_FLOAT8_E4M3");
    }
    if (!a.ok()) return a.status();
    return ddp::c::KeepHook(ddp::CreateBlockCompressionHook(static_cast<ddp::BlockFormat>(format)), hook);
  });
}

ddp_status ddp_hook_create_power_sgd(const ddp_power_sgd_options* options, ddp_hook** hook) {
  return Guard([&] {
    Arguments a;
    const auto o = a.Result(hook, "hook").Options(options, "ddp_power_sgd_options");
    if (!a.ok()) return a.status();
    ddp::PowerSgdOptions power;
    if (o.rank != 0) power.rank = o.rank;
    if (o.start_step != 0) power.start_step = std::max<int64_t>(o.start_step, 0);
    if (o.min_ratio != 0) power.min_ratio = o.min_ratio;
    power.warm_start = o.cold_start == 0;
    power.error_feedback = o.no_feedback == 0;
    if (o.seed != 0) power.seed = o.seed;
    return ddp::c::KeepHook(ddp::CreatePowerSgdHook(power), hook);
  });
}

void ddp_hook_destroy(ddp_hook* hook) { delete hook; }

ddp_status ddp_model_create(ddp_group* group, const ddp_parameter* parameters, size_t count,
                            const ddp_model_options* options, ddp_model** model) {
  return Guard([&] {
    Arguments a;
    const auto given = a.Result(model, "model").Need(group, "group").Options(options, "ddp_model_options");
    std::vector<ddp::Parameter> list = ddp::c::ParametersOf(a, parameters, count);
    const ddp::DdpOptions o = ddp::c::OptionsOfModel(a, given);
    if (!a.ok()) return a.status();
    auto made = DistributedDataParallel::Create(*group->group, std::move(list), o);
    if (!made.ok()) return made.status();
    *model = new ddp_model{*std::move(made)};
    return absl::OkStatus();
  });
}

void ddp_model_destroy(ddp_model* model) { delete model; }

size_t ddp_model_size(const ddp_model* model) { return model == nullptr ? 0 : model->model->size(); }

ddp_buffer ddp_model_value(const ddp_model* model, size_t index) {
  return index < ddp_model_size(model) ? ddp::c::ToC(model->model->value(index)) : ddp_buffer{};
}

ddp_buffer ddp_model_grad(const ddp_model* model, size_t index) {
  return index < ddp_model_size(model) ? ddp::c::ToC(model->model->grad(index)) : ddp_buffer{};
}

size_t ddp_model_grad_spans(const ddp_model* model, ddp_buffer* spans, size_t capacity) {
  return model == nullptr ? 0 : ddp::c::ToC(model->model->grad_spans(), spans, capacity);
}

size_t ddp_model_value_spans(const ddp_model* model, ddp_buffer* spans, size_t capacity) {
  return model == nullptr ? 0 : ddp::c::ToC(model->model->value_spans(), spans, capacity);
}

ddp_status ddp_model_begin_forward(ddp_model* model, void* stream) {
  return OnModel(model, stream, [](DistributedDataParallel& m, Stream s) { return m.BeginForward(s); });
}

void ddp_model_grad_ready(ddp_model* model, size_t index, void* stream) {
  OnModel(model, stream, [&](DistributedDataParallel& m, Stream s) {
    m.GradReady(index, s);
    return absl::OkStatus();
  });
}

ddp_status ddp_model_set_grad(ddp_model* model, size_t index, ddp_buffer grad) {
  return OnModel(model, nullptr, [&](DistributedDataParallel& m, Stream) {
    Arguments a;
    const ddp::Buffer buffer = a.One(grad);
    return a.ok() ? m.SetGrad(index, buffer) : a.status();
  });
}

ddp_status ddp_model_finish_backward(ddp_model* model, void* stream) {
  return OnModel(model, stream, [](DistributedDataParallel& m, Stream s) { return m.FinishBackward(s); });
}

const uint32_t* ddp_model_skip_step(const ddp_model* model) {
  return model == nullptr ? nullptr : model->model->skip_step();
}

ddp_status ddp_model_watch(ddp_model* model, ddp_group* group) {
  return OnModel(model, nullptr, [&](DistributedDataParallel& m, Stream) {
    Arguments a;
    if (a.Need(group, "group").ok()) m.Watch(*group->group);
    return a.status();
  });
}

void ddp_model_zero_grad(ddp_model* model, void* stream) {
  OnModel(model, stream, [](DistributedDataParallel& m, Stream s) {
    m.ZeroGrad(s);
    return absl::OkStatus();
  });
}

void ddp_model_set_weight(ddp_model* model, double weight) {
  OnModel(model, nullptr, [&](DistributedDataParallel& m, Stream) {
    m.SetWeight(weight);
    return absl::OkStatus();
  });
}

ddp_status ddp_model_grad_norm(ddp_model* model, double order, void* stream, double* norm) {
  return OnModelInto(model, stream, norm, [&](DistributedDataParallel& m, Stream s) { return m.GradNorm(order, s); });
}

ddp_status ddp_model_clip_grad_norm(ddp_model* model, double max_norm, double order, void* stream, double* norm) {
  return OnModelInto(model, stream, norm,
                     [&](DistributedDataParallel& m, Stream s) { return m.ClipGradNorm(max_norm, order, s); });
}

ddp_status ddp_model_clip_grad_norm_async(ddp_model* model, double max_norm, double order, void* stream,
                                          const double** norm) {
  return OnModelInto(model, stream, norm,
                     [&](DistributedDataParallel& m, Stream s) { return m.ClipGradNormAsync(max_norm, order, s); });
}

ddp_status ddp_model_can_capture(const ddp_model* model) {
  return Guard([&] {
    Arguments a;
    return a.Need(model, "model").ok() ? model->model->CanCapture() : a.status();
  });
}

ddp_status ddp_model_broadcast_values(ddp_model* model, int32_t root, void* stream) {
  return OnModel(model, stream, [&](DistributedDataParallel& m, Stream s) { return m.BroadcastValues(root, s); });
}

ddp_status ddp_model_set_parameters(ddp_model* model, const ddp_parameter* parameters, size_t count) {
  return OnModel(model, nullptr, [&](DistributedDataParallel& m, Stream) {
    Arguments a;
    std::vector<ddp::Parameter> list = ddp::c::ParametersOf(a, parameters, count);
    return a.ok() ? m.SetParameters(std::move(list)) : a.status();
  });
}

ddp_status ddp_model_rebind(ddp_model* model, ddp_group* group) {
  return OnModel(model, nullptr, [&](DistributedDataParallel& m, Stream) {
    Arguments a;
    return a.Need(group, "group").ok() ? m.Rebind(*group->group) : a.status();
  });
}

ddp_status ddp_model_begin_no_sync(ddp_model* model) {
  return OnModel(model, nullptr, [&](DistributedDataParallel& m, Stream) {
    model->no_sync.push_back(std::make_unique<DistributedDataParallel::NoSync>(m));
    return absl::OkStatus();
  });
}

ddp_status ddp_model_end_no_sync(ddp_model* model) {
  return OnModel(model, nullptr, [&](DistributedDataParallel&, Stream) {
    if (model->no_sync.empty()) {
      return absl::FailedPreconditionError("ddp_model_end_no_sync without ddp_model_begin_no_sync");
    }
    model->no_sync.pop_back();
    return absl::OkStatus();
  });
}

ddp_status ddp_model_begin_join(ddp_model* model, const ddp_join_options* options) {
  return OnModel(model, nullptr, [&](DistributedDataParallel& m, Stream) {
    Arguments a;
    const auto given = a.Options(options, "ddp_join_options");
    if (!a.ok()) return a.status();
    if (model->join != nullptr) {
      return absl::FailedPreconditionError(
          "ddp_model_begin_join twice; end the first loop by ddp_model_finish_join, or by ddp_model_leave_join");
    }
    // The constructor would have no way to say so but to fail the step.
    if (absl::Status s = static_cast<const ddp::Model&>(m).CanJoin(); !s.ok()) return s;
    ddp::JoinOptions o;
    o.divide_by_active = given.divide_by_active != 0;
    o.throw_on_early = given.throw_on_early != 0;
    if (given.scaler != nullptr) o.scaler = given.scaler->scaler.get();
    if (given.on_shadowed_step != nullptr) {
      o.on_shadowed_step = [call = given.on_shadowed_step, user = given.user] {
        ddp::c::ForgetError();
        return ddp::c::OfCallback(call(user), "on_shadowed_step");
      };
    }
    model->join = std::make_unique<DistributedDataParallel::Join>(m, std::move(o));
    return absl::OkStatus();
  });
}

ddp_status ddp_model_finish_join(ddp_model* model) {
  return OnModel(model, nullptr, [&](DistributedDataParallel&, Stream) {
    if (model->join == nullptr) {
      return absl::FailedPreconditionError("ddp_model_finish_join without ddp_model_begin_join");
    }
    absl::Status status = model->join->Finish();
    if (status.ok()) model->join.reset();
    return status;
  });
}

ddp_status ddp_model_leave_join(ddp_model* model) {
  return OnModel(model, nullptr, [&](DistributedDataParallel&, Stream) {
    model->join.reset();
    return absl::OkStatus();
  });
}

ddp_status ddp_model_statistics(ddp_model* model, ddp_statistics* statistics, ddp_bucket_times* buckets,
                                size_t capacity) {
  return OnModel(model, nullptr, [&](DistributedDataParallel& m, Stream) {
    Arguments a;
    if (!a.Need(statistics, "statistics").ok()) return a.status();
    ddp_statistics result = a.Options(statistics, "ddp_statistics");
    if (!a.ok()) return a.status();
    const ddp::DdpStatistics s = m.statistics();
    result = {result.size, s.steps, s.plans, s.exposed_ns, s.communication_ns, s.overlap, s.buckets.size()};
    std::memcpy(statistics, &result, std::min(result.size, sizeof result));
    for (size_t i = 0; buckets != nullptr && i < std::min(capacity, s.buckets.size()); ++i) {
      const ddp::BucketTimes& b = s.buckets[i];
      buckets[i] = {b.bytes, b.gradients, b.ranges, b.operations, b.ready_ns, b.launched_ns, b.done_ns};
    }
    return absl::OkStatus();
  });
}
