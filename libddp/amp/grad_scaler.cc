// SPDX-License-Identifier: Apache-2.0
#include "ddp/grad_scaler.h"

#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "libddp/amp/amp_device.h"
#include "libddp/device/device_runtime.h"
#include "libddp/device/scale_rule.h"

namespace ddp {
namespace {

absl::Status CheckFactors(double growth, double backoff, int64_t interval) {
  if (!(growth > 1 && std::isfinite(growth))) {
    return absl::InvalidArgumentError(absl::StrCat("GradScaler: growth_factor is ", growth, "; it must be above 1"));
  }
  if (!(backoff > 0 && backoff < 1)) {
    return absl::InvalidArgumentError(
        absl::StrCat("GradScaler: backoff_factor is ", backoff, "; it must be above 0 and below 1"));
  }
  if (interval < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("GradScaler: growth_interval is ", interval, "; it must be at least 1"));
  }
  return absl::OkStatus();
}

absl::Status CheckScale(float scale, float min_scale) {
  if (std::isfinite(scale) && scale >= min_scale) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("GradScaler: a scale of ", scale,
                   " cannot be used; it must be finite and not below min_scale, which is ", min_scale));
}

class Scaler final : public GradScaler {
 public:
  Scaler(const GradScalerOptions& options, AmpDevice* device)
      : enabled_(options.enabled),
        home_(options.device),
        group_(options.sharded_over),
        device_(device),
        rule_{options.growth_factor, options.backoff_factor, options.min_scale, options.growth_interval,
              options.hysteresis} {}

  absl::Status Build(float initial_scale);

  bool enabled() const override { return enabled_; }
  absl::StatusOr<float> scale() override;
  const float* scale_data() override;
  absl::Status Scale(Buffers values, Stream stream) override;
  absl::Status Unscale(Optimizer& optimizer, Stream stream) override;
  absl::Status Step(Optimizer& optimizer, const StepOptions& given) override;
  absl::StatusOr<bool> FoundInf(const Optimizer& optimizer) override;
  absl::Status Update(Stream stream) override;
  absl::Status Update(float new_scale, Stream stream) override;
  absl::StatusOr<uint32_t*> AddFoundInf() override;
  absl::StatusOr<GradScalerState> State() override;
  absl::Status Load(const GradScalerState& state) override;
  absl::Status Broadcast(ProcessGroup& group, int root) override;

 private:
  // Of one optimizer, since the last Update.
  enum class Stage { kReady, kChecked, kUnscaled, kStepped };
  struct PerOptimizer {
    uint32_t* own_word = nullptr;  // kept as long as there are enough: captured graphs know it
    uint32_t* word = nullptr;      // where the finding is: own_word, or one of AddFoundInf's
    Stage stage = Stage::kReady;
    uint64_t used = 0;  // when, by uses_
  };

  // kNoStream: the last one.
  Stream On(Stream stream) { return stream_ = stream.device == home_ ? stream : stream_; }
  ScalerNumbers* numbers() { return static_cast<ScalerNumbers*>(memory_.get()); }
  bool IsWord(const uint32_t* word) {
    return word >= numbers()->found_inf && word < numbers()->found_inf + words_used_;
  }

  absl::Status CheckStreamOf(absl::string_view call, Stream stream) const;
  absl::Status CheckScaled(absl::string_view call) const;
  absl::Status CheckGrads(Buffers grads, absl::string_view call) const;
  absl::StatusOr<PerOptimizer*> Find(const Optimizer& optimizer);
  absl::Status ShareFinding(uint32_t* word, Stream stream);
  absl::Status UnscaleInto(Optimizer& optimizer, PerOptimizer& state, Stream stream);
  absl::Status StepFused(Optimizer& optimizer, PerOptimizer& state, StepOptions options);
  absl::StatusOr<bool> ReadFinding(const PerOptimizer& state, Stream stream);
  absl::Status SetScale(float scale, Stream stream);
  void BeginAnew();
  absl::Status ForgetFindings();

  const bool enabled_;
  const Device home_;
  Stream stream_{home_};  // the last one that the numbers were used on
  ProcessGroup* const group_;
  AmpDevice* const device_;
  ScaleRule rule_;
  std::shared_ptr<void> memory_;  // one ScalerNumbers
  int words_used_ = 0;
  uint64_t uses_ = 0;
  bool scaled_ = false;
  std::map<const Optimizer*, PerOptimizer> optimizers_;
};

absl::Status Scaler::Build(float initial_scale) {
  absl::StatusOr<std::shared_ptr<void>> memory = device_->Allocate(sizeof(ScalerNumbers), {home_});
  if (!memory.ok()) return memory.status();
  memory_ = *std::move(memory);
  const ScalerNumbers begin = {initial_scale, InverseOf(initial_scale), 0, rule_.hysteresis, {}};
  return device_->Write(numbers(), &begin, sizeof(begin), {home_});
}

// --- misuse ---------------------------------------------------------------------------------------------------------

absl::Status Scaler::CheckStreamOf(absl::string_view call, Stream stream) const {
  absl::Status status = CheckStream(home_, stream);
  if (status.ok()) return status;
  return absl::Status(status.code(), absl::StrCat("GradScaler::", call, ": ", status.message()));
}

absl::Status Scaler::CheckScaled(absl::string_view call) const {
  if (scaled_) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("GradScaler::", call, " before anything was scaled; call Scale on the loss, or on the gradients by ",
                   "which the backward pass begins"));
}

absl::Status Scaler::CheckGrads(Buffers grads, absl::string_view call) const {
  // Without gradients nothing is known; where ranks share them out, the others know.
  if (grads.empty() && group_ == nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat("GradScaler::", call, ": the optimizer has no gradients to look at"));
  }
  for (const Buffer& grad : grads) {
    if (!IsFloatingPoint(grad.dtype)) {
      return absl::InvalidArgumentError(absl::StrCat("GradScaler::", call, ": a gradient is ", Name(grad.dtype),
                                                     "; only floating-point gradients can be scaled"));
    }
    if (grad.device != home_) {
      return absl::InvalidArgumentError(absl::StrCat(
          "GradScaler::", call, ": a gradient is not on the scaler's device; make a scaler with that device"));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<Scaler::PerOptimizer*> Scaler::Find(const Optimizer& optimizer) {
  auto found = optimizers_.find(&optimizer);
  if (found == optimizers_.end()) {
    const absl::StatusOr<uint32_t*> word = AddFoundInf();
    if (!word.ok()) return word.status();
    found = optimizers_.emplace(&optimizer, PerOptimizer{.own_word = *word, .word = *word}).first;
  }
  found->second.used = ++uses_;
  return &found->second;
}

// A program may make new optimizers all the time: when there are no more words, the optimizer that was not used for
// longest gives its own back. Since the last Update it has found nothing.
absl::StatusOr<uint32_t*> Scaler::AddFoundInf() {
  if (words_used_ < kFoundInfWords) return &numbers()->found_inf[words_used_++];
  auto oldest = optimizers_.end();
  for (auto it = optimizers_.begin(); it != optimizers_.end(); ++it) {
    if (it->second.stage != Stage::kReady) continue;
    if (oldest == optimizers_.end() || it->second.used < oldest->second.used) oldest = it;
  }
  if (oldest == optimizers_.end()) {
    return absl::ResourceExhaustedError(
        absl::StrCat("GradScaler: more than ", kFoundInfWords,
                     " words of AddFoundInf and optimizers between two Updates; use several scalers"));
  }
  uint32_t* const word = oldest->second.own_word;
  optimizers_.erase(oldest);
  return word;
}

// --- the step -------------------------------------------------------------------------------------------------------

absl::StatusOr<float> Scaler::scale() {
  float scale = 1;
  if (!enabled_) return scale;
  const absl::Status status = device_->Read(&numbers()->scale, &scale, sizeof(scale), stream_);
  if (!status.ok()) return status;
  return scale;
}

const float* Scaler::scale_data() {
  if (!enabled_) return nullptr;
  scaled_ = true;  // whoever asks is about to
  return &numbers()->scale;
}

absl::Status Scaler::Scale(Buffers values, Stream stream) {
  if (!enabled_) return absl::OkStatus();
  for (const Buffer& value : values) {
    if (!IsFloatingPoint(value.dtype) || value.device != home_) {
      return absl::InvalidArgumentError(absl::StrCat("GradScaler::Scale: a value is ", Name(value.dtype), " on ",
                                                     value.device == home_ ? "the scaler's" : "another",
                                                     " device; it must be floating-point, on the scaler's device"));
    }
  }
  if (absl::Status s = CheckStreamOf("Scale", stream); !s.ok()) return s;
  if (absl::Status s = device_->Scale(values, &numbers()->scale, nullptr, On(stream)); !s.ok()) return s;
  scaled_ = true;
  return absl::OkStatus();
}

// A rank whose part is empty has found nothing, but comes to the reduction.
absl::Status Scaler::ShareFinding(uint32_t* word, Stream stream) {
  if (group_ == nullptr) return absl::OkStatus();
  const Buffer buffer = {word, 1, DType::kInt32, home_};
  return group_->AllReduce(buffer, buffer, {.op = ReduceOp::kMax}, stream).BlockStream(stream);
}

absl::Status Scaler::UnscaleInto(Optimizer& optimizer, PerOptimizer& state, Stream stream) {
  const Buffers grads = optimizer.grads();
  if (absl::Status s = CheckGrads(grads, "Unscale"); !s.ok()) return s;
  for (const Buffer& grad : grads) {
    if (grad.dtype == DType::kFloat16) {
      return absl::InvalidArgumentError(
          "GradScaler::Unscale: a gradient is float16, whose range is too small for it without the scale; keep "
          "gradients in float32, or let a fused optimizer unscale as it steps");
    }
  }
  if (absl::Status s = device_->Scale(grads, &numbers()->inv_scale, state.own_word, stream); !s.ok()) return s;
  state.word = state.own_word;
  state.stage = Stage::kUnscaled;
  return ShareFinding(state.word, stream);
}

absl::Status Scaler::Unscale(Optimizer& optimizer, Stream stream) {
  if (!enabled_) return absl::OkStatus();
  if (absl::Status s = CheckStreamOf("Unscale", stream); !s.ok()) return s;
  if (absl::Status s = CheckScaled("Unscale"); !s.ok()) return s;
  const absl::StatusOr<PerOptimizer*> state = Find(optimizer);
  if (!state.ok()) return state.status();
  if ((*state)->stage != Stage::kReady) {
    return absl::FailedPreconditionError(
        absl::StrCat("GradScaler::Unscale: the optimizer has already ",
                     (*state)->stage == Stage::kStepped ? "stepped" : "been unscaled",
                     " since the last Update; call Unscale at most once, before Step, and Update once a step"));
  }
  return UnscaleInto(optimizer, **state, On(stream));
}

absl::Status Scaler::StepFused(Optimizer& optimizer, PerOptimizer& state, StepOptions options) {
  if (state.stage == Stage::kReady) {
    const Buffers grads = optimizer.grads();
    if (absl::Status s = CheckGrads(grads, "Step"); !s.ok()) return s;
    if (options.found_inf != nullptr) {
      state.word = numbers()->found_inf + (options.found_inf - numbers()->found_inf);
    } else {
      state.word = state.own_word;
      if (absl::Status s = device_->Check(grads, state.word, options.stream); !s.ok()) return s;
    }
    state.stage = Stage::kChecked;
    if (absl::Status s = ShareFinding(state.word, options.stream); !s.ok()) return s;
  }
  if (state.stage == Stage::kChecked) options.inv_scale = &numbers()->inv_scale;
  options.found_inf = state.word;
  return optimizer.Step(options);
}

absl::Status Scaler::Step(Optimizer& optimizer, const StepOptions& given) {
  StepOptions options = given;
  if (options.inv_scale != nullptr) {
    return absl::InvalidArgumentError("GradScaler::Step: options.inv_scale is the scaler's to set; leave it null");
  }
  if (!enabled_) return optimizer.Step(options);
  if (absl::Status s = CheckStreamOf("Step", options.stream); !s.ok()) return s;
  options.stream = On(options.stream);
  if (options.found_inf != nullptr && !IsWord(options.found_inf)) {
    return absl::InvalidArgumentError(
        "GradScaler::Step: options.found_inf is not a word of this scaler, so that Update would not see it; give one "
        "from AddFoundInf");
  }
  if (absl::Status s = CheckScaled("Step"); !s.ok()) return s;
  const absl::StatusOr<PerOptimizer*> found = Find(optimizer);
  if (!found.ok()) return found.status();
  PerOptimizer& state = **found;
  if (state.stage == Stage::kStepped) {
    return absl::FailedPreconditionError(
        "GradScaler::Step: the optimizer has already stepped since the last Update; call Update once a step, after all "
        "optimizers");
  }
  if (optimizer.fused()) {
    if (absl::Status s = StepFused(optimizer, state, options); !s.ok()) return s;
  } else {
    if (state.stage == Stage::kReady) {
      if (absl::Status s = UnscaleInto(optimizer, state, options.stream); !s.ok()) return s;
    }
    const absl::StatusOr<bool> skip = ReadFinding(state, options.stream);
    if (!skip.ok()) return skip.status();
    StepOptions plain = options;
    plain.found_inf = nullptr;
    if (!*skip) {
      if (absl::Status s = optimizer.Step(plain); !s.ok()) return s;
    }
  }
  state.stage = Stage::kStepped;
  return absl::OkStatus();
}

absl::StatusOr<bool> Scaler::ReadFinding(const PerOptimizer& state, Stream stream) {
  uint32_t word = 0;
  const absl::Status status = device_->Read(state.word, &word, sizeof(word), stream);
  if (!status.ok()) return status;
  return word != 0;
}

absl::StatusOr<bool> Scaler::FoundInf(const Optimizer& optimizer) {
  if (!enabled_) return false;
  const auto found = optimizers_.find(&optimizer);
  if (found == optimizers_.end() || found->second.stage == Stage::kReady) {
    return absl::FailedPreconditionError(
        "GradScaler::FoundInf: the optimizer's gradients have not been looked at since the last Update; call Unscale "
        "or "
        "Step first");
  }
  return ReadFinding(found->second, stream_);
}

// --- the scale ------------------------------------------------------------------------------------------------------

void Scaler::BeginAnew() {
  for (auto& [optimizer, state] : optimizers_) {
    state.stage = Stage::kReady;
    state.word = state.own_word;
  }
}

absl::Status Scaler::Update(Stream stream) {
  if (!enabled_) return absl::OkStatus();
  if (absl::Status s = CheckStreamOf("Update", stream); !s.ok()) return s;
  if (absl::Status s = CheckScaled("Update"); !s.ok()) return s;
  bool looked = false;
  for (const auto& [optimizer, state] : optimizers_) looked |= state.stage != Stage::kReady;
  if (!looked) {
    return absl::FailedPreconditionError(
        "GradScaler::Update: no optimizer's gradients have been looked at since the last Update; call Step (or "
        "Unscale) "
        "before it");
  }
  if (absl::Status s = device_->Update(rule_, numbers(), On(stream)); !s.ok()) return s;
  BeginAnew();
  return absl::OkStatus();
}

absl::Status Scaler::ForgetFindings() {
  const uint32_t none[kFoundInfWords] = {};
  if (absl::Status s = device_->Write(numbers()->found_inf, none, sizeof(none), stream_); !s.ok()) return s;
  BeginAnew();
  return absl::OkStatus();
}

absl::Status Scaler::SetScale(float scale, Stream stream) {
  const float both[] = {scale, InverseOf(scale)};
  static_assert(offsetof(ScalerNumbers, inv_scale) == sizeof(float));
  return device_->Write(&numbers()->scale, both, sizeof(both), stream);
}

absl::Status Scaler::Update(float new_scale, Stream stream) {
  if (!enabled_) return absl::OkStatus();
  if (absl::Status s = CheckStreamOf("Update", stream); !s.ok()) return s;
  if (absl::Status s = CheckScale(new_scale, rule_.min_scale); !s.ok()) return s;
  if (absl::Status s = SetScale(new_scale, On(stream)); !s.ok()) return s;
  return ForgetFindings();
}

absl::StatusOr<GradScalerState> Scaler::State() {
  GradScalerState state = {enabled_, 1, rule_.growth_factor, rule_.backoff_factor, rule_.growth_interval, 0, 0};
  if (!enabled_) return state;
  ScalerNumbers now;
  if (absl::Status s = device_->Read(numbers(), &now, kCommonBytes, stream_); !s.ok()) return s;
  state.scale = now.scale;
  state.growth_tracker = now.growth_tracker;
  state.hysteresis_tracker = now.hysteresis_tracker;
  return state;
}

absl::Status Scaler::Load(const GradScalerState& state) {
  if (!enabled_) return absl::OkStatus();
  if (!state.enabled) {
    return absl::FailedPreconditionError(
        "GradScaler::Load: the state is of a scaler that was not enabled; make this one with enabled = false, or go on "
        "without loading");
  }
  if (absl::Status s = CheckFactors(state.growth_factor, state.backoff_factor, state.growth_interval); !s.ok())
    return s;
  if (!(std::isfinite(state.scale) && state.scale >= kLeastScale)) {
    return absl::InvalidArgumentError(
        absl::StrCat("GradScaler::Load: a scale of ", state.scale, " cannot be used; it must be finite and above 0"));
  }
  if (state.growth_tracker < 0 || state.hysteresis_tracker < 0) {
    return absl::InvalidArgumentError(absl::StrCat("GradScaler::Load: growth_tracker is ", state.growth_tracker,
                                                   ", hysteresis_tracker ", state.hysteresis_tracker,
                                                   "; neither can be below 0"));
  }
  const ScalerNumbers now = {state.scale, InverseOf(state.scale), state.growth_tracker, state.hysteresis_tracker, {}};
  if (absl::Status s = device_->Write(numbers(), &now, kCommonBytes, stream_); !s.ok()) return s;
  rule_.growth_factor = state.growth_factor;
  rule_.backoff_factor = state.backoff_factor;
  rule_.growth_interval = state.growth_interval;
  return absl::OkStatus();
}

absl::Status Scaler::Broadcast(ProcessGroup& group, int root) {
  if (!enabled_) return absl::OkStatus();
  const Buffer common = {numbers(), kCommonBytes, DType::kUInt8, home_};
  if (absl::Status s = group.Broadcast(common, root, stream_).Wait(); !s.ok()) return s;
  // A rank that took part in the others' steps without an Update of its own may have noted their infinities.
  return ForgetFindings();
}

}  // namespace

absl::StatusOr<std::unique_ptr<GradScaler>> GradScaler::Create(const GradScalerOptions& options) {
  if (absl::Status s = CheckFactors(options.growth_factor, options.backoff_factor, options.growth_interval); !s.ok()) {
    return s;
  }
  if (!(options.min_scale > 0 && std::isfinite(options.min_scale))) {
    return absl::InvalidArgumentError(
        absl::StrCat("GradScaler: min_scale is ", options.min_scale, "; it must be above 0 and finite"));
  }
  if (absl::Status s = CheckScale(options.initial_scale, options.min_scale); !s.ok()) return s;
  if (options.hysteresis < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("GradScaler: hysteresis is ", options.hysteresis, "; it must be at least 1"));
  }
  if (!options.enabled) return std::make_unique<Scaler>(options, nullptr);
  auto scaler = std::make_unique<Scaler>(options, AmpDeviceOf(options.device));
  if (absl::Status s = scaler->Build(options.initial_scale); !s.ok()) return s;
  return scaler;
}

}  // namespace ddp
