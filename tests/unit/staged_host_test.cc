// SPDX-License-Identifier: Apache-2.0
// DDP_STAGED_REDUCE: all-reduces on GPUs whose sums the host's processors take.
#include <atomic>
#include <memory>
#include <utility>
#include <vector>

#include "tests/support/gpu_results.h"
#include "tests/support/nccl_job.h"
#include "tests/support/variable.h"

namespace ddp::testing::simulated {
namespace {

struct HostJob : StagedJob {
  explicit HostJob(int ranks, const char* reducers = "cpu") : StagedJob(ranks), reduce("DDP_STAGED_REDUCE", reducers) {}
  const Variable reduce;
};

// Whether the host takes part: then nothing can be captured.
bool HostReduces(Rank& rank, ProcessGroup& group) {
  const OwnedStream stream = rank.MakeStream();
  const Array a = Filled(rank, group, DType::kFloat32, 100);
  const DeviceGuard guard(rank.gpus, rank.device());
  RANK_CHECK_OK(FakeDevices::BeginCapture(stream.get()));
  Work work = group.AllReduce(a.whole(), a.whole(), {}, {rank.device(), stream.get()});
  const absl::Status status = work.BlockStream({rank.device(), stream.get()});
  RANK_CHECK_OK(FakeDevices::EndCapture(stream.get()).status());
  if (status.ok()) return false;
  RANK_CHECK_STATUS(status, absl::StatusCode::kInvalidArgument, "CUDA graph", "DDP_STAGED_REDUCE");
  return true;
}

TEST_CASE("sums that the processors take have the bits of those that GPUs take") {
  for (const int ranks : {2, 3, 4}) {
    HostJob job(ranks);
    job.Run(CheckBitsOfAll);
  }
}

TEST_CASE("an array of many chunks, several in a row, and other operations between them") {
  constexpr size_t kCount = 1'200'000;  // in more chunks than there are slots
  HostJob job(2);
  job.Run([](Rank& rank, ProcessGroup& group) {
    const OwnedStream stream = rank.MakeStream();
    const Stream mine{rank.device(), stream.get()};
    const Array a = Filled(rank, group, DType::kInt32, kCount), b(rank, group, DType::kInt32, kCount, false);
    const Array c(rank, group, DType::kInt32, kCount, false), all(rank, group, DType::kInt32, 2 * kCount, false);
    std::vector<Work> works;
    works.push_back(group.AllReduce(a.whole(), b.Cut(3), {}, mine));
    works.push_back(group.AllGather(b.whole(), all.whole(), mine));
    works.push_back(group.AllReduce(b.whole(), c.whole(), {.op = ReduceOp::kAvg}, mine));
    for (Work& work : works) RANK_CHECK_OK(work.Wait());
    const auto sum_of = [](size_t i) { return SumOver(2, i); };
    Expect(b, kCount, "all_reduce", sum_of);
    Expect(all, 2 * kCount, "all_gather", [&](size_t i) { return sum_of(i % kCount); });
    Expect(c, kCount, "average of equal arrays", sum_of);
  });
}

TEST_CASE("an infinity is found where the processors take the sum") {
  HostJob job(2);
  job.Run(CheckInfinityIsFound);
}

TEST_CASE("who reduces is what the variable says, or what is faster for large arrays") {
  const auto find = [](HostJob& job) {
    std::vector<int> found(static_cast<size_t>(job.size));
    job.Run([&](Rank& rank, ProcessGroup& group) {
      found[static_cast<size_t>(rank.rank)] = HostReduces(rank, group) ? 1 : 0;
      const Array a = Filled(rank, group, DType::kFloat32, 500'000);
      RANK_CHECK_OK(group.AllReduce(a.whole(), a.whole(), {}, kNoStream).Wait());
      Expect(a, 500'000, "all_reduce", [&](size_t i) { return SumOver(rank.size, i); });
    });
    for (const int one : found) CHECK(one == found[0]);
    return found[0];
  };
  for (const auto& [reducers, host] : {std::pair("cpu", 1), std::pair("gpu", 0), std::pair("auto", 0)}) {
    HostJob fixed(3, reducers);  // nothing is measured
    CHECK(find(fixed) == host);
  }
  for (const bool host_is_faster : {false, true}) {
    HostJob measured(2, "auto");
    measured.staged_limits = "measure";
    // Each way in turn, the host's second.
    measured.gpus.elapsed_us = [host_is_faster] {
      thread_local int number = 0;
      return number++ % 2 == 0 || !host_is_faster ? 10.0 : 5.0;
    };
    CHECK(find(measured) == (host_is_faster ? 1 : 0));
  }
}

TEST_CASE("a rank that is gone is named where the processors reduce, and the GPUs come free") {
  HostJob job(3);
  CheckGoneRankIsNamed(job, 1);
}

TEST_CASE("a group whose processors reduce ends with what it is in the middle of") {
  HostJob job(2);
  CheckEndsWithItsGroup(job);
}

TEST_CASE("a variable that cannot be read is an error of every rank, and so is missing memory unless auto chooses") {
  HostJob wrong(2, "both");
  wrong.Expect(absl::StatusCode::kInvalidArgument, {"DDP_STAGED_REDUCE", "both"});
  for (const char* const reducers : {"cpu", "auto"}) {
    HostJob job(2, reducers);
    job.staged_limits = "measure";
    std::atomic<int> number{0};
    job.gpus.fail = [&](absl::string_view call, int) {  // after the ring, which the two ranks have in common
      return call == "RegisterHost" && number++ > 0 ? absl::ResourceExhaustedError("cudaHostRegister: no")
                                                    : absl::OkStatus();
    };
    if (absl::string_view(reducers) == "cpu") {
      job.Expect(absl::StatusCode::kResourceExhausted, {"cudaHostRegister: no"});
    } else {
      job.Run([](Rank& rank, ProcessGroup& group) { RANK_CHECK(!HostReduces(rank, group)); });
    }
  }
}

}  // namespace
}  // namespace ddp::testing::simulated
