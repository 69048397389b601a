// SPDX-License-Identifier: Apache-2.0
// One rank of a job whose survivors go on. All work together in rounds; the victims come to their ends one after the
// other, each at a random moment of the group that it is in. Whoever survives prints the error, "code: message", makes
// a smaller group (or lets Context::Recover make it), and goes on in it for some rounds; then it prints "done", in a
// training with the step that it went on from and a hash of the final state. A victim that is only stopped prints its
// error when it wakes up, and ends. --together=round: all victims come to their ends after one round; =meeting: the
// first one does, and the others when they have heard of it and are waited for.
#include <algorithm>
#include <functional>
#include <iterator>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "tests/fault/flags.h"
#include "tests/fault/training.h"

namespace ddp::testing {
namespace {

constexpr int kRoundsWithoutFault = 150;
constexpr int kRoundsAfterFault = 20;
constexpr int kRoundOfEnds = 3;  // where several ranks come to their ends together
constexpr absl::Duration kWaitedFor = absl::Milliseconds(300);
constexpr float kMark = 77;
constexpr size_t kSampled = 1009;  // where it takes too long to check all elements: one of so many

// What a job does in rounds, in one group after the other. `members`: the group's ranks, as ranks of the world.
class Task {
 public:
  virtual ~Task() = default;
  virtual absl::Status Begin(ProcessGroup& world) = 0;
  // DataLoss where a result is wrong.
  virtual absl::Status Round(const std::vector<int>& members) = 0;
  virtual absl::Status GoOnIn(ProcessGroup& group) = 0;
  // Writes to the memory that operations were at when the group failed; then tells whether it is still as written.
  virtual void Mark() = 0;
  virtual absl::Status CheckMark() const = 0;
  virtual std::string Result() const { return ""; }
};

absl::Status CheckMarked(const float* data, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    if (data[i] != kMark) return absl::DataLossError(absl::StrCat("a late rank has written to element ", i));
  }
  return absl::OkStatus();
}

// Operations under way together.
class Together {
 public:
  void Add(Work work) { works_.push_back(std::move(work)); }
  // Waits for all; the first error.
  absl::Status Wait() {
    for (Work& work : works_) first_.Update(work.Wait());
    return first_;
  }

 private:
  std::vector<Work> works_;
  absl::Status first_;
};

// All-reduces, three at a time. "hot": of memory that is reduced where it lies; "bulk": of so much of it that there is
// hardly time for anything else: until a fault, samples of sums of zeros are checked; "staged", "inline": of much and
// of little other memory; "split": as "hot", in a group that was split off.
class Reductions final : public Task {
 public:
  Reductions(int rank, const std::string& kind)
      : rank_(rank),
        split_(kind == "split"),
        hot_(split_ || kind == "hot" || kind == "bulk"),
        checked_(kind != "bulk") {
    count_ = kind == "bulk" ? 6'000'000 : hot_ ? 450'000 : kind == "staged" ? 90'000 : 150;
  }

  absl::Status Begin(ProcessGroup& world) override {
    if (absl::Status s = WorkIn(world); !s.ok()) return s;
    if (!hot_) ordinary_.resize(count_);
    if (!hot_) return absl::OkStatus();
    absl::StatusOr<Allocation> memory = group_->Allocate(count_ * sizeof(float), Device{});
    if (memory.ok()) allocation_ = *std::move(memory);
    return memory.status();
  }
  absl::Status Round(const std::vector<int>& members) override {
    ++round_;
    const auto value = [this](size_t i) { return static_cast<float>((i + static_cast<size_t>(round_)) % 50); };
    for (size_t i = 0; checked_ && i < count_; ++i) data()[i] = static_cast<float>(rank_ + 1) * value(i);
    Together works;
    for (size_t third = 0; third < 3; ++third) {
      const Buffer part{data() + third * count_ / 3, count_ / 3, DType::kFloat32, {}};
      works.Add(group_->AllReduce(part, part));
    }
    if (absl::Status s = works.Wait(); !s.ok()) return s;
    const int factor = std::accumulate(members.begin(), members.end(), static_cast<int>(members.size()));
    for (size_t i = 0; i < count_; i += checked_ ? 1 : kSampled) {
      if (data()[i] == (checked_ ? static_cast<float>(factor) * value(i) : 0)) continue;
      return absl::DataLossError(absl::StrCat("element ", i, " is ", data()[i], " in round ", round_));
    }
    return absl::OkStatus();
  }
  absl::Status GoOnIn(ProcessGroup& group) override {
    if (absl::Status s = WorkIn(group); !s.ok()) return s;
    round_ = 0;
    checked_ = true;
    return hot_ ? group_->Register(allocation_) : absl::OkStatus();
  }
  void Mark() override { std::fill_n(data(), count_, kMark); }
  absl::Status CheckMark() const override { return CheckMarked(data(), count_); }

 private:
  absl::Status WorkIn(ProcessGroup& group) {
    group_ = &group;
    if (!split_) return absl::OkStatus();
    absl::StatusOr<std::unique_ptr<ProcessGroup>> part = group.Split(0, group.rank());
    if (!part.ok()) return part.status();
    part_ = *std::move(part);
    group_ = part_.get();
    return absl::OkStatus();
  }
  float* data() const { return hot_ ? static_cast<float*>(allocation_.data()) : const_cast<float*>(ordinary_.data()); }

  const int rank_;
  const bool split_, hot_;
  bool checked_;
  size_t count_;
  ProcessGroup* group_ = nullptr;
  std::unique_ptr<ProcessGroup> part_;
  Allocation allocation_;
  std::vector<float> ordinary_;
  int round_ = 0;
};

// Messages around the ring of ranks, three at a time: one that travels in its envelope, and two that the receiver
// fetches, from memory of the group and from other memory.
class Messages final : public Task {
 public:
  explicit Messages(int rank) : rank_(rank), sent_(kCount), received_(kCount) {}

  absl::Status Begin(ProcessGroup& world) override {
    group_ = &world;
    absl::StatusOr<Allocation> memory = world.Allocate(kCount * sizeof(float), Device{});
    if (memory.ok()) allocation_ = *std::move(memory);
    return memory.status();
  }
  absl::Status Round(const std::vector<int>& members) override {
    ++round_;
    if (group_->size() == 1) return absl::OkStatus();
    const int n = group_->size(), next = (group_->rank() + 1) % n, last = (group_->rank() + n - 1) % n;
    const int from = members[static_cast<size_t>(last)];
    auto* const shared = static_cast<float*>(allocation_.data());
    std::fill_n(shared, kCount, Value(rank_));
    std::fill(sent_.begin(), sent_.end(), Value(rank_));
    std::fill(received_.begin(), received_.end(), 0.0f);
    const Buffer out[] = {Floats(sent_.data(), kShort), Floats(shared, kThird), Floats(sent_.data() + kThird, kThird)};
    const Buffer in[] = {Floats(received_.data(), kShort), Floats(received_.data() + kThird, kThird),
                         Floats(received_.data() + 2 * kThird, kThird)};
    Together works;
    for (int i = 0; i < 3; ++i) {
      works.Add(group_->Send(out[i], next, i));
      works.Add(group_->Recv(in[i], last, i));
    }
    if (absl::Status s = works.Wait(); !s.ok()) return s;
    for (const Buffer& buffer : in) {
      const auto* const data = static_cast<const float*>(buffer.data);
      for (size_t i = 0; i < buffer.count; ++i) {
        if (data[i] != Value(from)) return absl::DataLossError(absl::StrCat("element ", i, " is ", data[i]));
      }
    }
    return absl::OkStatus();
  }
  absl::Status GoOnIn(ProcessGroup& group) override {
    group_ = &group;
    round_ = 0;
    return group.Register(allocation_);
  }
  void Mark() override { std::fill(received_.begin(), received_.end(), kMark); }
  absl::Status CheckMark() const override { return CheckMarked(received_.data(), kCount); }

 private:
  static constexpr size_t kShort = 50, kThird = 100'000, kCount = 3 * kThird;

  static Buffer Floats(float* data, size_t count) { return {data, count, DType::kFloat32, {}}; }
  float Value(int rank) const { return static_cast<float>(1000 * rank + round_ % 1000); }

  const int rank_;
  ProcessGroup* group_ = nullptr;
  Allocation allocation_;
  std::vector<float> sent_, received_;
  int round_ = 0;
};

// Broadcasts, three at a time, from one root after the other: two that travel with the root's announcement, and a large
// one.
class Broadcasts final : public Task {
 public:
  explicit Broadcasts(int rank) : rank_(rank), data_(kCount) {}

  absl::Status Begin(ProcessGroup& world) override { return GoOnIn(world); }
  absl::Status Round(const std::vector<int>& members) override {
    const size_t root = static_cast<size_t>(++round_) % members.size();
    const float value = static_cast<float>(1000 * members[root] + round_ % 1000);
    std::fill(data_.begin(), data_.end(), members[root] == rank_ ? value : 0.0f);
    Together works;
    for (size_t i = 0; i < std::size(kEnds); ++i) {
      const size_t begin = i == 0 ? 0 : kEnds[i - 1];
      const Buffer part{data_.data() + begin, kEnds[i] - begin, DType::kFloat32, {}};
      works.Add(group_->Broadcast(part, static_cast<int>(root)));
    }
    if (absl::Status s = works.Wait(); !s.ok()) return s;
    for (size_t i = 0; i < kCount; ++i) {
      if (data_[i] != value) return absl::DataLossError(absl::StrCat("element ", i, " is ", data_[i]));
    }
    return absl::OkStatus();
  }
  absl::Status GoOnIn(ProcessGroup& group) override {
    group_ = &group;
    round_ = 0;
    return absl::OkStatus();
  }
  void Mark() override { std::fill(data_.begin(), data_.end(), kMark); }
  absl::Status CheckMark() const override { return CheckMarked(data_.data(), kCount); }

 private:
  static constexpr size_t kEnds[] = {2000, 2001, 60'000}, kCount = 60'000;

  const int rank_;
  ProcessGroup* group_ = nullptr;
  std::vector<float> data_;
  int round_ = 0;
};

// A training of DistributedDataParallel.
class Training final : public Task {
 public:
  explicit Training(int rank) : rank_(rank), momenta_(kTensors * kElements) {}

  absl::Status Begin(ProcessGroup& world) override {
    std::vector<Parameter> parameters;
    for (size_t t = 0; t < kTensors; ++t) {
      parameters.push_back({absl::StrCat("tensor", t), {}, Buffer{nullptr, kElements, DType::kFloat32, {}}, {}});
    }
    DdpOptions options;
    options.op = ReduceOp::kSum;
    options.bucket_bytes = kElements * sizeof(float);
    auto model = DistributedDataParallel::Create(world, parameters, options);
    if (model.ok()) model_ = *std::move(model);
    return model.status();
  }
  absl::Status Round(const std::vector<int>&) override {
    for (size_t t = kTensors; t-- > 0;) {
      for (size_t i = 0; i < kElements; ++i) {
        grad(t)[i] = Gradient(rank_, committed_, t * kElements + i, value(t)[i]);
      }
      model_->GradReady(t);
    }
    if (absl::Status s = model_->FinishBackward(); !s.ok()) return s;
    for (size_t t = 0; t < kTensors; ++t) {
      for (size_t i = 0; i < kElements; ++i) Update(grad(t)[i], &value(t)[i], &momenta_[t * kElements + i]);
    }
    ++committed_;
    return absl::OkStatus();
  }
  absl::Status GoOnIn(ProcessGroup& group) override {
    if (absl::Status s = model_->Rebind(group); !s.ok()) return s;
    std::vector<Buffer> state = {{momenta_.data(), momenta_.size(), DType::kFloat32, {}}};
    for (size_t t = 0; t < kTensors; ++t) state.push_back(model_->value(t));
    absl::StatusOr<int64_t> common = SyncState(group, committed_, state);
    if (!common.ok()) return common.status();
    committed_ = *common;
    absl::StrAppend(&result_, " at=", committed_);
    return absl::OkStatus();
  }
  void Mark() override {
    for (size_t t = 0; t < kTensors; ++t) std::fill_n(grad(t), kElements, kMark);
  }
  absl::Status CheckMark() const override {
    absl::Status status;
    for (size_t t = 0; t < kTensors; ++t) status.Update(CheckMarked(grad(t), kElements));
    return status;
  }
  std::string Result() const override {
    TrainingState state;
    for (size_t t = 0; t < kTensors; ++t) std::copy_n(value(t), kElements, state.values.data() + t * kElements);
    state.momenta = momenta_;
    return absl::StrCat(result_, " end=", committed_, " state=", Hash(state));
  }

 private:
  float* value(size_t tensor) const { return static_cast<float*>(model_->value(tensor).data); }
  float* grad(size_t tensor) const { return static_cast<float*>(model_->grad(tensor).data); }

  const int rank_;
  std::unique_ptr<DistributedDataParallel> model_;
  std::vector<float> momenta_;
  int64_t committed_ = 0;
  std::string result_;
};

class Survivor {
 public:
  explicit Survivor(const Flags& flags)
      : flags_(flags),
        rank_(flags.Number("rank")),
        how_(flags.Text("how")),
        together_(flags.Text("together")),
        random_(flags.Number("seed")) {
    members_.resize(static_cast<size_t>(flags.Number("size")));
    std::iota(members_.begin(), members_.end(), 0);
    for (absl::string_view word : absl::StrSplit(flags.Text("victims"), ',', absl::SkipEmpty())) {
      int victim = 0;
      if (absl::SimpleAtoi(word, &victim)) victims_.push_back(victim);
    }
  }

  absl::Status Run() {
    absl::StatusOr<std::shared_ptr<Store>> store = OpenStore(flags_);
    if (!store.ok()) return store.status();
    store_ = *store;
    absl::StatusOr<std::unique_ptr<Context>> context = Join(flags_, store_);
    if (!context.ok()) return context.status();
    if (absl::Status s = ShortenTimeout(flags_, (*context)->world()); !s.ok()) return s;
    // In this order, so that all go before the Context.
    std::unique_ptr<ProcessGroup> smaller;
    std::unique_ptr<Task> task = MakeTask();
    absl::Status status = task->Begin((*context)->world());
    while (status.ok()) {
      status = Rounds(*task);
      if (status.ok()) break;
      task->Mark();  // before a victim is woken
      Say(status);
      std::vector<int> failed;
      for (const int r : FailedRanks(status)) failed.push_back(members_[static_cast<size_t>(r)]);
      if (together_ == "meeting" && IsVictim()) {
        absl::SleepFor(kWaitedFor);
        EndBy(how_);
      }
      status = flags_.Number("recover") != 0 ? Recover(**context, *task)
                                             : Regroup(**context, status, failed, *task, &smaller);
    }
    if (status.ok()) Report(status, task->Result());
    return status;
  }

  // Prints an error, once.
  void Say(const absl::Status& error) {
    if (!error.ok() && error != said_) Report(error);
    said_ = error;
  }

 private:
  std::unique_ptr<Task> MakeTask() const {
    const std::string work = flags_.Text("work");
    if (work == "training") return std::make_unique<Training>(rank_);
    if (work == "broadcasts") return std::make_unique<Broadcasts>(rank_);
    if (work == "messages") return std::make_unique<Messages>(rank_);
    return std::make_unique<Reductions>(rank_, work);
  }

  // Until an error, or to the end of the job if no victim is left.
  absl::Status Rounds(Task& task) {
    const size_t losses = static_cast<size_t>(flags_.Number("size")) - members_.size();
    const bool slow = how_ == "slow" || how_ == "pause";
    if (together_.empty() && losses < victims_.size() && victims_[losses] == rank_) Arm();
    const bool endless = losses < victims_.size() && !slow;
    const int rounds = slow ? kRoundsWithoutFault : kRoundsAfterFault;
    for (int round = 0; endless || round < rounds; ++round) {
      if (how_ == "slow") Dawdle();
      const absl::Status status = task.Round(members_);
      const bool ends = together_ == "round" ? IsVictim() : together_ == "meeting" && victims_[0] == rank_;
      if (ends && round == kRoundOfEnds) EndBy(how_);  // also where another victim was faster
      if (!status.ok()) return status;
    }
    no_more_pauses_();
    return absl::OkStatus();
  }

  bool IsVictim() const { return std::find(victims_.begin(), victims_.end(), rank_) != victims_.end(); }

  // The end comes from another thread, whatever this one is at. A pause is one of the rounds: LeakSanitizer, which
  // looks at a process that exits, does not wake from one.
  void Arm() {
    static std::mutex mutex;
    static bool over = false;
    std::thread([how = how_, delay_us = flags_.Number("delay_us")] {
      absl::SleepFor(absl::Microseconds(delay_us));
      const std::lock_guard<std::mutex> lock(mutex);
      if (how != "pause" || !over) EndBy(how == "pause" ? "stop" : how);
    }).detach();
    no_more_pauses_ = [] {
      const std::lock_guard<std::mutex> lock(mutex);
      over = true;
    };
  }

  // The victim most of all.
  void Dawdle() {
    const int most_ms = IsVictim() && random_() % 30 == 0 ? 150 : random_() % 30 == 0 ? 15 : 0;
    if (most_ms > 0) absl::SleepFor(absl::Milliseconds(random_() % static_cast<unsigned>(most_ms)));
  }

  // Goes on without `failed`, and without who does not come either.
  absl::Status Regroup(Context& context, absl::Status cause, std::vector<int> failed, Task& task,
                       std::unique_ptr<ProcessGroup>* group) {
    const std::string wake = flags_.Text("wake");
    while (true) {
      if (failed.empty()) return cause;
      for (const int rank : failed) members_.erase(std::remove(members_.begin(), members_.end(), rank), members_.end());
      if (std::find(members_.begin(), members_.end(), rank_) == members_.end()) {
        if (wake == "wait") store_->Add("awake", 1, absl::Now() + absl::Seconds(30)).IgnoreError();
        return cause;  // it is about us
      }
      if (wake == "wait") {
        if (absl::Status s = WaitForTheLate(); !s.ok()) return s;
        if (absl::Status s = task.CheckMark(); !s.ok()) return s;
      }
      auto smaller = context.NewGroup(members_, absl::Now() + absl::Seconds(flags_.Number("patience", 20)));
      if (!smaller.ok()) {
        cause = smaller.status();
        Say(cause);
        failed = FailedRanks(cause);
        continue;
      }
      if (absl::Status s = task.GoOnIn(**smaller); !s.ok()) return s;
      *group = *std::move(smaller);  // the earlier one is let go
      return absl::OkStatus();
    }
  }

  // The same by one call, which finds out by itself who is left.
  absl::Status Recover(Context& context, Task& task) {
    if (absl::Status s = context.Recover(absl::Seconds(flags_.Number("patience", 20))); !s.ok()) return s;
    ProcessGroup& world = context.world();
    std::vector<int32_t> members(static_cast<size_t>(world.size()));
    int32_t mine = rank_;
    const Buffer in{&mine, 1, DType::kInt32, {}}, all{members.data(), members.size(), DType::kInt32, {}};
    if (absl::Status s = world.AllGather(in, all).Wait(); !s.ok()) return s;
    members_.assign(members.begin(), members.end());
    return task.GoOnIn(world);
  }

  // Until the victim has woken up, and has left the library.
  absl::Status WaitForTheLate() {
    const absl::Time deadline = absl::Now() + absl::Seconds(40);
    while (true) {
      absl::StatusOr<int64_t> awake = store_->Add("awake", 0, deadline);
      if (!awake.ok()) return awake.status();
      if (*awake > 0) return absl::OkStatus();
      if (absl::Now() > deadline) return absl::DeadlineExceededError("the victim does not wake up");
      absl::SleepFor(absl::Milliseconds(5));
    }
  }

  const Flags& flags_;
  const int rank_;
  const std::string how_, together_;
  std::function<void()> no_more_pauses_ = [] {};
  std::minstd_rand random_;
  std::vector<int> members_, victims_;
  std::shared_ptr<Store> store_;
  absl::Status said_;
};

}  // namespace
}  // namespace ddp::testing

int main(int argc, char** argv) {
  const ddp::testing::Flags flags(argc, argv);
  ddp::testing::DumpNoCore();
  ddp::testing::Survivor survivor(flags);
  const absl::Status status = survivor.Run();
  survivor.Say(status);
  return status.ok() ? 0 : 1;
}
