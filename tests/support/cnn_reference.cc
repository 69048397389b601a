// SPDX-License-Identifier: Apache-2.0
#include "tests/support/cnn_reference.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <functional>

namespace nn::testing {

Numbers Convolve(const Numbers& x, int rows, const ImageShape& in, const Numbers& weight, const Numbers& bias,
                 int outputs, int kernel, int stride, int padding) {
  const int height = (in.height + 2 * padding - kernel) / stride + 1;
  const int width = (in.width + 2 * padding - kernel) / stride + 1;
  Numbers y;
  for (int n = 0; n < rows; ++n) {
    for (int o = 0; o < outputs; ++o) {
      for (int i = 0; i < height * width; ++i) {
        double sum = bias.empty() ? 0 : bias[static_cast<size_t>(o)];
        for (int c = 0; c < in.channels; ++c) {
          for (int k = 0; k < kernel * kernel; ++k) {
            const int row = i / width * stride + k / kernel - padding,
                      column = i % width * stride + k % kernel - padding;
            if (row < 0 || row >= in.height || column < 0 || column >= in.width) continue;
            sum += weight[static_cast<size_t>((o * in.channels + c) * kernel * kernel + k)] *
                   x[static_cast<size_t>(((n * in.channels + c) * in.height + row) * in.width + column)];
          }
        }
        y.push_back(sum);
      }
    }
  }
  return y;
}

Numbers Rectify(Numbers y) {
  for (double& v : y) v = std::max(v, 0.0);
  return y;
}

Numbers Normalize(const Numbers& x, int rows, const ImageShape& s, const Numbers& scale, const Numbers& shift) {
  const auto plane = static_cast<size_t>(s.height * s.width), channels = static_cast<size_t>(s.channels);
  Numbers y(x.size());
  for (size_t c = 0; c < channels; ++c) {
    double sum = 0, squares = 0;
    const auto each = [&](const std::function<void(size_t)>& fn) {
      for (size_t n = 0; n < static_cast<size_t>(rows); ++n) {
        for (size_t i = 0; i < plane; ++i) fn((n * channels + c) * plane + i);
      }
    };
    const double count = static_cast<double>(rows) * static_cast<double>(plane);
    each([&](size_t i) { sum += x[i]; });
    each([&](size_t i) { squares += (x[i] - sum / count) * (x[i] - sum / count); });
    each([&](size_t i) { y[i] = (x[i] - sum / count) / std::sqrt(squares / count + 1e-5) * scale[c] + shift[c]; });
  }
  return y;
}

Numbers PoolMax(const Numbers& x, int rows, const ImageShape& in, int kernel, int stride, int padding) {
  const int height = (in.height + 2 * padding - kernel) / stride + 1;
  const int width = (in.width + 2 * padding - kernel) / stride + 1;
  Numbers y;
  for (int p = 0; p < rows * in.channels; ++p) {
    for (int i = 0; i < height * width; ++i) {
      double largest = -1e300;
      for (int k = 0; k < kernel * kernel; ++k) {
        const int row = i / width * stride + k / kernel - padding, column = i % width * stride + k % kernel - padding;
        if (row < 0 || row >= in.height || column < 0 || column >= in.width) continue;
        largest = std::max(largest, x[static_cast<size_t>((p * in.height + row) * in.width + column)]);
      }
      y.push_back(largest);
    }
  }
  return y;
}

Numbers PoolImages(const Numbers& x, int rows, const ImageShape& in, int kernel_height, int kernel_width, bool max) {
  const int height = in.height / kernel_height, width = in.width / kernel_width;
  Numbers y;
  for (int p = 0; p < rows * in.channels; ++p) {
    for (int i = 0; i < height * width; ++i) {
      double largest = -1e300, sum = 0;
      for (int k = 0; k < kernel_height * kernel_width; ++k) {
        const int row = i / width * kernel_height + k / kernel_width,
                  column = i % width * kernel_width + k % kernel_width;
        const double v = x[static_cast<size_t>((p * in.height + row) * in.width + column)];
        largest = std::max(largest, v);
        sum += v;
      }
      y.push_back(max ? largest : sum / (kernel_height * kernel_width));
    }
  }
  return y;
}

Numbers ShortcutA(const Numbers& x, int rows, const ImageShape& in, const ImageShape& out, int stride) {
  Numbers y;
  for (int n = 0; n < rows; ++n) {
    for (int c = 0; c < out.channels; ++c) {
      for (int i = 0; i < out.height * out.width; ++i) {
        const int at = ((n * in.channels + c) * in.height + i / out.width * stride) * in.width + i % out.width * stride;
        y.push_back(c < in.channels ? x[static_cast<size_t>(at)] : 0);
      }
    }
  }
  return y;
}

}  // namespace nn::testing
