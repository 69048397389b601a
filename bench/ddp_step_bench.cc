// SPDX-License-Identifier: Apache-2.0
// Times steps of DistributedDataParallel over a backward pass that only spends time: how much longer than that they
// take, with one option or another.
//
//   mpirun -n 2 ddp_step_bench [--layers=24] [--layer_kb=1024] [--compute_us=1000] [--steps=50] [--delay_us=0]
//                              [--link_mbs=0] [--models=5] [--variant=0]
//
// A layer spends compute_us in the processor and writes its gradient meanwhile. The variants (or, of those counted from
// 1, only the one asked for) take turns, step by step; first steps are those of several models of each. With delay_us
// every all-reduce takes so long on top, with link_mbs also the time of its bytes at so many MB/s, one after the other,
// as on a slow link, in every other step and first step: the difference, the median of those of neighbours, is what of
// the delays was not hidden. Beside it stands what of them no schedule of the same buckets can hide.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "bench/arguments.h"
#include "bench/percentile.h"
#include "ddp/ddp.h"

namespace {

using Clock = std::chrono::steady_clock;

constexpr char kUsage[] = R"(Times steps of DistributedDataParallel over a backward pass that only spends time.

  mpirun -n 2 ddp_step_bench [flags]

  --layers=24        layers of the model
  --layer_kb=1024    gradient of a layer, KiB
  --compute_us=1000  backward pass of a layer
  --steps=50         timed steps
  --delay_us=0       added to every all-reduce
  --link_mbs=0       a link of so many MB/s, which all-reduces use one after the other; 0: none
  --models=5         models whose first steps are timed
  --variant=0        only this variant, counted from 1; 0: all
)";

int64_t Now() { return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count(); }

// A group whose all-reduces take longer. They queue on a link of their own.
class DelayedGroup final : public ddp::ProcessGroup {
 public:
  explicit DelayedGroup(ddp::ProcessGroup& group) : group_(group) {}

  // Of every all-reduce from now on; forgets those until now.
  void SetDelay(double ns, double ns_per_byte) {
    delay_ns_ = ns;
    delay_ns_per_byte_ = ns_per_byte;
    link_free_ = 0;
    delays_.clear();
  }
  // In ns, in the order of the calls.
  const std::vector<int64_t>& delays() const { return delays_; }

  int rank() const override { return group_.rank(); }
  int size() const override { return group_.size(); }
  absl::string_view backend() const override { return group_.backend(); }
  ddp::Work Start(const ddp::Call& call) override {
    ddp::Work work = group_.Start(call);
    if (call.kind != ddp::Call::Kind::kAllReduce || !work.call_status().ok()) return work;
    size_t bytes = 0;
    for (const ddp::Buffer& buffer : call.in) bytes += buffer.count * ddp::SizeOf(buffer.dtype);
    const auto delay = static_cast<int64_t>(delay_ns_ + delay_ns_per_byte_ * static_cast<double>(bytes));
    if (delay == 0) return work;
    delays_.push_back(delay);
    link_free_ = std::max(Now(), link_free_) + delay;
    return ddp::Work(new Delayed(std::move(work), link_free_));
  }
  absl::StatusOr<ddp::Allocation> Allocate(size_t bytes, ddp::Device device) override {
    return group_.Allocate(bytes, device);
  }
  absl::StatusOr<std::unique_ptr<ddp::ProcessGroup>> Split(int color, int key) override {
    return group_.Split(color, key);
  }
  absl::Status Register(const ddp::Allocation& memory) override { return group_.Register(memory); }
  void Abort(absl::Status why) override { group_.Abort(std::move(why)); }
  absl::Status SetTimeout(absl::Duration timeout) override { return group_.SetTimeout(timeout); }
  absl::Duration timeout() const override { return group_.timeout(); }
  absl::Status status() const override { return group_.status(); }
  void Progress() override { group_.Progress(); }

 private:
  class Delayed final : public ddp::internal::WorkState {
   public:
    Delayed(ddp::Work work, int64_t until_ns) : work_(std::move(work)), until_ns_(until_ns) {}
    bool Done() const override { return Now() >= until_ns_ && work_.Done(); }
    absl::Status Wait(absl::Time deadline) override {
      const absl::Status status = work_.Wait(deadline);
      while (Now() < until_ns_) std::this_thread::sleep_for(std::chrono::microseconds(20));
      return status;
    }
    absl::Status BlockStream(ddp::Stream) override { return Wait(absl::InfiniteFuture()); }
    void Ref() override { ++refs_; }
    void Unref() override {
      if (--refs_ == 0) delete this;
    }

   private:
    ddp::Work work_;
    const int64_t until_ns_;
    std::atomic<int> refs_{1};
  };

  ddp::ProcessGroup& group_;
  double delay_ns_ = 0, delay_ns_per_byte_ = 0;
  int64_t link_free_ = 0;
  std::vector<int64_t> delays_;
};

using Flags = std::map<std::string, int64_t>;

// Steps with delays or without.
struct Times {
  std::vector<double> step_ms;
  std::vector<double> first_ms;  // of a new model
};

struct Variant {
  std::string name;
  ddp::DdpOptions options;
  std::unique_ptr<ddp::DistributedDataParallel> model;
  Times plain, delayed;
  double delay_ms = 0, least_ms = 0;  // of a step, and what no schedule can hide
};

std::vector<Variant> Variants(size_t bytes) {
  std::vector<Variant> variants;
  const auto add = [&](const char* name) -> ddp::DdpOptions& {
    variants.push_back({name, {}, nullptr, {}, {}});
    return variants.back().options;
  };
  add("defaults");
  add("bucket_bytes=auto").bucket_bytes = ddp::DdpOptions::kAutoBucketBytes;
  add("bucket_bytes=1MiB").bucket_bytes = size_t{1} << 20;
  add("bucket_bytes=all").bucket_bytes = 2 * bytes;
  add("piece_bytes=1MiB").piece_bytes = size_t{1} << 20;
  add("weighted").weighted = true;
  add("unused=kDetect").unused = ddp::UnusedParameters::kDetect;
  add("hook=bfloat16").hook = ddp::CreateCompressionHook(ddp::DType::kBFloat16);
  add("check_replicas=1").check_replicas = 1;
  return variants;
}

// Of what each delayed step takes longer than the one before it.
double Added(const std::vector<double>& plain, const std::vector<double>& delayed) {
  std::vector<double> added;
  for (size_t k = 0; k < delayed.size(); ++k) added.push_back(delayed[k] - plain[k]);
  return bench::Median(std::move(added));
}

class Bench {
 public:
  Bench(const Flags& flags, ddp::ProcessGroup& group) : flags_(flags), group_(group) {}

  absl::Status Run() {
    variants_ = Variants(LayerBytes() * Layers());
    if (const auto one = static_cast<size_t>(flags_.at("variant")); one > 0) {
      if (one > variants_.size()) return absl::InvalidArgumentError(absl::StrCat("--variant=", one, " is none"));
      std::swap(variants_[0], variants_[one - 1]);
      variants_.resize(1);
    }
    for (int64_t m = 0; m < flags_.at("models"); ++m) {
      for (Variant& variant : variants_) {
        for (const bool delayed : {false, true}) {
          if (absl::Status s = MakeModel(variant); !s.ok()) return s;
          if (absl::Status s = TimeStep(variant, delayed, &Times::first_ms); !s.ok()) return s;
          if (!delays()) break;
        }
      }
    }
    for (int64_t step = 0; step < flags_.at("steps"); ++step) {
      for (Variant& variant : variants_) {
        for (const bool delayed : {false, true}) {
          if (absl::Status s = TimeStep(variant, delayed, &Times::step_ms); !s.ok()) return s;
          if (!delays()) break;
        }
      }
    }
    if (group_.rank() == 0) Print();
    return absl::OkStatus();
  }

 private:
  size_t Layers() const { return static_cast<size_t>(flags_.at("layers")); }
  size_t LayerBytes() const { return static_cast<size_t>(flags_.at("layer_kb")) << 10; }
  bool delays() const { return flags_.at("delay_us") > 0 || flags_.at("link_mbs") > 0; }
  void SetDelay(bool on) {
    const auto mbs = static_cast<double>(flags_.at("link_mbs"));
    group_.SetDelay(on ? static_cast<double>(flags_.at("delay_us")) * 1000 : 0, on && mbs > 0 ? 1000 / mbs : 0);
  }

  absl::Status MakeModel(Variant& variant) {
    variant.model = nullptr;
    std::vector<ddp::Parameter> parameters;
    for (size_t p = 0; p < Layers(); ++p) {
      parameters.push_back({absl::StrCat("layer", p), {}, {nullptr, LayerBytes() / 4, ddp::DType::kFloat32, {}}, {}});
    }
    SetDelay(true);  // `auto` measures it
    absl::StatusOr<std::unique_ptr<ddp::DistributedDataParallel>> model =
        ddp::DistributedDataParallel::Create(group_, std::move(parameters), variant.options);
    if (!model.ok()) return model.status();
    variant.model = *std::move(model);
    return absl::OkStatus();
  }

  absl::Status TimeStep(Variant& variant, bool delayed, std::vector<double> Times::*times) {
    SetDelay(false);
    ddp::Work meet = group_.Barrier();
    if (absl::Status s = meet.Wait(); !s.ok()) return s;
    SetDelay(delayed);
    ddp::DistributedDataParallel& model = *variant.model;
    const int64_t begin = Now();
    for (size_t p = model.size(); p-- > 0;) {
      const int64_t until = Now() + flags_.at("compute_us") * 1000;
      const ddp::Buffer grad = model.grad(p);
      std::memset(grad.data, 0, grad.count * sizeof(float));
      while (Now() < until) {
      }
      model.GradReady(p);
    }
    if (absl::Status s = model.FinishBackward(); !s.ok()) return s;
    ((delayed ? variant.delayed : variant.plain).*times).push_back(static_cast<double>(Now() - begin) / 1e6);
    if (delayed) NoteLeast(variant);
    return absl::OkStatus();
  }

  // On a link on which operations queue, all that begin with a bucket's have to pass after it is ready. What the step
  // reduces besides buckets comes last.
  void NoteLeast(Variant& variant) const {
    const auto ms = [](int64_t ns) { return static_cast<double>(ns) / 1e6; };
    const std::vector<ddp::BucketTimes> buckets = variant.model->statistics().buckets;
    auto next = group_.delays().begin();
    variant.delay_ms = ms(std::accumulate(next, group_.delays().end(), int64_t{0}));
    variant.least_ms = 0;
    double left = variant.delay_ms;
    for (const ddp::BucketTimes& bucket : buckets) {
      variant.least_ms = std::max(variant.least_ms, ms(bucket.ready_ns - buckets.back().ready_ns) + left);
      for (size_t k = 0; k < bucket.operations && next != group_.delays().end(); ++k) left -= ms(*next++);
    }
  }

  void Print() const {
    const double compute = static_cast<double>(flags_.at("compute_us") * flags_.at("layers")) / 1e3;
    std::printf("%-20s %8s %9s %11s %10s", "backward computes", "buckets", "step", "beyond", "first");
    std::printf(!delays() ? "\n" : " %9s %9s %9s %9s %9s %9s\n", "delays", "least", "added", "hidden", "first",
                "hidden");
    std::printf("%-17.1f ms %8s %9s %11s %10s", compute, "", "ms", "backward ms", "beyond ms");
    std::printf(!delays() ? "\n" : " %9s %9s %9s %9s %9s %9s\n", "ms", "ms", "ms", "%", "ms", "%");
    for (const Variant& v : variants_) {
      const double step = bench::Median(v.plain.step_ms), first = bench::Median(v.plain.first_ms);
      std::printf("%-20s %8zu %9.2f %11.2f %10.2f", v.name.c_str(), v.model->statistics().buckets.size(), step,
                  step - compute, first - compute);
      if (delays()) {
        const double added = Added(v.plain.step_ms, v.delayed.step_ms);
        const double first_added = Added(v.plain.first_ms, v.delayed.first_ms);
        std::printf(" %9.1f %9.1f %9.2f %s %9.2f %s", v.delay_ms, v.least_ms, added, Hidden(v, added).c_str(),
                    first_added, Hidden(v, first_added).c_str());
      }
      std::printf("\n");
    }
  }

  // Of what could be.
  static std::string Hidden(const Variant& v, double added) {
    const double most = v.delay_ms - v.least_ms;
    if (most < v.delay_ms / 100) return absl::StrFormat("%9s", "-");
    return absl::StrFormat("%9.1f", 100 * (v.delay_ms - added) / most);
  }

  const Flags& flags_;
  DelayedGroup group_;
  std::vector<Variant> variants_;
};

absl::Status Run(const Flags& flags) {
  absl::StatusOr<std::unique_ptr<ddp::Context>> context = ddp::Context::Create();
  if (!context.ok()) return context.status();
  return Bench(flags, (*context)->world()).Run();
}

}  // namespace

int main(int argc, char** argv) {
  Flags flags = {{"layers", 24},  {"layer_kb", 1024}, {"compute_us", 1000}, {"steps", 50},
                 {"delay_us", 0}, {"link_mbs", 0},    {"models", 5},        {"variant", 0}};
  const std::optional<int> ended =
      bench::ReadFlags(argc, argv, kUsage, [&](absl::string_view name, absl::string_view value) {
        const auto flag = flags.find(std::string(name));
        return flag != flags.end() && absl::SimpleAtoi(value, &flag->second) && flag->second >= 0;
      });
  if (ended.has_value()) return *ended;
  if (flags["layers"] < 1 || flags["layer_kb"] < 1 || flags["steps"] < 1 || flags["models"] < 1) {
    std::fprintf(stderr, "--layers, --layer_kb, --steps and --models are at least 1\n");
    return 2;
  }
  const absl::Status status = Run(flags);
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
