// SPDX-License-Identifier: Apache-2.0
// Times steps of a real training whose gradients are reduced in one way or another, by blocks of steps in turn within
// one process: how much longer than the first way each takes, with an interval.
//
//   mpirun -n 2 exposed_bench --modes=none,overlap,end --target=0.35
//
// All ways train one model in turn, each with parameters and gradients of its own. A block's time is that of its
// slowest rank, from a barrier to the end of the last step. Differences are taken within a round, in which every way
// has one block, in an order that moves on from round to round.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "bench/arguments.h"
#include "bench/interval.h"
#include "ddp/context.h"
#include "examples/nn/cnn.h"
#include "examples/nn/device.h"
#include "examples/nn/model.h"
#include "examples/nn/onednn.h"
#include "examples/nn/queues.h"
#include "examples/train/agreement.h"
#include "examples/train/environment.h"
#include "examples/train/replica.h"
#include "nlohmann/json.hpp"

namespace {

using Clock = std::chrono::steady_clock;
using examples::Replica;
using examples::SyncMode;

constexpr char kUsage[] = R"(Times steps of a training whose gradients are reduced in several ways, in turn.

  mpirun -n 2 exposed_bench [flags]

  --modes=none,overlap,end  the ways, which may be no_ddp (one rank), none, overlap, end, each, gather; the others are
                            compared with the first
  --target=0                what the second takes beyond the first, as a part of what the third does; 0: none is judged
  --model=mlp               mlp, lenet, resnet20, resnet50
  --hidden=1024,1024        widths of mlp's hidden layers
  --batch=64                samples on each rank
  --device=cpu              cpu, cuda
  --precision=fp32          fp32; on GPUs tf32, fp16, bf16
  --backend=auto            as DDP_BACKEND
  --bucket_mb=25            size of overlap's buckets; 0: the library measures it
  --cuda_graph=0            1: steps are replays of a CUDA graph; with --device=cuda
  --plan_cache=             a file that keeps which plans cuDNN ran fastest with, for the next run
  --threads=1               threads of each rank
  --rounds=21               blocks of each way
  --steps=20                steps of a block
  --json=                   a file for the result
)";

using Flags = std::map<std::string, std::string>;

constexpr int kMostWidth = 1 << 16;

const std::map<std::string, SyncMode>& Modes() {
  static const std::map<std::string, SyncMode> modes = {{"no_ddp", SyncMode::kNone},     {"none", SyncMode::kNoSync},
                                                        {"overlap", SyncMode::kOverlap}, {"end", SyncMode::kEnd},
                                                        {"each", SyncMode::kEach},       {"gather", SyncMode::kGather}};
  return modes;
}

struct Settings {
  std::vector<std::string> modes;
  double target = 0;
  std::string model, precision, backend, plan_cache, json;
  std::vector<int> hidden;
  int batch = 0, threads = 0, rounds = 0, steps = 0;
  bool cuda = false, cuda_graph = false;
  double bucket_mb = 0;
  std::string same;  // the flags that all ranks share, one in a line
};

absl::Status WrongFlag(const std::string& flag, const std::string& value, absl::string_view allowed) {
  return absl::InvalidArgumentError(absl::StrCat("--", flag, "=", value, ": ", allowed, "; see --help"));
}

absl::Status ReadNumbers(const Flags& flags, Settings& settings) {
  for (const auto& [name, to, least, most] : {std::tuple("batch", &settings.batch, 1, 1 << 20),
                                              {"threads", &settings.threads, 1, 1024},
                                              {"rounds", &settings.rounds, 5, 1 << 20},
                                              {"steps", &settings.steps, 1, 1 << 20}}) {
    if (!absl::SimpleAtoi(flags.at(name), to) || *to < least || *to > most) {
      return WrongFlag(name, flags.at(name), absl::StrCat("give a number from ", least, " to ", most));
    }
  }
  for (const auto& [name, to] : {std::pair("target", &settings.target), {"bucket_mb", &settings.bucket_mb}}) {
    if (!absl::SimpleAtod(flags.at(name), to) || !(*to >= 0) || *to > 1 << 20)
      return WrongFlag(name, flags.at(name), absl::StrCat("give a number from 0 to ", 1 << 20));
  }
  for (const absl::string_view width : absl::StrSplit(flags.at("hidden"), ',', absl::SkipEmpty())) {
    settings.hidden.emplace_back();
    if (!absl::SimpleAtoi(width, &settings.hidden.back()) || settings.hidden.back() < 1 ||
        settings.hidden.back() > kMostWidth) {
      return WrongFlag("hidden", flags.at("hidden"),
                       absl::StrCat("give numbers from 1 to ", kMostWidth, ", with commas between"));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<Settings> Read(const Flags& flags) {
  Settings settings;
  if (absl::Status s = ReadNumbers(flags, settings); !s.ok()) return s;
  settings.modes = absl::StrSplit(flags.at("modes"), ',', absl::SkipEmpty());
  const bool known = std::all_of(settings.modes.begin(), settings.modes.end(),
                                 [](const std::string& mode) { return Modes().count(mode) > 0; });
  if (!known || settings.modes.size() < 2)
    return WrongFlag("modes", flags.at("modes"), "give two or more of no_ddp, none, overlap, end, each, gather");
  if (std::set<std::string>(settings.modes.begin(), settings.modes.end()).size() < settings.modes.size()) {
    return WrongFlag("modes", flags.at("modes"), "give each of them once");
  }
  if (settings.target > 0 && settings.modes.size() != 3) {
    return WrongFlag("target", flags.at("target"), "give three --modes with it");
  }
  settings.cuda = flags.at("device") == "cuda";
  const auto one_of = [&](const std::string& name, const std::vector<std::string>& allowed) {
    const bool found = std::find(allowed.begin(), allowed.end(), flags.at(name)) != allowed.end();
    return found ? absl::OkStatus()
                 : WrongFlag(name, flags.at(name), absl::StrCat("give one of ", absl::StrJoin(allowed, ", ")));
  };
  if (absl::Status s = one_of("device", {"cpu", "cuda"}); !s.ok()) return s;
  if (absl::Status s = one_of("model", {"mlp", "lenet", "resnet20", "resnet50"}); !s.ok()) return s;
  const std::vector<std::string> precisions =
      settings.cuda ? std::vector<std::string>{"fp32", "tf32", "fp16", "bf16"} : std::vector<std::string>{"fp32"};
  if (absl::Status s = one_of("precision", precisions); !s.ok()) return s;
  if (absl::Status s = one_of("cuda_graph", {"0", "1"}); !s.ok()) return s;
  settings.cuda_graph = flags.at("cuda_graph") == "1";
  if (settings.cuda_graph && !settings.cuda) return WrongFlag("cuda_graph", "1", "give --device=cuda with it");
  settings.model = flags.at("model");
  settings.precision = flags.at("precision");
  settings.backend = flags.at("backend");
  settings.plan_cache = flags.at("plan_cache");
  settings.json = flags.at("json");
  for (const auto& [name, value] : flags) {
    if (name != "json" && name != "plan_cache") absl::StrAppend(&settings.same, "--", name, "=", value, "\n");
  }
  return settings;
}

struct Images {
  nn::ImageShape shape;
  int classes;
};

Images ImagesFor(const std::string& model) {
  if (model == "resnet20") return {{3, 32, 32}, 10};
  if (model == "resnet50") return {{3, 224, 224}, 1000};
  return {{1, 28, 28}, 10};
}

std::unique_ptr<nn::Model> MakeModel(const Settings& settings, nn::Device& device) {
  const Images images = ImagesFor(settings.model);
  if (settings.model == "lenet") return nn::MakeLenet(images.shape, images.classes, settings.batch, device);
  if (settings.model == "resnet20") return nn::MakeResnet20(images.shape, images.classes, settings.batch, device);
  if (settings.model == "resnet50") return nn::MakeResnet50(images.shape, images.classes, settings.batch, device);
  return nn::MakeMlp(28 * 28, settings.hidden, images.classes, settings.batch, device);
}

// One way to reduce.
struct Way {
  std::string name;
  std::unique_ptr<Replica> replica;
  std::unique_ptr<nn::Optimizer> optimizer;
  std::unique_ptr<nn::Graph> graph;  // of a step; null: steps are not replayed
  std::vector<double> ms;            // of a step, by round
};

class Bench {
 public:
  Bench(const Settings& settings, ddp::Context& context, nn::Device& device)
      : settings_(settings),
        launcher_(context.launcher()),
        group_(context.world()),
        device_(device),
        model_(MakeModel(settings, device)) {}

  absl::Status Run() {
    MakeBatch();
    for (const std::string& mode : settings_.modes) {
      if (absl::Status s = AddWay(mode); !s.ok()) return s;
    }
    // A block of each beforehand: buckets are planned anew and algorithms tried within it.
    for (Way& way : ways_) {
      if (absl::StatusOr<double> ms = Block(way); !ms.ok()) return ms.status();
      if (absl::Status s = settings_.cuda_graph ? Capture(way) : absl::OkStatus(); !s.ok()) return s;
    }
    for (int round = 0; round < settings_.rounds; ++round) {
      for (size_t k = 0; k < ways_.size(); ++k) {
        Way& way = ways_[(k + static_cast<size_t>(round)) % ways_.size()];
        const absl::StatusOr<double> ms = Block(way);
        if (!ms.ok()) return ms.status();
        way.ms.push_back(*ms);
      }
    }
    return group_.rank() == 0 ? Report() : absl::OkStatus();
  }

 private:
  // Random images, the same in every step.
  void MakeBatch() {
    const auto count = static_cast<size_t>(settings_.batch) * static_cast<size_t>(model_->input_size());
    std::vector<float> pixels(count);
    std::mt19937 random(static_cast<uint32_t>(group_.rank()));
    std::normal_distribution<float> normal;
    for (float& x : pixels) x = normal(random);
    std::vector<int32_t> labels(static_cast<size_t>(settings_.batch));
    const auto classes = static_cast<uint32_t>(ImagesFor(settings_.model).classes);
    for (int32_t& label : labels) label = static_cast<int32_t>(random() % classes);
    pixels_ = device_.Allocate(count);
    labels_ = device_.Allocate(labels.size());
    loss_ = device_.AllocateHost(sizeof(double));
    device_.Upload(pixels.data(), pixels_.get(), count * sizeof(float));
    device_.Upload(labels.data(), labels_.get(), labels.size() * sizeof(int32_t));
    device_.Wait();
  }

  absl::Status AddWay(const std::string& mode) {
    examples::ReplicaOptions options;
    options.mode = Modes().at(mode);
    options.bucket_bytes = settings_.bucket_mb == 0 ? ddp::DdpOptions::kAutoBucketBytes
                                                    : static_cast<size_t>(std::ceil(settings_.bucket_mb * (1 << 20)));
    absl::StatusOr<std::unique_ptr<Replica>> replica = Replica::Create(*model_, group_, options);
    if (!replica.ok()) return replica.status();
    model_->Initialize(1);
    const size_t count = (*replica)->values().size();
    ways_.push_back({mode, *std::move(replica), device_.MakeSgd(count, {.lr = 1e-3, .momentum = 0.9}), nullptr, {}});
    return absl::OkStatus();
  }

  absl::Status Step(Way& way) {
    if (absl::Status s = way.replica->BeginForward(); !s.ok()) return s;
    const absl::Span<const float> logits = model_->Forward(pixels_.get(), settings_.batch);
    device_.CrossEntropy(logits.data(), reinterpret_cast<const int32_t*>(labels_.get()), settings_.batch,
                         ImagesFor(settings_.model).classes, model_->output_grad().data(), {},
                         static_cast<double*>(loss_.get()));
    way.replica->Backward();
    if (absl::Status s = way.replica->FinishBackward(); !s.ok()) return s;
    way.optimizer->Step(way.replica->values(), way.replica->grads());
    return absl::OkStatus();
  }

  absl::Status Capture(Way& way) {
    absl::Status status = way.replica->CanCapture();
    if (!status.ok()) return status;
    way.graph = device_.Capture([&] {
      status = Step(way);
      return status.ok();
    });
    return status;
  }

  absl::Status Run(Way& way) {
    if (way.graph == nullptr) return Step(way);
    way.graph->Launch();
    return absl::OkStatus();
  }

  // The time of a step in ms, on the slowest rank.
  absl::StatusOr<double> Block(Way& way) {
    way.replica->Bind();
    device_.Wait();
    ddp::Work meet = group_.Barrier();
    if (absl::Status s = meet.Wait(); !s.ok()) return s;
    const Clock::time_point begin = Clock::now();
    for (int step = 0; step < settings_.steps; ++step) {
      if (absl::Status s = Run(way); !s.ok()) return s;
    }
    device_.Wait();
    double ms = std::chrono::duration<double, std::milli>(Clock::now() - begin).count() / settings_.steps;
    const ddp::Buffer buffer = {&ms, 1, ddp::DType::kFloat64, {}};
    if (absl::Status s = group_.AllReduce(buffer, buffer, {.op = ddp::ReduceOp::kMax}).Wait(); !s.ok()) return s;
    return ms;
  }

  // What a step takes beyond one of the first way.
  bench::Interval Beyond(const Way& way) const {
    return bench::Bootstrap(way.ms.size(), [&](const auto& drawn) { return MedianBeyond(way, drawn); });
  }
  double MedianBeyond(const Way& way, const std::vector<size_t>& drawn) const {
    std::vector<double> beyond(way.ms);
    for (size_t k = 0; k < beyond.size(); ++k) beyond[k] -= ways_[0].ms[k];
    return bench::MedianOf(beyond, drawn);
  }

  absl::Status Report() const {
    size_t parameters = 0;
    for (const nn::ParameterSpec& spec : model_->parameters()) parameters += spec.count();
    std::printf("%s, %zu parameters, batch %d, %s on %s; %d %s, backend %s; %d rounds of blocks of %d steps%s\n",
                settings_.model.c_str(), parameters, settings_.batch, settings_.precision.c_str(),
                settings_.cuda ? "GPUs" : "CPUs", group_.size(), group_.size() == 1 ? "rank" : "ranks",
                std::string(group_.backend()).c_str(), settings_.rounds, settings_.steps,
                settings_.cuda_graph ? ", as CUDA graphs" : "");
    std::printf("%-8s %10s %22s %20s\n", "", "ms a step", absl::StrCat("beyond ", ways_[0].name).c_str(),
                "95 % interval");
    nlohmann::ordered_json json = {{"model", settings_.model},
                                   {"parameters", parameters},
                                   {"batch", settings_.batch},
                                   {"precision", settings_.precision},
                                   {"cuda", settings_.cuda},
                                   {"ranks", group_.size()},
                                   {"backend", group_.backend()},
                                   {"rounds", settings_.rounds},
                                   {"block_steps", settings_.steps},
                                   {"bucket_mb", settings_.bucket_mb},
                                   {"cuda_graph", settings_.cuda_graph}};
    for (const Way& way : ways_) {
      json["ms"][way.name] = way.ms;
      std::printf("%-8s %10.4f", way.name.c_str(), bench::Median(way.ms));
      if (&way != ways_.data()) {
        const bench::Interval beyond = Beyond(way);
        std::printf(" %19.4f ms %20s", beyond.value, absl::StrFormat("%.4f to %.4f", beyond.low, beyond.high).c_str());
        json["beyond_ms"][way.name] = {beyond.value, beyond.low, beyond.high};
      }
      std::printf("\n");
    }
    if (ways_.size() == 3) ReportRatio(json);
    if (settings_.json.empty()) return absl::OkStatus();
    examples::EnvironmentSources sources = examples::ThisProcess();
    sources.libraries = {{"onednn", nn::onednn::Version()}};
    json["environment"] =
        nlohmann::ordered_json::parse(examples::DescribeEnvironment(launcher_, settings_.cuda, sources));
    std::ofstream file(settings_.json);
    file << json.dump(1) << "\n";
    file.close();
    return file ? absl::OkStatus() : absl::UnavailableError(absl::StrCat("cannot write ", settings_.json));
  }

  // Of what the second way takes beyond the first, as a part of what the third does.
  void ReportRatio(nlohmann::ordered_json& json) const {
    const std::string what = absl::StrCat("of ", ways_[2].name, "'s time beyond ", ways_[0].name, ", ", ways_[1].name);
    if (settings_.target > 0) {
      json["target"] = settings_.target;
      json["met"] = false;
    }
    if (const bench::Interval whole = Beyond(ways_[2]); whole.low <= 0) {
      std::printf("%s: no part can be told, since the whole is within the noise%s\n", what.c_str(),
                  settings_.target > 0 ? ": NOT MET" : "");
      return;
    }
    const bench::Interval part = bench::Bootstrap(ways_[0].ms.size(), [&](const auto& drawn) {
      return MedianBeyond(ways_[1], drawn) / MedianBeyond(ways_[2], drawn);
    });
    std::printf("%s has %.3f (%.3f to %.3f)", what.c_str(), part.value, part.low, part.high);
    if (settings_.target > 0) {
      const bool met = part.high <= settings_.target;
      std::printf("; target %g: %s", settings_.target, met ? "met" : "NOT MET");
      json["met"] = met;
    }
    std::printf("\n");
    json["part"] = {part.value, part.low, part.high};
  }

  const Settings& settings_;
  const std::string launcher_;
  ddp::ProcessGroup& group_;
  nn::Device& device_;
  const std::unique_ptr<nn::Model> model_;
  std::shared_ptr<float> pixels_, labels_;
  std::shared_ptr<void> loss_;
  std::vector<Way> ways_;
};

absl::Status CheckRanks(const Settings& settings, ddp::ProcessGroup& group) {
  const std::vector<std::string>& modes = settings.modes;
  if (group.size() > 1 && std::find(modes.begin(), modes.end(), "no_ddp") != modes.end()) {
    return examples::Agreed(
        WrongFlag("modes", absl::StrJoin(modes, ","), "no_ddp is for one rank; with several, none reduces nothing"));
  }
  return absl::OkStatus();
}

absl::Status Measure(const Settings& settings, ddp::Context& context) {
  ddp::ProcessGroup& group = context.world();
  if (absl::Status s = examples::RequireSame(group, settings.same, "give all ranks the same flags"); !s.ok()) return s;
  if (absl::Status s = CheckRanks(settings, group); !s.ok()) return s;
  nn::SetThreads(settings.threads);
  std::unique_ptr<nn::Device> gpu;
  if (settings.cuda) {
    const nn::Element element = settings.precision == "fp16"   ? nn::Element::kFloat16
                                : settings.precision == "bf16" ? nn::Element::kBFloat16
                                                               : nn::Element::kFloat32;
    gpu =
        nn::OpenCuda(context.device().index,
                     {.tf32 = settings.precision == "tf32", .activations = element, .plan_file = settings.plan_cache});
  }
  return Bench(settings, context, gpu != nullptr ? *gpu : nn::Cpu()).Run();
}

int Fail(const absl::Status& status, int code) {
  std::fprintf(stderr, "exposed_bench: %s\n", std::string(status.message()).c_str());
  return code;
}

int Run(const Settings& settings) {
  ddp::ContextOptions options;
  if (settings.backend != "auto") options.backend = settings.backend;
  if (settings.cuda) {
    nn::AskForQueues();
    options.device = {ddp::Device::Kind::kCuda, -1};
  }
  const absl::StatusOr<std::unique_ptr<ddp::Context>> context = ddp::Context::Create(options);
  if (!context.ok()) return Fail(context.status(), 1);
  ddp::ProcessGroup& group = (*context)->world();
  const absl::Status status = examples::EndTogether(group, [&] { return Measure(settings, **context); });
  if (status.ok()) return 0;
  return examples::IsAgreed(status) && group.rank() != 0 ? 1 : Fail(status, 1);
}

}  // namespace

int main(int argc, char** argv) {
  Flags flags = {{"modes", "none,overlap,end"},
                 {"target", "0"},
                 {"model", "mlp"},
                 {"hidden", "1024,1024"},
                 {"batch", "64"},
                 {"device", "cpu"},
                 {"precision", "fp32"},
                 {"backend", "auto"},
                 {"bucket_mb", "25"},
                 {"cuda_graph", "0"},
                 {"plan_cache", ""},
                 {"threads", "1"},
                 {"rounds", "21"},
                 {"steps", "20"},
                 {"json", ""}};
  const std::optional<int> ended =
      bench::ReadFlags(argc, argv, kUsage, [&](absl::string_view name, absl::string_view value) {
        const auto flag = flags.find(std::string(name));
        if (flag != flags.end()) flag->second = std::string(value);
        return flag != flags.end();
      });
  if (ended.has_value()) return *ended;
  const absl::StatusOr<Settings> settings = Read(flags);
  return settings.ok() ? Run(*settings) : Fail(settings.status(), 2);
}
