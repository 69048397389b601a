// SPDX-License-Identifier: Apache-2.0
// The rule that everything else serves: K ranks with batch B / K train as one rank with batch B, whatever the options.
//
// A sample is a number; its gradient of an element is a whole number, divisible by 12, that depends on sample,
// parameter and element. So means over the batch of 12 are exact in every type, and the parameters of K ranks and of
// one have to be equal bit for bit.
#include <algorithm>
#include <cmath>
#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ddp/context.h"
#include "ddp/distributed_data_parallel.h"
#include "tests/support/catch.h"
#include "tests/support/ddp_model.h"

namespace ddp::testing {
namespace {

constexpr int kBatch = 12;
constexpr int kTrainSteps = 3;

// One way to train. Every rank draws the same.
struct Setting {
  DdpOptions options;
  std::function<std::shared_ptr<CommHook>()> hook;
  DType dtype = DType::kFloat32;
  bool mixed = false;            // every third parameter has another type
  bool given_gradients = false;  // SetGrad in every step
  bool some_own = false;         // some gradients of the caller's,
  bool own_16bit = false;        // of another type than their values
  int micro_batches = 1;
  bool unused = false;
  bool unequal_batches = false;  // with weights
  bool join = false;
  bool unequal_steps = false;  // in the Join
  bool by_active = false;
  bool buffers = false;
  bool nonfinite = false;
  bool rebind = false;
  double norm = 0;      // clip by the norm of this order
  bool change = false;  // parameters are frozen and added half-way
  unsigned seed = 0;
  std::string text;
};

struct Option {
  const char* name;
  void (*turn)(Setting& s);
};

// Each by itself, and after that random pairs.
const Option kOptions[] = {
    {"bucket_bytes=1", [](Setting& s) { s.options.bucket_bytes = 1; }},
    {"bucket_bytes=3000", [](Setting& s) { s.options.bucket_bytes = 3000; }},
    {"bucket_bytes=auto", [](Setting& s) { s.options.bucket_bytes = DdpOptions::kAutoBucketBytes; }},
    {"default buckets", [](Setting& s) { s.options.bucket_bytes = DdpOptions::kDefaultBucketBytes; }},
    {"first_bucket_bytes", [](Setting& s) { s.options.first_bucket_bytes = 200; }},
    {"piece_bytes", [](Setting& s) { s.options.piece_bytes = 256; }},
    {"replan=false", [](Setting& s) { s.options.replan = false; }},
    {"op=kSum", [](Setting& s) { s.options.op = ReduceOp::kSum; }},
    {"weighted", [](Setting& s) { s.options.weighted = true; }},
    {"unequal batches", [](Setting& s) { s.options.weighted = s.unequal_batches = true; }},
    {"gradient_predivide_factor", [](Setting& s) { s.options.gradient_predivide_factor = 4; }},
    {"reduce_in_float32",
     [](Setting& s) {
       s.options.reduce_in_float32 = true;
       s.dtype = DType::kBFloat16;
     }},
    {"nonfinite", [](Setting& s) { s.nonfinite = true; }},
    {"float16", [](Setting& s) { s.dtype = DType::kFloat16; }},
    {"float64", [](Setting& s) { s.dtype = DType::kFloat64; }},
    {"mixed types", [](Setting& s) { s.mixed = true; }},
    {"SetGrad", [](Setting& s) { s.given_gradients = s.options.copy_gradients = true; }},
    {"Parameter::grad", [](Setting& s) { s.some_own = true; }},
    {"Parameter::grad of another type", [](Setting& s) { s.some_own = s.own_16bit = true; }},
    {"NoSync", [](Setting& s) { s.micro_batches = 3; }},
    {"unused=kDetect",
     [](Setting& s) {
       s.unused = true;
       s.options.unused = UnusedParameters::kDetect;
     }},
    {"static_graph", [](Setting& s) { s.unused = s.options.static_graph = true; }},
    {"hook all_reduce", [](Setting& s) { s.hook = CreateAllReduceHook; }},
    {"hook float16", [](Setting& s) { s.hook = [] { return CreateCompressionHook(DType::kFloat16); }; }},
    {"hook bfloat16", [](Setting& s) { s.hook = [] { return CreateCompressionHook(DType::kBFloat16); }; }},
    {"hook bfloat16 around all_reduce",
     [](Setting& s) { s.hook = [] { return CreateCompressionHook(DType::kBFloat16, CreateAllReduceHook()); }; }},
    {"hook float16 around PowerSGD before its start",
     [](Setting& s) {
       s.hook = [] { return CreateCompressionHook(DType::kFloat16, CreatePowerSgdHook({.start_step = 100})); };
     }},
    {"Join", [](Setting& s) { s.join = true; }},
    {"Join, unequal steps", [](Setting& s) { s.join = s.unequal_steps = true; }},
    {"Join, divide_by_active", [](Setting& s) { s.join = s.unequal_steps = s.by_active = true; }},
    {"buffers", [](Setting& s) { s.buffers = true; }},
    {"broadcast_buffers=false",
     [](Setting& s) {
       s.buffers = true;
       s.options.broadcast_buffers = false;
     }},
    {"broadcast_parameters=false", [](Setting& s) { s.options.broadcast_parameters = false; }},
    {"Rebind", [](Setting& s) { s.rebind = true; }},
    {"ClipGradNorm", [](Setting& s) { s.norm = 2; }},
    {"ClipGradNorm(1)", [](Setting& s) { s.norm = 1; }},
    {"SetParameters", [](Setting& s) { s.change = true; }},
};

Setting MakeSetting(const Option& first, const Option& second, unsigned seed) {
  Setting s;
  s.options.bucket_bytes = 1500;
  first.turn(s);
  second.turn(s);
  s.seed = seed;
  s.text = absl::StrCat(first.name, " and ", second.name, ", seed ", seed, ": ");
  return s;
}

// Who has which samples of a batch, in a job of `size` ranks. Means stay exact: weights relative to the largest, and
// what they are divided by, are powers of two or divide by 12.
struct Shares {
  Shares(const Setting& s, int ranks) : size(ranks), unequal(s.unequal_batches && !s.unequal_steps), s_(s) {}

  int Begin(int rank) const { return unequal ? kUnequal[size - 1][rank] : rank * kBatch / size; }
  int End(int rank) const { return rank + 1 == size ? kBatch : Begin(rank + 1); }
  bool Active(int rank, int step) const { return !s_.unequal_steps || step < kSteps[size - 1][rank]; }
  int FirstActive(int step) const {
    int rank = 0;
    while (!Active(rank, step)) ++rank;
    return rank;
  }
  // The samples of a step that ranks have which are not through, and what their mean is taken over.
  std::vector<int> Samples(int step) const {
    std::vector<int> samples;
    for (int r = 0; r < size; ++r) {
      for (int k = Begin(r); Active(r, step) && k < End(r); ++k) samples.push_back(k);
    }
    return samples;
  }
  double Divisor(int step) const {
    const bool active = s_.options.op != ReduceOp::kSum && (s_.by_active || s_.options.weighted);
    return active ? static_cast<double>(Samples(step).size()) : kBatch;
  }

  static constexpr int kUnequal[4][4] = {{0}, {0, 12}, {0, 6, 9}, {0, 6, 9, 12}};
  static constexpr int kSteps[4][4] = {{3}, {1, 3}, {2, 3, 1}, {1, 3, 2, 1}};
  const int size;
  const bool unequal;

 private:
  const Setting& s_;
};

// Small enough for bfloat16 when 12 are summed.
double SampleGradient(int sample, size_t p, size_t i, int step) {
  uint64_t bits =
      (i + 1000 * p + 1) * 0x9e3779b97f4a7c15u + static_cast<uint64_t>(sample + 100 * step) * 0xd1b54a32d192ed03u;
  bits = (bits ^ (bits >> 29)) * 0xbf58476d1ce4e5b9u;
  return 12.0 * (static_cast<double>((bits >> 33) % 3) - 1);
}

// Whether a sample's loss depends on a parameter.
bool Uses(const Setting& s, int sample, size_t p, int step) {
  if (!s.unused || p == 0) return true;
  const int when = s.options.static_graph ? 0 : step;
  return (static_cast<unsigned>(sample / 3 + when) * 2654435761u + static_cast<unsigned>(p) * 40503u + s.seed) % 3 != 0;
}

// What training leaves: the parameters in float64, changed by 1/64 of each gradient.
struct Weights {
  std::vector<std::string> names;
  std::vector<std::vector<double>> values;
};

class Trainer {
 public:
  // What a job of `ranks` ranks trains, on the ranks of `group`: as many, or one that does it all.
  Trainer(ProcessGroup& group, const Setting& setting, int ranks)
      : s_(setting),
        group_(group),
        shares_(setting, ranks),
        alone_(group.size() == 1),
        random_(setting.seed * 100 + static_cast<unsigned>(group.rank())) {
    if (s_.hook) s_.options.hook = s_.hook();
    if (s_.buffers) s_.options.buffers = {{"scale", {&buffer_, 1, DType::kFloat64, {}}}};
    if (s_.nonfinite) s_.options.nonfinite = &nonfinite_;
  }

  Weights Train() {
    std::vector<Parameter> parameters = List(false);
    model_ = RANK_VALUE(DistributedDataParallel::Create(group_, parameters, s_.options));
    Adopt();
    std::unique_ptr<DistributedDataParallel::Join> join;
    if (s_.join) {
      JoinOptions options;
      options.divide_by_active = s_.by_active;
      options.on_shadowed_step = [this] {
        EndStep();
        return absl::OkStatus();
      };
      join = std::make_unique<DistributedDataParallel::Join>(*model_, options);
    }
    std::unique_ptr<ProcessGroup> other;
    for (int step = 0; step < kTrainSteps && (alone_ || shares_.Active(group_.rank(), step)); ++step) {
      if (s_.change && step == 2 && join == nullptr) {
        RANK_CHECK_OK(model_->SetParameters(List(true)));
        Adopt();
      }
      if (s_.rebind && step == 1 && join == nullptr) {
        other = RANK_VALUE(group_.Split(0, group_.rank()));
        RANK_CHECK_OK(model_->Rebind(*other));
      }
      Step(step);
    }
    if (join != nullptr) RANK_CHECK_OK(join->Finish());
    join.reset();
    model_.reset();
    return weights_;
  }

 private:
  bool sums() const { return s_.options.op == ReduceOp::kSum; }

  // With `changed`: without the second, the third frozen, and a new one.
  std::vector<Parameter> List(bool changed) {
    const std::vector<size_t> counts = {300, 7, 64, 0, 129, 500};
    std::vector<Parameter> list = MakeParameters(counts, s_.dtype);
    if (s_.mixed) {
      for (size_t p = 0; p < list.size(); p += 3) list[p].value.dtype = DType::kBFloat16;
    }
    list[5].shape = {20, 25};
    own_.resize(counts.size());
    for (const size_t p : {size_t{1}, size_t{4}}) {
      if (!s_.some_own) break;
      own_[p].resize(counts[p] * 8);
      list[p].grad = {own_[p].data(), counts[p], s_.own_16bit ? DType::kBFloat16 : list[p].value.dtype, {}};
    }
    if (!changed) return list;
    list[2].frozen = true;
    list.erase(list.begin() + 1);
    list.push_back({"added", {}, {nullptr, 50, s_.dtype, {}}, {}});
    return list;
  }

  void Adopt() {
    for (size_t p = 0; p < model_->size(); ++p) {
      const auto known = std::find(weights_.names.begin(), weights_.names.end(), model_->parameter(p).name);
      if (known != weights_.names.end()) continue;
      weights_.names.push_back(model_->parameter(p).name);
      weights_.values.emplace_back(model_->value(p).count);
    }
    given_.assign(model_->size(), {});
  }

  // The name's number: it stays when the list changes.
  size_t Key(size_t p) const {
    const auto known = std::find(weights_.names.begin(), weights_.names.end(), model_->parameter(p).name);
    return static_cast<size_t>(known - weights_.names.begin());
  }

  // This rank's part of a step.
  std::vector<int> Samples(int step) const {
    if (alone_) return shares_.Samples(step);
    std::vector<int> samples;
    for (int k = shares_.Begin(group_.rank()); k < shares_.End(group_.rank()); ++k) samples.push_back(k);
    return samples;
  }
  // Alone: what the job's mean is taken over. Else the mean over this rank's samples, which the others' join.
  double Divisor(int step) const {
    if (sums()) return kBatch;
    return alone_ ? shares_.Divisor(step) : static_cast<double>(std::max<size_t>(1, Samples(step).size()));
  }

  void Step(int step) {
    const bool has_buffers = alone_ || !s_.options.broadcast_buffers || group_.rank() == shares_.FirstActive(step);
    if (s_.buffers) buffer_ = has_buffers ? 1.0 + step : -1;
    RANK_CHECK_OK(model_->BeginForward());
    const double scale = s_.buffers ? buffer_ / (1.0 + step) : 1;  // 1, if the buffer is the first rank's
    if (s_.given_gradients) {
      for (size_t p = 0; p < model_->size(); ++p) {
        const Buffer g = model_->grad(p);
        if (model_->parameter(p).frozen) continue;
        given_[p].assign(g.count * 8 + 8, 0);
        RANK_CHECK_OK(model_->SetGrad(p, {given_[p].data(), g.count, g.dtype, g.device}));
      }
    }
    model_->ZeroGrad();
    model_->SetWeight(sums() ? 1 : static_cast<double>(Samples(step).size()));
    for (int part = 0; part < s_.micro_batches; ++part) {
      std::optional<DistributedDataParallel::NoSync> local;
      if (part + 1 < s_.micro_batches) local.emplace(*model_);
      Backward(step, part, scale);
      RANK_CHECK_OK(model_->FinishBackward());
    }
    EndStep();
  }

  void EndStep() {
    if (s_.norm > 0) Clip();
    Update();
    model_->ZeroGrad();
    RANK_CHECK_EQ(nonfinite_, 0u);
  }

  // This rank's samples of one micro-batch, in an order of gradients that is this rank's own.
  void Backward(int step, int part, double scale) {
    std::vector<size_t> order = Backwards(model_->size());
    std::shuffle(order.begin(), order.end(), random_);
    const std::vector<int> samples = Samples(step);
    const double divisor = Divisor(step);
    for (const size_t p : order) {
      if (model_->parameter(p).frozen) continue;
      const Buffer g = model_->grad(p);
      bool used = false;
      for (size_t k = 0; k < samples.size(); ++k) {
        if (static_cast<int>(k) % s_.micro_batches != part || !Uses(s_, samples[k], Key(p), step)) continue;
        used = true;
        for (size_t i = 0; i < g.count; ++i) {
          const double mine = scale * SampleGradient(samples[k], Key(p), i, step) / divisor;
          SetElement(g.dtype, g.data, i, GetElement(g.dtype, g.data, i) + mine);
        }
      }
      if (used || !s_.unused) model_->GradReady(p);
    }
  }

  void Clip() {
    const double limit = s_.norm == 1 ? 512 : 16;
    const double norm = RANK_VALUE(model_->ClipGradNorm(limit, s_.norm));
    const double now = RANK_VALUE(model_->GradNorm(s_.norm));
    RANK_CHECK(now < limit * 1.03 && (norm >= limit || now == norm), norm, " became ", now);
  }

  void Update() {
    model_->ForEachGrad([&](size_t p, const Parameter& parameter) {
      std::vector<double>& values = weights_.values[Key(p)];
      for (size_t i = 0; i < values.size(); ++i) {
        values[i] -= GetElement(parameter.grad.dtype, parameter.grad.data, i) / 64;
      }
    });
  }

  Setting s_;
  ProcessGroup& group_;
  const Shares shares_;
  const bool alone_;
  std::mt19937 random_;
  double buffer_ = 0;
  uint32_t nonfinite_ = 0;
  std::vector<std::vector<char>> own_, given_;
  Model model_;
  Weights weights_;
};

// What one rank trains with all the samples. Rank 0 does it, and gives it to the others.
Weights TrainAlone(Rank& rank, const Setting& setting, const Weights& many) {
  Weights one = many;
  if (rank.rank() == 0) {
    ContextOptions options;
    options.rank = 0;
    options.world_size = 1;
    options.store = CreateMemoryStore();
    const std::unique_ptr<Context> context = RANK_VALUE(Context::Create(options));
    one = Trainer(context->world(), setting, rank.size()).Train();
    RANK_CHECK_EQ(one.values.size(), many.values.size());
  }
  std::vector<Buffer> buffers;
  for (std::vector<double>& values : one.values) buffers.push_back({values.data(), values.size(), DType::kFloat64, {}});
  RANK_CHECK_OK(rank.group().Broadcast(buffers, 0).Wait());
  return one;
}

void CheckParity(Rank& rank, const Setting& setting) {
  const Weights many = Trainer(rank.group(), setting, rank.size()).Train();
  const Weights one = TrainAlone(rank, setting, many);
  double largest = 0;
  for (size_t p = 0; p < one.values.size(); ++p) {
    for (size_t i = 0; i < one.values[p].size(); ++i) {
      RANK_CHECK(many.values[p][i] == one.values[p][i], setting.text, "rank ", rank.rank(), " of ", rank.size(), ", ",
                 one.names[p], " at ", i, ": ", many.values[p][i], " is not ", one.values[p][i]);
      largest = std::max(largest, std::abs(one.values[p][i]));
    }
  }
  RANK_CHECK(largest > 0.005, setting.text, "nothing was trained");
}

TEST_CASE("parity for every option") {
  RunOnRanks([](Rank& rank) {
    for (const Option& option : kOptions) CheckParity(rank, MakeSetting(option, option, 1));
  });
}

#if defined(__SANITIZE_THREAD__)
constexpr unsigned kPairs = 80;  // this makes them ten times slower
#else
constexpr unsigned kPairs = 250;
#endif

TEST_CASE("parity for pairs of options, drawn by seed") {
  RunOnRanks([](Rank& rank) {
    std::mt19937 random(2024);
    for (unsigned pair = 0; pair < kPairs; ++pair) {
      const Option& first = kOptions[random() % std::size(kOptions)];
      const Option& second = kOptions[random() % std::size(kOptions)];
      CheckParity(rank, MakeSetting(first, second, 2 + pair));
    }
  });
}

}  // namespace
}  // namespace ddp::testing
