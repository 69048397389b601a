// Collectives on GPUs through ProcessGroup, and the same calls straight on NCCL beside them.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "bench/cuda_check.h"
#include "bench/raw_nccl.h"
#include "ddp/ddp.h"
#include "nlohmann/json.hpp"

namespace bench {
namespace {

constexpr char kUsage[] = R"(Times collectives on GPUs, one process per GPU.

  mpirun -n 4 nccl_bench [flags]

  -b SIZE   smallest buffer of one rank, e.g. 1K (default 1K)
  -e SIZE   largest (default 256M)
  -f N      from one size to the next, multiply (default 4)
  -o LIST   of all_reduce, all_gather, reduce_scatter, broadcast, all_to_all (default all_reduce)
  -G        in a CUDA graph, too
  -R        on memory of ProcessGroup::Allocate (registered with NCCL where it can be) instead of cudaMalloc's
  --raw     the same calls straight on NCCL beside ours: on plain and, with -R, on window-registered memory
  --json FILE

float32, sum, in place where the operation has a place. SIZE is the larger of the two buffers. A sample is up to 50 calls
between two events; its time is the slowest rank's; a median over 15 samples. Columns, in microseconds:
  time     one call after the other on the group's stream; the caller's stream waits for the last
  ordered  every call ordered after the caller's stream, and the stream after it: as PyTorch's all_reduce does
  host     the calling thread's time for one call of `time`
  graph    one call of `time` captured into a graph with the others, replayed
  raw ...  NCCL's time, host and graph, on the faster of the two kinds of memory
  ratio    time / raw
busbw as nccl-tests has it, of `time`. #wrong counts wrong elements.
)";

constexpr int kSamples = 15;

struct Options {
  size_t begin = 1024, end = size_t{256} << 20, factor = 4;
  std::vector<std::string> ops = {"all_reduce"};
  bool graph = false, registered = false, raw = false, help = false;
  std::string json;
};

bool ParseSize(const std::string& text, size_t* size) {
  const size_t suffix = text.find_first_not_of("0123456789");
  const std::string unit = suffix == std::string::npos ? "" : text.substr(suffix);
  const int shift = unit.empty() ? 0 : unit == "K" ? 10 : unit == "M" ? 20 : unit == "G" ? 30 : -1;
  if (shift < 0 || !absl::SimpleAtoi(text.substr(0, suffix), size)) return false;
  *size <<= shift;
  return *size >= 4;
}

absl::StatusOr<Options> Parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    const bool valued = flag == "-b" || flag == "-e" || flag == "-f" || flag == "-o" || flag == "--json";
    if (valued && i + 1 == argc) return absl::InvalidArgumentError(flag + " lacks its value; see --help");
    const std::string value = valued ? argv[++i] : "";
    bool good = true;
    if (flag == "-b") {
      good = ParseSize(value, &options.begin);
    } else if (flag == "-e") {
      good = ParseSize(value, &options.end);
    } else if (flag == "-f") {
      good = absl::SimpleAtoi(value, &options.factor) && options.factor >= 2;
    } else if (flag == "-o") {
      options.ops = absl::StrSplit(value, ',');
      for (const std::string& op : options.ops) {
        good &= op == "all_reduce" || op == "all_gather" || op == "reduce_scatter" || op == "broadcast" ||
                op == "all_to_all";
      }
    } else if (flag == "--json") {
      options.json = value;
    } else if (flag == "-G") {
      options.graph = true;
    } else if (flag == "-R") {
      options.registered = true;
    } else if (flag == "--raw") {
      options.raw = true;
    } else if (flag == "--help") {
      options.help = true;
    } else {
      return absl::InvalidArgumentError(flag + " is no flag; see --help");
    }
    if (!good) return absl::InvalidArgumentError(absl::StrCat(flag, " ", value, ": see --help for what it may be"));
  }
  return options;
}

struct Times {
  double us = 0, host_us = 0;
};
struct Row {
  std::string op;
  size_t bytes = 0;
  Times plain, ordered, graph, raw, raw_graph;
  int64_t wrong = 0;
};

class Bench {
 public:
  Bench(ddp::Context& context, const Options& options)
      : context_(context), group_(context.world()), options_(options), ranks_(static_cast<size_t>(group_.size())) {
    BENCH_CUDA(cudaSetDevice(context.device().index));
    BENCH_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    BENCH_CUDA(cudaEventCreate(&begin_));
    BENCH_CUDA(cudaEventCreate(&end_));
  }

  absl::Status Prepare() {
    if (options_.registered) {
      auto allocation = group_.Allocate(options_.end, context_.device());
      if (!allocation.ok()) return allocation.status();
      allocation_ = *std::move(allocation);
      data_ = static_cast<char*>(allocation_.data());
      auto another = group_.Allocate(options_.end, context_.device());
      if (!another.ok()) return another.status();
      other_allocation_ = *std::move(another);
      other_ = static_cast<char*>(other_allocation_.data());
    } else {
      BENCH_CUDA(cudaMalloc(reinterpret_cast<void**>(&data_), options_.end));
      BENCH_CUDA(cudaMalloc(reinterpret_cast<void**>(&other_), options_.end));
    }
    if (!options_.raw) return absl::OkStatus();
    auto raw = RawNccl::Create(group_, options_.end, options_.registered);
    if (!raw.ok()) return raw.status();
    raw_ = *std::move(raw);
    return absl::OkStatus();
  }

  absl::StatusOr<Row> Run(const std::string& op, size_t bytes) {
    Row row{op, bytes / 4 / ranks_ * ranks_ * 4, {}, {}, {}, {}, {}, 0};
    if (row.bytes == 0) return absl::InvalidArgumentError(absl::StrCat(bytes, " bytes are too few for so many ranks"));
    const ddp::Stream caller{context_.device(), stream_};
    absl::Status failure;
    const auto call = [&](bool after, bool before) {
      ddp::Work work = Start(op, row.bytes, after ? caller : ddp::kNoStream);
      failure.Update(before ? work.BlockStream(caller) : work.call_status());
    };
    if (absl::Status s = Verify(op, row, [&] { call(true, true); }); !s.ok()) return s;
    const int calls = CallsFor(row.bytes);
    row.plain = Time(calls, [&](int i) { call(i == 0, i == calls - 1); });
    row.ordered = Time(calls, [&](int) { call(true, true); });
    if (options_.graph) row.graph = TimeGraph(calls, [&](int i) { call(i == 0, i == calls - 1); });
    if (!failure.ok()) return failure;
    if (raw_ != nullptr) {
      for (int kind = 0; kind < raw_->kinds(op); ++kind) {
        const auto raw_call = [&](int) { raw_->Call(kind, op, row.bytes, stream_); };
        const Times times = Time(calls, raw_call);
        if (kind == 0 || times.us < row.raw.us) row.raw = times;
        if (!options_.graph) continue;
        const Times graph = TimeGraph(calls, raw_call);
        if (kind == 0 || graph.us < row.raw_graph.us) row.raw_graph = graph;
      }
    }
    return row;
  }

  size_t ranks() const { return ranks_; }

 private:
  static int CallsFor(size_t bytes) { return static_cast<int>(std::clamp<size_t>((size_t{2} << 30) / bytes, 1, 50)); }

  ddp::Work Start(const std::string& op, size_t bytes, ddp::Stream after) {
    const size_t count = bytes / 4, part = count / ranks_, mine = part * static_cast<size_t>(group_.rank());
    const auto at = [&](char* data, size_t first, size_t n) {
      return ddp::Buffer{data + first * 4, n, ddp::DType::kFloat32, context_.device()};
    };
    const ddp::Buffer whole = at(data_, 0, count), own = at(data_, mine, part);
    if (op == "all_reduce") return group_.AllReduce(whole, whole, {}, after);
    if (op == "all_gather") return group_.AllGather(own, whole, after);
    if (op == "reduce_scatter") return group_.ReduceScatter(whole, own, {}, after);
    if (op == "broadcast") return group_.Broadcast(whole, 0, after);
    const ddp::Buffer to = at(other_, 0, count);
    return group_.AllToAll(whole, to, after);
  }

  // What rank r has at i: small whole numbers.
  static float Value(size_t rank, size_t i) { return static_cast<float>(rank + 1 + i % 7); }

  absl::Status Verify(const std::string& op, Row& row, const std::function<void()>& call) {
    const size_t count = row.bytes / 4, part = count / ranks_, me = static_cast<size_t>(group_.rank());
    std::vector<float> values(count);
    for (size_t i = 0; i < count; ++i) values[i] = Value(me, i);
    BENCH_CUDA(cudaMemcpyAsync(data_, values.data(), row.bytes, cudaMemcpyDefault, stream_));
    call();
    BENCH_CUDA(
        cudaMemcpyAsync(values.data(), op == "all_to_all" ? other_ : data_, row.bytes, cudaMemcpyDefault, stream_));
    if (absl::Status s = Synchronize(); !s.ok()) return s;
    const float n = static_cast<float>(ranks_), sum_of_ranks = n * (n - 1) / 2;
    int64_t wrong = 0;
    for (size_t i = 0; i < count; ++i) {
      const size_t peer = i / part;
      float expected = n * Value(0, i) + sum_of_ranks;
      if (op == "reduce_scatter" && peer != me) continue;
      if (op == "all_gather") expected = Value(peer, i);
      if (op == "broadcast") expected = Value(0, i);
      if (op == "all_to_all") expected = Value(peer, part * me + i % part);
      wrong += values[i] != expected;
    }
    row.wrong = static_cast<int64_t>(OverRanks(static_cast<double>(wrong), ddp::ReduceOp::kSum));
    BENCH_CUDA(cudaMemsetAsync(data_, 0, row.bytes, stream_));  // zeros stay zeros, however often they are added up
    return absl::OkStatus();
  }

  // cudaStreamSynchronize would not notice that the group has failed.
  absl::Status Synchronize() {
    BENCH_CUDA(cudaEventRecord(end_, stream_));
    cudaError_t error = cudaSuccess;
    while ((error = cudaEventQuery(end_)) == cudaErrorNotReady) {
      if (absl::Status s = group_.status(); !s.ok()) return s;
    }
    BENCH_CUDA(error);
    return absl::OkStatus();
  }

  double OverRanks(double value, ddp::ReduceOp op) {
    const ddp::Buffer buffer{&value, 1, ddp::DType::kFloat64, {}};
    group_.AllReduce(buffer, buffer, {.op = op}).Wait().IgnoreError();
    return value;
  }

  Times Time(int calls, const std::function<void(int)>& call) {
    std::vector<double> times, hosts;
    for (int sample = -3; sample < kSamples; ++sample) {
      Synchronize().IgnoreError();
      OverRanks(0, ddp::ReduceOp::kMax);  // begin together
      BENCH_CUDA(cudaEventRecord(begin_, stream_));
      const auto begin = std::chrono::steady_clock::now();
      for (int i = 0; i < calls; ++i) call(i);
      const std::chrono::duration<double, std::micro> host = std::chrono::steady_clock::now() - begin;
      if (!Synchronize().ok()) return {};
      float ms = 0;
      BENCH_CUDA(cudaEventElapsedTime(&ms, begin_, end_));
      const double us = OverRanks(static_cast<double>(ms) * 1e3 / calls, ddp::ReduceOp::kMax);
      if (sample < 0) continue;
      times.push_back(us);
      hosts.push_back(host.count() / calls);
    }
    std::sort(times.begin(), times.end());
    std::sort(hosts.begin(), hosts.end());
    return {times[kSamples / 2], hosts[kSamples / 2]};
  }

  Times TimeGraph(int calls, const std::function<void(int)>& call) {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t replay = nullptr;
    BENCH_CUDA(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < calls; ++i) call(i);
    BENCH_CUDA(cudaStreamEndCapture(stream_, &graph));
    BENCH_CUDA(cudaGraphInstantiate(&replay, graph, 0));
    Times times = Time(1, [&](int) { BENCH_CUDA(cudaGraphLaunch(replay, stream_)); });
    times.us /= calls;
    times.host_us /= calls;
    BENCH_CUDA(cudaGraphExecDestroy(replay));
    BENCH_CUDA(cudaGraphDestroy(graph));
    return times;
  }

  ddp::Context& context_;
  ddp::ProcessGroup& group_;
  const Options options_;
  const size_t ranks_;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
  ddp::Allocation allocation_, other_allocation_;
  char *data_ = nullptr, *other_ = nullptr;
  std::unique_ptr<RawNccl> raw_;
};

double BusBw(const Row& row, size_t ranks) {
  const double n = static_cast<double>(ranks), algorithm = static_cast<double>(row.bytes) / row.plain.us * 1e-3;
  return algorithm * (row.op == "all_reduce" ? 2 * (n - 1) / n : row.op == "broadcast" ? 1 : (n - 1) / n);
}

void Print(const Row& row, size_t ranks, const Options& options) {
  std::printf("%-14s %12zu %9.2f %9.2f %7.2f %8.2f %9.2f %8.2f %8.2f %6.3f %8.2f %6lld\n", row.op.c_str(), row.bytes,
              row.plain.us, row.ordered.us, row.plain.host_us, options.graph ? row.graph.us : std::nan(""), row.raw.us,
              row.raw.host_us, row.raw_graph.us, row.raw.us > 0 ? row.plain.us / row.raw.us : std::nan(""),
              BusBw(row, ranks), static_cast<long long>(row.wrong));
  std::fflush(stdout);
}

nlohmann::json ToJson(const Row& row, size_t ranks, const Options& options) {
  return {{"op", row.op},
          {"ranks", ranks},
          {"bytes", row.bytes},
          {"registered", options.registered},
          {"time_us", row.plain.us},
          {"ordered_us", row.ordered.us},
          {"host_us", row.plain.host_us},
          {"graph_us", row.graph.us},
          {"raw_us", row.raw.us},
          {"raw_host_us", row.raw.host_us},
          {"raw_graph_us", row.raw_graph.us},
          {"busbw_GBps", BusBw(row, ranks)},
          {"wrong", row.wrong}};
}

absl::Status RunAll(ddp::Context& context, const Options& options) {
  Bench bench(context, options);
  if (absl::Status s = bench.Prepare(); !s.ok()) return s;
  const bool speaker = context.rank() == 0;
  if (speaker) {
    std::printf("# %s backend, %zu ranks, %s memory\n%-14s %12s %9s %9s %7s %8s %9s %8s %8s %6s %8s %6s\n",
                std::string(context.world().backend()).c_str(), bench.ranks(),
                options.registered ? "allocated" : "plain", "op", "bytes", "time", "ordered", "host", "graph", "raw",
                "rawhost", "rawgraph", "ratio", "busbw", "#wrong");
  }
  nlohmann::json rows = nlohmann::json::array();
  int64_t wrong = 0;
  for (const std::string& op : options.ops) {
    for (size_t bytes = options.begin; bytes <= options.end; bytes *= options.factor) {
      absl::StatusOr<Row> row = bench.Run(op, bytes);
      if (!row.ok()) return row.status();
      wrong += row->wrong;
      if (speaker) Print(*row, bench.ranks(), options);
      rows.push_back(ToJson(*row, bench.ranks(), options));
    }
  }
  if (speaker && !options.json.empty()) {
    std::ofstream file(options.json);
    file << rows.dump(1) << "\n";
    if (!file.good()) return absl::UnavailableError(absl::StrCat(options.json, " cannot be written"));
  }
  return wrong == 0 ? absl::OkStatus() : absl::DataLossError("wrong results");
}

int Main(int argc, char** argv) {
  const absl::StatusOr<Options> options = Parse(argc, argv);
  if (!options.ok()) {
    std::fprintf(stderr, "nccl_bench: %s\n", std::string(options.status().message()).c_str());
    return 2;
  }
  if (options->help) {
    std::fputs(kUsage, stdout);
    return 0;
  }
  ddp::ContextOptions context_options;
  context_options.device = {ddp::Device::Kind::kCuda, -1};
  absl::StatusOr<std::unique_ptr<ddp::Context>> context = ddp::Context::Create(context_options);
  const absl::Status status = context.ok() ? RunAll(**context, *options) : context.status();
  if (status.ok()) return 0;
  std::fprintf(stderr, "nccl_bench: %s\n", std::string(status.message()).c_str());
  return 1;
}

}  // namespace
}  // namespace bench

int main(int argc, char** argv) { return bench::Main(argc, argv); }
