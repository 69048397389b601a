// PowerSGD: see CreatePowerSgdHook.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <new>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ddp/comm_hook.h"
#include "libddp/base/exact_text.h"
#include "libddp/comm/base/exchange.h"
#include "libddp/device/buffer_ops.h"
#include "libddp/reducer/scratch.h"

namespace ddp {
namespace {

// A matrix in row-major order, borrowed.
struct Matrix {
  float* data;
  size_t rows, columns;
  float* row(size_t i) const { return data + i * columns; }
};

// The same order of additions everywhere: sixteen partial sums, which the compiler keeps in vectors.
float Dot(const float* a, const float* b, size_t n) {
  constexpr size_t kParts = 16;
  float parts[kParts] = {};
  size_t i = 0;
  for (; i + kParts <= n; i += kParts) {
    for (size_t k = 0; k < kParts; ++k) parts[k] += a[i + k] * b[i + k];
  }
  float sum = 0;
  for (; i < n; ++i) sum += a[i] * b[i];
  for (const float part : parts) sum += part;
  return sum;
}

void AddScaled(float* to, const float* from, float factor, size_t n) {
  for (size_t i = 0; i < n; ++i) to[i] += factor * from[i];
}

// Multiplies a row by the power of two that brings its largest element to between 1 and 2, so that no square of an
// element overflows or vanishes. A row that is not finite becomes NaN altogether.
void Normalize(float* row, size_t n) {
  float largest = 0;
  bool finite = true;
  for (size_t j = 0; j < n; ++j) {
    finite &= std::isfinite(row[j]);
    largest = std::max(largest, std::abs(row[j]));
  }
  if (!finite) std::fill_n(row, n, std::numeric_limits<float>::quiet_NaN());
  if (!finite || largest == 0) return;
  const int exponent = std::ilogb(largest);
  for (size_t j = 0; j < n; ++j) row[j] = std::scalbn(row[j], -exponent);
}

// Makes the rows orthonormal by the modified Gram-Schmidt method, applied twice for accuracy. A row that depends on
// earlier ones becomes zero: the rest of it is rounding error. What is not finite stays so, and with it the result.
void Orthonormalize(Matrix m) {
  for (size_t i = 0; i < m.rows; ++i) {
    float* const row = m.row(i);
    Normalize(row, m.columns);
    const float before = std::sqrt(Dot(row, row, m.columns));
    for (int pass = 0; pass < 2; ++pass) {
      for (size_t k = 0; k < i; ++k) AddScaled(row, m.row(k), -Dot(row, m.row(k), m.columns), m.columns);
    }
    const float after = std::sqrt(Dot(row, row, m.columns));
    const float scale = after <= 1e-5f * before ? 0 : 1 / after;
    for (size_t j = 0; j < m.columns; ++j) row[j] *= scale;
  }
}

uint64_t Hash(absl::string_view text, uint64_t seed) {
  uint64_t hash = seed ^ 0xcbf29ce484222325u;
  for (const char c : text) hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001b3u;
  return hash;
}

// One parameter's state, by its name. P and Q are stored transposed, one basis vector after the other. A step works on
// the next_ members; they replace the others only if the whole step's result is finite, because a program skips a step
// whose result is not.
struct State {
  size_t rows = 0, columns = 0, rank = 0;
  std::vector<float> error;       // what compression has lost so far; empty without error feedback
  std::vector<float> next_error;  // until Finish: M, the sum of gradient and error
  std::vector<float> p, q, next_q;
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

  absl::Status CanCapture() const override { return absl::FailedPreconditionError("it computes on the host"); }
  absl::Status Prepare(ProcessGroup& group, absl::Span<const GradBucket> buckets) override;
  void Reset() override {
    scratch_ = Scratch();
    states_.clear();
  }
  Work Start(ProcessGroup& group, const GradBucket& bucket, int round) override;
  absl::Status Finish(const GradBucket& bucket) override;

 private:
  // A bucket's messages: in the first, gradients that are not compressed and then every P; in the second every Q.
  struct Messages {
    std::vector<size_t> whole, compressed;  // indices in GradBucket::gradients
    Buffer first, second;
  };

  absl::Status Layout(absl::Span<const GradBucket> buckets);
  bool Compresses(const GradBucket::Gradient& gradient) const;
  bool InFull(const GradBucket& bucket) const { return bucket.step < options_.start_step; }
  State& StateOf(const GradBucket::Gradient& gradient);
  void PrepareQ(const GradBucket& bucket, const GradBucket::Gradient& gradient, State& state);
  static Buffer Part(const Buffer& whole, size_t begin, size_t count) {
    return {static_cast<char*>(whole.data) + begin * SizeOf(whole.dtype), count, whole.dtype, whole.device};
  }
  static size_t Room(const Buffer& b) { return Scratch::Room(b.count * SizeOf(b.dtype)); }
  static Buffer Floats(std::vector<float>& v) { return {v.data(), v.size(), DType::kFloat32, Device{}}; }
  absl::Status MakeP(const GradBucket& bucket, Messages& messages);
  absl::Status MakeQ(const GradBucket& bucket, Messages& messages);
  absl::Status Decompress(const GradBucket& bucket, const GradBucket::Gradient& gradient, State& state,
                          std::vector<float>& result);

  void KeepStep();

  const PowerSgdOptions options_;
  std::map<std::string, State> states_;  // of the parameters that the buckets compress
  std::vector<Messages> messages_;       // by bucket
  bool finite_ = true;                   // all results of this step so far
  Scratch scratch_;
};

bool PowerSgdHook::Compresses(const GradBucket::Gradient& gradient) const {
  if (gradient.shape.size() < 2 || gradient.count == 0) return false;
  const double rows = static_cast<double>(gradient.shape[0]);
  const double columns = static_cast<double>(gradient.count) / rows;
  return (rows + columns) * options_.rank * options_.min_ratio <= rows * columns;
}

State& PowerSgdHook::StateOf(const GradBucket::Gradient& gradient) {
  State& state = states_[gradient.name];
  const size_t rows = static_cast<size_t>(gradient.shape[0]);
  if (state.rows != rows || state.next_error.size() != gradient.count) {
    state = State{};
    state.rows = rows;
    state.columns = gradient.count / rows;
    state.rank = std::min({static_cast<size_t>(options_.rank), state.rows, state.columns});
    state.error.assign(options_.error_feedback ? gradient.count : 0, 0.0f);
    state.next_error.assign(gradient.count, 0.0f);
    state.p.assign(state.rank * state.rows, 0.0f);
    state.q.assign(state.rank * state.columns, 0.0f);
  }
  return state;
}

// An orthonormal Q to begin with: the last step's or, if that is zero (at first, or after a gradient of zeros) or not
// wanted, a random one that is the same on every rank. Its length would not matter to P's directions, but does to what
// 16 bits can hold.
void PowerSgdHook::PrepareQ(const GradBucket& bucket, const GradBucket::Gradient& gradient, State& state) {
  state.next_q = state.q;
  if (!options_.warm_start) std::fill(state.next_q.begin(), state.next_q.end(), 0.0f);
  const Matrix q{state.next_q.data(), state.rank, state.columns};
  Orthonormalize(q);
  std::mt19937_64 random(Hash(gradient.name, options_.seed + static_cast<uint64_t>(bucket.step)));
  for (size_t k = 0; k < q.rows; ++k) {
    float* const row = q.row(k);
    if (std::any_of(row, row + q.columns, [](float x) { return x != 0; })) continue;
    std::generate(row, row + q.columns,
                  [&] { return static_cast<float>(static_cast<double>(random() >> 11) * 0x1p-52 - 1); });
  }
  Orthonormalize(q);
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
  for (Messages& m : messages_) {
    for (Buffer* const message : {&m.first, &m.second}) *message = scratch_.Take(message->dtype, message->count);
  }
  return absl::OkStatus();
}

// Makes the states, and the messages but for their memory.
absl::Status PowerSgdHook::Layout(absl::Span<const GradBucket> buckets) {
  if (options_.rank < 1 || options_.start_step < 0 || !(options_.min_ratio > 0)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "CreatePowerSgdHook: ", name(), ": rank must be 1 or more, start_step 0 or more, min_ratio above 0"));
  }
  messages_.assign(buckets.size(), {});
  std::map<std::string, State> before = std::exchange(states_, {});  // what no bucket has any more is dropped
  for (const GradBucket& bucket : buckets) {
    if (bucket.buffer.dtype == DType::kFloat64) {
      return absl::InvalidArgumentError(absl::StrCat("CreatePowerSgdHook: '", bucket.gradients[0].name,
                                                     "' is float64; only float32 and 16-bit gradients are compressed"));
    }
    Messages& messages = messages_[bucket.index];
    size_t first = 0, second = 0;
    for (size_t g = 0; g < bucket.gradients.size(); ++g) {
      const GradBucket::Gradient& gradient = bucket.gradients[g];
      if (!Compresses(gradient)) {
        messages.whole.push_back(g);
        first += gradient.count;
        continue;
      }
      messages.compressed.push_back(g);
      if (auto known = before.extract(gradient.name)) states_.insert(std::move(known));
      const State& state = StateOf(gradient);
      first += state.rank * state.rows;
      second += state.rank * state.columns;
    }
    messages.first = {nullptr, first, bucket.buffer.dtype, bucket.buffer.device};
    messages.second = {nullptr, second, bucket.buffer.dtype, bucket.buffer.device};
  }
  return absl::OkStatus();
}

Work PowerSgdHook::Start(ProcessGroup& group, const GradBucket& bucket, int round) {
  Messages& messages = messages_[bucket.index];
  if (bucket.index == 0 && round == 0) finite_ = true;
  if (InFull(bucket)) {
    if (round > 0) return Work();
    return group.AllReduce(bucket.buffer, bucket.buffer, bucket.reduce, bucket.stream);
  }
  Buffer& message = round == 0 ? messages.first : messages.second;
  if (message.count == 0) return Work();
  absl::Status status = round == 0 ? MakeP(bucket, messages) : MakeQ(bucket, messages);
  if (!status.ok()) return status;
  return group.AllReduce(message, message, bucket.reduce, bucket.stream);
}

// M = gradient + error; P = M Q.
absl::Status PowerSgdHook::MakeP(const GradBucket& bucket, Messages& messages) {
  size_t at = 0;
  for (const size_t g : messages.whole) {
    const GradBucket::Gradient& gradient = bucket.gradients[g];
    const Buffer from = Part(bucket.buffer, gradient.offset, gradient.count);
    const Buffer to = Part(messages.first, at, gradient.count);
    if (absl::Status s = CopyScaled(from, to, 1, bucket.stream); !s.ok()) return s;
    at += gradient.count;
  }
  for (const size_t g : messages.compressed) {
    const GradBucket::Gradient& gradient = bucket.gradients[g];
    State& state = StateOf(gradient);
    const Buffer from = Part(bucket.buffer, gradient.offset, gradient.count), to = Floats(state.next_error);
    if (absl::Status s = CopyScaled(from, to, 1, bucket.stream); !s.ok()) return s;
    AddScaled(state.next_error.data(), state.error.data(), 1, state.error.size());
    PrepareQ(bucket, gradient, state);
    const Matrix m{state.next_error.data(), state.rows, state.columns};
    for (size_t k = 0; k < state.rank; ++k) {
      for (size_t i = 0; i < m.rows; ++i) {
        state.p[k * m.rows + i] = Dot(m.row(i), state.next_q.data() + k * m.columns, m.columns);
      }
    }
    const Buffer p = Floats(state.p), message = Part(messages.first, at, state.p.size());
    if (absl::Status s = CopyScaled(p, message, 1, bucket.stream); !s.ok()) return s;
    at += state.p.size();
  }
  return absl::OkStatus();
}

// P made orthonormal; Q = M' P.
absl::Status PowerSgdHook::MakeQ(const GradBucket& bucket, Messages& messages) {
  size_t at = 0, out = 0;
  for (const size_t g : messages.whole) at += bucket.gradients[g].count;
  for (const size_t g : messages.compressed) {
    State& state = StateOf(bucket.gradients[g]);
    const Buffer message = Part(messages.first, at, state.p.size()), p = Floats(state.p);
    if (absl::Status s = CopyScaled(message, p, 1, bucket.stream); !s.ok()) return s;
    at += state.p.size();
    Orthonormalize({state.p.data(), state.rank, state.rows});
    const Matrix m{state.next_error.data(), state.rows, state.columns};
    std::fill(state.next_q.begin(), state.next_q.end(), 0.0f);
    for (size_t i = 0; i < m.rows; ++i) {
      for (size_t k = 0; k < state.rank; ++k) {
        AddScaled(state.next_q.data() + k * m.columns, m.row(i), state.p[k * m.rows + i], m.columns);
      }
    }
    const Buffer q = Floats(state.next_q), to = Part(messages.second, out, state.next_q.size());
    if (absl::Status s = CopyScaled(q, to, 1, bucket.stream); !s.ok()) return s;
    out += state.next_q.size();
  }
  return absl::OkStatus();
}

// The result is P Q'; the error is what it lacks of this rank's M.
absl::Status PowerSgdHook::Decompress(const GradBucket& bucket, const GradBucket::Gradient& gradient, State& state,
                                      std::vector<float>& result) {
  result.assign(gradient.count, 0.0f);
  for (size_t i = 0; i < state.rows; ++i) {
    for (size_t k = 0; k < state.rank; ++k) {
      AddScaled(result.data() + i * state.columns, state.next_q.data() + k * state.columns, state.p[k * state.rows + i],
                state.columns);
    }
  }
  AddScaled(state.next_error.data(), result.data(), -static_cast<float>(bucket.share), result.size());
  const Buffer from = Floats(result), to = Part(bucket.buffer, gradient.offset, gradient.count);
  return CopyScaled(from, to, 1, bucket.stream);
}

absl::Status PowerSgdHook::Finish(const GradBucket& bucket) {
  if (InFull(bucket)) return absl::OkStatus();
  Messages& messages = messages_[bucket.index];
  size_t at = 0;
  for (const size_t g : messages.whole) {
    const GradBucket::Gradient& gradient = bucket.gradients[g];
    const Buffer from = Part(messages.first, at, gradient.count);
    const Buffer to = Part(bucket.buffer, gradient.offset, gradient.count);
    if (absl::Status s = CopyScaled(from, to, 1, bucket.stream); !s.ok()) return s;
    at += gradient.count;
  }
  size_t in = 0;
  std::vector<float> result;
  for (const size_t g : messages.compressed) {
    const GradBucket::Gradient& gradient = bucket.gradients[g];
    State& state = StateOf(gradient);
    const Buffer message = Part(messages.second, in, state.next_q.size()), q = Floats(state.next_q);
    if (absl::Status s = CopyScaled(message, q, 1, bucket.stream); !s.ok()) return s;
    in += state.next_q.size();
    if (absl::Status s = Decompress(bucket, gradient, state, result); !s.ok()) return s;
  }
  const absl::StatusOr<double> largest = Norm(bucket.buffer, NormKind::kMax, bucket.stream);
  if (!largest.ok()) return largest.status();
  finite_ &= std::isfinite(*largest);
  if (bucket.is_last && finite_) KeepStep();
  return absl::OkStatus();
}

// All ranks have the same results, so all of them keep a step or none does.
void PowerSgdHook::KeepStep() {
  for (auto& [name, state] : states_) {
    if (options_.error_feedback) state.error.swap(state.next_error);
    state.q.swap(state.next_q);
  }
}

}  // namespace

std::shared_ptr<CommHook> CreatePowerSgdHook(const PowerSgdOptions& options) {
  return std::make_shared<PowerSgdHook>(options);
}

}  // namespace ddp
