// SPDX-License-Identifier: Apache-2.0
// Synchronised batch normalisation: several ranks compute what one does on the whole batch.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/casts.h"
#include "absl/strings/str_cat.h"
#include "ddp/collectives.h"
#include "examples/nn/batch_norm.h"
#include "examples/nn/model.h"
#include "examples/nn/sync_group.h"
#include "tests/support/catch.h"
#include "tests/support/check.h"
#include "tests/support/ranks.h"

namespace nn {
namespace {

using ddp::testing::Rank;
using ddp::testing::RunOnRanks;

std::unique_ptr<SyncGroup> MakeSyncGroup(Rank& rank) {
  return std::make_unique<SyncGroup>(
      ddp::testing::ValueOr(__FILE__, __LINE__, "Split", rank.group().Split(0, rank.rank())), Cpu());
}

// A layer with its parameters, and what a step on some images has made of them.
struct Normalised {
  Normalised(const ImageShape& images, Activation activation, int max_batch)
      : shape(images), layer(session, shape, activation, max_batch) {
    const auto channels = static_cast<size_t>(shape.channels);
    weight.resize(channels);
    bias.resize(channels);
    for (size_t c = 0; c < channels; ++c) weight[c] = 1 + 0.1f * static_cast<float>(c), bias[c] = 0.2f;
    weight_grad.assign(channels, NAN);
    bias_grad.assign(channels, NAN);
    layer.Bind(std::vector<float*>{weight.data(), bias.data()},
               std::vector<float*>{weight_grad.data(), bias_grad.data()});
  }

  std::vector<float> Reordered(const std::vector<float>& from, int rows, Layout layout, Layout to) {
    std::vector<float> result(static_cast<size_t>(rows) * session->Floats(shape, to));
    onednn::Relayout(session, shape, rows, layout, to).Run(from.data(), result.data());
    return result;
  }

  // Plain images in and out.
  void Step(const std::vector<float>& plain_x, const std::vector<float>& plain_dy, int rows, bool accumulate = false) {
    const std::vector<float> x = Reordered(plain_x, rows, Layout::kPlain, Layout::kNative);
    std::vector<float> dy = Reordered(plain_dy, rows, Layout::kPlain, Layout::kNative);
    std::vector<float> native_y(x.size(), NAN), native_dx(x.size(), NAN);
    layer.Forward(x.data(), native_y.data(), rows);
    std::vector<size_t> ready;
    layer.Backward(x.data(), native_y.data(), dy.data(), native_dx.data(), rows, accumulate,
                   [&](size_t i) { ready.push_back(i); });
    RANK_CHECK(ready == std::vector<size_t>({1, 0}));
    y = Reordered(native_y, rows, Layout::kNative, Layout::kPlain);
    dx = Reordered(native_dx, rows, Layout::kNative, Layout::kPlain);
    // What pads a block stays 0.
    if (shape.channels % session->Block(shape.channels) != 0) RANK_CHECK(native_y.back() == 0 && native_dx.back() == 0);
  }

  ImageShape shape;
  onednn::SessionPtr session = std::make_shared<onednn::Session>();
  BatchNorm2d layer;
  std::vector<float> weight, bias, weight_grad, bias_grad, y, dx;
};

void CheckNear(const std::vector<float>& got, const float* want, double tolerance, const std::string& what) {
  for (size_t i = 0; i < got.size(); ++i) {
    const double apart = std::abs(static_cast<double>(got[i]) - static_cast<double>(want[i]));
    RANK_CHECK(apart <= tolerance, what, "[", i, "]: ", got[i], " is not ", want[i]);
  }
}

}  // namespace

TEST_CASE("ranks with batches of different sizes normalise as one with all of them does") {
  RunOnRanks([](Rank& rank) {
    SetThreads(1);
    const auto group = MakeSyncGroup(rank);
    // Rank r has r + 1 images; values that are far from 0 have a small variance beside their squares.
    const int own = rank.rank() + 1, before = rank.rank() * own / 2, all = rank.size() * (rank.size() + 1) / 2;
    for (const auto& [shape, far] : {std::pair(ImageShape{16, 5, 4}, 0.0f),
                                     {ImageShape{5, 3, 7}, 0.0f},
                                     {ImageShape{16, 20, 20}, 30.0f},
                                     {ImageShape{24, 1, 2}, 0.0f}}) {
      for (const Activation activation : {Activation::kNone, Activation::kRelu}) {
        // What ReLU cuts off there depends on the last bits.
        if (far != 0 && activation == Activation::kRelu) continue;
        const size_t pixels = Pixels(1, shape) * static_cast<size_t>(shape.channels);
        std::mt19937 random(5);
        std::vector<float> x(static_cast<size_t>(all) * pixels), dy(x.size());
        for (float& v : x) v = far + static_cast<float>(random() * 0x1p-31 - 1);
        for (float& v : dy) v = static_cast<float>(random() * 0x1p-31 - 1);
        const auto mine = [&, first = static_cast<size_t>(before) * pixels](const std::vector<float>& of_all) {
          const auto begin = of_all.begin() + static_cast<std::ptrdiff_t>(first);
          return std::vector<float>(begin, begin + static_cast<std::ptrdiff_t>(static_cast<size_t>(own) * pixels));
        };

        Normalised whole(shape, activation, all), part(shape, activation, own);
        part.layer.Synchronize(group.get());
        for (const bool accumulate : {false, true}) {
          whole.Step(x, dy, all, accumulate);
          part.Step(mine(x), mine(dy), own, accumulate);
          const double tolerance = far == 0 ? 2e-5 : 5e-3;  // oneDNN adds up a mean in float32
          const size_t first = static_cast<size_t>(before) * pixels;
          CheckNear(part.y, whole.y.data() + first, tolerance, "y");
          CheckNear(part.dx, whole.dx.data() + first, tolerance, "dx");
        }
        for (auto* const grad : {&part.weight_grad, &part.bias_grad}) {
          const ddp::Buffer buffer{grad->data(), grad->size(), ddp::DType::kFloat32, {}};
          RANK_CHECK_OK(rank.group().AllReduce(buffer, buffer, ddp::Sum()).Wait());
        }
        CheckNear(part.weight_grad, whole.weight_grad.data(), far == 0 ? 2e-4 : 5e-2, "weight's gradient");
        CheckNear(part.bias_grad, whole.bias_grad.data(), far == 0 ? 2e-4 : 5e-2, "bias's gradient");

        // The running statistics: the whole batch's, with the same bits on all ranks; evaluation goes by them alone.
        const auto buffers = part.layer.buffers(), expected = whole.layer.buffers();
        for (size_t b = 0; b < buffers.size(); ++b) {
          const std::vector<float> got(buffers[b].data.begin(), buffers[b].data.end());
          CheckNear(got, expected[b].data.data(), far == 0 ? 1e-6 : 1e-3, buffers[b].name);
          std::string bits;
          for (const float v : got) absl::StrAppend(&bits, absl::Hex(absl::bit_cast<uint32_t>(v)), " ");
          for (const std::string& other :
               ddp::testing::ValueOr(__FILE__, __LINE__, "GatherStrings", ddp::GatherStrings(rank.group(), bits))) {
            RANK_CHECK(other == bits, "running statistics differ");
          }
          std::copy(got.begin(), got.end(), expected[b].data.begin());
        }
        if (rank.rank() == 0) {  // nobody else is asked
          part.layer.SetTraining(false);
          whole.layer.SetTraining(false);
          std::vector<float> in(static_cast<size_t>(part.layer.input_size()), 0.5f), out(in.size()), want(in.size());
          part.layer.Forward(in.data(), out.data(), 1);
          whole.layer.Forward(in.data(), want.data(), 1);
          RANK_CHECK(out == want);
        }
      }
    }
  });
}

TEST_CASE("a synchronised layer of one rank is the plain layer, and becomes it again") {
  RunOnRanks([](Rank& rank) {
    SetThreads(1);
    SyncGroup group(ddp::testing::ValueOr(__FILE__, __LINE__, "Split", rank.group().Split(rank.rank(), 0)), Cpu());
    const auto several = MakeSyncGroup(rank);
    const ImageShape shape = {16, 3, 3};
    std::vector<float> x(2 * 16 * 9), dy(x.size());
    for (size_t i = 0; i < x.size(); ++i) x[i] = std::sin(static_cast<float>(i)), dy[i] = std::cos(x[i]);
    Normalised plain(shape, Activation::kRelu, 2), one(shape, Activation::kRelu, 2),
        before(shape, Activation::kRelu, 2);
    one.layer.Synchronize(&group);
    before.layer.Synchronize(several.get());
    before.layer.Synchronize(nullptr);
    plain.Step(x, dy, 2);
    for (Normalised* const other : {&one, &before}) {
      other->Step(x, dy, 2);
      RANK_CHECK(other->y == plain.y && other->dx == plain.dx && other->weight_grad == plain.weight_grad);
    }
    // One value per channel on a rank has a variance with the others'.
    if (rank.size() == 1) return;
    Normalised single({16, 1, 1}, Activation::kNone, 1);
    single.layer.Synchronize(several.get());
    single.Step(std::vector<float>(16, static_cast<float>(rank.rank())), std::vector<float>(16, 1.0f), 1);
    const double n = rank.size(), mean = (n - 1) / 2, variance = (n * n - 1) / 12;
    const double y = (rank.rank() - mean) / std::sqrt(variance + 1e-5) + 0.2;
    RANK_CHECK(std::abs(static_cast<double>(single.y[0]) - y) < 1e-5, single.y[0], " is not ", y);
  });
}

TEST_CASE("a NaN of one rank reaches all, with ReLU too") {
  RunOnRanks([](Rank& rank) {
    SetThreads(1);
    const auto group = MakeSyncGroup(rank);
    const ImageShape shape = {16, 2, 2};
    Normalised part(shape, Activation::kRelu, 1);
    part.layer.Synchronize(group.get());
    std::vector<float> x(64, 0.0f);
    for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i % 3);
    if (rank.rank() == 0) x[5] = NAN;  // of channel 1
    part.Step(x, x, 1);
    RANK_CHECK(rank.size() == 1 || (std::isnan(part.y[4]) && std::isnan(part.dx[4]) && std::isfinite(part.y[0])));
  });
}

}  // namespace nn
