// SPDX-License-Identifier: Apache-2.0
#include "examples/nn/kernels.h"

#include <algorithm>
#include <cstddef>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "examples/nn/kernels.cc"  // this file, once per instruction set
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace nn {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// Calls body(d, i) for every i that begins a vector `d` of [0, count): full vectors, then single floats. Both use the
// same vector instructions, so that an element's result does not depend on where it lies.
template <class Body>
HWY_INLINE void ForEachVector(size_t count, const Body& body) {
  const hn::ScalableTag<float> full;
  const hn::CappedTag<float, 1> single;
  size_t i = 0;
  for (; i + hn::Lanes(full) <= count; i += hn::Lanes(full)) body(full, i);
  for (; i < count; ++i) body(single, i);
}

// max(0, x), and its gradient. A NaN passes both, as in PyTorch: what Max returns for one depends on the target.
template <class D>
HWY_INLINE hn::Vec<D> Rectified(D d, hn::Vec<D> x) {
  return hn::IfThenZeroElse(hn::Lt(x, hn::Zero(d)), x);
}
template <class D>
HWY_INLINE hn::Vec<D> Masked(D d, hn::Vec<D> y, hn::Vec<D> dy) {
  return hn::IfThenZeroElse(hn::Le(y, hn::Zero(d)), dy);
}

// Adding one row at a time would load and store the sums once a row. Four rows at a time need a quarter of that, and
// their reads still run in few enough sequential streams for the prefetchers. `column` maps (d, row, j) to the vector
// to be added.
template <class Column>
HWY_INLINE void AddRows(size_t rows, size_t width, float* HWY_RESTRICT sums, const Column& column) {
  size_t i = 0;
  for (; i + 4 <= rows; i += 4) {
    ForEachVector(width, [&](auto d, size_t j) HWY_ATTR {
      const auto low = hn::Add(column(d, i, j), column(d, i + 1, j));
      const auto high = hn::Add(column(d, i + 2, j), column(d, i + 3, j));
      hn::StoreU(hn::Add(hn::LoadU(d, sums + j), hn::Add(low, high)), d, sums + j);
    });
  }
  for (; i < rows; ++i) {
    ForEachVector(width, [&](auto d, size_t j)
                             HWY_ATTR { hn::StoreU(hn::Add(hn::LoadU(d, sums + j), column(d, i, j)), d, sums + j); });
  }
}

void SumRows(const float* HWY_RESTRICT dy, size_t rows, size_t width, float* HWY_RESTRICT sums) {
  AddRows(rows, width, sums, [=](auto d, size_t i, size_t j) HWY_ATTR { return hn::LoadU(d, dy + i * width + j); });
}

void MaskAndSumRows(const float* HWY_RESTRICT y, float* HWY_RESTRICT dy, size_t rows, size_t width,
                    float* HWY_RESTRICT sums) {
  AddRows(rows, width, sums, [=](auto d, size_t i, size_t j) HWY_ATTR {
    const size_t at = i * width + j;
    const auto masked = Masked(d, hn::LoadU(d, y + at), hn::LoadU(d, dy + at));
    hn::StoreU(masked, d, dy + at);
    return masked;
  });
}

void Relu(float* HWY_RESTRICT y, size_t count) {
  ForEachVector(count, [=](auto d, size_t i) HWY_ATTR { hn::StoreU(Rectified(d, hn::LoadU(d, y + i)), d, y + i); });
}

void AddRelu(const float* HWY_RESTRICT x, float* HWY_RESTRICT y, size_t count) {
  ForEachVector(count, [=](auto d, size_t i) HWY_ATTR {
    hn::StoreU(Rectified(d, hn::Add(hn::LoadU(d, x + i), hn::LoadU(d, y + i))), d, y + i);
  });
}

void MaskPositive(const float* HWY_RESTRICT y, float* HWY_RESTRICT dy, size_t count) {
  ForEachVector(count, [=](auto d, size_t i)
                           HWY_ATTR { hn::StoreU(Masked(d, hn::LoadU(d, y + i), hn::LoadU(d, dy + i)), d, dy + i); });
}

void Add(const float* HWY_RESTRICT x, float* HWY_RESTRICT y, size_t count) {
  ForEachVector(count, [=](auto d, size_t i)
                           HWY_ATTR { hn::StoreU(hn::Add(hn::LoadU(d, x + i), hn::LoadU(d, y + i)), d, y + i); });
}

// Times 1 is exact, and free beside the loads.
template <class D>
HWY_INLINE hn::Vec<D> ScaledGrad(D d, const float* HWY_RESTRICT grad, float scale) {
  return hn::Mul(hn::LoadU(d, grad), hn::Set(d, scale));
}

void SgdPass(const SgdCoefficients& c, size_t count, const float* HWY_RESTRICT grad, float* HWY_RESTRICT value) {
  ForEachVector(count, [=](auto d, size_t i) HWY_ATTR {
    const auto x = hn::LoadU(d, value + i);
    const auto g = hn::MulAdd(hn::Set(d, c.weight_decay), x, ScaledGrad(d, grad + i, c.grad_scale));
    hn::StoreU(hn::NegMulAdd(hn::Set(d, c.lr), g, x), d, value + i);
  });
}

void MomentumPass(const SgdCoefficients& c, size_t count, const float* HWY_RESTRICT grad, float* HWY_RESTRICT value,
                  float* HWY_RESTRICT m) {
  ForEachVector(count, [=](auto d, size_t i) HWY_ATTR {
    const auto x = hn::LoadU(d, value + i);
    const auto g = hn::MulAdd(hn::Set(d, c.weight_decay), x, ScaledGrad(d, grad + i, c.grad_scale));
    const auto next = hn::MulAdd(hn::Set(d, c.momentum), hn::LoadU(d, m + i), g);
    hn::StoreU(next, d, m + i);
    hn::StoreU(hn::NegMulAdd(hn::Set(d, c.lr), next, x), d, value + i);
  });
}

void AdamPass(const AdamCoefficients& c, size_t count, const float* HWY_RESTRICT grad, float* HWY_RESTRICT value,
              float* HWY_RESTRICT m, float* HWY_RESTRICT v) {
  ForEachVector(count, [=](auto d, size_t i) HWY_ATTR {
    const auto x = hn::Mul(hn::LoadU(d, value + i), hn::Set(d, c.keep));
    const auto g = hn::MulAdd(hn::Set(d, c.weight_decay), x, ScaledGrad(d, grad + i, c.grad_scale));
    const auto mean = hn::MulAdd(hn::Set(d, c.beta1), hn::LoadU(d, m + i), hn::Mul(hn::Set(d, c.one_minus_beta1), g));
    const auto square =
        hn::MulAdd(hn::Set(d, c.beta2), hn::LoadU(d, v + i), hn::Mul(hn::Set(d, c.one_minus_beta2), hn::Mul(g, g)));
    const auto scale = hn::MulAdd(hn::Sqrt(square), hn::Set(d, c.rsqrt_correction), hn::Set(d, c.eps));
    hn::StoreU(mean, d, m + i);
    hn::StoreU(square, d, v + i);
    hn::StoreU(hn::NegMulAdd(hn::Set(d, c.step_size), hn::Div(mean, scale), x), d, value + i);
  });
}

// Calls body(d, j) for each vector that begins at float j of a block.
template <size_t kBlock, class Body>
HWY_INLINE void ForEachInBlock(size_t block, const Body& body) {
  if constexpr (kBlock == 0) {
    ForEachVector(block, body);
  } else {
    const hn::CappedTag<float, kBlock> d;
    for (size_t j = 0; j < kBlock; j += hn::Lanes(d)) body(d, j);
  }
}

// The kernels of max pooling, for blocks of kBlock channels and adjacent windows of kSide x kSide pixels; 0: known at
// run time only, and any windows. Adjacent windows of 2 x 2 in known blocks are several times as fast.
template <size_t kBlock, size_t kSide>
struct MaxPooling {
  explicit MaxPooling(const Windows& windows)
      : w(windows),
        block(kBlock == 0 ? w.block : kBlock),
        height(kSide == 0 ? w.height : kSide),
        width(kSide == 0 ? w.width : kSide),
        line(w.in_width * block) {}

  // The part of a window that is within the image, in one direction.
  struct Range {
    size_t begin, end;
  };
  struct Window {
    std::ptrdiff_t first;  // float of the images at which it begins, in or outside of its image
    Range lines, columns;
  };

  // `first`: the window's first pixel, in or outside of an image of `in_size` pixels.
  static HWY_INLINE Range Within(std::ptrdiff_t first, size_t size, size_t in_size) {
    if constexpr (kSide != 0) return {0, kSide};
    const auto begin = std::max<std::ptrdiff_t>(0, -first);
    const auto end = std::min(static_cast<std::ptrdiff_t>(size), static_cast<std::ptrdiff_t>(in_size) - first);
    return {static_cast<size_t>(begin), static_cast<size_t>(end)};
  }

  // fn(window, float of the result) for each window.
  template <class Fn>
  HWY_INLINE void ForEachWindow(const Fn& fn) const {
    const auto padding = static_cast<std::ptrdiff_t>(w.padding);
    const size_t lines = w.lines(), columns = w.columns();
    size_t result = 0;
    for (size_t plane = 0; plane < w.planes; ++plane) {
      const auto image = static_cast<std::ptrdiff_t>(plane * w.in_height * line);
      for (size_t l = 0; l < lines; ++l) {
        const std::ptrdiff_t first_line = static_cast<std::ptrdiff_t>(l * w.step(height)) - padding;
        const Range in_lines = Within(first_line, height, w.in_height);
        for (size_t c = 0; c < columns; ++c, result += block) {
          const std::ptrdiff_t first_column = static_cast<std::ptrdiff_t>(c * w.step(width)) - padding;
          const std::ptrdiff_t first = image + first_line * static_cast<std::ptrdiff_t>(line) +
                                       first_column * static_cast<std::ptrdiff_t>(block);
          fn(Window{first, in_lines, Within(first_column, width, w.in_width)}, result);
        }
      }
    }
  }
  HWY_INLINE std::ptrdiff_t At(const Window& window, size_t h, size_t k) const {
    return window.first + static_cast<std::ptrdiff_t>(h * line + k * block);
  }

  template <class D>
  struct Chosen {
    hn::Vec<D> value;
    hn::Vec<hn::RebindToSigned<D>> pixel;
  };
  template <class D>
  static HWY_INLINE Chosen<D> Larger(D, const Chosen<D>& a, const Chosen<D>& b) {
    const auto second = hn::Gt(b.value, a.value);
    return {hn::IfThenElse(second, b.value, a.value),
            hn::IfThenElse(hn::RebindMask(hn::RebindToSigned<D>(), second), b.pixel, a.pixel)};
  }

  // Of a window in the images x: the first of equals, the last NaN.
  template <class D>
  HWY_INLINE Chosen<D> Choose(D d, const Window& window, const float* HWY_RESTRICT x) const {
    const auto pixel = [&](size_t h, size_t k) HWY_ATTR {
      return Chosen<D>{hn::LoadU(d, x + At(window, h, k)),
                       hn::Set(hn::RebindToSigned<D>(), static_cast<int32_t>(h * width + k))};
    };
    if constexpr (kSide == 2) {  // three comparisons, of which two do not wait for another
      const auto a = pixel(0, 0), b = pixel(0, 1), c = pixel(1, 0), e = pixel(1, 1);
      const auto sum = hn::Add(hn::Add(a.value, b.value), hn::Add(c.value, e.value));
      if (HWY_LIKELY(hn::AllFalse(d, hn::IsNaN(sum)))) return Larger(d, Larger(d, a, b), Larger(d, c, e));
    }
    Chosen<D> best = pixel(window.lines.begin, window.columns.begin);
    for (size_t h = window.lines.begin; h < window.lines.end; ++h) {
      for (size_t k = window.columns.begin; k < window.columns.end; ++k) {
        const auto other = pixel(h, k);
        const auto wins = hn::Or(hn::Gt(other.value, best.value), hn::IsNaN(other.value));
        best.value = hn::IfThenElse(wins, other.value, best.value);
        best.pixel = hn::IfThenElse(hn::RebindMask(hn::RebindToSigned<D>(), wins), other.pixel, best.pixel);
      }
    }
    return best;
  }

  void Forward(bool relu, const float* HWY_RESTRICT x, float* HWY_RESTRICT y, int32_t* HWY_RESTRICT which) const {
    ForEachWindow([&](const Window& from, size_t to) HWY_ATTR {
      ForEachInBlock<kBlock>(block, [&](auto d, size_t j) HWY_ATTR {
        const hn::RebindToSigned<decltype(d)> di;
        const Chosen<decltype(d)> chosen = Choose(d, from, x + j);
        hn::StoreU(relu ? Rectified(d, chosen.value) : chosen.value, d, y + to + j);
        hn::StoreU(chosen.pixel, di, which + to + j);
      });
    });
  }

  void Backward(bool relu, const float* HWY_RESTRICT y, const int32_t* HWY_RESTRICT which, const float* HWY_RESTRICT dy,
                float* HWY_RESTRICT dx) const {
    // Pixels may be in no window, or in several.
    const bool add = kSide == 0;
    if (add || w.in_height % height != 0 || w.in_width % width != 0) {
      std::fill_n(dx, w.planes * w.in_height * line, 0.0f);
    }
    ForEachWindow([&](const Window& to, size_t from) HWY_ATTR {
      ForEachInBlock<kBlock>(block, [&](auto d, size_t j) HWY_ATTR {
        const hn::RebindToSigned<decltype(d)> di;
        auto grad = hn::LoadU(d, dy + from + j);
        if (relu) grad = Masked(d, hn::LoadU(d, y + from + j), grad);
        const auto chosen = hn::LoadU(di, which + from + j);
        for (size_t h = to.lines.begin; h < to.lines.end; ++h) {
          for (size_t k = to.columns.begin; k < to.columns.end; ++k) {
            const auto here = hn::Eq(chosen, hn::Set(di, static_cast<int32_t>(h * width + k)));
            auto share = hn::IfThenElseZero(hn::RebindMask(d, here), grad);
            float* const pixel = dx + At(to, h, k) + static_cast<std::ptrdiff_t>(j);
            if (add) share = hn::Add(share, hn::LoadU(d, pixel));
            hn::StoreU(share, d, pixel);
          }
        }
      });
    });
  }

  const Windows w;
  const size_t block, height, width, line;
};

// fn(kernels) with those that know most about the windows.
template <class Fn>
HWY_INLINE void WithMaxPooling(const Windows& w, const Fn& fn) {
  const bool two = w.height == 2 && w.width == 2 && w.adjacent();
  if (w.block == 16 && two) return fn(MaxPooling<16, 2>(w));
  if (w.block == 8 && two) return fn(MaxPooling<8, 2>(w));
  fn(MaxPooling<0, 0>(w));
}

void MaxPool(const Windows& windows, bool relu, const float* x, float* y, int32_t* which) {
  WithMaxPooling(windows, [=](const auto& kernels) { kernels.Forward(relu, x, y, which); });
}

void MaxPoolBackward(const Windows& windows, bool relu, const float* y, const int32_t* which, const float* dy,
                     float* dx) {
  WithMaxPooling(windows, [=](const auto& kernels) { kernels.Backward(relu, y, which, dy, dx); });
}

double SumSquares(const float* HWY_RESTRICT x, size_t count) {
  constexpr size_t kSums = 16;  // side by side: the compiler makes vectors of them
  double sums[kSums] = {};
  size_t i = 0;
  for (; i + kSums <= count; i += kSums) {
    for (size_t k = 0; k < kSums; ++k) sums[k] += static_cast<double>(x[i + k]) * static_cast<double>(x[i + k]);
  }
  for (; i < count; ++i) sums[i % kSums] += static_cast<double>(x[i]) * static_cast<double>(x[i]);
  for (size_t half = kSums / 2; half > 0; half /= 2) {
    for (size_t k = 0; k < half; ++k) sums[k] += sums[k + half];
  }
  return sums[0];
}

}  // namespace HWY_NAMESPACE
}  // namespace nn
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace nn {

HWY_EXPORT(SumRows);
HWY_EXPORT(MaskAndSumRows);
HWY_EXPORT(Relu);
HWY_EXPORT(AddRelu);
HWY_EXPORT(MaskPositive);
HWY_EXPORT(Add);
HWY_EXPORT(MaxPool);
HWY_EXPORT(MaxPoolBackward);
HWY_EXPORT(SgdPass);
HWY_EXPORT(MomentumPass);
HWY_EXPORT(AdamPass);
HWY_EXPORT(SumSquares);

void SumRows(const float* dy, size_t rows, size_t width, float* sums) {
  HWY_DYNAMIC_DISPATCH(SumRows)(dy, rows, width, sums);
}

void MaskAndSumRows(const float* y, float* dy, size_t rows, size_t width, float* sums) {
  HWY_DYNAMIC_DISPATCH(MaskAndSumRows)(y, dy, rows, width, sums);
}

void Relu(float* y, size_t count) { HWY_DYNAMIC_DISPATCH(Relu)(y, count); }

void AddRelu(const float* x, float* y, size_t count) { HWY_DYNAMIC_DISPATCH(AddRelu)(x, y, count); }

void MaskPositive(const float* y, float* dy, size_t count) { HWY_DYNAMIC_DISPATCH(MaskPositive)(y, dy, count); }

void Add(const float* x, float* y, size_t count) { HWY_DYNAMIC_DISPATCH(Add)(x, y, count); }

void MaxPool(const Windows& windows, bool relu, const float* x, float* y, int32_t* which) {
  HWY_DYNAMIC_DISPATCH(MaxPool)(windows, relu, x, y, which);
}

void MaxPoolBackward(const Windows& windows, bool relu, const float* y, const int32_t* which, const float* dy,
                     float* dx) {
  HWY_DYNAMIC_DISPATCH(MaxPoolBackward)(windows, relu, y, which, dy, dx);
}

void SgdPass(const SgdCoefficients& coefficients, size_t count, const float* grad, float* value) {
  HWY_DYNAMIC_DISPATCH(SgdPass)(coefficients, count, grad, value);
}

void MomentumPass(const SgdCoefficients& coefficients, size_t count, const float* grad, float* value, float* m) {
  HWY_DYNAMIC_DISPATCH(MomentumPass)(coefficients, count, grad, value, m);
}

void AdamPass(const AdamCoefficients& coefficients, size_t count, const float* grad, float* value, float* m, float* v) {
  HWY_DYNAMIC_DISPATCH(AdamPass)(coefficients, count, grad, value, m, v);
}

double SumSquares(const float* x, size_t count) { return HWY_DYNAMIC_DISPATCH(SumSquares)(x, count); }

}  // namespace nn
#endif  // HWY_ONCE
