// SPDX-License-Identifier: Apache-2.0
// The CUDA implementation of DeviceRuntime, on a real GPU.
#include <cuda_runtime_api.h>
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "libddp/device/cpu_blocks.h"
#include "libddp/device/cpu_hash.h"
#include "tests/gpu/device_fixture.h"
#include "tests/support/catch.h"
#include "tests/support/check.h"
#include "tests/support/gpu.h"
#include "tests/support/numbers.h"

namespace ddp::testing {
namespace {

bool Converts(DType from, DType to) {
  const auto narrow = [](DType t) { return t == DType::kFloat32 || t == DType::kFloat16 || t == DType::kBFloat16; };
  return from == to || (narrow(from) && narrow(to));
}

// Has to come first: asking how many GPUs there are and which is current initialises none of them.
TEST_CASE("a device is initialised by its first use, not before") {
  DeviceRuntime& runtime = *CudaDevices();
  REQUIRE(runtime.Count() >= 1);
  CHECK(runtime.Current() == 0);
  for (int i = 0; i < runtime.Count(); ++i) CHECK_FALSE(runtime.InUse(i));
  const absl::Status none = runtime.Check({Device::Kind::kCuda, static_cast<int16_t>(runtime.Count())});
  RANK_CHECK_STATUS(none, absl::StatusCode::kFailedPrecondition, "CUDA_VISIBLE_DEVICES", "numbered from 0");
  CHECK_FALSE(runtime.InUse(0));
  RANK_CHECK_OK(runtime.Check(kGpu));
  CHECK(runtime.InUse(0));
  for (int i = 1; i < runtime.Count(); ++i) CHECK_FALSE(runtime.InUse(i));
}

TEST_CASE("the guard leaves the thread on a device that is in use") {
  DeviceRuntime& runtime = *CudaDevices();
  if (runtime.Count() < 2) return;  // told by the test of the count above: one GPU has nothing to change to
  RANK_CHECK_OK(runtime.SetCurrent(kGpu));
  {
    const DeviceGuard guard(runtime, {Device::Kind::kCuda, 1});
    RANK_CHECK_OK(guard.status());
    CHECK(runtime.Current() == 1);
  }
  CHECK(runtime.Current() == 0);
}

TEST_CASE("ranges are converted and scaled as the reference says") {
  Fixture gpu;
  // Whole tiles and pieces of one, odd addresses, nothing at all; more ranges than one launch takes.
  const std::vector<size_t> few = {5000, 1, 0, 4096, 777};
  std::vector<size_t> many(300, 37);
  many[150] = 20'000;
  for (const std::vector<size_t>& counts : {few, many}) {
    for (DType from : kAllDTypes) {
      for (DType to : kAllDTypes) {
        if (!Converts(from, to)) continue;
        for (double scale : {1.0, 0.25, 1.0 / 3}) {
          if (scale != 1 && !IsFloatingPoint(from)) continue;
          INFO(std::string(Name(from)) << " to " << std::string(Name(to)) << " by " << scale);
          size_t total = 0;
          for (size_t n : counts) total += n + 1;  // a guard element after each
          std::vector<char> in(total * SizeOf(from)), expected(total * SizeOf(to)), fill(total * SizeOf(to));
          for (size_t i = 0; i < total; ++i) {
            SetElement(from, in.data(), i, WholeNumber(from, ReduceOp::kSum, 1, i));
            SetElement(to, fill.data(), i, 77);
          }
          expected = fill;
          const std::shared_ptr<void> a = gpu.Upload(in.data(), in.size()), b = gpu.Upload(fill.data(), fill.size());
          std::vector<TransformPiece> pieces;
          size_t at = 0;
          for (size_t n : counts) {
            pieces.push_back(
                {static_cast<char*>(a.get()) + at * SizeOf(from), static_cast<char*>(b.get()) + at * SizeOf(to), n});
            for (size_t i = at; i < at + n; ++i) {
              const double x = GetElement(from, in.data(), i);
              const double wide = from == DType::kFloat64
                                      ? x * scale
                                      : static_cast<double>(static_cast<float>(x) * static_cast<float>(scale));
              SetElement(to, expected.data(), i, scale == 1 ? x : wide);
            }
            at += n + 1;
          }
          RANK_CHECK_OK(gpu.runtime().Run({from, to, scale, nullptr}, pieces, gpu.stream()));
          CHECK(gpu.Download(b.get(), fill.size()) == expected);
          if (from != to) continue;
          for (TransformPiece& piece : pieces) piece.out = const_cast<void*>(piece.in);
          RANK_CHECK_OK(gpu.runtime().Run({from, to, scale, nullptr}, pieces, gpu.stream()));
          for (size_t i = 0, p = 0, begin = 0; p < counts.size(); begin += counts[p++] + 1) {
            for (i = begin + counts[p]; i < begin + counts[p] + 1; ++i) {
              std::memcpy(expected.data() + i * SizeOf(to), in.data() + i * SizeOf(to), SizeOf(to));
            }
          }
          CHECK(gpu.Download(a.get(), in.size()) == expected);
        }
      }
    }
  }
}

TEST_CASE("kernels of 8-bit blocks have the CPU's bits") {
  Fixture gpu;
  for (const blocks::Format format : {blocks::Format::kInt8, blocks::Format::kFloat8E4M3}) {
    for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
      for (const size_t count : {size_t{1}, size_t{511}, size_t{5000}, size_t{3'000'001}}) {
        for (const size_t offset : {0, 1}) {  // off what 16 bytes are aligned to
          INFO("format " << static_cast<int>(format) << ", " << std::string(Name(dtype)) << ", " << count);
          std::vector<char> array((count + offset) * SizeOf(dtype));
          for (size_t i = 0; i < count + offset; ++i) {
            SetElement(dtype, array.data(), i, std::ldexp(Awkward(0, i), -static_cast<int>(i / 128 % 20) * 6));
          }
          if (count > 3000) SetElement(dtype, array.data(), 3000, NAN);
          const size_t shift = offset * SizeOf(dtype), bytes = blocks::GroupsOf(count) * blocks::kGroupBytes;
          blocks::Pass pass{.format = format, .dtype = static_cast<uint8_t>(dtype), .count = count};
          std::vector<char> groups(3 * bytes);
          // Runs the pass on both, and compares what they store.
          const auto run = [&](std::vector<char>& in, size_t in_shift, std::vector<char>& out, size_t out_shift) {
            const std::shared_ptr<void> a = gpu.Upload(in.data(), in.size()), b = gpu.Upload(out.data(), out.size());
            pass.in = static_cast<char*>(a.get()) + in_shift;
            pass.out = static_cast<char*>(b.get()) + out_shift;
            RANK_CHECK_OK(gpu.runtime().RunBlocks(pass, gpu.stream()));
            pass.in = in.data() + in_shift;
            pass.out = out.data() + out_shift;
            CpuRunBlocks(pass);
            return gpu.Download(b.get(), out.size());
          };
          pass.scale = 0.3F;
          CHECK(run(array, shift, groups, 0) == groups);
          std::copy_n(groups.begin(), bytes, groups.begin() + static_cast<std::ptrdiff_t>(bytes));
          std::copy_n(groups.begin(), bytes, groups.begin() + static_cast<std::ptrdiff_t>(2 * bytes));
          std::vector<char> sum(bytes);
          pass.step = blocks::Pass::Step::kReduce;
          pass.ins = 3;
          pass.stride = bytes;
          CHECK(run(groups, 0, sum, 0) == sum);
          pass.step = blocks::Pass::Step::kDequantize;
          std::vector<char> got = run(sum, 0, array, shift);
          for (size_t i = 0; i < count + offset; ++i) {
            const double x = GetElement(dtype, got.data(), i), wanted = GetElement(dtype, array.data(), i);
            if (x != wanted && !(std::isnan(x) && std::isnan(wanted))) FAIL_CHECK(i << ": " << x << " not " << wanted);
          }
        }
      }
    }
  }
}

TEST_CASE("an infinity or a NaN is found wherever it is") {
  Fixture gpu;
  const std::shared_ptr<void> word = RANK_VALUE(gpu.runtime().Allocate(kGpu, 4));
  const size_t n = 9001;
  for (DType dtype : {DType::kFloat64, DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    std::vector<char> data(n * SizeOf(dtype));
    for (size_t i = 0; i < n; ++i) SetElement(dtype, data.data(), i, 1);
    const std::shared_ptr<void> memory = gpu.Upload(data.data(), data.size());
    char* const base = static_cast<char*>(memory.get());
    const auto found = [&](double scale) {
      RANK_CHECK_OK(gpu.runtime().Zero(word.get(), 4, gpu.stream()));
      const TransformPiece piece{base, nullptr, n};
      RANK_CHECK_OK(
          gpu.runtime().Run({dtype, dtype, scale, static_cast<uint32_t*>(word.get())}, {&piece, 1}, gpu.stream()));
      return gpu.Word(word) != 0;
    };
    INFO(std::string(Name(dtype)));
    CHECK_FALSE(found(1));
    CHECK_FALSE(found(3));
    CHECK(gpu.Download(base, data.size()) == data);  // a check alone stores nothing
    for (size_t at : {size_t{0}, size_t{4095}, size_t{4096}, n - 1}) {
      for (double bad : {HUGE_VAL, -HUGE_VAL, std::numeric_limits<double>::quiet_NaN()}) {
        char element[8], one[8];
        SetElement(dtype, element, 0, bad);
        SetElement(dtype, one, 0, 1);
        RANK_CHECK_OK(gpu.runtime().Copy(base + at * SizeOf(dtype), element, SizeOf(dtype), gpu.stream()));
        CHECK(found(1));
        RANK_CHECK_OK(gpu.runtime().Copy(base + at * SizeOf(dtype), one, SizeOf(dtype), gpu.stream()));
      }
    }
    if (dtype == DType::kFloat32) CHECK(found(std::numeric_limits<float>::infinity()));  // what scaling makes of it
  }
}

// 9001 elements are two full tiles and a rest.
TEST_CASE("what is finite in float32 and infinite as it is stored is found") {
  Fixture gpu;
  const size_t n = 9001;
  const std::shared_ptr<void> word = RANK_VALUE(gpu.runtime().Allocate(kGpu, 4));
  const std::shared_ptr<void> out = RANK_VALUE(gpu.runtime().Allocate(kGpu, n * 4));
  const auto found = [&](DType in, DType to, double element, double scale, float factor, size_t at) {
    std::vector<char> data(n * SizeOf(in));
    SetElement(in, data.data(), at, element);
    const std::shared_ptr<void> memory = gpu.Upload(data.data(), data.size()), by = gpu.Upload(&factor, sizeof factor);
    RANK_CHECK_OK(gpu.runtime().Zero(word.get(), 4, gpu.stream()));
    const TransformPiece piece{memory.get(), out.get(), n};
    Transform transform{in, to, scale, static_cast<uint32_t*>(word.get())};
    if (factor != 1) transform.factor = static_cast<const float*>(by.get());
    RANK_CHECK_OK(gpu.runtime().Run(transform, {&piece, 1}, gpu.stream()));
    const bool infinite = std::isinf(GetElement(to, gpu.Download(out.get(), n * SizeOf(to)).data(), at));
    const bool told = gpu.Word(word) != 0;
    CHECK(told == infinite);
    return told;
  };
  constexpr DType kF32 = DType::kFloat32, kF16 = DType::kFloat16, kBF16 = DType::kBFloat16;
  for (const size_t at : {size_t{0}, size_t{4095}, size_t{4096}, n - 1}) {
    CHECK(found(kF32, kF16, 65'520, 1, 1, at));
    CHECK_FALSE(found(kF32, kF16, 65'519, 1, 1, at));
    CHECK(found(kF16, kF16, -40'000, 2, 1, at));
    CHECK_FALSE(found(kF16, kF32, 40'000, 2, 1, at));
    CHECK(found(kF32, kBF16, 0x1.ffp127, 1, 1, at));
    CHECK_FALSE(found(kF32, kBF16, 0x1.fep127, 1, 1, at));
    CHECK(found(kF16, kF16, 40'000, 1, 2, at));          // by the factor
    CHECK_FALSE(found(kF16, kF16, 40'000, 2, 0.5, at));  // rounded once, in the end
    CHECK(found(kF32, kF32, 3e38, 1, 2, at));
  }
}

TEST_CASE("a GPU's hashes are the CPU's, for every length and alignment") {
  Fixture gpu;
  std::vector<char> bytes(3'000'000);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<char>(i * 2'654'435'761u >> 13);
  const std::shared_ptr<void> data = gpu.Upload(bytes.data(), bytes.size());
  // More arrays than one launch takes, and some of many blocks.
  std::vector<TransformPiece> pieces;
  std::vector<uint64_t> expected;
  const auto add = [&](size_t offset, size_t count) {
    pieces.push_back({static_cast<char*>(data.get()) + offset, nullptr, count});
    expected.push_back(CpuHash(bytes.data() + offset, count));
  };
  for (size_t n = 0; n < 160; ++n) add(n, n * 37 % 161);
  for (const size_t offset : {0u, 1u, 2u, 4u, 8u, 16u}) add(offset, bytes.size() - 16);
  const std::vector<uint64_t> garbage(pieces.size(), 77);
  const std::shared_ptr<void> results = gpu.Upload(garbage.data(), garbage.size() * sizeof(uint64_t));
  RANK_CHECK_OK(gpu.runtime().Hash(pieces, static_cast<uint64_t*>(results.get()), gpu.stream()));
  const std::vector<char> got = gpu.Download(results.get(), pieces.size() * sizeof(uint64_t));
  for (size_t k = 0; k < pieces.size(); ++k) {
    uint64_t hash = 0;
    std::memcpy(&hash, got.data() + k * sizeof hash, sizeof hash);
    CHECK(hash == expected[k]);
  }
}

TEST_CASE("wrong transforms are refused") {
  Fixture gpu;
  const std::shared_ptr<void> memory = RANK_VALUE(gpu.runtime().Allocate(kGpu, 64));
  const TransformPiece piece{memory.get(), memory.get(), 4};
  const auto run = [&](const Transform& t) { return gpu.runtime().Run(t, {&piece, 1}, gpu.stream()); };
  RANK_CHECK_STATUS(run({DType::kInt32, DType::kInt64, 1, nullptr}), absl::StatusCode::kInvalidArgument, "int32");
  RANK_CHECK_STATUS(run({DType::kFloat64, DType::kFloat32, 1, nullptr}), absl::StatusCode::kInvalidArgument);
  RANK_CHECK_STATUS(run({DType::kInt32, DType::kInt32, 2, nullptr}), absl::StatusCode::kInvalidArgument);
  RANK_CHECK_OK(run({DType::kInt32, DType::kInt32, 1, nullptr}));  // and nothing has stuck
}

TEST_CASE("a step is skipped when the group failed or a gradient was not finite") {
  Fixture gpu;
  // The failed word is the host's to write, at any time.
  const std::shared_ptr<void> failed = RANK_VALUE(gpu.runtime().AllocatePinned(4));
  const std::shared_ptr<void> found_inf = RANK_VALUE(gpu.runtime().Allocate(kGpu, 4));
  const std::shared_ptr<void> skip = RANK_VALUE(gpu.runtime().Allocate(kGpu, 4));
  const auto word = [](const std::shared_ptr<void>& p) { return static_cast<uint32_t*>(p.get()); };
  for (uint32_t f : {0u, 1u}) {
    for (uint32_t i : {0u, 1u}) {
      *word(failed) = f;
      RANK_CHECK_OK(gpu.runtime().Copy(found_inf.get(), &i, 4, gpu.stream()));
      gpu.Synchronize();
      RANK_CHECK_OK(gpu.runtime().Commit(word(failed), word(found_inf), word(skip), nullptr, gpu.stream()));
      CHECK(gpu.Word(skip) == (f | i));
      RANK_CHECK_OK(gpu.runtime().Commit(word(failed), nullptr, word(skip), nullptr, gpu.stream()));
      CHECK(gpu.Word(skip) == f);
    }
  }
  RANK_CHECK_OK(gpu.runtime().Commit(nullptr, nullptr, word(skip), nullptr, gpu.stream()));
  CHECK(gpu.Word(skip) == 0);
}

TEST_CASE("memory of every kind is zero at first, writable by the device, and owned") {
  Fixture gpu;
  DeviceRuntime& runtime = gpu.runtime();
  const size_t bytes = size_t{1} << 20;
  const std::shared_ptr<void> device = RANK_VALUE(runtime.Allocate(kGpu, bytes));
  CHECK(gpu.Download(device.get(), bytes) == std::vector<char>(bytes));
  CHECK(RANK_VALUE(runtime.DeviceOf(static_cast<char*>(device.get()) + 100)) == kGpu);

  const std::shared_ptr<void> pinned = RANK_VALUE(runtime.AllocatePinned(bytes));
  CHECK(std::memcmp(pinned.get(), std::vector<char>(bytes).data(), bytes) == 0);
  CHECK(RANK_VALUE(runtime.DeviceOf(pinned.get())) == Device{});

  void* const shared = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  REQUIRE(shared != MAP_FAILED);
  std::shared_ptr<void> registered = RANK_VALUE(runtime.RegisterHost(shared, bytes));
  std::memset(shared, 5, bytes);
  for (void* host : {pinned.get(), shared}) {
    std::memset(host, 5, bytes);
    const TransformPiece piece{host, device.get(), bytes}, back{device.get(), host, bytes / 2};
    RANK_CHECK_OK(runtime.Run({DType::kUInt8, DType::kUInt8, 1, nullptr}, {&piece, 1}, gpu.stream()));
    CHECK(gpu.Download(device.get(), bytes) == std::vector<char>(bytes, 5));
    RANK_CHECK_OK(runtime.Zero(device.get(), bytes, gpu.stream()));
    RANK_CHECK_OK(runtime.Run({DType::kUInt8, DType::kUInt8, 1, nullptr}, {&back, 1}, gpu.stream()));
    gpu.Synchronize();
    CHECK(static_cast<char*>(host)[bytes / 2 - 1] == 0);
    CHECK(static_cast<char*>(host)[bytes / 2] == 5);
  }
  RANK_CHECK_STATUS(runtime.RegisterHost(shared, bytes), absl::StatusCode::kInternal, "cudaHostRegister");
  registered.reset();
  registered = RANK_VALUE(runtime.RegisterHost(shared, bytes));
  registered.reset();
  munmap(shared, bytes);

  // Too much is an error that leaves nothing behind.
  RANK_CHECK_STATUS(runtime.Allocate(kGpu, size_t{1} << 50), absl::StatusCode::kResourceExhausted, "nvidia-smi");
  RANK_CHECK_OK(runtime.Allocate(kGpu, 16));
  void* const scratch = RANK_VALUE(runtime.AllocateOnStream(bytes, gpu.stream()));
  RANK_CHECK_OK(runtime.Zero(scratch, bytes, gpu.stream()));
  RANK_CHECK_OK(runtime.FreeOnStream(scratch, gpu.stream()));
  gpu.Synchronize();
}

// How many bytes of the GPU's memory nobody has.
size_t FreeBytes() {
  size_t free = 0, total = 0;
  CHECK(cudaMemGetInfo(&free, &total) == cudaSuccess);
  return free;
}

TEST_CASE("scratch memory is kept across synchronisations, up to a limit, and not in the program's pool") {
  Fixture gpu;
  constexpr size_t kMiB = size_t{1} << 20, kKept = 64 * kMiB;
  // What comes back to the GPU from an array of so many bytes.
  const auto returned = [&](size_t bytes) {
    void* const array = RANK_VALUE(gpu.runtime().AllocateOnStream(bytes, gpu.stream()));
    RANK_CHECK_OK(gpu.runtime().Zero(array, bytes, gpu.stream()));
    gpu.Synchronize();
    const size_t used = FreeBytes();
    RANK_CHECK_OK(gpu.runtime().FreeOnStream(array, gpu.stream()));
    CHECK(cudaStreamSynchronize(static_cast<cudaStream_t>(gpu.stream())) == cudaSuccess);
    const size_t after = FreeBytes();
    return after < used ? 0 : after - used;
  };
  CHECK(returned(48 * kMiB) < kMiB);
  CHECK(returned(48 * kMiB) < kMiB);
  CHECK(returned(1024 * kMiB) >= 1024 * kMiB - kKept);

  cudaMemPool_t pool = nullptr;
  REQUIRE(cudaDeviceGetDefaultMemPool(&pool, 0) == cudaSuccess);
  uint64_t threshold = 1, reserved = 1;
  CHECK(cudaMemPoolGetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &threshold) == cudaSuccess);
  CHECK(cudaMemPoolGetAttribute(pool, cudaMemPoolAttrReservedMemCurrent, &reserved) == cudaSuccess);
  CHECK(threshold == 0);
  CHECK(reserved == 0);
}

TEST_CASE("a stream waits for another's event") {
  Fixture gpu;
  DeviceRuntime& runtime = gpu.runtime();
  const OwnedStream other = RANK_VALUE(MakeStream(runtime));
  const OwnedEvent event = RANK_VALUE(MakeEvent(runtime)), never = RANK_VALUE(MakeEvent(runtime));
  CHECK(RANK_VALUE(runtime.Finished(never.get())));
  CHECK_FALSE(RANK_VALUE(runtime.Capturing(gpu.stream())));
  const size_t bytes = size_t{256} << 20;
  const std::shared_ptr<void> a = RANK_VALUE(runtime.Allocate(kGpu, bytes)),
                              b = RANK_VALUE(runtime.Allocate(kGpu, bytes));
  for (int round = 0; round < 5; ++round) {
    // A long copy here, and what reads its last byte there.
    const char mark = static_cast<char>(round + 1);
    RANK_CHECK_OK(runtime.Copy(static_cast<char*>(a.get()) + bytes - 1, &mark, 1, gpu.stream()));
    for (int i = 0; i < 10; ++i) RANK_CHECK_OK(runtime.Copy(b.get(), a.get(), bytes, gpu.stream()));
    RANK_CHECK_OK(runtime.Record(event.get(), gpu.stream()));
    RANK_CHECK_OK(runtime.WaitEvent(other.get(), event.get()));
    char seen = 0;
    RANK_CHECK_OK(runtime.Copy(&seen, static_cast<char*>(b.get()) + bytes - 1, 1, other.get()));
    const OwnedEvent read = RANK_VALUE(MakeEvent(runtime));
    RANK_CHECK_OK(runtime.Record(read.get(), other.get()));
    while (!RANK_VALUE(runtime.Finished(read.get()))) continue;
    CHECK(seen == mark);
  }
  const OwnedEvent begin = RANK_VALUE(MakeEvent(runtime, true)), end = RANK_VALUE(MakeEvent(runtime, true));
  RANK_CHECK_OK(runtime.Record(begin.get(), gpu.stream()));
  RANK_CHECK_OK(runtime.Copy(b.get(), a.get(), bytes, gpu.stream()));
  RANK_CHECK_OK(runtime.Record(end.get(), gpu.stream()));
  gpu.Synchronize();
  CHECK(RANK_VALUE(runtime.ElapsedUs(begin.get(), end.get())) > 0);
}

}  // namespace
}  // namespace ddp::testing
