// SPDX-License-Identifier: Apache-2.0
// What operations on simulated GPUs have to give.
#ifndef TESTS_SUPPORT_GPU_RESULTS_H_
#define TESTS_SUPPORT_GPU_RESULTS_H_

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "libddp/base/failed_ranks.h"
#include "tests/support/nccl_job.h"

namespace ddp::testing::simulated {

inline constexpr auto kNumber = [](int rank, size_t i) {
  return static_cast<double>((i * 7 + 3 * static_cast<size_t>(rank)) % 100);
};

// Of `count` elements that depend on the rank and the index.
inline Array Filled(Rank& rank, ProcessGroup& group, DType dtype, size_t count) {
  Array array(rank, group, dtype, count, false);
  for (size_t i = 0; i < count; ++i) array.Set(i, kNumber(rank.rank, i));
  return array;
}

// Whether element i is expected(i), for all of them; the first one that is not is told.
template <typename Fn>
void Expect(const Array& array, size_t count, const char* what, const Fn& expected) {
  for (size_t i = 0; i < count; ++i) {
    if (array.Get(i) != expected(i)) {
      RANK_CHECK(false, what, ": element ", i, " is ", array.Get(i), ", not ", expected(i));
      return;
    }
  }
}

inline double SumOver(int ranks, size_t i) {
  double sum = 0;
  for (int r = 0; r < ranks; ++r) sum += kNumber(r, i);
  return sum;
}

// The same all-reduce on GPU memory and on the CPU's, of a group with the same nodes.
inline void CheckBits(Rank& rank, ProcessGroup& group, DType in, DType out, size_t count,
                      const ReduceOptions& options) {
  Array a(rank, group, in, count, false), b(rank, group, out, count, false);
  std::vector<char> host_in(count * SizeOf(in)), host_out(count * SizeOf(out));
  for (size_t i = 0; i < count; ++i) {
    const double value = in == DType::kInt8 ? std::fmod(Awkward(rank.rank, i), 100) : Awkward(rank.rank, i);
    a.Set(i, value);
    SetElement(in, host_in.data(), i, value);
  }
  RANK_CHECK_OK(group.AllReduce(a.Cut(3), b.Cut(5), options, kNoStream).Wait());
  const Buffer from{host_in.data(), count, in, Device{}}, to{host_out.data(), count, out, Device{}};
  RANK_CHECK_OK(group.AllReduce(from, to, options).Wait());
  RANK_CHECK(std::memcmp(b.whole().data, host_out.data(), host_out.size()) == 0, std::string(Name(in)), " to ",
             std::string(Name(out)), ", ", count, " elements");
}

// Of every type and operation.
inline void CheckBitsOfAll(Rank& rank, ProcessGroup& group) {
  const DType all[] = {DType::kFloat64, DType::kFloat32, DType::kFloat16, DType::kBFloat16};
  for (const DType in : all) {
    for (const DType out : all) {
      if ((in == DType::kFloat64) != (out == DType::kFloat64)) continue;
      CheckBits(rank, group, in, out, 20'001, {.op = ReduceOp::kAvg, .prescale = 1.1, .postscale = 0.7});
      CheckBits(rank, group, in, out, 777, {.op = ReduceOp::kMax});
    }
  }
  CheckBits(rank, group, DType::kInt32, DType::kInt32, 20'001, {.op = ReduceOp::kAvg});
  CheckBits(rank, group, DType::kInt8, DType::kInt8, 33, {.op = ReduceOp::kProduct});
}

// An infinity of the last rank's is found on all.
inline void CheckInfinityIsFound(Rank& rank, ProcessGroup& group) {
  for (const DType out : {DType::kFloat32, DType::kFloat16}) {
    for (const bool plant : {false, true}) {
      Array a = Filled(rank, group, DType::kFloat32, 1000), b(rank, group, out, 1000, false);
      if (plant && rank.rank == rank.size - 1) a.Set(500, 1e30 * 1e30);
      Array found(rank, group, DType::kInt32, 1, false);
      found.Set(0, 0);
      ReduceOptions options;
      options.nonfinite = static_cast<uint32_t*>(found.whole().data);
      RANK_CHECK_OK(group.AllReduce(a.whole(), b.whole(), options, kNoStream).Wait());
      RANK_CHECK_EQ(found.Get(0), plant ? 1 : 0);
    }
  }
}

// All that is under way when `victim` leaves ends, and names it.
inline void CheckGoneRankIsNamed(Job& job, int victim) {
  std::atomic<int> through{0};
  job.RunOver([&](Rank& rank, std::unique_ptr<ProcessGroup> control) {
    std::unique_ptr<ProcessGroup> group = RANK_VALUE(CreateStagedGroup(std::move(control), rank.Options()));
    const Array a = Filled(rank, *group, DType::kFloat32, 1 << 18);
    RANK_CHECK_OK(group->AllReduce(a.whole(), a.whole(), {}, kNoStream).Wait());
    // A failure ends whatever a rank has under way: so all have to be through.
    for (++through; through < job.size;) std::this_thread::yield();
    if (rank.rank == victim) return;
    const OwnedStream stream = rank.MakeStream();
    const Stream mine{rank.device(), stream.get()};
    std::vector<Work> works;
    for (int i = 0; i < 3; ++i) works.push_back(group->AllReduce(a.whole(), a.whole(), {}, mine));
    for (Work& work : works) {
      const absl::Status status = work.Wait();
      RANK_CHECK_STATUS(status, absl::StatusCode::kUnavailable, absl::StrCat("rank ", victim));
      RANK_CHECK(FailedRanks(status) == std::vector<int>{victim});
    }
    FakeDevices::Synchronize(stream.get());
  });
}

// An operation of rank 0 that no peer joins ends with its group.
inline void CheckEndsWithItsGroup(Job& job) {
  Work work;
  std::shared_ptr<void> memory;
  job.Run([&](Rank& rank, ProcessGroup& group) {
    if (rank.rank == 1) {
      while (group.status().ok()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      return;
    }
    memory = RANK_VALUE(rank.gpus.Allocate(rank.device(), 40));
    const Buffer b{memory.get(), 10, DType::kFloat32, rank.device()};
    work = group.AllReduce(b, b, {}, kNoStream);
  });
  RANK_CHECK_STATUS(work.Wait(), absl::StatusCode::kAborted, "destroyed");
}

// What follows on the stream finds 1 in `skip` if the group has failed.
inline void Commit(Rank& rank, ProcessGroup& group, const Array& skip, const OwnedStream& stream) {
  const DeviceGuard guard(rank.gpus, rank.device());
  RANK_CHECK_OK(
      rank.gpus.Commit(group.failed_word(), nullptr, static_cast<uint32_t*>(skip.whole().data), nullptr, stream.get()));
}

// A sum, whose Work becomes `*work`, and its Commit.
inline std::shared_ptr<FakeGraph> CaptureSum(Rank& rank, ProcessGroup& group, Buffers a, const Array& skip,
                                             const OwnedStream& stream, Work* work = nullptr) {
  const Stream on{rank.device(), stream.get()};
  RANK_CHECK_OK(FakeDevices::BeginCapture(stream.get()));
  Work sum = group.AllReduce(a, a, {}, on);
  RANK_CHECK_OK(sum.BlockStream(on));
  if (work != nullptr) *work = std::move(sum);
  Commit(rank, group, skip, stream);
  return RANK_VALUE(FakeDevices::EndCapture(stream.get()));
}

}  // namespace ddp::testing::simulated

#endif  // TESTS_SUPPORT_GPU_RESULTS_H_
