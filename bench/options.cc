// SPDX-License-Identifier: Apache-2.0
#include "bench/options.h"

#include <getopt.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"

namespace bench {

const char* const kUsage = R"(Times collective operations over all ranks, beside the limit of the machine.

  mpirun -n 2 ddp_perf [flags]

As in nccl-tests:
  -b, --minbytes SIZE        smallest array, e.g. 1K (default 1K)
  -e, --maxbytes SIZE        largest (default 256M)
  -f, --stepfactor N         from one size to the next, multiply (default 4)
  -i, --stepbytes SIZE       or add
  -n, --iters N              timed calls for each size (default: what fits into --budget; on GPUs up to 750)
  -w, --warmup_iters N       calls before them (default: 2 to 200, by their time)
  -m, --agg_iters N          start N operations before waiting for the last (default 1; on GPUs all of a sample)
  -c, --check N              check the results of N calls before the timing, and of one after it (default 1; 0: none)
  -d, --datatype TYPE        float, double, half, bfloat16, int64, int32, int8, uint8 or all (default float)
  -o, --op OP                sum, avg, min, max, prod or all (default sum)
  -r, --root N               of broadcast, reduce, gather and scatter (default 0)
  -G, --cudagraph N          replay the calls N times as a CUDA graph (default 1 up to 256 KiB, else 0)
  -R, --local_register 0|1|2 0: as --ordinary; 1 and 2: memory of ProcessGroup::Allocate (default)
  -J, --json FILE            write the rows there as well
  -h, --help
Of our own:
  --collectives LIST         of all_reduce, all_gather, all_gather_v, reduce_scatter, broadcast, reduce, gather, scatter,
                             all_to_all, sendrecv (to the next rank, from the previous one), pingpong (there and back),
                             barrier, or all (default all_reduce)
  --device cpu|cuda          where the arrays are (default cpu)
  --backend NAME             auto, hierarchical, nccl or local (default: DDP_BACKEND, else auto)
  --placement out|in|both    out of place, in place (default both; an operation that has only one is timed so)
  --peer                     the same calls of MPI (cpu) or straight on NCCL (cuda) beside them, in the same processes
  --ordinary                 memory of this process (cudaMalloc's) instead of ProcessGroup::Allocate's
  --sizes LIST               exactly these sizes, e.g. 1K,64K,4M
  --budget SECONDS           timed work for each size (default 0.2)
On CPUs only, where the ranks must be processes of one host:
  --fresh                    every rank rewrites its input before each call, outside the timed part
  --near NS                  wait while a cache line takes longer than this between ranks 0 and 1, and repeat ...
  --near-wait SECONDS        ... for at most so long at each size (default 4)

A size is that of the larger of a rank's two buffers. Columns, in microseconds unless it says otherwise:
  time     one call: a median. On CPUs from the first rank's start to the last rank's end; on GPUs the slowest rank's
  algbw, busbw  in GB/s, as nccl-tests defines them
  #wrong   wrong elements on all ranks
  bound    the limit of the machine, measured in this run. On CPUs the same operation by bare copies or sums in shared
           memory, in turn with ours. On GPUs the bytes of busbw at the rate at which all GPUs of the host copy from
           the next one at the same time; over the hierarchical backend, from the host's memory
  p50, p99 of single calls, each waited for, on the slowest rank; of fewer than 100 calls p99 is the longest
  host     the call alone, without waiting, on rank 0
  link     (CPU) latency of a cache line between ranks 0 and 1, in ns
  ordered  (GPU) every call ordered after the caller's stream and before its later work, as PyTorch's all_reduce
  graph    (GPU) in a CUDA graph with others. N/A: no graph can hold it, because the host takes part
  peer     MPI's or NCCL's call; on GPUs on plain or registered memory, whichever is faster. N/A: it has no such call,
           or its result was wrong. ratio: peer / time
)";

namespace {

using ddp::DType;
using ddp::ReduceOp;

enum LongOnly {
  kSizes = 256,
  kCollectivesFlag,
  kDevice,
  kBackend,
  kPlacement,
  kPeer,
  kOrdinary,
  kFresh,
  kBudget,
  kNear,
  kNearWait
};

constexpr char kShort[] = ":b:e:f:i:n:w:m:c:d:o:r:G:R:J:h";
const option kLong[] = {{"minbytes", required_argument, nullptr, 'b'},
                        {"maxbytes", required_argument, nullptr, 'e'},
                        {"stepfactor", required_argument, nullptr, 'f'},
                        {"stepbytes", required_argument, nullptr, 'i'},
                        {"iters", required_argument, nullptr, 'n'},
                        {"warmup_iters", required_argument, nullptr, 'w'},
                        {"check", required_argument, nullptr, 'c'},
                        {"datatype", required_argument, nullptr, 'd'},
                        {"op", required_argument, nullptr, 'o'},
                        {"agg_iters", required_argument, nullptr, 'm'},
                        {"root", required_argument, nullptr, 'r'},
                        {"cudagraph", required_argument, nullptr, 'G'},
                        {"local_register", required_argument, nullptr, 'R'},
                        {"json", required_argument, nullptr, 'J'},
                        {"help", no_argument, nullptr, 'h'},
                        {"collectives", required_argument, nullptr, kCollectivesFlag},
                        {"device", required_argument, nullptr, kDevice},
                        {"backend", required_argument, nullptr, kBackend},
                        {"placement", required_argument, nullptr, kPlacement},
                        {"peer", no_argument, nullptr, kPeer},
                        {"sizes", required_argument, nullptr, kSizes},
                        {"ordinary", no_argument, nullptr, kOrdinary},
                        {"fresh", no_argument, nullptr, kFresh},
                        {"budget", required_argument, nullptr, kBudget},
                        {"near", required_argument, nullptr, kNear},
                        {"near-wait", required_argument, nullptr, kNearWait},
                        {nullptr, 0, nullptr, 0}};

constexpr std::pair<absl::string_view, DType> kDTypes[] = {
    {"float", DType::kFloat32},     {"double", DType::kFloat64}, {"half", DType::kFloat16},
    {"bfloat16", DType::kBFloat16}, {"int64", DType::kInt64},    {"int32", DType::kInt32},
    {"int8", DType::kInt8},         {"uint8", DType::kUInt8},    {"float32", DType::kFloat32},
    {"float64", DType::kFloat64},   {"float16", DType::kFloat16}};
constexpr size_t kDistinctDTypes = 8;
constexpr std::pair<absl::string_view, ReduceOp> kOps[] = {{"sum", ReduceOp::kSum},
                                                           {"avg", ReduceOp::kAvg},
                                                           {"min", ReduceOp::kMin},
                                                           {"max", ReduceOp::kMax},
                                                           {"prod", ReduceOp::kProduct}};

absl::Status Bad(absl::string_view flag, absl::string_view value, absl::string_view wanted) {
  return absl::InvalidArgumentError(absl::StrCat(flag, "='", value, "': give ", wanted));
}

absl::StatusOr<size_t> ParseBytes(absl::string_view flag, absl::string_view text) {
  absl::string_view digits = text;
  double unit = 1;
  if (!digits.empty()) {
    const size_t at = absl::string_view("KMGkmg").find(digits.back());
    if (at != absl::string_view::npos) {
      unit = std::ldexp(1.0, 10 * (static_cast<int>(at % 3) + 1));
      digits.remove_suffix(1);
    }
  }
  double value = 0;
  if (!absl::SimpleAtod(digits, &value) || !(value * unit >= 1) || value * unit > 1e15) {
    return Bad(flag, text, "a size in bytes, such as 1024, 64K or 256M");
  }
  return static_cast<size_t>(value * unit);
}

absl::StatusOr<double> ParseNumber(absl::string_view flag, absl::string_view text, double least, double most) {
  double value = 0;
  if (!absl::SimpleAtod(text, &value) || !(value >= least && value <= most)) {
    return Bad(flag, text, absl::StrCat("a number from ", least, " to ", most));
  }
  return value;
}

absl::StatusOr<int64_t> ParseWhole(absl::string_view flag, absl::string_view text, int64_t least, int64_t most) {
  int64_t value = 0;
  if (!absl::SimpleAtoi(text, &value) || value < least || value > most) {
    return Bad(flag, text, absl::StrCat("a whole number from ", least, " to ", most));
  }
  return value;
}

template <typename T, size_t kN>
absl::StatusOr<std::vector<T>> ParseName(absl::string_view flag, absl::string_view text,
                                         const std::pair<absl::string_view, T> (&table)[kN], size_t distinct) {
  std::vector<T> all;
  for (const auto& [name, value] : table) {
    if (name == text) return std::vector<T>{value};
    if (all.size() < distinct) all.push_back(value);
  }
  if (text == "all") return all;
  const auto name_only = [](std::string* out, const auto& entry) { absl::StrAppend(out, entry.first); };
  return Bad(flag, text, absl::StrCat(absl::StrJoin(table, table + distinct, ", ", name_only), " or all"));
}

// Sizes as the flags describe them, before they are listed.
struct Range {
  size_t min = size_t{1} << 10, max = size_t{256} << 20, step = 0;
  double factor = 4;
  std::vector<size_t> list;
};

template <typename T, typename U>
absl::Status Assign(absl::StatusOr<T> parsed, U& to) {
  if (parsed.ok()) to = static_cast<U>(*std::move(parsed));
  return parsed.status();
}

absl::Status ParseCollectives(absl::string_view text, std::vector<Collective>& collectives) {
  collectives.clear();
  for (const absl::string_view name : absl::StrSplit(text, ',')) {
    std::vector<absl::string_view> names;
    const size_t before = collectives.size();
    for (int i = 0; i < kCollectives; ++i) {
      names.push_back(Info(static_cast<Collective>(i)).name);
      if (name == names.back() || name == "all") collectives.push_back(static_cast<Collective>(i));
    }
    if (collectives.size() == before) return Bad("--collectives", name, absl::StrJoin(names, ", ") + " or all");
  }
  return absl::OkStatus();
}

absl::Status ParseSizes(absl::string_view text, std::vector<size_t>& sizes) {
  for (const absl::string_view one : absl::StrSplit(text, ',')) {
    sizes.emplace_back();
    if (absl::Status s = Assign(ParseBytes("--sizes", one), sizes.back()); !s.ok()) return s;
  }
  return absl::OkStatus();
}

constexpr int64_t kMany = 1'000'000'000;
constexpr size_t kMostSizes = 100'000;

absl::Status ApplyOwn(int flag, absl::string_view value, Options& o, Range& range) {
  switch (flag) {
    case kSizes:
      return ParseSizes(value, range.list);
    case kCollectivesFlag:
      return ParseCollectives(value, o.collectives);
    case kDevice:
      o.cuda = value == "cuda";
      return o.cuda || value == "cpu" ? absl::OkStatus() : Bad("--device", value, "cpu or cuda");
    case kPlacement:
      o.out_of_place = value != "in";
      o.in_place = value != "out";
      return value == "in" || value == "out" || value == "both" ? absl::OkStatus()
                                                                : Bad("--placement", value, "out, in or both");
    case kBudget:
      return Assign(ParseNumber("--budget", value, 0.001, 3600), o.budget_s);
    case kNear:
      return Assign(ParseNumber("--near", value, 0, kMany), o.near_ns);
    case kNearWait:
      return Assign(ParseNumber("--near-wait", value, 0, 3600), o.near_wait_s);
    case kBackend:
      o.backend = std::string(value);
      break;
    case kPeer:
      o.peer = true;
      break;
    case kOrdinary:
      o.ordinary = true;
      break;
    default:
      o.fresh = true;
      break;
  }
  return absl::OkStatus();
}

absl::Status ApplyOne(int flag, absl::string_view value, Options& o, Range& range) {
  int registered = 0;
  absl::Status status;
  switch (flag) {
    case 'b':
      return Assign(ParseBytes("-b", value), range.min);
    case 'e':
      return Assign(ParseBytes("-e", value), range.max);
    case 'f':
      return Assign(ParseNumber("-f", value, 1.01, kMany), range.factor);
    case 'i':
      return Assign(ParseBytes("-i", value), range.step);
    case 'n':
      return Assign(ParseWhole("-n", value, 1, kMany), o.iters);
    case 'w':
      return Assign(ParseWhole("-w", value, 1, kMany), o.warmup_iters);
    case 'm':
      return Assign(ParseWhole("-m", value, 1, 10'000), o.aggregate);
    case 'c':
      return Assign(ParseWhole("-c", value, 0, 10'000), o.checks);
    case 'd':
      return Assign(ParseName("-d", value, kDTypes, kDistinctDTypes), o.dtypes);
    case 'o':
      return Assign(ParseName("-o", value, kOps, std::size(kOps)), o.ops);
    case 'r':
      return Assign(ParseWhole("-r", value, 0, kMany), o.root);
    case 'G':
      return Assign(ParseWhole("-G", value, 0, 10'000), o.graphs);
    case 'R':
      status = Assign(ParseWhole("-R", value, 0, 2), registered);
      o.ordinary = registered == 0;
      return status;
    case 'J':
      o.json = std::string(value);
      return absl::OkStatus();
    case 'h':
      o.help = true;
      return absl::OkStatus();
    default:
      return ApplyOwn(flag, value, o, range);
  }
}

absl::Status Unknown(int argc, char** argv) {
  const char* const word = argv[std::min(optind, argc) - 1];
  if (optopt != 0 && absl::string_view("tgNpyzCTaDxVMSAE").find(static_cast<char>(optopt)) != absl::string_view::npos) {
    return absl::InvalidArgumentError(absl::StrCat(
        "-", std::string(1, static_cast<char>(optopt)),
        " of nccl-tests has no meaning here: a rank is a process with one device, and mpirun -n N sets the "
        "number of ranks; see --help"));
  }
  return absl::InvalidArgumentError(absl::StrCat("unknown flag ", word, "; see --help"));
}

// What cannot go together.
absl::Status CheckTogether(const Options& o) {
  if (!o.cuda && o.graphs > 0) return absl::InvalidArgumentError("-G needs --device=cuda: CPUs have no CUDA graphs");
  if (o.cuda && (o.fresh || o.near_ns > 0)) {
    return absl::InvalidArgumentError("--fresh and --near are for CPUs: leave them out with --device=cuda");
  }
  return absl::OkStatus();
}

absl::Status ListSizes(const Range& range, Options& o) {
  o.sizes = range.list;
  if (!o.sizes.empty()) return absl::OkStatus();
  if (range.min > range.max) {
    return absl::InvalidArgumentError(
        absl::StrCat("-b=", range.min, " is above -e=", range.max, ": give sizes from the smallest to the largest"));
  }
  for (double size = static_cast<double>(range.min); size <= static_cast<double>(range.max);
       size = range.step > 0 ? size + static_cast<double>(range.step) : size * range.factor) {
    const auto bytes = static_cast<size_t>(size);
    if (!o.sizes.empty() && bytes == o.sizes.back()) continue;  // a small factor
    if (o.sizes.size() == kMostSizes) {
      return absl::InvalidArgumentError(absl::StrCat("-b=", range.min, " to -e=", range.max, " are more than ",
                                                     kMostSizes, " sizes: give a larger -f or -i"));
    }
    o.sizes.push_back(bytes);
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Options> ParseOptions(int argc, char** argv) {
  Options options;
  Range range;
  opterr = 0;
  optind = 1;  // the line may be read twice
  for (int flag = 0; (flag = getopt_long(argc, argv, kShort, kLong, nullptr)) != -1;) {
    if (flag == '?') return Unknown(argc, argv);
    if (flag == ':') {
      return absl::InvalidArgumentError(absl::StrCat(argv[std::min(optind, argc) - 1], " needs a value; see --help"));
    }
    const absl::string_view value = optarg == nullptr ? absl::string_view() : absl::string_view(optarg);
    if (absl::Status s = ApplyOne(flag, value, options, range); !s.ok()) return s;
  }
  if (optind < argc) {
    return absl::InvalidArgumentError(absl::StrCat("unexpected word '", argv[optind], "'; see --help"));
  }
  if (absl::Status s = CheckTogether(options); !s.ok()) return s;
  if (absl::Status s = ListSizes(range, options); !s.ok()) return s;
  return options;
}

}  // namespace bench
