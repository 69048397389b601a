// SPDX-License-Identifier: Apache-2.0
// PowerSGD: see CreatePowerSgdHook. The arithmetic is in low_rank.h, on the device that the gradients are on; the host
// waits for none of it.
#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ddp/comm_hook.h"
#include "libddp/base/exact_text.h"
#include "libddp/comm/base/exchange.h"
#include "libddp/device/buffer_ops.h"
#include "libddp/device/low_rank.h"
#include "libddp/reducer/scratch.h"

namespace ddp {
namespace {

uint64_t Hash(absl::string_view text, uint64_t seed) {
  uint64_t hash = seed ^ 0xcbf29ce484222325u;
  for (const char c : text) hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001b3u;
  return hash;
}

// One parameter's state, by its name. A step works on one half of each pair of the matrix; it becomes what is kept only
// if the whole step's result is finite, because a program skips a step whose result is not.
struct State {
  size_t count() const { return matrix.rows * matrix.columns; }

  LowRankMatrix matrix;
  std::shared_ptr<void> memory;
};

class PowerSgdHook final : public CommHook {
 public:
  explicit PowerSgdHook(const PowerSgdOptions& options) : options_(options) {}

  std::string name() const override {
    return absl::StrCat("power_sgd(rank=", options_.rank, ", start_step=", options_.start_step,
                        ", min_ratio=", ExactText(options_.min_ratio), ", warm_start=", options_.warm_start,
                        ", error_feedback=", options_.error_feedback, ", seed=", options_.seed, ")");
  }
  int rounds() const override { return 2; }

  absl::Status CanCapture() const override {
    if (next_step_ >= options_.start_step) return absl::OkStatus();
    return absl::FailedPreconditionError(
        absl::StrCat("its first ", options_.start_step, " steps are not compressed; run them before"));
  }
  absl::Status Prepare(ProcessGroup& group, absl::Span<const GradBucket> buckets) override;
  void Reset() override {
    scratch_ = Scratch();
    states_.clear();
    messages_.clear();
    words_.reset();
    next_step_ = 0;
  }
  Work Start(ProcessGroup& group, const GradBucket& bucket, int round) override;
  absl::Status Finish(const GradBucket& bucket) override;

 private:
  // A bucket's messages: in the first, gradients that are not compressed and then every P; in the second every Q.
  struct Messages {
    std::vector<size_t> whole, compressed;  // indices in GradBucket::gradients
    std::vector<State*> states;             // of what is compressed
    Buffer first, second;
  };

  absl::Status Layout(absl::Span<const GradBucket> buckets);
  bool Compresses(const GradBucket::Gradient& gradient) const;
  bool InFull(const GradBucket& bucket) const { return bucket.step < options_.start_step; }
  absl::Status Fit(const GradBucket::Gradient& gradient, Device device, State& state) const;
  static Buffer Part(const Buffer& whole, size_t begin, size_t count) {
    return {static_cast<char*>(whole.data) + begin * SizeOf(whole.dtype), count, whole.dtype, whole.device};
  }
  static size_t Room(const Buffer& b) { return Scratch::Room(b.count * SizeOf(b.dtype)); }
  static absl::Status CopyWhole(const GradBucket& bucket, const Messages& messages, bool to_message);
  absl::Status Run(LowRankPass pass, const GradBucket& bucket, const Messages& messages);

  // Where the gradients are: how many steps have been kept, and whether a result of this step is not finite.
  uint32_t* kept() const { return static_cast<uint32_t*>(words_.get()); }
  uint32_t* nonfinite() const { return kept() + 1; }

  const PowerSgdOptions options_;
  std::map<std::string, State> states_;  // of the parameters that the buckets compress
  std::vector<Messages> messages_;       // by bucket
  std::shared_ptr<void> words_;
  int64_t next_step_ = 0;
  Scratch scratch_;
};

bool PowerSgdHook::Compresses(const GradBucket::Gradient& gradient) const {
  if (gradient.shape.size() < 2 || gradient.count == 0) return false;
  const double rows = static_cast<double>(gradient.shape[0]);
  const double columns = static_cast<double>(gradient.count) / rows;
  return (rows + columns) * options_.rank * options_.min_ratio <= rows * columns;
}

// Begins anew if the state is another matrix's.
absl::Status PowerSgdHook::Fit(const GradBucket::Gradient& gradient, Device device, State& state) const {
  LowRankMatrix& a = state.matrix;
  const size_t rows = static_cast<size_t>(gradient.shape[0]);
  if (state.memory != nullptr && a.rows == rows && state.count() == gradient.count) return absl::OkStatus();
  state = State{};
  a.rows = rows;
  a.columns = gradient.count / rows;
  a.rank = std::min({static_cast<size_t>(options_.rank), a.rows, a.columns});
  size_t floats = 0;
  const auto take = [&](size_t count) { return std::exchange(floats, floats + count); };
  const size_t error = take(gradient.count), other = options_.error_feedback ? take(gradient.count) : error;
  const size_t q[] = {take(a.rank * a.columns), take(a.rank * a.columns)}, p = take(a.rank * a.rows);
  const size_t partials = IsGpu(device) ? take(LowRankChunks(a.rows) * a.rank * a.columns) : p;
  absl::StatusOr<std::shared_ptr<void>> memory = AllocateOn(device, floats * sizeof(float));
  if (!memory.ok()) return memory.status();
  state.memory = *std::move(memory);
  auto* const base = static_cast<float*>(state.memory.get());
  a.errors[0] = base + error;
  a.errors[1] = base + other;
  a.q[0] = base + q[0];
  a.q[1] = base + q[1];
  a.p = base + p;
  a.partials = base + partials;
  return absl::OkStatus();
}

absl::Status PowerSgdHook::Prepare(ProcessGroup& group, absl::Span<const GradBucket> buckets) {
  absl::Status made;
  try {
    made = Layout(buckets);
  } catch (const std::bad_alloc&) {
    made = absl::ResourceExhaustedError(absl::StrCat(name(), ": no memory left for its state"));
  }
  if (absl::Status s = Agree(group, made); !s.ok()) return s;
  size_t bytes = 0;
  for (const Messages& m : messages_) bytes += Room(m.first) + Room(m.second);
  if (absl::Status s = scratch_.Reserve(group, bytes, buckets.empty() ? Device{} : buckets[0].buffer.device); !s.ok()) {
    return s;
  }
  for (const GradBucket& bucket : buckets) {
    Messages& m = messages_[bucket.index];
    for (Buffer* const message : {&m.first, &m.second}) *message = scratch_.Take(message->dtype, message->count);
    size_t p = 0, q = 0;
    for (const size_t g : m.whole) p += bucket.gradients[g].count;
    for (State* const state : m.states) {
      LowRankMatrix& a = state->matrix;
      a.p_message = Part(m.first, std::exchange(p, p + a.rank * a.rows), 0).data;
      a.q_message = Part(m.second, std::exchange(q, q + a.rank * a.columns), 0).data;
    }
  }
  return absl::OkStatus();
}

// Makes the states, and the messages but for their memory. Nothing changes in the case of an error.
absl::Status PowerSgdHook::Layout(absl::Span<const GradBucket> buckets) {
  if (options_.rank < 1 || options_.start_step < 0 || !(options_.min_ratio > 0)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "CreatePowerSgdHook: ", name(), ": rank must be 1 or more, start_step 0 or more, min_ratio above 0"));
  }
  std::vector<Messages> all_messages(buckets.size());
  std::map<std::string, State> states;  // what no bucket has any more is dropped
  for (const GradBucket& bucket : buckets) {
    if (bucket.buffer.dtype == DType::kFloat64) {
      return absl::InvalidArgumentError(absl::StrCat("CreatePowerSgdHook: '", bucket.gradients[0].name,
                                                     "' is float64; only float32 and 16-bit gradients are compressed"));
    }
    const Device device = bucket.buffer.device;
    if (words_ == nullptr) {
      absl::StatusOr<std::shared_ptr<void>> words = AllocateOn(device, 2 * sizeof(uint32_t));
      if (!words.ok()) return words.status();
      words_ = *std::move(words);
    }
    Messages& messages = all_messages[bucket.index];
    size_t first = 0, second = 0;
    for (size_t g = 0; g < bucket.gradients.size(); ++g) {
      const GradBucket::Gradient& gradient = bucket.gradients[g];
      if (!Compresses(gradient)) {
        messages.whole.push_back(g);
        first += gradient.count;
        continue;
      }
      messages.compressed.push_back(g);
      const auto known = states_.find(gradient.name);
      State& state = states[gradient.name] = known == states_.end() ? State{} : known->second;
      if (absl::Status s = Fit(gradient, device, state); !s.ok()) return s;
      messages.states.push_back(&state);
      first += state.matrix.rank * state.matrix.rows;
      second += state.matrix.rank * state.matrix.columns;
    }
    messages.first = {nullptr, first, bucket.buffer.dtype, device};
    messages.second = {nullptr, second, bucket.buffer.dtype, device};
  }
  messages_ = std::move(all_messages);
  states_ = std::move(states);
  return absl::OkStatus();
}

Work PowerSgdHook::Start(ProcessGroup& group, const GradBucket& bucket, int round) {
  const Messages& messages = messages_[bucket.index];
  if (InFull(bucket)) {
    if (round > 0) return Work();
    return group.AllReduce(bucket.buffer, bucket.buffer, bucket.reduce, bucket.stream);
  }
  absl::Status status;
  if (bucket.index == 0 && round == 0) {
    const Buffer word = {nonfinite(), 1, DType::kInt32, bucket.buffer.device};
    status = Zero({&word, 1}, bucket.stream);
  }
  const Buffer& message = round == 0 ? messages.first : messages.second;
  if (message.count == 0) return status;
  if (round == 0 && status.ok()) status = CopyWhole(bucket, messages, /*to_message=*/true);
  if (status.ok()) status = Run(round == 0 ? LowRankPass::kMakeP : LowRankPass::kMakeQ, bucket, messages);
  if (!status.ok()) return status;
  return group.AllReduce(message, message, bucket.reduce, bucket.stream);
}

// The gradients that are not compressed, to the first message or back.
absl::Status PowerSgdHook::CopyWhole(const GradBucket& bucket, const Messages& messages, bool to_message) {
  std::vector<Buffer> gradients;
  size_t count = 0;
  for (const size_t g : messages.whole) {
    gradients.push_back(Part(bucket.buffer, bucket.gradients[g].offset, bucket.gradients[g].count));
    count += bucket.gradients[g].count;
  }
  const Buffer message = Part(messages.first, 0, count);
  return to_message ? CopyScaled(gradients, {&message, 1}, 1, bucket.stream)
                    : CopyScaled({&message, 1}, gradients, 1, bucket.stream);
}

absl::Status PowerSgdHook::Run(LowRankPass pass, const GradBucket& bucket, const Messages& messages) {
  std::vector<LowRankMatrix> matrices;
  for (size_t k = 0; k < messages.compressed.size(); ++k) {
    const GradBucket::Gradient& gradient = bucket.gradients[messages.compressed[k]];
    LowRankMatrix& a = matrices.emplace_back(messages.states[k]->matrix);
    a.gradient = Part(bucket.buffer, gradient.offset, gradient.count).data;
    a.random = Hash(gradient.name, options_.seed);
  }
  const LowRankStep step = {.warm_start = options_.warm_start,
                            .error_feedback = options_.error_feedback,
                            .share = static_cast<float>(bucket.share),
                            .kept = kept(),
                            .nonfinite = nonfinite()};
  return RunLowRank(pass, bucket.buffer.dtype, step, matrices, bucket.buffer.device, bucket.stream);
}

absl::Status PowerSgdHook::Finish(const GradBucket& bucket) {
  if (bucket.is_last) next_step_ = bucket.step + 1;
  if (InFull(bucket)) return absl::OkStatus();
  const Messages& messages = messages_[bucket.index];
  absl::Status status = CopyWhole(bucket, messages, /*to_message=*/false);
  if (status.ok()) status = Run(LowRankPass::kDecompress, bucket, messages);
  if (status.ok()) status = CheckFinite({&bucket.buffer, 1}, nonfinite(), bucket.stream);
  // All ranks have the same results, so all of them keep a step or none does.
  if (status.ok() && bucket.is_last) status = Run(LowRankPass::kKeep, bucket, {});
  return status;
}

}  // namespace

std::shared_ptr<CommHook> CreatePowerSgdHook(const PowerSgdOptions& options) {
  return std::make_shared<PowerSgdHook>(options);
}

}  // namespace ddp
