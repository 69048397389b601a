// SPDX-License-Identifier: Apache-2.0
// What the links between the GPUs of this host, and between them and the host's memory, give: the bounds of whatever
// moves data between them.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "bench/cuda_check.h"
#include "bench/percentile.h"
#include "examples/train/environment.h"
#include "nlohmann/json.hpp"

namespace bench {
namespace {

constexpr char kUsage[] = R"(Times copies between GPUs, and between GPUs and host memory.

  p2p_bench [--bytes N] [--json FILE]

  --bytes N    of one copy (default 268435456)
  --json FILE  write the rows and the environment there as well

Prints matrices, GB/s (10^9 bytes a second; both directions together where it says so) or microseconds:
  device x device  row: source, column: destination. The diagonal is a copy inside a GPU, its reads and writes counted.
  host x device    pinned host memory. all at once: every GPU copies at the same time.
  latency          of a 4-byte copy, from one event to the next, back to back.
A pair without peer access goes through host memory; it is marked by *.
)";

constexpr int kSamples = 7;

struct Gpu {
  cudaStream_t streams[2];
  cudaEvent_t begin, ends[2];
  char* memory[2];
  char* host[2];
};

class Bench {
 public:
  Bench(int count, size_t bytes) : bytes_(bytes), gpus_(static_cast<size_t>(count)) {
    for (int d = 0; d < count; ++d) {
      Gpu& gpu = At(d);
      BENCH_CUDA(cudaSetDevice(d));
      BENCH_CUDA(cudaEventCreate(&gpu.begin));
      for (int i = 0; i < 2; ++i) {
        BENCH_CUDA(cudaStreamCreateWithFlags(&gpu.streams[i], cudaStreamNonBlocking));
        BENCH_CUDA(cudaEventCreate(&gpu.ends[i]));
        BENCH_CUDA(cudaMalloc(reinterpret_cast<void**>(&gpu.memory[i]), bytes));
        BENCH_CUDA(cudaMemset(gpu.memory[i], i + 1, bytes));
        BENCH_CUDA(cudaHostAlloc(reinterpret_cast<void**>(&gpu.host[i]), bytes, cudaHostAllocPortable));
        std::memset(gpu.host[i], i + 3, bytes);
      }
      for (int peer = 0; peer < count; ++peer) {
        if (peer != d && Direct(d, peer)) BENCH_CUDA(cudaDeviceEnablePeerAccess(peer, 0));
      }
    }
  }

  static bool Direct(int from, int to) {
    int can = 0;
    BENCH_CUDA(cudaDeviceCanAccessPeer(&can, from, to));
    return can != 0;
  }

  // GB/s of copying from one GPU's memory to another's, or inside one.
  double DeviceToDevice(int from, int to, bool both) {
    const auto copy = [&](int stream) {
      if (stream == 0)
        BENCH_CUDA(cudaMemcpyPeerAsync(At(to).memory[0], to, At(from).memory[1], from, bytes_, At(from).streams[0]));
      if (stream == 1)
        BENCH_CUDA(cudaMemcpyPeerAsync(At(from).memory[0], from, At(to).memory[1], to, bytes_, At(from).streams[1]));
    };
    const double copied = static_cast<double>(bytes_) * (both || from == to ? 2 : 1);
    return copied / Seconds({from}, both && from != to ? 2 : 1, [&](int, int stream) { copy(stream); }) * 1e-9;
  }

  // GB/s of all the named GPUs together.
  double HostToDevice(const std::vector<int>& devices, bool up, bool down) {
    const double copied = static_cast<double>(bytes_) * static_cast<double>(devices.size()) * (up && down ? 2 : 1);
    return copied /
           Seconds(devices, up && down ? 2 : 1,
                   [&](int d, int stream) {
                     const bool upward = up && stream == 0;
                     BENCH_CUDA(cudaMemcpyAsync(
                         upward ? At(d).memory[0] : At(d).host[1], upward ? At(d).host[0] : At(d).memory[1], bytes_,
                         upward ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToHost, At(d).streams[stream]));
                   }) *
           1e-9;
  }

  // Microseconds of one small copy among many.
  double LatencyUs(int device, const std::function<void(cudaStream_t)>& copy) {
    constexpr int kCopies = 200;
    BENCH_CUDA(cudaSetDevice(device));
    Gpu& gpu = At(device);
    std::vector<double> times;
    for (int sample = -1; sample < kSamples; ++sample) {
      BENCH_CUDA(cudaEventRecord(gpu.begin, gpu.streams[0]));
      for (int i = 0; i < kCopies; ++i) copy(gpu.streams[0]);
      BENCH_CUDA(cudaEventRecord(gpu.ends[0], gpu.streams[0]));
      BENCH_CUDA(cudaStreamSynchronize(gpu.streams[0]));
      float ms = 0;
      BENCH_CUDA(cudaEventElapsedTime(&ms, gpu.begin, gpu.ends[0]));
      if (sample >= 0) times.push_back(static_cast<double>(ms) * 1e3 / kCopies);
    }
    return Median(times);
  }

  Gpu& At(int device) { return gpus_[static_cast<size_t>(device)]; }

 private:
  // The slowest device's time for one copy on each of `streams` streams, all devices at once.
  double Seconds(const std::vector<int>& devices, int streams, const std::function<void(int, int)>& copy) {
    constexpr int kCopies = 4;
    std::vector<double> times;
    for (int sample = -1; sample < kSamples; ++sample) {
      for (int d : devices) {
        BENCH_CUDA(cudaSetDevice(d));
        BENCH_CUDA(cudaDeviceSynchronize());
      }
      for (int d : devices) {
        BENCH_CUDA(cudaSetDevice(d));
        BENCH_CUDA(cudaEventRecord(At(d).begin, At(d).streams[0]));
        BENCH_CUDA(cudaStreamWaitEvent(At(d).streams[1], At(d).begin, 0));
      }
      for (int i = 0; i < kCopies; ++i) {
        for (int d : devices) {
          BENCH_CUDA(cudaSetDevice(d));
          for (int s = 0; s < streams; ++s) copy(d, s);
        }
      }
      for (int d : devices) {
        BENCH_CUDA(cudaSetDevice(d));
        for (int s = 0; s < streams; ++s) BENCH_CUDA(cudaEventRecord(At(d).ends[s], At(d).streams[s]));
      }
      double slowest = 0;
      for (int d : devices) {
        for (int s = 0; s < streams; ++s) {
          BENCH_CUDA(cudaEventSynchronize(At(d).ends[s]));
          float ms = 0;
          BENCH_CUDA(cudaEventElapsedTime(&ms, At(d).begin, At(d).ends[s]));
          slowest = std::max(slowest, static_cast<double>(ms) * 1e-3 / kCopies);
        }
      }
      if (sample >= 0) times.push_back(slowest);
    }
    return Median(times);
  }

  const size_t bytes_;
  std::vector<Gpu> gpus_;
};

class Table {
 public:
  void Row(const std::string& what, int from, int to, double value, const char* unit) {
    rows_.push_back({{"what", what}, {"from", from}, {"to", to}, {"value", value}, {"unit", unit}});
  }
  bool Write(const std::string& path) const {
    const nlohmann::json all = {
        {"environment", nlohmann::json::parse(examples::DescribeEnvironment("none", /*gpu=*/true))}, {"rows", rows_}};
    std::ofstream file(path);
    file << all.dump(1) << "\n";
    return file.good();
  }

 private:
  nlohmann::json rows_ = nlohmann::json::array();
};

void DeviceMatrix(Bench& bench, int count, bool both, Table& table) {
  std::printf("\ndevice x device, %s, GB/s\n      ", both ? "both directions together" : "one direction");
  for (int to = 0; to < count; ++to) std::printf("%9d ", to);
  std::printf("\n");
  for (int from = 0; from < count; ++from) {
    std::printf("%5d ", from);
    for (int to = 0; to < count; ++to) {
      const double rate = bench.DeviceToDevice(from, to, both);
      table.Row(both ? "device_both" : "device", from, to, rate, "GB/s");
      std::printf("%9.1f%c", rate, from == to || Bench::Direct(from, to) ? ' ' : '*');
    }
    std::printf("\n");
  }
}

void HostMatrix(Bench& bench, int count, Table& table) {
  std::printf("\nhost x device, GB/s\n      %10s %10s %10s\n", "to GPU", "from GPU", "both");
  std::vector<int> all;
  for (int d = 0; d <= count; ++d) {
    const bool together = d == count;
    if (together && count == 1) break;
    const std::vector<int> devices = together ? all : std::vector<int>{d};
    if (!together) all.push_back(d);
    std::printf("%5s ", together ? "all" : std::to_string(d).c_str());
    const struct {
      const char* name;
      bool up, down;
    } kinds[] = {{"to_gpu", true, false}, {"from_gpu", false, true}, {"both", true, true}};
    for (const auto& kind : kinds) {
      const double rate = bench.HostToDevice(devices, kind.up, kind.down);
      table.Row(std::string("host_") + kind.name, -1, together ? -1 : d, rate, "GB/s");
      std::printf("%10.1f ", rate);
    }
    std::printf("%s\n", together ? "at once" : "");
  }
}

void Latencies(Bench& bench, int count, Table& table) {
  std::printf("\nlatency of 4 bytes, us\n      ");
  for (int to = 0; to < count; ++to) std::printf("%9d ", to);
  std::printf("%9s %9s\n", "to host", "from host");
  for (int from = 0; from < count; ++from) {
    std::printf("%5d ", from);
    for (int to = 0; to < count; ++to) {
      const double us = bench.LatencyUs(from, [&](cudaStream_t s) {
        BENCH_CUDA(cudaMemcpyPeerAsync(bench.At(to).memory[0], to, bench.At(from).memory[1], from, 4, s));
      });
      table.Row("latency", from, to, us, "us");
      std::printf("%9.2f ", us);
    }
    Gpu& gpu = bench.At(from);
    const double down = bench.LatencyUs(from, [&](cudaStream_t s) {
      BENCH_CUDA(cudaMemcpyAsync(gpu.host[0], gpu.memory[0], 4, cudaMemcpyDeviceToHost, s));
    });
    const double up = bench.LatencyUs(from, [&](cudaStream_t s) {
      BENCH_CUDA(cudaMemcpyAsync(gpu.memory[0], gpu.host[0], 4, cudaMemcpyHostToDevice, s));
    });
    table.Row("latency_to_host", from, -1, down, "us");
    table.Row("latency_from_host", -1, from, up, "us");
    std::printf("%9.2f %9.2f\n", down, up);
  }
}

int Main(int argc, char** argv) {
  size_t bytes = size_t{256} << 20;
  std::string json;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    if (flag == "--help") {
      std::fputs(kUsage, stdout);
      return 0;
    }
    if (flag == "--bytes" && i + 1 < argc) {
      bytes = std::strtoull(argv[++i], nullptr, 10);
    } else if (flag == "--json" && i + 1 < argc) {
      json = argv[++i];
    } else {
      std::fprintf(stderr, "p2p_bench: %s is no flag, or lacks its value; see --help\n", flag.c_str());
      return 2;
    }
  }
  if (bytes < 4) {
    std::fprintf(stderr, "p2p_bench: --bytes must be a number of 4 or more\n");
    return 2;
  }
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
    std::fprintf(stderr, "p2p_bench: there is no GPU here (does nvidia-smi list one?)\n");
    return 1;
  }
  for (int d = 0; d < count; ++d) {
    cudaDeviceProp properties;
    BENCH_CUDA(cudaGetDeviceProperties(&properties, d));
    char bus[32] = {};
    BENCH_CUDA(cudaDeviceGetPCIBusId(bus, sizeof bus, d));
    std::printf("# GPU %d: %s, %s\n", d, properties.name, bus);
  }
  Bench bench(count, bytes);
  Table table;
  DeviceMatrix(bench, count, false, table);
  DeviceMatrix(bench, count, true, table);
  HostMatrix(bench, count, table);
  Latencies(bench, count, table);
  if (!json.empty() && !table.Write(json)) {
    std::fprintf(stderr, "p2p_bench: %s cannot be written\n", json.c_str());
    return 1;
  }
  return 0;
}

}  // namespace
}  // namespace bench

int main(int argc, char** argv) { return bench::Main(argc, argv); }
