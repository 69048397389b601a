// SPDX-License-Identifier: Apache-2.0
// The part of ddp/ddp_c.h about mixed precision.
#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "ddp/autocast.h"
#include "ddp/ddp_c.h"
#include "ddp/distributed_data_parallel.h"
#include "ddp/grad_scaler.h"
#include "ddp/optimizer.h"
#include "libddp/c/arguments.h"
#include "libddp/c/handles.h"

namespace ddp::c {
namespace {

bool Holds(const Buffer& span, const void* data) {
  const auto* const begin = static_cast<const char*>(span.data);
  return data >= begin && data < begin + span.count * SizeOf(span.dtype);
}

// The library's gradients, and those in the program's memory.
std::vector<Buffer> GradsOf(const DistributedDataParallel& model) {
  const absl::Span<const Buffer> spans = model.grad_spans();
  std::vector<Buffer> grads(spans.begin(), spans.end());
  model.ForEachGrad([&](size_t index, const Parameter&) {
    const Buffer grad = model.grad(index);
    const auto holds = [&](const Buffer& span) { return Holds(span, grad.data); };
    if (grad.data != nullptr && std::none_of(spans.begin(), spans.end(), holds)) grads.push_back(grad);
  });
  return grads;
}

// The program's optimizer.
class CallbackOptimizer : public Optimizer {
 public:
  CallbackOptimizer(const ddp_optimizer_options& options, std::vector<Buffer> grads)
      : options_(options), grads_(std::move(grads)) {}

  Buffers grads() const override {
    if (options_.model != nullptr) grads_ = GradsOf(*options_.model->model);
    return grads_;
  }
  bool fused() const override { return options_.fused != 0; }

  absl::Status Step(const StepOptions& options) override {
    ddp_step_options o = {};
    o.size = sizeof o;
    o.device = ToC(options.stream.device);
    o.stream = options.stream == kNoStream ? DDP_NO_STREAM : options.stream.native;
    o.inv_scale = options.inv_scale;
    o.found_inf = options.found_inf;
    o.skip_step = options.skip_step;
    ForgetError();
    return OfCallback(options_.step(options_.user, &o), "the optimizer's step");
  }

 private:
  ddp_optimizer_options options_;
  mutable std::vector<Buffer> grads_;  // those of a model move: ddp_model_set_grad
};

GradScalerOptions OptionsOfScaler(Arguments& arguments, const ddp_scaler_options& given) {
  GradScalerOptions options;
  options.enabled = given.disabled == 0;
  if (given.initial_scale != 0) options.initial_scale = given.initial_scale;
  if (given.growth_factor != 0) options.growth_factor = given.growth_factor;
  if (given.backoff_factor != 0) options.backoff_factor = given.backoff_factor;
  if (given.growth_interval != 0) options.growth_interval = given.growth_interval;
  if (given.min_scale != 0) options.min_scale = given.min_scale;
  if (given.hysteresis != 0) options.hysteresis = given.hysteresis;
  options.device = arguments.OfDevice(given.device);
  if (given.sharded_over != nullptr) options.sharded_over = given.sharded_over->group;
  return options;
}

// Calls f(scaler, stream) on a scaler that is there.
template <typename F>
ddp_status OnScaler(ddp_scaler* scaler, void* stream, F f) noexcept {
  return Guard([&]() -> absl::Status {
    Arguments a;
    if (!a.Need(scaler, "scaler").ok()) return a.status();
    return f(*scaler->scaler, OnDevice(scaler->device, stream));
  });
}

Device::Kind KindOf(Arguments& arguments, int32_t kind) { return arguments.OfDevice({kind, 0}).kind; }

}  // namespace
}  // namespace ddp::c

// NOLINTBEGIN(google-global-names-in-headers): this is no header
using ddp::GradScaler;
using ddp::Stream;
using ddp::c::Arguments;
using ddp::c::Guard;
using ddp::c::OnScaler;
// NOLINTEND(google-global-names-in-headers)

struct ddp_optimizer {
  std::unique_ptr<ddp::Optimizer> optimizer;
};

struct ddp_autocast {
  ddp::Autocast scope;
};

ddp_status ddp_optimizer_create(const ddp_optimizer_options* options, ddp_optimizer** optimizer) {
  return Guard([&] {
    Arguments a;
    const auto o = a.Result(optimizer, "optimizer").Need(options, "options").Options(options, "ddp_optimizer_options");
    if (!a.ok()) return a.status();
    std::vector<ddp::Buffer> grads = a.Ranges(o.grads, o.grad_ranges, "grads");
    if (o.step == nullptr) a.Refuse("step is null");
    if (!a.ok()) return a.status();
    *optimizer = new ddp_optimizer{std::make_unique<ddp::c::CallbackOptimizer>(o, std::move(grads))};
    return absl::OkStatus();
  });
}

void ddp_optimizer_destroy(ddp_optimizer* optimizer) { delete optimizer; }

ddp_status ddp_scaler_create(const ddp_scaler_options* options, ddp_scaler** scaler) {
  return Guard([&] {
    Arguments a;
    const auto given = a.Result(scaler, "scaler").Options(options, "ddp_scaler_options");
    const ddp::GradScalerOptions o = ddp::c::OptionsOfScaler(a, given);
    if (!a.ok()) return a.status();
    auto made = GradScaler::Create(o);
    if (!made.ok()) return made.status();
    *scaler = new ddp_scaler{*std::move(made), o.device};
    return absl::OkStatus();
  });
}

void ddp_scaler_destroy(ddp_scaler* scaler) { delete scaler; }

ddp_status ddp_scaler_get_scale(ddp_scaler* scaler, float* scale) {
  return OnScaler(scaler, nullptr, [&](GradScaler& s, Stream) {
    Arguments a;
    if (!a.Need(scale, "scale").ok()) return a.status();
    const absl::StatusOr<float> got = s.scale();
    if (got.ok()) *scale = *got;
    return got.status();
  });
}

const float* ddp_scaler_scale_data(ddp_scaler* scaler) {
  return scaler == nullptr ? nullptr : scaler->scaler->scale_data();
}

ddp_status ddp_scaler_scale(ddp_scaler* scaler, const ddp_buffer* values, size_t ranges, void* stream) {
  return OnScaler(scaler, stream, [&](GradScaler& s, Stream on) {
    Arguments a;
    const std::vector<ddp::Buffer> all = a.Ranges(values, ranges, "values");
    return a.ok() ? s.Scale(all, on) : a.status();
  });
}

ddp_status ddp_scaler_unscale(ddp_scaler* scaler, ddp_optimizer* optimizer, void* stream) {
  return OnScaler(scaler, stream, [&](GradScaler& s, Stream on) {
    Arguments a;
    return a.Need(optimizer, "optimizer").ok() ? s.Unscale(*optimizer->optimizer, on) : a.status();
  });
}

ddp_status ddp_scaler_step(ddp_scaler* scaler, ddp_optimizer* optimizer, const ddp_step_options* options) {
  return OnScaler(scaler, options == nullptr ? nullptr : options->stream, [&](GradScaler& s, Stream on) {
    Arguments a;
    const auto o = a.Need(optimizer, "optimizer").Options(options, "ddp_step_options");
    if (!a.ok()) return a.status();
    return s.Step(*optimizer->optimizer, {on, o.inv_scale, o.found_inf, o.skip_step});
  });
}

ddp_status ddp_scaler_found_inf(ddp_scaler* scaler, ddp_optimizer* optimizer, int32_t* found) {
  return OnScaler(scaler, nullptr, [&](GradScaler& s, Stream) {
    Arguments a;
    if (!a.Need(optimizer, "optimizer").Need(found, "found").ok()) return a.status();
    const absl::StatusOr<bool> got = s.FoundInf(*optimizer->optimizer);
    if (got.ok()) *found = *got ? 1 : 0;
    return got.status();
  });
}

ddp_status ddp_scaler_update(ddp_scaler* scaler, void* stream) {
  return OnScaler(scaler, stream, [](GradScaler& s, Stream on) { return s.Update(on); });
}

ddp_status ddp_scaler_set_scale(ddp_scaler* scaler, float scale, void* stream) {
  return OnScaler(scaler, stream, [&](GradScaler& s, Stream on) { return s.Update(scale, on); });
}

ddp_status ddp_scaler_add_found_inf(ddp_scaler* scaler, uint32_t** word) {
  return OnScaler(scaler, nullptr, [&](GradScaler& s, Stream) {
    Arguments a;
    if (!a.Result(word, "word").ok()) return a.status();
    const absl::StatusOr<uint32_t*> got = s.AddFoundInf();
    if (got.ok()) *word = *got;
    return got.status();
  });
}

ddp_status ddp_scaler_get_state(ddp_scaler* scaler, ddp_scaler_state* state) {
  return OnScaler(scaler, nullptr, [&](GradScaler& s, Stream) {
    Arguments a;
    if (!a.Need(state, "state").ok()) return a.status();
    ddp_scaler_state result = a.Options(state, "ddp_scaler_state");
    if (!a.ok()) return a.status();
    const absl::StatusOr<ddp::GradScalerState> got = s.State();
    if (!got.ok()) return got.status();
    result = {result.size,         got->enabled ? 1 : 0, got->scale,          got->growth_factor,
              got->backoff_factor, got->growth_interval, got->growth_tracker, got->hysteresis_tracker};
    std::memcpy(state, &result, std::min(result.size, sizeof result));
    return absl::OkStatus();
  });
}

ddp_status ddp_scaler_load(ddp_scaler* scaler, const ddp_scaler_state* state) {
  return OnScaler(scaler, nullptr, [&](GradScaler& s, Stream) {
    Arguments a;
    const auto g = a.Need(state, "state").Options(state, "ddp_scaler_state");
    if (!a.ok()) return a.status();
    return s.Load({g.enabled != 0, g.scale, g.growth_factor, g.backoff_factor, g.growth_interval, g.growth_tracker,
                   g.hysteresis_tracker});
  });
}

ddp_status ddp_scaler_broadcast(ddp_scaler* scaler, ddp_group* group, int32_t root) {
  return OnScaler(scaler, nullptr, [&](GradScaler& s, Stream) {
    Arguments a;
    return a.Need(group, "group").ok() ? s.Broadcast(*group->group, root) : a.status();
  });
}

ddp_status ddp_autocast_begin(int32_t device_kind, ddp_dtype dtype, ddp_autocast** scope) {
  return Guard([&] {
    Arguments a;
    const ddp::DType type = a.Result(scope, "scope").Type(dtype);
    const ddp::Device::Kind kind = ddp::c::KindOf(a, device_kind);
    if (a.ok()) *scope = new ddp_autocast{ddp::Autocast(kind, type)};
    return a.status();
  });
}

void ddp_autocast_end(ddp_autocast* scope) { delete scope; }

ddp_status ddp_autocast_type_for(int32_t op, int32_t device_kind, const ddp_dtype* inputs, size_t count,
                                 ddp_dtype* dtype) {
  return Guard([&] {
    Arguments a;
    const ddp::Device::Kind kind = ddp::c::KindOf(a, device_kind);
    a.Need(inputs, "inputs").Need(dtype, "dtype");
    if (op < 0 || op > static_cast<int32_t>(ddp::AutocastOp::kOther)) a.Refuse("no AutocastOp has the number ", op);
    if (count == 0) a.Refuse("inputs is empty");
    std::vector<ddp::DType> types;
    for (size_t i = 0; i < count && a.ok(); ++i) types.push_back(a.Type(inputs[i]));
    if (!a.ok()) return a.status();
    *dtype = static_cast<ddp_dtype>(ddp::Autocast::TypeFor(static_cast<ddp::AutocastOp>(op), kind, types));
    return absl::OkStatus();
  });
}

ddp_status ddp_autocast_cast_weight(const ddp_buffer* weight, ddp_dtype dtype, void* stream, ddp_memory** memory) {
  return Guard([&] {
    Arguments a;
    if (!a.Result(memory, "memory").Need(weight, "weight").ok()) return a.status();
    const ddp::Buffer from = a.One(*weight);
    const ddp::DType type = a.Type(dtype);
    if (!a.ok()) return a.status();
    auto made = ddp::Autocast::CastWeight(from, type, ddp::c::OnDevice(from.device, stream));
    if (!made.ok()) return made.status();
    *memory = new ddp_memory{*std::move(made)};
    return absl::OkStatus();
  });
}
