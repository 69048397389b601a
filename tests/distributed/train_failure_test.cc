// SPDX-License-Identifier: Apache-2.0
// A rank whose training fails anywhere in a step: all ranks end with its reason, and nothing is freed too early.
#include <functional>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "examples/data/dataset.h"
#include "examples/nn/model.h"
#include "examples/train/agreement.h"
#include "examples/train/trainer.h"
#include "tests/support/catch.h"
#include "tests/support/check.h"
#include "tests/support/forwarding_device.h"
#include "tests/support/ranks.h"

namespace examples {
namespace {

using ddp::testing::Rank;
using ddp::testing::RunOnRanks;

// Called with where in a training a device is; may throw.
using Hook = std::function<void(absl::string_view where)>;

// A layer of the CPU's.
class HookedLayer final : public nn::Layer {
 public:
  HookedLayer(std::unique_ptr<nn::Layer> layer, const Hook& hook) : layer_(std::move(layer)), hook_(hook) {}

  int input_size() const override { return layer_->input_size(); }
  int output_size() const override { return layer_->output_size(); }
  absl::Span<const nn::ParameterSpec> parameters() const override { return layer_->parameters(); }
  void Bind(absl::Span<float* const> values, absl::Span<float* const> grads) override { layer_->Bind(values, grads); }
  void Forward(const float* x, float* y, int rows) override { layer_->Forward(x, y, rows); }
  void Backward(const float* x, const float* y, float* dy, float* dx, int rows, bool accumulate,
                nn::GradReadyFn grad_ready) override {
    layer_->Backward(x, y, dy, dx, rows, accumulate, grad_ready);
    hook_("backward");
  }

 private:
  const std::unique_ptr<nn::Layer> layer_;
  const Hook& hook_;
};

// A GPU that computes as the CPU does, and may be at work in any of its memory until somebody waits for it.
class BusyDevice final : public ddp::testing::ForwardingDevice {
 public:
  explicit BusyDevice(Hook hook) : hook_(std::move(hook)) {}

  bool busy() const { return busy_; }
  int freed_while_busy() const { return freed_while_busy_; }

  std::string name() const override { return "busy"; }
  void* stream() const override { return const_cast<BusyDevice*>(this); }
  std::shared_ptr<float> Allocate(size_t count) override { return Watched(nn::Cpu().Allocate(count)); }
  std::shared_ptr<void> AllocateHost(size_t bytes) override {
    hook_("allocation");
    return Watched(nn::Cpu().AllocateHost(bytes));
  }
  void Upload(const void* from, void* to, size_t bytes) override {
    busy_ = true;
    nn::Cpu().Upload(from, to, bytes);
  }
  void Download(const void* from, void* to, size_t bytes) override {
    busy_ = false;
    nn::Cpu().Download(from, to, bytes);
  }
  void Wait() override { busy_ = false; }
  std::unique_ptr<nn::Layer> MakeLinear(int inputs, int outputs, nn::Activation activation, int max_batch,
                                        nn::Layer* below) override {
    return std::make_unique<HookedLayer>(nn::Cpu().MakeLinear(inputs, outputs, activation, max_batch, below), hook_);
  }
  void CrossEntropy(const float* logits, const int32_t* labels, int rows, int classes, float* dlogits,
                    const nn::LossOptions& options, const nn::LossRing& loss) override {
    busy_ = true;
    nn::Cpu().CrossEntropy(logits, labels, rows, classes, dlogits, options, loss);
    hook_("loss");
  }
  void CountHits(const float* logits, const int32_t* labels, int rows, int classes, int64_t* hits) override {
    busy_ = true;
    nn::Cpu().CountHits(logits, labels, rows, classes, hits);
    hook_("evaluation");
  }

 private:
  template <class T>
  std::shared_ptr<T> Watched(std::shared_ptr<T> memory) {
    T* const data = memory.get();
    return std::shared_ptr<T>(data, [this, memory = std::move(memory)](T*) { freed_while_busy_ += busy_ ? 1 : 0; });
  }

  const Hook hook_;
  bool busy_ = false;
  int freed_while_busy_ = 0;
};

// What a training of three epochs ends with, where `hook` fails on the last rank.
absl::Status TrainWith(Rank& rank, const Hook& hook) {
  TrainFlags flags;
  flags.batch = 48 / rank.size();
  flags.epochs = 3;
  const Dataset data = EmbeddedDigits();
  Console console(false, false);
  nn::SetThreads(1);
  BusyDevice device(rank.rank() == rank.size() - 1 ? hook : [](absl::string_view) {});
  absl::Status status;
  {
    const std::unique_ptr<nn::Model> model = nn::MakeMlp(data.features(), {32, 24}, data.classes, flags.batch, device);
    absl::StatusOr<std::unique_ptr<Trainer>> trainer = Trainer::Create(rank.group(), flags, data, *model, console);
    status = trainer.ok() ? (*trainer)->Run().status() : trainer.status();
  }
  RANK_CHECK_EQ(device.freed_while_busy(), 0);
  return status;
}

}  // namespace

TEST_CASE("a device that fails on one rank ends all ranks with its reason, and first what is under way") {
  for (const auto& [place, times] : {std::pair("allocation", 1),
                                     {"allocation", 4},
                                     {"loss", 1},
                                     {"loss", 40},
                                     {"backward", 1},
                                     {"backward", 59},
                                     {"evaluation", 1}}) {
    INFO(place << ", for the " << times << ". time");
    RunOnRanks([where = std::string(place), n = times](Rank& rank) {
      int left = n;
      const absl::Status status = TrainWith(rank, [&](absl::string_view here) {
        if (here == where && --left == 0) throw nn::DeviceError("the GPU has fallen off the bus");
      });
      const bool mine = rank.rank() == rank.size() - 1;
      RANK_CHECK_STATUS(status, mine ? absl::StatusCode::kInternal : absl::StatusCode::kAborted,
                        "the GPU has fallen off the bus");
      RANK_CHECK(!IsAgreed(status));
      RANK_CHECK(!rank.group().status().ok());
      rank.Meet();
    });
  }
}

TEST_CASE("a rank that has not enough memory ends all ranks, and says what helps") {
  RunOnRanks([](Rank& rank) {
    const absl::Status status = TrainWith(rank, [](absl::string_view here) {
      if (here == "loss") throw std::bad_alloc();
    });
    const bool mine = rank.rank() == rank.size() - 1;
    RANK_CHECK_STATUS(status, mine ? absl::StatusCode::kResourceExhausted : absl::StatusCode::kAborted,
                      "give a smaller model or --batch");
    rank.Meet();
  });
}

TEST_CASE("a training on a device that does not fail comes to its end") {
  RunOnRanks([](Rank& rank) {
    RANK_CHECK_OK(TrainWith(rank, [](absl::string_view) {}));
    RANK_CHECK_OK(rank.group().status());
    rank.Meet();
  });
}

}  // namespace examples
