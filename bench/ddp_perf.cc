// SPDX-License-Identifier: Apache-2.0
// How long collective operations take, beside what the machine allows. See --help.
#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "bench/cpu_perf.h"
#include "bench/gpu_perf.h"
#include "bench/mpi_peer.h"
#include "bench/options.h"
#include "bench/report.h"
#include "ddp/ddp.h"
#include "examples/train/environment.h"

namespace bench {
namespace {

// One line of the table. Collective. Returns the number of wrong elements.
absl::StatusOr<int64_t> RunLine(Bench& bench, Case c, const Options& options, Report* report) {
  Row rows[2];
  const Row* measured[2] = {};
  int64_t wrong = 0;
  for (const bool in_place : {false, true}) {
    const bool can = in_place ? c.info().in_place : c.info().out_of_place;
    const bool wanted =
        in_place ? options.in_place || !c.info().out_of_place : options.out_of_place || !c.info().in_place;
    if (!can || !wanted) continue;
    c.in_place = in_place;
    absl::StatusOr<Row> row = bench.Run(c);
    if (!row.ok()) return row.status();
    wrong += row->wrong;
    rows[in_place] = *std::move(row);
    measured[in_place] = &rows[in_place];
  }
  if (report != nullptr) report->Print(measured[0], measured[1]);
  return wrong;
}

absl::StatusOr<int64_t> RunCollective(Bench& bench, Case c, const Options& options, Report* report) {
  const bool sized = c.collective != Collective::kBarrier;
  int64_t wrong = 0;
  for (const ddp::DType dtype : options.dtypes) {
    for (const ddp::ReduceOp op : options.ops) {
      size_t last = 0;
      std::vector<size_t> counts;
      for (const size_t size : options.sizes) {
        c.dtype = dtype;
        c.op = op;
        c.SetBytes(size);
        if (size != last && c.counts == counts) continue;  // less than an element more
        last = size;
        counts = c.counts;
        absl::StatusOr<int64_t> line = RunLine(bench, c, options, report);
        if (!line.ok()) return line;
        wrong += *line;
        if (!sized) return wrong;
      }
      if (!c.info().reduces) break;
    }
  }
  return wrong;
}

absl::Status RunAll(ddp::Context& context, const Options& options, const std::string& command) {
  ddp::ProcessGroup& group = context.world();
  if (options.root >= group.size()) {
    return absl::InvalidArgumentError(absl::StrCat("-r ", options.root, ": give a rank from 0 to ", group.size() - 1));
  }
  std::unique_ptr<Report> report;  // rank 0's
  if (context.rank() == 0) {
    absl::StatusOr<std::unique_ptr<Report>> made = Report::Create(options, group.size(), group.backend(), command);
    if (!made.ok()) {
      group.Abort(made.status());
      return made.status();
    }
    report = *std::move(made);
  }
  absl::StatusOr<std::unique_ptr<Bench>> bench =
      options.cuda ? MakeGpuBench(context, options) : MakeCpuBench(group, options);
  if (!bench.ok()) return bench.status();
  if (report != nullptr) report->PrintHeader();
  int64_t wrong = 0;
  for (const Collective collective : options.collectives) {
    Case c;
    c.collective = collective;
    c.root = options.root;
    c.device = context.device();
    c.rank = group.rank();
    c.ranks = group.size();
    if (c.ranks == 1 && (collective == Collective::kSendRecv || collective == Collective::kPingPong)) {
      if (report != nullptr) std::printf("# %s needs 2 ranks\n", std::string(c.info().name).c_str());
      continue;
    }
    absl::StatusOr<int64_t> more = RunCollective(**bench, c, options, report.get());
    if (!more.ok()) return more.status();
    wrong += *more;
  }
  if (report != nullptr) {
    report->PrintFooter();
    if (report->writes_json()) {
      const std::string environment = examples::DescribeEnvironment(std::string(context.launcher()), options.cuda);
      if (absl::Status s = report->Finish(environment); !s.ok()) return s;
    }
  }
  return wrong == 0 ? absl::OkStatus() : absl::DataLossError(absl::StrCat(wrong, " elements of the results are wrong"));
}

int Say(const absl::Status& status, int rank, int code) {
  std::fprintf(stderr, "ddp_perf: %s%s\n", rank < 0 ? "" : absl::StrCat("rank ", rank, ": ").c_str(),
               std::string(status.message()).c_str());
  return code;
}

int Main(int argc, char** argv) {
  std::string command;
  for (int i = 0; i < argc; ++i) absl::StrAppend(&command, i > 0 ? " " : "", argv[i]);
  const absl::StatusOr<Options> options = ParseOptions(argc, argv);
  const bool understood = options.ok() && !options->help;
  // The world comes first even so, because one rank alone says what is wrong with the command line.
  ddp::ContextOptions world;
  if (understood && options->cuda) world.device = {ddp::Device::Kind::kCuda, -1};
  if (understood && !options->backend.empty()) world.backend = options->backend;
  absl::StatusOr<std::unique_ptr<ddp::Context>> context = ddp::Context::Create(world);
  if (!context.ok()) return Say(context.status(), -1, 1);
  const int rank = (*context)->rank();
  if (!options.ok()) return rank == 0 ? Say(options.status(), -1, 2) : 2;
  if (options->help) {
    if (rank == 0) std::fputs(kUsage, stdout);
    return 0;
  }
  const absl::Status status = RunAll(**context, *options, command);
  return status.ok() ? 0 : Say(status, rank, 1);
}

// MPI is the peer of CPU ranks, and is to be initialised as a program of one thread does it.
bool ComparesMpi(int argc, char** argv) {
  const absl::StatusOr<Options> options = ParseOptions(argc, argv);
  return options.ok() && options->peer && !options->cuda && HaveMpi();
}

}  // namespace
}  // namespace bench

int main(int argc, char** argv) {
  const bool mpi = bench::ComparesMpi(argc, argv);
  if (mpi) bench::StartMpi();
  const int code = bench::Main(argc, argv);
  if (mpi) bench::StopMpi();
  return code;
}
