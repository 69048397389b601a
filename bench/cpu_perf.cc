// SPDX-License-Identifier: Apache-2.0
#include "bench/cpu_perf.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "bench/measure.h"
#include "bench/meeting.h"
#include "bench/mpi_peer.h"
#include "bench/pattern.h"
#include "bench/percentile.h"
#include "bench/shared_block.h"
#include "bench/shared_bound.h"

namespace bench {
namespace {

// The arrays of one contender, and what keeps them. In place the output is the input.
struct Arrays {
  std::vector<std::shared_ptr<void>> owners;
  char *in = nullptr, *out = nullptr;

  void* In(const Case& c) const { return in + c.InOffset(c.rank) * ddp::SizeOf(c.dtype); }
  void* Out(const Case& c) const { return (c.in_place ? in : out) + c.OutOffset() * ddp::SizeOf(c.dtype); }
};

absl::StatusOr<char*> MakeArray(ddp::ProcessGroup* group, size_t bytes, Arrays& arrays) {
  if (group == nullptr) {
    absl::StatusOr<PrivateMemory> memory = PrivateMemory::Create(bytes);
    if (!memory.ok()) return memory.status();
    arrays.owners.push_back(std::make_shared<PrivateMemory>(*memory));
    return memory->data();
  }
  absl::StatusOr<ddp::Allocation> memory = group->Allocate(bytes, ddp::Device{});
  if (!memory.ok()) return memory.status();
  arrays.owners.push_back(memory->owner());
  return static_cast<char*>(memory->data());
}

// Without a group: memory of this process.
absl::StatusOr<Arrays> MakeArrays(ddp::ProcessGroup* group, size_t bytes, bool two) {
  Arrays arrays;
  for (char** array : {&arrays.in, &arrays.out}) {
    if (array == &arrays.out && !two) break;
    absl::StatusOr<char*> made = MakeArray(group, bytes, arrays);
    if (!made.ok()) return made.status();
    *array = *made;
  }
  return arrays;
}

class CpuBench : public Bench {
 public:
  CpuBench(ddp::ProcessGroup& group, const Options& options) : group_(group), options_(options) {}

  absl::Status Prepare() {
    if (group_.size() > kMaxRanks) {
      return absl::InvalidArgumentError(absl::StrCat("at most ", kMaxRanks, " ranks; start fewer by mpirun -n"));
    }
    if (options_.peer && !HaveMpi()) {
      return absl::InvalidArgumentError("--peer: this build has no MPI (Debian: libopenmpi-dev, then configure again)");
    }
    // Parts are not empty, so that a small array may become larger.
    const auto ranks = static_cast<size_t>(group_.size());
    size_t bytes = *std::max_element(options_.sizes.begin(), options_.sizes.end());
    bytes = (std::max(bytes, 8 * ranks * ranks) + 63) / 64 * 64;
    const auto needs_two = [&](Collective c) {
      return (options_.out_of_place && Info(c).out_of_place) || !Info(c).in_place || c == Collective::kAllToAll;
    };
    const bool two = std::any_of(options_.collectives.begin(), options_.collectives.end(), needs_two);
    const size_t head = (Meeting::Bytes() + 4095) / 4096 * 4096;
    const size_t shared = head + SharedBound::Bytes(group_.size(), bytes, two);
    const size_t arrays = (two ? 2 : 1) * (options_.peer ? 2 : 1) * bytes;
    if (absl::Status room = CheckMemory(group_, shared, arrays); !room.ok()) return room;
    auto block = SharedBlock::Create(group_, shared);
    if (!block.ok()) return block.status();
    block_ = *std::move(block);
    meeting_ = std::make_unique<Meeting>(block_->data(), group_.rank(), group_.size());
    bound_ = std::make_unique<SharedBound>(block_->data() + head, group_.rank(), group_.size(), bytes);
    absl::StatusOr<Arrays> ours = MakeArrays(options_.ordinary ? nullptr : &group_, bytes, two);
    if (!ours.ok()) return ours.status();
    ours_ = *std::move(ours);
    if (!options_.peer) return absl::OkStatus();
    absl::StatusOr<Arrays> peers = MakeArrays(nullptr, bytes, two);
    if (!peers.ok()) return peers.status();
    peers_ = *std::move(peers);
    return absl::OkStatus();
  }

  absl::StatusOr<Row> Run(const Case& c) override {
    Row row;
    row.shape = c;
    const Case bound_case = SharedBound::Like(c);
    const std::vector<Segment> results = bound_case.Results();
    const Pattern pattern(c), bound_pattern(bound_case);
    int64_t bound_wrong = 0, peer_wrong = 0;
    const size_t in_bytes = c.InCount() * ddp::SizeOf(c.dtype);
    std::vector<Side> sides = {
        {&pattern, ours_.In(c), in_bytes, ours_.Out(c), &row.wrong, [this, &c](int times) { return Call(c, times); }},
        {&bound_pattern, bound_->In(bound_case), bound_case.InCount() * sizeof(float), bound_->Out(bound_case),
         &bound_wrong, [&](int) { return bound_->Run(bound_case, results), absl::OkStatus(); }}};
    if (options_.peer && MpiRuns(c)) {
      sides.push_back({&pattern, peers_.In(c), in_bytes, peers_.Out(c), &peer_wrong,
                       [this, &c](int times) { return CallPeer(c, times), absl::OkStatus(); }});
    }
    for (int i = 0; i < options_.checks; ++i) {
      if (absl::Status s = Check(sides, static_cast<uint32_t>(i + 1)); !s.ok()) return s;
    }
    if (absl::Status s = Time(sides, row); !s.ok()) return s;
    if (options_.checks > 0) {
      if (absl::Status s = Check(sides, 0); !s.ok()) return s;
    }
    row.wrong = meeting_->Sum(row.wrong);
    if (meeting_->Sum(bound_wrong) > 0) return absl::InternalError("the benchmark's own bound has a wrong result");
    // Open MPI 4.1 saturates sums of bytes, for one.
    if (meeting_->Sum(peer_wrong) > 0) row.peer_us = kNotMeasured;
    return row;
  }

 private:
  struct Side {
    const Pattern* pattern;
    void* in;
    size_t in_bytes;
    void* out;
    int64_t* wrong;
    std::function<absl::Status(int times)> call;
  };

  int aggregate() const { return std::max(1, options_.aggregate); }

  absl::Status Call(const Case& c, int times) {
    ddp::Work last;
    for (int i = 0; i < times; ++i) {
      last = Start(group_, c, ours_.In(c), ours_.Out(c), {});
      if (absl::Status s = last.call_status(); !s.ok()) return s;
    }
    return last.Wait();
  }

  void CallPeer(const Case& c, int times) {
    for (int i = 0; i < times; ++i) RunMpi(c, peers_.In(c), peers_.Out(c));
  }

  absl::Status Check(const std::vector<Side>& sides, uint32_t salt) {
    for (const Side& side : sides) {
      side.pattern->Fill(side.in, salt);
      meeting_->Barrier();
      if (absl::Status s = side.call(1); !s.ok()) return s;
      *side.wrong += side.pattern->CountWrong(side.out, salt);
      meeting_->Barrier();
    }
    return absl::OkStatus();
  }

  absl::Status Time(const std::vector<Side>& sides, Row& row) {
    std::vector<Contender> contenders;
    for (const Side& side : sides) {
      std::memset(side.in, 0, side.in_bytes);  // zeros stay zeros, however often they are added up
      contenders.push_back({[this, &side] { return side.call(aggregate()); },
                            [&side] { side.pattern->FillEqual(side.in); },
                            [this, &side] {
                              // In place, a second call changes the result.
                              if (options_.checks > 0 && aggregate() == 1)
                                *side.wrong += side.pattern->CountWrongEqual(side.out);
                            }});
    }
    absl::StatusOr<Measured> measured = Measure(*meeting_, contenders, options_);
    if (!measured.ok()) return measured.status();
    row.time_us = measured->us[0] / aggregate();
    row.bound_us = measured->us[1];
    if (sides.size() > 2) row.peer_us = measured->us[2] / aggregate();
    row.link_ns = measured->link_ns;
    return TimeSingleCalls(row);
  }

  // Apart from the rest, as reading the clock takes as long as a small call.
  absl::Status TimeSingleCalls(Row& row) {
    const int calls = static_cast<int>(std::clamp(0.5e6 * options_.budget_s / row.time_us, 5.0, 1000.0));
    const Case& c = row.shape;
    std::vector<double> starts, all;
    meeting_->Barrier();
    for (int i = 0; i < calls; ++i) {
      const int64_t begin = NowNs();
      ddp::Work work = Start(group_, c, ours_.In(c), ours_.Out(c), {});
      starts.push_back(static_cast<double>(NowNs() - begin) * 1e-3);
      if (absl::Status s = work.Wait(); !s.ok()) return s;
      all.push_back(static_cast<double>(NowNs() - begin));
    }
    row.host_us = Median(std::move(starts));
    row.p50_us = static_cast<double>(meeting_->Max(static_cast<int64_t>(Percentile(all, 0.5)))) * 1e-3;
    row.p99_us = static_cast<double>(meeting_->Max(static_cast<int64_t>(Percentile(all, 0.99)))) * 1e-3;
    return absl::OkStatus();
  }

  ddp::ProcessGroup& group_;
  const Options& options_;
  std::unique_ptr<SharedBlock> block_;
  std::unique_ptr<Meeting> meeting_;
  std::unique_ptr<SharedBound> bound_;
  Arrays ours_, peers_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Bench>> MakeCpuBench(ddp::ProcessGroup& group, const Options& options) {
  auto bench = std::make_unique<CpuBench>(group, options);
  if (absl::Status s = bench->Prepare(); !s.ok()) return s;
  return bench;
}

}  // namespace bench
