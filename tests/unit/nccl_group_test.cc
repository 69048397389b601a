// SPDX-License-Identifier: Apache-2.0
// The nccl backend over an NCCL and GPUs that are none: everything but NCCL's and the GPU's own part.
#include <atomic>
#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "ddp/comm_hook.h"
#include "tests/support/nccl_job.h"

namespace ddp::testing::simulated {
namespace {

using Mishap = FakeNccl::Mishap;
constexpr absl::StatusCode kAborted = absl::StatusCode::kAborted;

// --- results --------------------------------------------------------------------------------------------------------

std::vector<double> Contributions(DType dtype, ReduceOp op, int size, size_t i) {
  std::vector<double> values;
  for (int r = 0; r < size; ++r) values.push_back(WholeNumber(dtype, op, r, i));
  return values;
}

void CheckAllReduce(Rank& rank, ProcessGroup& group, DType in, DType out, const ReduceOptions& options, size_t count,
                    bool allocated, size_t pieces) {
  Array a(rank, group, in, count, allocated), b(rank, group, out, count, allocated);
  for (size_t i = 0; i < count; ++i) a.Set(i, WholeNumber(in, options.op, rank.rank, i));
  const bool in_place = in == out;
  RANK_CHECK_OK(
      (group.AllReduce(a.Cut(pieces), in_place ? a.Cut(pieces) : b.Cut(pieces + 1), options, kNoStream)).Wait());
  const Array& result = in_place ? a : b;
  for (size_t i = 0; i < count; ++i) {
    const double expected =
        Reduce(out, options.op, Contributions(in, options.op, rank.size, i), options.prescale, options.postscale);
    RANK_CHECK(std::fabs(result.Get(i) - expected) <= 1e-2 * std::fabs(expected), std::string(Name(in)), " ",
               std::string(Name(options.op)), " element ", i, " is ", result.Get(i), " not ", expected);
  }
}

TEST_CASE("all-reduce adds, scales and converts on any memory") {
  for (int size : {1, 2, 3}) {
    Job job(size);
    job.Run([](Rank& rank, ProcessGroup& group) {
      for (bool allocated : {false, true}) {
        for (DType dtype : kAllDTypes) {
          for (ReduceOp op : kAllOps) {
            for (size_t count : {size_t{0}, size_t{1}, size_t{1001}}) {
              CheckAllReduce(rank, group, dtype, dtype, {.op = op}, count, allocated, count > 1 ? 3 : 1);
            }
            if (!IsFloatingPoint(dtype)) continue;
            CheckAllReduce(rank, group, dtype, dtype, {.op = op, .prescale = 2, .postscale = 0.5}, 100, allocated, 1);
            CheckAllReduce(rank, group, dtype, dtype, {.op = op, .postscale = 4}, 100, allocated, 2);
          }
        }
        for (DType in : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
          for (DType out : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
            CheckAllReduce(rank, group, in, out, {.op = ReduceOp::kAvg, .prescale = 2}, 333, allocated, 2);
          }
        }
      }
    });
    CHECK(job.nccl.live_comms() == 0);
    CHECK(job.nccl.live_windows() == 0);
    CHECK(job.nccl.live_memory() == 0);
  }
}

TEST_CASE("a result that is not finite is told, and only then") {
  Job job(2);
  job.Run([](Rank& rank, ProcessGroup& group) {
    for (DType dtype : {DType::kFloat64, DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
      for (double bad : {1.0, HUGE_VAL}) {
        Array a(rank, group, dtype, 50, true), word(rank, group, DType::kInt32, 1, false);
        for (size_t i = 0; i < 50; ++i) a.Set(i, rank.rank == 1 && i == 49 ? bad : 1);
        ReduceOptions options{.op = ReduceOp::kAvg};
        options.nonfinite = static_cast<uint32_t*>(word.whole().data);
        const Buffer whole = a.whole();
        RANK_CHECK_OK(group.AllReduce(whole, whole, options, kNoStream).Wait());
        RANK_CHECK_EQ(word.Get(0), bad == 1 ? 0 : 1);
        RANK_CHECK_EQ(a.Get(0), 1);
      }
    }
  });
}

TEST_CASE("a sum that overflows as it is stored is told") {
  Job job(2);
  job.Run([](Rank& rank, ProcessGroup& group) {
    for (DType in : {DType::kFloat16, DType::kFloat32}) {
      for (double mine : {40'000.0, 30'000.0}) {
        Array a(rank, group, in, 50, true), b(rank, group, DType::kFloat16, 50, true),
            word(rank, group, DType::kInt32, 1, false);
        for (size_t i = 0; i < 50; ++i) a.Set(i, i == 49 ? mine : 1);
        ReduceOptions options;
        options.nonfinite = static_cast<uint32_t*>(word.whole().data);
        const Buffer from = a.whole(), to = b.whole();
        RANK_CHECK_OK(group.AllReduce(from, to, options, kNoStream).Wait());
        RANK_CHECK_EQ(std::isinf(b.Get(49)), mine == 40'000);
        RANK_CHECK_EQ(word.Get(0), mine == 40'000 ? 1 : 0);
      }
    }
  });
}

TEST_CASE("data moves where it belongs, from and to any ranges") {
  Job job(3);
  job.Run([](Rank& rank, ProcessGroup& group) {
    const size_t n = 3, r = static_cast<size_t>(rank.rank), part = 40;
    for (size_t pieces : {size_t{1}, size_t{3}}) {
      const DType type = DType::kInt32;
      Array small(rank, group, type, part, false), large(rank, group, type, part * n, false),
          other(rank, group, type, part * n, false);
      for (size_t i = 0; i < part; ++i) small.Set(i, static_cast<double>(1000 * r + i));
      RANK_CHECK_OK(group.AllGather(small.Cut(pieces), large.Cut(pieces), kNoStream).Wait());
      for (size_t i = 0; i < part * n; ++i)
        RANK_CHECK_EQ(large.Get(i), static_cast<double>(1000 * (i / part) + i % part));

      RANK_CHECK_OK(group.ReduceScatter(large.Cut(pieces), small.Cut(pieces), {}, kNoStream).Wait());
      for (size_t i = 0; i < part; ++i) RANK_CHECK_EQ(small.Get(i), static_cast<double>(3 * (1000 * r + i)));

      for (size_t i = 0; i < part * n; ++i) large.Set(i, static_cast<double>(1000 * r + i));
      RANK_CHECK_OK(group.AllToAll(large.Cut(pieces), other.Cut(pieces + 1), kNoStream).Wait());
      RANK_CHECK_OK(group.AllToAll(large.Cut(pieces), large.Cut(pieces), kNoStream).Wait());  // in place
      for (size_t i = 0; i < part * n; ++i) {
        const double expected = static_cast<double>(1000 * (i / part) + part * r + i % part);
        RANK_CHECK_EQ(other.Get(i), expected);
        RANK_CHECK_EQ(large.Get(i), expected);
      }

      RANK_CHECK_OK(group.Broadcast(large.Cut(pieces), 2, kNoStream).Wait());
      for (size_t i = 0; i < part * n; ++i) {
        RANK_CHECK_EQ(large.Get(i), static_cast<double>(1000 * (i / part) + part * 2 + i % part));
      }

      const std::vector<size_t> counts = {7, 0, 20};
      Array uneven(rank, group, type, counts[r], false), all(rank, group, type, 27, false);
      for (size_t i = 0; i < counts[r]; ++i) uneven.Set(i, static_cast<double>(100 * r + i));
      RANK_CHECK_OK(group.AllGather(uneven.Cut(1), all.Cut(pieces), counts, kNoStream).Wait());
      for (size_t i = 0; i < 27; ++i) RANK_CHECK_EQ(all.Get(i), static_cast<double>(i < 7 ? i : 200 + i - 7));
      // Equal counts, where ranks cut their parts differently.
      Array mine(rank, group, type, 9, false);
      for (size_t i = 0; i < 9; ++i) mine.Set(i, static_cast<double>(10 * r + i));
      RANK_CHECK_OK(
          group.AllGather(mine.Cut(r == 1 ? 2 : 1), all.Cut(pieces), std::vector<size_t>{9, 9, 9}, kNoStream).Wait());
      for (size_t i = 0; i < 27; ++i) RANK_CHECK_EQ(all.Get(i), static_cast<double>(10 * (i / 9) + i % 9));
    }
    // A conversion needs room that the result of a reduce-scatter does not have.
    Array half(rank, group, DType::kFloat16, part * n, false), wide(rank, group, DType::kFloat32, part, false);
    for (size_t i = 0; i < part * n; ++i) half.Set(i, static_cast<double>(i));
    RANK_CHECK_OK(
        group.ReduceScatter(half.Cut(1), wide.Cut(1), {.op = ReduceOp::kSum, .postscale = 2}, kNoStream).Wait());
    for (size_t i = 0; i < part; ++i) RANK_CHECK_EQ(wide.Get(i), static_cast<double>(6 * (part * r + i)));
    RANK_CHECK_OK(group.Barrier().Wait());
  });
}

TEST_CASE("CPU memory is served by the CPU's group, and other GPUs' memory is refused") {
  Job job(2);
  job.Run([](Rank& rank, ProcessGroup& group) {
    float mine[4] = {1, 2, 3, 4};
    const Buffer cpu{mine, 4, DType::kFloat32, {}};
    const int calls = rank.nccl.Calls("AllReduce");
    RANK_CHECK_OK(group.AllReduce(cpu, cpu, {}, kNoStream).Wait());
    RANK_CHECK_EQ(mine[3], 8);
    RANK_CHECK_EQ(rank.nccl.Calls("AllReduce"), calls);
    RANK_CHECK_OK(group.Broadcast(cpu, 1, kNoStream).Wait());
    RANK_CHECK_OK(group.Allocate(100, Device{}));

    Array a(rank, group, DType::kFloat32, 4, true);
    Buffer there = a.whole();
    const Buffer here = there;
    there.device.index = 7;
    RANK_CHECK_STATUS(group.AllReduce(there, there, {}, kNoStream), absl::StatusCode::kInvalidArgument, "GPU 7's",
                      absl::StrCat("GPU ", rank.rank, "'s"), absl::StrCat("rank ", rank.rank));
    RANK_CHECK_STATUS(group.AllReduce(cpu, here, {}, kNoStream), absl::StatusCode::kInvalidArgument, "CPU memory");
    RANK_CHECK_STATUS(group.Allocate(8, there.device), absl::StatusCode::kInvalidArgument, "GPU 7's");
    RANK_CHECK_STATUS(group.AllReduce(here, here), absl::StatusCode::kInvalidArgument, "no stream", "kNoStream");
    RANK_CHECK_STATUS(group.Broadcast(here, 0), absl::StatusCode::kInvalidArgument, "no stream", "kNoStream");
    RANK_CHECK_STATUS(group.AllReduce(here, here, {}, {there.device, nullptr}), absl::StatusCode::kInvalidArgument,
                      "the stream is of GPU 7");
    RANK_CHECK_OK(group.AllReduce(here, here, {}, kNoStream).Wait());  // nothing has stuck
  });
}

TEST_CASE("messages arrive in the order of the calls") {
  Job job(3);
  job.timeout = TimeFor(absl::Seconds(4));
  job.Run([](Rank& rank, ProcessGroup& group) {
    Array a(rank, group, DType::kInt32, 10, false), b(rank, group, DType::kInt32, 20, false);
    for (size_t i = 0; i < 10; ++i) a.Set(i, static_cast<double>(i));
    if (rank.rank == 0) {
      Work first = group.Send(a.Cut(1), 1, 5, kNoStream), second = group.Send(a.Cut(2), 1, 6, kNoStream);
      RANK_CHECK_OK(first.Wait());
      RANK_CHECK_OK(second.Wait());
      RANK_CHECK_STATUS(group.Send(a.Cut(1), 0, 5, kNoStream), absl::StatusCode::kInvalidArgument);
      RANK_CHECK_STATUS(group.Send(a.Cut(1), 1, -1, kNoStream), absl::StatusCode::kInvalidArgument);
    } else if (rank.rank == 1) {
      const std::vector<Buffer> halves = b.Cut(2);
      RANK_CHECK_OK(group.Recv(halves[0], 0, 5, kNoStream).Wait());
      const Buffer front{halves[1].data, 5, DType::kInt32, rank.device()};
      const Buffer back{static_cast<char*>(halves[1].data) + 20, 5, DType::kInt32, rank.device()};
      const Buffer cut[] = {front, back};
      RANK_CHECK_OK(group.Recv(cut, 0, 6, kNoStream).Wait());
      for (size_t i = 0; i < 20; ++i) RANK_CHECK_EQ(b.Get(i), static_cast<double>(i % 10));
    }
    // Who took no part in the messages is where the others are.
    RANK_CHECK_OK(group.AllReduce(a.Cut(1), a.Cut(1), {}, kNoStream).Wait());
    if (rank.rank == 2) {
      RANK_CHECK_STATUS(group.Recv(a.Cut(1), 0, 9, kNoStream).Wait(), absl::StatusCode::kDeadlineExceeded, "rank 2",
                        "recv", "rank 0", "tag 9");
    } else {
      while (group.status().ok()) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  });
}

TEST_CASE("registered memory is sent and received as any other", "[nccl]") {
  Job job(2);
  job.timeout = absl::Seconds(20);
  job.Run([](Rank& rank, ProcessGroup& group) {
    const size_t me = static_cast<size_t>(rank.rank), part = 50;
    for (const bool in_registered : {false, true}) {
      for (const bool out_registered : {false, true}) {
        Array in(rank, group, DType::kInt32, 2 * part, in_registered),
            out(rank, group, DType::kInt32, 2 * part, out_registered);
        const auto fill = [&] {
          for (size_t i = 0; i < 2 * part; ++i) in.Set(i, static_cast<double>(1000 * me + i));
        };
        const auto expected = [&](size_t i) { return static_cast<double>(1000 * (i / part) + part * me + i % part); };
        fill();
        RANK_CHECK_OK(group.AllToAll(in.Cut(2), out.Cut(3), kNoStream).Wait());
        RANK_CHECK_OK(group.AllToAll(in.Cut(1), in.Cut(1), kNoStream).Wait());  // in place
        for (size_t i = 0; i < 2 * part; ++i) RANK_CHECK_EQ(out.Get(i), expected(i));
        for (size_t i = 0; i < 2 * part; ++i) RANK_CHECK_EQ(in.Get(i), expected(i));
        fill();
        // From the one kind to the other.
        RANK_CHECK_OK(
            (me == 0 ? group.Send(in.Cut(2), 1, 0, kNoStream) : group.Recv(out.Cut(2), 0, 0, kNoStream)).Wait());
        for (size_t i = 0; i < 2 * part && me == 1; ++i) RANK_CHECK_EQ(out.Get(i), static_cast<double>(i));
      }
    }
    // Peers have to receive straight into registered memory what is sent straight from it.
    Array in(rank, group, DType::kInt32, 2 * part, true), out(rank, group, DType::kInt32, 2 * part, true),
        plain(rank, group, DType::kInt32, 2 * part, false);
    RANK_CHECK_STATUS((group.AllToAll(in.Cut(1), rank.rank == 0 ? out.Cut(1) : plain.Cut(1), kNoStream)).Wait(),
                      absl::StatusCode::kFailedPrecondition, "all_to_all", "memory");
  });
}

TEST_CASE("an all-to-all of which a part alone is in place keeps what it still has to send", "[nccl]") {
  Job job(3);
  job.Run([](Rank& rank, ProcessGroup& group) {
    const size_t me = static_cast<size_t>(rank.rank);
    for (const bool registered : {false, true}) {
      for (const size_t part : {size_t{7}, size_t{70'001}}) {
        const size_t count = 3 * part;
        const auto expected = [&](size_t i) {
          return static_cast<double>(1000 * (i / part) + (me * part + i % part) % 997);
        };
        Array a(rank, group, DType::kInt32, count, registered), c(rank, group, DType::kInt32, count, registered);
        const auto fill = [&] {
          for (size_t i = 0; i < count; ++i) a.Set(i, static_cast<double>(1000 * me + i % 997));
        };
        const Buffer all = a.Cut(1)[0];
        fill();
        RANK_CHECK_OK(group.AllToAll({{nullptr, 0, all.dtype, all.device}, all}, a.Cut(1), kNoStream).Wait());
        for (size_t i = 0; i < count; ++i) RANK_CHECK_EQ(a.Get(i), expected(i));
        fill();
        const std::vector<Buffer> in = a.Cut(2), out = {c.Cut(2)[0], in[1]};
        RANK_CHECK_OK(group.AllToAll(in, out, kNoStream).Wait());
        for (size_t i = 0; i < count; ++i) RANK_CHECK_EQ((i < in[0].count ? c : a).Get(i), expected(i));
      }
    }
  });
}

TEST_CASE("several sums on registered memory are right with an NCCL that forgets some of a group", "[nccl]") {
  Job job(2, 22803);
  job.Run([](Rank& rank, ProcessGroup& group) {
    for (const bool allocated : {true, false}) {
      CheckAllReduce(rank, group, DType::kFloat32, DType::kFloat32, {.op = ReduceOp::kSum}, 1000, allocated, 5);
      CheckAllReduce(rank, group, DType::kFloat32, DType::kFloat32, {.op = ReduceOp::kAvg}, 1000, allocated, 5);
    }
  });
}

// --- streams --------------------------------------------------------------------------------------------------------

TEST_CASE("ranges and parts of registered memory that begin between two words are right", "[nccl]") {
  Job job(2);
  job.Run([](Rank& rank, ProcessGroup& group) {
    const size_t r = static_cast<size_t>(rank.rank), n = 2, count = 7;
    Array a(rank, group, DType::kBFloat16, 60, true);
    const auto range = [&](size_t first, size_t size) {
      const Buffer whole = a.whole();
      return Buffer{static_cast<char*>(whole.data) + first * SizeOf(whole.dtype), size, whole.dtype, whole.device};
    };
    const auto value = [](size_t of_rank, size_t i) { return static_cast<double>(i % 5 + 10 * of_rank); };
    const auto fill = [&] {
      for (size_t i = 0; i < 60; ++i) a.Set(i, value(r, i));
    };
    for (const size_t first : {0, 1, 2, 3}) {
      const Buffer sum = range(first, count), all = range(first, n * count), mine = range(first + r * count, count);
      const auto check = [&](size_t size, const std::function<double(size_t i)>& expected) {
        for (size_t i = 0; i < 60; ++i) {
          RANK_CHECK_EQ(a.Get(i), i < first || i >= first + size ? value(r, i) : expected(i));
        }
      };
      const auto added = [&](size_t i) { return value(0, i) + value(1, i); };
      fill();
      RANK_CHECK_OK(group.AllReduce(sum, sum, {}, kNoStream).Wait());
      check(count, added);
      fill();
      RANK_CHECK_OK(group.ReduceScatter(all, mine, {}, kNoStream).Wait());
      check(n * count, [&](size_t i) { return (i - first) / count == r ? added(i) : value(r, i); });
      fill();
      RANK_CHECK_OK(group.AllGather(mine, all, kNoStream).Wait());
      check(n * count, [&](size_t i) { return value((i - first) / count, i); });
    }
  });
}

TEST_CASE("an operation begins after the caller's stream, and the caller's stream goes on after it") {
  Job job(2);
  job.Run([](Rank& rank, ProcessGroup& group) {
    const OwnedStream stream = rank.MakeStream();
    const Stream mine{rank.device(), stream.get()};
    Array a(rank, group, DType::kInt32, 1, true);
    std::atomic<bool> go{false};
    double seen = 0;
    FakeDevices::Enqueue(stream.get(), [&] {
      while (!go) std::this_thread::yield();
      a.Set(0, 5);
    });
    Work work = group.AllReduce(a.Cut(1), a.Cut(1), {}, mine);
    RANK_CHECK(!work.Done());
    RANK_CHECK_STATUS(work.Wait(absl::Now() + absl::Milliseconds(5)), absl::StatusCode::kDeadlineExceeded, "goes on");
    RANK_CHECK_OK(work.BlockStream(mine));
    FakeDevices::Enqueue(stream.get(), [&] { seen = a.Get(0); });
    go = true;
    FakeDevices::Synchronize(stream.get());
    RANK_CHECK_EQ(seen, 10);
    RANK_CHECK_OK(work.Wait());
    RANK_CHECK(work.Done());
  });
}

TEST_CASE("BlockStream blocks the stream that it is given, while another GPU is the current one") {
  Job job(2);
  const ScopedDevices devices(job.gpus);
  job.Run([](Rank& rank, ProcessGroup& group) {
    const OwnedStream owned = rank.MakeStream(), before = rank.MakeStream();
    const Device other{Device::Kind::kCuda, static_cast<int16_t>(1 - rank.rank)};
    // A null stream is the current GPU's, so that a wait on the wrong one would go unnoticed.
    for (void* const native : {owned.get(), static_cast<void*>(nullptr)}) {
      for (const bool own_work : {false, true}) {
        const Stream mine{rank.device(), native};
        Array a(rank, group, DType::kInt32, 1, true);
        double seen = 0;
        FakeDevices::Enqueue(before.get(), [&] { a.Set(0, 5); });
        const Stream earlier{rank.device(), before.get()};
        Work work = own_work ? StreamWork(group, earlier) : group.AllReduce(a.Cut(1), a.Cut(1), {}, earlier);
        {
          const DeviceGuard guard(rank.gpus, other);
          RANK_CHECK_OK(work.BlockStream(mine));
          RANK_CHECK_EQ(FakeDevices::ThreadDevice(), other.index);
        }
        const DeviceGuard guard(rank.gpus, rank.device());
        FakeDevices::Enqueue(native, [&] { seen = a.Get(0); });
        FakeDevices::Synchronize(native);
        RANK_CHECK_EQ(seen, own_work ? 5 : 10);
        RANK_CHECK_OK(work.Wait());
      }
    }
  });
}

TEST_CASE("operations that queue for longer than the time-out end well") {
  Job job(2);
  job.timeout = TimeFor(absl::Milliseconds(2400));
  job.Run([&](Rank& rank, ProcessGroup& group) {
    const OwnedStream stream = rank.MakeStream();
    const Stream mine{rank.device(), stream.get()};
    Array a(rank, group, DType::kInt32, 1, true);
    std::vector<Work> works;
    // Each is the oldest for a third of the time-out.
    for (int i = 0; i < 5; ++i) {
      FakeDevices::Enqueue(stream.get(),
                           [&] { std::this_thread::sleep_for(absl::ToChronoMilliseconds(job.timeout / 3)); });
      works.push_back(group.AllReduce(a.Cut(1), a.Cut(1), {}, mine));
      RANK_CHECK_OK(works.back().call_status());
    }
    for (Work& work : works) RANK_CHECK_OK(work.Wait());
  });
}

TEST_CASE("whoever is far ahead of the GPU waits where a failure finds it") {
  Job job(2);
  std::atomic<int> calls{0};
  std::atomic<bool> met{false};  // rank 1 has seen the end of the barrier
  job.Run([&](Rank& rank, ProcessGroup& group) {
    Array a(rank, group, DType::kInt32, 1, true);
    for (int i = 0; i < 1000; ++i) RANK_CHECK_OK(group.AllReduce(a.Cut(1), a.Cut(1), {}, kNoStream).call_status());
    RANK_CHECK_OK(group.Barrier().Wait());
    if (rank.rank == 0) {  // nobody comes to these
      std::thread other([&] {
        while (calls < 60 || !met) std::this_thread::yield();
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        group.Abort(absl::InternalError("enough"));
      });
      absl::Status status;
      for (; status.ok(); ++calls) status = group.AllReduce(a.Cut(1), a.Cut(1), {}, kNoStream).call_status();
      RANK_CHECK_STATUS(status, kAborted, "enough");
      RANK_CHECK(calls < 100, calls.load(), " operations were enqueued");
      other.join();
    } else {
      met = true;
      while (group.status().ok()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  });
}

TEST_CASE("whoever waits for the GPU lets the program's own communication go on") {
  Job job(2);
  std::atomic<bool> begun{false}, went_on{false};
  job.RunOver([&](Rank& rank, std::unique_ptr<ProcessGroup> control) {
    ProgressThread progress([&] { went_on = begun.load(); });
    NcclGroupOptions options = rank.Options();
    if (rank.rank == 0) options.progress = &progress;
    const std::unique_ptr<ProcessGroup> group = RANK_VALUE(CreateGpuGroup(std::move(control), options));
    Array a(rank, *group, DType::kInt32, 1, true);
    while (rank.rank == 1 && !went_on) std::this_thread::yield();  // until the other one waits
    Work work = group->AllReduce(a.Cut(1), a.Cut(1), {}, kNoStream);
    begun = true;
    RANK_CHECK_OK(work.Wait());
  });
}

TEST_CASE("what is captured into a graph supports BlockStream alone, and runs with every launch") {
  for (int size : {1, 2, 3}) {
    Job job(size);
    job.Run([](Rank& rank, ProcessGroup& group) {
      const OwnedStream stream = rank.MakeStream();
      const Stream mine{rank.device(), stream.get()};
      Array a(rank, group, DType::kInt32, 1, true), b(rank, group, DType::kInt32, 1, false);
      RANK_CHECK_OK(FakeDevices::BeginCapture(stream.get()));
      Work first = group.AllReduce(a.Cut(1), a.Cut(1), {}, mine);
      Work second = group.AllReduce(a.Cut(1), b.Cut(1), {}, mine);
      RANK_CHECK_OK(second.BlockStream(mine));
      RANK_CHECK_STATUS(first.Wait(), absl::StatusCode::kFailedPrecondition, "captured", "graph");
      const std::shared_ptr<FakeGraph> graph = RANK_VALUE(FakeDevices::EndCapture(stream.get()));
      RANK_CHECK_EQ(b.Get(0), 0);
      a.Set(0, 1);
      int expected = 1;
      for (int launch = 0; launch < 3; ++launch, expected *= rank.size) FakeDevices::Launch(graph, stream.get());
      FakeDevices::Synchronize(stream.get());
      RANK_CHECK_EQ(a.Get(0), expected);
      RANK_CHECK_EQ(b.Get(0), expected * rank.size);
      RANK_CHECK_OK(group.AllReduce(a.Cut(1), a.Cut(1), {}, mine).Wait());
      RANK_CHECK_EQ(a.Get(0), expected * rank.size);
    });
  }
}

TEST_CASE("a Work outlives its group") {
  Job job(2);
  std::vector<Work> works(4);
  job.Run([&](Rank& rank, ProcessGroup& group) {
    Array a(rank, group, DType::kInt32, 1, true);
    const size_t r = static_cast<size_t>(rank.rank);
    works[r] = group.AllReduce(a.Cut(1), a.Cut(1), {}, kNoStream);
    works[r + 2] = group.AllReduce(a.Cut(1), a.Cut(1), {}, kNoStream);
    RANK_CHECK_OK(works[r].Wait());
    RANK_CHECK_OK(works[r + 2].Wait());
  });
  for (Work& work : works) {
    CHECK(work.Done());
    CHECK(work.Wait().ok());
  }
}

}  // namespace
}  // namespace ddp::testing::simulated
