// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/nccl/advice.h"

#include <algorithm>
#include <bit>
#include <cstdint>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"

namespace ddp::nccl {
namespace {

bool OneOf(absl::string_view value, std::initializer_list<absl::string_view> legal) {
  return std::any_of(legal.begin(), legal.end(), [&](absl::string_view l) { return absl::EqualsIgnoreCase(value, l); });
}

bool ContainsIgnoreCase(absl::string_view text, absl::string_view part) {
  return absl::StrContains(absl::AsciiStrToLower(text), absl::AsciiStrToLower(part));
}

bool Number(absl::string_view text, int64_t* number) { return absl::SimpleAtoi(text, number); }

// NCCL_ALGO and NCCL_PROTO: a list, perhaps negated by ^, perhaps (from 2.24 on) one for each function: "ring,tree",
// "^nvls", "allreduce:tree;broadcast:ring".
bool ListOf(absl::string_view value, std::initializer_list<absl::string_view> legal) {
  for (absl::string_view part : absl::StrSplit(value, ';')) {
    const size_t colon = part.find(':');
    if (colon != absl::string_view::npos) part.remove_prefix(colon + 1);
    if (absl::StartsWith(part, "^")) part.remove_prefix(1);
    for (absl::string_view token : absl::StrSplit(part, ',')) {
      if (!OneOf(absl::StripAsciiWhitespace(token), legal)) return false;
    }
  }
  return true;
}

// What is wrong with the value; empty if nothing is.
std::string Objection(Env env, absl::string_view value) {
  int64_t n = 0;
  switch (env) {
    case Env::kNcclNthreads:
      if (Number(value, &n) && (n == 64 || n == 128 || n == 256 || n == 512)) return "";
      return "may be 64, 128, 256 or 512; NCCL ignores anything else";
    case Env::kNcclP2pLevel:
      if (OneOf(value, {"LOC", "PIX", "PXB", "PHB", "SYS"})) return "";
      if (OneOf(value, {"NVL"}))
        return "means that GPUs without NVLink never talk to each other directly; unset it there";
      if (Number(value, &n) && n >= 0 && n <= 5) return "";
      return "may be LOC, NVL, PIX, PXB, PHB or SYS";
    case Env::kNcclAlgo:
      if (ListOf(value, {"ring", "tree", "collnet", "collnetdirect", "collnetchain", "nvls", "nvlstree", "pat"}))
        return "";
      return "may list ring, tree, collnetdirect, collnetchain, nvls, nvlstree and pat; from NCCL 2.24 on anything "
             "else is an "
             "error";
    case Env::kNcclProto:
      if (!ListOf(value, {"LL", "LL128", "simple"})) return "may list LL, LL128 and Simple";
      if (!absl::StartsWith(value, "^") && ContainsIgnoreCase(value, "LL128")) {
        return "forces LL128, which corrupts data where the hardware does not support it; unset it";
      }
      return "";
    case Env::kNcclSocketIfname:
      if (value == "=" || value == "^")
        return "names no interface: =eth0 takes exactly that one, ^docker excludes those";
      return "";
    case Env::kNcclBuffsize:
      if (Number(value, &n) && n > 0 && std::has_single_bit(static_cast<uint64_t>(n))) return "";
      return "is a number of bytes and a power of 2, 4194304 by default";
    case Env::kNcclMinCtas:
    case Env::kNcclMaxCtas:
      if (Number(value, &n) && n >= 1 && n <= 64) return "";
      return "may be 1 to 64";
    case Env::kNcclIbDisable:
      if (value == "0" || value == "1") return "";
      return "may be 0 or 1";
    case Env::kNcclDebug:
      if (OneOf(value, {"VERSION", "WARN", "INFO", "ABORT", "TRACE"})) return "";
      return "may be VERSION, WARN, INFO or TRACE";
    default:
      return "";
  }
}

constexpr Env kChecked[] = {Env::kNcclNthreads,     Env::kNcclP2pLevel, Env::kNcclAlgo,    Env::kNcclProto,
                            Env::kNcclSocketIfname, Env::kNcclBuffsize, Env::kNcclMinCtas, Env::kNcclMaxCtas,
                            Env::kNcclIbDisable,    Env::kNcclDebug};

}  // namespace

std::vector<std::string> CheckEnvironment(const EnvReader& read) {
  std::vector<std::string> problems;
  for (const Env env : kChecked) {
    const std::optional<std::string> value = read(env);
    if (!value.has_value()) continue;
    const std::string objection = Objection(env, *value);
    if (objection.empty()) continue;
    problems.push_back(
        absl::StrCat(std::string(EnvTable()[static_cast<size_t>(env)].name), "=", *value, ": it ", objection));
  }
  return problems;
}

CauseAndRemedy Recognise(absl::string_view words, Result result, int version) {
  const auto says = [&](absl::string_view text) { return ContainsIgnoreCase(words, text); };
  if (says("Duplicate GPU")) {
    return {"two ranks use the same GPU", "give each its own (ContextOptions::device, local rank)"};
  }
  if (says("maxSharedMem") || (says("invalid argument") && version == 22501)) {
    return {"NCCL 2.25.1 asks for more shared memory than this GPU has", "use NCCL 2.26.2 or newer"};
  }
  if (says("/dev/shm") || says("No space left")) {
    return {"/dev/shm is full", "in a container start it with --shm-size=1g, or set NCCL_SHM_DISABLE=1"};
  }
  if (says("no kernel image") || says("invalid device function")) {
    return {"this NCCL has no kernels for this GPU", "use a newer NCCL, built for this CUDA"};
  }
  if (says("driver version is insufficient")) {
    return {"the GPU's driver is older than NCCL's CUDA", "update the driver"};
  }
  if (says("Connection refused") || says("No route") || says("Connect to")) {
    return {"ranks cannot reach each other by TCP", "look at NCCL_SOCKET_IFNAME and the firewall"};
  }
  if (says("No socket interface found")) {
    return {"NCCL_SOCKET_IFNAME names no interface that exists here", "correct or unset NCCL_SOCKET_IFNAME"};
  }
  if (says("illegal memory access")) {
    return {"a kernel of this process wrote where it may not, which with buffers of 512 KiB and more NCCL's own may",
            "update NCCL"};
  }
  if (says("out of memory")) {
    return {"GPU memory is full", "leave NCCL some hundred MiB of it; nvidia-smi shows who uses it"};
  }
  if (result == kRemoteError) return {"a peer's process or its network has gone", "see that rank's own output"};
  if (result == kUnhandledCudaError || result == kSystemError) {
    return {"", "NCCL_DEBUG=WARN in the environment says more"};
  }
  return {};
}

std::string Advice(absl::string_view words, Result result, int version) {
  const CauseAndRemedy known = Recognise(words, result, version);
  return absl::StrCat(known.cause, known.cause.empty() ? "" : ": ", known.remedy);
}

absl::Status ToStatus(const Api& api, Result result, Comm comm, absl::string_view call, int rank, int version) {
  if (result == kSuccess) return absl::OkStatus();
  const char* const last = api.GetLastError == nullptr ? nullptr : api.GetLastError(comm);
  const std::string words = absl::StrCat(api.GetErrorString(result), last != nullptr && *last != 0 ? ": " : "",
                                         last == nullptr ? "" : std::string(absl::StripAsciiWhitespace(last)));
  std::string text = absl::StrCat("rank ", rank, ": ", std::string(call), " failed: ", words);
  if (const std::string advice = Advice(words, result, version); !advice.empty()) absl::StrAppend(&text, "; ", advice);
  const std::vector<std::string> doubtful = CheckEnvironment();
  if (!doubtful.empty()) absl::StrAppend(&text, "; look at ", absl::StrJoin(doubtful, ", and "));
  switch (result) {
    case kRemoteError:
      return absl::UnavailableError(text);
    case kInvalidArgument:
      return absl::InvalidArgumentError(text);
    default:
      return ContainsIgnoreCase(words, "out of memory") ? absl::ResourceExhaustedError(text)
                                                        : absl::InternalError(text);
  }
}

}  // namespace ddp::nccl
