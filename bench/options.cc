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

const char* const kUsage = R"(Times AllReduce over the ranks of one host and compares it with the machine's bound.

  mpirun -n 2 allreduce_bench [flags]

As in nccl-tests:
  -b, --minbytes SIZE      smallest buffer of one rank, e.g. 1K (default 1K)
  -e, --maxbytes SIZE      largest (default 256M)
  -f, --stepfactor N       from one size to the next, multiply (default 4)
  -i, --stepbytes SIZE     or add
  -n, --iters N            timed calls for each size (default: what fits into --budget)
  -w, --warmup_iters N     calls before them (default: 2 to 200, by their time)
  -c, --check 0|1          check the results (default 1)
  -d, --datatype TYPE      float, double, half, bfloat16, int64, int32, int8, uint8 or all (default float)
  -o, --op OP              sum, avg, min, max, prod or all (default sum)
Of our own:
  --sizes LIST             exactly these sizes, e.g. 1K,64K,4M
  --out-of-place           time out of place too
  --ordinary               buffers of this process alone instead of ProcessGroup::Allocate
  --fresh                  every rank rewrites its buffer before each call, outside the timed part
  --budget SECONDS         timed work for each size (default 0.2)
  --near NS                wait while a cache line takes longer than this between ranks 0 and 1, and repeat ...
  --near-wait SECONDS      ... for at most so long at each size (default 4)
  --json FILE              write the rows there as well
  --help

Columns: time, algbw and busbw as nccl-tests has them; #wrong counts wrong elements; bound is the time of a bare zero-copy sum of slices in
shared memory by the same processes, taken in turn with ours; enqueue the time of the AllReduce call alone; link the one-way latency
of a cache line between ranks 0 and 1. Times are medians over groups of calls, from the first rank's begin to the last rank's end.
)";

namespace {

using ddp::DType;
using ddp::ReduceOp;

enum LongOnly { kSizes = 256, kOutOfPlace, kOrdinary, kFresh, kBudget, kNear, kNearWait, kJson, kHelp };

constexpr char kShort[] = ":b:e:f:i:n:w:c:d:o:";
const option kLong[] = {{"minbytes", required_argument, nullptr, 'b'},
                        {"maxbytes", required_argument, nullptr, 'e'},
                        {"stepfactor", required_argument, nullptr, 'f'},
                        {"stepbytes", required_argument, nullptr, 'i'},
                        {"iters", required_argument, nullptr, 'n'},
                        {"warmup_iters", required_argument, nullptr, 'w'},
                        {"check", required_argument, nullptr, 'c'},
                        {"datatype", required_argument, nullptr, 'd'},
                        {"op", required_argument, nullptr, 'o'},
                        {"sizes", required_argument, nullptr, kSizes},
                        {"out-of-place", no_argument, nullptr, kOutOfPlace},
                        {"ordinary", no_argument, nullptr, kOrdinary},
                        {"fresh", no_argument, nullptr, kFresh},
                        {"budget", required_argument, nullptr, kBudget},
                        {"near", required_argument, nullptr, kNear},
                        {"near-wait", required_argument, nullptr, kNearWait},
                        {"json", required_argument, nullptr, kJson},
                        {"help", no_argument, nullptr, kHelp},
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

absl::Status ApplyOne(int flag, absl::string_view value, Options& o, Range& range) {
  constexpr double kMany = 1e9;
  double check = 1;
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
      return Assign(ParseNumber("-n", value, 1, kMany), o.iters);
    case 'w':
      return Assign(ParseNumber("-w", value, 1, kMany), o.warmup_iters);
    case 'c':
      status = Assign(ParseNumber("-c", value, 0, 1), check);
      o.check = check != 0;
      return status;
    case 'd':
      return Assign(ParseName("-d", value, kDTypes, kDistinctDTypes), o.dtypes);
    case 'o':
      return Assign(ParseName("-o", value, kOps, std::size(kOps)), o.ops);
    case kBudget:
      return Assign(ParseNumber("--budget", value, 0.001, 3600), o.budget_s);
    case kNear:
      return Assign(ParseNumber("--near", value, 0, kMany), o.near_ns);
    case kNearWait:
      return Assign(ParseNumber("--near-wait", value, 0, 3600), o.near_wait_s);
    case kJson:
      o.json = std::string(value);
      return absl::OkStatus();
    case kOutOfPlace:
      o.out_of_place = true;
      return absl::OkStatus();
    case kOrdinary:
      o.ordinary = true;
      return absl::OkStatus();
    case kFresh:
      o.fresh = true;
      return absl::OkStatus();
    case kHelp:
      o.help = true;
      return absl::OkStatus();
    default:
      break;  // kSizes
  }
  for (absl::string_view one : absl::StrSplit(value, ',')) {
    range.list.emplace_back();
    if (status = Assign(ParseBytes("--sizes", one), range.list.back()); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status Unknown(int argc, char** argv) {
  const char* const word = argv[std::min(optind, argc) - 1];
  if (optopt != 0 && absl::string_view("gtmprzGCTaIRSDxv").find(static_cast<char>(optopt)) != absl::string_view::npos) {
    return absl::InvalidArgumentError(
        absl::StrCat("-", std::string(1, static_cast<char>(optopt)),
                     " of nccl-tests means nothing here: there is no GPU, and mpirun -n N "
                     "sets the number of ranks"));
  }
  return absl::InvalidArgumentError(absl::StrCat("unknown flag ", word, "; see --help"));
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
    o.sizes.push_back(static_cast<size_t>(size));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Options> ParseOptions(int argc, char** argv) {
  Options options;
  Range range;
  opterr = 0;
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
  if (absl::Status s = ListSizes(range, options); !s.ok()) return s;
  return options;
}

}  // namespace bench
