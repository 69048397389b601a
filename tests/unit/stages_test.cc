// SPDX-License-Identifier: Apache-2.0
// Operations that pass private data on, in every order in which ranks may take their turns: no rank changes what
// another has still to read.
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <random>
#include <vector>

#include "libddp/comm/host/run.h"
#include "libddp/comm/memory/read_process.h"
#include "tests/support/catch.h"

namespace ddp {
namespace {

using Kind = OperationKey::Kind;

constexpr int kRanks = 3;
constexpr Kind kKinds[] = {Kind::kAllReduce, Kind::kReduceScatter, Kind::kAllGather, Kind::kAllToAll, Kind::kBroadcast};

// One rank's part of one operation, and the data for it.
struct Part {
  Part(const OperationKey& key, size_t count, size_t outs, int rank, int32_t first)
      : operation(new Operation(nullptr, key)), in(count), out(outs, -1) {
    for (size_t i = 0; i < count; ++i) in[i] = Value(first, rank, i);
    operation->in.Add(reinterpret_cast<char*>(in.data()), in.size() * sizeof(int32_t));
    operation->out.Add(reinterpret_cast<char*>(out.data()), out.size() * sizeof(int32_t));
    operation->count = count;
    operation->reduce = *CpuReduce::Create({.in = DType::kInt32, .out = DType::kInt32, .op = ReduceOp::kSum});
  }
  ~Part() {
    operation->Unref();
    operation->Unref();
  }
  Part(const Part&) = delete;
  Part& operator=(const Part&) = delete;

  static int32_t Value(int32_t first, int rank, size_t i) {
    return first + 100'000'000 * rank + static_cast<int32_t>(i);
  }

  Operation* const operation;
  std::vector<int32_t> in, out;
};

// What is called on all ranks alike.
struct Call {
  Kind kind;
  int root;
  size_t n;
  int32_t first;
  std::vector<std::unique_ptr<Part>> ranks = {};

  void Make(Route route, uint64_t sequence, const RunContext (&hosts)[kRanks], uint64_t* rounds) {
    const bool parts = kind == Kind::kReduceScatter || kind == Kind::kAllToAll;
    const size_t count = parts ? n * kRanks : n;
    const size_t outs = kind == Kind::kAllGather || kind == Kind::kAllToAll ? n * kRanks : n;
    OperationKey key{.kind = kind, .in = DType::kInt32, .out = DType::kInt32};
    if (kind == Kind::kBroadcast) key.root = static_cast<uint16_t>(root);
    for (int r = 0; r < kRanks; ++r) {
      Part& part = *ranks.emplace_back(std::make_unique<Part>(key, count, outs, r, first));
      Announcement& announcement = hosts[r].control.slot(sequence, r).announcement;
      announcement.in = reinterpret_cast<uintptr_t>(part.in.data());
      announcement.out = reinterpret_cast<uintptr_t>(part.out.data());
      part.operation->sequence = sequence;
      part.operation->run = *MakeRun(route, *part.operation, hosts[r], *rounds);
    }
    *rounds += ranks[0]->operation->run->Rounds();
  }

  int32_t Expected(int rank, size_t i) const {
    const auto value = [&](int r, size_t at) { return Part::Value(first, r, at); };
    switch (kind) {
      case Kind::kAllReduce:
        return value(0, i) + value(1, i) + value(2, i);
      case Kind::kReduceScatter: {
        const size_t at = static_cast<size_t>(rank) * n + i;
        return value(0, at) + value(1, at) + value(2, at);
      }
      case Kind::kAllGather:
        return value(static_cast<int>(i / n), i % n);
      case Kind::kAllToAll:
        return value(static_cast<int>(i / n), static_cast<size_t>(rank) * n + i % n);
      default:
        return value(root, i);
    }
  }

  // The rank is through: its memory is the caller's again, who makes use of it.
  void Leave(int rank) {
    Part& part = *ranks[static_cast<size_t>(rank)];
    const bool receives = kind != Kind::kBroadcast || rank != root;
    for (size_t i = 0; receives && i < part.out.size(); ++i) {
      if (part.out[i] != Expected(rank, i)) FAIL("kind " << int(kind) << ", rank " << rank << ", element " << i);
    }
    std::fill(part.in.begin(), part.in.end(), -2);
    std::fill(part.out.begin(), part.out.end(), -3);
  }
};

bool CanReadItself() {
  int value = 1, copy = 0;
  RangeList from, to;
  from.Add(reinterpret_cast<char*>(&value), sizeof(value));
  to.Add(reinterpret_cast<char*>(&copy), sizeof(copy));
  return ReadProcess(0, getpid(), from, to).ok();
}

TEST_CASE("results are exact in whatever order ranks take their turns") {
  const size_t bytes = ControlBlock::Bytes(kRanks);
  char* const base = static_cast<char*>(std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096));
  REQUIRE(base != nullptr);
  const std::unique_ptr<char, decltype(&std::free)> memory(base, &std::free);
  const bool reads = CanReadItself();
  const PeerWatch peers = *PeerWatch::Create(std::vector<ProcessId>(kRanks, ProcessId::OfSelf()));
  std::mt19937 random(1);
  for (int run = 0; run < 60; ++run) {
    std::fill_n(base, bytes, 0);
    const ControlBlock control(base, kRanks);
    SharedWriter writers[kRanks];
    for (int r = 0; r < run % (kRanks + 1); ++r) writers[r].GoPastCaches();
    RunContext hosts[kRanks];
    for (int r = 0; r < kRanks; ++r) {
      hosts[r] = {.control = control, .peers = &peers, .writer = &writers[r], .rank = r, .size = kRanks};
    }
    uint64_t rounds = 0;
    std::vector<Call> calls;
    for (uint64_t k = 0; k < 12; ++k) {
      const Kind kind = kKinds[random() % 5];
      const Route route = reads && random() % 2 == 0 ? Route::kFetched : Route::kStaged;
      // Of some, several rounds.
      const size_t n = random() % 8 == 0 ? 200'000 : 1 + random() % 3000;
      const int root = static_cast<int>(random() % kRanks);
      calls.push_back({.kind = kind, .root = root, .n = n, .first = static_cast<int32_t>(1000 * k)});
      calls.back().Make(route, k, hosts, &rounds);
    }
    // Each rank is somewhere in the list, and makes a turn of what it has come to when it is drawn.
    size_t at[kRanks] = {};
    for (int turn = 0; at[0] + at[1] + at[2] < kRanks * calls.size(); ++turn) {
      REQUIRE(turn < 1'000'000);
      const int rank = static_cast<int>(random() % kRanks);
      size_t& mine = at[rank];
      // Runs ahead at times, as far as it can.
      for (int more = random() % 4 == 0 ? 10 : 1; more > 0 && mine < calls.size(); --more) {
        Run& turns = *calls[mine].ranks[static_cast<size_t>(rank)]->operation->run;
        REQUIRE(turns.Advance(/*steal=*/true, /*limit=*/1).ok());
        if (turns.Done()) calls[mine++].Leave(rank);
      }
    }
  }
}

}  // namespace
}  // namespace ddp
