// SPDX-License-Identifier: Apache-2.0
// How long it takes until so many ranks have met and done a first barrier, by the kind of store.
//
//   startup_bench [RANKS=64] [ROUNDS=5]
//
// Ranks are processes (forked, so without the time that a launcher and the loader take) or threads. A line's time is
// from before the first rank is started until after the last has ended its barrier; the least, median and largest of
// the rounds. Last, 'end' is what it then takes until the last rank has left.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "bench/arguments.h"
#include "ddp/ddp.h"

namespace {

enum class Kind { kMemory, kFile, kTcp };
const char* const kNames[] = {"memory", "file", "tcp"};

struct Run {
  Kind kind;
  int ranks;
  std::string id;
  std::string path;
  int port;
  std::shared_ptr<ddp::Store> memory;
};

absl::StatusOr<std::shared_ptr<ddp::Store>> OpenStore(const Run& run, int rank) {
  if (run.kind == Kind::kMemory) return run.memory;
  if (run.kind == Kind::kFile) return ddp::CreateFileStore({run.path, run.id, run.ranks});
  ddp::TcpStoreOptions options;
  options.port = run.port;
  options.serve = rank == 0;
  options.run_id = run.id;
  options.world_size = run.ranks;
  return ddp::CreateTcpStore(options);
}

// One rank, from nothing to the end of its first barrier, which `done` is given the time of.
absl::Status Start(const Run& run, int rank, absl::Time& done) {
  absl::StatusOr<std::shared_ptr<ddp::Store>> store = OpenStore(run, rank);
  if (!store.ok()) return store.status();
  ddp::ContextOptions options;
  options.rank = rank;
  options.world_size = run.ranks;
  options.store = *std::move(store);
  absl::StatusOr<std::unique_ptr<ddp::Context>> context = ddp::Context::Create(options);
  if (!context.ok()) return context.status();
  ddp::Work work = (*context)->world().Barrier();
  const absl::Status status = work.Wait();
  done = absl::Now();
  return status;
}

[[noreturn]] void Fail(const absl::Status& status) {
  std::fprintf(stderr, "startup_bench: %s\n", status.ToString().c_str());
  std::_Exit(1);
}

absl::Time AsThreads(const Run& run) {
  std::vector<absl::Time> done(static_cast<size_t>(run.ranks));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < run.ranks; ++rank) {
    threads.emplace_back([&, rank] {
      if (absl::Status s = Start(run, rank, done[static_cast<size_t>(rank)]); !s.ok()) Fail(s);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return *std::max_element(done.begin(), done.end());
}

absl::Time AsProcesses(const Run& run) {
  int ends[2];
  if (pipe(ends) != 0) Fail(absl::InternalError("pipe"));
  for (int rank = 0; rank < run.ranks; ++rank) {
    const pid_t child = fork();
    if (child < 0) Fail(absl::InternalError("fork"));
    if (child > 0) continue;
    absl::Time done;
    if (absl::Status s = Start(run, rank, done); !s.ok()) Fail(s);
    const int64_t time = absl::ToUnixNanos(done);
    std::_Exit(write(ends[1], &time, sizeof(time)) == sizeof(time) ? 0 : 1);
  }
  close(ends[1]);
  int64_t last = 0;
  int came = 0;
  for (int64_t time = 0; read(ends[0], &time, sizeof(time)) == sizeof(time); ++came) last = std::max(last, time);
  close(ends[0]);
  for (int rank = 0; rank < run.ranks; ++rank) wait(nullptr);
  if (came != run.ranks) Fail(absl::InternalError(absl::StrCat(came, " of ", run.ranks, " ranks have started")));
  return absl::FromUnixNanos(last);
}

}  // namespace

int main(int argc, char** argv) {
  int64_t ranks_given = 64, rounds_given = 5;
  const char* const what = "Times how long ranks of this host take to meet through each kind of store, and to leave.";
  const char* const usage =
      "  startup_bench [RANKS [ROUNDS]]\n\n"
      "  RANKS   processes, and threads (default 64)\n"
      "  ROUNDS  how often everything is timed (default 5)";
  if (const std::optional<int> code =
          bench::ReadNumbers(argc, argv, what, usage, {{&ranks_given, 1, 100'000}, {&rounds_given}})) {
    return *code;
  }
  const auto ranks = static_cast<int>(ranks_given);
  const auto rounds = static_cast<size_t>(rounds_given);
  std::string folder = (std::filesystem::temp_directory_path() / "ddp-startup-XXXXXX").string();
  if (mkdtemp(folder.data()) == nullptr) Fail(absl::InternalError("mkdtemp"));
  std::printf("%-8s %-10s %6s %10s %10s %10s %10s\n", "store", "ranks as", "ranks", "min ms", "median ms", "max ms",
              "end ms");
  int number = 0;
  for (const bool threads : {true, false}) {
    for (const Kind kind : {Kind::kMemory, Kind::kFile, Kind::kTcp}) {
      if (kind == Kind::kMemory && !threads) continue;
      std::vector<double> times;
      std::vector<double> ends;
      for (size_t round = 0; round < rounds; ++round) {
        ++number;
        const Run run = {kind,
                         ranks,
                         absl::StrCat(getpid(), " ", number),
                         absl::StrCat(folder, "/", number),
                         20000 + (getpid() + number) % 10000,
                         ddp::CreateMemoryStore()};
        const absl::Time begin = absl::Now();
        const absl::Time met = threads ? AsThreads(run) : AsProcesses(run);
        times.push_back(absl::ToDoubleMilliseconds(met - begin));
        ends.push_back(absl::ToDoubleMilliseconds(absl::Now() - met));
      }
      std::sort(times.begin(), times.end());
      std::sort(ends.begin(), ends.end());
      std::printf("%-8s %-10s %6d %10.1f %10.1f %10.1f %10.1f\n", kNames[static_cast<int>(kind)],
                  threads ? "threads" : "processes", ranks, times.front(), times[rounds / 2], times.back(),
                  ends[rounds / 2]);
      std::fflush(stdout);
    }
  }
  std::filesystem::remove_all(folder);
  return 0;
}
