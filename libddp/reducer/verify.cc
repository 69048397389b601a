// SPDX-License-Identifier: Apache-2.0
#include "libddp/reducer/verify.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <set>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "ddp/collectives.h"
#include "libddp/base/exact_text.h"
#include "libddp/comm/base/internal_group.h"
#include "libddp/reducer/without_exceptions.h"

namespace ddp {
namespace {

// --- one rank by itself ---------------------------------------------------------------------------------------------

DType GradType(const Parameter& p) { return p.grad.data == nullptr ? p.value.dtype : p.grad.dtype; }

std::string CheckDevice(const ProcessGroup& group, const Buffer& b) {
  if (b.device.kind == Device::Kind::kCpu || b.device == group.device()) return "";
  if (group.device().kind == Device::Kind::kCpu) return "is not in CPU memory, but the group's backend works there";
  return absl::StrCat("is on GPU ", b.device.index, ", but the group works on GPU ", group.device().index,
                      "; create it there (Context::device says where)");
}

std::string CheckParameter(const ProcessGroup& group, const Parameter& p, Device device) {
  if (p.name.empty() || p.name.find('\n') != std::string::npos) return "a name must not be empty, nor have line ends";
  if (!IsFloatingPoint(p.value.dtype) || !IsFloatingPoint(GradType(p))) {
    return "only floating-point parameters have gradients";
  }
  for (const Buffer* b : {&p.value, &p.grad}) {
    if (const std::string wrong = CheckDevice(group, *b); !wrong.empty()) return wrong;
    if (b->device == device || (b == &p.grad && b->data == nullptr)) continue;
    return "lies on another device than the first parameter; a model lies on one device";
  }
  if (reinterpret_cast<uintptr_t>(p.grad.data) % SizeOf(GradType(p)) != 0) {
    return absl::StrCat("the gradient's address is not a multiple of ", SizeOf(GradType(p)), ", its elements' size");
  }
  if (p.grad.data != nullptr && p.grad.count != p.value.count) {
    return absl::StrCat("the gradient has ", p.grad.count, " elements, the value ", p.value.count);
  }
  int64_t product = 1;
  bool too_large = false;
  for (int64_t n : p.shape) {
    if (n < 0) return absl::StrCat("the shape [", absl::StrJoin(p.shape, ", "), "] has a negative number");
    too_large |= __builtin_mul_overflow(product, n, &product);
  }
  if (!p.shape.empty() && (too_large || product != static_cast<int64_t>(p.value.count))) {
    return absl::StrCat("the shape [", absl::StrJoin(p.shape, ", "), "] has ",
                        too_large ? std::string("too many") : absl::StrCat(product), " elements, the value ",
                        p.value.count);
  }
  return "";
}

std::string CheckOptions(const ProcessGroup& group, const DdpOptions& options) {
  if (options.op != ReduceOp::kAvg && options.op != ReduceOp::kSum) return "op must be kAvg or kSum";
  if (options.bucket_bytes == 0) return "bucket_bytes must be above 0";
  if (!(options.gradient_predivide_factor > 0) || !std::isfinite(options.gradient_predivide_factor)) {
    return absl::StrCat("gradient_predivide_factor is ", options.gradient_predivide_factor,
                        ", but must be finite and above 0");
  }
  if (options.check_replicas.value_or(0) < 0) {
    return absl::StrCat("check_replicas is ", *options.check_replicas, ", but must be 0 (never) or a number of steps");
  }
  std::set<absl::string_view> names;
  for (const ModelBuffer& b : options.buffers) {
    if (b.name.empty() || b.name.find('\n') != std::string::npos) {
      return "the name of a buffer must not be empty, nor have line ends";
    }
    if (!names.insert(b.name).second) return absl::StrCat("two buffers have the name '", b.name, "'");
    if (b.data.data == nullptr && b.data.count > 0) return absl::StrCat("buffer '", b.name, "' has no memory");
    if (const std::string wrong = CheckDevice(group, b.data); !wrong.empty()) {
      return absl::StrCat("buffer '", b.name, "' ", wrong);
    }
  }
  return "";
}

// Memory that two tensors share would be reduced, or broadcast, twice.
std::string CheckOverlaps(const std::vector<Parameter>& parameters, const std::vector<ModelBuffer>& buffers) {
  struct Range {
    const char* begin;
    const char* end;
    std::string what;
  };
  std::vector<Range> ranges;
  const auto add = [&](const Buffer& b, absl::string_view what, const std::string& name) {
    if (b.data == nullptr || b.count == 0) return;
    const char* const begin = static_cast<const char*>(b.data);
    ranges.push_back({begin, begin + b.count * SizeOf(b.dtype), absl::StrCat(what, " '", name, "'")});
  };
  for (const Parameter& p : parameters) {
    add(p.value, "the value of", p.name);
    add(p.grad, "the gradient of", p.name);
  }
  for (const ModelBuffer& b : buffers) add(b.data, "buffer", b.name);
  std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
  for (size_t i = 1; i < ranges.size(); ++i) {
    if (ranges[i].begin < ranges[i - 1].end) {
      return absl::StrCat(ranges[i - 1].what, " and ", ranges[i].what,
                          " share memory; give each tensor once, tied weights too");
    }
  }
  return "";
}

absl::Status CheckAlone(const ProcessGroup& group, const std::vector<Parameter>& parameters,
                        const DdpOptions& options) {
  const auto error = [&](const auto&... what) {
    return absl::InvalidArgumentError(absl::StrCat("rank ", group.rank(), ": ", what...));
  };
  if (parameters.empty()) return error("DistributedDataParallel needs at least one parameter");
  if (const std::string wrong = CheckOptions(group, options); !wrong.empty()) return error("DdpOptions: ", wrong);
  std::set<absl::string_view> names;
  for (const Parameter& p : parameters) {
    std::string wrong = CheckParameter(group, p, parameters[0].value.device);
    if (wrong.empty() && !names.insert(p.name).second) wrong = "two parameters have this name";
    if (!wrong.empty()) return error("parameter '", p.name, "': ", wrong);
  }
  if (const std::string wrong = CheckOverlaps(parameters, options.buffers); !wrong.empty()) return error(wrong);
  return absl::OkStatus();
}

// --- the ranks together ---------------------------------------------------------------------------------------------

const char* PlaceText(const Buffer& b) { return b.device.kind == Device::Kind::kCpu ? "" : ", on a GPU"; }

std::string Describe(const Parameter& p) {
  std::string text = absl::StrCat("'", p.name, "' ", std::string(Name(p.value.dtype)));
  if (GradType(p) != p.value.dtype) absl::StrAppend(&text, " (gradient ", std::string(Name(GradType(p))), ")");
  if (p.shape.empty()) {
    absl::StrAppend(&text, " of ", p.value.count, " elements");
  } else {
    absl::StrAppend(&text, " [", absl::StrJoin(p.shape, ", "), "]");
  }
  if (p.grad.data != nullptr) absl::StrAppend(&text, " with a gradient of the caller's");
  if (p.frozen) absl::StrAppend(&text, ", frozen");
  absl::StrAppend(&text, PlaceText(p.value));
  return text;
}

std::string BytesText(size_t bytes) { return bytes == DdpOptions::kAutoBucketBytes ? "auto" : absl::StrCat(bytes); }

absl::StatusOr<std::string> NameOf(CommHook* hook) {
  if (hook == nullptr) return "none";
  return WithoutExceptions([] { return "DdpOptions: name() of the hook"; },
                           [&]() -> absl::StatusOr<std::string> { return hook->name(); });
}

std::vector<std::string> DescribeOptions(const DdpOptions& o, const std::string& hook) {
  return {absl::StrCat("bucket_bytes=", BytesText(o.bucket_bytes)),
          absl::StrCat("first_bucket_bytes=", o.first_bucket_bytes),
          absl::StrCat("piece_bytes=", o.piece_bytes),
          absl::StrCat("replan=", o.replan),
          absl::StrCat("op=", std::string(Name(o.op))),
          absl::StrCat("weighted=", o.weighted),
          absl::StrCat("gradient_predivide_factor=", ExactText(o.gradient_predivide_factor)),
          absl::StrCat("reduce_in_float32=", o.reduce_in_float32),
          absl::StrCat("nonfinite=", o.nonfinite != nullptr ? "set" : "unset"),
          absl::StrCat("unused=", o.unused == UnusedParameters::kError ? "kError" : "kDetect"),
          absl::StrCat("static_graph=", o.static_graph),
          absl::StrCat("copy_gradients=", o.copy_gradients),
          absl::StrCat("broadcast_parameters=", o.broadcast_parameters),
          absl::StrCat("broadcast_buffers=", o.broadcast_buffers),
          absl::StrCat("check_replicas=", o.check_replicas.value_or(0)),
          absl::StrCat("check_nan=", o.check_nan),
          absl::StrCat("hook=", hook)};
}

// What has to be equal, one section a blank line: options, parameters, buffers; one line for each. Names have no line
// ends.
std::string Fingerprint(const std::vector<Parameter>& parameters, const DdpOptions& options, const std::string& hook) {
  std::vector<std::string> tensors, buffers;
  tensors.reserve(parameters.size());
  for (const Parameter& p : parameters) tensors.push_back(Describe(p));
  for (const ModelBuffer& b : options.buffers) {
    buffers.push_back(absl::StrCat("'", b.name, "' ", std::string(Name(b.data.dtype)), " of ", b.data.count,
                                   " elements", b.replicated ? ", replicated" : "", PlaceText(b.data)));
  }
  return absl::StrCat(absl::StrJoin(DescribeOptions(options, hook), "\n"), "\n\n", absl::StrJoin(tensors, "\n"), "\n\n",
                      absl::StrJoin(buffers, "\n"));
}

absl::Status FirstDifference(int rank, absl::string_view zero, absl::string_view other) {
  const std::vector<absl::string_view> all_a = absl::StrSplit(zero, "\n\n"), all_b = absl::StrSplit(other, "\n\n");
  constexpr absl::string_view kRemedy = "; build the same model, in the same order, on all ranks";
  constexpr absl::string_view kWhat[] = {"option", "parameter", "buffer"};
  for (size_t section = 0; section < 3; ++section) {
    const std::vector<absl::string_view> a = absl::StrSplit(all_a[section], '\n', absl::SkipEmpty());
    const std::vector<absl::string_view> b = absl::StrSplit(all_b[section], '\n', absl::SkipEmpty());
    for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
      if (a[i] == b[i]) continue;
      if (section == 0) {
        return absl::FailedPreconditionError(absl::StrCat("ranks have different options: rank 0 has ", a[i], ", rank ",
                                                          rank, " has ", b[i], "; give all ranks the same DdpOptions"));
      }
      return absl::FailedPreconditionError(absl::StrCat("ranks disagree about ", kWhat[section], " ", i,
                                                        ": rank 0 has ", a[i], ", rank ", rank, " has ", b[i],
                                                        kRemedy));
    }
    if (a.size() == b.size()) continue;
    const bool zero_has_more = a.size() > b.size();
    return absl::FailedPreconditionError(absl::StrCat("ranks have different numbers of ", kWhat[section],
                                                      "s: rank 0 has ", a.size(), ", rank ", rank, " has ", b.size(),
                                                      "; the first that only rank ", zero_has_more ? 0 : rank,
                                                      " has is ", zero_has_more ? a[b.size()] : b[a.size()], kRemedy));
  }
  return absl::InternalError("the fingerprints of equal models differ");
}

absl::Status Verify(ProcessGroup& group, const std::vector<Parameter>& parameters, const DdpOptions& options,
                    const absl::Status& mine) {
  const absl::StatusOr<std::string> hook = NameOf(options.hook.get());
  absl::Status alone = mine.ok() ? hook.status() : mine;
  alone = alone.ok() ? CheckAlone(group, parameters, options)
                     : absl::Status(alone.code(), absl::StrCat("rank ", group.rank(), ": ", alone.message()));
  // A rank with a mistake of its own sends that instead, marked by a character that no fingerprint begins with.
  absl::StatusOr<std::vector<std::string>> all =
      GatherStrings(group, alone.ok() ? Fingerprint(parameters, options, *hook) : absl::StrCat("!", alone.message()));
  if (!all.ok()) return all.status();
  if (!alone.ok()) return alone;
  for (const std::string& text : *all) {
    if (text[0] == '!') return absl::InvalidArgumentError(text.substr(1));
  }
  for (size_t r = 1; r < all->size(); ++r) {
    if ((*all)[r] != (*all)[0]) return FirstDifference(static_cast<int>(r), (*all)[0], (*all)[r]);
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status VerifyModel(ProcessGroup& group, const std::vector<Parameter>& parameters, const DdpOptions& options,
                         const absl::Status& mine) {
  return WorldRanksOf(group).Named(Verify(group, parameters, options, mine), group.rank());
}

}  // namespace ddp
