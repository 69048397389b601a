// Times steps of DistributedDataParallel over a backward pass that only spends time: what communication is left over
// when it ends, with one option or another.
//
//   mpirun -n 2 ddp_step_bench [--layers=24] [--layer_kb=1024] [--compute_us=1000] [--steps=50] [--delay_us=0]
//
// A layer spends compute_us in the processor and writes its gradient. With delay_us every all-reduce takes so long on
// top, one after the other, as on a slow link: then the table says which part of what can be hidden was, in the first
// step and in all. The variants take turns, step by step.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "ddp/ddp.h"

namespace {

using Clock = std::chrono::steady_clock;

int64_t Now() { return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count(); }

// A group whose all-reduces take longer. They queue on a link of their own.
class DelayedGroup final : public ddp::ProcessGroup {
 public:
  DelayedGroup(ddp::ProcessGroup& group, int64_t delay_ns) : group_(group), delay_ns_(delay_ns) {}

  int rank() const override { return group_.rank(); }
  int size() const override { return group_.size(); }
  absl::string_view backend() const override { return group_.backend(); }
  absl::StatusOr<ddp::Work> AllReduce(ddp::Buffers in, ddp::Buffers out, const ddp::ReduceOptions& options,
                                      ddp::Stream after) override {
    absl::StatusOr<ddp::Work> work = group_.AllReduce(in, out, options, after);
    if (!work.ok() || delay_ns_ == 0) return work;
    link_free_ = std::max(Now(), link_free_) + delay_ns_;
    return ddp::Work(new Delayed(*std::move(work), link_free_));
  }
  absl::StatusOr<ddp::Work> Broadcast(ddp::Buffers buffers, int root, ddp::Stream after) override {
    return group_.Broadcast(buffers, root, after);
  }
  absl::StatusOr<ddp::Work> AllGather(ddp::Buffers in, ddp::Buffers out, ddp::Stream after) override {
    return group_.AllGather(in, out, after);
  }
  absl::StatusOr<ddp::Work> AllGatherV(ddp::Buffers in, ddp::Buffers out, absl::Span<const size_t> counts,
                                       ddp::Stream after) override {
    return group_.AllGatherV(in, out, counts, after);
  }
  absl::StatusOr<ddp::Work> AllToAll(ddp::Buffers in, ddp::Buffers out, ddp::Stream after) override {
    return group_.AllToAll(in, out, after);
  }
  absl::StatusOr<ddp::Work> ReduceScatter(ddp::Buffers in, ddp::Buffers out, const ddp::ReduceOptions& options,
                                          ddp::Stream after) override {
    return group_.ReduceScatter(in, out, options, after);
  }
  absl::StatusOr<ddp::Work> Send(ddp::Buffers buffers, int to, int tag, ddp::Stream after) override {
    return group_.Send(buffers, to, tag, after);
  }
  absl::StatusOr<ddp::Work> Recv(ddp::Buffers buffers, int from, int tag, ddp::Stream after) override {
    return group_.Recv(buffers, from, tag, after);
  }
  absl::StatusOr<ddp::Work> Barrier() override { return group_.Barrier(); }
  absl::StatusOr<ddp::Allocation> Allocate(size_t bytes, ddp::Device device) override {
    return group_.Allocate(bytes, device);
  }
  absl::StatusOr<std::unique_ptr<ddp::ProcessGroup>> Split(int color, int key) override {
    return group_.Split(color, key);
  }
  absl::Status Register(const ddp::Allocation& memory) override { return group_.Register(memory); }
  void Abort(absl::Status why) override { group_.Abort(std::move(why)); }
  absl::Status status() const override { return group_.status(); }
  void Progress() override { group_.Progress(); }
  ddp::Observer* observer() const override { return group_.observer(); }

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
  const int64_t delay_ns_;
  int64_t link_free_ = 0;
};

using Flags = std::map<std::string, int64_t>;

struct Variant {
  std::string name;
  ddp::DdpOptions options;
  std::unique_ptr<ddp::DistributedDataParallel> model;
  std::vector<double> exposed_ms, step_ms, hidden;  // by step; hidden: of what could be
};

std::vector<Variant> Variants(size_t bytes) {
  std::vector<Variant> variants;
  const auto add = [&](const char* name) -> ddp::DdpOptions& {
    variants.push_back({name, {}, nullptr, {}, {}, {}});
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
  return variants;
}

// One step. The part of the delays that could be hidden: on a link on which operations queue, no schedule of these
// buckets ends before the last one is ready and has passed, nor before all have passed after the first was ready.
absl::Status Step(const Flags& flags, Variant& variant) {
  ddp::DistributedDataParallel& model = *variant.model;
  const int64_t begin = Now();
  for (size_t p = model.size(); p-- > 0;) {
    const int64_t until = Now() + flags.at("compute_us") * 1000;
    const ddp::Buffer grad = model.grad(p);
    std::memset(grad.data, 0, grad.count * sizeof(float));
    while (Now() < until) {
    }
    model.GradReady(p);
  }
  const int64_t end = Now();
  if (absl::Status s = model.FinishBackward(); !s.ok()) return s;
  const int64_t finished = Now();
  const ddp::DdpStatistics statistics = model.statistics();
  const double delay = static_cast<double>(flags.at("delay_us")) * 1000;
  const double all = delay * static_cast<double>(statistics.buckets.size());
  const double first_ready = static_cast<double>(statistics.buckets.front().ready_ns);
  const double backward = static_cast<double>(statistics.buckets.back().ready_ns);
  const double least = std::max(delay, first_ready + all - backward);
  const double exposed = static_cast<double>(finished - end);
  variant.exposed_ms.push_back(exposed / 1e6);
  variant.step_ms.push_back(static_cast<double>(finished - begin) / 1e6);
  variant.hidden.push_back(all > least ? (all - exposed) / (all - least) : 1);
  return absl::OkStatus();
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

absl::Status Run(const Flags& flags) {
  absl::StatusOr<std::unique_ptr<ddp::Context>> context = ddp::Context::Create();
  if (!context.ok()) return context.status();
  DelayedGroup group((*context)->world(), flags.at("delay_us") * 1000);
  const size_t layer_bytes = static_cast<size_t>(flags.at("layer_kb")) << 10;
  const size_t layers = static_cast<size_t>(flags.at("layers"));
  std::vector<Variant> variants = Variants(layer_bytes * layers);
  for (Variant& variant : variants) {
    std::vector<ddp::Parameter> parameters;
    for (size_t p = 0; p < layers; ++p) {
      parameters.push_back({absl::StrCat("layer", p), {}, {nullptr, layer_bytes / 4, ddp::DType::kFloat32, {}}, {}});
    }
    absl::StatusOr<std::unique_ptr<ddp::DistributedDataParallel>> model =
        ddp::DistributedDataParallel::Create(group, std::move(parameters), variant.options);
    if (!model.ok()) return model.status();
    variant.model = *std::move(model);
  }
  for (int64_t step = 0; step < flags.at("steps"); ++step) {
    for (Variant& variant : variants) {
      absl::StatusOr<ddp::Work> meet = group.Barrier();
      absl::Status status = meet.ok() ? meet->Wait() : meet.status();
      if (status.ok()) status = Step(flags, variant);
      if (!status.ok()) return status;
    }
  }
  if (group.rank() != 0) return absl::OkStatus();
  std::printf("%-20s %8s %10s %13s %12s %11s %11s\n", "", "buckets", "step (ms)", "exposed (ms)", "first (ms)",
              "hidden (%)", "first (%)");
  for (const Variant& v : variants) {
    std::printf("%-20s %8zu %10.3f %13.3f %12.3f %11.1f %11.1f\n", v.name.c_str(), v.model->statistics().buckets.size(),
                Median(v.step_ms), Median(v.exposed_ms), v.exposed_ms.front(), 100 * Median(v.hidden),
                100 * v.hidden.front());
  }
  return absl::OkStatus();
}

}  // namespace

int main(int argc, char** argv) {
  Flags flags = {{"layers", 24}, {"layer_kb", 1024}, {"compute_us", 1000}, {"steps", 50}, {"delay_us", 0}};
  for (int i = 1; i < argc; ++i) {
    const std::pair<std::string, std::string> flag =
        absl::StrSplit(absl::StripPrefix(argv[i], "--"), absl::MaxSplits('=', 1));
    int64_t value = 0;
    if (flags.count(flag.first) == 0 || !absl::SimpleAtoi(flag.second, &value) || value < 0) {
      std::fprintf(
          stderr, "%s: flags are --layers, --layer_kb, --compute_us, --steps and --delay_us, each =N with N a number\n",
          argv[i]);
      return 2;
    }
    flags[flag.first] = value;
  }
  if (flags["layers"] < 1 || flags["layer_kb"] < 1 || flags["steps"] < 1) {
    std::fprintf(stderr, "--layers, --layer_kb and --steps are at least 1\n");
    return 2;
  }
  const absl::Status status = Run(flags);
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
