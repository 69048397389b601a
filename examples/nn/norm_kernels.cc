// SPDX-License-Identifier: Apache-2.0
#include "examples/nn/norm_kernels.h"

#include <algorithm>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "examples/nn/norm_kernels.cc"  // this file, once per instruction set
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace nn {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// Calls body(d, channel, first) for every vector `d` of channels of every image: its first channel, and the float at
// which that is in the image's first pixel. Those of the other pixels are `block` floats apart.
template <class Body>
HWY_INLINE void ForEachColumn(const BlockedImages& images, const Body& body) {
  const hn::ScalableTag<float> full;
  const hn::CappedTag<float, 1> single;
  for (size_t plane = 0; plane < images.images * images.blocks; ++plane) {
    const size_t channel = plane % images.blocks * images.block, first = plane * images.pixels * images.block;
    size_t j = 0;
    for (; j + hn::Lanes(full) <= images.block; j += hn::Lanes(full)) body(full, channel + j, first + j);
    for (; j < images.block; ++j) body(single, channel + j, first + j);
  }
}

// sums[lane] += the lanes.
template <class D>
HWY_INLINE void AddTo(D d, hn::Vec<D> lanes, double* HWY_RESTRICT sums) {
  HWY_ALIGN float floats[HWY_MAX_BYTES / sizeof(float)];
  hn::Store(lanes, d, floats);
  for (size_t i = 0; i < hn::Lanes(d); ++i) sums[i] += static_cast<double>(floats[i]);
}

// Sums of differences from the first pixel, which are as small as the values' spread. A few hundred are added as
// float32, the rest as float64.
constexpr size_t kFewPixels = 256;

void BatchMoments(const BlockedImages& images, const float* HWY_RESTRICT x, double* HWY_RESTRICT mean,
                  double* HWY_RESTRICT variance) {
  std::fill_n(mean, images.channels(), 0.0);
  std::fill_n(variance, images.channels(), 0.0);
  const size_t block = images.block, plane = images.pixels * block;
  ForEachColumn(images, [=](auto d, size_t channel, size_t first) HWY_ATTR {
    const auto origin = hn::LoadU(d, x + channel / block * plane + channel % block);
    for (size_t begin = 0; begin < images.pixels; begin += kFewPixels) {
      auto sum = hn::Zero(d), squares = hn::Zero(d);
      for (size_t p = begin; p < std::min(begin + kFewPixels, images.pixels); ++p) {
        const auto apart = hn::Sub(hn::LoadU(d, x + first + p * block), origin);
        sum = hn::Add(sum, apart);
        squares = hn::MulAdd(apart, apart, squares);
      }
      AddTo(d, sum, mean + channel);
      AddTo(d, squares, variance + channel);
    }
  });
  const double count = static_cast<double>(images.images * images.pixels);
  for (size_t c = 0; c < images.channels(); ++c) {
    const double shift = mean[c] / count, spread = variance[c] / count - shift * shift;
    mean[c] = static_cast<double>(x[c / block * plane + c % block]) + shift;
    variance[c] = spread < 0 ? 0 : spread;
  }
}

// The coefficients of a vector of channels.
template <class D>
struct Normalised {
  HWY_INLINE Normalised(D d, const NormCoefficients& norm, size_t channel)
      : mean(hn::LoadU(d, norm.mean + channel)),
        rstd(hn::LoadU(d, norm.rstd + channel)),
        weight(hn::LoadU(d, norm.weight + channel)),
        bias(hn::LoadU(d, norm.bias + channel)) {}

  // (x - mean) * rstd, and y before its max(0, .): the same numbers in all passes.
  HWY_INLINE hn::Vec<D> Spread(hn::Vec<D> x) const { return hn::Mul(hn::Sub(x, mean), rstd); }
  HWY_INLINE hn::Vec<D> operator()(hn::Vec<D> spread) const { return hn::MulAdd(spread, weight, bias); }

  hn::Vec<D> mean, rstd, weight, bias;
};

void NormForward(const BlockedImages& images, const float* HWY_RESTRICT x, const NormCoefficients& norm,
                 float* HWY_RESTRICT y) {
  ForEachColumn(images, [=](auto d, size_t channel, size_t first) HWY_ATTR {
    const Normalised<decltype(d)> normalised(d, norm, channel);
    for (size_t p = 0; p < images.pixels; ++p) {
      const size_t at = first + p * images.block;
      const auto out = normalised(normalised.Spread(hn::LoadU(d, x + at)));
      hn::StoreU(norm.relu ? hn::IfThenZeroElse(hn::Lt(out, hn::Zero(d)), out) : out, d, y + at);
    }
  });
}

// dy, or 0 where the max(0, .) has cut `y` off.
template <class D>
HWY_INLINE hn::Vec<D> Masked(D d, bool relu, hn::Vec<D> y, hn::Vec<D> dy) {
  return relu ? hn::IfThenZeroElse(hn::Le(y, hn::Zero(d)), dy) : dy;
}

void NormGradSums(const BlockedImages& images, const float* HWY_RESTRICT x, const float* HWY_RESTRICT dy,
                  const NormCoefficients& norm, double* HWY_RESTRICT sums) {
  std::fill_n(sums, 2 * images.channels(), 0.0);
  ForEachColumn(images, [=](auto d, size_t channel, size_t first) HWY_ATTR {
    const Normalised<decltype(d)> normalised(d, norm, channel);
    for (size_t begin = 0; begin < images.pixels; begin += kFewPixels) {
      auto sum = hn::Zero(d), products = hn::Zero(d);
      for (size_t p = begin; p < std::min(begin + kFewPixels, images.pixels); ++p) {
        const size_t at = first + p * images.block;
        const auto spread = normalised.Spread(hn::LoadU(d, x + at));
        const auto g = Masked(d, norm.relu, normalised(spread), hn::LoadU(d, dy + at));
        sum = hn::Add(sum, g);
        products = hn::MulAdd(g, spread, products);
      }
      AddTo(d, sum, sums + channel);
      AddTo(d, products, sums + images.channels() + channel);
    }
  });
}

void NormBackward(const BlockedImages& images, const float* x, const float* dy, const NormCoefficients& norm,
                  const float* means, float* dx) {
  ForEachColumn(images, [=](auto d, size_t channel, size_t first) HWY_ATTR {
    const Normalised<decltype(d)> normalised(d, norm, channel);
    const auto scale = hn::Mul(normalised.rstd, normalised.weight);
    const auto mean = hn::LoadU(d, means + channel), slope = hn::LoadU(d, means + images.channels() + channel);
    for (size_t p = 0; p < images.pixels; ++p) {
      const size_t at = first + p * images.block;
      const auto spread = normalised.Spread(hn::LoadU(d, x + at));
      const auto g = Masked(d, norm.relu, normalised(spread), hn::LoadU(d, dy + at));
      hn::StoreU(hn::Mul(scale, hn::NegMulAdd(spread, slope, hn::Sub(g, mean))), d, dx + at);
    }
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace nn
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace nn {

HWY_EXPORT(BatchMoments);
HWY_EXPORT(NormForward);
HWY_EXPORT(NormGradSums);
HWY_EXPORT(NormBackward);

void BatchMoments(const BlockedImages& images, const float* x, double* mean, double* variance) {
  HWY_DYNAMIC_DISPATCH(BatchMoments)(images, x, mean, variance);
}

void NormForward(const BlockedImages& images, const float* x, const NormCoefficients& norm, float* y) {
  HWY_DYNAMIC_DISPATCH(NormForward)(images, x, norm, y);
}

void NormGradSums(const BlockedImages& images, const float* x, const float* dy, const NormCoefficients& norm,
                  double* sums) {
  HWY_DYNAMIC_DISPATCH(NormGradSums)(images, x, dy, norm, sums);
}

void NormBackward(const BlockedImages& images, const float* x, const float* dy, const NormCoefficients& norm,
                  const float* means, float* dx) {
  HWY_DYNAMIC_DISPATCH(NormBackward)(images, x, dy, norm, means, dx);
}

}  // namespace nn
#endif  // HWY_ONCE
