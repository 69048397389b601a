// SPDX-License-Identifier: Apache-2.0
// What operations on simulated GPUs have to give.
#ifndef TESTS_SUPPORT_GPU_RESULTS_H_
#define TESTS_SUPPORT_GPU_RESULTS_H_

#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

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

// A sum and its Commit.
inline std::shared_ptr<FakeGraph> CaptureSum(Rank& rank, ProcessGroup& group, Buffers a, const Array& skip,
                                             const OwnedStream& stream) {
  const Stream on{rank.device(), stream.get()};
  RANK_CHECK_OK(FakeDevices::BeginCapture(stream.get()));
  RANK_CHECK_OK(group.AllReduce(a, a, {}, on).BlockStream(on));
  Commit(rank, group, skip, stream);
  return RANK_VALUE(FakeDevices::EndCapture(stream.get()));
}

}  // namespace ddp::testing::simulated

#endif  // TESTS_SUPPORT_GPU_RESULTS_H_
