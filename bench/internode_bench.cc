// SPDX-License-Identifier: Apache-2.0
// All-reduce over several nodes, beside MPI_Allreduce over the same wire and beside what the wire itself allows.
//
//   DDP_NODE_SIZE=1 mpirun -n 2 --mca btl tcp,self --mca btl_tcp_if_include lo internode_bench [max_bytes]
//
// The wire is measured first: every rank exchanges messages with its partner on the next node, all at once, both ways.
// An exchange of b bytes takes about latency + b / bandwidth. In an all-reduce of S bytes over N nodes of L ranks each
// rank either sends sums of its share, S / L, to N - 1 others at once; or 1 / N of it to each, and then as much of
// final values: two latencies, and 2 (N - 1) / N times its share. The prediction is the shorter of the two.
#include <mpi.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "bench/arguments.h"
#include "bench/percentile.h"
#include "ddp/ddp.h"

namespace {

// Median over calls of the slowest rank's time, in microseconds.
double MedianMicros(const std::function<void()>& call, double seconds) {
  std::vector<double> times;
  double spent = 0;
  for (int i = 0; i < 8 || spent < seconds; ++i) {
    MPI_Barrier(MPI_COMM_WORLD);
    const double begin = MPI_Wtime();
    call();
    double took = MPI_Wtime() - begin, slowest = 0;
    MPI_Allreduce(&took, &slowest, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    spent += slowest;
    if (i >= 3) times.push_back(slowest * 1e6);
  }
  return bench::Median(std::move(times));
}

struct Place {
  int node = 0, nodes = 1, width = 1;
  int next = 0, last = 0;  // partners on the neighbouring nodes
};

// As libddp sees it, for equal nodes of consecutive ranks.
Place FindPlace(int rank, int size) {
  Place place;
  const char* const node_size = std::getenv("DDP_NODE_SIZE");
  if (node_size != nullptr && *node_size != 0) {
    place.width = std::atoi(node_size);
  } else {
    MPI_Comm host = MPI_COMM_NULL;
    MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &host);
    MPI_Comm_size(host, &place.width);
    MPI_Comm_free(&host);
  }
  place.nodes = size / place.width;
  place.node = rank / place.width;
  place.next = (rank + place.width) % size;
  place.last = (rank + size - place.width) % size;
  return place;
}

// What an exchange takes, in microseconds: `latency`, and so much for each byte.
struct Wire {
  double latency = 0, per_byte = 0;
};

// Short and long exchanges in turn, so that both see the same machine. The same on all ranks.
Wire MeasureWire(const Place& place) {
  constexpr size_t kShort = 8, kLong = size_t{1} << 20;
  std::vector<char> out(kLong), in(kLong);
  const auto micros = [&](size_t bytes) {
    return MedianMicros(
        [&] {
          MPI_Sendrecv(out.data(), static_cast<int>(bytes), MPI_BYTE, place.next, 0, in.data(), static_cast<int>(bytes),
                       MPI_BYTE, place.last, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        },
        0.04);
  };
  std::vector<double> latencies, per_byte;
  for (int round = 0; round < 5; ++round) {
    latencies.push_back(micros(kShort));
    per_byte.push_back((micros(kLong) - latencies.back()) / static_cast<double>(kLong - kShort));
  }
  return {bench::Median(std::move(latencies)), bench::Median(std::move(per_byte))};
}

int Run(size_t most) {
  auto context = ddp::Context::Create();
  if (!context.ok()) {
    std::fprintf(stderr, "internode_bench: %s\n", context.status().ToString().c_str());
    return 1;
  }
  ddp::ProcessGroup& group = (*context)->world();
  const Place place = FindPlace(group.rank(), group.size());
  if (place.nodes < 2 || place.nodes * place.width != group.size()) {
    std::fprintf(stderr, "internode_bench: needs two nodes or more, of equal size; see DDP_NODE_SIZE\n");
    return 1;
  }
  const auto [latency, per_byte] = MeasureWire(place);
  if (latency <= 0 || per_byte <= 0) {
    std::fprintf(stderr, "internode_bench: 1 MiB took no longer than 8 bytes: this machine is too busy to measure\n");
    return 1;
  }
  if (group.rank() == 0) {
    std::printf("%d nodes of %d ranks; wire, all ranks at once, both ways: latency %.1f us, %.2f GB/s per rank\n",
                place.nodes, place.width, latency, 1e-3 / per_byte);
    std::printf("%12s %12s %12s %8s %12s %8s\n", "bytes", "libddp us", "MPI us", "ratio", "predicted us", "ratio");
  }
  auto memory = group.Allocate(most, ddp::Device{});
  if (!memory.ok()) {
    std::fprintf(stderr, "internode_bench: %s\n", memory.status().ToString().c_str());
    return 1;
  }
  std::vector<float> theirs(most / sizeof(float), 1.0f);
  for (size_t bytes = 1024; bytes <= most; bytes *= 4) {
    const ddp::Buffer buffer = memory->View(ddp::DType::kFloat32, 0, bytes / sizeof(float));
    absl::Status status;
    const auto ours = [&] {
      auto work = group.AllReduce(buffer, buffer, {.op = ddp::ReduceOp::kAvg});
      status.Update(work.Wait());
    };
    const auto mpi = [&] {
      MPI_Allreduce(MPI_IN_PLACE, theirs.data(), static_cast<int>(bytes / sizeof(float)), MPI_FLOAT, MPI_SUM,
                    MPI_COMM_WORLD);
    };
    // In turn, so that both see the same machine.
    std::vector<double> our_times, mpi_times;
    for (int round = 0; round < 5; ++round) {
      our_times.push_back(MedianMicros(ours, 0.08));
      mpi_times.push_back(MedianMicros(mpi, 0.08));
      std::fill(theirs.begin(), theirs.end(), 1.0f);
    }
    if (!status.ok()) {
      std::fprintf(stderr, "internode_bench: %s\n", status.ToString().c_str());
      return 1;
    }
    const double our_time = bench::Median(std::move(our_times)), mpi_time = bench::Median(std::move(mpi_times));
    const double share = per_byte * static_cast<double>(bytes) / place.width, others = place.nodes - 1;
    const double predicted = std::min(latency + others * share, 2 * latency + 2 * others / place.nodes * share);
    if (group.rank() == 0) {
      std::printf("%12zu %12.1f %12.1f %8.2f %12.1f %8.2f\n", bytes, our_time, mpi_time, mpi_time / our_time, predicted,
                  our_time / predicted);
      std::fflush(stdout);
    }
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  int64_t most = 64 << 20;
  const char* const what =
      "Times all-reduces over several nodes, beside MPI_Allreduce over the same network and beside what the network "
      "allows.";
  const char* const usage =
      "  DDP_NODE_SIZE=1 mpirun -n 2 --mca btl tcp,self internode_bench [MAX_BYTES]\n\n"
      "  MAX_BYTES  the largest array, at least 1024 (default 67108864)\n\n"
      "DDP_NODE_SIZE cuts the ranks of one host into nodes. Times are in microseconds, medians of the slowest rank.";
  if (const std::optional<int> code = bench::ReadNumbers(argc, argv, what, usage, {{&most, 1024}})) {
    return *code;
  }
  int level = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_SERIALIZED, &level);
  const int code = Run(static_cast<size_t>(most));
  if (code != 0) MPI_Abort(MPI_COMM_WORLD, code);
  MPI_Finalize();
  return 0;
}
