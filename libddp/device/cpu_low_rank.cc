// SPDX-License-Identifier: Apache-2.0
#include "libddp/device/cpu_low_rank.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "libddp/device/buffer_ops.h"

namespace ddp {
namespace {

// The same order of additions everywhere: sixteen partial sums, which the compiler keeps in vectors.
float Dot(const float* a, const float* b, size_t n) {
  constexpr size_t kParts = 16;
  float parts[kParts] = {};
  size_t i = 0;
  for (; i + kParts <= n; i += kParts) {
    for (size_t k = 0; k < kParts; ++k) parts[k] += a[i + k] * b[i + k];
  }
  float sum = 0;
  for (; i < n; ++i) sum += a[i] * b[i];
  for (const float part : parts) sum += part;
  return sum;
}

void AddScaled(float* to, const float* from, float factor, size_t n) {
  for (size_t i = 0; i < n; ++i) to[i] += factor * from[i];
}

// Multiplies a row by the power of two that brings its largest element to between 1 and 2, so that no square of an
// element overflows or vanishes. A row that is not finite becomes NaN altogether.
void Normalize(float* row, size_t n) {
  float largest = 0;
  bool finite = true;
  for (size_t j = 0; j < n; ++j) {
    finite &= std::isfinite(row[j]);
    largest = std::max(largest, std::abs(row[j]));
  }
  if (!finite) std::fill_n(row, n, std::numeric_limits<float>::quiet_NaN());
  if (!finite || largest == 0) return;
  const int exponent = std::ilogb(largest);
  for (size_t j = 0; j < n; ++j) row[j] = std::scalbn(row[j], -exponent);
}

// Makes `rank` rows of n orthonormal by the modified Gram-Schmidt method, applied twice for accuracy. A row that
// depends on earlier ones becomes zero. What is not finite stays so, and with it the result.
void Orthonormalize(float* rows, size_t rank, size_t n) {
  for (size_t i = 0; i < rank; ++i) {
    float* const row = rows + i * n;
    Normalize(row, n);
    const float before = std::sqrt(Dot(row, row, n));
    for (int pass = 0; pass < 2; ++pass) {
      for (size_t k = 0; k < i; ++k) AddScaled(row, rows + k * n, -Dot(row, rows + k * n, n), n);
    }
    const float after = std::sqrt(Dot(row, row, n));
    const float scale = after <= kDependent * before ? 0 : 1 / after;
    for (size_t j = 0; j < n; ++j) row[j] *= scale;
  }
}

// Between float32 and the type of gradients, which always convert.
void ConvertNumbers(const void* from, DType in, void* to, DType out, size_t count) {
  const Buffer source{const_cast<void*>(from), count, in, {}}, target{to, count, out, {}};
  CopyScaled({&source, 1}, {&target, 1}, 1, Stream{}).IgnoreError();
}

// An orthonormal Q to begin with: the last step's or, if that is zero (at first, or after a gradient of zeros) or not
// wanted, a random one. Its length would not matter to P's directions, but does to what 16 bits can hold.
void PrepareQ(const LowRankMatrix& a, const LowRankStep& step) {
  const uint32_t now = *step.kept % 2;
  float* const q = a.q[1 - now];
  if (step.warm_start) {
    std::copy_n(a.q[now], a.rank * a.columns, q);
  } else {
    std::fill_n(q, a.rank * a.columns, 0.0f);
  }
  Orthonormalize(q, a.rank, a.columns);
  bool filled = false;
  for (size_t k = 0; k < a.rank; ++k) {
    float* const row = q + k * a.columns;
    if (std::any_of(row, row + a.columns, [](float x) { return x != 0; })) continue;
    for (size_t j = 0; j < a.columns; ++j) row[j] = LowRankStart(a.random, *step.kept, k * a.columns + j);
    filled = true;
  }
  if (filled) Orthonormalize(q, a.rank, a.columns);
}

void MakeP(const LowRankMatrix& a, DType dtype, const LowRankStep& step, uint32_t now) {
  float* const m = a.errors[1 - now];
  const float* const q = a.q[1 - now];
  ConvertNumbers(a.gradient, dtype, m, DType::kFloat32, a.rows * a.columns);
  if (step.error_feedback) AddScaled(m, a.errors[now], 1, a.rows * a.columns);
  PrepareQ(a, step);
  for (size_t k = 0; k < a.rank; ++k) {
    for (size_t i = 0; i < a.rows; ++i) a.p[k * a.rows + i] = Dot(m + i * a.columns, q + k * a.columns, a.columns);
  }
  ConvertNumbers(a.p, DType::kFloat32, a.p_message, dtype, a.rank * a.rows);
}

void MakeQ(const LowRankMatrix& a, DType dtype, uint32_t now) {
  const float* const m = a.errors[1 - now];
  float* const q = a.q[1 - now];
  ConvertNumbers(a.p_message, dtype, a.p, DType::kFloat32, a.rank * a.rows);
  Orthonormalize(a.p, a.rank, a.rows);
  std::fill_n(q, a.rank * a.columns, 0.0f);
  for (size_t i = 0; i < a.rows; ++i) {
    for (size_t k = 0; k < a.rank; ++k) {
      AddScaled(q + k * a.columns, m + i * a.columns, a.p[k * a.rows + i], a.columns);
    }
  }
  ConvertNumbers(q, DType::kFloat32, a.q_message, dtype, a.rank * a.columns);
}

void Decompress(const LowRankMatrix& a, DType dtype, const LowRankStep& step, uint32_t now,
                std::vector<float>& result) {
  float* const q = a.q[1 - now];
  ConvertNumbers(a.q_message, dtype, q, DType::kFloat32, a.rank * a.columns);
  result.assign(a.rows * a.columns, 0.0f);
  for (size_t i = 0; i < a.rows; ++i) {
    for (size_t k = 0; k < a.rank; ++k) {
      AddScaled(result.data() + i * a.columns, q + k * a.columns, a.p[k * a.rows + i], a.columns);
    }
  }
  if (step.error_feedback) AddScaled(a.errors[1 - now], result.data(), -step.share, result.size());
  ConvertNumbers(result.data(), DType::kFloat32, a.gradient, dtype, result.size());
}

}  // namespace

void CpuLowRank(LowRankPass pass, DType dtype, const LowRankStep& step, absl::Span<const LowRankMatrix> matrices) {
  if (pass == LowRankPass::kKeep) {
    if (*step.nonfinite == 0) ++*step.kept;
    return;
  }
  const uint32_t now = *step.kept % 2;
  std::vector<float> result;
  for (const LowRankMatrix& matrix : matrices) {
    if (pass == LowRankPass::kMakeP) MakeP(matrix, dtype, step, now);
    if (pass == LowRankPass::kMakeQ) MakeQ(matrix, dtype, now);
    if (pass == LowRankPass::kDecompress) Decompress(matrix, dtype, step, now, result);
  }
}

}  // namespace ddp
