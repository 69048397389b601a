// SPDX-License-Identifier: Apache-2.0
// A rank that is killed at each stage of NCCL: in the middle of its start, before an operation that others wait in,
// while operations run, while a graph is captured or replayed. The survivor gets an error that names it, its streams
// come free, and it goes on alone.
//
// The program starts itself as each rank: with --rank it plays one.
#define CATCH_CONFIG_RUNNER
#include <cuda_runtime_api.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "ddp/ddp.h"
#include "tests/fault/job.h"
#include "tests/support/catch.h"
#include "tests/support/gpu.h"

namespace ddp::testing {
namespace {

// --- a rank ---------------------------------------------------------------------------------------------------------

using Flags = std::map<std::string, std::string>;

struct RankJob {
  Flags flags;
  int rank = 0;
  bool victim = false;
  std::unique_ptr<Context> context;
  cudaStream_t stream = nullptr;
  Buffer buffer;
  Allocation registered;
  std::optional<Work> last;  // of those that were enqueued

  Stream caller() const { return {context->device(), stream}; }
  absl::Status Reduce(bool wait) { return Reduce(context->world(), wait); }
  absl::Status Reduce(ProcessGroup& group, bool wait) {
    Work work = group.AllReduce(buffer, buffer, {}, caller());
    if (absl::Status s = work.call_status(); !s.ok()) return s;
    last = work;
    if (absl::Status s = work.BlockStream(caller()); !s.ok()) return s;
    return wait ? work.Wait() : absl::OkStatus();
  }
  // Waits for the stream, or until the group has failed.
  absl::Status Synchronize() {
    while (cudaStreamQuery(stream) == cudaErrorNotReady) {
      if (absl::Status s = context->world().status(); !s.ok()) return s;
    }
    return context->world().status();
  }
};

absl::Status Start(RankJob& job) {
  auto store = CreateFileStore({.path = job.flags["store"], .run_id = "fault", .world_size = 2});
  if (!store.ok()) return store.status();
  ContextOptions options;
  options.rank = job.rank;
  options.world_size = 2;
  options.store = *store;
  options.backend = GpuBackend();
  options.device = {Device::Kind::kCuda, -1};
  options.timeout = absl::Seconds(20);
  if (job.victim && job.flags["stage"] == "init") {
    std::thread([delay = std::atoi(job.flags["delay"].c_str())] {
      std::this_thread::sleep_for(std::chrono::milliseconds(delay));
      raise(SIGKILL);
    }).detach();
  }
  absl::StatusOr<std::unique_ptr<Context>> context = Context::Create(options);
  if (!context.ok()) return context.status();
  job.context = *std::move(context);
  if (cudaSetDevice(job.context->device().index) != cudaSuccess ||
      cudaStreamCreateWithFlags(&job.stream, cudaStreamNonBlocking) != cudaSuccess) {
    return absl::InternalError("no stream");
  }
  job.buffer.device = job.context->device();
  if (job.flags["memory"] == "registered") {  // so small that its kernels for such memory are used
    absl::StatusOr<Allocation> memory = job.context->world().Allocate(size_t{64} << 10, job.context->device());
    if (!memory.ok()) return memory.status();
    job.registered = *std::move(memory);
    job.buffer.data = job.registered.data();
    job.buffer.count = job.registered.bytes() / sizeof(float);
  } else {
    job.buffer.count = size_t{16} << 20;
    if (cudaMalloc(&job.buffer.data, job.buffer.count * sizeof(float)) != cudaSuccess) {
      return absl::InternalError("no memory");
    }
  }
  return job.Reduce(true);
}

// Launches one graph after the other. The victim dies while it captures, or while its peer's graphs are running.
absl::Status Replay(RankJob& job) {
  const bool dies_capturing = job.flags["stage"] == "capture";
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t replay = nullptr;
  if (cudaStreamBeginCapture(job.stream, cudaStreamCaptureModeGlobal) != cudaSuccess) {
    return absl::InternalError("no capture");
  }
  absl::Status captured = job.Reduce(false);
  if (dies_capturing && job.victim) raise(SIGKILL);
  if (dies_capturing) {  // the group fails in the middle of the capture
    while (captured.ok()) captured = job.context->world().status();
    cudaStreamEndCapture(job.stream, &graph);
    if (graph != nullptr) cudaGraphDestroy(graph);
    cudaGetLastError();
    return captured;
  }
  if (cudaStreamEndCapture(job.stream, &graph) != cudaSuccess || !captured.ok()) return captured;
  if (cudaGraphInstantiate(&replay, graph, 0) != cudaSuccess) return absl::InternalError("no graph");
  for (int i = 0;; ++i) {
    if (job.victim && i == 20) raise(SIGKILL);
    if (cudaGraphLaunch(replay, job.stream) != cudaSuccess) return absl::InternalError("the graph is not launched");
    if (absl::Status s = job.Synchronize(); !s.ok()) return s;
  }
}

absl::Status Work(RankJob& job) {
  if (absl::Status s = Start(job); !s.ok()) return s;
  const std::string stage = job.flags["stage"];
  if (stage == "init") {  // the victim may come so far before it is killed
    while (true) {
      if (absl::Status s = job.Reduce(true); !s.ok()) return s;
    }
  }
  if (stage == "graph" || stage == "capture") return Replay(job);
  for (int i = 0;; ++i) {
    if (job.victim && i == 20) raise(SIGKILL);
    // "enqueue": many are enqueued when the victim dies, and the survivor goes on enqueueing.
    if (absl::Status s = job.Reduce(stage == "running"); !s.ok()) return job.last->Wait();
  }
}

int PlayRank(int argc, char** argv) {
  RankJob job;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    const size_t equals = word.find('=');
    job.flags[word.substr(2, equals - 2)] = word.substr(equals + 1);
  }
  job.rank = std::atoi(job.flags["rank"].c_str());
  job.victim = job.rank == 1;
  const absl::Status status = Work(job);
  // After the failure the GPU is to be as good as new: nothing runs on it, no error is left behind.
  std::string stream = "free", gpu, again = "not tried";
  if (job.stream != nullptr) {
    const absl::Time until = absl::Now() + absl::Seconds(12);
    while (cudaStreamQuery(job.stream) == cudaErrorNotReady && absl::Now() < until)
      absl::SleepFor(absl::Milliseconds(1));
    if (cudaStreamQuery(job.stream) == cudaErrorNotReady) stream = "blocked";
  }
  if (stream == "free") {
    gpu = cudaGetErrorName(cudaDeviceSynchronize());
    if (job.context != nullptr) {
      auto alone = job.context->NewGroup({job.rank}, absl::Now() + absl::Seconds(10));
      again = (alone.ok() ? job.Reduce(**alone, true) : alone.status()).ToString();
    }
    job.context.reset();
  }
  std::printf("%s | stream: %s | gpu: %s | again: %s\n", status.ToString().c_str(), stream.c_str(), gpu.c_str(),
              again.c_str());
  std::fflush(stdout);
  _exit(0);
}

// --- the test -------------------------------------------------------------------------------------------------------

std::string Survivor(const std::vector<std::string>& arguments) {
  Job job;
  for (int rank = 0; rank < 2; ++rank) job.Start(rank, 2, arguments, {"DDP_LOG_LEVEL=error"});
  const std::vector<Ending> endings = job.Finish(absl::Seconds(60));
  CHECK(endings[1].code == SIGKILL);
  CHECK_FALSE(endings[0].overdue);
  CHECK(endings[0].exited);
  UNSCOPED_INFO(endings[0].output);
  return endings[0].output;
}

// The GPU comes free and works on, or the error says that the process has to end, and with which NCCL it need not.
void CheckGoesOn(const std::string& output, const char* remedy) {
  if (absl::StrContains(output, "stream: blocked")) {
    CHECK(absl::StrContains(output, remedy));
  } else {
    CHECK(absl::StrContains(output, "gpu: cudaSuccess"));
    CHECK(absl::StrContains(output, "again: OK"));
  }
}

TEST_CASE("a rank that is killed while operations run, or are enqueued, captured, or replayed, is named") {
  for (const char* stage : {"running", "enqueue", "capture", "graph"}) {
    const std::string output = Survivor({absl::StrCat("--stage=", stage)});
    INFO(stage << ": " << output);
    CHECK(absl::StrContains(output, "UNAVAILABLE"));
    CHECK(absl::StrContains(output, "rank 1"));
    CheckGoesOn(output, "2.28 and later do");
  }
}

TEST_CASE("a rank that is killed while sums on registered memory run is named") {
  for (const char* stage : {"running", "enqueue"}) {
    const std::string output = Survivor({absl::StrCat("--stage=", stage), "--memory=registered"});
    INFO(stage << ": " << output);
    CHECK(absl::StrContains(output, "UNAVAILABLE"));
    CHECK(absl::StrContains(output, "rank 1"));
    CheckGoesOn(output, " and later ");
  }
}

TEST_CASE("a rank that is killed while NCCL starts is an error on the other") {
  for (int delay : {100, 500, 1000, 1500, 2500}) {
    INFO(delay << " ms");
    const std::string output = Survivor({"--stage=init", absl::StrCat("--delay=", delay)});
    CHECK_FALSE(absl::StartsWith(output, "OK"));
    CHECK(absl::StrContains(output, "gpu: cudaSuccess"));
  }
}

}  // namespace
}  // namespace ddp::testing

int main(int argc, char** argv) {
  if (argc > 1 && std::string(argv[1]).rfind("--rank=", 0) == 0) return ddp::testing::PlayRank(argc, argv);
  if (ddp::testing::TooFewGpus()) return 0;
  return Catch::Session().run(argc, argv);
}
