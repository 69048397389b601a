// SPDX-License-Identifier: Apache-2.0
// The nccl or the hierarchical backend on real GPUs, one a rank; ranks are threads or processes.
#include <cuda_runtime_api.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ddp/context.h"
#include "ddp/store.h"
#include "libddp/comm/host/operation.h"
#include "libddp/comm/nccl/api.h"
#include "tests/gpu/on_gpus.h"
#include "tests/support/catch.h"

namespace ddp::testing {
namespace {

std::vector<double> Contributions(DType dtype, ReduceOp op, int size, size_t i) {
  std::vector<double> values;
  for (int r = 0; r < size; ++r) values.push_back(WholeNumber(dtype, op, r, i));
  return values;
}

void CheckAllReduce(Rank& rank, DType in, DType out, const ReduceOptions& options, size_t count, bool allocated,
                    size_t pieces) {
  Array a(rank, in, count, allocated), b(rank, out, count, allocated);
  a.Fill([&](size_t i) { return WholeNumber(in, options.op, rank.rank(), i); });
  const bool in_place = in == out;
  RANK_CHECK_OK(
      (rank.group().AllReduce(a.Cut(pieces), in_place ? a.Cut(pieces) : b.Cut(pieces + 1), options, kNoStream)).Wait());
  (in_place ? a : b)
      .Expect(
          [&](size_t i) {
            return Reduce(out, options.op, Contributions(in, options.op, rank.size(), i), options.prescale,
                          options.postscale);
          },
          IsFloatingPoint(in) ? 1e-2 : 0);
}

TEST_CASE("all-reduce of every type and operation") {
  RunOnGpus([](Rank& rank) {
    RANK_CHECK_EQ(std::string(rank.group().backend()), GpuBackend());
    for (bool allocated : {false, true}) {
      for (DType dtype : kAllDTypes) {
        for (ReduceOp op : kAllOps) {
          for (size_t count : {size_t{1}, size_t{30'001}}) {
            CheckAllReduce(rank, dtype, dtype, {.op = op}, count, allocated, count > 1 ? 3 : 1);
          }
          if (IsFloatingPoint(dtype)) {
            CheckAllReduce(rank, dtype, dtype, {.op = op, .prescale = 2, .postscale = 0.5}, 1000, allocated, 1);
          }
        }
      }
      for (DType in : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
        for (DType out : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
          CheckAllReduce(rank, in, out, {.op = ReduceOp::kAvg, .prescale = 2}, 3333, allocated, 2);
        }
      }
    }
  });
}

TEST_CASE("all-reduce of every size, on memory of every kind") {
  RunOnGpus([](Rank& rank) {
    for (bool allocated : {true, false}) {
      for (size_t count : {size_t{0}, size_t{256}, size_t{100'000}, size_t{5'000'000}, size_t{20'000'000}}) {
        CheckAllReduce(rank, DType::kFloat32, DType::kFloat32, {.op = ReduceOp::kAvg}, count, allocated, 1);
        CheckAllReduce(rank, DType::kFloat32, DType::kFloat32, {.op = ReduceOp::kSum}, count, allocated, 1);
      }
    }
  });
}

// One operation in place on `count` elements (of each rank's part, where there are parts) that begin `offset` elements
// into an allocation. Checks all of the allocation.
void CheckAtOffset(Rank& rank, OperationKey::Kind kind, DType dtype, ReduceOp op, size_t offset, size_t count) {
  const size_t n = static_cast<size_t>(rank.size()), r = static_cast<size_t>(rank.rank());
  const bool parts = kind != OperationKey::Kind::kAllReduce;
  const size_t all = parts ? n * count : count, behind = 40;
  const auto contribution = [](size_t of_rank, size_t i) { return static_cast<double>((i + of_rank) % 5 + of_rank); };
  Array a(rank, dtype, offset + all + behind, /*allocated=*/true);
  a.Fill([&](size_t i) { return contribution(r, i); });
  char* const begin = a.data() + offset * SizeOf(dtype);
  const Device device = rank.context().device();
  const Buffer whole{begin, all, dtype, device}, mine{begin + r * count * SizeOf(dtype), count, dtype, device};
  if (kind == OperationKey::Kind::kAllReduce)
    RANK_CHECK_OK(rank.group().AllReduce(whole, whole, {.op = op}, kNoStream).Wait());
  if (kind == OperationKey::Kind::kReduceScatter)
    RANK_CHECK_OK(rank.group().ReduceScatter(whole, mine, {.op = op}, kNoStream).Wait());
  if (kind == OperationKey::Kind::kAllGather) RANK_CHECK_OK(rank.group().AllGather(mine, whole, kNoStream).Wait());
  a.Expect([&](size_t i) {
    const size_t at = i - offset;
    if (i < offset || at >= all) return contribution(r, i);
    if (kind == OperationKey::Kind::kAllGather) return contribution(at / count, i);
    if (kind == OperationKey::Kind::kReduceScatter && at / count != r) return contribution(r, i);
    double sum = 0;
    for (size_t q = 0; q < n; ++q) sum += contribution(q, i);
    return op == ReduceOp::kAvg ? sum / static_cast<double>(n) : sum;
  });
}

TEST_CASE("operations in place at any offset of an allocation") {
  using Kind = OperationKey::Kind;
  RunOnGpus([](Rank& rank) {
    std::string wrong;  // all of them: which are wrong tells what NCCL cannot do
    for (const Kind kind : {Kind::kAllReduce, Kind::kReduceScatter, Kind::kAllGather}) {
      for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kInt8, DType::kFloat64}) {
        for (const size_t offset : {0, 1, 2, 3, 5, 8}) {
          for (const size_t count : {size_t{1}, size_t{7}, size_t{1000}, size_t{40'001}}) {
            for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAvg}) {
              if (op == ReduceOp::kAvg && !IsFloatingPoint(dtype)) continue;
              try {
                CheckAtOffset(rank, kind, dtype, op, offset, count);
              } catch (const std::exception& e) {
                absl::StrAppend(&wrong, "\n",
                                OperationKey{.kind = kind, .in = dtype, .out = dtype, .op = op}.Describe(count), " at ",
                                offset, ": ", e.what());
              }
            }
          }
        }
      }
    }
    RANK_CHECK(wrong.empty(), wrong);
  });
}

TEST_CASE("data moves where it belongs") {
  RunOnGpus([](Rank& rank) {
    const size_t n = static_cast<size_t>(rank.size()), r = static_cast<size_t>(rank.rank()), part = 10'007;
    for (size_t pieces : {size_t{1}, size_t{3}}) {
      const DType type = DType::kInt64;
      const auto value = [](size_t from, size_t i) { return static_cast<double>(1'000'000 * from + i); };
      Array small(rank, type, part, false), large(rank, type, part * n, true), other(rank, type, part * n, false);
      small.Fill([&](size_t i) { return value(r, i); });
      RANK_CHECK_OK(rank.group().AllGather(small.Cut(pieces), large.Cut(pieces), kNoStream).Wait());
      large.Expect([&](size_t i) { return value(i / part, i % part); });
      RANK_CHECK_OK(rank.group().ReduceScatter(large.Cut(pieces), small.Cut(pieces), {}, kNoStream).Wait());
      small.Expect([&](size_t i) { return static_cast<double>(n) * value(r, i); });
      large.Fill([&](size_t i) { return value(r, i); });
      RANK_CHECK_OK(rank.group().AllToAll(large.Cut(pieces), other.Cut(pieces + 1), kNoStream).Wait());
      other.Expect([&](size_t i) { return value(i / part, part * r + i % part); });
      RANK_CHECK_OK(rank.group().AllToAll(large.Cut(pieces), large.Cut(pieces), kNoStream).Wait());
      large.Expect([&](size_t i) { return value(i / part, part * r + i % part); });
      large.Fill([&](size_t i) { return value(r, i); });
      RANK_CHECK_OK(rank.group().Broadcast(large.Cut(pieces), rank.size() - 1, kNoStream).Wait());
      large.Expect([&](size_t i) { return value(n - 1, i); });
      std::vector<size_t> counts;
      size_t total = 0;
      for (size_t q = 0; q < n; ++q) total += counts.emplace_back(q % 2 == 1 ? 0 : 100 + q);
      Array uneven(rank, type, counts[r], false), all(rank, type, total, false);
      uneven.Fill([&](size_t i) { return value(r, i); });
      RANK_CHECK_OK(rank.group().AllGather(uneven.Cut(1), all.Cut(pieces), counts, kNoStream).Wait());
      all.Expect([&](size_t i) {
        size_t q = 0;
        for (; i >= counts[q]; ++q) i -= counts[q];
        return value(q, i);
      });
    }
    RANK_CHECK_OK(rank.group().Barrier().Wait());
  });
}

// NCCL sends straight from one rank's registered memory into the other's, and hangs where only one is registered.
TEST_CASE("messages go from and to memory of either kind, at every size") {
  RunOnGpus([](Rank& rank) {
    const size_t n = static_cast<size_t>(rank.size()), r = static_cast<size_t>(rank.rank());
    const auto value = [](size_t from, size_t i) { return static_cast<double>(10'000'000 * from + i); };
    for (const size_t part : {size_t{1000}, size_t{1} << 18, size_t{1} << 21}) {
      for (const int kinds : {0, 1, 2, 3}) {
        Array in(rank, DType::kInt32, part * n, (kinds & 1) != 0), out(rank, DType::kInt32, part * n, (kinds & 2) != 0);
        in.Fill([&](size_t i) { return value(r, i); });
        RANK_CHECK_OK(rank.group().AllToAll(in.Cut(1), out.Cut(1), kNoStream).Wait());
        out.Expect([&](size_t i) { return value(i / part, part * r + i % part); });
        RANK_CHECK_OK(rank.group().AllToAll(in.Cut(1), in.Cut(1), kNoStream).Wait());
        in.Expect([&](size_t i) { return value(i / part, part * r + i % part); });
        if (n < 2 || r > 1) continue;
        in.Fill([&](size_t i) { return value(r, i); });
        RANK_CHECK_OK(
            (r == 0 ? rank.group().Send(in.Cut(1), 1, 0, kNoStream) : rank.group().Recv(out.Cut(1), 0, 0, kNoStream))
                .Wait());
        if (r == 1) out.Expect([&](size_t i) { return value(0, i); });
      }
    }
    RANK_CHECK_OK(rank.group().Barrier().Wait());
  });
}

TEST_CASE("a result that is not finite is told, equally on all ranks") {
  RunOnGpus([](Rank& rank) {
    for (DType dtype : {DType::kFloat64, DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
      for (double bad : {1.0, HUGE_VAL}) {
        Array a(rank, dtype, 5000, true), word(rank, DType::kInt32, 1, false);
        a.Fill([&](size_t i) { return rank.rank() == 0 && i == 4999 ? bad : 1; });
        word.Fill([](size_t) { return 0; });
        ReduceOptions options{.op = ReduceOp::kAvg};
        options.nonfinite = reinterpret_cast<uint32_t*>(word.data());
        RANK_CHECK_OK(rank.group().AllReduce(a.Cut(2), a.Cut(2), options, kNoStream).Wait());
        word.Expect([&](size_t) { return bad == 1 ? 0 : 1; });
      }
    }
  });
}

TEST_CASE("a sum that overflows as it is stored is told, equally on all ranks") {
  RunOnGpus([](Rank& rank) {
    for (DType in : {DType::kFloat16, DType::kFloat32}) {
      for (double all : {65'536.0, 60'000.0}) {
        Array a(rank, in, 5000, true), b(rank, DType::kFloat16, 5000, true), word(rank, DType::kInt32, 1, false);
        a.Fill([&](size_t i) { return i == 4999 ? all / rank.size() : 0; });
        if (in == DType::kFloat16 && rank.size() == 1) continue;  // 65,536 is no float16 to begin with
        word.Fill([](size_t) { return 0; });
        ReduceOptions options;
        options.nonfinite = reinterpret_cast<uint32_t*>(word.data());
        RANK_CHECK_OK(rank.group().AllReduce(a.Cut(1), b.Cut(2), options, kNoStream).Wait());
        word.Expect([&](size_t) { return all == 65'536 ? 1 : 0; });
      }
    }
  });
}

TEST_CASE("operations are ordered with the caller's stream") {
  RunOnGpus([](Rank& rank) {
    const CallerStream stream(rank);
    const size_t count = size_t{8} << 20;
    Array a(rank, DType::kFloat32, count, true), ones(rank, DType::kFloat32, count, false);
    ones.Fill([](size_t) { return 1; });
    for (int round = 0; round < 20; ++round) {
      GPU(cudaMemcpyAsync(a.data(), ones.data(), count * 4, cudaMemcpyDeviceToDevice, stream.native()));
      Work work = rank.group().AllReduce(a.Cut(1), a.Cut(1), {}, stream.get());
      RANK_CHECK_OK(work.BlockStream(stream.get()));
      GPU(cudaMemcpyAsync(ones.data(), a.data(), count * 4, cudaMemcpyDeviceToDevice, stream.native()));
      work = rank.group().AllReduce(ones.Cut(1), ones.Cut(1), {.op = ReduceOp::kAvg, .postscale = 1.0 / rank.size()},
                                    stream.get());
      RANK_CHECK_OK(work.BlockStream(stream.get()));
    }
    GPU(cudaStreamSynchronize(stream.native()));
    ones.Expect([](size_t) { return 1; }, 1e-5);
  });
}

TEST_CASE("operations can be captured into a CUDA graph and replayed") {
  RunOnGpus([](Rank& rank) {
    const CallerStream stream(rank);
    Array a(rank, DType::kFloat32, 1000, true), b(rank, DType::kFloat32, 1000, false),
        large(rank, DType::kFloat32, size_t{16} << 20, false);
    // What is captured must have been seen before: NCCL may still have connections to make.
    RANK_CHECK_OK(rank.group().AllReduce(a.Cut(1), a.Cut(1), {}, kNoStream).Wait());
    // In the strictest mode, and with operations running, which threads of the library look at meanwhile.
    for (int i = 0; i < 40; ++i)
      RANK_CHECK_OK(rank.group().AllReduce(large.Cut(1), large.Cut(1), {}, kNoStream).call_status());
    Work first, second;
    const CapturedGraph graph(stream, [&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      first = rank.group().AllReduce(a.Cut(1), a.Cut(1), {.op = ReduceOp::kAvg}, stream.get());
      second = rank.group().AllReduce(b.Cut(2), b.Cut(2), {}, kNoStream);  // the group's stream has joined the capture
      RANK_CHECK_OK(first.BlockStream(stream.get()));
      RANK_CHECK_OK(second.BlockStream(stream.get()));
    });
    RANK_CHECK_STATUS(first.Wait(), absl::StatusCode::kFailedPrecondition, "graph");
    a.Fill([&](size_t) { return rank.rank(); });
    b.Fill([&](size_t) { return 1; });
    const double n = rank.size();
    for (int i = 0; i < 3; ++i) graph.Launch(stream);
    stream.Wait();
    a.Expect([&](size_t) { return (n - 1) / 2; }, 1e-6);
    b.Expect([&](size_t) { return n * n * n; });
    RANK_CHECK_OK(rank.group().AllReduce(a.Cut(1), a.Cut(1), {}, kNoStream).Wait());
    rank.Meet();
  });
}

TEST_CASE("a group that is split off works for itself, also after the other was aborted") {
  RunOnGpus([](Rank& rank) {
    std::unique_ptr<ProcessGroup> part = RANK_VALUE(rank.group().Split(rank.rank() % 2, 0));
    Array a(rank, DType::kInt32, 10, false);
    a.Fill([](size_t) { return 1; });
    RANK_CHECK_OK(part->AllReduce(a.Cut(1), a.Cut(1), {}, kNoStream).Wait());
    const int members = part->size();
    a.Expect([&](size_t) { return members; });
    rank.Meet();  // an operation whose end a rank has not seen fails with the group
    part->Abort(absl::InternalError("no longer needed"));
    RANK_CHECK_STATUS(part->AllReduce(a.Cut(1), a.Cut(1), {}, kNoStream), absl::StatusCode::kAborted,
                      "no longer needed");
    rank.Meet();
    RANK_CHECK_OK(rank.group().AllReduce(a.Cut(1), a.Cut(1), {}, kNoStream).Wait());
  });
}

TEST_CASE("memory outlives its group, and comes back", "[nccl]") {
  Allocation kept;
  RunOnGpus([&](Rank& rank) {
    void* address = nullptr;
    for (int round = 0; round < 5; ++round) {
      Allocation memory = RANK_VALUE(rank.group().Allocate(size_t{32} << 20, rank.context().device()));
      RANK_CHECK(round == 0 || memory.data() == address, "memory that all ranks returned was not used again");
      address = memory.data();
      if (rank.rank() == 0 && round == 4) kept = memory;
    }
    RANK_CHECK_STATUS(rank.group().Allocate(size_t{1} << 50, rank.context().device()),
                      absl::StatusCode::kResourceExhausted, "GPU memory");
    Array a(rank, DType::kInt32, 10, true);
    RANK_CHECK_OK(rank.group().AllReduce(a.Cut(1), a.Cut(1), {}, kNoStream).Wait());
  });
  if (kept.data() == nullptr) return;
  std::vector<char> host(kept.bytes(), 1);
  CHECK(cudaMemcpy(host.data(), kept.data(), host.size(), cudaMemcpyDeviceToHost) == cudaSuccess);
  CHECK(host == std::vector<char>(host.size()));
}

TEST_CASE("mistakes are told, and stick to nothing") {
  RunOnGpus([](Rank& rank) {
    Array a(rank, DType::kFloat32, 10, false);
    Buffer elsewhere = a.Cut(1)[0];
    elsewhere.device.index = static_cast<int16_t>(elsewhere.device.index + 1);
    RANK_CHECK_STATUS(rank.group().AllReduce(elsewhere, elsewhere, {}, kNoStream), absl::StatusCode::kInvalidArgument,
                      "GPU");
    float host[3] = {1, 2, 3};
    const Buffer cpu{host, 3, DType::kFloat32, {}};
    RANK_CHECK_OK(rank.group().AllReduce(cpu, cpu, {}, kNoStream).Wait());
    RANK_CHECK_EQ(host[2], 3.0f * static_cast<float>(rank.size()));
    RANK_CHECK_OK(rank.group().AllReduce(a.Cut(1), a.Cut(1), {}, kNoStream).Wait());
  });
}

TEST_CASE("ranks that disagree are told so") {
  if (RankCount() < 2) return;
  RunOnGpus([](Rank& rank) {
    Array a(rank, DType::kFloat32, 1 << 20, false);
    const Buffer mine{a.data(), rank.rank() == 0 ? size_t{1000} : size_t{1} << 20, DType::kFloat32,
                      rank.context().device()};
    RANK_CHECK_STATUS(rank.group().AllReduce(mine, mine, {}, kNoStream).Wait(), absl::StatusCode::kFailedPrecondition,
                      "rank 0 calls", "1000 elements");
  });
}

TEST_CASE("Abort releases streams and waiters, and tells the device first") {
  if (RankCount() < 2) return;
  RunOnGpus([](Rank& rank) {
    const CallerStream stream(rank);
    // On plain memory: see docs/gpu-verification.md about registered memory.
    Array a(rank, DType::kFloat32, 1000, false), word(rank, DType::kInt32, 1, false);
    if (rank.rank() == 0) {
      Work work = rank.group().AllReduce(a.Cut(1), a.Cut(1), {}, stream.get());  // nobody comes
      RANK_CHECK_OK(work.BlockStream(stream.get()));
      GPU(cudaMemcpyAsync(word.data(), rank.group().failed_word(), 4, cudaMemcpyDefault, stream.native()));
      RANK_CHECK(!work.Done());
      rank.Meet();
      rank.group().Abort(absl::InternalError("enough of it"));
      RANK_CHECK_STATUS(work.Wait(), absl::StatusCode::kAborted, "rank 0", "enough of it");
      GPU(cudaStreamSynchronize(stream.native()));
      word.Expect([](size_t) { return 1; });
    } else {
      rank.Meet();
      while (rank.group().status().ok()) continue;
    }
    RANK_CHECK_STATUS(rank.group().AllReduce(a.Cut(1), a.Cut(1), {}, kNoStream), absl::StatusCode::kAborted,
                      "enough of it");
    GPU(cudaDeviceSynchronize());  // nothing runs any more, nothing has stuck
  });
}

TEST_CASE("two ranks on one GPU, a GPU that is not there, and a library that is none, are refused on all ranks",
          "[nccl]") {
  RunOnRanks([](Rank& rank) {
    ContextOptions options = OnGpus();
    options.device.index = 99;
    // Contexts of their own: these worlds never come to be. One process can only start MPI's world once more.
    if (!RanksAreThreads() || rank.size() > 1) return;
    RANK_CHECK_STATUS(Context::Create(options), absl::StatusCode::kFailedPrecondition, "GPU 99",
                      "CUDA_VISIBLE_DEVICES");
    setenv("DDP_NCCL_LIBRARY", "/nowhere/libnccl.so.2", 1);
    RANK_CHECK_STATUS(Context::Create(OnGpus()), absl::StatusCode::kNotFound, "/nowhere/libnccl.so.2",
                      "DDP_NCCL_LIBRARY");
    setenv("DDP_NCCL_LIBRARY", "libm.so.6", 1);
    RANK_CHECK_STATUS(Context::Create(OnGpus()), absl::StatusCode::kInvalidArgument, "no NCCL library");
    unsetenv("DDP_NCCL_LIBRARY");
    RANK_CHECK_OK(Context::Create(OnGpus()));
  });
  if (RankCount() < 2 || !RanksAreThreads()) return;
  const char* const text = std::getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  const std::string may_share = text == nullptr ? "" : text;
  unsetenv("NCCL_MULTI_RANK_GPU_ENABLE");
  const std::shared_ptr<Store> store = CreateMemoryStore();
  std::vector<absl::Status> statuses(2);
  std::vector<std::thread> threads;
  for (int r = 0; r < 2; ++r) {
    threads.emplace_back([&, r] {
      ContextOptions options = OnGpus();
      options.rank = r;
      options.world_size = 2;
      options.store = store;
      options.device.index = 0;
      statuses[static_cast<size_t>(r)] = Context::Create(options).status();
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (!may_share.empty()) setenv("NCCL_MULTI_RANK_GPU_ENABLE", may_share.c_str(), 1);
  for (const absl::Status& status : statuses) {
    RANK_CHECK_STATUS(status, absl::StatusCode::kFailedPrecondition, "ranks 0 and 1 use the same GPU");
  }
}

TEST_CASE("a world over the program's communicator gives it back") {
  if (GpuBackend() != "nccl" || !RanksAreThreads()) return;
  const std::shared_ptr<Store> store = CreateMemoryStore();
  RunOnGpus([&](Rank& rank) {
    const nccl::Api api = RANK_VALUE(nccl::Load());
    nccl::UniqueId id = {};
    if (rank.rank() == 0) RANK_CHECK(api.GetUniqueId(&id) == nccl::kSuccess);
    const Buffer bytes{id.internal, sizeof id.internal, DType::kUInt8, {}};
    RANK_CHECK_OK(rank.group().Broadcast(bytes, 0).Wait());
    nccl::Config config;
    nccl::Comm comm = nullptr;
    RANK_CHECK(api.CommInitRankConfig(&comm, rank.size(), id, rank.rank(), &config) == nccl::kSuccess);
    const auto sum = [&](size_t i) { return static_cast<double>(rank.size()) * static_cast<double>(i % 100); };
    const CallerStream stream(rank);
    {
      ContextOptions options;
      options.rank = rank.rank();
      options.world_size = rank.size();
      options.store = store;
      options.device = rank.context().device();
      options.nccl_comm = &comm;
      const std::unique_ptr<Context> context = RANK_VALUE(Context::Create(options));
      ProcessGroup& world = context->world();
      RANK_CHECK_EQ(std::string(world.backend()), "nccl");
      Array a(rank, DType::kFloat32, 1'000'000, false);
      a.Fill([](size_t i) { return static_cast<double>(i % 100); });
      RANK_CHECK_OK(world.AllReduce(a.Cut(3), a.Cut(3), {}, kNoStream).Wait());
      a.Expect(sum);
      const Allocation registered = RANK_VALUE(world.Allocate(4'000'000, options.device));
      GPU(cudaMemcpy(registered.data(), a.data(), 4'000'000, cudaMemcpyDeviceToDevice));
      GPU(cudaStreamSynchronize(cudaStreamLegacy));
      const Buffer all = registered.View(DType::kFloat32, 0, 1'000'000);
      RANK_CHECK_OK(world.AllReduce(all, all, {}, kNoStream).Wait());
      GPU(cudaMemcpy(a.data(), registered.data(), 4'000'000, cudaMemcpyDeviceToDevice));
      a.Expect([&](size_t i) { return rank.size() * sum(i); });
      RANK_CHECK_OK(world.Barrier().Wait());
    }
    Array a(rank, DType::kFloat32, 1000, false);
    a.Fill([](size_t i) { return static_cast<double>(i % 100); });
    RANK_CHECK(api.AllReduce(a.data(), a.data(), 1000, nccl::kFloat32, nccl::kSum, comm, stream.native()) ==
               nccl::kSuccess);
    stream.Wait();
    a.Expect(sum);
    RANK_CHECK(api.CommDestroy(comm) == nccl::kSuccess);
  });
}

}  // namespace
}  // namespace ddp::testing
