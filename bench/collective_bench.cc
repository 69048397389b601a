// How long libddp's collective operations and messages take beside those of the MPI that starts the ranks. See --help.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "bench/collective.h"
#include "bench/measure.h"
#include "bench/meeting.h"
#include "bench/mpi_peer.h"
#include "bench/options.h"
#include "bench/shared_block.h"
#include "ddp/ddp.h"

namespace bench {
namespace {

constexpr char kHelp[] = R"(Times collective operations and messages beside those of MPI.

  mpirun -n 2 collective_bench [--collectives=LIST] [flags of allreduce_bench]

LIST is of all_gather, reduce_scatter, broadcast, all_to_all, sendrecv (to the next rank and from the one before at once)
and pingpong (there and back between pairs of ranks); all of them if left out. Sizes are those of the larger of a
rank's two buffers, in bytes of float32, out of place. -b, -e, -f, -i, -n, -w, -c, --sizes, --ordinary, --fresh, --budget,
--near and --near-wait mean what they mean to allreduce_bench.

Both run in the same processes and take turns. Columns: collective, ranks, size, ours and MPI's median time of a call in
microseconds, MPI's over ours, wrong elements of either, and the latency of a cache line in nanoseconds.
)";

struct Name {
  const char* text;
  Collective collective;
};
constexpr Name kNames[] = {{"all_gather", Collective::kAllGather}, {"reduce_scatter", Collective::kReduceScatter},
                           {"broadcast", Collective::kBroadcast},  {"all_to_all", Collective::kAllToAll},
                           {"sendrecv", Collective::kSendRecv},    {"pingpong", Collective::kPingPong}};

float Value(int rank, size_t i) { return static_cast<float>((i % 1021 + 7 * static_cast<size_t>(rank)) % 251); }

// One contender's two buffers.
struct Pair {
  float* in = nullptr;
  float* out = nullptr;
};

class Bench {
 public:
  Bench(ddp::ProcessGroup& group, const Options& options) : group_(group), options_(options) {}

  absl::Status Prepare() {
    const size_t bytes = *std::max_element(options_.sizes.begin(), options_.sizes.end()) + 4096;
    absl::StatusOr<std::unique_ptr<SharedBlock>> block = SharedBlock::Create(group_, Meeting::Bytes());
    if (!block.ok()) return block.status();
    block_ = *std::move(block);
    meeting_ = std::make_unique<Meeting>(block_->data(), group_.rank(), group_.size());
    for (float** place : {&mpi_.in, &mpi_.out, &ours_.in, &ours_.out}) {
      const bool ordinary = options_.ordinary || place == &mpi_.in || place == &mpi_.out;
      absl::Status status = ordinary ? MakeOrdinary(bytes, place) : MakeAllocated(bytes, place);
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }

  absl::Status Run(const Name& name, size_t size) {
    collective_ = name.collective;
    const size_t ranks = static_cast<size_t>(group_.size());
    count_ = size / sizeof(float) / ranks * ranks;
    if (count_ == 0) return absl::OkStatus();
    int64_t wrong = 0;
    const auto call_ours = [this] { return CallOurs(); };
    const auto call_mpi = [this] {
      RunMpi(collective_, mpi_.in, mpi_.out, count_, group_.rank(), group_.size());
      return absl::OkStatus();
    };
    const auto check = [&]() -> absl::Status {
      for (const Pair& pair : {ours_, mpi_}) {
        Fill(pair);
        meeting_->Barrier();
        if (absl::Status s = pair.in == ours_.in ? call_ours() : call_mpi(); !s.ok()) return s;
        wrong += CountWrong(pair.out);
        meeting_->Barrier();
      }
      return absl::OkStatus();
    };
    if (absl::Status s = check(); !s.ok()) return s;
    const auto rewrite = [this](const Pair& pair) {
      std::fill_n(collective_ == Collective::kBroadcast ? pair.out : pair.in, count_, 1.0F);
    };
    absl::StatusOr<Measured> measured =
        Measure(*meeting_, {call_ours, [&] { rewrite(ours_); }, [] {}}, {call_mpi, [&] { rewrite(mpi_); }, [] {}},
                {options_.fresh, options_.iters, options_.warmup_iters, options_.budget_s, options_.near_ns,
                 options_.near_wait_s});
    if (!measured.ok()) return measured.status();
    if (absl::Status s = check(); !s.ok()) return s;
    wrong = meeting_->Sum(wrong);
    if (group_.rank() == 0) {
      std::printf("%-14s %5d %10zu %10.2f %10.2f %7.2f %5lld %5.0f\n", name.text, group_.size(), size,
                  measured->first_us, measured->second_us, measured->second_us / measured->first_us,
                  static_cast<long long>(wrong), measured->link_ns);
      std::fflush(stdout);
    }
    return wrong == 0 ? absl::OkStatus() : absl::DataLossError(absl::StrCat("wrong results of ", name.text));
  }

 private:
  absl::Status MakeOrdinary(size_t bytes, float** place) {
    absl::StatusOr<PrivateMemory> memory = PrivateMemory::Create(bytes);
    if (!memory.ok()) return memory.status();
    ordinary_.push_back(*std::move(memory));
    *place = reinterpret_cast<float*>(ordinary_.back().data());
    return absl::OkStatus();
  }

  absl::Status MakeAllocated(size_t bytes, float** place) {
    absl::StatusOr<ddp::Allocation> memory = group_.Allocate(bytes, ddp::Device{});
    if (!memory.ok()) return memory.status();
    allocated_.push_back(*std::move(memory));
    *place = static_cast<float*>(allocated_.back().data());
    return absl::OkStatus();
  }

  size_t part() const { return count_ / static_cast<size_t>(group_.size()); }
  int next() const { return (group_.rank() + 1) % group_.size(); }
  int last() const { return (group_.rank() + group_.size() - 1) % group_.size(); }
  int partner() const { return group_.rank() ^ 1; }

  absl::Status CallOurs() {
    const auto buffer = [](float* data, size_t count) { return ddp::Buffer{data, count, ddp::DType::kFloat32, {}}; };
    const ddp::Buffer in = buffer(ours_.in, collective_ == Collective::kAllGather ? part() : count_);
    const ddp::Buffer out = buffer(ours_.out, collective_ == Collective::kReduceScatter ? part() : count_);
    switch (collective_) {
      case Collective::kAllGather:
        return group_.AllGather(in, out).Wait();
      case Collective::kReduceScatter:
        return group_.ReduceScatter(in, out).Wait();
      case Collective::kBroadcast:
        return group_.Broadcast(out, 0).Wait();
      case Collective::kAllToAll:
        return group_.AllToAll(in, out).Wait();
      case Collective::kSendRecv: {
        ddp::Work send = group_.Send(in, next(), 0);
        if (absl::Status s = group_.Recv(out, last(), 0).Wait(); !s.ok()) return s;
        return std::move(send).Wait();
      }
      case Collective::kPingPong:
        break;
    }
    if (partner() >= group_.size()) return absl::OkStatus();
    const bool first = group_.rank() < partner();
    if (absl::Status s = first ? group_.Send(in, partner(), 0).Wait() : group_.Recv(out, partner(), 0).Wait();
        !s.ok()) {
      return s;
    }
    return first ? group_.Recv(out, partner(), 0).Wait() : group_.Send(in, partner(), 0).Wait();
  }

  void Fill(const Pair& pair) const {
    for (size_t i = 0; i < count_; ++i) {
      pair.in[i] = Value(group_.rank(), i);
      pair.out[i] = collective_ == Collective::kBroadcast ? pair.in[i] : -1;
    }
  }

  int64_t CountWrong(const float* out) const {
    const size_t me = static_cast<size_t>(group_.rank());
    int64_t wrong = 0;
    for (size_t i = 0; i < (collective_ == Collective::kReduceScatter ? part() : count_); ++i) {
      float want = 0;
      switch (collective_) {
        case Collective::kAllGather:
          want = Value(static_cast<int>(i / part()), i % part());
          break;
        case Collective::kReduceScatter:
          for (int r = 0; r < group_.size(); ++r) want += Value(r, me * part() + i);
          break;
        case Collective::kBroadcast:
          want = Value(0, i);
          break;
        case Collective::kAllToAll:
          want = Value(static_cast<int>(i / part()), me * part() + i % part());
          break;
        case Collective::kSendRecv:
          want = Value(last(), i);
          break;
        case Collective::kPingPong:
          want = partner() < group_.size() ? Value(partner(), i) : -1;
          break;
      }
      wrong += out[i] != want;
    }
    return wrong;
  }

  ddp::ProcessGroup& group_;
  const Options& options_;
  std::unique_ptr<SharedBlock> block_;
  std::unique_ptr<Meeting> meeting_;
  std::vector<PrivateMemory> ordinary_;
  std::vector<ddp::Allocation> allocated_;
  Pair ours_, mpi_;
  Collective collective_ = Collective::kAllGather;
  size_t count_ = 0;
};

// Takes --collectives=LIST out of the command line.
absl::StatusOr<std::vector<Name>> TakeCollectives(std::vector<char*>& words) {
  constexpr absl::string_view kFlag = "--collectives=";
  std::vector<Name> chosen;
  for (size_t i = 1; i < words.size(); ++i) {
    if (!absl::StartsWith(words[i], kFlag)) continue;
    for (absl::string_view text : absl::StrSplit(absl::string_view(words[i]).substr(kFlag.size()), ',')) {
      const auto name =
          std::find_if(std::begin(kNames), std::end(kNames), [&](const Name& n) { return n.text == text; });
      if (name == std::end(kNames)) {
        return absl::InvalidArgumentError(absl::StrCat(kFlag, text, ": no such collective; see --help"));
      }
      chosen.push_back(*name);
    }
    words.erase(words.begin() + static_cast<std::ptrdiff_t>(i--));
  }
  if (chosen.empty()) chosen.assign(std::begin(kNames), std::end(kNames));
  return chosen;
}

absl::Status RunAll(const std::vector<Name>& chosen, const Options& options) {
  absl::StatusOr<std::unique_ptr<ddp::Context>> context = ddp::Context::Create();
  if (!context.ok()) return context.status();
  ddp::ProcessGroup& group = (*context)->world();
  if (options.help) {
    if (group.rank() == 0) std::fputs(kHelp, stdout);
    return absl::OkStatus();
  }
  if (group.size() < 2) return absl::InvalidArgumentError("start at least 2 ranks by mpirun -n");
  Bench bench(group, options);
  if (absl::Status s = bench.Prepare(); !s.ok()) return s;
  if (group.rank() == 0) {
    std::printf(
        "# libddp %s beside MPI, float32, out of place, %s buffers, %s\n# collective  ranks       size    ours us     "
        "MPI us MPI/ours wrong link\n",
        BENCH_VERSION, options.ordinary ? "ordinary" : "allocated", options.fresh ? "fresh" : "hot");
  }
  for (const Name& name : chosen) {
    for (const size_t size : options.sizes) {
      if (absl::Status s = bench.Run(name, size); !s.ok()) return s;
    }
  }
  return absl::OkStatus();
}

int Main(int argc, char** argv) {
  std::vector<char*> words(argv, argv + argc);
  const absl::StatusOr<std::vector<Name>> chosen = TakeCollectives(words);
  const absl::StatusOr<Options> options = ParseOptions(static_cast<int>(words.size()), words.data());
  absl::Status status = chosen.ok() ? options.status() : chosen.status();
  const bool understood = status.ok();
  if (understood) status = RunAll(*chosen, *options);
  if (status.ok()) return 0;
  std::fprintf(stderr, "collective_bench: %s\n", std::string(status.message()).c_str());
  return understood ? 1 : 2;
}

}  // namespace
}  // namespace bench

int main(int argc, char** argv) {
  bench::StartMpi();
  const int code = bench::Main(argc, argv);
  bench::StopMpi();
  return code;
}
