// SPDX-License-Identifier: Apache-2.0
#include "ddp/autocast.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>

#include "libddp/amp/amp_device.h"
#include "libddp/base/log.h"
#include "libddp/device/device_runtime.h"

namespace ddp {
namespace {

enum class Rule { kLower, kFloat32, kWidest, kFirst };

// Torch has a list for CUDA and a shorter one for the CPU (aten/src/ATen/autocast_mode.cpp), where most of what CUDA
// runs in float32 runs in the type of its input.
Rule RuleOf(AutocastOp op, Device::Kind kind) {
  const bool cuda = kind == Device::Kind::kCuda;
  switch (op) {
    case AutocastOp::kConvolution:
    case AutocastOp::kLinear:
    case AutocastOp::kMatmul:
      return Rule::kLower;
    case AutocastOp::kCrossEntropy:
    case AutocastOp::kNll:
    case AutocastOp::kLoss:
      return Rule::kFloat32;
    case AutocastOp::kSoftmax:
    case AutocastOp::kLogSoftmax:
    case AutocastOp::kLayerNormStatistics:
    case AutocastOp::kGroupNormStatistics:
    case AutocastOp::kExp:
    case AutocastOp::kLog:
    case AutocastOp::kPow:
    case AutocastOp::kSum:
    case AutocastOp::kNorm:
      return cuda ? Rule::kFloat32 : Rule::kFirst;
    case AutocastOp::kAdd:
    case AutocastOp::kConcat:
      return Rule::kWidest;
    case AutocastOp::kDot:
      return cuda ? Rule::kWidest : Rule::kFirst;
    case AutocastOp::kBatchNorm:
    case AutocastOp::kRelu:
    case AutocastOp::kPool:
    case AutocastOp::kOther:
      break;
  }
  return Rule::kFirst;
}

// The narrowest type that holds both; float16 and bfloat16 have float32 in common.
DType Wider(DType a, DType b) {
  if (a == b) return a;
  return a == DType::kFloat64 || b == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
}

struct Policy {
  bool enabled = false;
  DType dtype = DType::kFloat32;
};

// A converted weight. Between outermost scopes its memory is kept for the next conversion.
struct Copy {
  std::shared_ptr<void> memory;
  void* stream = nullptr;  // on which it was made
  bool valid = false;
};
using CopyKey = std::tuple<const void*, size_t, DType, DType>;

// What a thread's scopes have in common.
struct Thread {
  std::array<Policy, 2> policies = {Policy{false, Autocast::DefaultType(Device::Kind::kCpu)},
                                    Policy{false, Autocast::DefaultType(Device::Kind::kCuda)}};
  int depth = 0;
  std::map<CopyKey, Copy> copies;
};

Thread& ThisThread() {
  thread_local Thread thread;
  return thread;
}

Policy& PolicyOf(Device::Kind kind) { return ThisThread().policies[static_cast<size_t>(kind)]; }

absl::StatusOr<std::shared_ptr<void>> Convert(const Buffer& weight, DType dtype, std::shared_ptr<void> memory,
                                              Stream stream) {
  AmpDevice* const device = AmpDeviceOf(weight.device);
  const bool waits = IsGpu(weight.device) && stream == kNoStream;
  if (stream.device != weight.device) stream = {weight.device};
  if (memory == nullptr) {
    absl::StatusOr<std::shared_ptr<void>> fresh =
        device->Allocate(std::max<size_t>(1, weight.count * SizeOf(dtype)), stream);
    if (!fresh.ok()) return fresh.status();
    memory = *std::move(fresh);
  }
  const Buffer out = {memory.get(), weight.count, dtype, weight.device};
  if (absl::Status s = device->Convert(weight, out, stream); !s.ok()) return s;
  if (waits) {
    if (absl::Status s = Synchronize(stream); !s.ok()) return s;
  }
  return memory;
}

}  // namespace

DType Autocast::DefaultType(Device::Kind kind) {
  return kind == Device::Kind::kCpu ? DType::kBFloat16 : DType::kFloat16;
}

Autocast::Autocast(Device::Kind kind, DType dtype)
    : kind_(kind), former_dtype_(PolicyOf(kind).dtype), former_enabled_(PolicyOf(kind).enabled) {
  const bool lower = dtype == DType::kFloat16 || dtype == DType::kBFloat16;
  if (!lower && dtype != DType::kFloat32) {
    LogWarn("Autocast: ", Name(dtype),
            " is no type for mixed precision, which stays off in this scope; give float16 or bfloat16");
  }
  PolicyOf(kind) = {lower, lower ? dtype : DefaultType(kind)};
  ++ThisThread().depth;
}

Autocast::~Autocast() {
  PolicyOf(kind_) = {former_enabled_, former_dtype_};
  Thread& thread = ThisThread();
  if (--thread.depth > 0) return;
  // What was not used in this round is not kept for the next one.
  for (auto it = thread.copies.begin(); it != thread.copies.end();) {
    it = std::exchange(it->second.valid, false) ? std::next(it) : thread.copies.erase(it);
  }
}

bool Autocast::enabled(Device::Kind kind) { return PolicyOf(kind).enabled; }

DType Autocast::dtype(Device::Kind kind) { return PolicyOf(kind).dtype; }

DType Autocast::TypeFor(AutocastOp op, Device::Kind kind, absl::Span<const DType> inputs) {
  const Policy policy = PolicyOf(kind);
  const Rule rule = RuleOf(op, kind);
  const auto* const first = std::find_if(inputs.begin(), inputs.end(), IsFloatingPoint);
  if (first == inputs.end()) return inputs[0];
  DType widest = *first;
  for (const DType input : inputs) {
    if (IsFloatingPoint(input)) widest = Wider(widest, input);
  }
  if (rule == Rule::kWidest) return widest;
  if (!policy.enabled || rule == Rule::kFirst) return *first;
  if (widest == DType::kFloat64) return DType::kFloat64;
  return rule == Rule::kLower ? policy.dtype : DType::kFloat32;
}

absl::StatusOr<Allocation> Autocast::CastWeight(const Buffer& weight, DType dtype, Stream stream) {
  const size_t bytes = weight.count * SizeOf(dtype);
  if (weight.dtype == dtype) return Allocation(std::shared_ptr<void>(weight.data, [](void*) {}), bytes, weight.device);
  if (absl::Status s = CheckStream(weight.device, stream); !s.ok()) {
    return absl::Status(s.code(), absl::StrCat("Autocast::CastWeight: ", s.message()));
  }
  Thread& thread = ThisThread();
  if (thread.depth == 0) {
    absl::StatusOr<std::shared_ptr<void>> memory = Convert(weight, dtype, nullptr, stream);
    if (!memory.ok()) return memory.status();
    return Allocation(*std::move(memory), bytes, weight.device);
  }
  Copy& copy = thread.copies[{weight.data, weight.count, weight.dtype, dtype}];
  if (!copy.valid) {
    // Memory that a backward pass still reads, here or on another stream, is left to it.
    const bool ours = copy.memory.use_count() == 1 && copy.stream == stream.native;
    std::shared_ptr<void> old = ours ? copy.memory : nullptr;
    absl::StatusOr<std::shared_ptr<void>> memory = Convert(weight, dtype, std::move(old), stream);
    if (!memory.ok()) return memory.status();
    copy = {*std::move(memory), stream.native, true};
  }
  return Allocation(copy.memory, bytes, weight.device);
}

}  // namespace ddp
