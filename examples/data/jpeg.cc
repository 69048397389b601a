// SPDX-License-Identifier: Apache-2.0
#include "examples/data/jpeg.h"

#include <turbojpeg.h>

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "examples/data/file.h"

namespace examples {
namespace {

constexpr int64_t kMostPixels = int64_t{1} << 28;  // of a decoded image

struct Pixels {
  int width = 0, height = 0;
  std::vector<uint8_t> bytes;  // row by row, the channels of a pixel together
};

// The pixels of one row or column that make one of the result, and their weights, which add up to kOne.
constexpr int kOneBits = 14;
constexpr int kOne = 1 << kOneBits;
struct Taps {
  int first;
  std::vector<int> weights;
};

// For each of `to` pixels, from `from` pixels of which the middle `part` are used: a triangle as wide as a pixel of the
// result, or of the source where that is larger.
std::vector<Taps> MakeTaps(int from, double part, int to) {
  const double scale = part / to, reach = std::max(scale, 1.0);
  std::vector<Taps> taps;
  for (int i = 0; i < to; ++i) {
    const double center = (from - part) / 2 + (i + 0.5) * scale;
    const int first = std::max(0, static_cast<int>(std::floor(center - reach)));
    const int last = std::min(from - 1, static_cast<int>(std::ceil(center + reach)));
    std::vector<double> shares;
    double sum = 0;
    for (int k = first; k <= last; ++k) {
      shares.push_back(std::max(0.0, 1 - std::abs(k + 0.5 - center) / reach));
      sum += shares.back();
    }
    Taps tap{first, {}};
    int rest = kOne;
    for (const double share : shares) {
      tap.weights.push_back(static_cast<int>(share / sum * kOne));
      rest -= tap.weights.back();
    }
    *std::max_element(tap.weights.begin(), tap.weights.end()) += rest;
    taps.push_back(std::move(tap));
  }
  return taps;
}

// To planes of `height` x `width`.
void Resample(const Pixels& image, int channels, int height, int width, uint8_t* planes) {
  const double scale = std::min(static_cast<double>(image.width) / width, static_cast<double>(image.height) / height);
  const std::vector<Taps> across = MakeTaps(image.width, scale * width, width);
  const std::vector<Taps> down = MakeTaps(image.height, scale * height, height);
  const auto n = static_cast<size_t>(channels), w = static_cast<size_t>(width);
  // All rows of the source, but as wide as the result.
  std::vector<uint8_t> rows(static_cast<size_t>(image.height) * w * n);
  for (size_t y = 0; y < static_cast<size_t>(image.height); ++y) {
    const uint8_t* const from = image.bytes.data() + y * static_cast<size_t>(image.width) * n;
    for (size_t x = 0; x < w; ++x) {
      for (size_t c = 0; c < n; ++c) {
        int sum = kOne / 2;
        const uint8_t* pixel = from + static_cast<size_t>(across[x].first) * n + c;
        for (const int weight : across[x].weights) {
          sum += weight * *pixel;
          pixel += n;
        }
        rows[(y * w + x) * n + c] = static_cast<uint8_t>(sum >> kOneBits);
      }
    }
  }
  for (size_t c = 0; c < n; ++c) {
    for (const Taps& tap : down) {
      for (size_t x = 0; x < w; ++x) {
        int sum = kOne / 2;
        const uint8_t* pixel = rows.data() + (static_cast<size_t>(tap.first) * w + x) * n + c;
        for (const int weight : tap.weights) {
          sum += weight * *pixel;
          pixel += w * n;
        }
        *planes++ = static_cast<uint8_t>(sum >> kOneBits);
      }
    }
  }
}

class TurboDecoder final : public JpegDecoder {
 public:
  TurboDecoder() : handle_(tjInitDecompress()) {}
  ~TurboDecoder() override {
    if (handle_ != nullptr) tjDestroy(handle_);
  }

  absl::Status Decode(const std::string& file, int channels, int height, int width, uint8_t* planes) override {
    const absl::StatusOr<std::vector<uint8_t>> bytes = ReadFile(file);
    if (!bytes.ok()) return bytes.status();
    const absl::Status status = DecodeBytes(*bytes, channels, height, width);
    if (!status.ok()) {
      return absl::Status(status.code(), absl::StrCat("cannot use the image ", file, ": ", status.message()));
    }
    Resample(image_, channels, height, width, planes);
    return absl::OkStatus();
  }

 private:
  absl::Status DecodeBytes(const std::vector<uint8_t>& bytes, int channels, int height, int width) {
    if (handle_ == nullptr) return absl::ResourceExhaustedError("libjpeg-turbo does not start");
    if (bytes.size() < 3 || bytes[0] != 0xff || bytes[1] != 0xd8 || bytes[2] != 0xff) {
      return absl::InvalidArgumentError("it is no JPEG file; convert or remove it");
    }
    int full_width = 0, full_height = 0, subsampling = 0, colours = 0;
    if (tjDecompressHeader3(handle_, bytes.data(), bytes.size(), &full_width, &full_height, &subsampling, &colours) !=
        0) {
      return Damaged();
    }
    if (colours == TJCS_CMYK || colours == TJCS_YCCK) {
      return absl::InvalidArgumentError("its colours are CMYK; convert it to RGB");
    }
    // The decoder scales by eighths almost for nothing: down to the least size that is enough.
    int count = 0;
    const tjscalingfactor* const factors = tjGetScalingFactors(&count);
    image_.width = full_width;
    image_.height = full_height;
    for (int i = 0; i < count; ++i) {
      const int w = TJSCALED(full_width, factors[i]), h = TJSCALED(full_height, factors[i]);
      if (w < image_.width && w >= width && h >= height) {
        image_.width = w;
        image_.height = h;
      }
    }
    if (int64_t{image_.width} * image_.height > kMostPixels) {
      return absl::InvalidArgumentError(
          absl::StrCat("it has ", full_width, " x ", full_height, " pixels, too many; make it smaller or remove it"));
    }
    image_.bytes.resize(static_cast<size_t>(image_.width) * static_cast<size_t>(image_.height) *
                        static_cast<size_t>(channels));
    const int format = channels == 1 ? TJPF_GRAY : TJPF_RGB;
    if (tjDecompress2(handle_, bytes.data(), bytes.size(), image_.bytes.data(), image_.width, 0, image_.height, format,
                      TJFLAG_ACCURATEDCT | TJFLAG_STOPONWARNING) != 0) {
      return Damaged();
    }
    return absl::OkStatus();
  }

  absl::Status Damaged() const {
    return absl::DataLossError(
        absl::StrCat("it is damaged (", tjGetErrorStr2(handle_), "); fetch it again or remove it"));
  }

  const tjhandle handle_;
  Pixels image_;
};

}  // namespace

bool HaveJpeg() { return true; }
std::unique_ptr<JpegDecoder> MakeJpegDecoder() { return std::make_unique<TurboDecoder>(); }

}  // namespace examples
