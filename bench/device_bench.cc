// SPDX-License-Identifier: Apache-2.0
// The library's kernels on one GPU, beside a plain copy of as many bytes.
#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "bench/cuda_check.h"
#include "bench/percentile.h"
#include "examples/train/environment.h"
#include "libddp/device/device_runtime.h"
#include "nlohmann/json.hpp"

namespace bench {
namespace {

using ddp::DType;

constexpr char kUsage[] = R"(Times the kernels that convert, scale, copy and check, on GPU 0.

  device_bench [--json FILE]

Columns: bytes moved (read and written), time, GB/s, and the ratio to cudaMemcpyAsync moving as many bytes in the same run.
Each is measured as one range, and as 100 ranges in one launch.
)";

struct Row {
  std::string kernel;
  size_t ranges;
  double bytes, us, rate, of_copy;
};

class Bench {
 public:
  Bench()
      : runtime_(*ddp::CudaDevices()),
        memory_(Allocate()),
        other_(Allocate()),
        word_(runtime_.Allocate(kGpu, 4).value()) {
    BENCH_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    BENCH_CUDA(cudaEventCreate(&begin_));
    BENCH_CUDA(cudaEventCreate(&end_));
    // Zeros can be faster than data is.
    std::vector<uint16_t> noise(size_t{1} << 20);
    for (size_t i = 0; i < noise.size(); ++i) noise[i] = static_cast<uint16_t>(0x3c00 + i * 2654435761u % 1024);
    for (size_t at = 0; at < kBytes; at += noise.size() * 2) {
      BENCH_CUDA(cudaMemcpy(At(memory_, at), noise.data(), noise.size() * 2, cudaMemcpyHostToDevice));
    }
  }

  // The median time of one call in microseconds.
  double TimeUs(const std::function<void()>& call) {
    constexpr int kCalls = 5;
    std::vector<double> times;
    for (int sample = -2; sample < 11; ++sample) {
      BENCH_CUDA(cudaEventRecord(begin_, stream_));
      for (int i = 0; i < kCalls; ++i) call();
      BENCH_CUDA(cudaEventRecord(end_, stream_));
      BENCH_CUDA(cudaStreamSynchronize(stream_));
      float ms = 0;
      BENCH_CUDA(cudaEventElapsedTime(&ms, begin_, end_));
      if (sample >= 0) times.push_back(static_cast<double>(ms) * 1e3 / kCalls);
    }
    return Median(std::move(times));
  }

  // `moved` bytes in all by a plain copy: GB/s.
  double CopyRate(double moved) {
    const size_t bytes = static_cast<size_t>(moved / 2);
    return moved / TimeUs([&] {
             BENCH_CUDA(cudaMemcpyAsync(other_.get(), memory_.get(), bytes, cudaMemcpyDeviceToDevice, stream_));
           }) *
           1e-3;
  }

  Row Measure(const std::string& name, DType in, DType out, double scale, bool check, bool store, size_t ranges,
              bool in_place = false) {
    const size_t widest = std::max(SizeOf(in), SizeOf(out));
    const size_t per_range = kBytes / widest / ranges / 64 * 64;
    std::vector<ddp::TransformPiece> pieces;
    for (size_t r = 0; r < ranges; ++r) {
      void* const from = At(memory_, r * per_range * SizeOf(in));
      void* const to = !store ? nullptr : in_place ? from : At(other_, r * per_range * SizeOf(out));
      pieces.push_back({from, to, per_range});
    }
    const ddp::Transform transform{in, out, scale, check ? static_cast<uint32_t*>(word_.get()) : nullptr};
    const double us = TimeUs([&] {
      const absl::Status status = runtime_.Run(transform, pieces, stream_);
      if (!status.ok()) {
        std::fprintf(stderr, "device_bench: %s\n", status.ToString().c_str());
        std::exit(1);
      }
    });
    const double moved =
        static_cast<double>(ranges * per_range) * static_cast<double>(SizeOf(in) + (store ? SizeOf(out) : 0));
    const double rate = moved / us * 1e-3;
    return {name, ranges, moved, us, rate, rate / CopyRate(moved)};
  }

 private:
  static constexpr ddp::Device kGpu{ddp::Device::Kind::kCuda, 0};
  static constexpr size_t kBytes = size_t{1} << 30;

  std::shared_ptr<void> Allocate() { return runtime_.Allocate(kGpu, kBytes).value(); }
  static void* At(const std::shared_ptr<void>& memory, size_t offset) {
    return static_cast<char*>(memory.get()) + offset;
  }

  ddp::DeviceRuntime& runtime_;
  const std::shared_ptr<void> memory_, other_, word_;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
};

int Main(int argc, char** argv) {
  std::string json;
  if (argc == 2 && std::string(argv[1]) == "--help") {
    std::fputs(kUsage, stdout);
    return 0;
  }
  if (argc == 3 && std::string(argv[1]) == "--json") {
    json = argv[2];
  } else if (argc != 1) {
    std::fprintf(stderr, "device_bench: see --help\n");
    return 2;
  }
  if (const absl::Status status = ddp::CudaDevices()->Check({ddp::Device::Kind::kCuda, 0}); !status.ok()) {
    std::fprintf(stderr, "device_bench: %s\n", std::string(status.message()).c_str());
    return 1;
  }
  Bench bench;
  nlohmann::json rows = nlohmann::json::array();
  std::printf("%-34s %7s %8s %9s %9s %8s\n", "kernel", "ranges", "MiB", "us", "GB/s", "of copy");
  for (size_t ranges : {size_t{1}, size_t{100}}) {
    const Row measured[] = {
        bench.Measure("copy float32", DType::kFloat32, DType::kFloat32, 1, false, true, ranges),
        bench.Measure("copy int8", DType::kInt8, DType::kInt8, 1, false, true, ranges),
        bench.Measure("scale float32 in place", DType::kFloat32, DType::kFloat32, 0.5, false, true, ranges, true),
        bench.Measure("copy with scale float32", DType::kFloat32, DType::kFloat32, 0.5, false, true, ranges),
        bench.Measure("scale and check float32 in place", DType::kFloat32, DType::kFloat32, 0.5, true, true, ranges,
                      true),
        bench.Measure("scale and check float16 in place", DType::kFloat16, DType::kFloat16, 0.5, true, true, ranges,
                      true),
        bench.Measure("scale and check bfloat16 in place", DType::kBFloat16, DType::kBFloat16, 0.5, true, true, ranges,
                      true),
        bench.Measure("check float32", DType::kFloat32, DType::kFloat32, 1, true, false, ranges),
        bench.Measure("check float16", DType::kFloat16, DType::kFloat16, 1, true, false, ranges),
        bench.Measure("cast float32 to float16", DType::kFloat32, DType::kFloat16, 1, false, true, ranges),
        bench.Measure("cast float32 to bfloat16", DType::kFloat32, DType::kBFloat16, 1, false, true, ranges),
        bench.Measure("cast float16 to float32", DType::kFloat16, DType::kFloat32, 1, false, true, ranges),
        bench.Measure("cast bfloat16 to float32, checked", DType::kBFloat16, DType::kFloat32, 0.5, true, true, ranges),
    };
    for (const Row& row : measured) {
      std::printf("%-34s %7zu %8.0f %9.1f %9.0f %8.3f\n", row.kernel.c_str(), row.ranges, row.bytes / 1048576, row.us,
                  row.rate, row.of_copy);
      rows.push_back({{"kernel", row.kernel},
                      {"ranges", row.ranges},
                      {"bytes", row.bytes},
                      {"us", row.us},
                      {"GBps", row.rate},
                      {"of_copy", row.of_copy}});
    }
  }
  if (json.empty()) return 0;
  const nlohmann::json all = {
      {"environment", nlohmann::json::parse(examples::DescribeEnvironment("none", /*gpu=*/true))}, {"rows", rows}};
  std::ofstream file(json);
  file << all.dump(1) << "\n";
  return file.good() ? 0 : 1;
}

}  // namespace
}  // namespace bench

int main(int argc, char** argv) { return bench::Main(argc, argv); }
