// SPDX-License-Identifier: Apache-2.0
#include "bench/gpu_perf.h"

#include <algorithm>
#include <chrono>
#include <functional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "bench/cuda_check.h"
#include "bench/pattern.h"
#include "bench/percentile.h"
#include "bench/raw_nccl.h"

namespace bench {
namespace {

constexpr int kSamples = 15;
constexpr int kMostCalls = 50;  // of a sample
constexpr int kSingleCalls = 200;
constexpr size_t kGraphBytes = size_t{256} << 10;  // small sizes are timed in graphs, too
constexpr size_t kLinkBytes = size_t{256} << 20;
// The processors' caches hold it, as they do a staging ring.
constexpr size_t kHostLinkBytes = size_t{4} << 20;
constexpr int kHostLinkCopies = 16;

struct Times {
  double us = kNotMeasured, host_us = kNotMeasured;
};

class GpuBench : public Bench {
 public:
  GpuBench(ddp::Context& context, const Options& options)
      : context_(context), group_(context.world()), options_(options) {
    BENCH_CUDA(cudaSetDevice(context.device().index));
    BENCH_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    for (cudaEvent_t& mark : marks_) BENCH_CUDA(cudaEventCreate(&mark));
  }

  absl::Status Prepare() {
    const auto ranks = static_cast<size_t>(group_.size());
    const size_t bytes =
        std::max(*std::max_element(options_.sizes.begin(), options_.sizes.end()), 8 * ranks * ranks) + 64;
    for (char** array : {&in_, &out_}) {
      if (options_.ordinary) {
        BENCH_CUDA(cudaMalloc(reinterpret_cast<void**>(array), bytes));
        continue;
      }
      auto allocation = group_.Allocate(bytes, context_.device());
      if (!allocation.ok()) return allocation.status();
      *array = static_cast<char*>(allocation->data());
      allocations_.push_back(*std::move(allocation));
    }
    link_rate_ = context_.backend_choice().backend == "hierarchical" ? HostLinkRate() : LinkRate();
    if (!options_.peer) return absl::OkStatus();
    auto raw = RawNccl::Create(group_, bytes, !options_.ordinary);
    if (!raw.ok()) return raw.status();
    raw_ = *std::move(raw);
    return absl::OkStatus();
  }

  absl::StatusOr<Row> Run(const Case& c) override {
    Row row;
    row.shape = c;
    row.registered =
        std::any_of(allocations_.begin(), allocations_.end(), [](const auto& a) { return a.registered(); });
    const ddp::Stream caller{context_.device(), stream_};
    absl::Status failure;
    char* const in = in_ + c.InOffset(c.rank) * ddp::SizeOf(c.dtype);
    char* const out = (c.in_place ? in_ : out_) + c.OutOffset() * ddp::SizeOf(c.dtype);
    const auto call = [&](bool after, bool before) {
      ddp::Work work = Start(group_, c, in, out, after ? caller : ddp::kNoStream);
      failure.Update(before ? work.BlockStream(caller) : work.call_status());
    };
    const Pattern pattern(c);
    const auto check = [&](uint32_t salt) { return Verify(pattern, c, in, out, salt, row, [&] { call(true, true); }); };
    for (int i = 0; i < options_.checks; ++i) {
      if (absl::Status s = check(static_cast<uint32_t>(i + 1)); !s.ok()) return s;
    }
    // Zeros stay zeros, however often they are added up.
    BENCH_CUDA(cudaMemsetAsync(in, 0, c.InCount() * ddp::SizeOf(c.dtype), stream_));
    const int calls = CallsFor(c.bytes()), together = options_.aggregate > 0 ? options_.aggregate : calls;
    const auto grouped = [&](int i) { call(i % together == 0, i % together == together - 1 || i == calls - 1); };
    const Times plain = Time(calls, grouped);
    row.time_us = plain.us;
    row.host_us = plain.host_us;
    row.ordered_us = Time(calls, [&](int) { call(true, true); }).us;
    TimeSingleCalls(row, [&] { call(true, true); });
    int replays = options_.graphs >= 0 ? options_.graphs : c.bytes() <= kGraphBytes ? 1 : 0;
    if (c.collective == Collective::kBarrier) replays = 0;  // the host does it
    if (replays > 0) row.graph_us = TimeGraph(calls, replays, grouped, &failure).us;
    if (!failure.ok()) return failure;
    row.bound_us = static_cast<double>(c.bytes()) * c.BusFactor() / link_rate_ * 1e-3;
    TimePeer(c, calls, replays, row);
    if (options_.checks == 0) return row;
    if (absl::Status s = check(0); !s.ok()) return s;
    row.wrong = static_cast<int64_t>(OverRanks(static_cast<double>(row.wrong), ddp::ReduceOp::kSum));
    return row;
  }

 private:
  int CallsFor(size_t bytes) const {
    const int fits = static_cast<int>(
        std::clamp<size_t>((size_t{2} << 30) / std::max<size_t>(1, bytes), 1, static_cast<size_t>(kMostCalls)));
    return options_.iters > 0 ? std::min(options_.iters, fits) : fits;
  }

  // On the faster of NCCL's kinds of memory.
  void TimePeer(const Case& c, int calls, int replays, Row& row) {
    for (int kind = 0; raw_ != nullptr && kind < raw_->Kinds(c); ++kind) {
      const auto raw_call = [&](int) { raw_->Call(kind, c, stream_); };
      const Times times = Time(calls, raw_call);
      if (kind == 0 || times.us < row.peer_us) {
        row.peer_us = times.us;
        row.peer_host_us = times.host_us;
      }
      if (replays == 0) continue;
      const Times graph = TimeGraph(calls, replays, raw_call);
      if (kind == 0 || graph.us < row.peer_graph_us) row.peer_graph_us = graph.us;
    }
  }

  absl::Status Verify(const Pattern& pattern, const Case& c, char* in, char* out, uint32_t salt, Row& row,
                      const std::function<void()>& call) {
    const size_t size = ddp::SizeOf(c.dtype);
    std::vector<char> values(std::max(c.InCount(), c.OutCount()) * size);
    pattern.Fill(values.data(), salt);
    BENCH_CUDA(cudaMemcpyAsync(in, values.data(), c.InCount() * size, cudaMemcpyDefault, stream_));
    call();
    BENCH_CUDA(cudaMemcpyAsync(values.data(), out, c.OutCount() * size, cudaMemcpyDefault, stream_));
    if (absl::Status s = Synchronize(); !s.ok()) return s;
    row.wrong += pattern.CountWrong(values.data(), salt);
    return absl::OkStatus();
  }

  // cudaStreamSynchronize would not notice that the group has failed.
  absl::Status Synchronize() {
    BENCH_CUDA(cudaEventRecord(marks_[1], stream_));
    cudaError_t error = cudaSuccess;
    while ((error = cudaEventQuery(marks_[1])) == cudaErrorNotReady) {
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

  double Elapsed(cudaEvent_t from, cudaEvent_t to) {
    float ms = 0;
    BENCH_CUDA(cudaEventElapsedTime(&ms, from, to));
    return static_cast<double>(ms) * 1e3;
  }

  Times Time(int calls, const std::function<void(int)>& call) {
    const int samples = options_.iters > 0 ? std::clamp(options_.iters / calls, 1, kSamples) : kSamples;
    const int warmup = options_.warmup_iters > 0 ? (options_.warmup_iters + calls - 1) / calls : 3;
    std::vector<double> times, hosts;
    for (int sample = -warmup; sample < samples; ++sample) {
      Synchronize().IgnoreError();
      OverRanks(0, ddp::ReduceOp::kMax);  // begin together
      BENCH_CUDA(cudaEventRecord(marks_[0], stream_));
      const auto begin = std::chrono::steady_clock::now();
      for (int i = 0; i < calls; ++i) call(i);
      const std::chrono::duration<double, std::micro> host = std::chrono::steady_clock::now() - begin;
      if (!Synchronize().ok()) return {};
      const double us = OverRanks(Elapsed(marks_[0], marks_[1]) / calls, ddp::ReduceOp::kMax);
      if (sample < 0) continue;
      times.push_back(us);
      hosts.push_back(host.count() / calls);
    }
    return {Median(std::move(times)), Median(std::move(hosts))};
  }

  void TimeSingleCalls(Row& row, const std::function<void()>& call) {
    const int calls = std::clamp(static_cast<int>(0.5e6 * options_.budget_s / row.ordered_us), 5, kSingleCalls);
    std::vector<double> times;
    Synchronize().IgnoreError();
    OverRanks(0, ddp::ReduceOp::kMax);
    BENCH_CUDA(cudaEventRecord(marks_[2], stream_));
    for (int i = 0; i < calls; ++i) {
      call();
      BENCH_CUDA(cudaEventRecord(marks_[3 + i], stream_));
    }
    if (!Synchronize().ok()) return;
    for (int i = 0; i < calls; ++i) times.push_back(Elapsed(marks_[2 + i], marks_[3 + i]));
    row.p50_us = OverRanks(Percentile(times, 0.5), ddp::ReduceOp::kMax);
    row.p99_us = OverRanks(Percentile(times, 0.99), ddp::ReduceOp::kMax);
  }

  // Not measured where the group's backend refuses to be captured. `failure` (may be null): what calls set.
  Times TimeGraph(int calls, int replays, const std::function<void(int)>& call, absl::Status* failure = nullptr) {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    BENCH_CUDA(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < calls && (failure == nullptr || failure->ok()); ++i) call(i);
    BENCH_CUDA(cudaStreamEndCapture(stream_, &graph));
    if (failure != nullptr && absl::IsInvalidArgument(*failure)) {
      BENCH_CUDA(cudaGraphDestroy(graph));
      *failure = absl::OkStatus();
      return {};
    }
    BENCH_CUDA(cudaGraphInstantiate(&exec, graph, 0));
    Times times = Time(replays, [&](int) { BENCH_CUDA(cudaGraphLaunch(exec, stream_)); });
    times.us /= calls;
    times.host_us /= calls;
    BENCH_CUDA(cudaGraphExecDestroy(exec));
    BENCH_CUDA(cudaGraphDestroy(graph));
    return times;
  }

  // GB/s at which every GPU copies from the next rank's while all others do the same, the slowest one's. Not measured
  // where a rank cannot map the memory of the next: on another host, or where this process does not see its GPU.
  double LinkRate() {
    const auto ranks = static_cast<size_t>(group_.size());
    if (ranks == 1) return kNotMeasured;
    char *mine = nullptr, *copy = nullptr;
    void* theirs = nullptr;
    BENCH_CUDA(cudaMalloc(reinterpret_cast<void**>(&mine), kLinkBytes));
    BENCH_CUDA(cudaMalloc(reinterpret_cast<void**>(&copy), kLinkBytes));
    cudaIpcMemHandle_t handle{};
    std::vector<cudaIpcMemHandle_t> handles(ranks);
    bool mapped = cudaIpcGetMemHandle(&handle, mine) == cudaSuccess;
    const auto bytes_of = [](cudaIpcMemHandle_t* first, size_t n) {
      return ddp::Buffer{first, n * sizeof *first, ddp::DType::kUInt8, {}};
    };
    mapped &= group_.AllGather(bytes_of(&handle, 1), bytes_of(handles.data(), ranks)).Wait().ok();
    const cudaIpcMemHandle_t& next = handles[(static_cast<size_t>(group_.rank()) + 1) % ranks];
    mapped = mapped && cudaIpcOpenMemHandle(&theirs, next, cudaIpcMemLazyEnablePeerAccess) == cudaSuccess;
    double rate = kNotMeasured;
    if (OverRanks(mapped ? 1 : 0, ddp::ReduceOp::kMin) > 0) {
      const Times times =
          Time(5, [&](int) { BENCH_CUDA(cudaMemcpyAsync(copy, theirs, kLinkBytes, cudaMemcpyDefault, stream_)); });
      rate = static_cast<double>(kLinkBytes) / times.us * 1e-3;
    }
    static_cast<void>(cudaGetLastError());  // of the calls that may fail
    if (theirs != nullptr) cudaIpcCloseMemHandle(theirs);
    OverRanks(0, ddp::ReduceOp::kMax);  // nobody maps it any more
    cudaFree(mine);
    cudaFree(copy);
    return rate;
  }

  // GB/s from the host's memory to every GPU, while all others copy too, the slowest one's. Nothing goes the other way
  // meanwhile: operations need less of that, so what both ways reach together is no limit of theirs.
  double HostLinkRate() {
    if (group_.size() == 1) return kNotMeasured;
    char *host = nullptr, *device = nullptr;
    BENCH_CUDA(cudaMallocHost(reinterpret_cast<void**>(&host), kHostLinkBytes));
    BENCH_CUDA(cudaMalloc(reinterpret_cast<void**>(&device), kHostLinkBytes));
    const Times times = Time(kHostLinkCopies, [&](int) {
      BENCH_CUDA(cudaMemcpyAsync(device, host, kHostLinkBytes, cudaMemcpyHostToDevice, stream_));
    });
    cudaFreeHost(host);
    cudaFree(device);
    return static_cast<double>(kHostLinkBytes) / times.us * 1e-3;
  }

  ddp::Context& context_;
  ddp::ProcessGroup& group_;
  const Options& options_;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t marks_[3 + kSingleCalls] = {};  // begin and end of a sample, then those of single calls
  std::vector<ddp::Allocation> allocations_;
  char *in_ = nullptr, *out_ = nullptr;
  double link_rate_ = kNotMeasured;
  std::unique_ptr<RawNccl> raw_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Bench>> MakeGpuBench(ddp::Context& context, const Options& options) {
  auto bench = std::make_unique<GpuBench>(context, options);
  if (absl::Status s = bench->Prepare(); !s.ok()) return s;
  return bench;
}

}  // namespace bench
