// The rule that everything else serves: K ranks with batch B / K train as one rank with batch B, whatever the options.
//
// A sample is a number; its gradient of an element is a whole number, divisible by 12, that depends on sample,
// parameter and element. So means over the batch of 12 are exact in every type, and the parameters of K ranks and of
// one have to be equal bit for bit.
#include <algorithm>
#include <cmath>
#include <memory>
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
  int hook = 0;  // 0 none, 1 all-reduce, 2 float16, 3 bfloat16, 4 PowerSGD before its start
  DType dtype = DType::kFloat32;
  bool mixed = false;            // every third parameter has another type
  bool given_gradients = false;  // SetGrad in every step
  bool some_own = false;         // some gradients of the caller's
  int micro_batches = 1;
  bool is_last_style = false;
  bool unused = false;
  bool join = false;
  bool buffers = false;
  bool norm = false;    // clip
  bool change = false;  // parameters are frozen and added half-way
  unsigned seed = 0;
  std::string text;
};

// Each option by itself, and after that random pairs.
void Turn(Setting& s, int option) {
  switch (option) {
    case 0:
      s.options.bucket_bytes = 1;
      break;
    case 1:
      s.options.bucket_bytes = DdpOptions::kAutoBucketBytes;
      break;
    case 2:
      s.options.piece_bytes = 256;
      break;
    case 3:
      s.options.replan = false;
      break;
    case 4:
      s.options.op = ReduceOp::kSum;
      break;
    case 5:
      s.options.weighted = true;
      break;
    case 6:
      s.options.gradient_predivide_factor = 4;
      break;
    case 7:
      s.options.reduce_in_float32 = true;
      s.dtype = DType::kBFloat16;
      break;
    case 8:
      s.dtype = DType::kFloat16;
      break;
    case 9:
      s.mixed = true;
      break;
    case 10:
      s.given_gradients = s.options.copy_gradients = true;
      break;
    case 11:
      s.some_own = true;
      break;
    case 12:
      s.micro_batches = 3;
      break;
    case 13:
      s.micro_batches = 2;
      s.is_last_style = true;
      break;
    case 14:
      s.unused = true;
      s.options.unused = UnusedParameters::kDetect;
      break;
    case 15:
      s.unused = s.options.static_graph = true;
      break;
    case 16:
    case 17:
    case 18:
    case 19:
      s.hook = option - 15;
      break;
    case 20:
      s.join = true;
      break;
    case 21:
      s.buffers = true;
      break;
    case 22:
      s.norm = true;
      break;
    case 23:
      s.change = true;
      break;
    default:
      s.options.bucket_bytes = 3000;
      break;
  }
}
constexpr int kOptions = 25;

Setting MakeSetting(int first, int second, unsigned seed) {
  Setting s;
  s.options.bucket_bytes = 1500;
  Turn(s, first);
  Turn(s, second);
  s.seed = seed;
  s.text = absl::StrCat("options ", first, " and ", second, ", seed ", seed, ": ");
  return s;
}

std::shared_ptr<CommHook> MakeHook(int kind) {
  switch (kind) {
    case 1:
      return CreateAllReduceHook();
    case 2:
      return CreateCompressionHook(DType::kFloat16);
    case 3:
      return CreateCompressionHook(DType::kBFloat16);
    case 4:
      return CreateCompressionHook(DType::kFloat16, CreatePowerSgdHook({.start_step = 100}));
    default:
      return nullptr;
  }
}

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
  Trainer(ProcessGroup& group, const Setting& setting)
      : s_(setting), group_(group), random_(setting.seed * 100 + static_cast<unsigned>(group.rank())) {
    s_.options.hook = MakeHook(s_.hook);
    if (s_.buffers) s_.options.buffers = {{"scale", {&buffer_, 1, DType::kFloat64, {}}}};
    const int share = kBatch / group.size();
    for (int k = 0; k < share; ++k) samples_.push_back(group.rank() * share + k);
  }

  Weights Train() {
    std::vector<Parameter> parameters = List(false);
    model_ = RANK_VALUE(DistributedDataParallel::Create(group_, parameters, s_.options));
    Adopt();
    std::unique_ptr<DistributedDataParallel::Join> join;
    if (s_.join) join = std::make_unique<DistributedDataParallel::Join>(*model_);
    for (int step = 0; step < kTrainSteps; ++step) {
      if (s_.change && step == 2 && join == nullptr) {
        RANK_CHECK_OK(model_->SetParameters(List(true)));
        Adopt();
      }
      Step(step);
    }
    if (join != nullptr) RANK_CHECK_OK(join->Finish());
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
      list[p].grad = {own_[p].data(), counts[p], list[p].value.dtype, {}};
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

  void Step(int step) {
    if (s_.buffers) buffer_ = group_.rank() == 0 ? 1.0 + step : -1;
    RANK_CHECK_OK(model_->BeginForward());
    const double scale = s_.buffers ? buffer_ / (1.0 + step) : 1;  // 1, if the buffer is rank 0's
    if (s_.given_gradients) {
      for (size_t p = 0; p < model_->size(); ++p) {
        const Buffer g = model_->grad(p);
        if (model_->parameter(p).frozen) continue;
        given_[p].assign(g.count * 8 + 8, 0);
        RANK_CHECK_OK(model_->SetGrad(p, {given_[p].data(), g.count, g.dtype, g.device}));
      }
    }
    model_->ZeroGrad();
    model_->SetWeight(sums() ? 1 : static_cast<double>(samples_.size()));
    for (int part = 0; part < s_.micro_batches; ++part) {
      const bool last = part + 1 == s_.micro_batches;
      std::unique_ptr<DistributedDataParallel::NoSync> local;
      if (s_.is_last_style) {
        model_->SetIsLastMicrobatch(last);
      } else if (!last) {
        local = std::make_unique<DistributedDataParallel::NoSync>(*model_);
      }
      Backward(step, part, scale);
      RANK_CHECK_OK(model_->FinishBackward());
    }
    if (s_.norm) Clip();
    Update();
  }

  // This rank's samples of one micro-batch, in an order of gradients that is this rank's own.
  void Backward(int step, int part, double scale) {
    std::vector<size_t> order = Backwards(model_->size());
    std::shuffle(order.begin(), order.end(), random_);
    const double divisor = sums() ? kBatch : static_cast<double>(samples_.size());
    for (const size_t p : order) {
      if (model_->parameter(p).frozen) continue;
      const Buffer g = model_->grad(p);
      bool used = false;
      for (size_t k = 0; k < samples_.size(); ++k) {
        if (static_cast<int>(k) % s_.micro_batches != part || !Uses(s_, samples_[k], Key(p), step)) continue;
        used = true;
        for (size_t i = 0; i < g.count; ++i) {
          const double mine = scale * SampleGradient(samples_[k], Key(p), i, step) / divisor;
          SetElement(g.dtype, g.data, i, GetElement(g.dtype, g.data, i) + mine);
        }
      }
      if (used || !s_.unused) model_->GradReady(p);
    }
  }

  void Clip() {
    const double norm = RANK_VALUE(model_->ClipGradNorm(16));
    const double now = RANK_VALUE(model_->GradNorm());
    RANK_CHECK(now < 16.5 && (norm >= 16 || now == norm), norm, " became ", now);
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
  std::mt19937 random_;
  std::vector<int> samples_;
  double buffer_ = 0;
  std::vector<std::vector<char>> own_, given_;
  Model model_;
  Weights weights_;
};

Weights TrainAlone(const Setting& setting) {
  ContextOptions options;
  options.rank = 0;
  options.world_size = 1;
  options.store = CreateMemoryStore();
  const std::unique_ptr<Context> context = RANK_VALUE(Context::Create(options));
  return Trainer(context->world(), setting).Train();
}

void CheckParity(Rank& rank, const Setting& setting) {
  const Weights many = Trainer(rank.group(), setting).Train(), one = TrainAlone(setting);
  RANK_CHECK_EQ(many.values.size(), one.values.size());
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
    for (int option = 0; option < kOptions; ++option) CheckParity(rank, MakeSetting(option, option, 1));
  });
}

TEST_CASE("parity for pairs of options, drawn by seed") {
  RunOnRanks([](Rank& rank) {
    std::mt19937 random(2024);
    for (unsigned pair = 0; pair < 150; ++pair) {
      const int first = static_cast<int>(random() % kOptions), second = static_cast<int>(random() % kOptions);
      CheckParity(rank, MakeSetting(first, second, 2 + pair));
    }
  });
}

}  // namespace
}  // namespace ddp::testing
