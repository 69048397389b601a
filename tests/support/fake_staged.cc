// SPDX-License-Identifier: Apache-2.0
// The staged protocol on simulated GPUs: a thread block is a thread of the host.
#include <atomic>
#include <bit>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "libddp/device/cpu_blocks.h"
#include "libddp/device/cpu_reduce.h"
#include "libddp/device/staged_blocks.h"
#include "libddp/device/staged_meeting.h"
#include "libddp/device/staged_messages.h"
#include "libddp/device/staged_protocol.h"
#include "libddp/device/staged_turn.h"
#include "tests/support/fake_devices.h"
#include "tests/support/whole_packet.h"

namespace ddp::testing {
namespace {

CpuReduce ReduceOf(const staged::Arithmetic& a) {
  const bool integer = !IsFloatingPoint(static_cast<DType>(a.in_type));
  const ReduceOp op = static_cast<ReduceOp>(a.op);
  // The division of an average of floats is in post64.
  return CpuReduce::Create({.in = static_cast<DType>(a.in_type),
                            .out = static_cast<DType>(a.out_type),
                            .op = !integer && op == ReduceOp::kAvg ? ReduceOp::kSum : op,
                            .prescale = a.pre64,
                            .postscale = a.post64,
                            .average_over = a.divisor,
                            .check_nonfinite = a.nonfinite != nullptr})
      .value();
}
CpuReduce CheckOf(const staged::Arithmetic& a) {
  const DType type = static_cast<DType>(a.out_type);
  return CpuReduce::Create({.in = type, .out = type, .check_nonfinite = a.nonfinite != nullptr}).value();
}

// A thread that runs one thread block after the other: kernels are many, and a thread of their own for each block costs
// more than what it does.
class BlockThread {
 public:
  BlockThread() {
    std::thread([this] { Serve(); }).detach();
  }
  void Start(std::function<void()> block) {
    const std::lock_guard<std::mutex> lock(mutex_);
    block_ = std::move(block);
    changed_.notify_all();
  }
  void Wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return block_ == nullptr; });
  }

 private:
  void Serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return block_ != nullptr; });
      lock.unlock();
      block_();
      lock.lock();
      block_ = nullptr;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::function<void()> block_;  // null: idle
};

// Those that are idle, as many as once ran together; they end with the process.
class BlockThreads {
 public:
  static BlockThreads& Of() {
    static auto* const threads = new BlockThreads;
    return *threads;
  }
  BlockThread* Take() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (idle_.empty()) return new BlockThread;
    BlockThread* const thread = idle_.back();
    idle_.pop_back();
    return thread;
  }
  void GiveBack(BlockThread* thread) {
    const std::lock_guard<std::mutex> lock(mutex_);
    idle_.push_back(thread);
  }

 private:
  std::mutex mutex_;
  std::vector<BlockThread*> idle_;
};

// See staged_protocol.h.
class HostBlock {
 public:
  HostBlock(const staged::Place& at, const staged::Arithmetic* arithmetic, int index)
      : at_(at), arithmetic_(arithmetic), index_(index) {
    if (arithmetic == nullptr) return;
    reduce_ = ReduceOf(*arithmetic);
    check_ = CheckOf(*arithmetic);
  }

  bool Begin() { return Load(staged::LeftOf(at_)) == 0 && !MustLeave(); }
  template <typename Fn>
  bool Wait(int n, Fn level) {
    for (int k = 0; k < n; ++k) {
      const staged::Level mine = level(k);
      if (mine.counter != nullptr && !Spin(&mine.counter->value, mine.value)) return false;
    }
    return !MustLeave();
  }
  void Signal(staged::Level first, staged::Level second = {}) {
    for (const staged::Level& level : {first, second}) {
      if (level.counter == nullptr) continue;
      std::atomic_ref<uint64_t>(level.counter->value).store(level.value, std::memory_order_release);
    }
  }
  template <typename Fn>
  void Tell(int n, Fn level) {
    for (int i = 0; i < n; ++i) Signal(level(i));
  }
  void Fail() { SetWords(0, at_.ranks); }
  // Another thread block may set LeftOf.
  uint64_t Load(const uint64_t* from) { return std::atomic_ref<uint64_t>(*const_cast<uint64_t*>(from)).load(); }
  void Store(uint64_t* to, uint64_t value) { *to = value; }
  void Copy(const staged::Piece* pieces, int n, bool from_ring) {
    const bool check = from_ring && arithmetic_ != nullptr && arithmetic_->nonfinite != nullptr;
    for (int k = 0; k < n; ++k) {
      const void* const in = pieces[k].from;
      void* const out = pieces[k].to;
      if (check) {
        Found(check_(&in, 1, &out, 1, pieces[k].bytes / SizeOf(static_cast<DType>(arithmetic_->out_type))));
      } else {
        std::memcpy(out, in, pieces[k].bytes);
      }
    }
  }
  void Reduce(const char* const* from, int n, char* to, char* also, uint64_t count) {
    void* out[2];
    int outs = 0;
    if (to != nullptr) out[outs++] = to;
    if (also != nullptr) out[outs++] = also;
    const std::vector<const void*> in(from, from + n);
    Found(reduce_(in.data(), n, out, outs, count));
  }

  int thread() const { return 0; }
  int threads() const { return 1; }
  staged::PacketData Gather(const staged::RangeTable& in, uint64_t first, uint64_t n, uint64_t size) {
    staged::PacketData data = {};
    char* const bytes_of = reinterpret_cast<char*>(&data);
    for (uint64_t k = 0, bytes = size; k < n; ++k)
      std::memcpy(bytes_of + k * size, Locate(in, (first + k) * size, &bytes), size);
    return data;
  }
  void Scatter(const staged::RangeTable& out, uint64_t first, uint64_t n, uint64_t size,
               const staged::PacketData& data) {
    const char* const bytes_of = reinterpret_cast<const char*>(&data);
    for (uint64_t k = 0, bytes = size; k < n; ++k)
      std::memcpy(Locate(out, (first + k) * size, &bytes), bytes_of + k * size, size);
  }
  bool All(bool going_on) { return going_on; }
  void Put(staged::Packet* to, const staged::PacketData& data, uint32_t mark) { StorePacket(to, {data, mark}); }
  bool Receive(const staged::Packet* from, uint64_t stride, uint32_t mark, int ranks, int me,
               const staged::PacketData& own, staged::PacketData* data) {
    for (int r = 0; r < ranks; ++r) {
      staged::Packet packet{own, mark};
      const auto received = [&] {
        packet = LoadPacket(from + static_cast<uint64_t>(r) * stride);
        return packet.mark == mark;
      };
      if (r != me && !SpinUntil(received)) return false;
      data[r] = packet.data;
    }
    return true;
  }
  staged::PacketData ReducePacket(const staged::PacketData* data, uint64_t n) {
    std::vector<Whole> whole(static_cast<size_t>(at_.ranks));
    std::vector<const void*> in;
    for (size_t r = 0; r < whole.size(); ++r) in.push_back(&(whole[r].data = data[r]));
    Whole result;
    void* const to = &result;
    Found(reduce_(in.data(), at_.ranks, &to, 1, n));
    return result.data;
  }
  void CheckPacket(const staged::PacketData& data, uint64_t n) {
    Whole whole{data};
    const void* const in = &whole;
    void* const out = &whole;
    Found(check_(&in, 1, &out, 1, n));
  }

 private:
  struct alignas(uint64_t) Whole {  // as elements of any type lie
    staged::PacketData data = {};
  };
  void Found(bool nonfinite) {
    if (nonfinite && arithmetic_->nonfinite != nullptr) std::atomic_ref<uint32_t>(*arithmetic_->nonfinite).store(1);
  }
  bool Spin(uint64_t* counter, uint64_t target) {
    return SpinUntil([&] { return std::atomic_ref<uint64_t>(*counter).load(std::memory_order_acquire) >= target; });
  }
  template <typename Reached>
  bool SpinUntil(const Reached& reached) {
    for (int looks = 0; !reached(); ++looks) {
      if (MustLeave()) return false;
      if (looks < 100) {
        std::this_thread::yield();
      } else {
        std::this_thread::sleep_for(std::chrono::microseconds(50));
      }
    }
    return true;
  }
  void SetWords(int first_rank, int end_rank) {
    std::atomic_ref<uint32_t>(*at_.failed).store(1);
    for (int r = first_rank; r < end_rank; ++r) {
      for (int i = 0; i < staged::kAbortWords; ++i) std::atomic_ref<uint32_t>(*AbortWordOf(at_, r, i)).store(1);
    }
  }
  bool MustLeave() {
    if (std::atomic_ref<uint32_t>(*AbortWordOf(at_, at_.rank, index_)).load() == 0) return false;
    std::atomic_ref<uint64_t>(*LeftOf(at_)).store(1);
    SetWords(at_.rank, at_.rank + 1);
    return true;
  }

  const staged::Place& at_;
  const staged::Arithmetic* const arithmetic_;
  const int index_;  // of the thread block
  CpuReduce reduce_, check_;
};

// See staged_blocks.h.
class HostBlockReducer : public HostBlock {
 public:
  HostBlockReducer(const staged::BlockReduction& c, int index) : HostBlock(c.at, nullptr, index), c_(c) {}

  void Quantize(const char* from, uint64_t count, char* groups) {
    Run({.step = blocks::Pass::Step::kQuantize, .in = from, .out = groups, .count = count, .scale = c_.prescale});
  }
  void Reduce(const char* own, uint64_t count, const char* groups, uint64_t stride, char* publish, char* to) {
    const uint64_t bytes = blocks::GroupsOf(count) * blocks::kGroupBytes;
    std::vector<char> all(bytes * static_cast<uint64_t>(c_.at.ranks));
    for (uint64_t r = 0; r < static_cast<uint64_t>(c_.at.ranks); ++r) {
      if (r != static_cast<uint64_t>(c_.at.rank)) std::memcpy(all.data() + r * bytes, groups + r * stride, bytes);
    }
    Quantize(own, count, all.data() + static_cast<uint64_t>(c_.at.rank) * bytes);
    Run({.step = blocks::Pass::Step::kReduce,
         .in = all.data(),
         .out = publish,
         .count = count,
         .ins = c_.at.ranks,
         .stride = bytes,
         .scale = c_.postscale});
    Dequantize(publish, count, to);
  }
  void Dequantize(const char* groups, uint64_t count, char* to) {
    Run({.step = blocks::Pass::Step::kDequantize, .in = groups, .out = to, .count = count});
  }

 private:
  void Run(blocks::Pass pass) const {
    pass.format = c_.format;
    pass.dtype = c_.dtype;
    CpuRunBlocks(pass);
  }

  const staged::BlockReduction& c_;
};

}  // namespace

absl::Status FakeDevices::ReachTable(absl::string_view call, const staged::RangeTable& table) {
  absl::Status status;
  for (int k = 0; k < table.ranges; ++k) {
    status.Update(Reach(call, table.data[k], table.end[k] - (k == 0 ? 0 : table.end[k - 1])));
  }
  return status;
}

absl::Status FakeDevices::ReachPlace(absl::string_view call, const staged::Place& at, bool words) {
  const size_t of_words = static_cast<size_t>(at.ranks) * staged::kAbortWords * staged::kLine;
  absl::Status status = Reach(call, at.ring, words ? of_words : staged::RingBytes(at.ranks));
  status.Update(Reach(call, at.counts, staged::kCounts * sizeof(uint64_t)));
  status.Update(Reach(call, at.failed, sizeof(uint32_t)));
  return status;
}

absl::StatusOr<int> FakeDevices::StagedBlocks() {
  if (absl::Status s = Enter("StagedBlocks", ThreadDevice()); !s.ok()) return s;
  return staged_blocks(ThreadDevice());
}

void FakeDevices::RunThreadBlocks(int device, int blocks, const std::function<void(int index)>& run) {
  const auto count = [&](int change) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return blocks_running_[static_cast<size_t>(device)] += change;
  };
  if (const int running = count(blocks); running > staged_blocks(device)) {
    Complain("RunStaged", absl::StrCat(running, " thread blocks at once")).IgnoreError();
  }
  std::vector<BlockThread*> threads;
  for (int index = 1; index < blocks; ++index) {
    threads.push_back(BlockThreads::Of().Take());
    threads.back()->Start([&run, index] { run(index); });
  }
  run(0);
  for (BlockThread* const thread : threads) {
    thread->Wait();
    BlockThreads::Of().GiveBack(thread);
  }
  count(-blocks);
}

absl::Status FakeDevices::EnqueueThreadBlocks(void* stream, int blocks, std::function<void(int index)> run) {
  Enqueue(stream,
          [this, device = ThreadDevice(), blocks, run = std::move(run)] { RunThreadBlocks(device, blocks, run); });
  return absl::OkStatus();
}

absl::Status FakeDevices::RunStaged(const staged::Collective& collective, void* stream) {
  absl::Status status = EnterOn("RunStaged", stream);
  status.Update(ReachPlace("RunStaged", collective.at, collective.move == staged::Move::kAllReduceFetched));
  status.Update(ReachTable("RunStaged", collective.in));
  status.Update(ReachTable("RunStaged", collective.out));
  status.Update(Reach("RunStaged", collective.arithmetic.nonfinite, sizeof(uint32_t)));
  status.Update(Reach("RunStaged", collective.chunk.fetched,
                      collective.chunk.stride * static_cast<uint64_t>(collective.at.ranks - 1)));
  if (!status.ok()) return status;
  Enqueue(stream, [this, device = ThreadDevice(), c = std::make_shared<staged::Collective>(collective)] {
    const auto run = [&](int index) {
      HostBlock block(c->at, &c->arithmetic, index);
      staged::RunCollective(block, *c, index);
    };
    if (c->move == staged::Move::kAllReduceFetched) {  // nobody waits
      for (int index = 0; index < BlocksOf(*c); ++index) run(index);
    } else {
      RunThreadBlocks(device, BlocksOf(*c), run);
    }
  });
  return absl::OkStatus();
}

absl::Status FakeDevices::RunStaged(const staged::Exchange& exchange, void* stream) {
  absl::Status status = EnterOn("RunStaged", stream);
  status.Update(ReachPlace("RunStaged", exchange.at));
  status.Update(ReachTable("RunStaged", exchange.in));
  status.Update(ReachTable("RunStaged", exchange.out));
  if (!status.ok()) return status;
  const auto run = [e = std::make_shared<staged::Exchange>(exchange)](int index) {
    HostBlock block(e->at, nullptr, index);
    staged::RunExchange(block, *e, index);
  };
  return EnqueueThreadBlocks(stream, BlocksOf(exchange), run);
}

absl::Status FakeDevices::RunStaged(const staged::Turn& turn, void* stream) {
  absl::Status status = EnterOn("RunStaged", stream);
  status.Update(ReachPlace("RunStaged", turn.at, true));
  status.Update(Reach("RunStaged", turn.counters, staged::TurnCounterBytes(turn.at.ranks)));
  status.Update(Reach("RunStaged", turn.counts, staged::kTurnCounts * sizeof(uint64_t)));
  if (!status.ok()) return status;
  return EnqueueThreadBlocks(stream, 1, [turn](int index) {
    HostBlock block(turn.at, nullptr, index);
    staged::RunTurn(block, turn);
  });
}

absl::Status FakeDevices::RunStaged(const staged::Meeting& meeting, void* stream) {
  absl::Status status = EnterOn("RunStaged", stream);
  status.Update(ReachPlace("RunStaged", meeting.at, true));
  status.Update(Reach("RunStaged", meeting.met, sizeof(uint64_t)));
  if (!status.ok()) return status;
  return EnqueueThreadBlocks(stream, 1, [meeting](int index) {
    HostBlock block(meeting.at, nullptr, index);
    staged::RunMeeting(block, meeting);
  });
}

absl::Status FakeDevices::RunStaged(const staged::BlockReduction& reduction, void* stream) {
  absl::Status status = EnterOn("RunStaged", stream);
  status.Update(ReachPlace("RunStaged", reduction.at));
  for (const char* array : {reduction.in, static_cast<const char*>(reduction.out)}) {
    status.Update(Reach("RunStaged", array, reduction.count * static_cast<uint64_t>(reduction.size)));
  }
  if (!status.ok()) return status;
  return EnqueueThreadBlocks(stream, BlocksOf(reduction), [reduction](int index) {
    HostBlockReducer block(reduction, index);
    staged::RunBlockReduction(block, reduction, index);
  });
}

}  // namespace ddp::testing
