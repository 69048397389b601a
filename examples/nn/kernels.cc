#include "examples/nn/kernels.h"

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
    const auto positive = hn::Gt(hn::LoadU(d, y + at), hn::Zero(d));
    const auto masked = hn::IfThenElseZero(positive, hn::LoadU(d, dy + at));
    hn::StoreU(masked, d, dy + at);
    return masked;
  });
}

void Relu(float* HWY_RESTRICT y, size_t count) {
  ForEachVector(count,
                [=](auto d, size_t i) HWY_ATTR { hn::StoreU(hn::Max(hn::LoadU(d, y + i), hn::Zero(d)), d, y + i); });
}

void AddRelu(const float* HWY_RESTRICT x, float* HWY_RESTRICT y, size_t count) {
  ForEachVector(count, [=](auto d, size_t i) HWY_ATTR {
    hn::StoreU(hn::Max(hn::Add(hn::LoadU(d, x + i), hn::LoadU(d, y + i)), hn::Zero(d)), d, y + i);
  });
}

void MaskPositive(const float* HWY_RESTRICT y, float* HWY_RESTRICT dy, size_t count) {
  ForEachVector(count, [=](auto d, size_t i) HWY_ATTR {
    const auto positive = hn::Gt(hn::LoadU(d, y + i), hn::Zero(d));
    hn::StoreU(hn::IfThenElseZero(positive, hn::LoadU(d, dy + i)), d, dy + i);
  });
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
