#include "libddp/reducer/verify.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <set>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"

namespace ddp {
namespace {

absl::Status Wrong(const ProcessGroup& group, const Parameter& parameter, absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("rank ", group.rank(), ": parameter '", parameter.name, "': ", what));
}

DType GradType(const Parameter& p) { return p.grad.data == nullptr ? p.value.dtype : p.grad.dtype; }

std::string Describe(const Parameter& p) {
  std::string text = absl::StrCat("'", p.name, "' ", std::string(Name(p.value.dtype)));
  if (GradType(p) != p.value.dtype) absl::StrAppend(&text, " (gradient ", std::string(Name(GradType(p))), ")");
  if (p.shape.empty()) {
    absl::StrAppend(&text, " of ", p.value.count, " elements");
  } else {
    absl::StrAppend(&text, " [", absl::StrJoin(p.shape, ", "), "]");
  }
  if (p.grad.data != nullptr) absl::StrAppend(&text, " with a gradient of the caller's");
  return text;
}

// One line for the options, then one per parameter. Names may hold anything but line ends (see CheckParameters).
std::string Fingerprint(const std::vector<Parameter>& parameters, const DdpOptions& options) {
  std::string text =
      absl::StrCat("bucket_bytes=", options.bucket_bytes, " first_bucket_bytes=", options.first_bucket_bytes,
                   " op=", std::string(Name(options.op)), " nonfinite=", options.nonfinite != nullptr ? "set" : "unset",
                   " broadcast_parameters=", options.broadcast_parameters);
  for (const Parameter& p : parameters) absl::StrAppend(&text, "\n", Describe(p));
  return text;
}

template <typename T>
absl::Status Gather(ProcessGroup& group, absl::Span<T> mine, absl::Span<T> all) {
  const Buffer in{mine.data(), mine.size() * sizeof(T), DType::kUInt8, Device{}};
  const Buffer out{all.data(), all.size() * sizeof(T), DType::kUInt8, Device{}};
  absl::StatusOr<Work> work = group.AllGather({&in, 1}, {&out, 1});
  return work.ok() ? work->Wait() : work.status();
}

absl::Status FirstDifference(int rank, absl::string_view zero, absl::string_view other) {
  const std::vector<absl::string_view> a = absl::StrSplit(zero, '\n'), b = absl::StrSplit(other, '\n');
  constexpr absl::string_view kRemedy = "; build the same model, in the same order, on all ranks";
  if (a[0] != b[0]) {
    return absl::FailedPreconditionError(
        absl::StrCat("ranks have different options: rank 0 has ", a[0], ", rank ", rank, " has ", b[0]));
  }
  for (size_t i = 1; i < std::min(a.size(), b.size()); ++i) {
    if (a[i] == b[i]) continue;
    return absl::FailedPreconditionError(absl::StrCat("ranks disagree about parameter ", i - 1, ": rank 0 has ", a[i],
                                                      ", rank ", rank, " has ", b[i], kRemedy));
  }
  const bool zero_has_more = a.size() > b.size();
  return absl::FailedPreconditionError(absl::StrCat("ranks have different numbers of parameters: rank 0 has ",
                                                    a.size() - 1, ", rank ", rank, " has ", b.size() - 1,
                                                    "; the first that only rank ", zero_has_more ? 0 : rank, " has is ",
                                                    zero_has_more ? a[b.size()] : b[a.size()], kRemedy));
}

absl::Status CheckAlone(const ProcessGroup& group, const std::vector<Parameter>& parameters,
                        const DdpOptions& options) {
  const auto error = [&](absl::string_view what) {
    return absl::InvalidArgumentError(absl::StrCat("rank ", group.rank(), ": ", what));
  };
  if (parameters.empty()) return error("DistributedDataParallel needs at least one parameter");
  if (options.op != ReduceOp::kAvg && options.op != ReduceOp::kSum) {
    return error("DdpOptions::op must be kAvg or kSum");
  }
  if (options.bucket_bytes == 0) return error("DdpOptions::bucket_bytes must be above 0");
  std::set<absl::string_view> names;
  for (const Parameter& p : parameters) {
    if (p.name.empty() || p.name.find('\n') != std::string::npos) {
      return Wrong(group, p, "a name must not be empty, nor have line ends");
    }
    if (!names.insert(p.name).second) return Wrong(group, p, "two parameters have this name");
    if (!IsFloatingPoint(p.value.dtype) || !IsFloatingPoint(GradType(p))) {
      return Wrong(group, p, "only floating-point parameters have gradients");
    }
    if (p.value.device.kind != Device::Kind::kCpu || p.grad.device.kind != Device::Kind::kCpu) {
      return Wrong(group, p, "is not in CPU memory, but the group's backend works there");
    }
    if (p.grad.data != nullptr && p.grad.count != p.value.count) {
      return Wrong(group, p, absl::StrCat("the gradient has ", p.grad.count, " elements, the value ", p.value.count));
    }
    int64_t product = 1;
    for (int64_t n : p.shape) product *= n;
    if (!p.shape.empty() && product != static_cast<int64_t>(p.value.count)) {
      return Wrong(group, p,
                   absl::StrCat("the shape [", absl::StrJoin(p.shape, ", "), "] has ", product, " elements, the value ",
                                p.value.count));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status VerifyParameters(ProcessGroup& group, const std::vector<Parameter>& parameters,
                              const DdpOptions& options) {
  const absl::Status alone = CheckAlone(group, parameters, options);
  const size_t size = static_cast<size_t>(group.size());
  // A rank with a mistake of its own sends that instead, marked by a character that no fingerprint begins with.
  std::string mine = alone.ok() ? Fingerprint(parameters, options) : absl::StrCat("!", alone.message());
  uint64_t length = mine.size();
  std::vector<uint64_t> lengths(size);
  if (absl::Status s = Gather<uint64_t>(group, {&length, 1}, absl::MakeSpan(lengths)); !s.ok()) return s;
  const size_t longest = *std::max_element(lengths.begin(), lengths.end());
  mine.resize(longest);
  std::vector<char> all(longest * size);
  if (absl::Status s = Gather<char>(group, absl::MakeSpan(&mine[0], longest), absl::MakeSpan(all)); !s.ok()) return s;
  if (!alone.ok()) return alone;
  const auto of = [&](size_t r) { return absl::string_view(all.data() + r * longest, lengths[r]); };
  for (size_t r = 0; r < size; ++r) {
    if (of(r)[0] == '!') return absl::InvalidArgumentError(of(r).substr(1));
  }
  for (size_t r = 1; r < size; ++r) {
    if (of(r) != of(0)) return FirstDifference(static_cast<int>(r), of(0), of(r));
  }
  return absl::OkStatus();
}

}  // namespace ddp
