// SPDX-License-Identifier: Apache-2.0
// Reads JPEG files at the size that a model expects.
#ifndef EXAMPLES_DATA_JPEG_H_
#define EXAMPLES_DATA_JPEG_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"

namespace examples {

// False if the build has no libjpeg-turbo. Decode then fails.
bool HaveJpeg();

// Not thread-safe; each thread has its own.
class JpegDecoder {
 public:
  virtual ~JpegDecoder() = default;

  // Scales the image in `file` so that it covers `height` x `width` pixels, and cuts these out of its middle. Writes
  // red, green and blue planes, or with one channel the brightness. An error names the file. The result is the same
  // on every machine with the same version of libjpeg-turbo.
  virtual absl::Status Decode(const std::string& file, int channels, int height, int width, uint8_t* planes) = 0;
};

std::unique_ptr<JpegDecoder> MakeJpegDecoder();

}  // namespace examples

#endif  // EXAMPLES_DATA_JPEG_H_
