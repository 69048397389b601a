// SPDX-License-Identifier: Apache-2.0
// What the flight recorder says of ranks that do not come, part, or stall; and what observers are told.
#include <spdlog/sinks/base_sink.h>
#include <spdlog/spdlog.h>

#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <regex>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "ddp/collectives.h"
#include "ddp/distributed_data_parallel.h"
#include "ddp/observer.h"
#include "libddp/comm/base/internal_group.h"
#include "tests/support/catch.h"
#include "tests/support/memory.h"
#include "tests/support/ranks.h"

namespace ddp::testing {
namespace {

// Keeps what the library logs. The logger of a process is made once, so it is ours from the first test case on.
class Lines final : public spdlog::sinks::base_sink<std::mutex> {
 public:
  static Lines& Get() {
    static const std::shared_ptr<Lines> lines = [] {
      auto made = std::make_shared<Lines>();
      auto logger = std::make_shared<spdlog::logger>("ddp", made);
      logger->set_level(spdlog::level::warn);
      spdlog::register_logger(logger);
      return made;
    }();
    return *lines;
  }

  std::vector<std::string> Take() {
    std::lock_guard<std::mutex> lock(mutex_);
    return std::move(lines_);
  }

 protected:
  void sink_it_(const spdlog::details::log_msg& message) override {
    lines_.emplace_back(message.payload.begin(), message.payload.end());
  }
  void flush_() override {}

 private:
  std::vector<std::string> lines_;
};

// What this process has logged since the last call. Where ranks are threads it is rank 0's to ask.
std::vector<std::string> Logged(const Rank& rank) {
  return RanksAreThreads() && rank.rank() != 0 ? std::vector<std::string>() : Lines::Get().Take();
}

// DDP_FLIGHT_RECORDER while one lives: the same file for all ranks.
class Recorder {
 public:
  Recorder()
      : path_(absl::StrCat(std::filesystem::temp_directory_path().string(), "/ddp-flight-",
                           RanksAreThreads() ? getpid() : getppid(), ".json")) {
    Lines::Get();
    setenv("DDP_FLIGHT_RECORDER", path_.c_str(), 1);
  }
  ~Recorder() { unsetenv("DDP_FLIGHT_RECORDER"); }

  // What was written, which is then removed; every rank has to have stopped using it.
  nlohmann::json Take(Rank& rank, const std::string& suffix = "") const {
    rank.Meet();
    std::ifstream file(path_ + suffix);
    RANK_CHECK(file.is_open(), path_ + suffix);
    const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    rank.Meet();
    if (rank.rank() == 0) std::filesystem::remove(path_ + suffix);
    return nlohmann::json::parse(text);
  }
  // One rank has told of the incident, and what it said has all these parts. It is the lowest, unless that was slow.
  // Ranks that the machine held up as well may be named beside the last one.
  void CheckToldOnce(Rank& rank, const std::vector<std::string>& parts) const {
    const auto lines_of = [this](int r) { return absl::StrCat(path_, ".lines", r); };
    rank.Meet();
    std::ofstream(lines_of(rank.rank())) << absl::StrJoin(Logged(rank), "\n\n");
    rank.Meet();
    if (rank.rank() != 0) return;
    std::vector<std::string> lines;
    for (int r = 0; r < rank.size(); ++r) {
      std::ifstream file(lines_of(r));
      const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
      for (const absl::string_view line : absl::StrSplit(text, "\n\n", absl::SkipEmpty())) lines.emplace_back(line);
      std::filesystem::remove(lines_of(r));
    }
    RANK_CHECK_EQ(lines.size(), 1u);
    const std::regex with_others(absl::StrCat("ranks ([0-9]+, )+", rank.size() - 1, "\\b"));
    const std::string said = std::regex_replace(lines[0], with_others, absl::StrCat("rank ", rank.size() - 1));
    for (const std::string& part : parts) RANK_CHECK(absl::StrContains(said, part), part, " is not in ", lines[0]);
  }
  // Whether it is whole: it is written in one go, and ends with a line.
  bool Written(const std::string& suffix = "") const {
    std::ifstream file(path_ + suffix);
    const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    return absl::EndsWith(text, "]}\n");
  }

 private:
  const std::string path_;
};

// Longer than the ranks that come are usually apart: who is slower is told of as well.
constexpr absl::Duration kStall = absl::Seconds(1);

std::string Operation(uint64_t sequence, size_t count) {
  return absl::StrCat("operation ", sequence, ", all_reduce(sum, float32, ", count, " elements), bucket 3");
}

// All-reduces that ranks 0 .. size - 2 call and the last rank does not, or later.
class Waiting {
 public:
  Waiting(Rank& rank, size_t count) : rank_(rank), memory_(rank, Placement::kOrdinary, DType::kFloat32, count) {}

  Work Start() {
    const Buffer whole = memory_.whole();
    return rank_.group().AllReduce(whole, whole, {.bucket = 3});
  }
  bool late() const { return rank_.rank() == rank_.size() - 1; }

 private:
  Rank& rank_;
  Memory memory_;
};

TEST_CASE("a stall is told once, with the bucket and who is missing, and goes on", "[timeout]") {
  if (RankCount() == 1) return;
  const Recorder recorder;
  ContextOptions options;
  options.stall_warning = kStall;
  RunOnRanks(
      [&](Rank& rank) {
        for (const size_t count : {size_t{10}, size_t{300'000}}) {
          Waiting first(rank, count), second(rank, count);
          rank.Meet();
          if (first.late()) {
            while (!recorder.Written()) absl::SleepFor(absl::Milliseconds(5));
          }
          Work works[] = {first.Start(), second.Start()};
          for (Work& work : works) RANK_CHECK_OK(std::move(work).Wait());
          const uint64_t sequence = count == 10 ? 0 : 2;
          const std::string late = absl::StrCat("rank ", rank.size() - 1);
          recorder.CheckToldOnce(rank, {absl::StrCat(": ", Operation(sequence, count), ", has been waiting for"),
                                        "did not arrive: " + late, "the ranks part at operation ",
                                        "not called by " + late, "bucket 3: waits for " + late});
          const nlohmann::json json = recorder.Take(rank);
          RANK_CHECK_EQ(json["incident"].get<std::string>(), "stall");
          RANK_CHECK_EQ(json["parting"].get<uint64_t>(), sequence);
          RANK_CHECK_EQ(json["ranks"].size(), static_cast<size_t>(rank.size()));
          const nlohmann::json& teller = json["ranks"][json["told_by"].get<size_t>()];
          RANK_CHECK_EQ(teller["operations"][sequence]["state"].get<std::string>(), "announced");
        }
      },
      options);
}

TEST_CASE("a stall warning that never comes due is never given", "[nodes][timeout]") {
  if (RankCount() == 1) return;
  Lines::Get();
  ContextOptions options;
  options.stall_warning = absl::InfiniteDuration();
  RunOnRanks(
      [](Rank& rank) {
        Waiting waiting(rank, 1000);
        rank.Meet();
        static_cast<void>(Logged(rank));
        rank.Meet();
        if (waiting.late()) absl::SleepFor(absl::Milliseconds(300));
        RANK_CHECK_OK(waiting.Start().Wait());
        rank.Meet();
        for (const std::string& line : Logged(rank)) RANK_CHECK(false, line);
      },
      options);
}

TEST_CASE("a time-out is told once, with who waits for whom", "[timeout]") {
  if (RankCount() == 1) return;
  const Recorder recorder;
  RunWithTimeout(absl::Milliseconds(1500), [&](Rank& rank) {
    Waiting waiting(rank, 1000);
    if (!waiting.late()) {
      RANK_CHECK_STATUS(waiting.Start().Wait(), absl::StatusCode::kDeadlineExceeded, "bucket 3");
    }
    const std::string late = absl::StrCat("rank ", rank.size() - 1);
    recorder.CheckToldOnce(rank,
                           {Operation(0, 1000), "bucket 3: waits for " + late, late + ": no operation called yet"});
    const nlohmann::json json = recorder.Take(rank);
    RANK_CHECK_EQ(json["incident"].get<std::string>(), "failure");
    RANK_CHECK(json["told_by"].get<int>() != rank.size() - 1);
  });
}

TEST_CASE("ranks that call different things are told side by side") {
  if (RankCount() == 1) return;
  const Recorder recorder;
  RunOnRanks([&](Rank& rank) {
    Waiting same(rank, 10), waiting(rank, rank.rank() == rank.size() - 1 ? 11 : 10);
    RANK_CHECK_OK(same.Start().Wait());
    RANK_CHECK_STATUS(waiting.Start().Wait(), absl::StatusCode::kFailedPrecondition, "disagree");
    recorder.CheckToldOnce(rank,
                           {"the ranks part at operation 1: all_reduce(sum, float32, 10 elements), bucket 3 by rank",
                            absl::StrCat("all_reduce(sum, float32, 11 elements), bucket 3 by rank ", rank.size() - 1)});
    RANK_CHECK_EQ(recorder.Take(rank)["parting"].get<uint64_t>(), 1u);
  });
}

// Whether this run has two nodes of two ranks.
bool TwoNodesOfTwo() {
  const char* const node_size = std::getenv("DDP_NODE_SIZE");
  return node_size != nullptr && std::string(node_size) == "2" && RankCount() == 4;
}

// A case is repeated where the machine held up a rank that comes, so that it was told of, too.
constexpr int kTries = 5;

// Whether the recorders of both nodes wrote of an operation that rank 3 alone does not call; the same on all ranks.
bool BothNodesTell(Rank& rank, const Recorder& recorder, const std::string& incident) {
  const std::string here = "bucket 3: all ranks of this node have come, waits for other nodes";
  const std::string said[] = {here, here, "bucket 3: waits for rank 3", "no operation called"};
  bool all = true;
  rank.Meet();
  for (int node = 0; node < 2; ++node) {
    const nlohmann::json json = recorder.Take(rank, absl::StrCat(".node", node));
    RANK_CHECK_EQ(json["incident"].get<std::string>(), incident);
    RANK_CHECK_EQ(json["ranks"].size(), 2u);
    for (int l = 0; l < 2; ++l) {
      const nlohmann::json& of_rank = json["ranks"][static_cast<size_t>(l)];
      RANK_CHECK_EQ(of_rank["rank"].get<int>(), 2 * node + l);
      all = all && absl::StrContains(of_rank["doing"].get<std::string>(), said[2 * node + l]);
    }
  }
  return all;
}

TEST_CASE("on several nodes each tells what its own ranks are at in a stall", "[nodes][timeout]") {
  if (!TwoNodesOfTwo()) return;
  const Recorder recorder;
  ContextOptions options;
  options.stall_warning = kStall;
  RunOnRanks(
      [&](Rank& rank) {
        bool told = false;
        std::string lines;
        for (int tries = 0; tries < kTries && !told; ++tries) {
          Waiting waiting(rank, 1000);
          rank.Meet();
          static_cast<void>(Logged(rank));
          rank.Meet();
          if (waiting.late()) {
            while (!recorder.Written(".node0") || !recorder.Written(".node1")) absl::SleepFor(absl::Milliseconds(5));
          }
          RANK_CHECK_OK(waiting.Start().Wait());
          told = BothNodesTell(rank, recorder, "stall");
          lines.clear();
          for (const std::string& line : Logged(rank)) absl::StrAppend(&lines, line, "\n\n");
        }
        RANK_CHECK(told);
        // Each of the two has said it once, and the one without the late rank for whom it waits.
        const std::vector<std::string> all = RANK_VALUE(GatherStrings(rank.group(), lines));
        const std::string text = absl::StrCat(all[0], all[1], all[2], all[3]);
        const bool named = absl::StrContains(text, "rank 2 on node 1 (host ") ||  // by rank 0
                           absl::StrContains(text, "rank 3 on node 1 (host ");    // by rank 1, where that was faster
        RANK_CHECK(named, text);
        RANK_CHECK(std::vector<std::string>(absl::StrSplit(text, "\n\n")).size() == 3, text);
      },
      options);
}

TEST_CASE("on several nodes each tells what its own ranks are at after a time-out", "[nodes][timeout]") {
  if (!TwoNodesOfTwo()) return;
  const Recorder recorder;
  std::atomic<bool> told{false};
  for (int tries = 0; tries < kTries && !told; ++tries) {
    RunWithTimeout(absl::Milliseconds(1500), [&](Rank& rank) {
      Waiting waiting(rank, 1000);
      if (!waiting.late()) {
        RANK_CHECK_STATUS(waiting.Start().Wait(), absl::StatusCode::kDeadlineExceeded, "bucket 3");
      }
      told = BothNodesTell(rank, recorder, "failure");
      rank.Meet();
      Logged(rank);
    });
  }
  CHECK(told);
}

TEST_CASE("an abort by the program is no riddle, and is not told", "[nodes]") {
  Lines::Get();
  RunOnRanks([&](Rank& rank) {
    Waiting waiting(rank, 10);
    rank.Meet();
    if (waiting.late()) {
      rank.group().Abort(absl::CancelledError("enough"));
    } else {
      RANK_CHECK_STATUS(waiting.Start().Wait(), absl::StatusCode::kAborted, "enough");
    }
    rank.Meet();
    RANK_CHECK(Logged(rank).empty());
  });
}

// --- observers ------------------------------------------------------------------------------------------------------

class Notes final : public Observer {
 public:
  void OnOperation(const OperationEvent& event) noexcept override {
    std::lock_guard<std::mutex> lock(mutex);
    operations.push_back(event);
  }
  void OnBucket(const BucketEvent& event) noexcept override {
    std::lock_guard<std::mutex> lock(mutex);
    buckets.push_back(event);
  }
  void OnScope(const ScopeEvent& event) noexcept override {
    std::lock_guard<std::mutex> lock(mutex);
    scopes.push_back(event);
  }

  std::mutex mutex;
  std::vector<OperationEvent> operations;
  std::vector<BucketEvent> buckets;
  std::vector<ScopeEvent> scopes;
};

// Steps of a model of `parameters` gradients, each a bucket of its own.
void Train(Rank& rank, int parameters, int steps) {
  std::vector<Parameter> list;
  for (int i = 0; i < parameters; ++i) {
    list.push_back({absl::StrCat("p", i), {}, Buffer{nullptr, 1000, DType::kFloat32, {}}, {}});
  }
  DdpOptions options;
  options.bucket_bytes = 4000;
  auto model = RANK_VALUE(DistributedDataParallel::Create(rank.group(), list, options));
  for (int step = 0; step < steps; ++step) {
    const TraceScope scope(rank.group(), "step");
    for (size_t i = list.size(); i-- > 0;) model->GradReady(i);
    RANK_CHECK_OK(model->FinishBackward());
  }
}

TEST_CASE("an observer is told of operations, buckets and scopes, in order", "[nodes]") {
  Notes notes;  // of all ranks of this process
  ContextOptions options;
  options.observer = &notes;
  constexpr int kParameters = 3, kSteps = 4;
  RunOnRanks([&](Rank& rank) { Train(rank, kParameters, kSteps); }, options);
  const size_t ranks = RanksAreThreads() ? static_cast<size_t>(RankCount()) : 1;
  CHECK(notes.buckets.size() == ranks * kParameters * kSteps);
  for (const BucketEvent& b : notes.buckets) {
    CHECK(b.bytes == 4000);
    CHECK(0 < b.ready_ns);
    CHECK(b.ready_ns <= b.launched_ns);
    CHECK(b.launched_ns <= b.done_ns);
  }
  // "step" begins, FinishBackward begins and ends within it, "step" ends.
  CHECK(notes.scopes.size() == ranks * 4 * kSteps);
  if (ranks == 1) {
    for (size_t i = 0; i < notes.scopes.size(); ++i) {
      const ScopeEvent& s = notes.scopes[i];
      CHECK(std::string(s.name) == (i % 4 == 0 || i % 4 == 3 ? "step" : "FinishBackward"));
      CHECK(s.begin == (i % 4 < 2));
      CHECK((s.begin ? s.end_ns == 0 : s.begin_ns <= s.end_ns));
    }
  }
  if (RankCount() == 1) return;  // nothing is exchanged
  size_t reduced = 0, called = 0;
  for (const OperationEvent& o : notes.operations) {
    CHECK(o.state != OperationEvent::State::kFailed);
    if (o.state == OperationEvent::State::kCalled) {
      ++called;
      CHECK(o.ended_ns == 0);
      continue;
    }
    CHECK(0 < o.called_ns);
    CHECK(o.called_ns <= o.announced_ns);
    CHECK(o.announced_ns <= o.ready_ns);
    CHECK(o.ready_ns <= o.ended_ns);
    if (o.bucket < 0) continue;
    ++reduced;
    CHECK(o.kind == "all_reduce");
    CHECK(o.count == 1000);
    CHECK(o.bucket < kParameters);
  }
  CHECK(called == notes.operations.size() - called);
  CHECK(reduced == ranks * kParameters * kSteps);
}

TEST_CASE("without an observer nobody is told", "[nodes]") {
  RunOnRanks([&](Rank& rank) { RANK_CHECK(ObserverOf(rank.group()) == nullptr); });
}

}  // namespace
}  // namespace ddp::testing
