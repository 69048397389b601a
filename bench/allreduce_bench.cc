// How long an AllReduce takes, beside what the machine allows. See --help.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "bench/measure.h"
#include "bench/meeting.h"
#include "bench/options.h"
#include "bench/pattern.h"
#include "bench/report.h"
#include "bench/shared_block.h"
#include "bench/slice_sum.h"
#include "ddp/ddp.h"

namespace bench {
namespace {

// Memory of the kind asked for, and what keeps it.
struct Place {
  ddp::Allocation allocated;
  PrivateMemory ordinary;
  char* data = nullptr;
};

absl::StatusOr<Place> MakePlace(ddp::ProcessGroup& group, size_t bytes, bool ordinary) {
  Place place;
  if (ordinary) {
    absl::StatusOr<PrivateMemory> memory = PrivateMemory::Create(bytes);
    if (!memory.ok()) return memory.status();
    place.ordinary = *std::move(memory);
    place.data = place.ordinary.data();
  } else {
    absl::StatusOr<ddp::Allocation> memory = group.Allocate(bytes, ddp::Device{});
    if (!memory.ok()) return memory.status();
    place.allocated = *std::move(memory);
    place.data = static_cast<char*>(place.allocated.data());
  }
  return place;
}

class Bench {
 public:
  static absl::StatusOr<std::unique_ptr<Bench>> Create(ddp::ProcessGroup& group, const Options& options) {
    if (group.size() > kMaxRanks) {
      return absl::InvalidArgumentError(absl::StrCat("at most ", kMaxRanks, " ranks; start fewer by mpirun -n"));
    }
    size_t bytes = 0;
    for (const size_t size : options.sizes) bytes = std::max(bytes, (size + 63) / 64 * 64);
    const size_t head = (Meeting::Bytes() + 4095) / 4096 * 4096;
    auto block = SharedBlock::Create(group, head + SliceSum::Bytes(group.size(), bytes));
    if (!block.ok()) return block.status();
    auto input = MakePlace(group, bytes, options.ordinary);
    if (!input.ok()) return input.status();
    Place output;
    if (options.out_of_place) {
      auto made = MakePlace(group, bytes, options.ordinary);
      if (!made.ok()) return made.status();
      output = *std::move(made);
    }
    char* const base = (*block)->data();
    return std::unique_ptr<Bench>(new Bench(group, options, *std::move(block), *std::move(input), std::move(output),
                                            Meeting(base, group.rank(), group.size()),
                                            SliceSum(base + head, group.rank(), group.size(), bytes)));
  }

  // Collective.
  absl::StatusOr<Row> Run(size_t size, ddp::DType dtype, ddp::ReduceOp op, bool in_place) {
    Row row;
    row.count = size / ddp::SizeOf(dtype);
    row.bytes = row.count * ddp::SizeOf(dtype);
    row.dtype = dtype;
    row.op = op;
    row.in_place = in_place;
    in_ = {input_.data, row.count, dtype, {}};
    out_ = {in_place ? input_.data : output_.data, row.count, dtype, {}};
    reduce_.op = op;
    const Pattern pattern(dtype, op, meeting_.ranks());
    const Contender ours{[this] { return Call(); }, [&] { pattern.FillEqual(in_.data, row.count, meeting_.rank()); },
                         [&] { row.wrong += options_.check ? pattern.CountWrongEqual(out_.data, row.count) : 0; }};
    if (absl::Status s = Check(pattern, 1, row); !s.ok()) return s;
    if (absl::Status s = Time(ours, row); !s.ok()) return s;
    if (absl::Status s = Check(pattern, 2, row); !s.ok()) return s;
    row.wrong = meeting_.Sum(row.wrong);
    return row;
  }

 private:
  Bench(ddp::ProcessGroup& group, const Options& options, std::unique_ptr<SharedBlock> block, Place input, Place output,
        Meeting meeting, SliceSum bound)
      : group_(group),
        options_(options),
        block_(std::move(block)),
        input_(std::move(input)),
        output_(std::move(output)),
        meeting_(std::move(meeting)),
        bound_(std::move(bound)) {}

  ddp::Work Start() { return group_.AllReduce(in_, out_, reduce_); }

  // The blocking call.
  absl::Status Call() {
    ddp::Work work = Start();
    return work.Wait();
  }

  absl::Status Check(const Pattern& pattern, uint32_t salt, Row& row) {
    if (!options_.check) return absl::OkStatus();
    pattern.Fill(in_.data, row.count, meeting_.rank(), salt);
    meeting_.Barrier();
    if (absl::Status s = Call(); !s.ok()) return s;
    row.wrong += pattern.CountWrong(out_.data, row.count, salt);
    meeting_.Barrier();
    return absl::OkStatus();
  }

  absl::Status Time(const Contender& ours, Row& row) {
    // Memory does not care what its bytes mean: the bound adds floats.
    const Pattern floats(ddp::DType::kFloat32, ddp::ReduceOp::kSum, meeting_.ranks());
    const size_t count = row.bytes / sizeof(float);
    int64_t bound_wrong = 0;
    const Contender bound{[&] { return bound_.Run(count), absl::OkStatus(); },
                          [&] { floats.FillEqual(bound_.buffer(), count, meeting_.rank()); },
                          [&] { bound_wrong += floats.CountWrongEqual(bound_.buffer(), count); }};
    bound.rewrite();
    if (absl::Status s = bound.call(); !s.ok()) return s;
    bound.verify();
    // Zeros stay zeros, however often they are added up.
    std::memset(bound_.buffer(), 0, row.bytes);
    std::memset(in_.data, 0, row.bytes);

    absl::StatusOr<Measured> measured = Measure(meeting_, ours, bound,
                                                {options_.fresh, options_.iters, options_.warmup_iters,
                                                 options_.budget_s, options_.near_ns, options_.near_wait_s});
    if (!measured.ok()) return measured.status();
    if (meeting_.Sum(bound_wrong) > 0) return absl::InternalError("the benchmark's own slice sum is wrong");
    row.time_us = measured->first_us;
    row.bound_us = measured->second_us;
    row.link_ns = measured->link_ns;
    return TimeEnqueue(row);
  }

  // The call without the waiting, on this rank. Apart from the rest, as reading the clock takes as long as a small
  // call.
  absl::Status TimeEnqueue(Row& row) {
    const int calls = static_cast<int>(std::max(5.0, std::min(200.0, 50e3 / row.time_us)));
    std::vector<double> times;
    for (int i = 0; i < calls; ++i) {
      const int64_t begin = NowNs();
      ddp::Work work = Start();
      times.push_back(static_cast<double>(NowNs() - begin) * 1e-3);
      if (absl::Status s = work.Wait(); !s.ok()) return s;
    }
    row.enqueue_us = Median(std::move(times));
    return absl::OkStatus();
  }

  ddp::ProcessGroup& group_;
  const Options& options_;
  const std::unique_ptr<SharedBlock> block_;
  const Place input_, output_;
  Meeting meeting_;
  SliceSum bound_;
  ddp::ReduceOptions reduce_;
  ddp::Buffer in_, out_;
};

absl::Status RunAll(ddp::Context& context, const Options& options, const std::string& command) {
  ddp::ProcessGroup& group = context.world();
  std::unique_ptr<Report> report;  // rank 0's
  if (context.rank() == 0) {
    absl::StatusOr<std::unique_ptr<Report>> made = Report::Create(options, group.size(), group.backend(), command);
    if (!made.ok()) {
      group.Abort(made.status());
      return made.status();
    }
    report = *std::move(made);
  }
  absl::StatusOr<std::unique_ptr<Bench>> bench = Bench::Create(group, options);
  if (!bench.ok()) return bench.status();
  if (report != nullptr) report->PrintHeader();
  int64_t wrong = 0;
  for (const ddp::DType dtype : options.dtypes) {
    for (const ddp::ReduceOp op : options.ops) {
      for (const size_t size : options.sizes) {
        absl::StatusOr<Row> out_of_place = Row{};
        if (options.out_of_place) out_of_place = (*bench)->Run(size, dtype, op, false);
        if (!out_of_place.ok()) return out_of_place.status();
        absl::StatusOr<Row> in_place = (*bench)->Run(size, dtype, op, true);
        if (!in_place.ok()) return in_place.status();
        if (report != nullptr) report->Print(options.out_of_place ? &*out_of_place : nullptr, *in_place);
        wrong += out_of_place->wrong + in_place->wrong;
      }
    }
  }
  if (report != nullptr) {
    report->PrintFooter();
    return report->Finish();
  }
  return wrong == 0 ? absl::OkStatus() : absl::DataLossError("wrong results");
}

int Main(int argc, char** argv) {
  std::string command;
  for (int i = 0; i < argc; ++i) absl::StrAppend(&command, i > 0 ? " " : "", argv[i]);
  // The world comes first, so that one rank alone says what is wrong with the command line.
  absl::StatusOr<std::unique_ptr<ddp::Context>> context = ddp::Context::Create();
  if (!context.ok()) {
    std::fprintf(stderr, "allreduce_bench: %s\n", std::string(context.status().message()).c_str());
    return 1;
  }
  const absl::StatusOr<Options> options = ParseOptions(argc, argv);
  const bool speaker = (*context)->rank() == 0;
  if (!options.ok()) {
    if (speaker) std::fprintf(stderr, "allreduce_bench: %s\n", std::string(options.status().message()).c_str());
    return 2;
  }
  if (options->help) {
    if (speaker) std::fputs(kUsage, stdout);
    return 0;
  }
  if (absl::Status status = RunAll(**context, *options, command); !status.ok()) {
    std::fprintf(stderr, "allreduce_bench: rank %d: %s\n", (*context)->rank(), std::string(status.message()).c_str());
    return 1;
  }
  return 0;
}

}  // namespace
}  // namespace bench

int main(int argc, char** argv) { return bench::Main(argc, argv); }
