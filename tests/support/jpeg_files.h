// SPDX-License-Identifier: Apache-2.0
// JPEG files that a test makes itself, in a folder of its own.
#ifndef TESTS_SUPPORT_JPEG_FILES_H_
#define TESTS_SUPPORT_JPEG_FILES_H_

#include <turbojpeg.h>

#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/support/temporary_folder.h"

namespace ddp::testing {

struct Colour {
  uint8_t red, green, blue;
};

// The bytes of a file whose pixel (x, y) is `pixel(x, y)`.
inline std::string MakeJpeg(int width, int height, const std::function<Colour(int x, int y)>& pixel,
                            int format = TJPF_RGB) {
  std::vector<uint8_t> pixels;
  for (int y = 0; y < height; ++y) {
    for (int x = 0; x < width; ++x) {
      const Colour c = pixel(x, y);
      pixels.insert(pixels.end(), {c.red, c.green, c.blue});
      if (format == TJPF_CMYK) pixels.push_back(0);
    }
  }
  const tjhandle handle = tjInitCompress();
  unsigned char* bytes = nullptr;
  unsigned long size = 0;
  const int error = tjCompress2(handle, pixels.data(), width, 0, height, format, &bytes, &size, TJSAMP_444, 100, 0);
  std::string file(reinterpret_cast<char*>(bytes), error == 0 ? size : 0);
  tjFree(bytes);
  tjDestroy(handle);
  if (error != 0) throw std::runtime_error("no JPEG file was made");
  return file;
}

inline std::string MakeJpeg(int width, int height, Colour colour) {
  return MakeJpeg(width, height, [colour](int, int) { return colour; });
}

class JpegFolder : public TemporaryFolder {
 public:
  // `count` images of each of two classes, in train and in val, each a little different.
  void WriteTwoClasses(int count, int size) const {
    for (int i = 0; i < count; ++i) {
      const auto level = static_cast<uint8_t>(100 + 5 * i);
      const auto stripes = [&](int x, int y) {
        return (x + y) / 8 % 2 == 0 ? Colour{level, 0, 0} : Colour{0, 0, level};
      };
      for (const char* part : {"train", "val"}) {
        Write(std::string(part) + "/plain/" + std::to_string(10 + i) + ".jpg",
              MakeJpeg(size + i, size, {level, level, 0}));
        Write(std::string(part) + "/striped/" + std::to_string(10 + i) + ".jpg", MakeJpeg(size, size + i, stripes));
      }
    }
  }
};

}  // namespace ddp::testing

#endif  // TESTS_SUPPORT_JPEG_FILES_H_
